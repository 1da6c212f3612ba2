"""The history of the numbers of a topic or consumer group."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from tidemill.admin.activity.history import OBJECTS_MAX, HistoryKey
from tidemill.admin.json.activity import HistoryView, SeriesView
from tidemill.admin.json.schema import Instant
from tidemill.admin.routes import Access, Activity
from tidemill.common.clock import SystemClock
from tidemill.message.resource_names import TOPIC_CHARS_MAX
from tidemill.security.acl import Action, group_resource, topic_resource

router = APIRouter(tags=["topics"])

HOUR_MS = 3_600_000
HistoryObject = Annotated[
    str,
    Query(
        alias="object",
        pattern=f"^(topic|group):[A-Za-z0-9_%|-]{{1,{TOPIC_CHARS_MAX}}}$",
        description="`topic:NAME` or `group:NAME`.",
    ),
]
FromMs = Annotated[
    Instant | None,
    Query(
        alias="fromMs",
        description="Begin of the range. The last hour has a number every 5 s, and the last day one"
        " per minute. Default: an hour ago.",
    ),
]


@router.get("/history", response_model_exclude_none=True)
async def get_history(
    named: HistoryObject, access: Access, activity: Activity, from_ms: FromMs = None
) -> HistoryView:
    """Show the rates and the lag of a topic or consumer group over time.

    The process keeps the history of the busiest topics and consumer groups since its start.
    """
    kind, _, name = named.partition(":")
    resource = topic_resource(name) if kind == "topic" else group_resource(name)
    access.require(Action.GET, resource)
    now_ms = SystemClock().wall_ms()
    begin_ms = now_ms - HOUR_MS if from_ms is None else from_ms
    found = activity.history.find(HistoryKey(kind, name), begin_ms, now_ms)
    if found is None:
        reason = activity.read().reason or (
            f"{named} is unknown, new, or not among the {OBJECTS_MAX} busiest topics and groups"
        )
        return HistoryView(object=named, unknown=reason)
    return HistoryView(
        object=named,
        from_ms=found.from_ms,
        step_ms=found.step_ms,
        series=SeriesView.model_validate(found.points),
    )
