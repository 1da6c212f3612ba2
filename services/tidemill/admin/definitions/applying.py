"""Apply planned changes by the operations of the REST API, as their caller."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

from tidemill.admin.cluster.own_operations import OwnOperation
from tidemill.admin.definitions.plan import PlannedChange
from tidemill.admin.http.rest_calls import CallProblem, Document, RestCalls
from tidemill.admin.json.definitions import DefinitionAction, DefinitionChangeView, DefinitionKind
from tidemill.common.errors import Conflict, Forbidden, RequestError

AT_ONCE: Final = 8  # dry runs
SHOWN_MAX: Final = 5  # refused changes in an error
_DRY: Final = {"dryRun": True}
# Fields of a deletion that count no loss.
_NO_LOSS: Final = frozenset({"dryRun", "by", "topic", "group", "user", "role", "quota"})


async def checked_changes(
    calls: RestCalls, changes: Sequence[PlannedChange]
) -> list[DefinitionChangeView]:
    """Return all changes after their dry runs.

    Raises Forbidden or Conflict with the first SHOWN_MAX refused ones.
    """
    made = _Made(changes)
    refused: list[tuple[PlannedChange, CallProblem]] = []
    views: dict[int, DefinitionChangeView] = {}
    left = iter(enumerate(changes))

    async def check() -> None:
        for place, change in left:
            # Each refusal leaves a trace in the audit log, and five explain the file.
            if len(refused) >= SHOWN_MAX or any(_ends(problem) for _, problem in refused):
                return
            try:
                views[place] = await made.check(calls, change)
            except CallProblem as problem:
                refused.append((change, problem))

    await asyncio.gather(*(check() for _ in range(AT_ONCE)))
    if refused:
        raise _refusal(refused)
    return [views[place] for place in range(len(changes))]


async def apply_changes(
    calls: RestCalls, changes: Sequence[PlannedChange], operation: OwnOperation
) -> None:
    """Make the changes one after the other, until the operation or the credential ends."""
    for change in changes:
        if operation.is_cancelled:
            return
        try:
            await _make(calls, change, is_dry=False)
        except CallProblem as problem:
            if _ends(problem):
                operation.fail(
                    change.title,
                    f"the apply has ended, because its caller is refused: {problem.detail}; log in"
                    " again and apply the rest",
                )
                return
            operation.fail(change.title, problem.detail)
        else:
            operation.count()


def _ends(problem: CallProblem) -> bool:
    """Whether further calls would be refused, as failed logins of the caller's address."""
    if problem.status is HTTPStatus.TOO_MANY_REQUESTS:
        # The title of other ones is the name of an error, such as Overloaded.
        return problem.title == HTTPStatus.TOO_MANY_REQUESTS.phrase
    return problem.status is HTTPStatus.UNAUTHORIZED


class _Made:
    """The new users and roles of a file. The dry run of one does not know the others."""

    def __init__(self, changes: Sequence[PlannedChange]) -> None:
        new = [change for change in changes if change.action is DefinitionAction.CREATE]
        self._roles = {one.name for one in new if one.type.kind is DefinitionKind.ROLE}
        self._users = {f"user/{one.name}" for one in new if one.type.kind is DefinitionKind.USER}
        self._loses_users = any(
            one.type.kind is DefinitionKind.USER and one.action is not DefinitionAction.CREATE
            for one in changes
        )

    async def check(self, calls: RestCalls, change: PlannedChange) -> DefinitionChangeView:
        """Make the dry run of a change. Raises CallProblem."""
        kind, body = change.type.kind, change.body
        if body is None:
            if kind is DefinitionKind.ROLE and self._loses_users:
                return _view(change, None)  # A user may have the role until its own change.
            return _view(change, await _make(calls, change, is_dry=True))
        if kind is DefinitionKind.QUOTA and change.name in self._users:
            view = _view(change, None)
            view.after = body
            return view
        if kind is DefinitionKind.USER and (given := body.get("roles")):
            known = [role for role in given if role not in self._roles]
            planned = change._replace(body={**body, "roles": known})
            view = _view(change, await _make(calls, planned, is_dry=True))
            view.after = {**(view.after or {}), "roles": given}
            return view
        return _view(change, await _make(calls, change, is_dry=True))


async def _make(calls: RestCalls, change: PlannedChange, *, is_dry: bool) -> Document:
    query = _DRY if is_dry else None
    method = "DELETE" if change.body is None else "PUT"
    try:
        answer = await calls.call(
            method, change.path, query, change.body, more_headers=change.headers
        )
    except CallProblem as problem:
        if problem.status is HTTPStatus.PRECONDITION_FAILED:
            detail = "another operator has changed it since the file was compared; apply it again"
            raise CallProblem(problem.status, problem.title, detail) from None
        raise
    return answer.document


def _view(change: PlannedChange, document: Document | None) -> DefinitionChangeView:
    """Return a change with the answer to its dry run; None without one."""
    view = DefinitionChangeView(
        kind=change.type.kind, name=change.name, action=change.action, before=change.before
    )
    if document is None:
        pass
    elif change.body is None:
        lost = {name: value for name, value in document.items() if name not in _NO_LOSS}
        view.loss = {name: value for name, value in lost.items() if value} or None
    else:
        view.after = change.type.settings_of(document)
        view.note = document.get("warning")
    is_new_user = change.type.kind is DefinitionKind.USER and change.before is None
    if is_new_user:
        view.note = f"it has no known secret; make one: tidemill user rotate {change.name}"
    return view


def _refusal(refused: list[tuple[PlannedChange, CallProblem]]) -> RequestError:
    """Return the error of the whole file."""
    shown = [f"{change.title}: {problem.detail}" for change, problem in refused[:SHOWN_MAX]]
    text = f"changes are refused, so nothing has changed: {'; '.join(shown)}"
    statuses = {problem.status for _, problem in refused}
    return Forbidden(text) if HTTPStatus.FORBIDDEN in statuses else Conflict(text)
