"""The census: a periodic count of pending timers by due time, over the whole table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np

from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.tally import Tally
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.status import TimerState

# Upper edges in seconds from now: those of RocketMQ, then 7 days, 30 days and 400 days.
BOUNDS_S = (5, 60, 300, 900, 3600, 14_400, 28_800, 86_400, 604_800, 2_592_000, 34_560_000)
PEAK_WINDOWS_S = (60, 300, 3600)
SLOTS_A_SLICE = 16_384  # half a millisecond: one cache line of memory each
PERIOD_MS = 15_000
TIMERS_A_PERIOD = 1_000_000  # more timers make the period longer: a million cost 40 ms


@final
class Census:
    """The last complete count, and the current one."""

    def __init__(self, index: TimerIndex, tally: Tally) -> None:
        self._index = index
        self._tally = tally
        self._begun_at_ms = 0
        self.due_within = [0] * len(BOUNDS_S)  # by bucket, not cumulative
        self.peaks = [0] * len(PEAK_WINDOWS_S)  # the fullest second of each window
        self.slots_used = 0

    def is_due(self, now_ms: int) -> bool:
        """Return whether another count is due."""
        periods = 1 + self._index.next_id // TIMERS_A_PERIOD
        return now_ms - self._begun_at_ms >= PERIOD_MS * periods

    def take(self, now_ms: int) -> Iterator[list[File]]:
        """Count in slices of one page of the table."""
        self._begun_at_ms = now_ms
        index = self._index
        edges = now_ms + np.array(BOUNDS_S, dtype=np.int64) * 1000
        counts = np.zeros(len(BOUNDS_S) + 1, dtype=np.int64)
        for number in index.table.live_page_numbers(dict(index.counts.file_live)):
            rows = index.table.rows(number)
            self._tally.add(len(rows))
            due = rows["due"][rows["state"] == TimerState.PENDING].astype(np.int64)
            buckets = np.searchsorted(edges, due, side="left")
            counts += np.bincount(buckets, minlength=len(counts))
            yield []
        self.due_within = counts[:-1].tolist()
        now_s = now_ms // 1000
        self.peaks = [index.links.wheel.peak(now_s, now_s + window) for window in PEAK_WINDOWS_S]
        yield []
        slots_used = 0
        for first_s in range(index.links.hand_s + 1, index.links.ring_end_s, SLOTS_A_SLICE):
            end_s = min(first_s + SLOTS_A_SLICE, index.links.ring_end_s)
            self._tally.add(end_s - first_s)
            slots_used += index.links.wheel.filled_count(first_s, end_s)
            yield []
        self.slots_used = slots_used
