"""The JSON of the REST API."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

EXACT_MAX = 2**53  # above it a number of JSON need not be what was written
Millis = Annotated[int, Field(ge=1, le=366 * 24 * 3600 * 1000)]


def _whole(text: str) -> str:
    """Refuse halves of characters, which JSON can write and nothing else can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half a character (a lone surrogate)") from None
    return text


Text = Annotated[str, AfterValidator(_whole)]


class Schema(BaseModel):
    """Fields in camelCase; an unknown one is an error, since it is a misspelt known one."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")


class TopicType(StrEnum):
    """Which messages a topic takes."""

    NORMAL = "NORMAL"
    FIFO = "FIFO"
    DELAY = "DELAY"
    TRANSACTION = "TRANSACTION"
    PRIORITY = "PRIORITY"
    LITE = "LITE"
    MIXED = "MIXED"


class DeliveryOrder(StrEnum):
    """Whether a group gets the messages of a queue one batch after the other."""

    CONCURRENT = "CONCURRENT"
    FIFO = "FIFO"


class TopicSettings(Schema):
    """What may be chosen about a topic; what is missing stays, or is the default of a new one."""

    message_type: TopicType | None = None
    queues: int | None = Field(None, ge=1, le=1024)
    delivery_spread_ms: int | None = Field(
        None, ge=0, le=3_600_000,
        description="By how much a delayed message may come later where its second is full.",
    )  # fmt: skip


class Topic(Schema):
    """A topic."""

    name: str
    message_type: TopicType
    queues: int
    is_system: bool
    delivery_spread_ms: int | None = None


class Queue(Schema):
    """What a queue holds: messages from `minOffset` up to but without `maxOffset`."""

    queue_id: int
    min_offset: int
    max_offset: int


class TopicDetails(Topic):
    """A topic and its queues."""

    queue_status: list[Queue]


class TopicPage(Schema):
    """Some topics, by name; `nextPageToken` asks for those after them."""

    topics: list[Topic]
    next_page_token: str | None = None


class Exponential(Schema):
    """Waiting times that grow from attempt to attempt."""

    initial_ms: Millis
    max_ms: Millis
    multiplier: float = Field(ge=1, le=1000)


class Customized(Schema):
    """One waiting time an attempt; the last one repeats."""

    next_ms: list[Millis] = Field(min_length=1, max_length=100)


class Retry(Schema):
    """How long a message waits for its next delivery: exactly one of the two."""

    exponential: Exponential | None = None
    customized: Customized | None = None

    @model_validator(mode="after")
    def one_policy(self) -> Self:
        """Accept exactly one policy."""
        if (self.exponential is None) == (self.customized is None):
            raise ValueError("give either exponential or customized")
        return self


class GroupSettings(Schema):
    """What may be chosen about a consumer group; what is missing stays, or is the default."""

    delivery_order: DeliveryOrder | None = None
    max_attempts: int | None = Field(None, ge=1, le=1000)
    retry: Retry | None = None
    start_from: Literal["earliest", "latest"] | None = None


class Group(Schema):
    """A consumer group."""

    name: str
    delivery_order: DeliveryOrder
    max_attempts: int
    retry: Retry
    start_from: Literal["earliest", "latest"]


class GroupPage(Schema):
    """Some groups, by name; `nextPageToken` asks for those after them."""

    groups: list[Group]
    next_page_token: str | None = None


class Progress(Schema):
    """How far a group is: lag is what is not acknowledged: ready, blocked or in flight."""

    lag: int
    ready: int
    blocked: int = Field(
        description="Stored in queues of a FIFO group that are locked: nobody gets it yet."
    )
    in_flight: int
    oldest_unacked_at_ms: int | None = None


class TopicProgress(Progress):
    """How far a group is in one topic, its retries included."""

    topic: str


class QueueLock(Schema):
    """What keeps a FIFO group from the rest of a queue."""

    topic: str
    queue: int
    messages: int = Field(description="How many of the batch are not acknowledged.")
    offset: int = Field(description="Queue offset of the first of them.")
    message_id: str | None = Field(None, description="Its id, where it can be read.")
    client_id: str | None = Field(
        None, description="Who holds it; missing where the broker has started since."
    )
    since_ms: int
    until_ms: int
    waiting: int = Field(description="Messages behind it, which nobody gets before.")


class GroupProgress(Schema):
    """How far a group is."""

    group: str
    total: Progress
    topics: list[TopicProgress]
    locks: list[QueueLock] = Field(
        description="Of a FIFO group: locked queues, those with most behind them first."
    )


class LockRelease(Schema):
    """A queue of a topic whose lock is to go."""

    topic: Text = Field(min_length=1)
    queue: int = Field(ge=0, le=2**31)


class LockReleaseDone(Schema):
    """What was locked, and is visible again."""

    group: str
    released: QueueLock


class OffsetReset(Schema):
    """Where a group goes on: exactly one of `timestampMs`, `to`, `offset`."""

    topic: Text = Field(min_length=1)
    timestamp_ms: int | None = Field(None, ge=0, le=2**62)
    to: Literal["earliest", "latest"] | None = None
    offset: int | None = Field(None, ge=0, le=2**62)

    @model_validator(mode="after")
    def one_target(self) -> Self:
        """Accept exactly one target."""
        if sum(target is not None for target in (self.timestamp_ms, self.to, self.offset)) != 1:
            raise ValueError("give exactly one of timestampMs, to and offset")
        return self


class OffsetResetDone(Schema):
    """The queues as the group will find them."""

    group: str
    topic: str
    queues: list[Queue]


class NewMessage(Schema):
    """A message to send: one kind of body, and at most one way to say when it is delivered."""

    body: Text | None = Field(None, description="The body as text, stored as UTF-8.")
    body_base64: str | None = Field(None, description="The body as bytes.")
    tag: Text | None = None
    keys: list[Text] = Field([], max_length=1000)
    properties: dict[Text, Text] = {}
    message_group: Text | None = Field(None, description="Messages of one group stay in order.")
    deliver_at_ms: int | None = Field(
        None, ge=-EXACT_MAX, le=EXACT_MAX, strict=True,
        description="Deliver not before this time (Unix, ms).",
    )  # fmt: skip
    delay_ms: int | None = Field(
        None, ge=0, le=EXACT_MAX, strict=True,
        description="Deliver so long after the broker has it.",
    )  # fmt: skip
    delay_level: int | None = Field(
        None, ge=1, strict=True,
        description="One of 18 delays from 1 s to 2 h; a higher level is the 18th.",
    )  # fmt: skip

    @model_validator(mode="after")
    def one_body_and_time(self) -> Self:
        """Accept exactly one body and at most one time."""
        if (self.body is None) == (self.body_base64 is None):
            raise ValueError("give either body or bodyBase64")
        times = (self.deliver_at_ms, self.delay_ms, self.delay_level)
        if sum(time is not None for time in times) > 1:
            raise ValueError("give at most one of deliverAtMs, delayMs and delayLevel")
        return self


class SentMessage(Schema):
    """Where a message went: into a queue, or to the timers until it is due."""

    message_id: str
    queue_id: int
    queue_offset: int | None = None
    timer_id: int | None = None
    deliver_at_ms: int | None = None
    recall_handle: str | None = Field(
        None, description="What a producer's client recalls the message with."
    )


class TimerState(StrEnum):
    """What became of a delayed message."""

    PENDING = "PENDING"
    DELIVERED = "DELIVERED"
    CANCELLED = "CANCELLED"
    DROPPED = "DROPPED"
    QUARANTINED = "QUARANTINED"


class Timer(Schema):
    """A delayed message; what it says of itself is missing when its record is gone."""

    timer_id: int
    state: TimerState
    topic: str | None = None
    queue_id: int
    due_at_ms: int
    scheduled_at_ms: int
    size: int
    message_id: str | None = None
    tag: str | None = None
    keys: list[str] = []
    born_at_ms: int | None = None
    born_host: str | None = None


class TimerPage(Schema):
    """Some pending timers, those due first first; `nextPageToken` asks for those after them."""

    timers: list[Timer]
    next_page_token: str | None = None


class Reschedule(Schema):
    """When a timer is to be due instead: exactly one of `dueAtMs` and `delayMs` (from now)."""

    due_at_ms: int | None = Field(None, ge=-EXACT_MAX, le=EXACT_MAX, strict=True)
    delay_ms: int | None = Field(None, ge=0, le=EXACT_MAX, strict=True)
    expected_due_at_ms: int | None = Field(
        None,
        ge=-EXACT_MAX,
        le=EXACT_MAX,
        description="Refuse with a conflict when it is due at another time by now.",
    )

    @model_validator(mode="after")
    def one_time(self) -> Self:
        """Accept exactly one time."""
        if (self.due_at_ms is None) == (self.delay_ms is None):
            raise ValueError("give either dueAtMs or delayMs")
        return self


class Message(Schema):
    """One stored copy of a message: the original, a retry, or a dead letter."""

    message_id: str
    topic: str
    stored_topic: str
    queue_id: int
    queue_offset: int
    log_offset: int
    message_type: str
    tag: str | None = None
    keys: list[str]
    message_group: str | None = None
    born_at_ms: int
    born_host: str
    stored_at_ms: int
    deliver_at_ms: int | None = None
    delivery_attempt: int
    consumer_group: str | None = None
    origin_topic: str | None = None
    reason: str | None = None
    properties: dict[str, str]
    body_encoding: str
    body_size: int
    body_base64: str
    body_text: str | None = Field(None, description="The body, when it is UTF-8 text.")


class MessageList(Schema):
    """Messages that were found."""

    messages: list[Message]


class Problem(BaseModel):
    """An error, as in RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: int = Field(description="Code of apache.rocketmq.v2 for the same error.")


