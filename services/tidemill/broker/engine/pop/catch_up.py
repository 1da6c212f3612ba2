"""Catch-up with a snapshot. Its slices were written at different moments.

Each slice contains everything before its own log offset. An entry of the log changes only the
slices that do not contain it. Meanwhile the lists through the delivery table are not maintained:
`finish` builds them when the log has passed the newest slice. Without a snapshot the catch-up ends
at the end of the log, because the log states again what only its deleted segments contained.

A delivery of an ordered queue is in the same slice as the queue's progress. A later slice may use
its slot again. Settling the first use must still change the queue (`displace`).
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
    FLAG_RENEWS,
    FLAG_SUPERSEDES,
)
from tidemill.broker.engine.layout.snapshot import SLOTS_A_SLICE
from tidemill.broker.engine.pop.delivery_table import FREE, RETURNED
from tidemill.broker.engine.pop.linked_lists import NIL
from tidemill.broker.engine.pop.progress import VOID, OrderedState, PopProgress
from tidemill.broker.engine.pop.state import RENEWED_HANDLE_MS, PopState
from tidemill.broker.engine.pop.stated_rows import load_delivery, load_progress
from tidemill.message.client_key import UNKNOWN_CLIENT

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.delivery_rows import DeliveryRows
    from tidemill.broker.engine.layout.progress_rows import ProgressRow

# Slices of the table, 7 MiB of rows. Each may have a thousand queues, which are looked up once.
SLICES_TOGETHER = 64


@final
class CatchUp:
    """The content of each slice, and the steps that end the catch-up."""

    def __init__(self, state: PopState) -> None:
        self._state = state
        state.table.clients.is_counting = False
        self._progress_covered: dict[int, int] = {}  # by index of the progress
        self._slots_covered: dict[int, int] = {}  # by number of the slice
        self._together: list[DeliveryRows] = []  # rows of table slices that are not loaded yet
        # Deliveries of ordered queues, after a later slice used their slot again: the queue and
        # the offsets of their messages, by (slot, delivery id).
        self._displaced: dict[tuple[int, int], tuple[PopProgress, list[int]]] = {}

    # ------------------------------------------------------------ coverage

    def is_new_to_progress(self, progress: PopProgress, log_offset: LogOffset) -> bool:
        """Return whether the progress of a queue lacks the record at `log_offset`."""
        return log_offset >= self._progress_covered.get(progress.index, 0)

    def is_new_to_slot(self, slot: int, progress: PopProgress, log_offset: LogOffset) -> bool:
        """Return whether a slot lacks the record at `log_offset` about a queue's delivery."""
        if progress.ordered is not None:
            # The deliveries of an ordered queue are in the same slice as its progress.
            return self.is_new_to_progress(progress, log_offset)
        return log_offset >= self._slots_covered.get(slot // SLOTS_A_SLICE, 0)

    def may_place(self, slot: int, delivery_id: int) -> bool:
        """Return whether a delivery is a later use of a slot than the known one."""
        return self._state.table.ids[slot] < delivery_id

    # ------------------------------------------------------------ slices

    def load_progress(self, rows: list[ProgressRow], covered: int) -> bool:
        """Load a PROGRESS section. Return False if newer progress was known for each queue."""
        state = self._state
        stated_at = {state.progress_of(*row[:3]).index: row.stated_at for row in rows}
        changed = load_progress(state, rows, LogOffset(covered))
        for progress in changed:
            self._progress_covered[progress.index] = covered
            # A section is not a record. It names the record that states the progress.
            progress.stated_at = stated_at[progress.index]
        return bool(changed)

    def load_ordered(self, row: ProgressRow, deliveries: DeliveryRows, covered: int) -> None:
        """Load an ordered queue."""
        # A slice that is not loaded yet may have an earlier or later use of one of its slots.
        self.end_deliveries()
        if self.load_progress([row], covered):
            self._load_rows(deliveries)

    def load_deliveries(self, number: int, deliveries: DeliveryRows, covered: int) -> None:
        """Queue slice `number` of the table. `end_deliveries` loads it at the latest."""
        self._slots_covered[number] = covered
        self._together.append(deliveries)
        if len(self._together) == SLICES_TOGETHER:
            self.end_deliveries()

    def end_deliveries(self) -> None:
        """Load the queued slices of the table."""
        if self._together:
            together, self._together = delivery_rows.joined(self._together), []
            self._load_rows(together)

    def _load_rows(self, deliveries: DeliveryRows) -> None:
        state, rows = self._state, deliveries.rows
        if not len(rows):
            return
        clients, holders = (UNKNOWN_CLIENT, *deliveries.clients), deliveries.holder_numbers
        for slot in self._ordered_among(rows["slot"]):
            self.displace(slot)
        plain = (rows["flags"] & (FLAG_GAPS | FLAG_ORDERED)) == 0
        plain_rows = rows[plain]
        firsts, triples_at = _triples_of(plain_rows)
        columns = (
            plain_rows[name][firsts].tolist() for name in ("group_id", "topic_id", "queue_id")
        )
        known, owners = state.progress, []
        for key in zip(*columns, strict=True):
            progress = known.get(key) or state.progress_of(*key)
            owners.append(progress.index)
        numbers = np.array(list(map(state.table.clients.number_of, clients)), dtype=np.uint32)
        state.table.load(
            plain_rows, np.array(owners, dtype=np.uint32)[triples_at], numbers[holders[plain]]
        )
        for number in np.flatnonzero(~plain).tolist():
            load_delivery(
                state,
                rows[number].item(),
                deliveries.gaps.get(number),
                clients[int(holders[number])],
            )

    def _ordered_among(self, slots: np.ndarray) -> list[int]:
        """Return the slots among `slots` that hold a delivery of an ordered queue."""
        table = self._state.table
        slots = slots[slots < len(table.ids)].astype(np.int64)
        ids = np.frombuffer(table.ids, dtype=np.int64)[slots]
        flags = np.frombuffer(table.flags, dtype=np.uint8)[slots]
        found: list[int] = slots[(ids != FREE) & (flags & FLAG_ORDERED > 0)].tolist()
        return found

    # ------------------------------------------------------------ displaced deliveries

    def displace(self, slot: int) -> None:
        """Remember a delivery of an ordered queue before a later use of its slot is loaded."""
        table = self._state.table
        if table.ids[slot] != FREE and table.flags[slot] & FLAG_ORDERED:
            progress = self._state.owners[table.owners[slot]]
            offsets = [table.offset_of(slot, index) for index in range(table.counts[slot])]
            self._displaced[slot, table.ids[slot]] = progress, offsets

    def note_displaced(
        self, slot: int, delivery_id: int, progress: PopProgress, offsets: list[int]
    ) -> None:
        """Remember a delivery after a later use of its slot was loaded."""
        if progress.ordered is not None:
            self._displaced[slot, delivery_id] = progress, offsets

    def settle_displaced(
        self, slot: int, delivery_id: int, bits: int, log_offset: LogOffset
    ) -> None:
        """Settle messages of a remembered delivery."""
        progress, offsets = self._displaced.get((slot, delivery_id), (None, []))
        if progress is None or not self.is_new_to_progress(progress, log_offset):
            return
        assert progress.ordered is not None, "only deliveries of ordered queues are remembered"
        for index in self._state.table.indexes_of(bits):
            progress.ordered.pending.pop(offsets[index], None)

    # ------------------------------------------------------------ the end

    def finish(self, *, now_ms: int) -> None:
        """Drop void deliveries and build the lists. Then every entry changes the whole state."""
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
                state.index.remove(progress)
            group = state.catalog.groups.get(progress.group_id)
            if group is not None and group.is_ordered and progress.ordered is None:
                # The log had a reset before the record that states the group again.
                progress.ordered = OrderedState()
        state.catch_up = None
        self._release_before([owner.void_before for owner in state.owners], keeps_replaced=False)
        batches = [owner.ordered.batch_id if owner.ordered else 0 for owner in state.owners]
        self._release_before(batches, keeps_replaced=True)
        state.index.renumber()
        self._make_lists(now_ms=now_ms)
        self._count_slots()

    def _release_before(self, floors: list[int], *, keeps_replaced: bool) -> None:
        """Empty the slots with a delivery id below the floor of their owner."""
        table = self._state.table
        slots = table.in_use(0, len(table.ids))
        if not len(slots):
            return
        owners = np.frombuffer(table.owners, dtype=np.uint32)[slots]
        ids = np.frombuffer(table.ids, dtype=np.int64)[slots]
        below = slots[ids < np.array(floors, dtype=np.int64)[owners]]
        if keeps_replaced:
            flags = np.frombuffer(table.flags, dtype=np.uint8)[below]
            handover = np.frombuffer(table.handover, dtype=np.uint8)[below]
            released = below[(flags & FLAG_RELEASED > 0) | (handover & RETURNED > 0)]
            live = np.frombuffer(table.live, dtype=np.uint32)[released]
            # Their handles have not ended, so the table must reject them, as `PopState` does.
            np.frombuffer(table.superseded, dtype=np.uint32)[released] |= live
            is_replaced = np.frombuffer(table.superseded, dtype=np.uint32)[below] != 0
            replaced = below[is_replaced]
            np.frombuffer(table.live, dtype=np.uint32)[replaced] = 0
            self._end_with_handles(replaced)
            below = below[~is_replaced]
        np.frombuffer(table.ids, dtype=np.int64)[below] = FREE
        for slot in table.gaps.keys() & set(below.tolist()):
            del table.gaps[slot]

    def _end_with_handles(self, slots: np.ndarray) -> None:
        """Move deadlines of renewed and returned slots to the end of their handles.

        `PopState` does the same.
        """
        table = self._state.table
        flags = np.frombuffer(table.flags, dtype=np.uint8)
        renewed = slots[flags[slots] & FLAG_RENEWS > 0]
        ends_ms = np.frombuffer(table.popped_at_ms, dtype=np.int64)[renewed] + RENEWED_HANDLE_MS
        visible_at_ms = np.frombuffer(table.visible_at_ms, dtype=np.int64)
        visible_at_ms[renewed] = np.minimum(visible_at_ms[renewed], ends_ms)
        handover = np.frombuffer(table.handover, dtype=np.uint8)
        returned = slots[handover[slots] & RETURNED > 0]
        popped_at_ms = np.frombuffer(table.popped_at_ms, dtype=np.int64)
        visible_at_ms[returned] = popped_at_ms[returned] + RENEWED_HANDLE_MS

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
        # For each position, the next one with a delivery that a pop made.
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

    def _count_slots(self) -> None:
        """Count the slots that each group uses."""
        state, table = self._state, self._state.table
        slots = table.in_use(0, len(table.ids))
        owners = np.frombuffer(table.owners, dtype=np.uint32)[slots]
        is_live = np.frombuffer(table.live, dtype=np.uint32)[slots] != 0
        live = np.bincount(owners[is_live], minlength=len(state.owners)).tolist()
        kept = np.bincount(owners[~is_live], minlength=len(state.owners)).tolist()
        state.index.forget_slots()
        for progress, live_count, kept_count in zip(state.owners, live, kept, strict=True):
            progress.slots = state.index.slots_of(progress.group_id)
            progress.slots.live += live_count
            progress.slots.kept += kept_count
        state.kept_count = sum(kept)


def _triples_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return one row of each (group, topic, queue), and for each row the number of its triple.

    Two steps, because the three numbers do not fit into one integer that sorts fast.
    """
    queues = rows["topic_id"].astype(np.int64) << 16 | rows["queue_id"]
    _, queues_at = np.unique(queues, return_inverse=True)
    triples = rows["group_id"].astype(np.int64) << 24 | queues_at
    _, firsts, triples_at = np.unique(triples, return_index=True, return_inverse=True)
    return firsts, triples_at
