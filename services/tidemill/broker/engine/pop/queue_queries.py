"""Answers about one queue of a group: its offset, its locks, and its messages about to expire.

None of these functions changes the state.
"""

from __future__ import annotations

from tidemill.broker.engine.layout.expiry import ExpiredRange
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_RELEASED, FLAG_RENEWS
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


def expired_ordered_count(state: PopState, progress: PopProgress) -> int:
    """Count the messages of an ordered queue in deliveries that ran out or were released."""
    if progress.ordered is None:
        return 0
    table = state.table
    return sum(
        table.live[slot].bit_count()
        for slot in state.deliveries_of(progress)
        if table.flags[slot] & (FLAG_DUE | FLAG_RELEASED)
    )


def find_expired(state: PopState, progress: PopProgress, end: int) -> list[ExpiredRange]:
    """Return the messages before `end` that the group would lose if retention removed them.

    These are messages that no pop has taken and, in an ordered queue, pending messages that no
    client holds. Messages in flight are not included: they may still be acked.
    """
    low, position = progress.queue.min_offset, progress.position
    key = progress.group_id, progress.topic_id, progress.queue.queue_id
    ordered = progress.ordered
    held: set[int] = set()
    if ordered is not None and ordered.pending:
        table = state.table
        held = {
            table.offset_of(slot, index)
            for slot in state.deliveries_of(progress)
            for index in table.indexes_of(table.live[slot])
        }
    found: list[ExpiredRange] = []
    for offset in sorted(ordered.pending) if ordered is not None else ():
        if low <= offset < min(end, position) and offset not in held:
            if found and found[-1].end == offset:
                found[-1] = found[-1]._replace(end=offset + 1)
            else:
                found.append(ExpiredRange(*key, offset, offset + 1))
    begin = max(position, low)
    if begin < end:
        found.append(ExpiredRange(*key, begin, end))
    return found
