"""The JSON of consumer groups: settings, progress and offsets."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, StrictBool, StrictFloat, StrictInt, model_validator

from tidemill.admin.json.activity import SAMPLED_AT, GroupNumbersView
from tidemill.admin.json.conflicts import ConflictView, TopicFilterView
from tidemill.admin.json.deliveries import QueueLockView
from tidemill.admin.json.schema import (
    BY,
    CLIENTS,
    DRY_RUN,
    EXACT_MAX,
    NEXT_PAGE,
    UNREACHABLE,
    AnyCaseEnum,
    ExclusiveSchema,
    IsoTime,
    LimitedSize,
    LowerCase,
    Millis,
    Schema,
    Text,
    given,
)
from tidemill.admin.json.topics import QueueView

MAX_ATTEMPTS = "Deliveries before a message becomes a dead letter."
RETRY = "Delay of a message before its next delivery."
START_FROM = "Start position of the group in a topic."
PRIORITY_FACTOR = (
    "Percentage of the messages of a PRIORITY topic that are delivered by priority. The others are"
    " the oldest ones of lower levels. At 100, lower levels can starve. At 0, priorities have no"
    " effect."
)
REQUESTED_DRY_RUN = "Check the request and answer without a change."


class DeliveryOrder(AnyCaseEnum):
    """Delivery order of the messages of a queue."""

    CONCURRENT = "CONCURRENT"
    FIFO = "FIFO"


class ExponentialBackoffView(Schema):
    """A delay that grows with each delivery attempt."""

    initial_ms: Millis = Field(description="Delay before the second delivery, in ms.")
    max_ms: Millis = Field(description="Maximum of every delay, also of the first, in ms.")
    multiplier: StrictFloat = Field(
        ge=1, le=1000, description="Factor between a delay and the previous one."
    )


class CustomizedBackoffView(Schema):
    """A list of delays, one per delivery attempt. The last delay repeats."""

    next_ms: Annotated[list[Millis], LimitedSize] = Field(
        min_length=1, max_length=100, description="The delays in ms, in order."
    )


class RetryPolicyView(ExclusiveSchema):
    """The delay of a message before its next delivery: exactly one of the two kinds."""

    exactly_one = ("exponential", "customized")

    exponential: ExponentialBackoffView | None = Field(None, description="A growing delay.")
    customized: CustomizedBackoffView | None = Field(None, description="A list of delays.")


class ConsumerGroupSettings(Schema):
    """The settings of a consumer group. A missing field does not change, or has its default."""

    delivery_order: DeliveryOrder | None = Field(
        None, description="Delivery order; it cannot change later. Default: CONCURRENT."
    )
    max_attempts: StrictInt | None = Field(
        None, ge=1, le=1000, description=f"{MAX_ATTEMPTS} Default: 17."
    )
    retry: RetryPolicyView | None = Field(None, description=f"{RETRY} Default: 10 s to 2 h.")
    start_from: Annotated[Literal["earliest", "latest"], LowerCase] | None = Field(
        None,
        description=f"{START_FROM} It can change until the group has begun to read; then 409."
        " Default: earliest.",
    )
    priority_factor: StrictInt | None = Field(
        None, ge=0, le=100, description=f"{PRIORITY_FACTOR} Default: 90."
    )


class GroupPauseRequest(Schema):
    """A pause of a consumer group."""

    until_ms: StrictInt | None = Field(
        None,
        ge=1,
        le=EXACT_MAX,
        description="End of the pause (Unix, ms), at most 30 days from now. Default: in a day.",
        examples=[1798761600000],
    )
    reason: Text = Field(
        "", max_length=255, description="Reason, for other operators.", examples=["database moves"]
    )


class GroupPauseView(Schema):
    """A pause: polls of the consumer group find no message until it ends."""

    until_ms: int = Field(description="End of the pause (Unix, ms).")
    by: str = Field(description="The operator that began it.")
    reason: str | None = Field(None, description="Reason, if one was given.")


class ConsumerGroupView(Schema):
    """A consumer group."""

    name: str = Field(description="Name of the group.")
    delivery_order: DeliveryOrder = Field(description="Delivery order.")
    max_attempts: int = Field(description=MAX_ATTEMPTS)
    retry: RetryPolicyView = Field(description=RETRY)
    start_from: Literal["earliest", "latest"] = Field(description=START_FROM)
    priority_factor: int | None = Field(
        None, description=f"{PRIORITY_FACTOR} Missing while its broker has an older version."
    )
    paused: GroupPauseView | None = Field(
        None, description="Its pause. Missing if it is not paused."
    )


class ConsumerGroupRowView(ConsumerGroupView, GroupNumbersView):
    """A consumer group with its numbers."""


class ConsumerGroupDetailView(ConsumerGroupRowView):
    """A consumer group, with its numbers, the filters and the conflicts of its consumers."""

    conflicts: list[ConflictView] | None = Field(
        None,
        description="Ways in which its consumers of the last ten minutes lose messages or their"
        " order. Missing if there are none.",
    )
    filters: list[TopicFilterView] | None = Field(
        None,
        description="The filters of its polls of the last ten minutes, by topic. Missing if there"
        " are none. Filters of topics without the right Get are left out.",
    )
    sampled_at_ms: int | None = SAMPLED_AT
    unreachable: list[str] | None = UNREACHABLE


class ConsumerGroupPutView(ConsumerGroupView):
    """A consumer group after a change."""

    is_new: bool = Field(description="Whether this call created it.")
    before: ConsumerGroupView | None = Field(
        None, description="The previous settings. Missing if it is new or has not changed."
    )


class ConsumerGroupDeletionView(Schema):
    """The data that the deletion of a consumer group removes."""

    dry_run: bool = DRY_RUN
    by: str = BY
    group: ConsumerGroupView = Field(description="The group.")
    topics: list[str] = Field(description="Topics with lost progress.")
    lag: int = Field(description="Unacknowledged messages of the group in these topics.")
    clients: list[str] = CLIENTS
    unreachable: list[str] | None = UNREACHABLE


class ConsumerGroupPageView(Schema):
    """A page of consumer groups, ordered by name or by `sort`."""

    groups: list[ConsumerGroupRowView] = Field(description="The groups of this page.")
    next_page_token: str | None = NEXT_PAGE
    sampled_at_ms: int | None = SAMPLED_AT
    unreachable: list[str] | None = UNREACHABLE


class ProgressView(Schema):
    """The progress of a group, as counts of its unacknowledged messages."""

    lag: int = Field(
        description="Sum of ready, blocked and in-flight messages: what the group will be given of"
        " the topics that it has read at any broker group or that its consumers subscribe to."
    )
    ready: int = Field(description="Messages that a consumer can receive now.")
    blocked: int = Field(
        description="Messages in locked queues of a FIFO group, which no consumer can receive yet."
    )
    in_flight: int = Field(description="Messages in flight: delivered and not acked.")
    stored: int = Field(
        description="Messages stored in the queues of the topic so far, without retries. The number"
        " only grows, so two samples give the rate of new messages."
    )
    oldest_unacked_at_ms: int | None = Field(
        None,
        description="Time at which the oldest unacknowledged message was stored (Unix, ms). Missing"
        " if there is none.",
    )


class TopicProgressView(ProgressView):
    """The progress of a group in one topic, retries included."""

    topic: str = Field(description="Name of the topic.")


class PulledTopicView(Schema):
    """The pull progress of a group in a topic, from its pull offsets (UpdateOffset)."""

    topic: str = Field(description="Name of the topic.")
    queues: int = Field(description="Number of queues with a pull offset of the group.")
    behind: int = Field(description="Messages in these queues after the pull offsets.")


class ConsumerGroupProgressView(Schema):
    """The progress of a consumer group."""

    group: str = Field(description="Name of the group.")
    total: ProgressView = Field(description="Progress in all topics together.")
    topics: list[TopicProgressView] = Field(description="Progress in each topic that it reads.")
    locks: list[QueueLockView] = Field(
        description="Locked queues of a FIFO group, the longest backlog first."
    )
    pulled: list[PulledTopicView] | None = Field(
        None, description="Pull progress by topic. Missing without pull offsets."
    )
    unreachable: list[str] | None = UNREACHABLE


RESET_TOPICS_MAX: Final = 100
TopicOfReset = Annotated[Text, Field(min_length=1)]


class QueueOffsetView(Schema):
    """A queue, and the new position of the group in it."""

    broker: Text | None = Field(
        None,
        min_length=1,
        description="Name of the broker group of the queue. Required if there are several.",
        examples=["broker-0"],
    )
    queue: StrictInt = Field(ge=0, le=2**31, description="Number of the queue, from 0.")
    offset: StrictInt = Field(
        ge=0,
        le=EXACT_MAX,
        description="The new position, from the oldest stored offset to the end of the queue.",
        examples=[17],
    )


class OffsetResetRequest(ExclusiveSchema):
    """The new position of a group: one of `timestampMs`, `timestamp`, `to`, `offset`, `queues`.

    It has either `topic` or `topics`; `queues` needs `topic`.
    """

    exactly_one = ("timestamp_ms", "timestamp", "to", "offset", "queues")
    one_choice = ("topic", "topics")
    refused_objects = (given("queues", "topics"),)

    topic: Text | None = Field(None, min_length=1, description="Topic of the reset.")
    topics: list[TopicOfReset] | None = Field(
        None, min_length=1, max_length=RESET_TOPICS_MAX, description="The same for several topics."
    )
    timestamp_ms: StrictInt | None = Field(
        None,
        ge=0,
        le=EXACT_MAX,
        description="The first message stored at or after this time (Unix, ms).",
    )
    timestamp: IsoTime | None = Field(None, description="The same as a time with a zone.")
    to: Annotated[Literal["earliest", "latest"], LowerCase] | None = Field(
        None, description="The begin or the end of the topic."
    )
    offset: StrictInt | None = Field(
        None, ge=0, le=EXACT_MAX, description="This offset in each queue, within its stored range."
    )
    queues: Annotated[list[QueueOffsetView], LimitedSize] | None = Field(
        None,
        min_length=1,
        description="An exact offset for each of these queues of `topic`. The other queues, and"
        " retries, stay as they are. An offset outside its queue is refused.",
    )
    dry_run: StrictBool = Field(False, description=REQUESTED_DRY_RUN)

    @model_validator(mode="after")
    def of_one_topic(self) -> Self:
        """Reject queues without the one topic that has them."""
        if self.queues is not None and self.topic is None:
            raise ValueError("queues needs topic, and not topics")
        return self


class PullOffsetDeletionRequest(Schema):
    """Topic of the deleted pull offsets."""

    topic: Text = Field(min_length=1, description="Name of the topic.")
    dry_run: StrictBool = Field(False, description=REQUESTED_DRY_RUN)


class PullOffsetView(Schema):
    """The pull offset of a group in one queue."""

    broker: str = Field(description="Name of the broker group of the queue.")
    queue_id: int = Field(description="Number of the queue, from 0.")
    offset: int = Field(description="The pull offset.")
    behind: int = Field(description="Messages from the pull offset to the end of the queue.")


class PullOffsetDeletionView(Schema):
    """The deleted pull offsets."""

    dry_run: bool = DRY_RUN
    by: str = BY
    group: str = Field(description="Name of the group.")
    topic: str = Field(description="Name of the topic.")
    queues: list[PullOffsetView] = Field(description="The deleted pull offset of each queue.")


class QueueResetView(QueueView):
    """A queue, and the position of the group before and after a reset."""

    topic: str = Field(description="Topic of the queue.")
    from_offset: int | None = Field(
        None,
        description="Previous position: the first unacknowledged offset. Missing if the group had"
        " not read the queue.",
    )
    to_offset: int = Field(description="New position of the group.")


class OffsetResetView(Schema):
    """The positions of a group before and after a reset."""

    dry_run: bool = DRY_RUN
    by: str = BY
    group: str = Field(description="Name of the group.")
    topic: str | None = Field(
        None, description="Name of the topic. Missing for a reset of `topics`."
    )
    queues: list[QueueResetView] = Field(
        description="Each queue of each topic, or each of the given `queues`."
    )
