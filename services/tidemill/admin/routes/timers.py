"""Timers: list, show, cancel, reschedule and fire delayed messages."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import BrokerAnswer, BrokerGroupClient, Brokers
from tidemill.admin.http.paging import PAGE_SIZE, PageSize
from tidemill.admin.http.request_access import READS, RequestAccess
from tidemill.admin.json.schema import EXACT_MAX, Instant, millis_of
from tidemill.admin.json.timers import (
    HistogramStep,
    RescheduleRequest,
    TimerCancellationView,
    TimerHistogramView,
    TimerPageView,
    TimerView,
)
from tidemill.admin.messages.timer_changes import FIRE, RESCHEDULE, check_change
from tidemill.admin.messages.timer_pages import Token, cursor_of, merged, request_after
from tidemill.admin.messages.views import timer_of
from tidemill.admin.routes import (
    Access,
    BrokerName,
    Caller,
    ChangeAuthor,
    Cluster,
    DryRun,
    Histograms,
)
from tidemill.common.errors import BrokerGroupUnreachable, Conflict, MessageNotFound
from tidemill.security.acl import Action, topic_resource
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["timers"])

CALLS_MAX = 32  # to each broker group, for a page of the timers that a user may see

TimerId = Annotated[int, Path(ge=0, le=2**63 - 1, description="Number of the timer.")]
Topic = Annotated[str, Query(description="Only of this topic.")]
Step = Annotated[HistogramStep, Query(description="Width of a bucket.")]
Key = Annotated[str, Query(description="Only messages with this key.")]
DueFrom = Annotated[
    Instant,
    Query(
        alias="dueFrom",
        ge=0,
        le=EXACT_MAX,
        description="Due at or after this time: Unix ms, or a time such as 2027-01-01T08:00:00Z.",
    ),
]
DueTo = Annotated[
    Instant,
    Query(
        alias="dueTo",
        ge=0,
        le=EXACT_MAX,
        description="Due before this time: Unix ms, or a time such as 2027-01-01T08:00:00Z.",
    ),
]


@router.get("/timers", response_model_exclude_none=True)
async def list_timers(
    cluster: Cluster,
    access: Access,
    begin: Token,
    topic: Topic = "",
    due_from: DueFrom = 0,
    due_to: DueTo = 0,
    key: Key = "",
    page_size: PageSize = PAGE_SIZE,
) -> TimerPageView:
    """List pending timers of all broker groups, ordered by due time."""
    if topic and not _is_shown(access, topic, key):
        return TimerPageView(timers=[])  # As for a topic without timers, whether it exists or not.
    request = pb.ListTimersRequest(
        topic=topic, due_from_ms=due_from, due_to_ms=due_to, key=key, page_size=page_size
    )
    cursor = cursor_of(begin.after) if begin.after else None

    def ask(member: BrokerGroupClient) -> Awaitable[pb.ListTimersReply]:
        if cursor is None:
            return member.client.call(calls.LIST_TIMERS, request)
        return member.client.call(calls.LIST_TIMERS, request_after(request, cursor, member.name))

    shown: list[tuple[str, pb.Timer]] = []
    unreachable: set[str] = set()
    # A page that ends at a hidden timer would tell its due time and id.
    for _ in range(CALLS_MAX):
        found = await cluster.ask_all(ask)
        unreachable.update(found.unreachable)
        timers, token = merged(found.answers, page_size)
        shown += [each for each in timers if _is_shown(access, each[1].topic, key)]
        if token is None or len(shown) > page_size or not access.is_limited:
            break
        cursor = cursor_of(token)
    if len(shown) > page_size:
        shown = shown[:page_size]
        broker, last = shown[-1]
        token = f"{last.due_at_ms}:{last.timer_id}:{broker}"
    return TimerPageView(
        timers=[
            timer_of(timer, broker=broker, with_keys=access.allows_topic(Action.SUB, timer.topic))
            for broker, timer in shown
        ],
        next_page_token=begin.next(token),
        unreachable=sorted(unreachable) or None,
    )


def _is_shown(access: RequestAccess, topic: str, key: str) -> bool:
    """Whether a list has the timers of a topic. A filter by key tells the key."""
    if key and not access.allows_topic(Action.SUB, topic):
        return False
    return access.allows_topic(READS, topic)


@router.get("/timers/histogram", response_model_exclude_none=True)
async def get_timer_histogram(
    histograms: Histograms, access: Access, step: Step = HistogramStep.HOUR, topic: Topic = ""
) -> TimerHistogramView:
    """Count pending timers by due time: 2 minutes by 1s, 24 h by 10m, 30 d by 1h, 400 d by 1d.

    Without a topic, the caller needs Get on all topics. Calls for the same step and topic share an
    answer, which is at most a second old. An answer scans all timers once: a million cost a broker
    some 70 ms of CPU time. A topic without pending timers needs no scan.
    """
    if topic:
        access.require(Action.GET, topic_resource(topic))
    else:
        access.require_all_topics(Action.GET)
    return await histograms.of(step, topic)


@router.get("/timers/{timer_id}", response_model_exclude_none=True)
async def get_timer(
    timer_id: TimerId, cluster: Cluster, access: Access, broker: BrokerName = None
) -> TimerView:
    """Show a timer. Recently delivered or cancelled timers are shown too."""
    member, timer = await _find_timer(cluster, access, timer_id, broker, (Action.GET,))
    return _view(timer, member, access)


@router.post("/timers/{timer_id}:cancel", response_model_exclude_none=True)
async def cancel_timer(
    timer_id: TimerId,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    broker: BrokerName = None,
    dry_run: DryRun = False,
) -> TimerCancellationView:
    """Cancel a timer, so that its message is never delivered.

    The call can be repeated: the outcome is then ALREADY_CANCELLED, and nothing changes.
    """
    request = pb.CancelTimerRequest(
        timer_id=timer_id,
        dry_run=dry_run,
        requested_by=caller,
        audit=author.of(f"Timer:{timer_id}"),
    )
    member, _ = await _find_timer(cluster, access, timer_id, broker, (Action.PUB, Action.UPDATE))
    timer = await member.client.call(calls.CANCEL_TIMER, request)
    return TimerCancellationView(
        **_view(timer, member, access).model_dump(),
        outcome="ALREADY_CANCELLED" if timer.was_cancelled else "DONE",
    )


@router.post("/timers/{timer_id}:reschedule", response_model_exclude_none=True)
async def reschedule_timer(
    timer_id: TimerId,
    change: RescheduleRequest,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    broker: BrokerName = None,
    dry_run: DryRun = False,
) -> TimerView:
    """Change the due time of a timer to an earlier or later time.

    A dry run shows the timer as it is.
    """
    request = pb.RescheduleTimerRequest(
        timer_id=timer_id,
        due_at_ms=_millis(change.due_at_ms, change.due_at) or 0,
        delay_ms=change.delay_ms,
        expected_due_at_ms=_millis(change.expected_due_at_ms, change.expected_due_at),
        requested_by=caller,
        audit=author.of(f"Timer:{timer_id}"),
    )
    member, timer = await _find_timer(cluster, access, timer_id, broker, (Action.UPDATE,))
    if dry_run:
        if request.HasField("expected_due_at_ms") and timer.due_at_ms != request.expected_due_at_ms:
            raise Conflict(
                f"timer {timer_id} is now due at {timer.due_at_ms}, not at"
                f" {request.expected_due_at_ms}; read it again before you change it"
            )
        move = pb.TimerMove(due_at_ms=request.due_at_ms)
        if change.delay_ms is not None:
            move = pb.TimerMove(delay_ms=change.delay_ms)
        await check_change(member, timer_id, RESCHEDULE, move)
        return _view(timer, member, access)
    return _view(await member.client.call(calls.RESCHEDULE_TIMER, request), member, access)


@router.post("/timers/{timer_id}:fire", response_model_exclude_none=True)
async def fire_timer(
    timer_id: TimerId,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    broker: BrokerName = None,
    dry_run: DryRun = False,
) -> TimerView:
    """Deliver a timer's message now. A dry run shows the timer as it is."""
    request = pb.FireTimerRequest(
        timer_id=timer_id, requested_by=caller, audit=author.of(f"Timer:{timer_id}")
    )
    member, timer = await _find_timer(cluster, access, timer_id, broker, (Action.UPDATE,))
    if dry_run:
        await check_change(member, timer_id, FIRE)
        return _view(timer, member, access)
    return _view(await member.client.call(calls.FIRE_TIMER, request), member, access)


