"""The levels of the ready messages of a PRIORITY topic.

Proxies order their pops at several broker groups by them (ADR 0089).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from tidemill.broker.engine.layout.block_file import BlockFileDamaged

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.numbers import QueueOffset
    from tidemill.broker.engine.message_store import MessageStore
    from tidemill.broker.engine.store.consume_queue import ConsumeQueue

UNKNOWN_TIME: Final = 0


class ReadyLevels(NamedTuple):
    """The highest level with a ready message, and the ages of the oldest ones.

    Times are Unix times in ms; UNKNOWN_TIME if no message is known.
    """

    highest: int
    oldest_at_ms: int
    oldest_lower_at_ms: int  # of the levels below the highest one


def any_level(queue_count: int) -> ReadyLevels:
    """Return the levels of a topic that may have a message of any level, until a pop looks."""
    return ReadyLevels(queue_count - 1, UNKNOWN_TIME, UNKNOWN_TIME)


def find_levels(
    store: MessageStore, heads: Iterable[tuple[ConsumeQueue, QueueOffset]]
) -> ReadyLevels | None:
    """Return the levels of queues, each with the offset of its first ready message.

    Skip queues without such a message, and queues that cannot be read. Return None without any.
    """
    known = []
    for queue, offset in heads:
        if offset < queue.max_offset:
            try:
                known.append((queue.entry(offset)[0], queue, offset))
            except BlockFileDamaged:
                continue
    if not known:
        return None
    highest = max(queue.queue_id for _, queue, _ in known)
    oldest = min(known)
    lower = min([one for one in known if one[1].queue_id < highest], default=None)
    oldest_at_ms = _stored_at_ms(store, *oldest[1:])
    if lower is None:
        return ReadyLevels(highest, oldest_at_ms, UNKNOWN_TIME)
    lower_at_ms = oldest_at_ms if lower == oldest else _stored_at_ms(store, *lower[1:])
    return ReadyLevels(highest, oldest_at_ms, lower_at_ms)


def _stored_at_ms(store: MessageStore, queue: ConsumeQueue, offset: QueueOffset) -> int:
    try:
        return store.stored_at(queue, offset)[1]
    except BlockFileDamaged:
        return UNKNOWN_TIME
