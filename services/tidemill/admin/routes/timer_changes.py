"""Timers: cancel, reschedule and fire many of them, by ids or by filter."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Response

from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.json.timer_changes import (
    RescheduleTimersRequest,
    TimerChangeView,
    TimersRequest,
)
from tidemill.admin.messages.operation_starts import BulkCaller
from tidemill.admin.messages.timer_changes import (
    CANCEL,
    FIRE,
    RESCHEDULE,
    TimerAction,
    change_ids,
    change_matching,
)
from tidemill.admin.routes import Cluster, DryRun
from tidemill.admin.routes.messages import MessageRoute
from tidemill.admin.routes.operation_keys import (
    CallerOfBulk,
    answer_begun,
    begun_responses,
    require_no_key,
)

router = APIRouter(tags=["timers"], route_class=MessageRoute)

BEGUN: Final = begun_responses(TimerChangeView)


@router.post("/timers:cancel", response_model_exclude_none=True, responses=BEGUN)
async def cancel_timers(
    wanted: TimersRequest,
    cluster: Cluster,
    caller: CallerOfBulk,
    response: Response,
    dry_run: DryRun = False,
) -> TimerChangeView:
    """Cancel timers, so that their messages are never delivered.

    A filter begins an operation: first a dry run with the filter, which counts, then the call with
    its `asOfMs` and with `maxCount`. The header `Idempotency-Key` makes repeats safe. The right is
    Update or Pub on each topic.
    """
    return await _change(cluster, wanted, CANCEL, caller, response, is_dry=dry_run)


@router.post("/timers:reschedule", response_model_exclude_none=True, responses=BEGUN)
async def reschedule_timers(
    wanted: RescheduleTimersRequest,
    cluster: Cluster,
    caller: CallerOfBulk,
    response: Response,
    dry_run: DryRun = False,
) -> TimerChangeView:
    """Change the due times of timers to earlier or later times.

    A filter begins an operation, as for a cancel. The right is Update on each topic.
    """
    return await _change(cluster, wanted, RESCHEDULE, caller, response, is_dry=dry_run)


@router.post("/timers:fire", response_model_exclude_none=True, responses=BEGUN)
async def fire_timers(
    wanted: TimersRequest,
    cluster: Cluster,
    caller: CallerOfBulk,
    response: Response,
    dry_run: DryRun = False,
) -> TimerChangeView:
    """Deliver the messages of timers now.

    A filter begins an operation, as for a cancel, at most `ratePerSecond`. The right is Update on
    each topic.
    """
    return await _change(cluster, wanted, FIRE, caller, response, is_dry=dry_run)


async def _change(
    cluster: Brokers,
    wanted: TimersRequest,
    action: TimerAction,
    caller: BulkCaller,
    response: Response,
    *,
    is_dry: bool,
) -> TimerChangeView:
    if wanted.filter is None:
        require_no_key(caller)
        return await change_ids(cluster, wanted, action, caller, is_dry=is_dry)
    view = await change_matching(cluster, wanted, action, caller, is_dry=is_dry)
    answer_begun(view, response)
    return view
