"""The JSON of topics, consumer groups and deliveries, and what all JSON of the REST API shares."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel

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

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_DATE_TIME = TypeAdapter[datetime](AwareDatetime)


def _iso(value: object) -> object:
    if not isinstance(value, str) or value.strip().lstrip("+-").replace(".", "").isdecimal():
        raise ValueError("write a time with its zone, such as 2027-01-01T08:00:00Z")
    return value


def millis_of(at: datetime) -> int:
    """Return an instant in ms; what is finer counts up, so that nothing comes early."""
    return -((_EPOCH - at) // _MILLISECOND)


def _instant_ms(value: object) -> object:
    if isinstance(value, str) and not value.removeprefix("-").isdecimal():
        return millis_of(_DATE_TIME.validate_python(_iso(value)))
    return value


# A time as people write it, with its zone.
IsoTime = Annotated[AwareDatetime, BeforeValidator(_iso)]
# In a query: either way of writing it.
Instant = Annotated[
    int,
    BeforeValidator(_instant_ms),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "description": "Unix time in ms."},
                {"type": "string", "format": "date-time"},
            ]
        }
    ),
]


# Of any list or map of a request, looked at before what it holds: each wrong item is an error by
# itself, of half a kilobyte. What is allowed is less.
ITEMS_MAX = 1_000
FIELDS_MAX = 64  # of an object with known fields, the unknown ones included


def _at_most(value: object) -> object:
    if isinstance(value, list | dict) and len(value) > ITEMS_MAX:
        raise ValueError(f"it has at most {ITEMS_MAX} items, not {len(value)}")
    return value


Few = BeforeValidator(_at_most)


class Schema(BaseModel):
    """Fields in camelCase; an unknown one is an error, since it is a misspelt known one."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def few_fields(cls, value: object) -> object:
        """Refuse many unknown fields at once."""
        if isinstance(value, dict) and len(value) > FIELDS_MAX:
            raise ValueError(f"it has {len(value)} fields; none has as many")
        return value


BROKER = Field(description="Name of its broker group.")
UNREACHABLE = Field(
    None,
    description="Broker groups that could not be asked: what they have is missing here. Missing"
    " where all have answered.",
)
NEXT_PAGE = Field(None, description="`pageToken` of the next page; missing on the last one.")


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

    message_type: TopicType | None = Field(
        None,
        description="Messages it takes. A new topic is MIXED: NORMAL, FIFO and DELAY. Of a topic in"
        " use it changes with `force` only.",
    )
    queues: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Number of queues; it never shrinks, and is fixed where FIFO is taken. 8 for a"
        " new topic, unless the broker is set otherwise.",
    )
    delivery_spread_ms: int | None = Field(
        None,
        ge=0,
        le=3_600_000,
        description="By how much a delayed message may come later where its second is full.",
    )
    force: bool = Field(False, description="Change the type even of a topic that is in use.")


class Topic(Schema):
    """A topic."""

    name: str = Field(description="Its name.")
    message_type: TopicType = Field(description="Messages it takes.")
    queues: int = Field(description="Number of queues.")
    is_system: bool = Field(description="Whether it is a retry or dead-letter topic.")
    delivery_spread_ms: int | None = Field(
        None,
        description="By how much a delayed message may come later where its second is full; missing"
        " where it may not.",
    )


class TopicPut(Topic):
    """A topic as it is now."""

    is_new: bool = Field(description="Whether it was created by this call.")
    before: Topic | None = Field(
        None, description="What it was; missing when it is new or has not changed."
    )


class TopicDeletion(Schema):
    """What deleting a topic takes away."""

    dry_run: bool = Field(description="Whether nothing was done.")
    by: str = Field(description="Who asked: what the caller says of itself, and its address.")
    topic: Topic = Field(description="The topic.")
    messages: int = Field(description="Messages that its queues hold, acked or not.")
    groups: list[str] = Field(description="Consumer groups that read it.")
    unreachable: list[str] | None = UNREACHABLE


class Queue(Schema):
    """What a queue holds: messages from `minOffset` up to but without `maxOffset`."""

    broker: str = BROKER
    queue_id: int = Field(description="Its number there, from 0.")
    min_offset: int = Field(description="Offset of the oldest message it holds.")
    max_offset: int = Field(description="Offset that its next message gets.")
    sealed_offset: int | None = Field(
        None,
        description="Up to where an archive has sealed it: retention keeps what is not, while there"
        " is room. Missing: retention waits for nobody.",
    )


