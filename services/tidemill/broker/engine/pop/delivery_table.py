"""The table of live deliveries: one slot per pop checkpoint, in columns instead of objects.

A million deliveries as objects cost 400 MB and half a second of garbage collection. As columns of
machine numbers they cost 75 bytes each, and the collector never sees them. The identity of a slot
is the log offset of the CK record that filled it, so that a handle to an earlier use of the slot
never matches.

Two doubly linked lists run through the slots: the deliveries of one (group, topic, queue) in pop
order, and the deliveries of one deadline (`deadlines.py`).

The engine's single owner changes the table. A start rebuilds it from the snapshot and the log.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import final

import numpy as np

from tidemill.broker.engine.layout.delivery_rows import ROW, DeliveryRows, named_once
from tidemill.broker.engine.layout.numbers import DeliverySlot
from tidemill.broker.engine.layout.pop_checkpoint import (
    FLAG_GAPS,
    FLAG_ORDERED,
    FLAG_RELEASED,
    FLAG_RENEWS,
    FLAG_RETURNED,
    FLAG_SUPERSEDES,
    FLAG_SUSPEND,
    FLAG_UNPROVEN,
)
from tidemill.broker.engine.pop.deadlines import FLAG_DUE, DeadlineLists
from tidemill.broker.engine.pop.holder_numbers import UNHEARD, HolderNumbers
from tidemill.broker.engine.pop.linked_lists import link_runs, run_begins
from tidemill.message.client_key import NO_OWNER, ClientKey

FREE = -1  # delivery id of an empty slot
GROWTH = 4096  # slots added at once: a few hundred KiB
# In the column `handover`.
HANDOVER_PENDING = 1  # popped with renewal, and no proxy has confirmed that the client has it
UNPROVEN = FLAG_UNPROVEN  # unconfirmed at a start: not renewed until a proxy confirms it
RETURNED = FLAG_RETURNED  # the broker gave it back, so its deadline may be before its handles end
HANDOVER_STORED = UNPROVEN | RETURNED
FLAGS_STORED = (
    FLAG_GAPS | FLAG_SUPERSEDES | FLAG_ORDERED | FLAG_SUSPEND | FLAG_RELEASED | FLAG_RENEWS
)
# Of a scan for the deliveries of some holders.
HOLDERS_A_SCAN = 4_096
SLOTS_A_SCAN_SLICE = 65_536  # under 300 microseconds
AHEAD_MS = 1_000  # smaller corrections of the clock are ignored, to avoid a scan of all slots


@final
class DeliveryTable:
    """The columns of all live deliveries, and their deadlines."""

    def __init__(self) -> None:
        self.ids = array("q")
        self.owners = array("I")  # owner numbers, see `owner_numbers.py`
        self.starts = array("q")
        self.visible_at_ms = array("q")
        self.popped_at_ms = array("q")
        self.stated_at = array("q")  # log offset of the newest record with the whole row
        self.counts = array("B")
        self.flags = array("B")
        self.live = array("I")
        self.superseded = array("I")
        self.previous = array("I")  # in pop order of the queue
        self.next = array("I")
        self.holders = array("I")  # client numbers, see `clients`
        self.clients = HolderNumbers()
        # HANDOVER_PENDING is in no record and no snapshot.
        self.handover = array("B")
        self.gaps: dict[int, tuple[int, ...]] = {}
        self.deadlines = DeadlineLists(self.visible_at_ms, self.flags)
        # Free slots, the next one last. Slots in use may be among them if the fold placed a
        # delivery that another engine allocated. `allocate` skips those.
        self._free = array("I")
        self._is_listed = array("B")  # whether a slot is in `_free`
        self.used_count = 0

    # ------------------------------------------------------------ slots

    def allocate(self) -> DeliverySlot:
        """Return an empty slot. It stays empty until `place`."""
        while True:
            if not self._free:
                self.grow()
            slot = self._free.pop()
            self._is_listed[slot] = 0
            if self.ids[slot] == FREE:
                return slot  # type: ignore[return-value]  # A call of `Slot` doubles the cost.

    def release(self, slot: int) -> None:
        """Empty a slot that is in no list."""
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
        ):
            column.frombytes(zeros[: 4 * count])
        for column in (self.counts, self.flags, self.handover):
            column.frombytes(zeros[:count])
        self.deadlines.grow(count)
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
        client: ClientKey,
    ) -> None:
        """Fill an empty slot. The caller links it."""
        self.ids[slot] = self.stated_at[slot] = delivery_id
        self.owners[slot] = owner
        self.starts[slot] = start
        self.counts[slot] = count
        self.flags[slot] = flags
        self.visible_at_ms[slot] = visible_at_ms
        self.popped_at_ms[slot] = popped_at_ms
        self.live[slot] = (1 << count) - 1
        self.superseded[slot] = self.handover[slot] = 0
        if gaps is not None:
            self.gaps[slot] = gaps
        clients = self.clients
        number = clients.numbers.get(client)
        if number is None:
            if clients.has_too_many:
                self._recount_holders()
            number = clients.number_of(client)
        if not clients.counts[number] and clients.heard_at_ms[number] >= 0:
            # The time is old: clients without deliveries are not tracked. A client that has ended
            # (below 0) stays ended, because its pop may arrive late.
            clients.heard_at_ms[number] = UNHEARD
        clients.counts[number] += 1
        self.holders[slot] = number
        self.used_count += 1

    def _recount_holders(self) -> None:
        is_used = np.frombuffer(self.ids, dtype=np.int64) != FREE
        self.clients.recount(np.frombuffer(self.holders, dtype=np.uint32)[is_used])

    def in_flight_of(self, client: ClientKey) -> int:
        """Count the messages that a client holds. Scans all slots, 1 ms per million."""
        is_held = self.clients.are_of(client, np.frombuffer(self.holders, dtype=np.uint32))
        # An empty slot still has the number of its last holder.
        is_held &= np.frombuffer(self.ids, dtype=np.int64) != FREE
        return int(np.bitwise_count(np.frombuffer(self.live, dtype=np.uint32)[is_held]).sum())

    def client_of(self, slot: int) -> ClientKey:
        """Return the holder of a delivery."""
        return self.clients.clients[self.holders[slot]]

    def is_owned(self, slot: int, owner: int) -> bool:
        """Whether a client of this owner may hold a delivery."""
        return NO_OWNER in (owner, known := self.client_of(slot).owner) or owner == known

    def offset_of(self, slot: int, index: int) -> int:
        """Return the queue offset of a delivery's message."""
        gap = self.gaps[slot][index] if self.flags[slot] & FLAG_GAPS else index
        return self.starts[slot] + gap

    def end_of(self, slot: int) -> int:
        """Return the queue offset after a delivery's last message."""
        return self.offset_of(slot, self.counts[slot] - 1) + 1

    def indexes_of(self, bits: int) -> list[int]:
        """Return the positions of the set bits."""
        return [index for index in range(bits.bit_length()) if bits >> index & 1]

    # ------------------------------------------------------------ deadlines

    def set_deadline(self, slot: int, visible_at_ms: int) -> None:
        """Change the deadline of a delivery, also of one that is due."""
        self.deadlines.remove(slot)
        self.visible_at_ms[slot] = visible_at_ms
        self.flags[slot] &= FLAGS_STORED
        self.deadlines.add(slot)

    def due_slots(self) -> list[int]:
        """Return the slots in use that `deadlines.take_due` has removed from their lists."""
        is_due = np.frombuffer(self.flags, dtype=np.uint8) & FLAG_DUE != 0
        is_used = np.frombuffer(self.ids, dtype=np.int64) != FREE
        due: list[int] = np.flatnonzero(is_due & is_used).tolist()
        return due

    # ------------------------------------------------------------ rows, many at once

    def in_use(self, begin: int, end: int) -> np.ndarray:
        """Return the slots from `begin` to `end` that hold a delivery."""
        ids = np.frombuffer(self.ids, dtype=np.int64)[begin:end]
        return np.flatnonzero(ids != FREE) + begin

    def rows_of(self, slots: np.ndarray, queues: np.ndarray) -> DeliveryRows:
        """Return slots as delivery rows. `queues` has the (group, topic, queue) of each."""
        rows = np.empty(len(slots), dtype=ROW)
        rows["slot"] = slots
        rows["group_id"], rows["topic_id"], rows["queue_id"] = queues.T
        for name, column in self._stored_columns():
            rows[name] = np.frombuffer(column, dtype=column.typecode)[slots]
        rows["flags"] = np.frombuffer(self.flags, dtype=np.uint8)[slots] & FLAGS_STORED
        rows["flags"] |= np.frombuffer(self.handover, dtype=np.uint8)[slots] & HANDOVER_STORED
        with_gaps = np.flatnonzero(rows["flags"] & FLAG_GAPS).tolist()
        gaps = {number: self.gaps[int(slots[number])] for number in with_gaps}
        numbers = np.frombuffer(self.holders, dtype=np.uint32)[slots]
        return named_once(rows, gaps, numbers, self.clients.clients)

    def load(self, rows: np.ndarray, owners: np.ndarray, holders: np.ndarray) -> None:
        """Load the rows that are later uses of their slots. `relink` builds the lists."""
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
        np.frombuffer(self.handover, dtype=np.uint8)[slots] = rows["flags"] & HANDOVER_STORED
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
        """Build the free list, the deadline lists and the lists in pop order.

        Return the slots with live messages, sorted by owner and delivery id, and the positions at
        which each owner begins. No Python loop runs over deliveries.
        """
        ids = np.frombuffer(self.ids, dtype=np.int64)
        free = np.flatnonzero(ids == FREE)[::-1].astype(np.uint32)
        used = np.flatnonzero(ids != FREE)
        self.used_count = len(used)
        self._free = array("I", free.tobytes())
        np.frombuffer(self._is_listed, dtype=np.uint8)[:] = ids == FREE
        flags = np.frombuffer(self.flags, dtype=np.uint8)
        flags[used] &= FLAGS_STORED
        self.deadlines.rebuild(used, now_ms=now_ms)
        self._recount_holders()
        self.clients.is_counting = True
        live = used[np.frombuffer(self.live, dtype=np.uint32)[used] != 0]
        owners = np.frombuffer(self.owners, dtype=np.uint32)[live]
        order = np.lexsort((ids[live], owners))
        live, owners = live[order], owners[order]
        begins = run_begins(owners)
        link_runs(self.previous, self.next, live, begins)
        return live, begins

    def held_from(
        self, begin: int, numbers: Iterable[int], *, expiry_ms: int
    ) -> tuple[np.ndarray, int]:
        """Return the slots of one slice of a scan, and where the next slice begins.

        The slots have live deliveries of the holders with these numbers. Due deliveries are not
        among them: revive handles these, and giving them back would delay them.
        """
        end = min(begin + SLOTS_A_SCAN_SLICE, len(self.ids))
        is_wanted = np.zeros(len(self.clients.clients), dtype=bool)
        is_wanted[list(numbers)] = True
        is_held = is_wanted[np.frombuffer(self.holders, dtype=np.uint32)[begin:end]]
        is_held &= np.frombuffer(self.ids, dtype=np.int64)[begin:end] != FREE
        is_held &= np.frombuffer(self.live, dtype=np.uint32)[begin:end] != 0
        is_held &= np.frombuffer(self.flags, dtype=np.uint8)[begin:end] & FLAG_DUE == 0
        is_held &= np.frombuffer(self.visible_at_ms, dtype=np.int64)[begin:end] > expiry_ms
        return np.flatnonzero(is_held) + begin, end

    def popped_ahead_of(self, now_ms: int) -> np.ndarray:
        """Return the slots in use whose delivery was popped in the future."""
        ids = np.frombuffer(self.ids, dtype=np.int64)
        popped = np.frombuffer(self.popped_at_ms, dtype=np.int64)
        return np.flatnonzero((ids != FREE) & (popped > now_ms + AHEAD_MS))

    def set_times(self, slots: np.ndarray, rows: np.ndarray, *, is_linked: bool) -> None:
        """Set the pop times and deadlines of deliveries from their rows.

        `is_linked` states whether the slots are in deadline lists.
        """
        times = rows["visible_at_ms"].tolist(), rows["popped_at_ms"].tolist()
        for slot, visible_at_ms, popped_at_ms in zip(slots.tolist(), *times, strict=True):
            if is_linked:
                self.deadlines.remove(slot)
            self.visible_at_ms[slot], self.popped_at_ms[slot] = visible_at_ms, popped_at_ms
            if is_linked:
                # An engine that follows may have removed it as due.
                self.flags[slot] &= FLAGS_STORED
                self.deadlines.add(slot)
