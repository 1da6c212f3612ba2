"""The counts of pending timers: by topic, by segment of the log and by file of the table.

Transitions change them. A start and an audit count all entries. Retention and the deletion of table
files depend on these counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import final

import numpy as np

from tidemill.broker.engine.layout.numbers import LogOffset, TimerId, TopicId
from tidemill.broker.engine.layout.timer_entry import TimerEntry
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.timer.status import TimerState
from tidemill.broker.engine.timer.table import TimerTable


@final
class TimerCounts:
    """The numbers of pending timers, and the bytes and files that they pin."""

    def __init__(self, log: CommitLog, table: TimerTable) -> None:
        self._log = log
        self._table = table
        self.pending: Counter[TopicId] = Counter()  # by topic id
        self.pending_bytes: Counter[TopicId] = Counter()  # of their messages, by topic id
        self.pending_count = 0
        self.pinned_bytes = 0
        self.pins: Counter[int] = Counter()  # by the segment of the newest copy of the message
        self.file_live: Counter[int] = Counter()  # by table file

    def add(self, timer_id: TimerId, entry: TimerEntry, change: int) -> None:
        """Add a pending timer (1), or remove it (-1)."""
        self.pending[entry.topic_id] += change
        self.pending_bytes[entry.topic_id] += change * entry.size
        self.pending_count += change
        self.pinned_bytes += change * entry.size
        self.pins[self._log.segment_start(entry.log_offset)] += change
        self.file_live[self._table.file_number(timer_id)] += change

    def add_new(self, first_id: TimerId, entries: Sequence[TimerEntry]) -> None:
        """Add pending timers with consecutive ids."""
        self.pending_count += len(entries)
        starts: Counter[int] = Counter()
        for entry in entries:
            self.pending[entry.topic_id] += 1
            self.pending_bytes[entry.topic_id] += entry.size
            self.pinned_bytes += entry.size
        first, last = entries[0].log_offset, entries[-1].log_offset
        if self._log.segment_start(first) == self._log.segment_start(last):
            starts[self._log.segment_start(first)] = len(entries)
        else:
            starts.update(self._log.segment_start(entry.log_offset) for entry in entries)
        self.pins.update(starts)
        self.file_live.update(
            self._table.file_number(TimerId(first_id + n)) for n in range(len(entries))
        )

    def add_rows(self, first_id: int, rows: np.ndarray) -> None:
        """Add the pending timers among entries of one file."""
        pending = rows[rows["state"] == TimerState.PENDING]
        if not len(pending):
            return
        self.pending_count += len(pending)
        self.pinned_bytes += int(pending["size"].sum(dtype=np.int64))
        self.file_live[self._table.file_number(TimerId(first_id))] += len(pending)
        topics, positions, counts = np.unique(
            pending["topic_id"], return_inverse=True, return_counts=True
        )
        # Floats are exact up to 2**53, and a page has at most 2**20 sizes of 32 bits.
        sizes = np.bincount(positions, weights=pending["size"])
        for topic_id, count, size in zip(
            topics.tolist(), counts.tolist(), sizes.tolist(), strict=True
        ):
            self.pending[topic_id] += count
            self.pending_bytes[topic_id] += int(size)
        starts = np.array([s.start for s in self._log.segments] or [LogOffset(0)], dtype=np.int64)
        indexes = np.searchsorted(starts, pending["log_offset"].astype(np.int64), side="right") - 1
        for segment, count in enumerate(np.bincount(np.maximum(indexes, 0)).tolist()):
            if count:
                self.pins[int(starts[segment])] += count
