"""The JSON of the numbers of topics and consumer groups, and of their history."""

from __future__ import annotations

from pydantic import Field

from tidemill.admin.activity.numbers import GroupState
from tidemill.admin.json.schema import Schema

SAMPLED_AT = Field(
    None, description="Time of the numbers (Unix, ms), which are some seconds old. Missing: none."
)
UNKNOWN = Field(
    None, description="Why numbers are missing, which are unknown. Missing if all are known."
)
IN_RATE = "Messages per second that entered its queues; a delayed message counts when it is due."
OUT_RATE = "Deliveries per second, repeated ones included."


class TopicNumbersView(Schema):
    """The numbers of a topic, over all reachable broker groups. A missing number is unknown."""

    messages: int | None = Field(None, description="Messages in its queues, acknowledged or not.")
    bytes: int | None = Field(
        None,
        description="Size of the records of its messages in the log. The broker counts it every"
        " 10 s.",
    )
    in_per_second: float | None = Field(None, description=IN_RATE)
    out_per_second: float | None = Field(None, description=OUT_RATE)
    pending_timers: int | None = Field(
        None, description="Delayed messages that will be delivered to it."
    )
    has_consumer: bool | None = Field(
        None, description="Whether a consumer group has begun to read it, or is subscribed to it."
    )
    unknown: str | None = UNKNOWN


class DeadLetterNumbersView(Schema):
    """Numbers of dead letters. A missing number is unknown."""

    open: int = Field(description="Dead letters that are neither replayed nor discarded.")
    last_hour: int | None = Field(
        None,
        description="Messages that became dead letters in the last hour and are still stored, in"
        " any state.",
    )
    unknown: str | None = Field(
        None, description="Why a number is missing. A row of a list has its own `unknown`."
    )


class GroupNumbersView(Schema):
    """The numbers of a consumer group, over all reachable broker groups.

    A missing number is unknown. `unknown` has the reason, except in the state NEVER_POLLED.
    """

    state: GroupState | None = Field(
        None,
        description="ACTIVE: a consumer is connected, or messages were delivered or acknowledged"
        " since the sample before. IDLE: neither. NEVER_POLLED: it has read no topic, and no"
        " consumer is subscribed. PAUSED: `paused` has the end.",
    )
    lag: int | None = Field(None, description="Sum of ready, blocked and in-flight messages.")
    ready: int | None = Field(None, description="Messages that a consumer can receive now.")
    in_flight: int | None = Field(
        None, description="Messages in flight: delivered and not acknowledged."
    )
    blocked: int | None = Field(None, description="Messages in locked queues of a FIFO group.")
    oldest_unacked_at_ms: int | None = Field(
        None,
        description="Time at which the oldest unacknowledged message was stored (Unix, ms). Missing"
        " if there is none.",
    )
    in_per_second: float | None = Field(None, description=f"Of its topics. {IN_RATE}")
    out_per_second: float | None = Field(None, description=OUT_RATE)
    ack_per_second: float | None = Field(None, description="Acknowledged messages per second.")
    retry_per_second: float | None = Field(None, description="Repeated deliveries per second.")
    consumers: int | None = Field(None, description="Connected consumers.")
    locked_queues: int | None = Field(None, description="Locked queues of a FIFO group.")
    dead_letters: DeadLetterNumbersView | None = Field(
        None, description="Its dead letters. `sort=deadLetters` orders by the open ones."
    )
    unknown: str | None = UNKNOWN


class TopicGroupView(Schema):
    """A consumer group of a topic."""

    name: str = Field(description="Name of the group.")
    lag: int | None = Field(
        None,
        description="Messages of the topic that the group has not acknowledged; missing if unknown",
    )


class SeriesView(Schema):
    """Series of numbers, oldest first, of equal length. null: unknown."""

    in_: list[float | None] = Field(alias="in", description="Messages in per second.")
    out: list[float | None] = Field(description="Deliveries per second.")
    ack: list[float | None] = Field(description="Acknowledged messages per second.")
    lag: list[float | None] = Field(
        description="Unacknowledged messages; of a topic: of all its consumer groups."
    )
    oldest_ms: list[float | None] = Field(
        description="Age of the oldest unacknowledged message in ms; 0: there is none."
    )


class HistoryView(Schema):
    """The history of a topic or consumer group."""

    object: str = Field(description="`topic:NAME` or `group:NAME`.")
    from_ms: int | None = Field(
        None, description="Time of the first number (Unix, ms). Missing without a history."
    )
    step_ms: int | None = Field(
        None, description="Time between two numbers in ms. Missing without a history."
    )
    series: SeriesView | None = Field(None, description="The numbers. Missing without a history.")
    unknown: str | None = Field(None, description="Why there is no history. Missing if there is.")
