"""Search by time: the first message of each queue that was stored at or after a time.

Store times rise within a process. If a start finds the clock set back, the catalog notes its log
offset (`Catalog.falls`). Each part of the log between two such offsets is searched separately, the
oldest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.store.log_times import NEVER_MS, bounds_of_time
from tidemill.common.errors import Repairing

QUEUES_A_STEP = 16  # each reads a block or two and a few records


@dataclass(slots=True)
class _LogRange:
    """A range of the log with rising store times, and the bounds found in it so far."""

    low: LogOffset
    high: LogOffset
    end: LogOffset


@final
class TimeSearch:
    """One search: call `step` until it returns False, then read `offsets`."""

    def __init__(
        self,
        store: MessageStore,
        queues: Sequence[ConsumeQueue],
        time_ms: int,
        *,
        falls: Sequence[int] = (),
    ) -> None:
        self._store = store
        self._queues = deque(queues)
        self._time_ms = time_ms
        # Records before `low` were stored before the time. Records from `high` on were not.
        low, high = bounds_of_time(store.log, time_ms)
        end = bounds_of_time(store.log, NEVER_MS)[1]
        bounds = [one for one in falls if store.log.min_offset < one < end]
        self._ranges = [_LogRange(low, high, end)]
        if bounds:
            begins = [store.log.min_offset, *map(LogOffset, bounds)]
            ends = [*begins[1:], end]
            self._ranges = [_LogRange(*each) for each in zip(begins, ends, ends, strict=True)]
        # Per queue: the offset of the first message that was stored at or after the time.
        self.offsets: list[int] = []

    def step(self) -> bool:
        """Search one slice; return whether queues remain. Raises Repairing."""
        try:
            for _ in range(min(QUEUES_A_STEP, len(self._queues))):
                self.offsets.append(self._find(self._queues.popleft()))
        except BlockFileDamaged as error:
            raise Repairing from error
        return bool(self._queues)

    def _find(self, queue: ConsumeQueue) -> int:
        """Return the first offset that matches, or the end of the queue."""
        low = 0
        for log_range in self._ranges:
            low = self._bisect(queue, log_range)
            if low < queue.offset_behind(log_range.end):
                break
        return low

    def _bisect(self, queue: ConsumeQueue, log_range: _LogRange) -> int:
        """Bisect a queue. Its result narrows `log_range`, which saves reads for the next queues."""
        low, high = queue.offset_behind(log_range.low), queue.offset_behind(log_range.high)
        while low < high:
            middle = (low + high) // 2
            log_offset, stored_at_ms = self._store.stored_at(queue, middle)
            if stored_at_ms < self._time_ms:
                low, log_range.low = middle + 1, LogOffset(log_offset + 1)
            else:
                high, log_range.high = middle, log_offset
        return low
