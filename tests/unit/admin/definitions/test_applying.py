"""The calls of an apply, and its end with the credential of the caller."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import pytest
from fastapi.responses import JSONResponse

from tidemill.admin.cluster.own_operations import OwnOperation
from tidemill.admin.definitions.applying import AT_ONCE, apply_changes, checked_changes
from tidemill.admin.definitions.plan import TYPES, PlannedChange
from tidemill.admin.http.problems import problem
from tidemill.admin.http.refused_login import RefusedLogin
from tidemill.admin.http.rest_calls import RestCalls
from tidemill.admin.json.definitions import DefinitionAction, DefinitionKind
from tidemill.admin.json.operations import OperationKindView, OperationStateView, OperationView
from tidemill.common.errors import Conflict

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

COUNT = 40
SCOPE: Final[dict[str, Any]] = {"headers": []}
LOGINS = RefusedLogin("too many failed logins from 10.0.0.1; wait 7 s", wait_s=7)
ENDS = [RefusedLogin("the secret has ended").answer(""), LOGINS.answer("")]
OVERLOADED = problem(HTTPStatus.TOO_MANY_REQUESTS, "Overloaded", "512 calls wait; try again", 42900)
CONFLICT = problem(HTTPStatus.CONFLICT, "Conflict", "its type is another one", 40900)


class EndingApi:
    """A REST API that refuses some calls after those that it allows."""

    def __init__(self, allowed: int, refusal: JSONResponse, refused: int = COUNT) -> None:
        self.calls = 0
        self._refusal = refusal
        self._refused = range(allowed + 1, allowed + 1 + refused)
        self._turn = asyncio.Lock()  # The answers come one after the other.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._turn:
            self.calls += 1
            await asyncio.sleep(0)
            is_refused = self.calls in self._refused
        made = JSONResponse({"messageType": "NORMAL", "queues": 1})
        await (self._refusal if is_refused else made)(scope, receive, send)


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


@pytest.mark.parametrize("refusal", ENDS)
def test_an_apply_ends_with_the_credential_of_its_caller(refusal: JSONResponse) -> None:
    api, begun = EndingApi(3, refusal), operation()
    asyncio.run(apply_changes(RestCalls(api, SCOPE), changes(), begun))
    assert (begun.view.done, begun.view.failed, api.calls) == (3, 1, 4)
    [error] = begun.view.errors or []
    assert "its caller is refused" in error.outcome
    assert json.loads(bytes(refusal.body))["detail"] in error.outcome


@pytest.mark.parametrize("refusal", [CONFLICT, OVERLOADED])
def test_an_apply_goes_on_after_a_refused_change(refusal: JSONResponse) -> None:
    api, begun = EndingApi(3, refusal, refused=2), operation()
    asyncio.run(apply_changes(RestCalls(api, SCOPE), changes(), begun))
    assert (begun.view.done, begun.view.failed) == (COUNT - 2, 2)
    outcome = json.loads(bytes(refusal.body))["detail"]
    assert [one.outcome for one in begun.view.errors or []] == [outcome] * 2


@pytest.mark.parametrize("refusal", ENDS)
def test_dry_runs_end_with_the_credential_of_their_caller(refusal: JSONResponse) -> None:
    """Only the calls in flight are failed logins of the address."""
    api = EndingApi(8, refusal)
    with pytest.raises(Conflict, match=r"the secret has ended|too many failed logins"):
        asyncio.run(checked_changes(RestCalls(api, SCOPE), changes()))
    assert api.calls <= 8 + AT_ONCE
