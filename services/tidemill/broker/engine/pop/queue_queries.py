"""Answers about one queue of a group: its offset, its locks, and its messages about to expire.

None of these functions changes the state.
"""

from __future__ import annotations

from tidemill.broker.engine.layout.expiry import ExpiredRange
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_RELEASED, FLAG_RENEWS, is_counted
from tidemill.broker.engine.pop.deadlines import FLAG_DUE
from tidemill.broker.engine.pop.linked_lists import NIL
from tidemill.broker.engine.pop.progress import PopProgress
from tidemill.broker.engine.pop.state import PopState


def consumer_offset(state: PopState, progress: PopProgress) -> int:
    """Return the offset below which no pop holds an unsettled message. Only a reset lowers it."""
    if progress.ordered is not None:
        return min(progress.ordered.pending, default=progress.position)
    if progress.oldest == NIL:
        return progress.position
    return state.table.starts[progress.oldest]


def ordered_attempt(state: PopState, progress: PopProgress, slot: int, offset: int) -> int:
    """Return the delivery attempt of a message that an ordered delivery holds."""
    assert progress.ordered is not None
    return progress.ordered.pending.get(offset, 1) - is_counted(state.table.flags[slot])


def is_locking(state: PopState, slot: int, now_ms: int) -> bool:
    """Return whether a live delivery of an ordered queue blocks the next pop.

    A renewed delivery blocks it until revive has handled its deadline: it may be extended.
    """
    flags = state.table.flags[slot]
    if flags & FLAG_RELEASED:
        return False
    is_undecided = flags & (FLAG_RENEWS | FLAG_DUE) == FLAG_RENEWS
    return is_undecided or state.table.visible_at_ms[slot] > now_ms


def locking_slots(state: PopState, progress: PopProgress) -> list[int]:
    """Return the slots of the deliveries that lock an ordered queue, in pop order."""
    if progress.ordered is None:
        return []
    flags = state.table.flags
    return [
        slot
        for slot in state.deliveries_of(progress)
        if not flags[slot] & (FLAG_DUE | FLAG_RELEASED)
    ]


def held_offsets(state: PopState, progress: PopProgress) -> set[int]:
    """Return the offsets of the messages of an ordered queue that clients hold.

    The messages of deliveries that ran out or were released are not among them: they wait.
    """
    table = state.table
    return {
        table.offset_of(slot, index)
        for slot in locking_slots(state, progress)
        for index in table.indexes_of(table.live[slot])
    }


def waiting_offsets(progress: PopProgress, held: set[int]) -> list[int]:
    """Return the offsets of the pending messages of an ordered queue that are not in `held`.

    The next pops take them first. Deliveries that ran out or were released had them, or earlier
    ones: a batch may be smaller than the one that it replaces, and the rest is in no delivery.
    """
    if progress.ordered is None:
        return []
    low = progress.queue.min_offset
    return [offset for offset in progress.ordered.pending if offset >= low and offset not in held]


def find_expired(state: PopState, progress: PopProgress, end: int) -> list[ExpiredRange]:
    """Return the messages before `end` that the group would lose if retention removed them.

    These are messages that no pop has taken and, in an ordered queue, pending messages in no
    delivery. The messages of live deliveries are not included: they may still be acked.
    """
    low, position = progress.queue.min_offset, progress.position
    key = progress.group_id, progress.topic_id, progress.queue.queue_id
    ordered = progress.ordered
    delivered: set[int] = set()
    if ordered is not None and ordered.pending:
        table = state.table
        delivered = {
            table.offset_of(slot, index)
            for slot in state.deliveries_of(progress)
            for index in table.indexes_of(table.live[slot])
        }
    found: list[ExpiredRange] = []
    for offset in sorted(ordered.pending) if ordered is not None else ():
        if low <= offset < min(end, position) and offset not in delivered:
            if found and found[-1].end == offset:
                found[-1] = found[-1]._replace(end=offset + 1)
            else:
                found.append(ExpiredRange(*key, offset, offset + 1))
    begin = max(position, low)
    if begin < end:
        found.append(ExpiredRange(*key, begin, end))
    return found
