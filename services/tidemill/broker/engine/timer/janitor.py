"""The janitor and the auditor: files that nobody needs, and counts that must be right.

A timer log file goes when the latest slot linked from it is final. When the log is large for what
waits, the oldest file's survivors are linked again, so that it can go after the next flush. A table
file goes when all its timers are final; the newest of those are kept, so that a late cancel is told
what became of its timer.

Invariant: nothing goes by the hand in memory, only by that of a durable checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import final

import numpy as np

from tidemill.broker.engine.layout import timer_record
from tidemill.broker.engine.layout.numbers import TimerId, TopicId
from tidemill.broker.engine.layout.timer_entry import TimerEntry
from tidemill.broker.engine.layout.timer_record import SIZE
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.timer.counts import Counts
from tidemill.broker.engine.timer.flush import Flusher
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.status import TimerState

ROWS_A_SLICE = 8_192  # records looked at as arrays: well under a millisecond
LINKS_A_SLICE = 256
TABLE_FILES_KEPT = 32  # final ones: two million timers, 64 MiB
FIRST_AUDIT_MS = 60_000  # after a start: files may have been damaged meanwhile
LOOK_AGAIN_MS = 1_000
NO_TOPIC = TopicId(0)  # of what is wrong in other counts than those by topic
OVERDUE_S = 60  # a timer that waits so long after the hand passed it was lost by the wheel
RECORDS_A_TIMER_MAX = 3  # of the timer log, beyond two files


@final
class Janitor:
    """What may go, and what must be corrected."""

    def __init__(
        self,
        index: TimerIndex,
        log: CommitLog,
        flusher: Flusher,
        config: TimerConfig,
        *,
        is_caught_up: Callable[[], bool],
        quarantined: Callable[[], Container[int]],
    ) -> None:
        self._index = index
        self._log = log
        self._is_caught_up = is_caught_up  # whether nothing that is due waits to be delivered
        self._quarantined = quarantined
        self._flusher = flusher
        self._config = config
        # Files looked through as a whole: what an earlier life has linked is in none of the counts.
        self._measured: set[int] = set()
        self._compacted: dict[int, int] = {}  # file number -> checkpoint generation at that time
        self._audited_at_ms = 0  # or such that the first audit comes soon after the start
        self._looked_at_ms = 0
        self._passed = 0  # ids that the audit under way has counted
        self._recount = Counts(log, index.table)
        self.drift: Counter[TopicId] = Counter()  # corrections, by topic id

    def find_work(self, now_ms: int) -> Iterator[list[File]] | None:
        """Return the steps of what is to be done now."""
        if not self._audited_at_ms:
            self._audited_at_ms = now_ms - self._config.audit_period_ms + FIRST_AUDIT_MS
        if now_ms - self._looked_at_ms < LOOK_AGAIN_MS:
            return None
        steps = self._find(now_ms)
        if steps is None:
            self._looked_at_ms = now_ms
        return steps

    def _find(self, now_ms: int) -> Iterator[list[File]] | None:
        self._index.link_gathered()
        timer_log = self._index.timer_log
        numbers = timer_log.numbers
        if len(numbers) > 1:
            oldest = numbers[0]
            if oldest not in self._measured:
                return self._measure(oldest)
            if self._index.latest_s[oldest] <= self._flusher.durable_hand_s:
                return self._drop_log_file(oldest)
            if oldest in self._compacted:
                if self._compacted[oldest] < self._flusher.generation:
                    return self._drop_log_file(oldest)
            elif timer_log.size_bytes > self._log_bytes_max():
                return self._compact(oldest, now_ms)
        number = self._find_final_table_file()
        if number is not None:
            return self._index.table.drop_file(number)
        if now_ms - self._audited_at_ms >= self._config.audit_period_ms:
            self._audited_at_ms = now_ms
            return self.audit(now_ms)
        return None

    # ------------------------------------------------------------ timer log

    def _log_bytes_max(self) -> int:
        room = 2 * self._config.timer_log_file_bytes
        return RECORDS_A_TIMER_MAX * SIZE * self._index.pending_count + room

    def _measure(self, number: int) -> Iterator[list[File]]:
        """Find the latest slot that is linked from a file."""
        rows = self._index.timer_log.rows(number)
        latest = 0
        for begin in range(0, len(rows), ROWS_A_SLICE):
            part = rows[begin : begin + ROWS_A_SLICE]
            latest = max(latest, int((part["enqueued"] // 1000 + part["delay"]).max()))
            yield []
        self._index.latest_s[number] = max(latest, self._index.latest_s.get(number, 0))
        self._measured.add(number)

    def _drop_log_file(self, number: int) -> Iterator[list[File]]:
        self._index.latest_s.pop(number, None)
        self._compacted.pop(number, None)
        self._measured.discard(number)
        yield from self._index.timer_log.drop_oldest()

    def _compact(self, number: int, now_ms: int) -> Iterator[list[File]]:
        """Link the survivors of a file again at the end of the log."""
        index = self._index
        rows = index.timer_log.rows(number)
        linked = 0
        for begin in range(0, len(rows), ROWS_A_SLICE):
            part = rows[begin : begin + ROWS_A_SLICE]
            slots = part["enqueued"] // 1000 + part["delay"]
            alive = ((part["magic"] & timer_record.LINKS) != 0) & (slots > index.hand_s)
            for at in np.flatnonzero(alive).tolist():
                timer_id, due_at_ms = int(part["timer_id"][at]), int(part["due"][at])
                entry = index.find_pending(TimerId(timer_id))
                if entry is not None and entry.due_at_ms == due_at_ms:
                    index.relink(
                        TimerId(timer_id),
                        entry,
                        int(part["magic"][at]) & timer_record.LINKS,
                        now_ms,
                        change=0,
                    )
                    linked += 1
                    if linked % LINKS_A_SLICE == 0:
                        yield []
            yield []
        # It may go once a checkpoint of a later moment is durable: that one has the new links.
        self._compacted[number] = self._flusher.generation
        index.event_count += 1

    # ------------------------------------------------------------ table

    def _find_final_table_file(self) -> int | None:
        index = self._index
        final_files = [
            number
            for number in index.table.file_numbers
            if not index.counts.file_live[number]
            and index.table.file_end(number) <= index.next_id
            and index.table.is_flushed(number)
        ]
        return final_files[0] if len(final_files) > TABLE_FILES_KEPT else None

    # ------------------------------------------------------------ audit

    def audit(self, now_ms: int) -> Iterator[list[File]]:
        """Count all pending timers again, and link again what the wheel has lost."""
        index = self._index
        self._passed, self._recount = 0, Counts(self._log, index.table)
        index.follower = self
        for first_id, rows in index.table.page_batches():
            self._recount.add_rows(first_id, rows)
            self._passed = first_id + len(rows)
            if self._is_caught_up():
                self._find_lost(first_id, rows, now_ms)
            yield []
        index.follower = None
        found, known = self._recount, index.counts
        for topic_id in found.pending.keys() | known.pending.keys():
            difference = abs(found.pending[topic_id] - known.pending[topic_id])
            if difference:
                self.drift[topic_id] += difference
        if found.pins != known.pins or found.file_live != known.file_live:
            self.drift[NO_TOPIC] += 1
        index.counts = found

    def _find_lost(self, first_id: int, rows: np.ndarray, now_ms: int) -> None:
        """Link timers again that the hand has passed and nobody holds."""
        index = self._index
        overdue = rows["state"] == TimerState.PENDING
        overdue &= rows["due"] < (index.hand_s - OVERDUE_S) * 1000
        for at in np.flatnonzero(overdue).tolist():
            entry = index.find_pending(TimerId(first_id + at))
            if entry is not None and first_id + at not in self._quarantined():
                index.relink(TimerId(first_id + at), entry, timer_record.SCHEDULE, now_ms)
                self.drift[entry.topic_id] += 1

    def counted(self, timer_id: TimerId, entry: TimerEntry, change: int) -> None:
        """Follow what changes among the ids that the audit has counted already."""
        if timer_id < self._passed:
            self._recount.add(timer_id, entry, change)
