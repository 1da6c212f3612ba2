"""Operations with parts at broker groups that are unreachable or reject a call."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from tests.support.worlds.broker_groups import AUTHOR, cluster_of
from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.cluster.own_operations import OwnOperations
from tidemill.admin.http.paging import FIRST_PAGE
from tidemill.admin.http.request_access import OPEN
from tidemill.admin.json.operations import OperationCancelView, OperationView
from tidemill.admin.routes.operations import cancel_operation, get_operation, list_operations
from tidemill.common.clock import SystemClock
from tidemill.common.errors import BrokerUnreachable, DiskFull, ServiceError
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

RUNNING, DONE = pb.OPERATION_STATE_RUNNING, pb.OPERATION_STATE_DONE
CANCELLED = pb.OPERATION_STATE_CANCELLED
T = TypeVar("T")


class BrokerGroup(CallsByRequest):
    """A broker group with the part of one operation."""

    def __init__(self, state: pb.OperationState.ValueType) -> None:
        self.operation = pb.Operation(
            id=5, kind=pb.OPERATION_KIND_REPLAY, group="g", state=state, key="k"
        )
        self.operation.total, self.operation.done, self.operation.rate_per_s = 100, 10, 1
        self.operation.ended_at_ms = 0 if state == RUNNING else 9
        self.list_error: ServiceError | None = None
        self.cancel_error: ServiceError | None = None

    async def list_operations(self, _request: pb.ListOperationsRequest) -> pb.OperationList:
        if self.list_error is not None:
            raise self.list_error
        return pb.OperationList(operations=[self.operation])

    async def cancel_operation(self, request: pb.CancelOperationRequest) -> pb.Operation:
        if self.cancel_error is not None:
            raise self.cancel_error
        if not request.dry_run and self.operation.state == RUNNING:
            self.operation.state = CANCELLED
        return self.operation


def run(call: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(call)


def shown(*groups: BrokerGroup) -> OperationView:
    return run(get_operation("broker-0:5", cluster_of(*groups), OPEN, OwnOperations(SystemClock())))


def cancelled(*groups: BrokerGroup, dry_run: bool = False) -> OperationCancelView:
    own = OwnOperations(SystemClock())
    call = cancel_operation(
        "broker-0:5", cluster_of(*groups), OPEN, "me", AUTHOR, own, dry_run=dry_run
    )
    return run(call)


def unseen(state: pb.OperationState.ValueType = RUNNING) -> BrokerGroup:
    group = BrokerGroup(state)
    group.list_error = BrokerUnreachable("it is down")
    return group


@pytest.mark.parametrize("state", [DONE, CANCELLED, pb.OPERATION_STATE_FAILED])
def test_an_operation_has_not_ended_while_a_part_may_be_unseen(
    state: pb.OperationState.ValueType,
) -> None:
    view = shown(BrokerGroup(state), unseen())
    assert (view.state, view.unreachable) == ("RUNNING", ["broker-1"])
    assert (view.ended_at_ms, view.skipped, view.eta_ms) == (None, None, None)
    cluster, own = cluster_of(BrokerGroup(state), unseen()), OwnOperations(SystemClock())
    page = run(list_operations(cluster, OPEN, own, FIRST_PAGE, page_size=10))
    assert [one.state for one in page.operations] == ["RUNNING"]
    seen = shown(BrokerGroup(state), BrokerGroup(DONE))
    assert (seen.state != "RUNNING", seen.unreachable) == (True, None)


def test_a_cancel_names_the_broker_groups_that_it_has_not_reached() -> None:
    view = cancelled(BrokerGroup(RUNNING), unseen())
    assert (view.operation.state, view.unreachable) == ("RUNNING", ["broker-1"])
    assert view.operation.unreachable == ["broker-1"]
    assert [part.state for part in view.operation.brokers] == ["CANCELLED"]


def test_a_cancel_that_one_broker_group_does_not_get_shows_the_other_part() -> None:
    lost = BrokerGroup(RUNNING)
    lost.cancel_error = BrokerUnreachable("it is down")
    view = cancelled(BrokerGroup(RUNNING), lost)
    assert (view.operation.state, view.unreachable) == ("RUNNING", ["broker-1"])
    assert [part.state for part in view.operation.brokers] == ["CANCELLED", "RUNNING"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_cancel_that_one_broker_group_rejects_ends_the_other_part(order: tuple[int, int]) -> None:
    full, good = BrokerGroup(RUNNING), BrokerGroup(RUNNING)
    full.cancel_error = DiskFull("no room")
    view = cancelled(*[(full, good)[n] for n in order])
    assert good.operation.state == CANCELLED
    assert view.warnings == [f"broker-{order[0]}: no room"]
    assert (view.operation.state, view.unreachable) == ("RUNNING", None)


def test_a_cancel_that_no_broker_group_gets_fails() -> None:
    lost = BrokerGroup(RUNNING)
    lost.cancel_error = BrokerUnreachable("it is down")
    with pytest.raises(BrokerUnreachable):
        cancelled(lost)


def test_an_operation_of_an_ended_admin_process_is_shown_and_cannot_be_cancelled() -> None:
    own = OwnOperations(SystemClock())
    id_ = f"admin:{SystemClock().wall_ms() - 60_000}101"
    view = run(get_operation(id_, cluster_of(), OPEN, own))
    assert (view.state, view.error) == (
        "FAILED",
        "its admin process has ended, or another admin process runs it",
    )
    call = cancel_operation(id_, cluster_of(), OPEN, "me", AUTHOR, own)
    assert run(call).operation == view