class TopicDetails(Topic):
    """A topic and its queues."""

    queue_status: list[Queue] = Field(description="What each of its queues holds.")
    unreachable: list[str] | None = UNREACHABLE


class TopicPage(Schema):
    """Some topics, by name; `nextPageToken` asks for those after them."""

    topics: list[Topic] = Field(description="The topics of this page.")
    next_page_token: str | None = NEXT_PAGE
    unreachable: list[str] | None = UNREACHABLE


class Exponential(Schema):
    """Waiting times that grow from attempt to attempt."""

    initial_ms: Millis = Field(description="Wait before the second delivery.")
    max_ms: Millis = Field(description="Longest wait.")
    multiplier: float = Field(
        ge=1, le=1000, description="By how much each wait is longer than the one before."
    )


class Customized(Schema):
    """One waiting time an attempt; the last one repeats."""

    next_ms: Annotated[list[Millis], Few] = Field(
        min_length=1, max_length=100, description="The waits, in their order."
    )


class Retry(Schema):
    """How long a message waits for its next delivery: exactly one of the two."""

    exponential: Exponential | None = Field(None, description="Waits that grow.")
    customized: Customized | None = Field(None, description="A wait for each attempt.")

    @model_validator(mode="after")
    def one_policy(self) -> Self:
        """Accept exactly one policy."""
        if (self.exponential is None) == (self.customized is None):
            raise ValueError("give either exponential or customized")
        return self


class GroupSettings(Schema):
    """What may be chosen about a consumer group; what is missing stays, or is the default."""

    delivery_order: DeliveryOrder | None = Field(
        None, description="For life; a new group is CONCURRENT."
    )
    max_attempts: int | None = Field(
        None, ge=1, le=1000, description="Deliveries before a message is a dead letter; 17."
    )
    retry: Retry | None = Field(
        None, description="How long a message waits for its next delivery; 10 s to 2 h."
    )
    start_from: Literal["earliest", "latest"] | None = Field(
        None, description="Where a new group begins in a topic; the earliest message."
    )


class Group(Schema):
    """A consumer group."""

    name: str = Field(description="Its name.")
    delivery_order: DeliveryOrder = Field(description="How it gets the messages of a queue.")
    max_attempts: int = Field(description="Deliveries before a message is a dead letter.")
    retry: Retry = Field(description="How long a message waits for its next delivery.")
    start_from: Literal["earliest", "latest"] = Field(
        description="Where it begins in a topic that it has not read."
    )


class GroupPut(Group):
    """A consumer group as it is now."""

    is_new: bool = Field(description="Whether it was created by this call.")
    before: Group | None = Field(
        None, description="What it was; missing when it is new or has not changed."
    )


class GroupDeletion(Schema):
    """What deleting a group takes away."""

    dry_run: bool = Field(description="Whether nothing was done.")
    by: str = Field(description="Who asked: what the caller says of itself, and its address.")
    group: Group = Field(description="The group.")
    topics: list[str] = Field(description="Topics in which its progress is lost.")
    lag: int = Field(description="Messages that it had not acked there.")
    unreachable: list[str] | None = UNREACHABLE


class GroupPage(Schema):
    """Some groups, by name; `nextPageToken` asks for those after them."""

    groups: list[Group] = Field(description="The groups of this page.")
    next_page_token: str | None = NEXT_PAGE
    unreachable: list[str] | None = UNREACHABLE


class Progress(Schema):
    """How far a group is: lag is what is not acknowledged: ready, blocked or in flight."""

    lag: int = Field(description="Ready, blocked and in flight.")
    ready: int = Field(description="Messages that can be popped now.")
    blocked: int = Field(
        description="Stored in queues of a FIFO group that are locked: nobody gets it yet."
    )
    in_flight: int = Field(description="Messages that were popped and not acked yet.")
    stored: int = Field(
        description="Messages that the topic's queues have got so far, retries not counted. It only"
        " grows: between two looks it says how fast messages come."
    )
    oldest_unacked_at_ms: int | None = Field(
        None, description="When the oldest of them was stored (Unix, ms); missing: there is none."
    )


