"""The janitor: deletes files that are not needed, and starts audits.

It deletes a timer log file when the latest slot linked from it is final. If the timer log is large
compared to the number of pending timers, the janitor links the live timers of its oldest file
again, and deletes the file after the next flush. It deletes a table file when all its timers are
final. The newest of these files stay, so that a late cancel still gets the outcome of its timer.

Invariant: the hand of a durable checkpoint decides about deletion, never the hand in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np

from tidemill.broker.engine.layout import timer_record
from tidemill.broker.engine.layout.numbers import TimerId
from tidemill.broker.engine.layout.timer_record import SIZE
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.timer.audit import TimerAudit
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.timer.flush import Flusher
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.timer_log import TimerLogDamaged

ROWS_A_SLICE = 8_192  # records, as arrays: well under a millisecond
LINKS_A_SLICE = 256
TABLE_FILES_KEPT = 32  # final ones: two million timers, 64 MiB
FIRST_AUDIT_MS = 60_000  # after a start, because files may have been damaged before it
LOOK_AGAIN_MS = 1_000
RECORDS_A_TIMER_MAX = 3  # records of the timer log per pending timer, plus two files


@final
class Janitor:
    """The deletion of timer files, and the schedule of audits."""

    def __init__(
        self, index: TimerIndex, flusher: Flusher, config: TimerConfig, audit: TimerAudit
    ) -> None:
        self._index = index
        self.audit = audit
        self._flusher = flusher
        self._config = config
        # Files that were read completely, because `latest_s` lacks links of earlier processes.
        self._measured: set[int] = set()
        self._compacted: dict[int, int] = {}  # checkpoint generation by file number
        self._audited_at_ms = 0  # chosen such that the first audit comes soon after the start
        self._looked_at_ms = 0

    def find_work(self, now_ms: int) -> Iterator[list[File]] | None:
        """Return the steps of the due work, None if none is due."""
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
        timer_log = self._index.links.timer_log
        numbers = timer_log.numbers
        if len(numbers) > 1:
            oldest = numbers[0]
            if oldest not in self._measured:
                return self._measure(oldest)
            if self._index.links.latest_s[oldest] <= self._flusher.durable_hand_s:
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
            return self.audit.run(now_ms)
        return None

    # ------------------------------------------------------------ timer log

    def _log_bytes_max(self) -> int:
        room = 2 * self._config.timer_log_file_bytes
        return RECORDS_A_TIMER_MAX * SIZE * self._index.pending_count + room

    def _measure(self, number: int) -> Iterator[list[File]]:
        """Find the latest slot linked from a file."""
        latest = 0
        for part in self._parts(number):
            latest = max(latest, int((part["enqueued"] // 1000 + part["delay"]).max()))
            yield []
        if self._index.links.is_damaged:
            return
        self._index.links.latest_s[number] = max(latest, self._index.links.latest_s.get(number, 0))
        self._measured.add(number)

    def _parts(self, number: int) -> Iterator[np.ndarray]:
        """Yield the records of a file. If they cannot be read, request a rebuild of all links."""
        try:
            yield from self._index.links.timer_log.batches(number, count=ROWS_A_SLICE)
        except TimerLogDamaged:
            self._index.links.is_damaged = True  # All links will be rebuilt from the table.

    def _drop_log_file(self, number: int) -> Iterator[list[File]]:
        self._index.links.latest_s.pop(number, None)
        self._compacted.pop(number, None)
        self._measured.discard(number)
        yield from self._index.links.timer_log.drop_oldest()

    def _compact(self, number: int, now_ms: int) -> Iterator[list[File]]:
        """Link the live timers of a file again at the end of the timer log."""
        index = self._index
        linked = 0
        for part in self._parts(number):
            slots = part["enqueued"] // 1000 + part["delay"]
            alive = ((part["magic"] & timer_record.LINKS) != 0) & (slots > index.links.hand_s)
            for at in np.flatnonzero(alive).tolist():
                timer_id, due_at_ms = int(part["timer_id"][at]), int(part["due"][at])
                entry = index.find_pending(TimerId(timer_id))
                if entry is not None and entry.due_at_ms == due_at_ms:
                    index.links.relink(
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
        if index.links.is_damaged:
            return
        # It may be deleted when a later checkpoint is durable, which has the new links.
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
