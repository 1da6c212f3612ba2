"""Stage I, index (the reference's enqueue-get and enqueue-put): transitions into table and wheel.

The one place where timers change, for the live path and for the replay of the log alike. Each
method folds one transition: it is harmless to fold one twice, in the order of the log. Counts are
derived from the transitions and from nothing else.

Invariant: a pending timer is linked in a slot after the hand, with the due time that the table
has, or is loaded, or is quarantined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

import numpy as np

from tidemill.broker.engine.layout import timer_record, timer_slot
from tidemill.broker.engine.layout.timer_entry import EntryDamaged, TimerEntry
from tidemill.broker.engine.layout.timer_record import NO_POSITION, SIZE
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.timer.counts import Counts
from tidemill.broker.engine.timer.status import TimerState
from tidemill.broker.engine.timer.table import TimerTable
from tidemill.broker.engine.timer.timer_log import TimerLog
from tidemill.broker.engine.timer.wheel import Wheel

# The ring ends a little earlier than a revolution, so that a slot is never reused while it is read.
RING_RESERVE_S = 60
_PENDING = TimerState.PENDING.value  # packing an enum costs more than the rest of an entry
Arrival = Callable[[int, int, int, int, int], None]


class Follower(Protocol):
    """Who follows the counts while it makes counts of its own."""

    def counted(self, timer_id: int, entry: TimerEntry, change: int) -> None:
        """Learn that a timer was added to the counts (1), or taken away (-1)."""


@final
class TimerIndex:
    """Table, wheel and timer log as one, and the counts over them."""

    def __init__(
        self, table: TimerTable, wheel: Wheel, timer_log: TimerLog, log: CommitLog
    ) -> None:
        self.table = table
        self.wheel = wheel
        self.timer_log = timer_log
        self._log = log
        self.hand_s = 0  # every slot up to this second is final
        self.next_id = 0  # the id behind the highest that was met
        self.is_linking = True  # off while wheel and timer log will be made again anyway
        self.is_damaged = False  # wheel or timer log: to be made again from the table
        self.event_count = 0  # transitions so far, to know whether a flush has work
        self.counts = Counts(log, table)
        self.latest_s: dict[int, int] = {}  # by timer log file: its latest slot
        # Told of every timer that is linked: due_at_ms, timer_id, topic_id, size, slot second.
        self.arrived: Arrival = _nobody
        self.follower: Follower | None = None  # told of all that is counted: an audit

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
        self.counts = Counts(self._log, self.table)
        self.latest_s.clear()

    # ------------------------------------------------------------ transitions

    def schedule(
        self, timer_id: int, due_at_ms: int, topic_id: int, log_offset: int, size: int, now_ms: int
    ) -> None:
        """Add a timer that was never met before: the live path."""
        self.event_count += 1
        self.next_id = timer_id + 1
        entry = TimerEntry(log_offset, size, due_at_ms, topic_id, _PENDING)
        self.table.put(timer_id, entry)
        self.count(timer_id, entry, 1)
        self._link(timer_id, entry, timer_record.SCHEDULE, now_ms)

    def replay_schedule(
        self,
        timer_id: int,
        due_at_ms: int,
        topic_id: int,
        log_offset: int,
        size: int,
        now_ms: int,
        *,
        kind: int,
    ) -> None:
        """Fold a SCHEDULE or EVACUATED record in, whether or not the files know it already."""
        self.event_count += 1
        self.next_id = max(self.next_id, timer_id + 1)
        entry = self.get(timer_id)
        if entry.state == TimerState.UNUSED:
            entry = TimerEntry(log_offset, size, due_at_ms, topic_id, TimerState.PENDING)
            self.table.put(timer_id, entry)
            self.count(timer_id, entry, 1)
        elif entry.state == TimerState.PENDING and log_offset > entry.log_offset:
            entry = self._move(timer_id, entry, log_offset, size)
        if entry.state == TimerState.PENDING and entry.due_at_ms == due_at_ms:
            # Its link may have been lost with what was not flushed.
            self._link(timer_id, entry, kind, now_ms)

    def evacuate(self, timer_id: int, log_offset: int, size: int) -> None:
        """Note a newer copy of a pending timer's message."""
        self.event_count += 1
        entry = self.get(timer_id)
        if entry.state == TimerState.PENDING:
            self._move(timer_id, entry, log_offset, size)

    def _move(self, timer_id: int, entry: TimerEntry, log_offset: int, size: int) -> TimerEntry:
        self.count(timer_id, entry, -1)
        entry = entry._replace(log_offset=log_offset, size=size)
        self.table.put(timer_id, entry)
        self.count(timer_id, entry, 1)
        return entry

    def reschedule(self, timer_id: int, due_at_ms: int, new_due_at_ms: int, now_ms: int) -> None:
        """Fold a RESCHEDULE record in."""
        self.event_count += 1
        entry = self.get(timer_id)
        if entry.state != TimerState.PENDING:
            return
        if entry.due_at_ms == due_at_ms:
            self._unlink(timer_id, entry, timer_record.RESCHEDULED_OUT, now_ms)
            entry = entry._replace(due_at_ms=new_due_at_ms)
            self.table.put(timer_id, entry)
        if entry.due_at_ms == new_due_at_ms:
            self._link(timer_id, entry, timer_record.RESCHEDULED_IN, now_ms)

    def cancel(self, timer_id: int, now_ms: int) -> None:
        """Fold a CANCEL record in."""
        entry = self._finish(timer_id, TimerState.CANCELLED)
        if entry is not None:
            self._unlink(timer_id, entry, timer_record.CANCEL, now_ms)

    def settle(self, timer_id: int, state: TimerState) -> None:
        """Fold the record in by which a timer was delivered or dropped."""
        self._finish(timer_id, state)

    def _finish(self, timer_id: int, state: TimerState) -> TimerEntry | None:
        entry = self.get(timer_id)
        if entry.state == TimerState.UNUSED:
            # Met without its schedule: that is gone with an old segment, and all it said is this.
            self.event_count += 1
            self.next_id = max(self.next_id, timer_id + 1)
            self.table.put(timer_id, entry._replace(state=state))
            return None
        if entry.state != TimerState.PENDING:
            return None
        self.finish(timer_id, entry, state)
        return entry

    def finish(self, timer_id: int, entry: TimerEntry, state: TimerState) -> None:
        """Settle a timer whose entry is at hand and pending: the live path."""
        self.event_count += 1
        self.count(timer_id, entry, -1)
        self.table.put(timer_id, entry._replace(state=state))

    def get(self, timer_id: int) -> TimerEntry:
        """Return a timer's entry. Raises EntryDamaged."""
        return self.table.get(timer_id)

    def find_pending(self, timer_id: int) -> TimerEntry | None:
        """Return the entry of a timer that waits and is intact."""
        try:
            entry = self.table.get(timer_id)
        except EntryDamaged:
            return None
        return entry if entry.state == TimerState.PENDING else None

    # ------------------------------------------------------------ counts

    @property
    def pending_count(self) -> int:
        """How many timers wait."""
        return self.counts.pending_count

    def count(self, timer_id: int, entry: TimerEntry, change: int) -> None:
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

    def _slot_of(self, due_at_ms: int) -> tuple[int, int]:
        """Return the second of the slot to link at, and PARKED if it is not the due one."""
        due_s = due_at_ms // 1000
        if due_s <= self.hand_s:
            return self.hand_s + 1, 0
        if due_s < self.ring_end_s:
            return due_s, 0
        return self.parking_s, timer_record.PARKED

    def _link(
        self, timer_id: int, entry: TimerEntry, kind: int, now_ms: int, *, change: int = 1
    ) -> None:
        if not self.is_linking:
            return
        slot_s, parked = self._slot_of(entry.due_at_ms)
        self._append(timer_id, entry, kind | parked, slot_s, now_ms, change=change)
        self.arrived(entry.due_at_ms, timer_id, entry.topic_id, entry.size, slot_s)

    def relink(
        self, timer_id: int, entry: TimerEntry, kind: int, now_ms: int, *, change: int = 1
    ) -> None:
        """Link a pending timer once more, as if it had just been scheduled."""
        self._link(timer_id, entry, kind & ~timer_record.PARKED, now_ms, change=change)

    def _unlink(self, timer_id: int, entry: TimerEntry, kind: int, now_ms: int) -> None:
        """Tell the slot that one of its timers is gone; a parked one is only passed over later."""
        slot_s, parked = self._slot_of(entry.due_at_ms)
        if self.is_linking and not parked and slot_s == entry.due_at_ms // 1000:
            self._append(timer_id, entry, kind, slot_s, now_ms, change=-1)

    def _append(
        self, timer_id: int, entry: TimerEntry, kind: int, slot_s: int, now_ms: int, *, change: int
    ) -> None:
        log = self.timer_log
        position = log.end
        previous = self.wheel.link(slot_s, position, change=change)
        log.append(
            timer_record.encode(
                previous, kind, now_ms, slot_s, entry.log_offset, entry.size, entry.topic_id,
                timer_id, entry.due_at_ms,
            )
        )  # fmt: skip
        number = log.file_number(position)
        if slot_s > self.latest_s.get(number, 0):
            self.latest_s[number] = slot_s

    def link_rows(self, first_id: int, rows: np.ndarray, now_ms: int) -> None:
        """Link the pending timers among the entries from `first_id` on, made again from nothing."""
        waiting = np.flatnonzero(rows["state"] == TimerState.PENDING)
        if not len(waiting):
            return
        found = rows[waiting]
        due_s = found["due"].astype(np.int64) // 1000
        is_parked = due_s >= self.ring_end_s
        slots = np.where(is_parked, self.parking_s, np.maximum(due_s, self.hand_s + 1))
        order = np.argsort(slots, kind="stable")
        found, slots, is_parked = found[order], slots[order], is_parked[order]
        ids = first_id + waiting[order]

        begin = self.timer_log.end
        positions = begin + np.arange(len(found), dtype=np.int64) * SIZE
        firsts = np.flatnonzero(np.diff(slots, prepend=slots[0] - 1))
        lasts = np.append(firsts[1:], len(found)) - 1
        seconds = slots[firsts].tolist()
        previous = positions - SIZE
        previous[firsts] = [self.wheel.last(second) for second in seconds]

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

        wheel_rows = np.zeros(len(seconds), timer_slot.DTYPE)
        wheel_rows["time"] = slots[firsts] * 1000
        is_new = previous[firsts] == NO_POSITION
        known = [self.wheel.first(second) for second in seconds]
        wheel_rows["first"] = np.where(is_new, positions[firsts], known)
        wheel_rows["last"] = positions[lasts]
        counts = np.array([self.wheel.count(second) for second in seconds])
        wheel_rows["num"] = counts + np.diff(np.append(firsts, len(found)))
        self.wheel.place_rows(wheel_rows)
        last_file = self.timer_log.file_number(int(positions[-1]))
        for file in range(self.timer_log.file_number(begin), last_file + 1):
            self.latest_s[file] = max(self.latest_s.get(file, 0), int(slots.max()))


def _nobody(_due: int, _timer_id: int, _topic_id: int, _size: int, _slot_s: int) -> None:
    pass
