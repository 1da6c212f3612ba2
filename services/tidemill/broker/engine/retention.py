"""Retention: the oldest segment goes when it has served its time.

State that only it states is stated again, that is made durable, and only then the segment goes. So
the log from its minimum offset rebuilds everything, at any time.
"""

from __future__ import annotations

from typing import final

import numpy as np

from tidemill.broker.engine.checkpoint import (
    PROGRESS_A_SECTION,
    QUEUES_FOLDER,
    Checkpoints,
    Quiet,
    Steps,
)
from tidemill.broker.engine.fold import Fold
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.state import (
    StatedConfig,
    StatedDeliveries,
    StatedProgress,
    StatedQueues,
)
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.pop.acks import RoundAcks
from tidemill.broker.engine.pop.delivery_table import FREE
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.store.disk import Disk, drop_file
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.timers import Timers

DELIVERIES_A_STATE_RECORD = 1024


@final
class Retention:
    """Which segment has to go, and letting it go."""

    def __init__(
        self,
        disk: Disk,
        store: MessageStore,
        catalog: Catalog,
        pops: PopState,
        acks: RoundAcks,
        timer_index: TimerIndex,
        fold: Fold,
        checkpoints: Checkpoints,
        quiet: Quiet,
        *,
        retention_ms: int,
        retention_bytes: int,
    ) -> None:
        self._disk = disk
        self._store = store
        self._log = store.log
        self._catalog = catalog
        self._pops = pops
        self._acks = acks
        self._timer_index = timer_index
        self._fold = fold
        self._checkpoints = checkpoints
        self._quiet = quiet
        self._retention_ms = retention_ms
        self._retention_bytes = retention_bytes
        self.expired_count = 0  # messages that retention took since the start

    def is_near(self, now_ms: int, lead_ms: int) -> bool:
        """Whether the oldest segment will have to go within `lead_ms`, timers aside."""
        log = self._log
        if len(log.segments) < 2 or log.committed_offset <= log.segments[1].start:
            return False
        # What follows it was stored at that time, so everything in it is at least as old.
        if log.first_stored_at_ms(1) + self._retention_ms - lead_ms <= now_ms:
            return True
        # Messages that wait for their time are not what a limit by size is there to bound.
        size = log.log_end - log.min_offset - self._timer_index.pinned_bytes
        return 0 < self._retention_bytes < size

    def is_due(self, now_ms: int, timers: Timers) -> bool:
        """Whether the oldest segment has served its time and all it states is in a checkpoint."""
        segments = self._log.segments
        if len(segments) < 2 or segments[0].end > self._store.derived_offset:
            return False
        return self.is_near(now_ms, 0) and timers.may_drop(segments[0])

    def retire_oldest(self, now_ms: int) -> Steps:
        """State again what only the oldest segment states, then give it up."""
        end = self._log.segments[0].end
        yield from self._restate(end, now_ms)
        yield from self._quiet()
        for queue in list(self._catalog.queues.values()):
            try:
                self.expired_count += queue.drop_before(end)
            except BlockFileDamaged:
                return  # It is repaired first; what was done up to here may be done again.
            yield []
        gone = {file.name for file in self._store.index.drop_before(end)}
        # First, so that a start can tell a segment that was dropped from one that is missing.
        yield from self._checkpoints.write_file(self._store.derived_offset, min_offset=end)
        yield from self._log.drop_oldest()
        for name in self._disk.names(QUEUES_FOLDER):
            if name[-1].isdigit() and int(name.rpartition("-")[2]) <= end:
                gone.add(name)
        for name in sorted(gone):
            yield from drop_file(self._disk, name)

    def _restate(self, end: int, now_ms: int) -> Steps:
        """Record all live state that is only stated before log offset `end`."""
        catalog, fold = self._catalog, self._fold
        for key in catalog.stated_before(LogOffset(end)):
            # Between two slices it may have been changed or deleted: that must not be undone.
            item = catalog.find_stated_before(key, LogOffset(end))
            if item is not None:
                fold.append(StatedConfig(item), now_ms)
            yield []
        queues = [queue for queue in catalog.queues.values() if queue.stated_at < end]
        if queues:
            ends = [(queue.topic_id, queue.queue_id, queue.max_offset) for queue in queues]
            fold.append(StatedQueues(ends), now_ms)
        yield []
        keys = [key for key, progress in self._pops.progress.items() if progress.stated_at < end]
        for first in range(0, len(keys), PROGRESS_A_SECTION):
            chunk = keys[first : first + PROGRESS_A_SECTION]
            # Acks that are not in the log yet must come before what already knows them.
            self._acks.record(now_ms)
            found = [self._pops.progress.get(key) for key in chunk]
            rows = [p.as_row() for p in found if p is not None and p.stated_at < end]
            if rows:
                fold.append(StatedProgress(rows), now_ms)
            yield []
        yield from self._restate_deliveries(end, now_ms)

    def _restate_deliveries(self, end: int, now_ms: int) -> Steps:
        table = self._pops.table
        for first, last in self._pops.slices():
            self._acks.record(now_ms)
            stated = np.frombuffer(table.stated_at, dtype=np.int64)[first:last]
            ids = np.frombuffer(table.ids, dtype=np.int64)[first:last]
            slots = np.flatnonzero((ids != FREE) & (stated < end)) + first
            del stated, ids
            for begin in range(0, len(slots), DELIVERIES_A_STATE_RECORD):
                chunk = slots[begin : begin + DELIVERIES_A_STATE_RECORD]
                self._fold.append(StatedDeliveries(self._pops.rows_of(chunk)), now_ms)
            yield []
