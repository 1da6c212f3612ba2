"""The JSON of the demand of a consumer group."""

from __future__ import annotations

from pydantic import Field

from tidemill.admin.json.schema import Schema

READY = Field(description="Messages that a consumer can receive now.")
IN_FLIGHT = Field(description="Messages in flight: delivered and not acked.")
SCHEDULED = Field(description="Delayed messages that are overdue or due within the horizon.")


class TopicScalingView(Schema):
    """The demand of one topic."""

    topic: str = Field(description="Name of the topic.")
    ready: int = READY
    in_flight: int = IN_FLIGHT
    scheduled: int = SCHEDULED


class ConsumerGroupScalingView(Schema):
    """The demand of a consumer group, as KEDA receives it, with its parts."""

    group: str = Field(description="Name of the consumer group.")
    horizon_seconds: int = Field(
        description="Delayed messages count if they are due within this many seconds."
    )
    value: int = Field(description="The demand: the sum of the parts.")
    replicas: int | None = Field(
        None, description="Number of consumers for this demand. Missing without a target."
    )
    ready: int = READY
    in_flight: int = IN_FLIGHT
    scheduled: int = SCHEDULED
    topics: list[TopicScalingView] = Field(description="The parts by topic.")
