"""How far a group is in one queue."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.layout.progress_rows import OrderedRow, ProgressRow
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
    # Who got the newest batch last, and which that was: an attempt that was repeated may be another
    # client's than the one that its CK names. For people alone, and in no record.
    holder: tuple[int, str] = (-1, "")

    @property
    def holder_id(self) -> str:
        """The client id of who got the newest batch last; "" where that is not known."""
        batch_id, client_id = self.holder
        return client_id if batch_id == self.batch_id else ""


@final
@dataclass(slots=True, kw_only=True)
class PopProgress:
    """One (topic, group, queue): where pops go on, and which deliveries are live.

    Invariant: every message below pop_offset is settled, in a live delivery, or, in an ordered
    queue, pending; all of that is in the log.
    """

    index: int
    group_id: GroupId
    topic_id: TopicId
    # The topic that consumers name: for a retry topic the one whose messages it holds.
    named_topic_id: TopicId
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
    # Where the next pop goes on: at pop_offset, or behind what retention took and a filter passed
    # over. Only the first is in the log: whoever loses the rest looks again.
    position: int = 0
    # Up to which offset the kernel was asked to read messages that have left its cache.
    asked_to: int = 0
    # Of the last look with a filter: its tags, and between which offsets nothing has one of them.
    passed: tuple[frozenset[str], int, int] = (frozenset(), 0, 0)
    ordered: OrderedState | None = None

    @property
    def ready_count(self) -> int:
        """Messages that no pop has taken yet."""
        return self.queue.max_offset - self.next_offset

    @property
    def next_offset(self) -> int:
        """The position, or behind what retention took meanwhile."""
        return max(self.position, self.queue.min_offset)

    def as_row(self) -> ProgressRow:
        """Return all of this that is stored."""
        ordered = self.ordered
        return ProgressRow(
            self.group_id,
            self.topic_id,
            self.queue.queue_id,
            self.named_topic_id,
            self.position,
            self.void_before,
            self.stated_at,
            ordered
            and OrderedRow(list(ordered.pending.items()), ordered.attempt_id, ordered.batch_id),
        )


@final
@dataclass(slots=True, kw_only=True)
class PopSubscription:
    """What a pop of a (group, topic) looks at."""

    group_id: GroupId
    topic_id: TopicId
    version: int  # of the topic, since its number of queues may grow
    queues: list[PopProgress]
    retry: PopProgress | None = None
    # Counts pops: spreads them over queues, and gives the retry topic its share.
    turn: int = 0
