"""The table of live deliveries: one slot a pop checkpoint, columns instead of objects.

A million deliveries as objects cost 400 MB and a half-second collection; as columns of machine
numbers they cost 75 bytes each and the collector never sees them. A slot's identity is the log
offset of the CK record that filled it, so a handle to an earlier use of a slot never matches.

Two doubly linked lists run through the slots: the deliveries of one (group, topic, queue) in pop
order, and those of one deadline. Deadlines are exact to the millisecond for the next minute; later
ones wait in buckets of a second, since a dictionary of all milliseconds of twelve hours would not
be small.

Rebuilt after a crash from snapshot and log. Owned by the engine's one owner.
"""

from __future__ import annotations

import sys
from array import array
from heapq import heappop, heappush
from typing import final

import numpy as np

from tidemill.broker.engine.layout.delivery_rows import ROW, DeliveryRows, named_once
from tidemill.broker.engine.layout.numbers import DeliverySlot
from tidemill.broker.engine.layout.pop_checkpoint import (
    FLAG_GAPS,
    FLAG_ORDERED,
    FLAG_RELEASED,
    FLAG_RENEWS,
    FLAG_SUPERSEDES,
    FLAG_SUSPEND,
    FLAG_UNPROVEN,
)
from tidemill.broker.engine.pop.holder_numbers import NOBODY, UNHEARD, HolderNumbers

NIL = 0xFFFFFFFF  # end of a list
FREE = -1  # delivery id of an empty slot
GROWTH = 4096  # slots added at once: a few hundred KiB
# In column `flags`, beside those of the layout (1 to 16, 128).
FLAG_DUE = 32  # taken out of its deadline's list
FLAG_COARSE = 64  # in a coarse bucket
# In column `on_its_way`.
ON_ITS_WAY = 1  # it renews, and a pop has brought it out
UNPROVEN = FLAG_UNPROVEN  # a start found it so: it renews no more, until a proxy tells
FLAGS_STORED = (
    FLAG_GAPS | FLAG_SUPERSEDES | FLAG_ORDERED | FLAG_SUSPEND | FLAG_RELEASED | FLAG_RENEWS
)
AHEAD_MS = 1_000  # a clock that is corrected by less is not worth a look at every delivery
NEAR_MS = 65_536  # deadlines up to here are exact; a push consumer's 60 s are
COARSE_SHIFT = 10  # 1,024 ms a coarse bucket: 12 h are 42,000 of them
COARSE_AHEAD_MS = 4_096  # a coarse bucket is spread this long before its first deadline


