"""Timers: delayed messages that wait for their time."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query

from tidemill.admin import schemas
from tidemill.admin.paging import PAGE_SIZE, PageSize, PageToken, decode_token, encode_token
from tidemill.admin.peek import timer_of
from tidemill.admin.routes import Broker, Caller, DryRun, refuse_foreign_pages
from tidemill.common.errors import BadRequest
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["timers"])

BODILESS = [Depends(refuse_foreign_pages)]  # of actions that need no body of type JSON

PLACE_CHARS_MAX = 64  # of a token; two numbers of 64 bits have fewer
TimerId = Annotated[int, Path(ge=0, le=2**63 - 1, description="Number of the timer.")]
Topic = Annotated[str, Query(description="Only of this topic.")]
Key = Annotated[str, Query(description="Only messages with this key.")]
DueFrom = Annotated[
    schemas.Instant,
    Query(
        alias="dueFrom", ge=0, le=schemas.EXACT_MAX,
        description="Due not before this time: Unix ms, or as 2027-01-01T08:00:00Z.",
    ),
]  # fmt: skip
DueTo = Annotated[
    schemas.Instant,
    Query(
        alias="dueTo", ge=0, le=schemas.EXACT_MAX,
        description="Due before this time: Unix ms, or as 2027-01-01T08:00:00Z.",
    ),
]  # fmt: skip


@router.get("/timers", response_model_exclude_none=True)
async def list_timers(
    broker: Broker,
    topic: Topic = "",
    due_from: DueFrom = 0,
    due_to: DueTo = 0,
    key: Key = "",
    page_size: PageSize = PAGE_SIZE,
    page_token: PageToken = None,
) -> schemas.TimerPage:
    """List pending timers, those due first first."""
    request = pb.ListTimersRequest(
        topic=topic, due_from_ms=due_from, due_to_ms=due_to, key=key, page_size=page_size
    )
    if page_token is not None:
        request.after_due_ms, request.after_timer_id = _place_of(page_token)
    reply = await broker.list_timers(request)
    token = None
    if reply.has_more:
        token = encode_token(f"{reply.last_due_ms}:{reply.last_timer_id}")
    return schemas.TimerPage(
        timers=[timer_of(timer) for timer in reply.timers], next_page_token=token
    )


@router.get("/timers/{timer_id}", response_model_exclude_none=True)
async def get_timer(timer_id: TimerId, broker: Broker) -> schemas.Timer:
    """Show a timer, also one that was delivered or cancelled not long ago."""
    return timer_of(await broker.timer(timer_id))


@router.post("/timers/{timer_id}:cancel", response_model_exclude_none=True, dependencies=BODILESS)
async def cancel_timer(
    timer_id: TimerId, broker: Broker, caller: Caller, dry_run: DryRun = False
) -> schemas.Timer:
    """Cancel a timer: its message is never delivered. Doing so again is no error."""
    request = pb.TimerRequest(timer_id=timer_id, dry_run=dry_run, requested_by=caller)
    return timer_of(await broker.cancel_timer(request))


@router.post("/timers/{timer_id}:reschedule", response_model_exclude_none=True)
async def reschedule_timer(
    timer_id: TimerId, change: schemas.Reschedule, broker: Broker, caller: Caller
) -> schemas.Timer:
    """Let a timer be due at another time, earlier or later."""
    request = pb.RescheduleTimerRequest(
        timer_id=timer_id,
        due_at_ms=_millis(change.due_at_ms, change.due_at) or 0,
        delay_ms=change.delay_ms,
        expected_due_at_ms=_millis(change.expected_due_at_ms, change.expected_due_at),
        requested_by=caller,
    )
    return timer_of(await broker.reschedule_timer(request))


@router.post("/timers/{timer_id}:fire", response_model_exclude_none=True, dependencies=BODILESS)
async def fire_timer(timer_id: TimerId, broker: Broker, caller: Caller) -> schemas.Timer:
    """Deliver a timer's message now."""
    request = pb.TimerRequest(timer_id=timer_id, requested_by=caller)
    return timer_of(await broker.fire_timer(request))


def _millis(at_ms: int | None, at: datetime | None) -> int | None:
    return schemas.millis_of(at) if at else at_ms


def _place_of(token: str) -> tuple[int, int]:
    due_at_ms, _, timer_id = decode_token(token).partition(":")
    # isdecimal() takes other scripts' digits too, and int() reads those as well.
    if not (due_at_ms.isdecimal() and timer_id.isdecimal() and len(token) <= PLACE_CHARS_MAX):
        raise BadRequest("pageToken is not one that this API gave out")
    return min(int(due_at_ms), schemas.EXACT_MAX), min(int(timer_id), 2**63 - 1)
