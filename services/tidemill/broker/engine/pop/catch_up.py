"""Catching up with a snapshot: its slices are of different moments, until the log has passed them.

A slice says before which log offset it contains everything, so that an entry is applied to the
slices that lack it and to no other. The lists through the delivery table are not kept meanwhile:
`finish` makes them at once, when the log has passed the last slice. A log whose first segments are
gone, without a snapshot, is caught up with at its end: what only those segments stated is stated
again later in it.

A delivery of an ordered queue is in the same slice as the queue's progress, and its slot may have
been used again in a later slice: settling the first use must still reach the queue (`displace`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

from tidemill.broker.engine.layout import delivery_rows
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.pop_checkpoint import (
    FLAG_GAPS,
    FLAG_ORDERED,
    FLAG_RELEASED,
    FLAG_SUPERSEDES,
)
from tidemill.broker.engine.layout.snapshot import SLOTS_A_SLICE
from tidemill.broker.engine.pop.delivery_table import FREE, NIL
from tidemill.broker.engine.pop.progress import VOID, OrderedState, PopProgress

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.delivery_rows import DeliveryRows
    from tidemill.broker.engine.layout.progress_rows import ProgressRow
    from tidemill.broker.engine.pop.state import PopState

# Of the table. Each may be of a thousand queues, which are looked up once for all: 7 MiB of rows.
SLICES_TOGETHER = 64


@final
class CatchUp:
    """What each slice contains, and what the end of it all makes."""

    def __init__(self, state: PopState) -> None:
        self._state = state
        state.table.clients.is_counting = False
        self._progress_covered: dict[int, int] = {}  # by index of the progress
        self._slots_covered: dict[int, int] = {}  # by number of the slice
        self._together: list[DeliveryRows] = []  # of slices of the table that are not loaded yet
        # (slot, delivery id) of deliveries of ordered queues whose slot is used again in a later
        # slice, with what their settlement must still reach.
        self._displaced: dict[tuple[int, int], tuple[PopProgress, list[int]]] = {}

    # ------------------------------------------------------------ what contains what

    def is_new_to_progress(self, progress: PopProgress, log_offset: LogOffset) -> bool:
        """Whether the progress of a queue lacks what the record at `log_offset` says."""
        return log_offset >= self._progress_covered.get(progress.index, 0)

    def is_new_to_slot(self, slot: int, progress: PopProgress, log_offset: LogOffset) -> bool:
        """Whether a slot lacks what the record at `log_offset` says of a queue's delivery."""
        if progress.ordered is not None:
            # The deliveries of an ordered queue are in the same slice as its progress.
            return self.is_new_to_progress(progress, log_offset)
        return log_offset >= self._slots_covered.get(slot // SLOTS_A_SLICE, 0)

    def may_place(self, slot: int, delivery_id: int) -> bool:
        """Whether a delivery is a later use of a slot than the one that is known."""
        return self._state.table.ids[slot] < delivery_id

    # ------------------------------------------------------------ slices

    def load_progress(self, rows: list[ProgressRow], covered: int) -> bool:
        """Take a PROGRESS section over; False when a later one was known of all of it."""
        state = self._state
        stated_at = {state.progress_of(*row[:3]).index: row.stated_at for row in rows}
        taken = state.apply_progress(rows, LogOffset(covered))
        for progress in taken:
            self._progress_covered[progress.index] = covered
            # The section is no record: it says which one states the progress.
            progress.stated_at = stated_at[progress.index]
        return bool(taken)

    def load_ordered(self, row: ProgressRow, deliveries: DeliveryRows, covered: int) -> None:
        """Take an ordered queue over."""
        # One of its slots may be in a slice that is to be loaded, of an earlier or a later use.
        self.end_deliveries()
        if self.load_progress([row], covered):
            self._load_rows(deliveries)

    def load_deliveries(self, number: int, deliveries: DeliveryRows, covered: int) -> None:
        """Take slice `number` of the table over, at `end_deliveries` at the latest."""
        self._slots_covered[number] = covered
        self._together.append(deliveries)
        if len(self._together) == SLICES_TOGETHER:
            self.end_deliveries()

    def end_deliveries(self) -> None:
        """Load the slices of the table that were handed over."""
        if self._together:
            together, self._together = delivery_rows.joined(self._together), []
            self._load_rows(together)

    def _load_rows(self, deliveries: DeliveryRows) -> None:
        state, rows = self._state, deliveries.rows
        if not len(rows):
            return
        client_ids, holders = ("", *deliveries.clients), deliveries.holder_numbers
        for slot in self._ordered_among(rows["slot"]):
            self.displace(slot)
        plain = (rows["flags"] & (FLAG_GAPS | FLAG_ORDERED)) == 0
        plain_rows = rows[plain]
        firsts, places_at = _places_of(plain_rows)
        columns = (
            plain_rows[name][firsts].tolist() for name in ("group_id", "topic_id", "queue_id")
        )
        known, owners = state.progress, []
        for key in zip(*columns, strict=True):
            progress = known.get(key) or state.progress_of(*key)
            owners.append(progress.index)
        numbers = np.array(list(map(state.table.clients.number_of, client_ids)), dtype=np.uint32)
        state.table.load(
            plain_rows, np.array(owners, dtype=np.uint32)[places_at], numbers[holders[plain]]
        )
        for number in np.flatnonzero(~plain).tolist():
            state.load_row(
                rows[number].item(), deliveries.gaps.get(number), client_ids[int(holders[number])]
            )

    def _ordered_among(self, slots: np.ndarray) -> list[int]:
        """Return which of `slots` hold a delivery of an ordered queue."""
        table = self._state.table
        slots = slots[slots < len(table.ids)].astype(np.int64)
        ids = np.frombuffer(table.ids, dtype=np.int64)[slots]
        flags = np.frombuffer(table.flags, dtype=np.uint8)[slots]
        found: list[int] = slots[(ids != FREE) & (flags & FLAG_ORDERED > 0)].tolist()
        return found

    # ------------------------------------------------------------ displaced deliveries

    def displace(self, slot: int) -> None:
        """Remember a delivery of an ordered queue before a later use of its slot is taken over."""
        table = self._state.table
        if table.ids[slot] != FREE and table.flags[slot] & FLAG_ORDERED:
            progress = self._state.owners[table.owners[slot]]
            offsets = [table.offset_of(slot, index) for index in range(table.counts[slot])]
            self._displaced[slot, table.ids[slot]] = progress, offsets

    def note_displaced(
        self, slot: int, delivery_id: int, progress: PopProgress, offsets: list[int]
    ) -> None:
        """Remember a delivery that cannot be placed, since a later use of its slot is known."""
        if progress.ordered is not None:
            self._displaced[slot, delivery_id] = progress, offsets

    def settle_displaced(
        self, slot: int, delivery_id: int, bits: int, log_offset: LogOffset
    ) -> None:
        """Settle messages of a delivery whose slot has a later use."""
        progress, offsets = self._displaced.get((slot, delivery_id), (None, []))
        if progress is None or not self.is_new_to_progress(progress, log_offset):
            return
        assert progress.ordered is not None, "only deliveries of ordered queues are remembered"
        for index in self._state.table.indexes_of(bits):
            progress.ordered.pending.pop(offsets[index], None)

    # ------------------------------------------------------------ the end

    def finish(self, *, now_ms: int) -> None:
        """Drop what is void, and make the lists: from here on every entry is new to everything."""
        state = self._state
        state.catalog.forget_orphans()
        for (group_id, topic_id), retry_id in state.catalog.retry_topic_ids.items():
            state.add_retry_topic(group_id, topic_id, retry_id)
        for progress in list(state.progress.values()):
            is_known = (
                progress.group_id in state.catalog.groups
                and progress.topic_id in state.catalog.topics
            )
            if not is_known:
                progress.void_before = VOID
                state.drop(progress)
            group = state.catalog.groups.get(progress.group_id)
            if group is not None and group.is_ordered and progress.ordered is None:
                # A reset was met before the record that states the group again.
                progress.ordered = OrderedState()
        state.catch_up = None
        self._release_before([owner.void_before for owner in state.owners], keeps_replaced=False)
        batches = [owner.ordered.batch_id if owner.ordered else 0 for owner in state.owners]
        self._release_before(batches, keeps_replaced=True)
        state.renumber()
        self._make_lists(now_ms=now_ms)

    def _release_before(self, floors: list[int], *, keeps_replaced: bool) -> None:
        """Empty the slots whose identity is below the floor of their owner."""
        table = self._state.table
        slots = table.in_use(0, len(table.ids))
        if not len(slots):
            return
        owners = np.frombuffer(table.owners, dtype=np.uint32)[slots]
        ids = np.frombuffer(table.ids, dtype=np.int64)[slots]
        below = slots[ids < np.array(floors, dtype=np.int64)[owners]]
        if keeps_replaced:
            flags = np.frombuffer(table.flags, dtype=np.uint8)[below]
            released = below[flags & FLAG_RELEASED > 0]
            live = np.frombuffer(table.live, dtype=np.uint32)[released]
            # As when a new batch voids them: their handles say that they last.
            np.frombuffer(table.superseded, dtype=np.uint32)[released] |= live
            is_replaced = np.frombuffer(table.superseded, dtype=np.uint32)[below] != 0
            replaced = below[is_replaced]
            np.frombuffer(table.live, dtype=np.uint32)[replaced] = 0
            self._state.end_with_handles(replaced)
            below = below[~is_replaced]
        np.frombuffer(table.ids, dtype=np.int64)[below] = FREE
        for slot in table.gaps.keys() & set(below.tolist()):
            del table.gaps[slot]

    def _make_lists(self, *, now_ms: int) -> None:
        state, table = self._state, self._state.table
        for progress in state.owners:
            progress.head = progress.tail = progress.oldest = NIL
            progress.in_flight = 0
        slots, begins = table.relink(now_ms=now_ms)
        if not len(slots):
            return
        live = np.bitwise_count(np.frombuffer(table.live, dtype=np.uint32)[slots])
        totals = np.add.reduceat(live, begins, dtype=np.int64).tolist()
        ends = np.append(begins[1:], len(slots))
        popped = np.frombuffer(table.flags, dtype=np.uint8)[slots] & FLAG_SUPERSEDES == 0
        # Of each position the first one from there on that a pop has made.
        positions = np.where(popped, np.arange(len(slots)), len(slots))
        first_popped = np.minimum.accumulate(positions[::-1])[::-1][begins]
        heads = np.frombuffer(table.owners, dtype=np.uint32)[slots[begins]].tolist()
        for number, owner in enumerate(heads):
            progress = state.owners[owner]
            progress.head = int(slots[begins[number]])
            progress.tail = int(slots[ends[number] - 1])
            progress.in_flight = totals[number]
            first = int(first_popped[number])
            progress.oldest = int(slots[first]) if first < ends[number] else NIL


def _places_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a row of each (group, topic, queue) by number, and of each row which one it is of.

    In two steps, since the three numbers do not fit into one that is fast to sort.
    """
    queues = rows["topic_id"].astype(np.int64) << 16 | rows["queue_id"]
    _, queues_at = np.unique(queues, return_inverse=True)
    places = rows["group_id"].astype(np.int64) << 24 | queues_at
    _, firsts, places_at = np.unique(places, return_index=True, return_inverse=True)
    return firsts, places_at