def _view(timer: pb.Timer, member: BrokerGroupClient, access: RequestAccess) -> TimerView:
    with_keys = access.allows_topic(Action.SUB, timer.topic)
    return timer_of(timer, broker=member.name, with_keys=with_keys)


async def _find_timer(
    cluster: Brokers,
    access: RequestAccess,
    timer_id: int,
    broker: str | None,
    actions: tuple[Action, ...],
) -> tuple[BrokerGroupClient, pb.Timer]:
    """Return a timer and its broker group. Each broker group assigns its own timer ids.

    A timer of a topic without any right looks like a missing one. Raises MessageNotFound; Forbidden
    without one of the rights; Conflict if several broker groups have this id and the request does
    not name one.
    """
    request = pb.GetTimerRequest(timer_id=timer_id)
    unreachable: Sequence[str] = ()
    try:
        if broker is None:
            answers, unreachable = await cluster.call_all(calls.GET_TIMER, request)
        else:
            member = await cluster.member(broker)
            answers = [BrokerAnswer(broker, await member.client.call(calls.GET_TIMER, request))]
    except MessageNotFound:
        if access.is_limited:  # The text of the broker tells more about a former timer.
            raise _no_timer(timer_id) from None
        raise
    visible = [
        one for one in answers if access.allows_topic((Action.GET, *actions), one.value.topic)
    ]
    names = [name for name, _ in visible]
    if len(names) > 1:
        raise Conflict(
            f"each of {', '.join(names)} has a timer {timer_id}: name the broker group"
            f" (?broker={names[0]}, or --broker {names[0]})"
        )
    if unreachable:
        at = f"?broker={names[0]}, or --broker {names[0]}" if names else "?broker=, or --broker"
        raise BrokerGroupUnreachable(
            f"{', '.join(unreachable)} cannot be reached and may have a timer {timer_id}: name the"
            f" broker group ({at})"
        )
    if not visible:
        raise _no_timer(timer_id)
    [(name, timer)] = visible
    access.require(actions, topic_resource(timer.topic))
    return await cluster.member(name), timer


def _no_timer(timer_id: int) -> MessageNotFound:
    return MessageNotFound(f"timer {timer_id} does not exist; check the number")


def _millis(at_ms: int | None, at: datetime | None) -> int | None:
    return millis_of(at) if at else at_ms