@final
class DeliveryTable:
    """Columns of all live deliveries, and their deadlines."""

    def __init__(self) -> None:
        self.ids = array("q")
        self.owners = array("I")  # index into the progress list
        self.starts = array("q")
        self.visible_at_ms = array("q")
        self.popped_at_ms = array("q")
        self.stated_at = array("q")  # log offset of the newest record that states all of the row
        self.counts = array("B")
        self.flags = array("B")
        self.live = array("I")
        self.superseded = array("I")
        self.previous = array("I")  # in pop order of the queue
        self.next = array("I")
        self.holders = array("I")  # numbers of `clients`
        self.clients = HolderNumbers()
        # Not 0: nobody has told yet that its client has it. Of a pop neither a record nor a
        # snapshot says so, of what a start did not know both do.
        self.on_its_way = array("B")
        self._deadline_previous = array("I")
        self._deadline_next = array("I")
        self.gaps: dict[int, tuple[int, ...]] = {}
        # Slots to give out, the next one last. A fold that places what another engine has given
        # out leaves slots in use among them; `allocate` passes over those.
        self._free = array("I")
        self._is_listed = array("B")  # whether a slot is in `_free`
        self._near: dict[int, int] = {}
        self._near_heap: list[int] = []
        self._coarse: dict[int, int] = {}
        self._coarse_heap: list[int] = []
        self._taken_to_ms = 0  # what was due up to here has been taken
        self.used_count = 0

    # ------------------------------------------------------------ slots

    def allocate(self) -> DeliverySlot:
        """Return an empty slot, which stays empty until `place`."""
        while True:
            if not self._free:
                self.grow()
            slot = self._free.pop()
            self._is_listed[slot] = 0
            if self.ids[slot] == FREE:
                return slot  # type: ignore[return-value]  # To call it one costs as much again.

    def release(self, slot: int) -> None:
        """Empty a slot that is in no list any more."""
        self.ids[slot] = FREE
        if self.flags[slot] & FLAG_GAPS:
            del self.gaps[slot]
        self.clients.counts[self.holders[slot]] -= 1
        if not self._is_listed[slot]:
            self._is_listed[slot] = 1
            self._free.append(slot)
        self.used_count -= 1

    def grow(self, count: int = GROWTH) -> None:
        """Add empty slots."""
        begin = len(self.ids)
        self.ids.frombytes(FREE.to_bytes(8, sys.byteorder, signed=True) * count)
        zeros = bytes(8 * count)
        for column in (self.starts, self.visible_at_ms, self.popped_at_ms, self.stated_at):
            column.frombytes(zeros)
        for column in (
            self.owners,
            self.live,
            self.superseded,
            self.previous,
            self.next,
            self.holders,
            self._deadline_previous,
            self._deadline_next,
        ):
            column.frombytes(zeros[: 4 * count])
        for column in (self.counts, self.flags, self.on_its_way):
            column.frombytes(zeros[:count])
        self._is_listed.frombytes(b"\x01" * count)
        self._free.frombytes(np.arange(begin + count - 1, begin - 1, -1, dtype=np.uint32).tobytes())

    def grow_to(self, size: int) -> None:
        """Add empty slots until there are at least `size`."""
        missing = size - len(self.ids)
        if missing > 0:
            self.grow(-(-missing // GROWTH) * GROWTH)

    def place(
        self,
        slot: int,
        delivery_id: int,
        owner: int,
        start: int,
        count: int,
        flags: int,
        visible_at_ms: int,
        popped_at_ms: int,
        gaps: tuple[int, ...] | None,
        client_id: str,
    ) -> None:
        """Fill an empty slot; the caller links it. "" as `client_id`: nobody knows who holds it."""
        self.ids[slot] = self.stated_at[slot] = delivery_id
        self.owners[slot] = owner
        self.starts[slot] = start
        self.counts[slot] = count
        self.flags[slot] = flags
        self.visible_at_ms[slot] = visible_at_ms
        self.popped_at_ms[slot] = popped_at_ms
        self.live[slot] = (1 << count) - 1
        self.superseded[slot] = self.on_its_way[slot] = 0
        if gaps is not None:
            self.gaps[slot] = gaps
        clients = self.clients
        number = clients.numbers.get(client_id)
        if number is None:
            if clients.has_too_many:
                self._recount_holders()
            number = clients.number_of(client_id)
        if not clients.counts[number] and clients.heard_at_ms[number] >= 0:
            # Who held nothing was not looked at: when it was heard before says nothing of now. Who
            # has ended stays so: a pop may come late.
            clients.heard_at_ms[number] = UNHEARD
        clients.counts[number] += 1
        self.holders[slot] = number
        self.used_count += 1

    def _recount_holders(self) -> None:
        is_used = np.frombuffer(self.ids, dtype=np.int64) != FREE
        self.clients.recount(np.frombuffer(self.holders, dtype=np.uint32)[is_used])

    def in_flight_of(self, client_id: str) -> int:
        """Return how many messages a client holds: a look at all slots, a millisecond a million."""
        number = self.clients.find(client_id)
        if number == NOBODY:
            return 0
        is_held = np.frombuffer(self.holders, dtype=np.uint32) == number
        # An empty slot still names who had it last.
        is_held &= np.frombuffer(self.ids, dtype=np.int64) != FREE
        return int(np.bitwise_count(np.frombuffer(self.live, dtype=np.uint32)[is_held]).sum())

    def client_id_of(self, slot: int) -> str:
        """Return who holds a delivery; "" where that is not known."""
        return self.clients.client_ids[self.holders[slot]]

    def offset_of(self, slot: int, index: int) -> int:
        """Return the queue offset of a delivery's message."""
        gap = self.gaps[slot][index] if self.flags[slot] & FLAG_GAPS else index
        return self.starts[slot] + gap

    def end_of(self, slot: int) -> int:
        """Return the queue offset behind a delivery's last message."""
        return self.offset_of(slot, self.counts[slot] - 1) + 1

    def indexes_of(self, bits: int) -> list[int]:
        """Return the positions of the bits that are set."""
        return [index for index in range(bits.bit_length()) if bits >> index & 1]

    # ------------------------------------------------------------ deadlines

    def watch(self, slot: int) -> None:
        """Put a slot into the list of its deadline."""
        deadline = self.visible_at_ms[slot]
        if deadline - self._taken_to_ms > NEAR_MS:
            self.flags[slot] |= FLAG_COARSE
            key, buckets, heap = deadline >> COARSE_SHIFT, self._coarse, self._coarse_heap
        else:
            key, buckets, heap = deadline, self._near, self._near_heap
        head = buckets.get(key)
        if head is None:
            heappush(heap, key)
            head = NIL
        elif head != NIL:
            self._deadline_previous[head] = slot
        buckets[key] = slot
        self._deadline_next[slot] = head
        self._deadline_previous[slot] = NIL

    def unwatch(self, slot: int) -> None:
        """Take a slot out of the list of its deadline, if it still is in one."""
        flags = self.flags[slot]
        if flags & FLAG_DUE:
            return
        before, after = self._deadline_previous[slot], self._deadline_next[slot]
        if after != NIL:
            self._deadline_previous[after] = before
        if before != NIL:
            self._deadline_next[before] = after
        elif flags & FLAG_COARSE:
            self._coarse[self.visible_at_ms[slot] >> COARSE_SHIFT] = after
        else:
            # The key stays until its time, so that the heap never holds it twice.
            self._near[self.visible_at_ms[slot]] = after

    def move(self, slot: int, visible_at_ms: int) -> None:
        """Let a delivery run out at another time, also one that has been taken out as due."""
        self.unwatch(slot)
        self.visible_at_ms[slot] = visible_at_ms
        self.flags[slot] &= FLAGS_STORED
        self.watch(slot)

    def next_deadline_ms(self) -> int | None:
        """Return when `take_due` may find something next, None: never."""
        near = self._near_heap[0] if self._near_heap else None
        if not self._coarse_heap:
            return near
        coarse = (self._coarse_heap[0] << COARSE_SHIFT) - COARSE_AHEAD_MS
        return coarse if near is None else min(near, coarse)

    def take_due(self, now_ms: int, limit: int) -> list[int]:
        """Return up to about `limit` slots whose deadline has come, out of their lists."""
        self._taken_to_ms = now_ms
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
                self.flags[slot] |= FLAG_DUE
                slot = self._deadline_next[slot]
            if slot == NIL:
                del self._near[deadline]
                heappop(self._near_heap)
            else:
                self._near[deadline] = slot
                self._deadline_previous[slot] = NIL
        return due

    def due_slots(self) -> list[int]:
        """Return the slots in use that `take_due` has taken out of their lists."""
        is_due = np.frombuffer(self.flags, dtype=np.uint8) & FLAG_DUE != 0
        is_used = np.frombuffer(self.ids, dtype=np.int64) != FREE
        due: list[int] = np.flatnonzero(is_due & is_used).tolist()
        return due

    def _spread(self, key: int, limit: int) -> int:
        """Move up to `limit` slots of a coarse bucket to their exact deadlines."""
        slot, count = self._coarse[key], 0
        while slot != NIL and count < limit:
            after = self._deadline_next[slot]
            self.flags[slot] &= ~FLAG_COARSE
            self.watch(slot)
            slot, count = after, count + 1
        if slot == NIL:
            del self._coarse[key]
            heappop(self._coarse_heap)
        else:
            self._coarse[key] = slot
            self._deadline_previous[slot] = NIL
        return max(count, 1)

    # ------------------------------------------------------------ rows, many at once

    def in_use(self, begin: int, end: int) -> np.ndarray:
        """Return the slots from `begin` to `end` that hold a delivery."""
        ids = np.frombuffer(self.ids, dtype=np.int64)[begin:end]
        return np.flatnonzero(ids != FREE) + begin

    def rows_of(self, slots: np.ndarray, places: np.ndarray) -> DeliveryRows:
        """Return slots as delivery rows; `places` has (group, topic, queue) of each."""
        rows = np.empty(len(slots), dtype=ROW)
        rows["slot"] = slots
        rows["group_id"], rows["topic_id"], rows["queue_id"] = places.T
        for name, column in self._stored_columns():
            rows[name] = np.frombuffer(column, dtype=column.typecode)[slots]
        rows["flags"] = np.frombuffer(self.flags, dtype=np.uint8)[slots] & FLAGS_STORED
        rows["flags"] |= np.frombuffer(self.on_its_way, dtype=np.uint8)[slots] & UNPROVEN
        with_gaps = np.flatnonzero(rows["flags"] & FLAG_GAPS).tolist()
        gaps = {number: self.gaps[int(slots[number])] for number in with_gaps}
        numbers = np.frombuffer(self.holders, dtype=np.uint32)[slots]
        return named_once(rows, gaps, numbers, self.clients.client_ids)

    def load(self, rows: np.ndarray, owners: np.ndarray, holders: np.ndarray) -> None:
        """Take rows over where no later use of their slots is known; `relink` makes the lists."""
        self.grow_to(int(rows["slot"].max(initial=0)) + 1)
        slots = rows["slot"].astype(np.int64)
        is_later = np.frombuffer(self.ids, dtype=np.int64)[slots] < rows["delivery_id"]
        rows, owners, slots = rows[is_later], owners[is_later], slots[is_later]
        np.frombuffer(self.holders, dtype=np.uint32)[slots] = holders[is_later]
        for slot in self.gaps.keys() & set(slots.tolist()):
            del self.gaps[slot]
        for name, column in (*self._stored_columns(), ("delivery_id", self.stated_at)):
            np.frombuffer(column, dtype=column.typecode)[slots] = rows[name]
        np.frombuffer(self.flags, dtype=np.uint8)[slots] = rows["flags"] & FLAGS_STORED
        np.frombuffer(self.on_its_way, dtype=np.uint8)[slots] = rows["flags"] & UNPROVEN
        np.frombuffer(self.owners, dtype=np.uint32)[slots] = owners

    def _stored_columns(self) -> tuple[tuple[str, array[int]], ...]:
        return (
            ("delivery_id", self.ids),
            ("start_offset", self.starts),
            ("count", self.counts),
            ("visible_at_ms", self.visible_at_ms),
            ("popped_at_ms", self.popped_at_ms),
            ("live", self.live),
            ("superseded", self.superseded),
        )

    def relink(self, *, now_ms: int) -> tuple[np.ndarray, np.ndarray]:
        """Build free list, deadline lists and the lists in pop order; all of them anew.

        Returns the slots with live messages in the order of owner and identity, and where in them
        each owner's begin. No loop here is over deliveries.
        """
        self._taken_to_ms = now_ms
        ids = np.frombuffer(self.ids, dtype=np.int64)
        free = np.flatnonzero(ids == FREE)[::-1].astype(np.uint32)
        used = np.flatnonzero(ids != FREE)
        self.used_count = len(used)
        self._free = array("I", free.tobytes())
        np.frombuffer(self._is_listed, dtype=np.uint8)[:] = ids == FREE
        self._relink_deadlines(used)
        self._recount_holders()
        self.clients.is_counting = True
        live = used[np.frombuffer(self.live, dtype=np.uint32)[used] != 0]
        owners = np.frombuffer(self.owners, dtype=np.uint32)[live]
        order = np.lexsort((ids[live], owners))
        live, owners = live[order], owners[order]
        begins = _begins(owners)
        self._link_all(self.previous, self.next, live, begins)
        return live, begins

    def popped_ahead_of(self, now_ms: int) -> np.ndarray:
        """Return the slots in use whose delivery was popped in the future."""
        ids = np.frombuffer(self.ids, dtype=np.int64)
        popped = np.frombuffer(self.popped_at_ms, dtype=np.int64)
        return np.flatnonzero((ids != FREE) & (popped > now_ms + AHEAD_MS))

    def set_times(self, slots: np.ndarray, rows: np.ndarray, *, is_linked: bool) -> None:
        """Let deliveries have been popped, and run out, when their rows say.

        `is_linked`: whether the deadline lists are made, those of `slots` among them.
        """
        times = rows["visible_at_ms"].tolist(), rows["popped_at_ms"].tolist()
        for slot, visible_at_ms, popped_at_ms in zip(slots.tolist(), *times, strict=True):
            if is_linked:
                self.unwatch(slot)
            self.visible_at_ms[slot], self.popped_at_ms[slot] = visible_at_ms, popped_at_ms
            if is_linked:
                # An engine that follows may have taken it out as due already.
                self.flags[slot] &= FLAGS_STORED
                self.watch(slot)

    def _relink_deadlines(self, used: np.ndarray) -> None:
        """Put all used slots into coarse buckets; `take_due` spreads the first of them."""
        self._near.clear()
        self._near_heap.clear()
        flags = np.frombuffer(self.flags, dtype=np.uint8)
        flags[used] = flags[used] & FLAGS_STORED | FLAG_COARSE
        keys = np.frombuffer(self.visible_at_ms, dtype=np.int64)[used] >> COARSE_SHIFT
        order = np.argsort(keys, kind="stable")
        slots, keys = used[order], keys[order]
        begins = _begins(keys)
        self._link_all(self._deadline_previous, self._deadline_next, slots, begins)
        self._coarse = dict(zip(keys[begins].tolist(), slots[begins].tolist(), strict=True))
        self._coarse_heap = list(self._coarse)  # Sorted, and so a heap.

    @staticmethod
    def _link_all(
        previous: array[int], following: array[int], slots: np.ndarray, begins: np.ndarray
    ) -> None:
        """Link `slots` into lists, each of which begins at one of the positions `begins`."""
        before = np.empty(len(slots), dtype=np.uint32)
        after = np.empty(len(slots), dtype=np.uint32)
        before[1:], after[:-1] = slots[:-1], slots[1:]
        if len(slots):
            before[begins] = NIL
            after[begins[1:] - 1] = NIL
            after[-1] = NIL
        np.frombuffer(previous, dtype=np.uint32)[slots] = before
        np.frombuffer(following, dtype=np.uint32)[slots] = after


def _begins(keys: np.ndarray) -> np.ndarray:
    """Return the positions at which another key begins among sorted ones."""
    if not len(keys):
        return np.empty(0, dtype=np.int64)
    return np.append(0, np.flatnonzero(np.diff(keys)) + 1)
