"""Stage L, load: slots are loaded from the timer log into the near wheel.

There are two positions: one for slots due within the horizon, one for the backlog of a downtime.
So a backlog never delays timers that are due now. A chain is walked in slices from its newest
record to its oldest, and enters the near wheel when it is complete. From a slot with more than
`chunk` timers the others are loaded after its second has ended, portion by portion. That bounds the
memory. Only then timers inside one second may be out of order.

This stage does not check a record against the table. Stage D does.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout import timer_record
from tidemill.broker.engine.layout.numbers import TimerId, TopicId
from tidemill.broker.engine.layout.timer_record import NO_POSITION
from tidemill.broker.engine.timer.body import TimerBodies
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.near_wheel import FIELDS, ITEM, RUN_ITEMS_MAX, NearWheel, in_order
from tidemill.broker.engine.timer.timer_log import TimerLogDamaged

CHUNKS_MAX = 4  # loaded in total: 40 MiB; then loading waits for deliveries
RECORDS_A_SLICE = 512  # about 1 ms
SLOTS_A_SCAN = 65_536  # slots of the wheel scanned at once: 0.3 ms


class _ChainWalk(NamedTuple):
    """A walk of a chain, from `position` down to the record after `stop`."""

    slot_s: int
    position: int
    stop: int


@final
class SlotLoader:
    """The loader of slots, with its two positions."""

    def __init__(
        self,
        index: TimerIndex,
        near: NearWheel,
        bodies: TimerBodies,
        *,
        horizon_ms: int,
        chunk: int,
    ) -> None:
        self._index = index
        self._near = near
        self._bodies = bodies
        self._horizon_ms = horizon_ms
        self._chunk = chunk
        self._backlog_next_s = 0  # the first slot of the backlog that is not loaded
        self._on_time_first_s = 0  # the end of the backlog
        self._on_time_next_s = 0  # the first slot ahead that is not loaded
        self._on_time: deque[int] = deque()  # filled slots that were scanned and must be walked
        self._backlog: deque[int] = deque()
        self._walk: _ChainWalk | None = None
        self._parts: list[np.ndarray] = []  # the records of the last slices, newest first ...
        self._runs: list[np.ndarray] = []  # ... and those of the slices before, joined
        self._walked_items = 0
        # By slot: walks of chains longer than a chunk, and the newest position at the last walk.
        self._suspended: dict[int, _ChainWalk] = {}
        self._walked: dict[int, int] = {}
        self._again: set[int] = set()  # slots with new records that were neither loaded nor walked
        self._late_s = 0  # a slot ahead of the clock, with timers that came late for the hand
        self._loaded_at_ms = 0  # firing time of the last slice, where the horizon begins

    def start(self, now_ms: int) -> None:
        """Start with the slot after the hand."""
        hand_s = self._index.links.hand_s
        self._loaded_at_ms = now_ms
        self._backlog_next_s = hand_s + 1
        self._on_time_first_s = self._on_time_next_s = max(now_ms // 1000, hand_s + 1)
        self._on_time.clear()
        self._backlog.clear()
        self._suspended.clear()
        self._walked.clear()
        self._again.clear()
        self._parts.clear()
        self._runs.clear()
        self._walked_items = 0
        self._walk = None
        if self._on_time_first_s == hand_s + 1 and self._index.links.wheel.count(hand_s + 1):
            # The hand is ahead of the clock. Timers that came late are in the slot after it.
            self._late_s = hand_s + 1
            self._on_time.append(hand_s + 1)
            self._on_time_next_s += 1

    # ------------------------------------------------------------ new links

    def add_linked(
        self, due_at_ms: int, timer_id: TimerId, topic_id: TopicId, size: int, slot_s: int
    ) -> None:
        """Load a newly linked timer if it is due within the horizon."""
        now_ms = self._loaded_at_ms
        # A timer linked in a later slot than its second is due before that slot is loaded.
        is_near = due_at_ms < now_ms + self._horizon_ms or slot_s > due_at_ms // 1000
        if not is_near and not self._is_loaded(slot_s):
            return
        if self._has_room(slot_s):
            self._near.add(due_at_ms, timer_id, topic_id, size, slot_s, now_ms)
        elif self._is_loaded(slot_s):
            self._again.add(slot_s)

    def add_linked_rows(self, first_id: int, rows: np.ndarray) -> None:
        """Load the newly linked timers that are due within the horizon."""
        dues = rows["due"].astype(np.int64)
        slots, _ = self._index.links.slots_of(dues)
        is_near = (dues < self._loaded_at_ms + self._horizon_ms) | (slots > dues // 1000)
        is_near |= (slots < self._on_time_next_s) & (slots >= self._on_time_first_s)
        is_near |= slots < self._backlog_next_s
        for at in np.flatnonzero(is_near).tolist():
            row = rows[at]
            self.add_linked(
                int(dues[at]),
                TimerId(first_id + at),
                TopicId(int(row["topic_id"])),
                int(row["size"]),
                int(slots[at]),
            )

    def _has_room(self, slot_s: int) -> bool:
        return not self._is_full and self._near.outstanding[slot_s] < self._chunk

    def _is_loaded(self, slot_s: int) -> bool:
        if slot_s < self._on_time_first_s:
            return slot_s < self._backlog_next_s
        return slot_s < self._on_time_next_s

    # ------------------------------------------------------------ slices

    def step(self, now_ms: int) -> bool:
        """Load one slice. Return True if more can be loaded at once."""
        self._loaded_at_ms = now_ms
        try:
            if self._walk is None and not self._choose(now_ms):
                return False
            self._continue()
        except TimerLogDamaged:
            self._index.links.is_damaged = True
            return False
        return True

    def _choose(self, now_ms: int) -> bool:
        """Choose the next chain to walk. Return False if there is none now."""
        now_s = now_ms // 1000
        if self._resume_walk(now_s):
            return True
        if self._is_full:
            return False
        if self._next_on_time(now_ms):
            return True
        if self._near.outstanding_count >= CHUNKS_MAX // 2 * self._chunk:
            return False  # The other half of the room is for timers on time.
        return self._next_backlog()

    def _resume_walk(self, now_s: int) -> bool:
        """Continue a suspended walk, or walk new records of a chain."""
        outstanding = self._near.outstanding
        for slot_s in [s for s in self._suspended if s < now_s or s == self._late_s]:
            if outstanding[slot_s] < self._chunk // 2:
                self._walk = self._suspended.pop(slot_s)
                return True
        again = [s for s in self._again if s < now_s or s == self._late_s]
        for slot_s in [s for s in again if s not in self._suspended]:
            if outstanding[slot_s] < self._chunk // 2:
                self._again.discard(slot_s)
                self._begin_walk(slot_s)
                return True
        return False

    def _next_on_time(self, now_ms: int) -> bool:
        if not self._on_time:
            first_s = self._on_time_next_s
            # Up to the end of the second in which the horizon ends.
            end_s = (now_ms + self._horizon_ms) // 1000 + 1
            # Invariant: a timer that is parked again goes to a slot that was not scanned.
            end_s = min(end_s, self._index.links.parking_s, first_s + SLOTS_A_SCAN)
            if end_s <= first_s:
                return False
            self._on_time.extend(self._index.links.wheel.filled(first_s, end_s))
            self._on_time_next_s = end_s
        if not self._on_time:
            return self._on_time_next_s <= now_ms // 1000
        self._begin_walk(self._on_time.popleft())
        return True

    def _next_backlog(self) -> bool:
        if not self._backlog:
            first_s = self._backlog_next_s
            end_s = min(self._on_time_first_s, first_s + SLOTS_A_SCAN)
            if end_s <= first_s:
                return False
            self._backlog.extend(self._index.links.wheel.filled(first_s, end_s))
            self._backlog_next_s = end_s
        if self._backlog:
            self._begin_walk(self._backlog.popleft())
        return True

    def _begin_walk(self, slot_s: int) -> None:
        newest = self._index.links.wheel.last(slot_s)
        stop = self._walked.get(slot_s, NO_POSITION)
        self._walked[slot_s] = newest
        self._walk = _ChainWalk(slot_s, newest, stop)

    def _continue(self) -> None:
        walk = self._walk
        if walk is None:
            return
        slot_s, position, stop = walk
        index, items, bodies = self._index, array("q"), array("q")
        read, begin = index.links.timer_log.read, index.links.timer_log.begin
        stop = max(stop, begin - 1)
        for _ in range(RECORDS_A_SLICE):
            if position <= stop:
                break
            record = read(position)
            if record.slot_s != slot_s or record.previous >= position:
                raise TimerLogDamaged(f"the record at {position} is in the chain of {slot_s}")
            if record.magic & timer_record.PARKED:
                self._relink_parked(record)
            elif record.magic & timer_record.LINKS:
                items.extend(
                    (record.due_at_ms, record.timer_id, record.topic_id, record.body_size, slot_s)
                )
                bodies.extend((record.log_offset, record.body_size))
            position = record.previous
        if items:
            self._parts.append(np.frombuffer(items, ITEM))
            self._walked_items += len(items) // FIELDS
            if len(self._parts) * RECORDS_A_SLICE >= RUN_ITEMS_MAX:
                self._join()
            self._bodies.plan_reads(np.frombuffer(bodies, np.int64).reshape(-1, 2))
        if position > stop and self._near.outstanding[slot_s] + self._walked_items < self._chunk:
            self._walk = _ChainWalk(slot_s, position, stop)
            return
        self._join()
        # Now, in reverse, so that timers linked first are delivered first.
        for run in reversed(self._runs):
            self._near.add_run(run)
        self._runs.clear()
        self._walked_items = 0
        self._walk = None
        if position > stop:
            self._suspended[slot_s] = _ChainWalk(slot_s, position, stop)

    def _join(self) -> None:
        """Join the records of the last slices of the walk to one sorted run."""
        if self._parts:
            self._runs.append(in_order(np.concatenate(self._parts)))
            self._parts.clear()

    def _relink_parked(self, record: timer_record.TimerRecord) -> None:
        """Link a parked timer again, closer to its due time."""
        entry = self._index.find_pending(record.timer_id)
        if entry is not None and entry.due_at_ms == record.due_at_ms:
            kind = record.magic & ~timer_record.PARKED & 0xFFFFFF
            self._index.links.relink(record.timer_id, entry, kind, self._loaded_at_ms)

    # ------------------------------------------------------------ the hand

    def advance_hand(self, now_ms: int) -> None:
        """Move the hand to the last slot before the first one that is not final."""
        if self._backlog_next_s < self._on_time_first_s or self._backlog:
            loaded_to_s = self._backlog[0] if self._backlog else self._backlog_next_s
        else:
            loaded_to_s = self._on_time[0] if self._on_time else self._on_time_next_s
        open_s = min(
            loaded_to_s,
            now_ms // 1000,
            min(self._near.outstanding, default=loaded_to_s),
            min(self._suspended, default=loaded_to_s),
            min(self._again, default=loaded_to_s),
            loaded_to_s if self._walk is None else self._walk.slot_s,
        )
        if open_s - 1 > self._index.links.hand_s:
            self._index.links.hand_s = open_s - 1
            for slot_s in [s for s in self._walked if s < open_s]:
                del self._walked[slot_s]

    def is_behind(self, now_ms: int) -> bool:
        """Return whether a slot that has begun was not scanned."""
        return self._on_time_next_s <= now_ms // 1000

    @property
    def _is_full(self) -> bool:
        return self._near.outstanding_count >= CHUNKS_MAX * self._chunk

    def next_step_ms(self) -> int | None:
        """Return when the next slots are due to be loaded, in steps of half a horizon.

        None while loading waits for deliveries.
        """
        if self._is_full:
            return None
        return self._on_time_next_s * 1000 - self._horizon_ms // 2
