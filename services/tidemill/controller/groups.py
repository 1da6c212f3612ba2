"""All broker groups of the store, each with a task that watches over it."""

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

# Of one cluster: far more than any has, so that names which somebody makes up cannot fill memory.
GROUPS_MAX: Final = 1_000
# Begun from one address, of those that are there: as many as a cluster has, all on one machine. So
# a stranger who says that it is one founder after the other leaves room for those who are.
FOUNDED_PER_ADDRESS_MAX: Final = 64

log = structlog.get_logger()


@final
class BrokerGroupControls:
    """The groups by name."""

    def __init__(
        self,
        store: MetaStore,
        make: Callable[[str], BrokerGroupControl],
        *,
        founds_with: int | None,
    ) -> None:
        """Know the groups of `store`; `founds_with` is the minimum of those that are made here."""
        self.by_name: dict[str, BrokerGroupControl] = {}
        self.changed = asyncio.Condition()  # told after each record that is new
        self._store = store
        self._make = make
        self._founds_with = founds_with
        self._founded_from: dict[str, str] = {}  # from which address a group was begun here
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Follow the store until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            for group in self.by_name.values():
                self._start(group)
            async for change in self._store.watch():
                if change.stored is None:
                    self._forget(change.group)
                elif (known := self._known(change.group)) is not None:
                    known.note_record(change.stored)
                async with self.changed:
                    self.changed.notify_all()

    async def of(self, name: str, *, is_founder: bool, address: str) -> BrokerGroupControl:
        """Return a group; make it where its first replica comes, and that is wanted.

        The others wait for it: a name that is misspelt would make a group that nobody begins.

        Raises BrokerGroupNotFound, Overloaded, StoreUnreachable.
        """
        if name not in self.by_name and self._founds_with is not None and is_founder and name:
            self._check_room(name, address)
            # Of one that is there nothing comes. A replica that has seen an epoch is not fooled by
            # a group that is new: `decide` stops there.
            record = GroupRecord(min_in_sync=self._founds_with)
            # Beforehand: others may come while it is stored.
            self._founded_from[name] = address
            if isinstance(await self._store.create(name, record), StoredRecord):
                log.info("a broker group is made", group=name, min_in_sync=self._founds_with)
        return await self.find(name)

    async def find(self, name: str) -> BrokerGroupControl:
        """Return a group that is there. Raises BrokerGroupNotFound, StoreUnreachable."""
        if name in self.by_name:
            return self.by_name[name]
        stored = await self._store.get(name)
        group = self._known(name) if stored is not None else None
        if group is None:
            may = "its replica 0 begins it" if self._founds_with is not None else "none may be made"
            raise BrokerGroupNotFound(f"there is no broker group {name!r}: {may}")
        assert stored is not None, "only a stored group is known"
        group.note_record(stored)
        return group

    def views(self) -> dict[str, ReplicationView]:
        """Return what is known of each group."""
        found = {name: group.view() for name, group in self.by_name.items()}
        return {name: view for name, view in found.items() if view is not None}

    def _check_room(self, name: str, address: str) -> None:
        """Before it is stored: what is in the store is watched over."""
        count = sum(one == address for one in self._founded_from.values())
        if count >= FOUNDED_PER_ADDRESS_MAX:
            raise Overloaded(f"{count} broker groups were begun from {address} already")
        if len(self.by_name.keys() | self._founded_from.keys()) >= GROUPS_MAX:
            raise Overloaded(f"there are {GROUPS_MAX} broker groups already, and {name} is not one")

    def _known(self, name: str) -> BrokerGroupControl | None:
        group = self.by_name.get(name)
        if group is None:
            if len(self.by_name) >= GROUPS_MAX:
                log.error("there are more broker groups than are watched over", group=name)
                return None
            group = self.by_name[name] = self._make(name)
            self._start(group)
        return group

    def _start(self, group: BrokerGroupControl) -> None:
        if self._tasks is not None and group.name not in self._running:
            task = self._tasks.create_task(group.run(), name=f"group {group.name}")
            self._running[group.name] = task

    def _forget(self, name: str) -> None:
        self._founded_from.pop(name, None)
        group = self.by_name.pop(name, None)
        if group is not None:
            group.note_removal()
        task = self._running.pop(name, None)
        if task is not None:
            task.cancel()
