"""The deadlines of the deliveries in the table: one linked list of slots per deadline.

Deadlines of the next minute are exact to the millisecond. Later ones are in coarse buckets of about
a second, because a dictionary of all milliseconds of twelve hours would be large. `take_due`
spreads a coarse bucket over exact deadlines shortly before its time.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush
from typing import final

import numpy as np

from tidemill.broker.engine.pop.linked_lists import NIL, link_runs, run_begins

# In the column `flags` of the table, beside the flags of the layout (1 to 16, 128).
FLAG_DUE = 32  # `take_due` has removed the slot from its list
FLAG_COARSE = 64  # the slot is in a coarse bucket
NEAR_MS = 65_536  # exact deadlines: longer than the 60 s of a push consumer
COARSE_SHIFT = 10  # 1,024 ms per coarse bucket: 42,000 buckets for 12 h
COARSE_AHEAD_MS = 4_096  # a coarse bucket is spread this long before its first deadline


@final
class DeadlineLists:
    """The slots of each deadline. Shares the columns `visible_at_ms` and `flags` of the table."""

    def __init__(self, visible_at_ms: array[int], flags: array[int]) -> None:
        self._visible_at_ms = visible_at_ms
        self._flags = flags
        self._previous = array("I")
        self._next = array("I")
        # The first slot of each list, by deadline or by coarse bucket, and a heap of the keys.
        self._near: dict[int, int] = {}
        self._near_heap: list[int] = []
        self._coarse: dict[int, int] = {}
        self._coarse_heap: list[int] = []
        self._taken_until_ms = 0  # `take_due` has returned everything due up to here

    def grow(self, count: int) -> None:
        """Make room for `count` more slots."""
        zeros = bytes(4 * count)
        self._previous.frombytes(zeros)
        self._next.frombytes(zeros)

    def add(self, slot: int) -> None:
        """Add a slot to the list of its deadline."""
        deadline = self._visible_at_ms[slot]
        if deadline - self._taken_until_ms > NEAR_MS:
            self._flags[slot] |= FLAG_COARSE
            key, buckets, heap = deadline >> COARSE_SHIFT, self._coarse, self._coarse_heap
        else:
            key, buckets, heap = deadline, self._near, self._near_heap
        head = buckets.get(key)
        if head is None:
            heappush(heap, key)
            head = NIL
        elif head != NIL:
            self._previous[head] = slot
        buckets[key] = slot
        self._next[slot] = head
        self._previous[slot] = NIL

    def remove(self, slot: int) -> None:
        """Remove a slot from the list of its deadline, unless `take_due` has removed it."""
        flags = self._flags[slot]
        if flags & FLAG_DUE:
            return
        before, after = self._previous[slot], self._next[slot]
        if after != NIL:
            self._previous[after] = before
        if before != NIL:
            self._next[before] = after
        elif flags & FLAG_COARSE:
            self._coarse[self._visible_at_ms[slot] >> COARSE_SHIFT] = after
        else:
            # The key stays until its time, so that the heap never holds it twice.
            self._near[self._visible_at_ms[slot]] = after

    def next_ms(self) -> int | None:
        """Return when `take_due` may find a slot next, None if there is none."""
        near = self._near_heap[0] if self._near_heap else None
        if not self._coarse_heap:
            return near
        coarse = (self._coarse_heap[0] << COARSE_SHIFT) - COARSE_AHEAD_MS
        return coarse if near is None else min(near, coarse)

    def take_due(self, now_ms: int, limit: int) -> list[int]:
        """Remove due slots, about `limit` at most, and return them."""
        self._taken_until_ms = now_ms
        spread = 0
        while (
            self._coarse_heap
            and (self._coarse_heap[0] << COARSE_SHIFT) - COARSE_AHEAD_MS <= now_ms
            and spread < limit
        ):
            spread += self._spread(self._coarse_heap[0], limit - spread)
        due: list[int] = []
        while self._near_heap and self._near_heap[0] <= now_ms and len(due) < limit:
            deadline = self._near_heap[0]
            slot = self._near[deadline]
            while slot != NIL and len(due) < limit:
                due.append(slot)
                self._flags[slot] |= FLAG_DUE
                slot = self._next[slot]
            if slot == NIL:
                del self._near[deadline]
                heappop(self._near_heap)
            else:
                self._near[deadline] = slot
                self._previous[slot] = NIL
        return due

    def _spread(self, key: int, limit: int) -> int:
        """Move up to `limit` slots of a coarse bucket to the lists of their exact deadlines."""
        slot, count = self._coarse[key], 0
        while slot != NIL and count < limit:
            after = self._next[slot]
            self._flags[slot] &= ~FLAG_COARSE
            self.add(slot)
            slot, count = after, count + 1
        if slot == NIL:
            del self._coarse[key]
            heappop(self._coarse_heap)
        else:
            self._coarse[key] = slot
            self._previous[slot] = NIL
        return max(count, 1)

    def rebuild(self, used: np.ndarray, *, now_ms: int) -> None:
        """Put all used slots into coarse buckets. `take_due` spreads the first ones."""
        self._taken_until_ms = now_ms
        self._near.clear()
        self._near_heap.clear()
        np.frombuffer(self._flags, dtype=np.uint8)[used] |= FLAG_COARSE
        keys = np.frombuffer(self._visible_at_ms, dtype=np.int64)[used] >> COARSE_SHIFT
        order = np.argsort(keys, kind="stable")
        slots, keys = used[order], keys[order]
        begins = run_begins(keys)
        link_runs(self._previous, self._next, slots, begins)
        self._coarse = dict(zip(keys[begins].tolist(), slots[begins].tolist(), strict=True))
        self._coarse_heap = list(self._coarse)  # Sorted, and so a heap.
