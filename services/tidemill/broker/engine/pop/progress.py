"""The progress of a consumer group in one queue."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.layout.progress_rows import OrderedRow, ProgressRow
from tidemill.broker.engine.message_filter import EVERY_MESSAGE, MessageFilter
from tidemill.broker.engine.pop.linked_lists import NIL
from tidemill.broker.engine.store.consume_queue import ConsumeQueue

VOID = 1 << 62  # as `void_before`: every delivery is void, the topic or group was deleted


@final
@dataclass(slots=True)
class OrderedState:
    """The additional state of an ordered group in a queue."""

    # For messages that are delivered and not settled, by queue offset: the attempt of the next
    # delivery, if the current one does not fail.
    pending: dict[int, int] = field(default_factory=dict)
    attempt_id: str = ""
    # Delivery id of the newest batch. All older deliveries of the queue are void.
    batch_id: int = -1
    # A batch id and the client that received this batch last. A repeated attempt may come from
    # another client than the one in the CK. Only displayed, and in no record.
    holder: tuple[int, str] = (-1, "")

    @property
    def holder_id(self) -> str:
        """The id of the client that received the newest batch last, "" if it is unknown."""
        batch_id, client_id = self.holder
        return client_id if batch_id == self.batch_id else ""


@final
@dataclass(slots=True)
class GroupSlots:
    """The slots of the delivery table that the deliveries of one consumer group use."""

    live: int = 0  # with unsettled messages, void ones included until a sweep empties them
    kept: int = 0  # without: they only reject old handles


@final
@dataclass(slots=True, kw_only=True)
class PopProgress:
    """The position and the live deliveries of one (group, topic, queue).

    Invariant: every message below `pop_offset` is settled, in a live delivery or, in an ordered
    queue, pending. The log contains all of that.
    """

    index: int
    group_id: GroupId
    topic_id: TopicId
    # The topic that consumers name. For a retry topic: the topic of its messages.
    named_topic_id: TopicId
    queue: ConsumeQueue
    slots: GroupSlots = field(default_factory=GroupSlots)  # shared by the queues of its group
    pop_offset: int = 0
    # Slots of the deliveries with unsettled messages, in pop order.
    head: int = NIL
    tail: int = NIL
    # The first of them that a pop made. Deliveries made by change-invisible do not count here.
    oldest: int = NIL
    in_flight: int = 0
    # Deliveries with an id below this are void: a reset or a deletion came after them.
    void_before: int = 0
    stated_at: int = 0
    # Where the next pop continues: `pop_offset`, or further if messages expired or did not match a
    # filter. The log contains only `pop_offset`; after a start, pops scan those messages again.
    position: int = 0
    # The kernel was asked to read cold messages ahead up to this offset.
    read_ahead_until: int = 0
    # The last filter of a count, and the offsets between which no message matches it.
    passed: tuple[MessageFilter, int, int] = (EVERY_MESSAGE, 0, 0)
    ordered: OrderedState | None = None

    @property
    def ready_count(self) -> int:
        """The number of messages that no pop has taken."""
        return self.queue.max_offset - self.next_offset

    @property
    def next_offset(self) -> int:
        """The position, or the first offset that retention has kept."""
        return max(self.position, self.queue.min_offset)

    def as_row(self) -> ProgressRow:
        """Return the stored part of the progress."""
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
    """The queues that a pop of a (group, topic) reads."""

    group_id: GroupId
    topic_id: TopicId
    version: int  # version of the topic, whose number of queues may grow
    queues: list[PopProgress]
    # The queues of the retry topic: one, or one for each level of a PRIORITY topic. Empty: none.
    retries: list[PopProgress] = field(default_factory=list)
    # Number of pops. It rotates the queues and gives the retry topic its share.
    turn: int = 0
    # Of a PRIORITY topic: the claim of lower levels to fair slots, in hundredths (`level_pop`).
    credit: int = 0
