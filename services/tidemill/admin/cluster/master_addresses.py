"""Where the master of each broker group is, as the controllers tell: for connections to brokers.

An address that somebody has written down, of any replica and also an old one, means its broker
group; while no controller is there the last word counts, and without controllers the address
itself.
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

LOOK_PERIOD_S: Final = 0.5  # an operator waits as long, once in a failover
# A controller that lags knows more in seconds; where the records were lost or restored it does not.
OLDER_LOOKS_MAX: Final = 10
ADDRESSES_MAX: Final = 4_096  # of replicas, also where they have been: then all are learned anew

log = structlog.get_logger()


@final
class MasterAddresses:
    """What controllers have told."""

    def __init__(self, controllers: ControllerClients) -> None:
        self._controllers = controllers
        self._groups: dict[str, str] = {}  # by the address of a replica
        self._masters: dict[str, tuple[int, str]] = {}  # version and address, by group
        self._older: Counter[str] = Counter()  # how often in turn an older version was said
        self._listeners: defaultdict[str, set[Callable[[], None]]] = defaultdict(set)

    @property
    def are_told(self) -> bool:
        """Whether there are controllers, and so replicas of which another may lead."""
        return self._controllers.are_there

    def find(self, address: str) -> str:
        """Return whom to connect to for the broker group that has a replica at `address`."""
        return self._masters.get(self._groups.get(address, ""), (0, address))[1]

    def listen(self, address: str, moved: Callable[[], None]) -> None:
        """Call `moved` when another replica is to be connected to."""
        self._listeners[address].add(moved)

    def leave(self, address: str, moved: Callable[[], None]) -> None:
        """Call it no more."""
        self._listeners[address].discard(moved)

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Ask controllers, where there are any, until the block ends."""
        if not self._controllers.are_there:
            yield
            return
        await self._look()
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(self._look_again(), name="masters")
            yield
            looking.cancel()

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            await self._look()

    async def _look(self) -> None:
        try:
            groups = await self._controllers.groups()
        except ServiceError as error:
            log.debug("no controller answers", reason=error.message)
            return
        for group in groups:
            self.learn(group)

    def learn(self, group: wire.Group) -> None:
        """Take what a controller says of a group."""
        view = group.view
        if not view.HasField("master") or not self._counts(group.name, view.version):
            return
        before = {address: self.find(address) for address in self._listeners}
        if len(self._groups) > ADDRESSES_MAX:
            self._groups.clear()
        for address in view.addresses.values():
            self._groups[address] = group.name
        self._masters[group.name] = view.version, view.addresses[view.master.replica_id]
        # Also who listens to an address that has just come to mean this group.
        for address, known in before.items():
            if self.find(address) != known:
                for moved in list(self._listeners[address]):
                    moved()

    def _counts(self, name: str, version: int) -> bool:
        """Whether a version is news; an old one is, if nothing else is said for long."""
        known = self._masters.get(name)
        if known is None or version > known[0]:
            self._older.pop(name, None)
            return True
        if version == known[0]:
            self._older.pop(name, None)
            return False
        self._older[name] += 1
        if self._older[name] < OLDER_LOOKS_MAX:
            return False
        self._older.pop(name)
        return True
