"""Bulk changes of timers: by ids at their broker groups, or by filter as an operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import UNREACHABLE_ERRORS, BrokerGroupClient, Brokers
from tidemill.admin.http.request_access import READS, RequestAccess
from tidemill.admin.json.bulk_changes import IDS_MAX
from tidemill.admin.json.timer_changes import (
    RescheduleTimersRequest,
    TimerChangeView,
    TimerHourView,
    TimerIdOutcomeView,
    TimerOutcomeView,
    TimersRequest,
)
from tidemill.admin.json.timers import TimerTopicView
from tidemill.admin.messages.item_ids import split_item_id
from tidemill.admin.messages.operation_starts import (
    BulkCaller,
    OperationLimits,
    begin_operation,
    count_all,
    hash_of,
)
from tidemill.admin.messages.views import timer_of
from tidemill.common.errors import BadRequest, BrokerGroupNotFound, MessageNotFound
from tidemill.security.acl import Action, topic_resource
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

RATE_PER_S: Final = 2_500  # default
SAMPLE_MAX: Final = 10
TOPICS_SHOWN_MAX: Final = 20
HOURS_SHOWN_MAX: Final = 100
NOUN: Final = "timers"


class TimerAction(NamedTuple):
    """A kind of change, and its rights on a topic; one of them is enough."""

    kind: pb.OperationKind.ValueType
    rights: tuple[Action, ...]


CANCEL: Final = TimerAction(pb.OPERATION_KIND_CANCEL_TIMERS, (Action.PUB, Action.UPDATE))
RESCHEDULE: Final = TimerAction(pb.OPERATION_KIND_RESCHEDULE_TIMERS, (Action.UPDATE,))
FIRE: Final = TimerAction(pb.OPERATION_KIND_FIRE_TIMERS, (Action.UPDATE,))


async def check_change(
    member: BrokerGroupClient, timer_id: int, action: TimerAction, move: pb.TimerMove | None = None
) -> None:
    """Check that a change of one timer is possible. Raises MessageNotFound, IllegalDeliveryTime."""
    request = pb.ChangeTimersRequest(
        kind=action.kind, timer_ids=[timer_id], move=move, dry_run=True
    )
    [outcome] = (await member.client.call(calls.CHANGE_TIMERS, request)).outcomes
    if outcome != TimerOutcomeView.DONE:
        words = outcome.lower().replace("_", " ")
        raise MessageNotFound(f"timer {timer_id} cannot be changed: {words}")


def _move_of(wanted: TimersRequest) -> pb.TimerMove | None:
    if not isinstance(wanted, RescheduleTimersRequest):
        return None
    move = pb.TimerMove(spread_ms=wanted.spread_ms or 0)
    if wanted.due_at_ms is not None:
        move.due_at_ms = wanted.due_at_ms
    elif wanted.delay_ms is not None:
        move.delay_ms = wanted.delay_ms
    else:
        assert wanted.shift_ms is not None, "the model has checked it"
        move.shift_ms = wanted.shift_ms
    return move


# ------------------------------------------------------------ by filter


async def change_matching(
    cluster: Brokers,
    wanted: TimersRequest,
    action: TimerAction,
    caller: BulkCaller,
    *,
    is_dry: bool,
) -> TimerChangeView:
    """Count the timers that match, and begin an operation on them. Raises ServiceError."""
    chosen = wanted.filter
    assert chosen is not None, "the caller has checked it"
    _check_rights(caller.access, action, chosen.topic, has_key=bool(chosen.key))
    rate = wanted.rate_per_second or RATE_PER_S
    request = pb.BeginOperationRequest(
        kind=action.kind,
        timers=pb.TimerFilter(
            topic=chosen.topic or "",
            key=chosen.key or "",
            tag=chosen.tag or "",
            due_from_ms=chosen.due_from_ms or 0,
            due_to_ms=chosen.due_to_ms or 0,
        ),
        move=_move_of(wanted),
        as_of_ms=wanted.as_of_ms or 0,
        rate_per_s=rate,
        request_hash=hash_of(f"{action.kind} {wanted.model_dump_json()}"),
    )
    if is_dry:
        return await _count(cluster, request, caller)
    request.requested_by = caller.name
    request.audit.CopyFrom(caller.author.of(f"Topic:{chosen.topic or '*'}"))
    limits = OperationLimits(wanted.as_of_ms, wanted.max_count, rate)
    begun = await begin_operation(cluster, request, limits, caller.key, NOUN)
    return TimerChangeView(
        dry_run=False,
        by=caller.name,
        count=begun.total,
        as_of_ms=wanted.as_of_ms,
        operation=begun.operation,
        warnings=begun.warnings or None,
        unreachable=begun.unreachable or None,
    )


def _check_rights(
    access: RequestAccess, action: TimerAction, topic: str | None, *, has_key: bool
) -> None:
    """Check the rights on the topic, or on all topics. A filter by key tells the key."""
    if topic:
        access.require(action.rights, topic_resource(topic))
        if has_key:
            access.require(Action.SUB, topic_resource(topic))
        return
    access.require_all_topics(Action.UPDATE)
    access.require_all_topics(Action.SUB)


async def _count(
    cluster: Brokers, request: pb.BeginOperationRequest, caller: BulkCaller
) -> TimerChangeView:
    """Count the timers that match at all broker groups."""
    found = await count_all(cluster, request, NOUN)
    sample = [(broker, one) for broker, reply in found.answers for one in reply.timers]
    sample.sort(key=lambda each: each[1].scheduled_at_ms)
    topics: Counter[str] = Counter()
    hours: Counter[int] = Counter()
    for _, reply in found.answers:
        topics.update({one.topic: one.timers for one in reply.topics})
        hours.update({one.from_ms: one.timers for one in reply.hours})
    warnings = [text for _, reply in found.answers for text in reply.warnings]
    return TimerChangeView(
        dry_run=True,
        by=caller.name,
        count=sum(reply.count for _, reply in found.answers),
        bytes=sum(reply.size_bytes for _, reply in found.answers),
        as_of_ms=min([reply.as_of_ms for _, reply in found.answers], default=None),
        topics=[
            TimerTopicView(name=name, timers=count)
            for name, count in topics.most_common(TOPICS_SHOWN_MAX)
        ],
        hours=[
            TimerHourView(from_ms=from_ms, timers=count)
            for from_ms, count in sorted(hours.most_common(HOURS_SHOWN_MAX))
        ],
        sample=[
            timer_of(
                one, broker=broker, with_keys=caller.access.allows_topic(Action.SUB, one.topic)
            )
            for broker, one in sample[:SAMPLE_MAX]
        ],
        warnings=list(dict.fromkeys(warnings)) or None,
        unreachable=found.unreachable or None,
    )


# ------------------------------------------------------------ by ids


class _TimerId(NamedTuple):
    """A timer of a request."""

    broker: str
    number: int


async def change_ids(
    cluster: Brokers,
    wanted: TimersRequest,
    action: TimerAction,
    caller: BulkCaller,
    *,
    is_dry: bool,
) -> TimerChangeView:
    """Change timers at their broker groups. Raises Forbidden before the first change."""
    texts = wanted.ids or []
    if not 1 <= len(texts) <= IDS_MAX:
        raise BadRequest(f"{len(texts)} ids; 1 to {IDS_MAX} are allowed")
    ids = [_TimerId(*split_item_id(one, "a timer is BROKER:NUMBER")) for one in texts]
    for one, count in Counter(ids).items():
        if count > 1:
            raise BadRequest(f"{count} ids are of timer {one.number} at {one.broker}; give it once")
    change = _IdChange(cluster, action, caller, _move_of(wanted))
    planned = await change.plan(ids)
    outcomes = planned if is_dry else await change.perform(ids)
    shown = []
    for text, one in zip(texts, ids, strict=True):
        outcome = TimerOutcomeView(outcomes[one]) if one in outcomes else None
        shown.append(TimerIdOutcomeView(id=text, outcome=outcome))
    return TimerChangeView(
        dry_run=is_dry,
        by=caller.name,
        count=sum(one.outcome is TimerOutcomeView.DONE for one in shown),
        outcomes=shown,
        stopped_by=change.stopped_by,
        unreachable=change.unreachable or None,
    )


Outcomes = dict[_TimerId, str]


class _IdChange:
    """A change of timers by ids."""

    def __init__(
        self, cluster: Brokers, action: TimerAction, caller: BulkCaller, move: pb.TimerMove | None
    ) -> None:
        self._cluster = cluster
        self._action = action
        self._caller = caller
        self._move = move
        self._topics: dict[_TimerId, str] = {}  # of the timers that the caller may see
        self._hidden: set[_TimerId] = set()
        self.unreachable: list[str] = []
        self.stopped_by: str | None = None

    async def plan(self, ids: Sequence[_TimerId]) -> Outcomes:
        """Return the outcomes that the change would have. Check the rights on each topic."""
        outcomes: Outcomes = {}
        brokers = list(dict.fromkeys(one.broker for one in ids))
        for broker in brokers:
            own = [one for one in ids if one.broker == broker]
            try:
                reply = await self._ask(broker, own, is_dry=True)
            except UNREACHABLE_ERRORS:
                if len(brokers) == 1:
                    raise
                self.unreachable.append(broker)
                continue
            if reply.stopped_by:  # The other timers stay unknown, and unchanged.
                self.stopped_by = f"{broker}: {reply.stopped_by}"
            for one, outcome, topic in zip(own, reply.outcomes, reply.topics, strict=False):
                if self._may_see(topic, outcome):
                    self._topics[one] = topic
                    outcomes[one] = outcome
                else:
                    self._hidden.add(one)
                    outcomes[one] = TimerOutcomeView.NOT_FOUND
        return outcomes

    def _may_see(self, topic: str, outcome: str) -> bool:
        """Check the right on the topic of a timer. A hidden timer looks like a missing one."""
        access = self._caller.access
        if outcome == TimerOutcomeView.NOT_FOUND:
            return False
        if not access.allows_topic((*READS, *self._action.rights), topic):
            return False
        access.require(self._action.rights, topic_resource(topic))
        return True

    async def perform(self, ids: Sequence[_TimerId]) -> Outcomes:
        """Change the timers, with one audit record for each topic of a broker group."""
        outcomes: Outcomes = {}
        for one in ids:
            if one in self._hidden:
                outcomes[one] = TimerOutcomeView.NOT_FOUND
        parts: dict[tuple[str, str], list[_TimerId]] = {}
        for one in ids:
            if one in self._topics:
                parts.setdefault((one.broker, self._topics[one]), []).append(one)
        for (broker, topic), own in parts.items():
            try:
                reply = await self._ask(broker, own, topic=topic)
            except UNREACHABLE_ERRORS:
                if len(parts) == 1:
                    raise
                self.unreachable.append(broker)
                continue
            for one, outcome in zip(own, reply.outcomes, strict=False):
                outcomes[one] = outcome
            if reply.stopped_by:
                self.stopped_by = f"{broker}: {reply.stopped_by}"
        return outcomes

    async def _ask(
        self, broker: str, own: Sequence[_TimerId], *, topic: str = "", is_dry: bool = False
    ) -> pb.ChangeTimersReply:
        request = pb.ChangeTimersRequest(
            kind=self._action.kind,
            timer_ids=[one.number for one in own],
            move=self._move,
            dry_run=is_dry,
            requested_by=self._caller.name,
            audit=None if is_dry else self._caller.author.of(f"Topic:{topic or '*'}"),
        )
        try:
            member = await self._cluster.member(broker)
        except BrokerGroupNotFound:
            count = len(own)
            return pb.ChangeTimersReply(outcomes=["NOT_FOUND"] * count, topics=[""] * count)
        return await member.client.call(calls.CHANGE_TIMERS, request)
