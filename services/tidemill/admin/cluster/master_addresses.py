"""The address of the master of each broker group, read from the controllers.

The address of any replica, even a former one, stands for its broker group. While no controller
answers, the last known master counts. Without controllers, the address itself is used.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Final, final

import structlog

from tidemill.common.errors import ServiceError

if TYPE_CHECKING:
    from tidemill.admin.cluster.controllers import ControllerClients
    from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire

POLL_PERIOD_S: Final = 0.5  # an operator waits at most so long, once per failover
# A lagging controller catches up within seconds. If it does not, the records were restored.
OLDER_POLLS_MAX: Final = 10
ADDRESSES_MAX: Final = 4_096  # of replicas, former ones included; above it, forget all addresses

log = structlog.get_logger()


@final
class MasterAddresses:
    """The last records of the controllers."""

    def __init__(self, controllers: ControllerClients) -> None:
        self._controllers = controllers
        self._groups: dict[str, str] = {}  # by the address of a replica
        self._masters: dict[str, tuple[int, str]] = {}  # version and address, by group
        self._older: Counter[str] = Counter()  # by group: older versions received in sequence
        self._listeners: defaultdict[str, set[Callable[[], None]]] = defaultdict(set)

    @property
    def has_controllers(self) -> bool:
        """Whether there are controllers, and so replicas that can take over."""
        return self._controllers.are_configured

    def find(self, address: str) -> str:
        """Return the master of the broker group with a replica at `address`."""
        return self._masters.get(self._groups.get(address, ""), (0, address))[1]

    def add_listener(self, address: str, on_move: Callable[[], None]) -> None:
        """Call `on_move` when the master for `address` changes."""
        self._listeners[address].add(on_move)

    def remove_listener(self, address: str, on_move: Callable[[], None]) -> None:
        """Stop the calls of `on_move`."""
        self._listeners[address].discard(on_move)

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Poll the controllers, if there are any, until the block ends."""
        if not self._controllers.are_configured:
            yield
            return
        await self._poll()
        async with asyncio.TaskGroup() as tasks:
            polling = tasks.create_task(self._poll_periodically(), name="masters")
            yield
            polling.cancel()

    async def _poll_periodically(self) -> None:
        while True:
            await asyncio.sleep(POLL_PERIOD_S)
            await self._poll()

    async def _poll(self) -> None:
        try:
            groups = await self._controllers.groups()
        except ServiceError as error:
            log.debug("no controller answers", reason=error.message)
            return
        for group in groups:
            self.learn(group)

    def learn(self, group: wire.BrokerGroupStatus) -> None:
        """Apply the record of a group, and notify the listeners of a moved master."""
        view = group.view
        if not view.HasField("master") or not self._is_news(group.name, view.version):
            return
        before = {address: self.find(address) for address in self._listeners}
        if len(self._groups) > ADDRESSES_MAX:
            self._groups.clear()
        for address in view.addresses.values():
            self._groups[address] = group.name
        self._masters[group.name] = view.version, view.addresses[view.master.replica_id]
        # This includes listeners of an address that has only now become known for this group.
        for address, known in before.items():
            if self.find(address) != known:
                for on_move in list(self._listeners[address]):
                    on_move()

    def _is_news(self, name: str, version: int) -> bool:
        """Whether to apply a version. An older one is applied after several polls in sequence."""
        known = self._masters.get(name)
        if known is None or version > known[0]:
            self._older.pop(name, None)
            return True
        if version == known[0]:
            self._older.pop(name, None)
            return False
        self._older[name] += 1
        if self._older[name] < OLDER_POLLS_MAX:
            return False
        self._older.pop(name)
        return True
