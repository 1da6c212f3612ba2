"""The demand of a consumer group, as autoscalers see it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from tidemill.admin.json.scaling import ConsumerGroupScalingView, TopicScalingView
from tidemill.admin.routes import NAME, GroupName, ScalingQueries
from tidemill.admin.scaling.demand import replicas_of
from tidemill.admin.scaling.trigger import (
    HORIZON_S_DEFAULT,
    HORIZON_S_MAX,
    MESSAGES_MAX,
    demand_query,
)
from tidemill.message.resource_names import TOPIC_CHARS_MAX

router = APIRouter(tags=["groups"])

Topic = Annotated[
    str,
    Query(
        description="Only this topic. Default: all topics that the group reads.",
        json_schema_extra={"pattern": f"^((%DLQ%)?{NAME})?$", "maxLength": TOPIC_CHARS_MAX},
    ),
]
Horizon = Annotated[
    int,
    Query(
        alias="horizonSeconds",
        ge=0,
        le=HORIZON_S_MAX,
        description="Delayed messages count if they are due within this many seconds.",
    ),
]
Target = Annotated[
    int | None,
    Query(
        alias="messagesPerReplica",
        ge=1,
        le=MESSAGES_MAX,
        description="Number of messages per consumer.",
    ),
]
InFlight = Annotated[
    bool, Query(alias="countInFlight", description="Whether messages in flight count.")
]


@router.get("/groups/{group}/scaling", response_model_exclude_none=True)
async def get_scaling(
    group: GroupName,
    demands: ScalingQueries,
    topic: Topic = "",
    horizon: Horizon = HORIZON_S_DEFAULT,
    messages_per_replica: Target = None,
    count_in_flight: InFlight = True,
) -> ConsumerGroupScalingView:
    """Show the demand of a group, now and within a horizon, as KEDA receives it.

    The numbers are at most some seconds old. They include all broker groups: the answer is 503
    while one of them is unreachable.
    """
    demand = await demands.of(demand_query(group, topic, horizon_s=horizon))
    value = demand.value(counts_in_flight=count_in_flight)
    return ConsumerGroupScalingView(
        group=group,
        horizon_seconds=horizon,
        value=value,
        replicas=replicas_of(value, messages_per_replica) if messages_per_replica else None,
        ready=demand.ready,
        in_flight=demand.in_flight,
        scheduled=demand.scheduled,
        topics=[TopicScalingView.model_validate(each._asdict()) for each in demand.topics],
    )
