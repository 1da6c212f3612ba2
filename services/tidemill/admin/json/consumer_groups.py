"""The JSON of consumer groups: settings, progress and offsets."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tidemill.admin.json.deliveries import QueueLockView
from tidemill.admin.json.schema import NEXT_PAGE, UNREACHABLE, Few, IsoTime, Millis, Schema, Text
from tidemill.admin.json.topics import QueueView


class DeliveryOrder(StrEnum):
    """Whether a group gets the messages of a queue one batch after the other."""

    CONCURRENT = "CONCURRENT"
    FIFO = "FIFO"


class ExponentialBackoffView(Schema):
    """Waiting times that grow from attempt to attempt."""

    initial_ms: Millis = Field(description="Wait before the second delivery.")
    max_ms: Millis = Field(description="Longest wait.")
    multiplier: float = Field(
        ge=1, le=1000, description="By how much each wait is longer than the one before."
    )


class CustomizedBackoffView(Schema):
    """One waiting time an attempt; the last one repeats."""

    next_ms: Annotated[list[Millis], Few] = Field(
        min_length=1, max_length=100, description="The waits, in their order."
    )


class RetryPolicyView(Schema):
    """How long a message waits for its next delivery: exactly one of the two."""

    exponential: ExponentialBackoffView | None = Field(None, description="Waits that grow.")
    customized: CustomizedBackoffView | None = Field(None, description="A wait for each attempt.")

    @model_validator(mode="after")
    def one_policy(self) -> Self:
        """Accept exactly one policy."""
        if (self.exponential is None) == (self.customized is None):
            raise ValueError("give either exponential or customized")
        return self


class ConsumerGroupSettings(Schema):
    """What may be chosen about a consumer group; what is missing stays, or is the default."""

    delivery_order: DeliveryOrder | None = Field(
        None, description="For life; a new group is CONCURRENT."
    )
    max_attempts: int | None = Field(
        None, ge=1, le=1000, description="Deliveries before a message is a dead letter; 17."
    )
    retry: RetryPolicyView | None = Field(
        None, description="How long a message waits for its next delivery; 10 s to 2 h."
    )
    start_from: Literal["earliest", "latest"] | None = Field(
        None, description="Where a new group begins in a topic; the earliest message."
    )


class ConsumerGroupView(Schema):
    """A consumer group."""

    name: str = Field(description="Its name.")
    delivery_order: DeliveryOrder = Field(description="How it gets the messages of a queue.")
    max_attempts: int = Field(description="Deliveries before a message is a dead letter.")
    retry: RetryPolicyView = Field(description="How long a message waits for its next delivery.")
    start_from: Literal["earliest", "latest"] = Field(
        description="Where it begins in a topic that it has not read."
    )


class ConsumerGroupPutView(ConsumerGroupView):
    """A consumer group as it is now."""

    is_new: bool = Field(description="Whether it was created by this call.")
    before: ConsumerGroupView | None = Field(
        None, description="What it was; missing when it is new or has not changed."
    )


class ConsumerGroupDeletionView(Schema):
    """What deleting a group takes away."""

    dry_run: bool = Field(description="Whether nothing was done.")
    by: str = Field(description="Who asked: what the caller says of itself, and its address.")
    group: ConsumerGroupView = Field(description="The group.")
    topics: list[str] = Field(description="Topics in which its progress is lost.")
    lag: int = Field(description="Messages that it had not acked there.")
    unreachable: list[str] | None = UNREACHABLE


class ConsumerGroupPageView(Schema):
    """Some groups, by name; `nextPageToken` asks for those after them."""

    groups: list[ConsumerGroupView] = Field(description="The groups of this page.")
    next_page_token: str | None = NEXT_PAGE
    unreachable: list[str] | None = UNREACHABLE


class ProgressView(Schema):
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


class TopicProgressView(ProgressView):
    """How far a group is in one topic, its retries included."""

    topic: str = Field(description="Name of the topic.")


class PulledTopicView(Schema):
    """How far a group has pulled a topic, by its own word (UpdateOffset)."""

    topic: str = Field(description="Name of the topic.")
    queues: int = Field(description="Of how many of its queues the group has said so.")
    behind: int = Field(description="Messages in these that lie behind what it has said.")


class ConsumerGroupProgressView(Schema):
    """How far a group is."""

    group: str = Field(description="Name of the group.")
    total: ProgressView = Field(description="In all topics together.")
    topics: list[TopicProgressView] = Field(description="In each topic that it has begun to read.")
    locks: list[QueueLockView] = Field(
        description="Of a FIFO group: locked queues, those with most behind them first."
    )
    pulled: list[PulledTopicView] | None = Field(
        None,
        description="What it pulls, apart from what its consumers pop; missing where it has never"
        " said how far it is.",
    )
    unreachable: list[str] | None = UNREACHABLE


class OffsetResetRequest(Schema):
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


class PullOffsetDeletionRequest(Schema):
    """A topic that a group pulls no more."""

    topic: Text = Field(min_length=1, description="Name of the topic.")
    dry_run: bool = Field(False, description="Check and answer as if it were done; do nothing.")


class PullOffsetView(Schema):
    """How far a group had pulled a queue, by its own word."""

    broker: str = Field(description="Name of the broker group that has the queue.")
    queue_id: int = Field(description="Number of the queue, from 0.")
    offset: int = Field(description="The offset that the group had told.")
    behind: int = Field(description="Messages from there to the end of the queue.")


class PullOffsetDeletionView(Schema):
    """What nobody knows any more."""

    dry_run: bool = Field(description="Whether nothing was done.")
    by: str = Field(description="Who asked: what the caller says of itself, and its address.")
    group: str = Field(description="Name of the group.")
    topic: str = Field(description="Name of the topic.")
    queues: list[PullOffsetView] = Field(
        description="Each queue of which the group had told an offset."
    )


class QueueResetView(QueueView):
    """A queue as the group will find it: `maxOffset` is where it goes on."""

    from_offset: int | None = Field(
        None, description="First offset that was not acked; missing: the group had read nothing."
    )
    to_offset: int = Field(description="Where the group goes on.")


class OffsetResetView(Schema):
    """The queues as the group will find them."""

    dry_run: bool = Field(description="Whether nothing was done.")
    by: str = Field(description="Who asked: what the caller says of itself, and its address.")
    group: str = Field(description="Name of the group.")
    topic: str = Field(description="Name of the topic.")
    queues: list[QueueResetView] = Field(description="Each queue of the topic.")
