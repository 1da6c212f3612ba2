"""Progress and deliveries as rows: for STATE records and for sections of a snapshot.

`apply_stated_progress` and `apply_stated_deliveries` apply STATE records. `load_progress` and
`load_delivery` take single rows over while an engine catches up. The other functions make rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tidemill.broker.engine.layout.delivery_rows import DeliveryRows
from tidemill.broker.engine.layout.numbers import GroupId, LogOffset, QueueId, TopicId
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_ORDERED, FLAG_RELEASED
from tidemill.broker.engine.layout.progress_rows import ProgressRow
from tidemill.broker.engine.layout.snapshot import SLOTS_A_SLICE
from tidemill.broker.engine.layout.state import StatedDeliveries, StatedProgress
from tidemill.broker.engine.pop.delivery_table import FLAGS_STORED, FREE, HANDOVER_STORED
from tidemill.broker.engine.pop.progress import OrderedState, PopProgress
from tidemill.broker.engine.pop.state import PopState
from tidemill.message.client_key import UNKNOWN_CLIENT, ClientKey

DELIVERIES_A_STATE_RECORD = 1024  # 56 KiB, without their gaps


def apply_stated_progress(state: PopState, entry: StatedProgress, log_offset: LogOffset) -> None:
    """Apply a STATE record of progress."""
    load_progress(state, entry.rows, log_offset)


def load_progress(
    state: PopState, rows: list[ProgressRow], log_offset: LogOffset
) -> list[PopProgress]:
    """Take over positions that contain everything before `log_offset`. Return the changed ones."""
    changed = []
    for row in rows:
        progress = state.progress_of(row.group_id, row.topic_id, row.queue_id)
        if state.catch_up and not state.catch_up.is_new_to_progress(progress, log_offset):
            continue
        progress.pop_offset = progress.position = row.pop_offset
        progress.void_before = row.void_before
        progress.named_topic_id = row.named_topic_id
        progress.stated_at = log_offset
        if row.ordered is not None:
            progress.ordered = OrderedState(
                dict(row.ordered.pending), row.ordered.attempt_id, row.ordered.batch_id
            )
        changed.append(progress)
    return changed


def apply_stated_deliveries(
    state: PopState, entry: StatedDeliveries, log_offset: LogOffset
) -> None:
    """Apply a STATE record of deliveries.

    Record its log offset in their rows, and take over their times and the released flag. While the
    engine catches up, also add the deliveries that no other entry states.
    """
    deliveries = entry.deliveries
    table, rows = state.table, deliveries.rows
    is_new = np.ones(len(rows), dtype=bool)
    if state.catch_up is not None:
        clients, holders = (UNKNOWN_CLIENT, *deliveries.clients), deliveries.holder_numbers
        for number, row in enumerate(rows.tolist()):
            progress = state.progress_of(*row[2:5])
            is_new[number] = state.catch_up.is_new_to_slot(row[0], progress, log_offset)
            if is_new[number]:
                client = clients[int(holders[number])]
                load_delivery(state, row, deliveries.gaps.get(number), client)
    is_inside = rows["slot"] < len(table.ids)
    rows, is_new = rows[is_inside], is_new[is_inside]
    slots = rows["slot"].astype(np.int64)
    is_same = np.frombuffer(table.ids, dtype=np.int64)[slots] == rows["delivery_id"]
    np.frombuffer(table.stated_at, dtype=np.int64)[slots[is_same]] = log_offset
    is_released = is_same & is_new & (rows["flags"] & FLAG_RELEASED > 0)
    np.frombuffer(table.flags, dtype=np.uint8)[slots[is_released]] |= FLAG_RELEASED
    # Times differ only if a start has restarted deliveries that were popped in the future.
    is_moved = np.frombuffer(table.visible_at_ms, dtype=np.int64)[slots] != rows["visible_at_ms"]
    changed = is_same & is_new & is_moved
    table.set_times(slots[changed], rows[changed], is_linked=state.catch_up is None)


def load_delivery(
    state: PopState, row: tuple[int, ...], gaps: tuple[int, ...] | None, client: ClientKey
) -> None:
    """Take over one row while the engine catches up. The latest use of a slot wins."""
    slot, delivery_id, group_id, topic_id, queue_id, count, flags, *times_and_bits = row
    start, visible_at_ms, popped_at_ms, live, superseded = times_and_bits
    assert state.catch_up is not None, "rows are taken over only while the state catches up"
    table = state.table
    table.grow_to(slot + 1)
    state.catch_up.displace(slot)
    if table.ids[slot] != FREE:
        if not state.catch_up.may_place(slot, delivery_id):
            return
        table.release(slot)
    progress = state.progress_of(GroupId(group_id), TopicId(topic_id), QueueId(queue_id))
    if flags & FLAG_ORDERED and progress.ordered is None:
        progress.ordered = OrderedState()
    table.place(
        slot,
        delivery_id,
        progress.index,
        start,
        count,
        flags & FLAGS_STORED,
        visible_at_ms,
        popped_at_ms,
        gaps,
        client,
    )
    table.live[slot] = live
    table.superseded[slot] = superseded
    table.handover[slot] = flags & HANDOVER_STORED


def delivery_rows_of(state: PopState, slots: np.ndarray) -> DeliveryRows:
    """Return deliveries as rows for a snapshot or a STATE record."""
    owners = np.frombuffer(state.table.owners, dtype=np.uint32)[slots]
    used, used_at = np.unique(owners, return_inverse=True)
    queues = [
        (owner.group_id, owner.topic_id, owner.queue.queue_id)
        for owner in (state.owners[index] for index in used.tolist())
    ]
    of_used = np.array(queues, dtype=np.uint32).reshape(-1, 3)
    return state.table.rows_of(slots, of_used[used_at])


def slot_ranges(state: PopState) -> Iterator[tuple[int, int]]:
    """Yield the slot ranges of the table, one per section of a snapshot."""
    for begin in range(0, len(state.table.ids), SLOTS_A_SLICE):
        yield begin, begin + SLOTS_A_SLICE


def restarted_deliveries(state: PopState, now_ms: int) -> Iterator[StatedDeliveries]:
    """Yield entries that restart at `now_ms` the deliveries that were popped in the future.

    The clock of an earlier process was ahead. The deliveries keep their invisible durations.
    """
    slots = state.table.popped_ahead_of(now_ms)
    for begin in range(0, len(slots), DELIVERIES_A_STATE_RECORD):
        deliveries = delivery_rows_of(state, slots[begin : begin + DELIVERIES_A_STATE_RECORD])
        rows = deliveries.rows
        rows["visible_at_ms"] += now_ms - rows["popped_at_ms"]
        rows["popped_at_ms"] = now_ms
        yield StatedDeliveries(deliveries)