def topic_of(config: pb.TopicConfig) -> Topic:
    """Render a topic."""
    return Topic(
        name=config.name,
        message_type=TopicType(pb.TopicType.Name(config.type)),
        queues=config.queues,
        is_system=config.is_system,
        delivery_spread_ms=config.delivery_spread_ms or None,
    )


def group_of(config: pb.GroupConfig) -> Group:
    """Render a group."""
    if config.HasField("exponential"):
        policy = config.exponential
        retry = Retry(
            exponential=Exponential(
                initial_ms=policy.initial_ms, max_ms=policy.max_ms, multiplier=policy.multiplier
            )
        )
    else:
        retry = Retry(customized=Customized(next_ms=list(config.customized.next_ms)))
    is_ordered = config.delivery_order == pb.ORDERED
    return Group(
        name=config.name,
        delivery_order=DeliveryOrder.FIFO if is_ordered else DeliveryOrder.CONCURRENT,
        max_attempts=config.max_attempts,
        retry=retry,
        start_from="latest" if config.start_from_latest else "earliest",
    )


def queue_of(status: pb.QueueStatus) -> Queue:
    """Render a queue."""
    return Queue(
        queue_id=status.queue_id, min_offset=status.min_offset, max_offset=status.max_offset
    )


def progress_of(progress: pb.GroupProgress) -> GroupProgress:
    """Add the queues up: by topic, and in total."""
    by_topic: dict[str, list[pb.QueueProgress]] = {}
    for queue in progress.queues:
        by_topic.setdefault(queue.topic, []).append(queue)
    return GroupProgress(
        group=progress.group.name,
        total=Progress.model_validate(_sums(list(progress.queues))),
        topics=[
            TopicProgress.model_validate({"topic": topic, **_sums(queues)})
            for topic, queues in sorted(by_topic.items())
        ],
        locks=sorted(
            (
                lock_of(queue.topic, queue.queue_id, queue.lock)
                for queue in progress.queues
                if queue.HasField("lock")
            ),
            key=lambda lock: -lock.waiting,
        ),
    )


def lock_of(topic: str, queue_id: int, lock: pb.QueueLock) -> QueueLock:
    """Render what locks a queue."""
    return QueueLock(
        topic=topic,
        queue=queue_id,
        messages=lock.message_count,
        offset=lock.queue_offset,
        message_id=lock.message_id or None,
        client_id=lock.client_id or None,
        since_ms=lock.popped_at_ms,
        until_ms=lock.until_ms,
        waiting=lock.waiting_count,
    )


def _sums(queues: list[pb.QueueProgress]) -> dict[str, int | None]:
    blocked = sum(queue.lock.waiting_count for queue in queues)
    ready = sum(queue.ready_count for queue in queues) - blocked
    in_flight = sum(queue.in_flight_count for queue in queues)
    oldest = [queue.oldest_unacked_at_ms for queue in queues if queue.oldest_unacked_at_ms]
    return {
        "lag": ready + blocked + in_flight,
        "ready": ready,
        "blocked": blocked,
        "in_flight": in_flight,
        "oldest_unacked_at_ms": min(oldest, default=None),
    }
