"""How far a group is in one queue."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from tidemill.broker.engine.pop.delivery_table import NIL
from tidemill.broker.engine.store.consume_queue import ConsumeQueue

VOID = 1 << 62  # as `void_before`: every delivery is void, the topic or group is gone


@final
@dataclass(slots=True)
class OrderedState:
    """What an ordered group additionally knows about a queue."""

    # Queue offset -> deliveries counted so far, of messages delivered and not settled.
    pending: dict[int, int] = field(default_factory=dict)
    attempt_id: str = ""
    # Identity of the newest batch: all older deliveries of the queue are void.
    batch_id: int = -1


@final
@dataclass(slots=True, kw_only=True)
class Progress:
    """One (topic, group, queue): where pops go on, and which deliveries are live.

    Invariant: every message below pop_offset is settled, in a live delivery, or, in an ordered
    queue, pending; all of that is in the log.
    """

    index: int
    group_id: int
    topic_id: int
    # The topic that consumers name: for a retry topic the one whose messages it holds.
    named_topic_id: int
    queue: ConsumeQueue
    pop_offset: int = 0
    # Deliveries with messages that are not settled, in pop order.
    head: int = NIL
    tail: int = NIL
    # The first of them that a pop made: what change-invisible makes has no place in this order.
    oldest: int = NIL
    in_flight: int = 0
    # Deliveries with an identity below this are void: a reset or a deletion came after them.
    void_before: int = 0
    stated_at: int = 0
    # Only while replaying: records below this log offset are already part of this state.
    covered: int = 0
    ordered: OrderedState | None = None

    @property
    def ready_count(self) -> int:
        """Messages that no pop has taken yet."""
        return self.queue.max_offset - max(self.pop_offset, self.queue.min_offset)


@final
@dataclass(slots=True, kw_only=True)
class Subscription:
    """What a pop of a (group, topic) looks at."""

    group_id: int
    topic_id: int
    version: int  # of the topic, since its number of queues may grow
    queues: list[Progress]
    retry: Progress | None = None
    # Counts pops: spreads them over queues, and gives the retry topic its share.
    turn: int = 0
