"""A store of group records in memory, with faults. Several stores may share the contents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from enum import Enum, auto

from tidemill.controller.election.leadership import LeaseSeen
from tidemill.controller.election.record import GroupRecord
from tidemill.controller.election.swap import StoredRecord, WriteAttempt
from tidemill.controller.meta_store import (
    RecordChange,
    StoreDamaged,
    StoreUnreachable,
    WriteFailure,
)


class Fault(Enum):
    """The fault of a swap."""

    LOST_ANSWER = auto()  # The swap is done, but its answer is lost.
    LATE = auto()  # The swap arrives when `deliver_late` is called.
    UNREACHABLE = auto()


class Contents:
    """The stored records and leases."""

    def __init__(self) -> None:
        self.records: dict[str, StoredRecord] = {}
        self.leases: dict[str, LeaseSeen] = {}
        self.changed = asyncio.Condition()
        self.token = 0


class MemoryStore:
    """The store of one controller."""

    has_specs = False

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.faults: list[Fault] = []  # of the next swaps, in order
        self.is_unreachable = self.is_damaged = False
        self.answers_reads = asyncio.Event()  # Until then, the answers of reads are in flight.
        self.answers_reads.set()
        self.late: list[tuple[str, WriteAttempt]] = []

    async def get(self, group: str) -> StoredRecord | None:
        self._check_reachable()
        found = self.contents.records.get(group)
        await self.answers_reads.wait()
        return found

    async def create(self, group: str, record: GroupRecord) -> StoredRecord | WriteFailure:
        self._check_reachable()
        if group in self.contents.records:
            return WriteFailure.CONFLICT
        return await self._put(group, record)

    async def swap(self, group: str, attempt: WriteAttempt) -> StoredRecord | WriteFailure:
        self._check_reachable()
        fault = self.faults.pop(0) if self.faults else None
        if fault is Fault.UNREACHABLE:
            raise StoreUnreachable("as the test wants it")
        if fault is Fault.LATE:
            self.late.append((group, attempt))
            return WriteFailure.UNKNOWN
        result = await self._swap(group, attempt)
        return WriteFailure.UNKNOWN if fault is Fault.LOST_ANSWER else result

    async def deliver_late(self) -> list[StoredRecord | WriteFailure]:
        """Let late swaps arrive."""
        late, self.late = self.late, []
        return [await self._swap(*each) for each in late]

    async def _swap(self, group: str, attempt: WriteAttempt) -> StoredRecord | WriteFailure:
        found = self.contents.records.get(group)
        if found is None or found.token != attempt.base.token:
            return WriteFailure.CONFLICT
        return await self._put(group, attempt.record)

    async def _put(self, group: str, record: GroupRecord) -> StoredRecord:
        self.contents.token += 1
        stored = self.contents.records[group] = StoredRecord(record, str(self.contents.token))
        async with self.contents.changed:
            self.contents.changed.notify_all()
        return stored

    async def remove(self, group: str, token: str) -> WriteFailure | None:
        self._check_reachable()
        found = self.contents.records.get(group)
        if found is None or found.token != token:
            return WriteFailure.CONFLICT
        del self.contents.records[group]
        async with self.contents.changed:
            self.contents.changed.notify_all()
        return None

    async def groups(self) -> list[str]:
        self._check_reachable()
        return sorted(self.contents.records)

    async def changes(self) -> AsyncGenerator[RecordChange, None]:
        sent: dict[str, StoredRecord] = {}
        while True:
            for group in [name for name in sent if name not in self.contents.records]:
                del sent[group]
                yield RecordChange(group, None)
            for group, stored in list(self.contents.records.items()):
                if sent.get(group) != stored:
                    sent[group] = stored
                    yield RecordChange(group, stored)
            async with self.contents.changed:
                await self.contents.changed.wait_for(lambda: sent != self.contents.records)

    async def read_lease(self, name: str) -> LeaseSeen | None:
        self._check_reachable()
        return self.contents.leases.get(name)

    async def write_lease(
        self, name: str, seen: LeaseSeen | None, holder: str
    ) -> LeaseSeen | WriteFailure:
        self._check_reachable()
        if self.contents.leases.get(name) != seen:
            return WriteFailure.CONFLICT
        written = LeaseSeen(holder, 1 if seen is None else seen.renewals + 1)
        self.contents.leases[name] = written
        return written

    def _check_reachable(self) -> None:
        if self.is_damaged:
            raise StoreDamaged("the record of the test is damaged")
        if self.is_unreachable:
            raise StoreUnreachable("as the test wants it")
