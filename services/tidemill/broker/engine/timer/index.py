"""Stage I, index: the transitions of timers in table, wheel and timer log.

Only this module changes timers, by the table in `transitions.py`. Each `apply_` method applies one
entry of the log. In a replay the files may contain the entry already: applying an entry twice, in
the order of the log, changes nothing. Only transitions change the counts.

Invariant: a pending timer is linked in a slot after the hand with its current due time, or it is
loaded, or it is quarantined.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import final

import numpy as np

from tidemill.broker.engine.layout import timer_entry, timer_record
from tidemill.broker.engine.layout.message import TimerCause, TimerReason, TimerTarget
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, TimerId
from tidemill.broker.engine.layout.timer_control import Frontier, TimerControl, TimerOperation
from tidemill.broker.engine.layout.timer_entry import TimerEntry, TimerEntryDamaged
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.disk import Disk
from tidemill.broker.engine.store.mappings import Mappings
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.timer.counts import TimerCounts
from tidemill.broker.engine.timer.links import TimerLinks
from tidemill.broker.engine.timer.status import SCHEDULE_QUEUE, TimerState
from tidemill.broker.engine.timer.table import TimerTable
from tidemill.broker.engine.timer.timer_log import TimerLog, TimerLogDamaged
from tidemill.broker.engine.timer.transitions import (
    ON_CANCEL,
    ON_DELIVER,
    ON_DROP,
    ON_RESCHEDULE,
    ON_SCHEDULE,
)
from tidemill.broker.engine.timer.wheel import TimerWheel

ROWS_MIN = 64  # fewer timers are linked one by one: arrays cost 250 us, however few there are
GATHERED_MAX = 1_024  # linked in about a millisecond
_NEVER_MS = 1 << 62
_SCHEDULED = ON_SCHEDULE[TimerState.UNUSED].value  # an int: packing an enum is slow


@final
class TimerIndex:
    """The table of timers with their links and counts."""

    def __init__(self, table: TimerTable, links: TimerLinks, log: CommitLog) -> None:
        self.table = table
        self.links = links
        self._log = log
        self.next_id = 0  # one more than the highest known id
        self.is_following = False  # whether another engine delivers and this one only applies
        self.event_count = 0  # transitions so far: a flush compares it to find out if it has work
        self.frontier_ms = 0  # of the newest FRONTIER record
        self.frontier_at_ms = 0  # when that record was written
        self.frontier_events = 0  # transitions by then
        # Schedules that are not linked: (log offset, size, due time, topic id) of each, flat. Their
        # ids are the last ones before `next_id`.
        self._gathered = array("q")
        self._gathered_bytes = 0
        self._gathered_at_ms = 0
        self._gathered_due_ms = _NEVER_MS  # the first due time among them
        self.counts = TimerCounts(log, table)

    def clear(self) -> None:
        """Delete all files and start with nothing."""
        self.table.clear()
        self.links.clear()
        self.links.hand_s = self.next_id = 0
        self.counts = TimerCounts(self._log, self.table)

    # ------------------------------------------------------------ transitions

    def apply_schedule(
        self,
        target: TimerTarget,
        log_offset: LogOffset,
        size: int,
        now_ms: int,
        *,
        queue_id: QueueId,
    ) -> None:
        """Apply a MESSAGE record that schedules a timer or is a newer copy of its message."""
        timer_id = target.timer_id
        self.event_count += 1
        if timer_id < self.next_id:
            is_copy = queue_id != SCHEDULE_QUEUE
            self._schedule_again(target, log_offset, size, now_ms, is_copy=is_copy)
            return
        if self._gathered and timer_id != self.next_id:
            self.link_gathered()
        if self.is_following and not self.pending_count:
            # As in the engine that delivers: without pending timers the hand is at the present.
            self.links.hand_s = max(self.links.hand_s, now_ms // 1000 - 1)
        self._gathered.extend((log_offset, size, target.due_at_ms, target.topic_id))
        self._gathered_bytes += size
        self._gathered_at_ms = now_ms
        if target.due_at_ms < self._gathered_due_ms:
            self._gathered_due_ms = target.due_at_ms
        self.next_id = timer_id + 1
        if len(self._gathered) >= GATHERED_MAX * 4:
            self.link_gathered()

    def _schedule_again(
        self, target: TimerTarget, log_offset: LogOffset, size: int, now_ms: int, *, is_copy: bool
    ) -> None:
        """Apply a schedule that the files may contain already, or a copy."""
        self.link_gathered()
        timer_id = target.timer_id
        entry = self.get(timer_id)
        state = ON_SCHEDULE.get(entry.state)
        if state is None:
            return
        if entry.state == TimerState.UNUSED:
            entry = TimerEntry(log_offset, size, target.due_at_ms, target.topic_id, state)
            self._add(timer_id, entry, now_ms)
            return
        if log_offset > entry.log_offset:
            self.count(timer_id, entry, -1)
            entry = entry._replace(log_offset=log_offset, size=size)
            self.table.put(timer_id, entry)
            self.count(timer_id, entry, 1)
        if not is_copy and entry.due_at_ms == target.due_at_ms:
            # Its link may be lost, if no flush has written it.
            self.links.link(timer_id, entry, timer_record.SCHEDULE, now_ms)

    def apply_replacement(
        self, target: TimerTarget, log_offset: LogOffset, size: int, now_ms: int
    ) -> None:
        """Apply a MESSAGE record that replaces the message of a pending timer and its due time."""
        self.link_gathered()
        self.event_count += 1
        timer_id = target.timer_id
        entry = self.get(timer_id)
        state = ON_SCHEDULE.get(entry.state)
        if state is None:
            return
        new = TimerEntry(log_offset, size, target.due_at_ms, target.topic_id, state)
        if entry.state == TimerState.UNUSED:
            # Its schedule was in a segment that retention has removed.
            self.next_id = max(self.next_id, timer_id + 1)
            self._add(timer_id, new, now_ms)
            return
        if log_offset < entry.log_offset:
            new = new._replace(log_offset=entry.log_offset, size=entry.size)
        # Also in a replay: it may have set the due time of an earlier reschedule, and the link may
        # be lost, if no flush has written it.
        if new != entry:
            self.links.unlink(timer_id, entry, timer_record.RESCHEDULED_OUT, now_ms)
            self.count(timer_id, entry, -1)
            self.table.put(timer_id, new)
            self.count(timer_id, new, 1)
        self.links.link(timer_id, new, timer_record.RESCHEDULED_IN, now_ms)

    def link_gathered(self) -> None:
        """Add the timers scheduled since the last call, many at once.

        Invariant: no timer is gathered when a timer or a count is read. No timer due within the
        horizon is gathered when slots are loaded.
        """
        if not self._gathered:
            return
        columns = np.frombuffer(self._gathered, np.int64).reshape(-1, 4)
        self._gathered, self._gathered_bytes = array("q"), 0
        self._gathered_due_ms = _NEVER_MS
        first_id, now_ms = self.next_id - len(columns), self._gathered_at_ms
        if len(columns) < ROWS_MIN or self.links.observer is not None:
            self._link_few(TimerId(first_id), columns.tolist(), now_ms)
            return
        rows = np.zeros(len(columns), timer_entry.DTYPE)
        rows["log_offset"], rows["size"] = columns[:, 0], columns[:, 1]
        rows["due"], rows["topic_id"] = columns[:, 2], columns[:, 3]
        rows["state"] = _SCHEDULED
        links = self.links
        for begin, part in self.table.put_rows(first_id, rows):
            self.counts.add_rows(begin, part)
            if links.is_linking:
                links.link_rows(begin, part, now_ms)
                links.on_link_rows(begin, part)

    @property
    def gathered_due_ms(self) -> int | None:
        """The first due time among the gathered timers, None if there are none."""
        return self._gathered_due_ms if self._gathered else None

    def _link_few(self, first_id: TimerId, scheduled: list[list[int]], now_ms: int) -> None:
        """Add timers one by one, from rows of (log offset, size, due time, topic id)."""
        put, link, observer = self.table.put, self.links.link, self.links.observer
        entries = [TimerEntry._make((*fields, _SCHEDULED)) for fields in scheduled]
        self.counts.add_new(first_id, entries)
        for timer_id, entry in enumerate(entries, first_id):
            if observer is not None:
                observer.note_count(TimerId(timer_id), entry, 1)
            put(timer_id, entry)  # type: ignore[arg-type]  # Consecutive ids from `first_id` on.
            link(timer_id, entry, timer_record.SCHEDULE, now_ms)  # type: ignore[arg-type]  # As above.

    def _add(self, timer_id: TimerId, entry: TimerEntry, now_ms: int) -> None:
        self.table.put(timer_id, entry)
        self.count(timer_id, entry, 1)
        self.links.link(timer_id, entry, timer_record.SCHEDULE, now_ms)

    def apply_control(self, control: TimerControl, now_ms: int) -> None:
        """Apply a TIMER record."""
        self.link_gathered()
        self.event_count += 1
        timer_id = control.timer_id
        if control.operation == TimerOperation.CANCEL:
            cancelled = self._settle(timer_id, ON_CANCEL)
            if cancelled is not None:
                self.links.unlink(timer_id, cancelled, timer_record.CANCEL, now_ms)
            return
        entry = self.get(timer_id)
        state = ON_RESCHEDULE.get(entry.state)
        if state is None:
            return
        if entry.due_at_ms == control.due_at_ms:
            self.links.unlink(timer_id, entry, timer_record.RESCHEDULED_OUT, now_ms)
            entry = entry._replace(due_at_ms=control.new_due_at_ms, state=state)
            self.table.put(timer_id, entry)
        if entry.due_at_ms == control.new_due_at_ms:
            self.links.link(timer_id, entry, timer_record.RESCHEDULED_IN, now_ms)

    def apply_outcome(self, cause: TimerCause) -> None:
        """Apply a MESSAGE record that delivers or drops a timer."""
        if self._gathered:
            self.link_gathered()
        self.event_count += 1
        is_delivered = cause.reason == TimerReason.DELIVERED
        self._settle(cause.timer_id, ON_DELIVER if is_delivered else ON_DROP)

    def _settle(
        self, timer_id: TimerId, transitions: Mapping[int, TimerState]
    ) -> TimerEntry | None:
        """Move a timer to a final state. Return its entry from before if it was pending."""
        entry = self.get(timer_id)
        state = transitions.get(entry.state)
        if state is None:
            return None
        self.table.put(timer_id, entry._replace(state=state))
        if entry.state == TimerState.UNUSED:
            # Its schedule was in a segment that retention has removed.
            self.next_id = max(self.next_id, timer_id + 1)
            return None
        self.count(timer_id, entry, -1)
        return entry

    def apply_frontier(self, frontier: Frontier, now_ms: int) -> None:
        """Apply a FRONTIER record."""
        self.link_gathered()
        self.frontier_ms = max(self.frontier_ms, frontier.frontier_ms)
        self.frontier_at_ms = now_ms
        self.frontier_events = self.event_count
        if self.is_following:
            self._follow_hand(frontier.frontier_ms // 1000, now_ms)

    def _follow_hand(self, hand_s: int, now_ms: int) -> None:
        """Move the hand to its position in the engine that delivers.

        Timers that are still pending in the passed slots are linked again: they were parked there,
        or they came late for their second. An engine that follows loads no slots.
        """
        links = self.links
        begin_s, end_s = links.hand_s + 1, min(hand_s + 1, links.hand_s + links.wheel.slot_count)
        passed: list[timer_record.TimerRecord] = []
        try:
            for slot_s in links.wheel.filled(begin_s, end_s) if begin_s < end_s else ():
                passed += links.chain(slot_s)
        except TimerLogDamaged:
            links.is_damaged = True  # All links will be rebuilt from the table.
        links.hand_s = max(links.hand_s, hand_s)
        seen: set[int] = set()
        for record in passed:
            entry = self.find_pending(record.timer_id)
            is_current = entry is not None and entry.due_at_ms == record.due_at_ms
            if entry is not None and is_current and record.timer_id not in seen:
                seen.add(record.timer_id)
                links.link(record.timer_id, entry, timer_record.SCHEDULE, now_ms)

    def get(self, timer_id: TimerId) -> TimerEntry:
        """Return a timer's entry. Raises TimerEntryDamaged."""
        return self.table.get(timer_id)

    def topic_of(self, timer_id: TimerId) -> int:
        """Return the topic id of a timer; 0 if it is unknown, or its entry is damaged."""
        self.link_gathered()
        try:
            return self.table.get(timer_id).topic_id
        except TimerEntryDamaged:
            return 0

    def is_settled(self, timer_id: TimerId) -> bool:
        """Whether a timer is known not to be pending; unknown if its entry is damaged."""
        if timer_id >= self.next_id - len(self._gathered) // 4:
            return timer_id >= self.next_id
        try:
            return self.table.get(timer_id).state != TimerState.PENDING
        except TimerEntryDamaged:
            return False

    def find_pending(self, timer_id: TimerId) -> TimerEntry | None:
        """Return the entry of a timer if it is pending and intact."""
        try:
            entry = self.table.get(timer_id)
        except TimerEntryDamaged:
            return None
        return entry if entry.state == TimerState.PENDING else None

    # ------------------------------------------------------------ counts

    @property
    def pending_count(self) -> int:
        """The number of pending timers."""
        return self.counts.pending_count + len(self._gathered) // 4

    @property
    def pinned_bytes(self) -> int:
        """The bytes of the log that their messages pin."""
        return self.counts.pinned_bytes + self._gathered_bytes

    def count(self, timer_id: TimerId, entry: TimerEntry, change: int) -> None:
        """Add a pending timer to the counts (1), or remove it (-1)."""
        self.counts.add(timer_id, entry, change)
        if self.links.observer is not None:
            self.links.observer.note_count(timer_id, entry, change)

    def count_rows(self, first_id: int, rows: np.ndarray) -> None:
        """Count the entries from `first_id` on, and raise `next_id` past them."""
        used = np.flatnonzero(rows["state"])
        if len(used):
            self.next_id = max(self.next_id, first_id + int(used[-1]) + 1)
            self.counts.add_rows(first_id, rows)


def open_index(disk: Disk, mappings: Mappings, config: TimerConfig, log: CommitLog) -> TimerIndex:
    """Return an index over the timers' files. It reads nothing yet."""
    table = TimerTable(
        disk, file_entries=config.table_file_entries, pages_max=config.table_pages_max
    )
    wheel = TimerWheel(disk, slot_count=config.wheel_slots)
    timer_log = TimerLog(disk, mappings, file_bytes=config.timer_log_file_bytes)
    return TimerIndex(table, TimerLinks(wheel, timer_log), log)
