"""How much there is to do for a group, as JSON."""

from __future__ import annotations

from pydantic import Field

from tidemill.admin.json.schema import Schema

READY = Field(description="Messages that wait for a consumer.")
IN_FLIGHT = Field(description="Messages that consumers have and have not acked.")
SCHEDULED = Field(description="Delayed messages that are due within the horizon, or overdue.")


class TopicScalingView(Schema):
    """What a topic has for the group."""

    topic: str = Field(description="Name of the topic.")
    ready: int = READY
    in_flight: int = IN_FLIGHT
    scheduled: int = SCHEDULED


class ConsumerGroupScalingView(Schema):
    """What KEDA is told of a group, with its parts."""

    group: str = Field(description="Name of the consumer group.")
    horizon_seconds: int = Field(description="Which delayed messages count: due within so many s.")
    value: int = Field(description="The number that consumers are scaled by: the sum of the parts.")
    replicas: int | None = Field(
        None, description="How many consumers that is work for; missing without a target."
    )
    ready: int = READY
    in_flight: int = IN_FLIGHT
    scheduled: int = SCHEDULED
    topics: list[TopicScalingView] = Field(description="The parts by topic.")
