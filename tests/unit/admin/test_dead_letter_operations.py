"""Replays and discards by filter at several broker groups: their count, begin and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import Request
from pydantic import ValidationError

from tests.support.worlds.broker_groups import AUTHOR, cluster_of
from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.http.request_access import OPEN, RequestAccess, set_access
from tidemill.admin.json.dead_letters import DeadLetterChangeView, DeadLettersRequest
from tidemill.admin.messages.dead_letter_operations import settle_matching
from tidemill.admin.messages.operation_starts import COUNT_CALLS_MAX, BulkCaller
from tidemill.admin.routes.operation_keys import operation_key_of
from tidemill.common.errors import BrokerTimeout, BrokerUnreachable, Overloaded, ServiceError
from tidemill.security.identities import User
from tidemill.security.rights import Rights
from tidemill.security.table import KnownUser, Mode
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


class CountingGroup(CallsByRequest):
    """A broker group that needs several calls for a count."""

    def __init__(self, count: int, *, calls: int = 1) -> None:
        self.count, self.calls_left = count, calls
        self.as_of_ms: list[int] = []
        self.begun: list[pb.BeginOperationRequest] = []
        self.begin_error: ServiceError | None = None

    async def list_operations(self, _request: pb.ListOperationsRequest) -> pb.OperationList:
        return pb.OperationList()

    async def begin_operation(self, request: pb.BeginOperationRequest) -> pb.BeginOperationReply:
        self.as_of_ms.append(request.as_of_ms)
        if not request.dry_run and self.begin_error is not None:
            raise self.begin_error
        self.calls_left -= 1
        reply = pb.BeginOperationReply(count=self.count, as_of_ms=request.as_of_ms or 77)
        if self.calls_left > 0:
            reply.is_partial = True
        elif not request.dry_run:
            self.begun.append(request)
            reply.operation.id, reply.operation.total = 5, self.count
            reply.operation.rate_per_s = request.rate_per_s
            reply.operation.kind = request.kind
            reply.operation.state = pb.OPERATION_STATE_RUNNING
        return reply


def settle(
    *groups: CountingGroup, is_dry: bool = False, key: str | None = None
) -> DeadLetterChangeView:
    fields: dict[str, Any] = {} if is_dry else {"asOfMs": 5, "maxCount": 10}
    wanted = DeadLettersRequest.model_validate({"filter": {}, **fields})
    kind = pb.OPERATION_KIND_REPLAY
    who = BulkCaller(OPEN, "me", AUTHOR, key)
    return asyncio.run(settle_matching(cluster_of(*groups), "g", wanted, kind, who, is_dry=is_dry))


@pytest.mark.parametrize("is_dry", [True, False])
def test_a_count_takes_as_many_calls_as_each_broker_group_needs(is_dry: bool) -> None:
    fast, slow = CountingGroup(1), CountingGroup(2, calls=4)
    view = settle(fast, slow, is_dry=is_dry)
    assert (view.count, view.operation is None) == (3, is_dry)
    begins = 0 if is_dry else 1
    assert (len(fast.as_of_ms), len(slow.as_of_ms)) == (1 + begins, 4 + begins)
    # Later calls continue the count of the first one.
    assert slow.as_of_ms[:4] == ([0, 77, 77, 77] if is_dry else [5, 5, 5, 5])


def test_a_count_that_does_not_end_names_the_time_to_continue_it() -> None:
    group = CountingGroup(1, calls=COUNT_CALLS_MAX + 1)
    with pytest.raises(Overloaded, match="asOfMs 77"):
        settle(group, is_dry=True)
    assert len(group.as_of_ms) == COUNT_CALLS_MAX


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_part_that_runs_is_shown_if_another_broker_group_rejects_its_part(
    order: tuple[int, int],
) -> None:
    good, bad = CountingGroup(1, calls=2), CountingGroup(2)
    bad.begin_error = Overloaded("16 operations run")
    view = settle(*[(good, bad)[n] for n in order])
    assert view.operation is not None
    assert [part.broker for part in view.operation.brokers] == [f"broker-{order.index(0)}"]
    assert (view.warnings, view.unreachable) == (
        [f"broker-{order.index(1)}: 16 operations run"],
        None,
    )


@pytest.mark.parametrize("error", [BrokerUnreachable("down"), BrokerTimeout("no reply")])
def test_a_part_that_runs_is_shown_if_another_broker_group_does_not_answer(
    error: ServiceError,
) -> None:
    good, bad = CountingGroup(1), CountingGroup(2)
    bad.begin_error = error
    view = settle(good, bad)
    assert view.operation is not None
    assert (view.unreachable, view.operation.unreachable) == (["broker-1"], ["broker-1"])
    assert view.operation.state == "RUNNING"


def test_an_operation_that_no_broker_group_begins_fails() -> None:
    bad = CountingGroup(2)
    bad.begin_error = Overloaded("16 operations run")
    with pytest.raises(Overloaded, match="16 operations"):
        settle(bad)


# ------------------------------------------------------------ keys


@pytest.mark.parametrize("chosen", [{"tag": ""}, {"topic": ""}, {"toMs": 0}, {"toMs": -1}])
def test_an_empty_field_of_a_filter_is_rejected(chosen: dict[str, Any]) -> None:
    """The broker would read it as no limit."""
    with pytest.raises(ValidationError):
        DeadLettersRequest.model_validate({"filter": chosen})


def key_of(access: RequestAccess, header: str | None) -> str | None:
    scope: dict[str, Any] = {"type": "http", "headers": []}
    set_access(scope, access)
    return operation_key_of(Request(scope), header)


def test_a_key_belongs_to_its_user() -> None:
    first, second, again = (
        RequestAccess(Mode.ON, is_super=False, known=KnownUser(User(name=name, id=n), Rights([])))
        for n, name in enumerate(("a", "b", "a"), 1)
    )
    keys = [key_of(access, "replay-17") for access in (first, second, again, OPEN)]
    assert len(set(keys)) == 4, "a user that was created again is another user"
    assert key_of(first, "replay-17") == keys[0]
    assert key_of(first, "replay-18") != keys[0]
    assert key_of(first, None) is None
