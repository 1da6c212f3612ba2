"""Reads and compare-and-swap writes of one group's record.

One task at a time writes in this controller. Other controllers write too; the compare-and-swap
detects their writes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, assert_never, final

from tidemill.controller.election.record import GroupRecord
from tidemill.controller.election.swap import (
    StoredRecord,
    WriteAttempt,
    WriteOutcome,
    attempt_no_change,
    attempt_write,
    outcome_of,
)
from tidemill.controller.meta_store import MetaStore, StoreUnreachable, WriteFailure

if TYPE_CHECKING:
    from tidemill.controller.metrics import ControllerMetrics

RESOLVE_TRIES_MAX: Final = 5  # reads to find the outcome of a swap whose answer was lost
WRITE_ID_BYTES: Final = 8


@final
class RecordWriter:
    """The record of one group in the store. Callers hold `lock` from the read to the write."""

    def __init__(
        self,
        group: str,
        store: MetaStore,
        metrics: ControllerMetrics,
        note_record: Callable[[StoredRecord], None],
    ) -> None:
        """Pass each record that is read or written to `note_record`."""
        self.lock = asyncio.Lock()
        self._group = group
        self._store = store
        self._metrics = metrics
        self._note_record = note_record

    async def find(self) -> StoredRecord | None:
        """Read the record; None: the store has no such group. Raises StoreUnreachable."""
        stored = await self._store.get(self._group)
        if stored is not None:
            self._note_record(stored)
        return stored

    async def read(self) -> StoredRecord:
        """Read the record before a write. Raises StoreUnreachable, also if there is none."""
        stored = await self._metrics.time_call("get", self._store.get(self._group))
        if stored is None:
            raise StoreUnreachable(f"the store has no group {self._group}")
        self._note_record(stored)
        return stored

    async def swap(self, base: StoredRecord, record: GroupRecord) -> bool:
        """Replace `base`; return whether that happened. Raises StoreUnreachable if unknown."""
        attempt = attempt_write(base, record, secrets.token_hex(WRITE_ID_BYTES))
        result = await self._metrics.time_call("swap", self._store.swap(self._group, attempt))
        match result:
            case StoredRecord():
                self._note_record(result)
                return True
            case WriteFailure.CONFLICT:
                return False
            case WriteFailure.UNKNOWN:
                return await self._find_outcome(attempt)
            case _:
                assert_never(result)

    async def remove(self, stored: StoredRecord) -> bool:
        """Remove the group; return False if its record has changed. Raises StoreUnreachable."""
        return await self._store.remove(self._group, stored.token) is None

    async def _find_outcome(self, attempt: WriteAttempt) -> bool:
        """Return whether a write was done, before anything else is decided (F-29)."""
        for _ in range(RESOLVE_TRIES_MAX):
            stored = await self.read()
            match outcome_of(attempt, stored):
                case WriteOutcome.APPLIED:
                    return True
                case WriteOutcome.OVERTAKEN:
                    return False
                case WriteOutcome.PENDING:
                    # A write without a change, from the same version, prevents the late write.
                    end = attempt_no_change(stored, secrets.token_hex(WRITE_ID_BYTES))
                    result = await self._store.swap(self._group, end)
                    if isinstance(result, StoredRecord):
                        self._note_record(result)
                        return False
        raise StoreUnreachable(
            f"the outcome of a write is still unknown after {RESOLVE_TRIES_MAX} reads"
        )
