"""Timers: cancel, reschedule and fire many of them, by ids or by filter."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

from fastapi import APIRouter, Response

from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.json.timer_changes import (
    RescheduleTimersRequest,
    TimerChangeView,
    TimersRequest,
)
from tidemill.admin.messages.timer_changes import (
    CANCEL,
    FIRE,
    RESCHEDULE,
    TimerAction,
    TimerCaller,
    change_ids,
    change_matching,
)
from tidemill.admin.routes import Access, Caller, ChangeAuthor, Cluster, DryRun
from tidemill.admin.routes.messages import MessageRoute
from tidemill.admin.routes.operation_keys import KEY_MISMATCH, OperationKey
from tidemill.common.errors import BadRequest

router = APIRouter(tags=["timers"], route_class=MessageRoute)

BEGUN: Final[dict[int | str, dict[str, Any]]] = {
    202: {"description": "An operation has begun.", "model": TimerChangeView},
    422: KEY_MISMATCH,
}


@router.post("/timers:cancel", response_model_exclude_none=True, responses=BEGUN)
async def cancel_timers(
    wanted: TimersRequest,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    key: OperationKey,
    response: Response,
    dry_run: DryRun = False,
) -> TimerChangeView:
    """Cancel timers, so that their messages are never delivered.

    A filter begins an operation: first a dry run with the filter, which counts, then the call with
    its `asOfMs` and with `maxCount`. The header `Idempotency-Key` makes repeats safe. The right is
    Update or Pub on each topic.
    """
    who = TimerCaller(access, caller, author)
    return await _change(cluster, wanted, CANCEL, who, key, response, is_dry=dry_run)


@router.post("/timers:reschedule", response_model_exclude_none=True, responses=BEGUN)
async def reschedule_timers(
    wanted: RescheduleTimersRequest,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    key: OperationKey,
    response: Response,
    dry_run: DryRun = False,
) -> TimerChangeView:
    """Change the due times of timers to earlier or later times.

    A filter begins an operation, as for a cancel. The right is Update on each topic.
    """
    who = TimerCaller(access, caller, author)
    return await _change(cluster, wanted, RESCHEDULE, who, key, response, is_dry=dry_run)


@router.post("/timers:fire", response_model_exclude_none=True, responses=BEGUN)
async def fire_timers(
    wanted: TimersRequest,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    key: OperationKey,
    response: Response,
    dry_run: DryRun = False,
) -> TimerChangeView:
    """Deliver the messages of timers now.

    A filter begins an operation, as for a cancel, at most `ratePerSecond`. The right is Update on
    each topic.
    """
    who = TimerCaller(access, caller, author)
    return await _change(cluster, wanted, FIRE, who, key, response, is_dry=dry_run)


async def _change(
    cluster: Brokers,
    wanted: TimersRequest,
    action: TimerAction,
    caller: TimerCaller,
    key: str | None,
    response: Response,
    *,
    is_dry: bool,
) -> TimerChangeView:
    if wanted.filter is None:
        if key is not None:
            raise BadRequest("the header Idempotency-Key belongs to a filter")
        return await change_ids(cluster, wanted, action, caller, is_dry=is_dry)
    view = await change_matching(cluster, wanted, action, caller, key, is_dry=is_dry)
    if view.operation is not None:
        response.status_code = HTTPStatus.ACCEPTED
    return view
