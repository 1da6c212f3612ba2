"""The calls of an apply, and its end with the credential of the caller."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

import pytest

from tidemill.admin.cluster.own_operations import OwnOperation
from tidemill.admin.definitions.applying import AT_ONCE, apply_changes, checked_changes
from tidemill.admin.definitions.plan import TYPES, PlannedChange
from tidemill.admin.http.rest_calls import RestCalls
from tidemill.admin.json.definitions import DefinitionAction, DefinitionKind
from tidemill.admin.json.operations import OperationKindView, OperationStateView, OperationView
from tidemill.common.errors import Conflict

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

COUNT = 40
ENDS = [HTTPStatus.UNAUTHORIZED, HTTPStatus.TOO_MANY_REQUESTS]


class EndingApi:
    """A REST API that refuses its caller after some calls."""

    def __init__(self, allowed: int, status: HTTPStatus) -> None:
        self.calls = 0
        self._allowed, self._status = allowed, status
        self._turn = asyncio.Lock()  # The answers come one after the other.

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        async with self._turn:
            self.calls += 1
            await asyncio.sleep(0)
        is_allowed = self.calls <= self._allowed
        document = (
            {"messageType": "NORMAL", "queues": 1}
            if is_allowed
            else {"detail": "the secret has ended"}
        )
        status = HTTPStatus.OK if is_allowed else self._status
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(document).encode()})


def changes() -> Sequence[PlannedChange]:
    [type_] = [each for each in TYPES if each.kind is DefinitionKind.TOPIC]
    return [
        PlannedChange(type_, f"t{number}", DefinitionAction.CREATE, {"queues": 1}, None)
        for number in range(COUNT)
    ]


def operation() -> OwnOperation:
    view = OperationView(
        id="admin:1",
        kind=OperationKindView.APPLY_DEFINITIONS,
        state=OperationStateView.RUNNING,
        by="ops",
        created_at_ms=1,
        total=COUNT,
        done=0,
        failed=0,
    )
    return OwnOperation(view, user="ops", key=None, digest="")


@pytest.mark.parametrize("status", ENDS)
def test_an_apply_ends_with_the_credential_of_its_caller(status: HTTPStatus) -> None:
    api, begun = EndingApi(3, status), operation()
    asyncio.run(apply_changes(RestCalls(api, {"headers": []}), changes(), begun))
    assert (begun.view.done, begun.view.failed, api.calls) == (3, 1, 4)
    [error] = begun.view.errors or []
    assert "the secret has ended" in error.outcome


def test_an_apply_goes_on_after_a_refused_change() -> None:
    api, begun = EndingApi(3, HTTPStatus.CONFLICT), operation()
    asyncio.run(apply_changes(RestCalls(api, {"headers": []}), changes(), begun))
    assert (begun.view.done, begun.view.failed) == (3, COUNT - 3)


@pytest.mark.parametrize("status", ENDS)
def test_dry_runs_end_with_the_credential_of_their_caller(status: HTTPStatus) -> None:
    """Only the calls in flight are failed logins of the address."""
    api = EndingApi(8, status)
    with pytest.raises(Conflict, match="the secret has ended"):
        asyncio.run(checked_changes(RestCalls(api, {"headers": []}), changes()))
    assert api.calls <= 8 + AT_ONCE