class TopicProgress(Progress):
    """How far a group is in one topic, its retries included."""

    topic: str = Field(description="Name of the topic.")


class QueueLock(Schema):
    """What keeps a FIFO group from the rest of a queue."""

    topic: str = Field(description="Name of the topic.")
    broker: str = Field(description="Name of the broker group that has the queue.")
    queue: int = Field(description="Number of its queue there, from 0.")
    messages: int = Field(description="How many of the batch are not acknowledged.")
    offset: int = Field(description="Queue offset of the first of them.")
    message_id: str | None = Field(None, description="Its id, where it can be read.")
    client_id: str | None = Field(
        None, description="Who holds it; missing where the broker has started since."
    )
    since_ms: int = Field(description="When the batch was popped (Unix, ms).")
    until_ms: int = Field(description="When it becomes visible by itself (Unix, ms).")
    waiting: int = Field(description="Messages behind it, which nobody gets before.")


class PulledTopic(Schema):
    """How far a group has pulled a topic, by its own word (UpdateOffset)."""

    topic: str = Field(description="Name of the topic.")
    queues: int = Field(description="Of how many of its queues the group has said so.")
    behind: int = Field(description="Messages in these that lie behind what it has said.")


class GroupProgress(Schema):
    """How far a group is."""

    group: str = Field(description="Name of the group.")
    total: Progress = Field(description="In all topics together.")
    topics: list[TopicProgress] = Field(description="In each topic that it has begun to read.")
    locks: list[QueueLock] = Field(
        description="Of a FIFO group: locked queues, those with most behind them first."
    )
    pulled: list[PulledTopic] | None = Field(
        None,
        description="What it pulls, apart from what its consumers pop; missing where it has never"
        " said how far it is.",
    )
    unreachable: list[str] | None = UNREACHABLE


class LockRelease(Schema):
    """A queue of a topic whose lock is to go."""

    topic: Text = Field(min_length=1, description="Name of the topic.")
    queue: int = Field(ge=0, le=2**31, description="Number of its queue, from 0.")
    broker: Text | None = Field(
        None,
        description="Name of the broker group that has the queue; needed where several have one of"
        " that number locked.",
    )


class LockReleaseDone(Schema):
    """What was locked, and is visible again."""

    by: str = Field(description="Who asked, as the broker's log says it.")
    group: str = Field(description="Name of the group.")
    released: QueueLock = Field(description="What locked the queue.")


class InFlight(Schema):
    """A message that a consumer has and has not acked."""

    topic: str = Field(description="Topic of the message.")
    broker: str = Field(description="Name of the broker group that has it.")
    queue: int = Field(description="Queue of the topic, or with `retry` of its retry topic.")
    offset: int = Field(description="Its place in that queue.")
    retry: bool = Field(description="Whether it was delivered before: it is on the retry topic.")
    message_id: str | None = Field(None, description="Its id; none where it cannot be read.")
    attempt: int = Field(description="1 for the first delivery.")
    client_id: str | None = Field(None, description="Who has it; none where that is not known.")
    since_ms: int = Field(description="When it was popped (Unix, ms).")
    until_ms: int = Field(
        description="When it goes to another consumer if nobody acks it (Unix, ms); that moves on"
        " where it is `renewed`."
    )
    renewed: bool = Field(
        description="Whether the broker extends it while its client lives, as for push consumers."
    )
    on_its_way: bool = Field(
        description="Whether it is to be renewed, and its client has not told yet that it has it:"
        " until then it is not extended."
    )


class DeliveryPage(Schema):
    """Some messages in flight, those out longest first; `nextPageToken` asks for the next ones."""

    deliveries: list[InFlight] = Field(description="The messages of this page.")
    unreachable: list[str] | None = UNREACHABLE
    next_page_token: str | None = NEXT_PAGE


class DeliveryRelease(Schema):
    """Which messages in flight to give back: what is given must all hold, or `all` alone."""

    topic: Text | None = Field(
        None, min_length=1, description="Only of this topic, retries included."
    )
    queue: int | None = Field(
        None, ge=0, le=2**31, description="Only of this queue of `topic`, from 0; no retries."
    )
    client_id: Text | None = Field(None, min_length=1, description="Only what this client has.")
    message_id: Text | None = Field(
        None, min_length=1, description="Only the message with this id."
    )
    all: bool = Field(False, description="All that the group has in flight.")
    dry_run: bool = Field(False, description="Count them, and do nothing.")

    @model_validator(mode="after")
    def says_which(self) -> Self:
        """Accept a filter, or `all`, and not both; a queue with its topic."""
        has_filter = any(
            one is not None for one in (self.topic, self.queue, self.client_id, self.message_id)
        )
        if has_filter == self.all:
            raise ValueError("give topic, queue, clientId or messageId, or all for all of them")
        if self.queue is not None and self.topic is None:
            raise ValueError("a queue is one of a topic: give topic too")
        return self


