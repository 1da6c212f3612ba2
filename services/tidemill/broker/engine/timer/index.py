"""Stage I, index (the reference's enqueue-get and enqueue-put): transitions into table and wheel.

The one place where timers change. Each `apply_` method applies one entry of the log, live and in a
replay, where files may know it already: it is harmless to apply one twice, in the order of the log.
Counts are derived from the transitions and from nothing else.

Invariant: a pending timer is linked in a slot after the hand, with the due time that the table
has, or is loaded, or is quarantined.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Protocol, final

import numpy as np

from tidemill.broker.engine.layout import timer_entry, timer_record, timer_slot
from tidemill.broker.engine.layout.message import TimerCause, TimerReason, TimerTarget
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, TimerId, TopicId
from tidemill.broker.engine.layout.timer_control import Frontier, TimerControl, TimerOperation
from tidemill.broker.engine.layout.timer_entry import TimerEntry, TimerEntryDamaged
from tidemill.broker.engine.layout.timer_record import NO_POSITION, SIZE
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.disk import Disk
from tidemill.broker.engine.store.mappings import Mappings
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.timer.counts import TimerCounts
from tidemill.broker.engine.timer.status import SCHEDULE_QUEUE, TimerState
from tidemill.broker.engine.timer.table import TimerTable
from tidemill.broker.engine.timer.timer_log import TimerLog, TimerLogDamaged
from tidemill.broker.engine.timer.wheel import TimerWheel

# The ring ends a little earlier than a revolution, so that a slot is never reused while it is read.
RING_RESERVE_S = 60
ROWS_MIN = 64  # fewer are linked one by one: as arrays they cost 250 us, however few
GATHERED_MAX = 1_024  # linked in about a millisecond
_NEVER_MS = 1 << 62
_PENDING = TimerState.PENDING.value  # packing an enum costs more than the rest of an entry
Arrival = Callable[[int, TimerId, TopicId, int, int], None]
ArrivedRows = Callable[[int, np.ndarray], None]


class IndexObserver(Protocol):
    """Who follows what changes while it counts, and looks at links, by itself."""

    def counted(self, timer_id: TimerId, entry: TimerEntry, change: int) -> None:
        """Learn that a timer was added to the counts (1), or taken away (-1)."""

    def linked(self, timer_id: TimerId, due_at_ms: int) -> None:
        """Learn that a timer was linked, with this due time."""


@final
class TimerIndex:
    """Table, wheel and timer log as one, and the counts over them."""

    def __init__(
        self, table: TimerTable, wheel: TimerWheel, timer_log: TimerLog, log: CommitLog
    ) -> None:
        self.table = table
        self.wheel = wheel
        self.timer_log = timer_log
        self._log = log
        self.hand_s = 0  # every slot up to this second is final
        self.next_id = 0  # the id behind the highest that was met
        self.is_following = False  # whether another engine delivers, and this one only applies
        self.is_linking = True  # off while wheel and timer log will be made again anyway
        self.is_damaged = False  # wheel or timer log: to be made again from the table
        self.event_count = 0  # transitions so far, to know whether a flush has work
        self.frontier_ms = 0  # of the newest FRONTIER record
        self.frontier_at_ms = 0  # when that was written
        self.frontier_events = 0  # transitions by then
        # Schedules that are not linked: (log offset, size, due time, topic id) of each, in a row;
        # their ids are the last ones before `next_id`.
        self._gathered = array("q")
        self._gathered_bytes = 0
        self._gathered_at_ms = 0
        self._gathered_due_ms = _NEVER_MS  # when the first of them is due
        self.counts = TimerCounts(log, table)
        self.latest_s: dict[int, int] = {}  # by timer log file: its latest slot
        # Told of every timer that is linked: due_at_ms, timer_id, topic_id, size, slot second.
        self.arrived: Arrival = _nobody
        self.arrived_rows: ArrivedRows = _no_rows
        self.follower: IndexObserver | None = (
            None  # told of all that is counted and linked: an audit
        )

    @property
    def ring_end_s(self) -> int:
        """The first second that has no slot of its own."""
        slots = self.wheel.slot_count
        return self.hand_s + slots - min(RING_RESERVE_S, slots // 16)

    @property
    def parking_s(self) -> int:
        """The second in whose slot waits what is due beyond the ring."""
        return self.hand_s + self.wheel.slot_count // 2

    def clear(self) -> None:
        """Begin with nothing: all files are deleted."""
        self.table.clear()
        self.wheel.clear()
        self.timer_log.clear()
        self.hand_s = self.next_id = 0
        self.counts = TimerCounts(self._log, self.table)
        self.latest_s.clear()

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
        """Apply a MESSAGE record that schedules a timer, or is a newer copy of its message."""
        timer_id = target.timer_id
        self.event_count += 1
        if timer_id < self.next_id:
            is_copy = queue_id != SCHEDULE_QUEUE
            self._schedule_again(target, log_offset, size, now_ms, is_copy=is_copy)
            return
        if self._gathered and timer_id != self.next_id:
            self.link_gathered()
        if self.is_following and not self.pending_count:
            # As the engine that delivers does it: where nothing waits the hand is at the present.
            self.hand_s = max(self.hand_s, now_ms // 1000 - 1)
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
        """Apply a schedule that files may know, or a copy."""
        self.link_gathered()
        timer_id = target.timer_id
        entry = self.get(timer_id)
        if entry.state == TimerState.UNUSED:
            self._add(timer_id, _entry(log_offset, size, target.due_at_ms, target.topic_id), now_ms)
            return
        if entry.state != TimerState.PENDING:
            return
        if log_offset > entry.log_offset:
            self.count(timer_id, entry, -1)
            entry = entry._replace(log_offset=log_offset, size=size)
            self.table.put(timer_id, entry)
            self.count(timer_id, entry, 1)
        if not is_copy and entry.due_at_ms == target.due_at_ms:
            # Its link may have been lost with what was not flushed.
            self._link(timer_id, entry, timer_record.SCHEDULE, now_ms)

    def link_gathered(self) -> None:
        """Add the timers that were scheduled since the last call: the many of some rounds at once.

        Invariant: nothing is gathered when a timer, or a count of them, is looked at, and nothing
        that is due within the horizon when slots are loaded.
        """
        if not self._gathered:
            return
        columns = np.frombuffer(self._gathered, np.int64).reshape(-1, 4)
        self._gathered, self._gathered_bytes = array("q"), 0
        self._gathered_due_ms = _NEVER_MS
        first_id, now_ms = self.next_id - len(columns), self._gathered_at_ms
        if len(columns) < ROWS_MIN or self.follower is not None:
            self._link_few(TimerId(first_id), columns.tolist(), now_ms)
            return
        rows = np.zeros(len(columns), timer_entry.DTYPE)
        rows["log_offset"], rows["size"] = columns[:, 0], columns[:, 1]
        rows["due"], rows["topic_id"] = columns[:, 2], columns[:, 3]
        rows["state"] = _PENDING
        for begin, part in self.table.put_rows(first_id, rows):
            self.counts.add_rows(begin, part)
            if self.is_linking:
                self.link_rows(begin, part, now_ms)
                self.arrived_rows(begin, part)

    @property
    def gathered_due_ms(self) -> int | None:
        """When the first of what is gathered is due; None: nothing is."""
        return self._gathered_due_ms if self._gathered else None

    def _link_few(self, first_id: TimerId, scheduled: list[list[int]], now_ms: int) -> None:
        """Add timers one by one; rows of (log offset, size, due time, topic id)."""
        put, link = self.table.put, self._link
        entries = [TimerEntry._make((*fields, _PENDING)) for fields in scheduled]
        self.counts.add_new(first_id, entries)
        for timer_id, entry in enumerate(entries, first_id):
            if self.follower is not None:
                self.follower.counted(TimerId(timer_id), entry, 1)
            put(timer_id, entry)  # type: ignore[arg-type]  # Ids in a row, from the first one on.
            link(timer_id, entry, timer_record.SCHEDULE, now_ms)  # type: ignore[arg-type]  # As above.

    def _add(self, timer_id: TimerId, entry: TimerEntry, now_ms: int) -> None:
        self.table.put(timer_id, entry)
        self.count(timer_id, entry, 1)
        self._link(timer_id, entry, timer_record.SCHEDULE, now_ms)

    def apply_control(self, control: TimerControl, now_ms: int) -> None:
        """Apply a TIMER record."""
        self.link_gathered()
        self.event_count += 1
        timer_id = control.timer_id
        if control.operation == TimerOperation.CANCEL:
            cancelled = self._finish(timer_id, TimerState.CANCELLED)
            if cancelled is not None:
                self._unlink(timer_id, cancelled, timer_record.CANCEL, now_ms)
            return
        entry = self.get(timer_id)
        if entry.state != TimerState.PENDING:
            return
        if entry.due_at_ms == control.due_at_ms:
            self._unlink(timer_id, entry, timer_record.RESCHEDULED_OUT, now_ms)
            entry = entry._replace(due_at_ms=control.new_due_at_ms)
            self.table.put(timer_id, entry)
        if entry.due_at_ms == control.new_due_at_ms:
            self._link(timer_id, entry, timer_record.RESCHEDULED_IN, now_ms)

    def apply_outcome(self, cause: TimerCause) -> None:
        """Apply a MESSAGE record by which a timer was delivered or dropped."""
        if self._gathered:
            self.link_gathered()
        self.event_count += 1
        is_delivered = cause.reason == TimerReason.DELIVERED
        self._finish(cause.timer_id, TimerState.DELIVERED if is_delivered else TimerState.DROPPED)

    def _finish(self, timer_id: TimerId, state: TimerState) -> TimerEntry | None:
        """Settle a timer; return its entry if it was pending until now."""
        entry = self.get(timer_id)
        if entry.state == TimerState.UNUSED:
            # Met without its schedule: that is gone with an old segment, and all it said is this.
            self.next_id = max(self.next_id, timer_id + 1)
            self.table.put(timer_id, entry._replace(state=state))
            return None
        if entry.state != TimerState.PENDING:
            return None
        self.count(timer_id, entry, -1)
        self.table.put(timer_id, entry._replace(state=state))
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
        """Move the hand to where the engine that delivers had it.

        What still waits in the slots that it passes is linked again: timers that were parked there,
        and those that came late for their second. Nobody else looks at them here.
        """
        begin_s, end_s = self.hand_s + 1, min(hand_s + 1, self.hand_s + self.wheel.slot_count)
        passed: list[timer_record.TimerRecord] = []
        try:
            for slot_s in self.wheel.filled(begin_s, end_s) if begin_s < end_s else ():
                passed += self.chain(slot_s)
        except TimerLogDamaged:
            self.is_damaged = True  # All links are made again from the table.
        self.hand_s = max(self.hand_s, hand_s)
        seen: set[int] = set()
        for record in passed:
            entry = self.find_pending(record.timer_id)
            is_its = entry is not None and entry.due_at_ms == record.due_at_ms
            if entry is not None and is_its and record.timer_id not in seen:
                seen.add(record.timer_id)
                self._link(record.timer_id, entry, timer_record.SCHEDULE, now_ms)

    def chain(self, slot_s: int) -> Iterator[timer_record.TimerRecord]:
        """Yield the records of a slot that link a timer, the newest first.

        Raises TimerLogDamaged.
        """
        position = self.wheel.last(slot_s)
        while position >= self.timer_log.begin:
            record = self.timer_log.read(position)
            if record.slot_s != slot_s or record.previous >= position:
                raise TimerLogDamaged(f"the record at {position} is in the chain of {slot_s}")
            if record.magic & timer_record.LINKS:
                yield record
            position = record.previous

    def get(self, timer_id: TimerId) -> TimerEntry:
        """Return a timer's entry. Raises TimerEntryDamaged."""
        return self.table.get(timer_id)

    def find_pending(self, timer_id: TimerId) -> TimerEntry | None:
        """Return the entry of a timer that waits and is intact."""
        try:
            entry = self.table.get(timer_id)
        except TimerEntryDamaged:
            return None
        return entry if entry.state == TimerState.PENDING else None

    # ------------------------------------------------------------ counts

    @property
    def pending_count(self) -> int:
        """How many timers wait."""
        return self.counts.pending_count + len(self._gathered) // 4

    @property
    def pinned_bytes(self) -> int:
        """How many bytes of the log their messages hold."""
        return self.counts.pinned_bytes + self._gathered_bytes

    def count(self, timer_id: TimerId, entry: TimerEntry, change: int) -> None:
        """Add a pending timer to the counts, or take it away."""
        self.counts.add(timer_id, entry, change)
        if self.follower is not None:
            self.follower.counted(timer_id, entry, change)

    def count_rows(self, first_id: int, rows: np.ndarray) -> None:
        """Count the entries from `first_id` on, and note which ids were given out."""
        used = np.flatnonzero(rows["state"])
        if len(used):
            self.next_id = max(self.next_id, first_id + int(used[-1]) + 1)
            self.counts.add_rows(first_id, rows)

    # ------------------------------------------------------------ links

    def wheel_slot_of(self, due_at_ms: int) -> int | None:
        """Return the wheel's slot of a due time; None where its second has none of its own yet."""
        slot_s, parked = self._slot_of(due_at_ms)
        return None if parked else slot_s % self.wheel.slot_count

    def _slot_of(self, due_at_ms: int) -> tuple[int, int]:
        """Return the second of the slot to link at, and PARKED if it is not the due one."""
        due_s = due_at_ms // 1000
        if due_s <= self.hand_s:
            return self.hand_s + 1, 0
        if due_s < self.ring_end_s:
            return due_s, 0
        return self.parking_s, timer_record.PARKED

    def slots_of(self, dues: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what `_slot_of` does, for many: the seconds, and whether each is a parking one."""
        due_s = dues.astype(np.int64) // 1000
        is_parked = due_s >= self.ring_end_s
        slots = np.where(is_parked, self.parking_s, np.maximum(due_s, self.hand_s + 1))
        return slots, is_parked

    def _link(
        self, timer_id: TimerId, entry: TimerEntry, kind: int, now_ms: int, *, change: int = 1
    ) -> None:
        if not self.is_linking:
            return
        slot_s, parked = self._slot_of(entry.due_at_ms)
        self._append(timer_id, entry, kind | parked, slot_s, now_ms, change=change)
        if self.follower is not None:
            self.follower.linked(timer_id, entry.due_at_ms)
        self.arrived(entry.due_at_ms, timer_id, entry.topic_id, entry.size, slot_s)

    def relink(
        self, timer_id: TimerId, entry: TimerEntry, kind: int, now_ms: int, *, change: int = 1
    ) -> None:
        """Link a pending timer once more, as if it had just been scheduled."""
        self._link(timer_id, entry, kind & ~timer_record.PARKED, now_ms, change=change)

    def _unlink(self, timer_id: TimerId, entry: TimerEntry, kind: int, now_ms: int) -> None:
        """Tell the slot that one of its timers is gone; a parked one is only passed over later."""
        slot_s, parked = self._slot_of(entry.due_at_ms)
        if self.is_linking and not parked and slot_s == entry.due_at_ms // 1000:
            self._append(timer_id, entry, kind, slot_s, now_ms, change=-1)

    def _append(
        self,
        timer_id: TimerId,
        entry: TimerEntry,
        kind: int,
        slot_s: int,
        now_ms: int,
        *,
        change: int,
    ) -> None:
        log = self.timer_log
        position = log.end
        previous = self.wheel.link(slot_s, position, change=change)
        log.append(
            timer_record.encode(
                previous,
                kind,
                now_ms,
                slot_s,
                entry.log_offset,
                entry.size,
                entry.topic_id,
                timer_id,
                entry.due_at_ms,
            )
        )
        number = log.file_number(position)
        if slot_s > self.latest_s.get(number, 0):
            self.latest_s[number] = slot_s

    def link_rows(self, first_id: int, rows: np.ndarray, now_ms: int) -> None:
        """Link the pending timers among the entries from `first_id` on, made again from nothing."""
        waiting = np.flatnonzero(rows["state"] == TimerState.PENDING)
        if not len(waiting):
            return
        found = rows[waiting]
        slots, is_parked = self.slots_of(found["due"])
        order = np.argsort(slots, kind="stable")
        found, slots, is_parked = found[order], slots[order], is_parked[order]
        ids = first_id + waiting[order]

        begin = self.timer_log.end
        positions = begin + np.arange(len(found), dtype=np.int64) * SIZE
        firsts = np.flatnonzero(np.diff(slots, prepend=slots[0] - 1))
        lasts = np.append(firsts[1:], len(found)) - 1
        known = self.wheel.rows(slots[firsts])
        previous = positions - SIZE
        previous[firsts] = known["last"]

        records = np.zeros(len(found), timer_record.DTYPE)
        records["size"] = SIZE
        records["prev"] = previous
        kinds = timer_record.SCHEDULE + np.where(is_parked, timer_record.PARKED, 0)
        records["magic"] = (timer_record.VERSION << 24) + kinds
        records["enqueued"] = now_ms
        records["delay"] = slots - now_ms // 1000
        records["offset"] = found["log_offset"]
        records["body_size"] = found["size"]
        records["topic_id"] = found["topic_id"]
        records["timer_id"] = ids
        records["due"] = found["due"]
        self.timer_log.append(records.tobytes())

        wheel_rows = np.zeros(len(firsts), timer_slot.DTYPE)
        wheel_rows["time"] = slots[firsts] * 1000
        is_new = previous[firsts] == NO_POSITION
        wheel_rows["first"] = np.where(is_new, positions[firsts], known["first"])
        wheel_rows["last"] = positions[lasts]
        wheel_rows["num"] = known["num"] + np.diff(np.append(firsts, len(found)))
        self.wheel.place_rows(wheel_rows)
        last_file = self.timer_log.file_number(int(positions[-1]))
        for file in range(self.timer_log.file_number(begin), last_file + 1):
            self.latest_s[file] = max(self.latest_s.get(file, 0), int(slots.max()))


def open_index(disk: Disk, mappings: Mappings, config: TimerConfig, log: CommitLog) -> TimerIndex:
    """Make the index over the timers' files; nothing is read yet."""
    table = TimerTable(
        disk, file_entries=config.table_file_entries, pages_max=config.table_pages_max
    )
    wheel = TimerWheel(disk, slot_count=config.wheel_slots)
    timer_log = TimerLog(disk, mappings, file_bytes=config.timer_log_file_bytes)
    return TimerIndex(table, wheel, timer_log, log)


def _entry(log_offset: LogOffset, size: int, due_at_ms: int, topic_id: TopicId) -> TimerEntry:
    return TimerEntry(log_offset, size, due_at_ms, topic_id, _PENDING)


def _no_rows(_first_id: int, _rows: np.ndarray) -> None:
    pass


def _nobody(_due: int, _timer_id: int, _topic_id: int, _size: int, _slot_s: int) -> None:
    pass
