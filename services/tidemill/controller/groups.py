"""All broker groups of the store, each with a task that controls it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

import structlog

from tidemill.common.errors import BrokerGroupNotFound, Overloaded
from tidemill.controller.election.record import GroupRecord
from tidemill.controller.election.swap import StoredRecord
from tidemill.controller.group import BrokerGroupControl
from tidemill.controller.meta_store import MetaStore

if TYPE_CHECKING:
    from tidemill.common.replica_group import ReplicationView

# Groups of one cluster, far more than any cluster has, so that invented names cannot fill memory.
GROUPS_MAX: Final = 1_000
# Groups that one address may found, enough for a cluster on one machine. A hostile client that
# claims to found many groups leaves room for real founders.
FOUNDED_PER_ADDRESS_MAX: Final = 64

log = structlog.get_logger()


@final
class BrokerGroupControls:
    """The controls of all groups, by name."""

    def __init__(
        self,
        store: MetaStore,
        make: Callable[[str], BrokerGroupControl],
        *,
        founds_with: int | None,
    ) -> None:
        """Control the groups of `store`; new ones get `founds_with` as min-in-sync.

        Without `founds_with`, create no groups.
        """
        self.by_name: dict[str, BrokerGroupControl] = {}
        self.changed = asyncio.Condition()  # notified after each new record
        self._store = store
        self._make = make
        self._founds_with = founds_with
        self._founded_from: dict[str, str] = {}  # address of the founder, by group
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Follow the store until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            for group in self.by_name.values():
                self._start(group)
            async for change in self._store.changes():
                if change.stored is None:
                    self._remove(change.group)
                elif (changed := self._find_or_add(change.group)) is not None:
                    changed.note_record(change.stored)
                async with self.changed:
                    self.changed.notify_all()

    async def get_or_create(
        self, name: str, *, is_founder: bool, address: str
    ) -> BrokerGroupControl:
        """Return a group; create it if its founder asks and this controller creates groups.

        Other replicas do not create a group, because a misspelt name would create a group without
        a founder. Raises BrokerGroupNotFound, Overloaded, StoreUnreachable.
        """
        if name not in self.by_name and self._founds_with is not None and is_founder and name:
            self._check_limits(name, address)
            # `create` changes no existing group. A replica that has seen an epoch stops `decide`
            # for a new group.
            record = GroupRecord(min_in_sync=self._founds_with)
            # Count it before the await, during which other founders may ask.
            self._founded_from[name] = address
            if isinstance(await self._store.create(name, record), StoredRecord):
                log.info("broker group created", group=name, min_in_sync=self._founds_with)
        return await self.get(name)

    async def get(self, name: str) -> BrokerGroupControl:
        """Return an existing group. Raises BrokerGroupNotFound, StoreUnreachable."""
        if name in self.by_name:
            return self.by_name[name]
        stored = await self._store.get(name)
        group = self._find_or_add(name) if stored is not None else None
        if group is None:
            remedy = (
                "check the name, or start its replica 0, which creates it"
                if self._founds_with is not None
                else "this controller creates no groups (makes_groups)"
            )
            raise BrokerGroupNotFound(f"broker group {name!r} does not exist; {remedy}")
        assert stored is not None, "only a stored group is added"
        group.note_record(stored)
        return group

    def views(self) -> dict[str, ReplicationView]:
        """Return the views of all groups whose record is known."""
        views = {name: group.view() for name, group in self.by_name.items()}
        return {name: view for name, view in views.items() if view is not None}

    def _check_limits(self, name: str, address: str) -> None:
        """Check the limits before a group is stored: each stored group is controlled."""
        count = sum(one == address for one in self._founded_from.values())
        if count >= FOUNDED_PER_ADDRESS_MAX:
            raise Overloaded(
                f"{address} has founded {count} broker groups, and {FOUNDED_PER_ADDRESS_MAX} are"
                " allowed; forget some of them first"
            )
        if len(self.by_name.keys() | self._founded_from.keys()) >= GROUPS_MAX:
            raise Overloaded(
                f"broker group {name} exceeds the limit of {GROUPS_MAX} groups; forget some first"
            )

    def _find_or_add(self, name: str) -> BrokerGroupControl | None:
        group = self.by_name.get(name)
        if group is None:
            if len(self.by_name) >= GROUPS_MAX:
                log.error("too many broker groups", group=name, limit=GROUPS_MAX)
                return None
            group = self.by_name[name] = self._make(name)
            self._start(group)
        return group

    def _start(self, group: BrokerGroupControl) -> None:
        if self._tasks is not None and group.name not in self._running:
            task = self._tasks.create_task(group.run(), name=f"group {group.name}")
            self._running[group.name] = task

    def _remove(self, name: str) -> None:
        self._founded_from.pop(name, None)
        group = self.by_name.pop(name, None)
        if group is not None:
            group.note_removal()
        task = self._running.pop(name, None)
        if task is not None:
            task.cancel()