class BrokerCount(Schema):
    """How many messages at one broker group."""

    broker: str = Field(description="Name of the broker group.")
    messages: int = Field(description="How many messages.")


class DeliveriesReleased(Schema):
    """What was given back."""

    dry_run: bool = Field(description="Whether nothing was done.")
    by: str = Field(description="Who asked, as the brokers' logs say it.")
    group: str = Field(description="Name of the group.")
    messages: int = Field(description="How many messages were given back, or would be.")
    brokers: list[BrokerCount] = Field(description="The same by broker group.")
    more: bool = Field(description="Whether there are more: ask again.")
    unreachable: list[str] | None = UNREACHABLE


class OffsetReset(Schema):
    """Where a group goes on: exactly one of `timestampMs`, `timestamp`, `to`, `offset`."""

    topic: Text = Field(min_length=1, description="Topic in which the group goes on elsewhere.")
    timestamp_ms: int | None = Field(
        None,
        ge=0,
        le=2**62,
        description="The first message stored at or after this time (Unix, ms).",
    )
    timestamp: IsoTime | None = Field(None, description="The same, as a time with its zone.")
    to: Literal["earliest", "latest"] | None = Field(None, description="An end of the topic.")
    offset: int | None = Field(
        None, ge=0, le=2**62, description="This offset in every queue, bounded by what each holds."
    )
    dry_run: bool = Field(False, description="Check and answer as if it were done; do nothing.")

    @model_validator(mode="after")
    def one_target(self) -> Self:
        """Accept exactly one target."""
        targets = (self.timestamp_ms, self.timestamp, self.to, self.offset)
        if sum(target is not None for target in targets) != 1:
            raise ValueError("give exactly one of timestampMs, timestamp, to and offset")
        return self


class PulledToForget(Schema):
    """A topic that a group pulls no more."""

    topic: Text = Field(min_length=1, description="Name of the topic.")
    dry_run: bool = Field(False, description="Check and answer as if it were done; do nothing.")


class ForgottenQueue(Schema):
    """How far a group had pulled a queue, by its own word."""

    broker: str = Field(description="Name of the broker group that has the queue.")
    queue_id: int = Field(description="Number of the queue, from 0.")
    offset: int = Field(description="The offset that the group had told.")
    behind: int = Field(description="Messages from there to the end of the queue.")


class PulledForgotten(Schema):
    """What nobody knows any more."""

    dry_run: bool = Field(description="Whether nothing was done.")
    by: str = Field(description="Who asked: what the caller says of itself, and its address.")
    group: str = Field(description="Name of the group.")
    topic: str = Field(description="Name of the topic.")
    queues: list[ForgottenQueue] = Field(
        description="Each queue of which the group had told an offset."
    )


class QueueReset(Queue):
    """A queue as the group will find it: `maxOffset` is where it goes on."""

    from_offset: int | None = Field(
        None, description="First offset that was not acked; missing: the group had read nothing."
    )
    to_offset: int = Field(description="Where the group goes on.")


class OffsetResetDone(Schema):
    """The queues as the group will find them."""

    dry_run: bool = Field(description="Whether nothing was done.")
    by: str = Field(description="Who asked: what the caller says of itself, and its address.")
    group: str = Field(description="Name of the group.")
    topic: str = Field(description="Name of the topic.")
    queues: list[QueueReset] = Field(description="Each queue of the topic.")


class Problem(BaseModel):
    """An error, as in RFC 9457."""

    type: str = Field("about:blank", description="Kind of problem, as RFC 9457 has it.")
    title: str = Field(description="Name of the error.")
    status: int = Field(description="The status of the response.")
    detail: str = Field(description="What is wrong, and what to do.")
    code: int = Field(description="Code of apache.rocketmq.v2 for the same error.")
