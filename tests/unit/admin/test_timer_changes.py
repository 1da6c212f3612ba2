"""Bulk changes of timers by REST: ids at several broker groups, filters, rights, and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.worlds.broker_groups import cluster_of
from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.audit.author import Author
from tidemill.admin.http.actor import Actor
from tidemill.admin.http.request_access import OPEN, RequestAccess
from tidemill.admin.json.timer_changes import (
    RescheduleTimersRequest,
    TimerChangeView,
    TimersRequest,
)
from tidemill.admin.messages.operation_starts import BulkCaller
from tidemill.admin.messages.timer_changes import (
    CANCEL,
    FIRE,
    RATE_PER_S,
    RESCHEDULE,
    TimerAction,
    change_ids,
    change_matching,
)
from tidemill.common.errors import BadRequest, BrokerUnreachable, Conflict, Forbidden
from tidemill.security.acl import AccessEntry, Action, ResourceType, Subject
from tidemill.security.identities import User
from tidemill.security.rights import Rights
from tidemill.security.table import KnownUser, Mode
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

AUTHOR = Author(Actor("me", "", "", "10.0.0.1"), process="admin", call="POST /timers:cancel")


class GroupWithTimers(CallsByRequest):
    """A broker group with timers of two topics: even ids are of `orders`, odd ones of `mails`."""

    def __init__(self, count: int = 10) -> None:
        self.count = count
        self.changed: list[pb.ChangeTimersRequest] = []
        self.begun: list[pb.BeginOperationRequest] = []
        self.is_down = False
        self.refusal = ""
        self.planned_max = 1_000  # timers of a dry run before it ends early

    async def change_timers(self, request: pb.ChangeTimersRequest) -> pb.ChangeTimersReply:
        if self.is_down:
            raise BrokerUnreachable("it is down")
        known = [one < self.count for one in request.timer_ids]
        reply = pb.ChangeTimersReply(outcomes=["DONE" if one else "NOT_FOUND" for one in known])
        if request.dry_run:
            names = ("orders", "mails")
            reply.topics.extend(
                [names[one % 2] if one < self.count else "" for one in request.timer_ids]
            )
            if len(reply.outcomes) > self.planned_max:
                del reply.outcomes[self.planned_max :], reply.topics[self.planned_max :]
                reply.stopped_by = "the disk is full"
        else:
            self.changed.append(request)
        return reply

    async def list_operations(self, _request: pb.ListOperationsRequest) -> pb.OperationList:
        return pb.OperationList()

    async def begin_operation(self, request: pb.BeginOperationRequest) -> pb.BeginOperationReply:
        reply = pb.BeginOperationReply(count=self.count, as_of_ms=request.as_of_ms or 77)
        if request.dry_run:
            reply.timers.add(
                state=pb.TIMER_STATE_PENDING, timer_id=1, topic="orders", scheduled_at_ms=self.count
            )
            reply.topics.add(topic="orders", timers=self.count)
            reply.hours.add(from_ms=3_600_000, timers=self.count)
            reply.warnings.extend([self.refusal] if self.refusal else [])
            return reply
        if self.refusal:
            raise Conflict(self.refusal)
        self.begun.append(request)
        operation = reply.operation
        operation.id, operation.kind, operation.topic = 5, request.kind, request.timers.topic
        operation.total, operation.rate_per_s = self.count, request.rate_per_s
        operation.state = pb.OPERATION_STATE_RUNNING
        return reply


def caller_of(access: RequestAccess = OPEN) -> BulkCaller:
    return BulkCaller(access, "me", AUTHOR, None)


def user_with(*actions: Action) -> BulkCaller:
    """Return a user with rights on the topic `orders`."""
    entry = AccessEntry(
        type=ResourceType.TOPIC, name="orders", is_prefix=False, actions=frozenset(actions)
    )
    rights = Rights([Subject("User:u", (entry,))])
    known = KnownUser(User(name="u", id=1), rights)
    return caller_of(RequestAccess(Mode.ON, is_super=False, known=known))


def by_ids(
    *groups: GroupWithTimers,
    ids: list[str],
    action: TimerAction = CANCEL,
    caller: BulkCaller | None = None,
    is_dry: bool = False,
    **fields: Any,
) -> TimerChangeView:
    model = RescheduleTimersRequest if action is RESCHEDULE else TimersRequest
    wanted = model.model_validate({"ids": ids, **fields})
    cluster, who = cluster_of(*groups), caller or caller_of()
    return asyncio.run(change_ids(cluster, wanted, action, who, is_dry=is_dry))


def by_filter(
    *groups: GroupWithTimers,
    action: TimerAction = CANCEL,
    caller: BulkCaller | None = None,
    is_dry: bool = False,
    **fields: Any,
) -> TimerChangeView:
    model = RescheduleTimersRequest if action is RESCHEDULE else TimersRequest
    given = {} if is_dry else {"asOfMs": 5, "maxCount": 100}
    wanted = model.model_validate({"filter": {"topic": "orders"}, **given, **fields})
    cluster, who = cluster_of(*groups), caller or caller_of()
    return asyncio.run(change_matching(cluster, wanted, action, who, is_dry=is_dry))


def outcomes(view: TimerChangeView) -> list[str | None]:
    assert view.outcomes is not None
    return [None if one.outcome is None else one.outcome.value for one in view.outcomes]


def test_ids_have_one_outcome_each_in_their_order() -> None:
    first, second = GroupWithTimers(), GroupWithTimers()
    ids = ["broker-1:3", "broker-0:1", "broker-0:77", "broker-0:2", "broker-9:1", "broker-0:5"]
    view = by_ids(first, second, ids=ids)
    assert outcomes(view) == ["DONE", "DONE", "NOT_FOUND", "DONE", "NOT_FOUND", "DONE"]
    assert (view.count, view.dry_run) == (4, False)
    # An audit record has one topic.
    assert [(list(one.timer_ids), one.audit.resource) for one in first.changed] == [
        ([1, 5], "Topic:mails"),
        ([2], "Topic:orders"),
    ]


def test_a_dry_run_changes_nothing() -> None:
    group = GroupWithTimers()
    view = by_ids(group, ids=["broker-0:1"], is_dry=True)
    assert (outcomes(view), group.changed) == (["DONE"], [])


def test_an_unreachable_broker_group_leaves_outcomes_unknown() -> None:
    up, down = GroupWithTimers(), GroupWithTimers()
    down.is_down = True
    view = by_ids(up, down, ids=["broker-1:1", "broker-0:1"])
    assert (outcomes(view), view.unreachable) == ([None, "DONE"], ["broker-1"])
    with pytest.raises(BrokerUnreachable):
        by_ids(up, down, ids=["broker-1:1"])


@pytest.mark.parametrize("is_dry", [True, False])
def test_a_dry_run_that_a_broker_ends_early_is_a_partial_answer(*, is_dry: bool) -> None:
    group = GroupWithTimers()
    group.planned_max = 2
    view = by_ids(group, ids=["broker-0:0", "broker-0:2", "broker-0:4"], is_dry=is_dry)
    assert outcomes(view) == ["DONE", "DONE", None]
    assert view.stopped_by == "broker-0: the disk is full"
    assert [list(one.timer_ids) for one in group.changed] == ([] if is_dry else [[0, 2]])


def test_a_move_reaches_the_broker() -> None:
    group = GroupWithTimers()
    by_ids(group, ids=["broker-0:2"], action=RESCHEDULE, shiftMs=-5, spreadMs=7)
    [change] = group.changed
    assert (change.move.shift_ms, change.move.spread_ms) == (-5, 7)
    assert change.move.WhichOneof("time") == "shift_ms"


def test_each_topic_needs_a_right_and_hidden_timers_look_missing() -> None:
    group = GroupWithTimers()
    for rights, action in (((Action.PUB,), CANCEL), ((Action.UPDATE,), FIRE)):
        view = by_ids(
            group, ids=["broker-0:2", "broker-0:3"], action=action, caller=user_with(*rights)
        )
        assert outcomes(view) == ["DONE", "NOT_FOUND"]
    assert [list(one.timer_ids) for one in group.changed] == [[2], [2]]
    with pytest.raises(Forbidden):
        by_ids(group, ids=["broker-0:2"], action=FIRE, caller=user_with(Action.PUB, Action.GET))
    assert len(group.changed) == 2


@pytest.mark.parametrize("ids", [[], ["7"], ["broker-0:x"], ["broker-0:2", "broker-0:02"]])
def test_wrong_ids_are_rejected(ids: list[str]) -> None:
    group = GroupWithTimers()
    with pytest.raises(BadRequest):
        by_ids(group, ids=ids)
    assert group.changed == []


def test_a_dry_run_with_a_filter_counts_at_all_broker_groups() -> None:
    view = by_filter(GroupWithTimers(4), GroupWithTimers(3), is_dry=True)
    assert (view.count, view.operation, view.as_of_ms) == (7, None, 77)
    assert view.topics is not None
    assert [(one.name, one.timers) for one in view.topics] == [("orders", 7)]
    assert view.hours is not None
    assert [(one.from_ms, one.timers) for one in view.hours] == [(3_600_000, 7)]
    assert view.sample is not None
    assert [one.broker for one in view.sample] == ["broker-1", "broker-0"]


def test_a_filter_begins_an_operation() -> None:
    first, second = GroupWithTimers(4), GroupWithTimers(3)
    view = by_filter(first, second, action=RESCHEDULE, delayMs=5)
    assert view.operation is not None
    assert (view.operation.kind, view.operation.topic, view.operation.group) == (
        "RESCHEDULE_TIMERS",
        "orders",
        None,
    )
    assert (view.operation.total, len(view.operation.brokers)) == (7, 2)
    [begun] = first.begun
    assert (begun.rate_per_s, begun.audit.resource) == (RATE_PER_S // 2, "Topic:orders")
    assert begun.move.delay_ms == 5
    with pytest.raises(Conflict, match="7 timers match"):
        by_filter(first, second, maxCount=6)


def test_a_refusal_of_a_count_of_0_is_an_error() -> None:
    group = GroupWithTimers(0)
    group.refusal = "more than 10000 messages have this key"
    with pytest.raises(Conflict, match="more than 10000"):
        by_filter(group)


def test_the_rights_of_a_filter() -> None:
    group = GroupWithTimers()
    assert by_filter(group, caller=user_with(Action.UPDATE), is_dry=True).count == 10
    keyed = {"topic": "orders", "key": "k"}
    for caller, wanted in (
        (user_with(Action.GET), {"topic": "orders"}),
        (user_with(Action.UPDATE), {"topic": "mails"}),
        (user_with(Action.UPDATE), keyed),  # A filter by key tells the key.
        (user_with(Action.UPDATE, Action.SUB), {"key": "k"}),
    ):
        with pytest.raises(Forbidden):
            by_filter(group, caller=caller, is_dry=True, filter=wanted)
    both = user_with(Action.UPDATE, Action.SUB)
    assert by_filter(group, caller=both, is_dry=True, filter=keyed).count == 10
    assert by_filter(group, is_dry=True, filter={"key": "k"}).count == 10


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (TimersRequest, {}),
        (TimersRequest, {"ids": ["b:1"] * 1_001}),
        (TimersRequest, {"ids": ["b:1"], "filter": {"topic": "t"}}),
        (TimersRequest, {"ids": ["b:1"], "maxCount": 1}),
        (TimersRequest, {"filter": {}}),
        (TimersRequest, {"filter": {"tag": "t"}}),
        # The broker would read an empty field as no limit.
        (TimersRequest, {"filter": {"topic": "t", "tag": ""}}),
        (TimersRequest, {"filter": {"topic": "t", "key": ""}}),
        (TimersRequest, {"filter": {"topic": "", "key": "k"}}),
        (TimersRequest, {"filter": {"topic": "t", "dueToMs": 0}}),
        (TimersRequest, {"filter": {"topic": "t"}, "maxCount": 1_000_001}),
        (TimersRequest, {"ids": ["b:1"], "shiftMs": 1}),
        (RescheduleTimersRequest, {"ids": ["b:1"]}),
        (RescheduleTimersRequest, {"ids": ["b:1"], "shiftMs": 1, "delayMs": 1}),
        (RescheduleTimersRequest, {"ids": ["b:1"], "delayMs": -1}),
    ],
)
def test_wrong_requests_are_rejected(model: type[TimersRequest], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model.model_validate(fields)
