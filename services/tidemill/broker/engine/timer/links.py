"""The links of timers: chains of timer log records, one per slot of the wheel.

A timer is linked in the slot of its due second. A timer due beyond the ring is parked: it is linked
in a slot half a revolution ahead, and linked again when that slot is loaded. A timer due before the
hand is linked in the slot after the hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, final

import numpy as np

from tidemill.broker.engine.layout import timer_record, timer_slot
from tidemill.broker.engine.layout.numbers import TimerId, TopicId
from tidemill.broker.engine.layout.timer_entry import TimerEntry
from tidemill.broker.engine.layout.timer_record import NO_POSITION, SIZE
from tidemill.broker.engine.timer.status import TimerState
from tidemill.broker.engine.timer.timer_log import TimerLog, TimerLogDamaged
from tidemill.broker.engine.timer.wheel import TimerWheel

# The ring is a little shorter than a revolution, so that a slot is never reused while it is read.
RING_RESERVE_S = 60
# (due_at_ms, timer_id, topic_id, size, second of the slot)
LinkCallback = Callable[[int, TimerId, TopicId, int, int], None]
LinkRowsCallback = Callable[[int, np.ndarray], None]  # (first timer id, table entries)


class TimerObserver(Protocol):
    """An observer of all changes of counts and links: an audit in progress."""

    def note_count(self, timer_id: TimerId, entry: TimerEntry, change: int) -> None:
        """Note that a timer was added to the counts (1) or removed from them (-1)."""

    def note_link(self, timer_id: TimerId, due_at_ms: int) -> None:
        """Note that a timer was linked with this due time."""


@final
class TimerLinks:
    """The wheel and the timer log, and the hand between final slots and the others."""

    def __init__(self, wheel: TimerWheel, timer_log: TimerLog) -> None:
        self.wheel = wheel
        self.timer_log = timer_log
        self.hand_s = 0  # every slot up to this second is final
        self.is_linking = True  # off while wheel and timer log will be rebuilt anyway
        self.is_damaged = False  # wheel or timer log must be rebuilt from the table
        self.latest_s: dict[int, int] = {}  # the latest slot of each timer log file, by file number
        # Called for every linked timer.
        self.on_link: LinkCallback = _ignore_link
        self.on_link_rows: LinkRowsCallback = _ignore_rows
        self.observer: TimerObserver | None = None

    @property
    def ring_end_s(self) -> int:
        """The first second without its own slot."""
        slots = self.wheel.slot_count
        return self.hand_s + slots - min(RING_RESERVE_S, slots // 16)

    @property
    def parking_s(self) -> int:
        """The second of the slot for timers due beyond the ring."""
        return self.hand_s + self.wheel.slot_count // 2

    def clear(self) -> None:
        """Delete the files and start with empty ones."""
        self.wheel.clear()
        self.timer_log.clear()
        self.latest_s.clear()

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

    # ------------------------------------------------------------ slots

    def wheel_slot_of(self, due_at_ms: int) -> int | None:
        """Return the wheel's slot of a due time, None while its second has no slot."""
        slot_s, parked = self._slot_of(due_at_ms)
        return None if parked else slot_s % self.wheel.slot_count

    def _slot_of(self, due_at_ms: int) -> tuple[int, int]:
        """Return the second of the slot for a due time, and PARKED if the timer is parked there."""
        due_s = due_at_ms // 1000
        if due_s <= self.hand_s:
            return self.hand_s + 1, 0
        if due_s < self.ring_end_s:
            return due_s, 0
        return self.parking_s, timer_record.PARKED

    def slots_of(self, dues: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of the slots for many due times, and which timers are parked there."""
        due_s = dues.astype(np.int64) // 1000
        is_parked = due_s >= self.ring_end_s
        slots = np.where(is_parked, self.parking_s, np.maximum(due_s, self.hand_s + 1))
        return slots, is_parked

    # ------------------------------------------------------------ linking

    def link(
        self, timer_id: TimerId, entry: TimerEntry, kind: int, now_ms: int, *, change: int = 1
    ) -> None:
        """Link a pending timer. `change` is added to the count of its slot."""
        if not self.is_linking:
            return
        slot_s, parked = self._slot_of(entry.due_at_ms)
        self._append(timer_id, entry, kind | parked, slot_s, now_ms, change=change)
        if self.observer is not None:
            self.observer.note_link(timer_id, entry.due_at_ms)
        self.on_link(entry.due_at_ms, timer_id, entry.topic_id, entry.size, slot_s)

    def relink(
        self, timer_id: TimerId, entry: TimerEntry, kind: int, now_ms: int, *, change: int = 1
    ) -> None:
        """Link a pending timer once more, as if it had just been scheduled."""
        self.link(timer_id, entry, kind & ~timer_record.PARKED, now_ms, change=change)

    def unlink(self, timer_id: TimerId, entry: TimerEntry, kind: int, now_ms: int) -> None:
        """Subtract a timer from its slot. A parked one is skipped when its slot is loaded."""
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
        """Link the pending timers among the table entries from `first_id` on."""
        pending = np.flatnonzero(rows["state"] == TimerState.PENDING)
        if not len(pending):
            return
        found = rows[pending]
        slots, is_parked = self.slots_of(found["due"])
        order = np.argsort(slots, kind="stable")
        found, slots, is_parked = found[order], slots[order], is_parked[order]
        ids = first_id + pending[order]

        begin = self.timer_log.end
        positions = begin + np.arange(len(found), dtype=np.int64) * SIZE
        firsts = np.flatnonzero(np.diff(slots, prepend=slots[0] - 1))
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
        self._place_chains(slots, firsts, positions, known)
        last_file = self.timer_log.file_number(int(positions[-1]))
        for file in range(self.timer_log.file_number(begin), last_file + 1):
            self.latest_s[file] = max(self.latest_s.get(file, 0), int(slots.max()))

    def _place_chains(
        self, slots: np.ndarray, firsts: np.ndarray, positions: np.ndarray, known: np.ndarray
    ) -> None:
        """Point the wheel's slots to new records, which are sorted by slot.

        `firsts` has the index of the first record of each slot, `known` the slots as they were.
        """
        lasts = np.append(firsts[1:], len(slots)) - 1
        rows = np.zeros(len(firsts), timer_slot.DTYPE)
        rows["time"] = slots[firsts] * 1000
        is_new = known["last"] == NO_POSITION
        rows["first"] = np.where(is_new, positions[firsts], known["first"])
        rows["last"] = positions[lasts]
        rows["num"] = known["num"] + np.diff(np.append(firsts, len(slots)))
        self.wheel.place_rows(rows)


def _ignore_link(_due: int, _timer_id: int, _topic_id: int, _size: int, _slot_s: int) -> None:
    pass


def _ignore_rows(_first_id: int, _rows: np.ndarray) -> None:
    pass
