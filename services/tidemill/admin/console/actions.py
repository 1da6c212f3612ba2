"""Actions: a form with a dry run, the change, and a page with its result (ADR 0090)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2s
from http import HTTPStatus
from typing import Final
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from tidemill.admin.console.forms import (
    Field,
    FieldKind,
    InvalidField,
    joined,
    read_form,
    texts_of,
    values_of,
)
from tidemill.admin.console.page import ROOT, Values, answer, html, rest_of, segment
from tidemill.admin.console.results import Result, Results
from tidemill.admin.http.rest_calls import CallProblem, Document, RestCalls

Rows = list[tuple[str, str]]
SENT: Final = "sent"  # name of a field: the form was sent, so this is no first visit
PLANNED: Final = "planned"  # name of the field with a digest of the fields of the shown effect
SHOW: Final = "show"  # name of the button for the effect alone of a posted form
# Fields of an operation by filter: the bounds of its dry run, and its Idempotency-Key.
COUNTED_AT: Final = "asOfMs"
COUNTED: Final = "maxCount"
KEY: Final = "operationKey"
COMPARED: Final = "etag"  # name of the field with the ETag of the shown object
IF_MATCH: Final = b"if-match"
ETAG: Final = b"etag"
KEY_CHARS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class PageAction:
    """A change of the REST API as a form. Texts and paths may contain `{parameter}` of the path."""

    path: str  # of the form, below /ui
    method: str
    rest: str  # the template of the REST path, as in the OpenAPI document
    title: str
    about: str  # the effect, in a sentence or two
    back: str  # the previous page, below /ui
    rows: Callable[[Document], Rows]  # the effects of the dry run, and of the change
    button: Callable[[Document, Mapping[str, str]], str]  # with the effect, such as its numbers
    fields: tuple[Field, ...] = ()
    query: tuple[str, ...] = ()  # parameters of the path that REST has in the query
    body: Mapping[str, str] = field(default_factory=dict)  # those that it has in the body, by field
    # The REST path of the object as it is, and the texts of fields that it gives.
    current: str = ""
    texts_of: Callable[[Document], dict[str, str]] = lambda _found: {}
    has_dry_run: bool = True
    is_loss: bool = False  # whether it loses something
    shows_secret: bool = False  # whether the answer has a secret, which is then shown once
    begins_operation: bool = False  # on what its dry run has counted

    @property
    def is_long(self) -> bool:
        """Whether a field is too long for a URL, so that the form is posted also for its effect."""
        return any(each.kind is FieldKind.DOCUMENT for each in self.fields)

    def rest_path(self, path: Mapping[str, str]) -> str:
        """Return the REST path for the parameters of a URL."""
        return self.rest.format(**path)

    def rest_query(self, path: Mapping[str, str], query: Document) -> Document:
        """Return the query of the REST call for the parameters of a URL and for fields."""
        return {**{name: path[name] for name in self.query}, **query}

    def back_url(self, path: Mapping[str, str]) -> str:
        """Return the URL of the previous page."""
        return ROOT + self.back.format(**{name: segment(value) for name, value in path.items()})


async def show_form(request: Request, action: PageAction) -> Response:
    """Show the form, with the effects of the dry run if its fields have valid values."""
    api, given = rest_of(request), joined(action.fields, request.query_params)
    texts = texts_of(action.fields, given, is_sent=SENT in given)

    async def values() -> tuple[str, Values]:
        tag = given.get(COMPARED, "")
        if SENT not in given:
            current, tag = await _current_of(request, api, action)
            texts.update(current)
        return "action", await _form_values(request, api, action, texts, tag)

    return await answer(request, api, values)


async def perform(request: Request, action: PageAction, results: Results) -> Response:
    """Perform the change of a sent form, and redirect to its result.

    On an error, and if the fields are not those of the shown effect, the form with the user's input
    is shown again.
    """
    api = rest_of(request)
    if "origin" not in request.headers and "sec-fetch-site" not in request.headers:
        problem = CallProblem(
            HTTPStatus.FORBIDDEN,
            "Forbidden",
            "the browser did not say which page sent this form (Origin or Sec-Fetch-Site); use a"
            " newer browser, or the REST API",
        )
        values = {"problem": problem, "is_live": False, "session": None}
        return html(request, "problem", values, problem.status)
    texts: Mapping[str, str] = {}
    tag = ""
    try:
        form = await read_form(request)
        tag = form.get(COMPARED, "")
        texts = texts_of(action.fields, form, is_sent=True)
        if action.is_long:
            await api.get("/session")  # A long text is parsed only for a known caller.
        if SHOW in form:
            return await _show_effect(request, api, action, texts)
        query, body = values_of(action.fields, texts)
        if action.has_dry_run and form.get(PLANNED) != plan_of(texts):
            raise InvalidField("these fields are not those of the shown effect; look at the effect")
        headers = _condition(tag)
        if action.begins_operation:
            body = {**body, **_counted(form)}
            key = form.get(KEY, "")[:KEY_CHARS_MAX]
            headers[b"idempotency-key"] = key.encode("latin-1", "replace")
        done = await api.call(
            action.method,
            action.rest_path(request.path_params),
            action.rest_query(request.path_params, query),
            _body_of(request, action, body),
            more_headers=headers,
        )
        if "operation" in done.document:
            path = f"/operations/{segment(done.document['operation']['id'])}"
            return RedirectResponse(ROOT + path, HTTPStatus.SEE_OTHER)
        if action.shows_secret:
            # Not kept: the secret is in this answer alone.
            shown = _result(request, action, done.document)
            return html(request, "result", {"result": shown, "is_live": False, "session": None})
        session = await api.get("/session")
    except (InvalidField, CallProblem) as error:
        return await _show_again(request, api, action, texts, tag, error)
    kept = results.keep(session.get("user", ""), _result(request, action, done.document))
    return RedirectResponse(f"{ROOT}/results/{kept}", HTTPStatus.SEE_OTHER)


async def _show_effect(
    request: Request, api: RestCalls, action: PageAction, texts: Mapping[str, str]
) -> Response:
    async def values() -> tuple[str, Values]:
        return "action", await _form_values(request, api, action, texts)

    return await answer(request, api, values)


def _counted(form: Mapping[str, str]) -> Document:
    """Return the bounds of an operation, as the shown dry run has counted. Raises InvalidField."""
    counted = {name: form.get(name, "") for name in (COUNTED_AT, COUNTED)}
    if not all(text.isascii() and text.isdecimal() for text in counted.values()):
        raise InvalidField("the form lacks the count of its effect; look at the effect again")
    return {name: int(text) for name, text in counted.items()}


def _result(request: Request, action: PageAction, done: Document) -> Result:
    return Result(
        title=_named(action.title, request.path_params),
        rows=action.rows(done),
        unreachable=done.get("unreachable", []),
        back=action.back_url(request.path_params),
    )


def plan_of(texts: Mapping[str, str]) -> str:
    """Return a digest of the fields of a shown effect, for the form that performs it."""
    return blake2s(urlencode(sorted(texts.items())).encode(), digest_size=16).hexdigest()


def _condition(tag: str) -> dict[bytes, bytes]:
    """Return the header that refuses a change of another version; none without an ETag."""
    return {IF_MATCH: tag.encode("latin-1", "replace")} if tag else {}


async def _current_of(
    request: Request, api: RestCalls, action: PageAction
) -> tuple[dict[str, str], str]:
    """Return the texts that the object has now, and its ETag; none for a new object."""
    if not action.current:
        return {}, ""
    try:
        found = await api.call("GET", action.current.format(**request.path_params))
    except CallProblem as problem:
        if problem.status in (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN):
            return {}, ""
        raise
    return action.texts_of(found.document), found.headers.get(ETAG, b"").decode()


async def _show_again(
    request: Request,
    api: RestCalls,
    action: PageAction,
    texts: Mapping[str, str],
    tag: str,
    error: InvalidField | CallProblem,
) -> Response:
    async def values() -> tuple[str, Values]:
        if error.status is HTTPStatus.UNAUTHORIZED:
            raise error
        filled = dict(texts) or texts_of(action.fields, {}, is_sent=False)
        if error.status is not HTTPStatus.PRECONDITION_FAILED or not action.current:
            found = await _form_values(request, api, action, filled, tag)
            return "action", {**found, "error": error.detail}
        current, present_tag = await _current_of(request, api, action)
        found = await _form_values(request, api, action, filled, present_tag)
        found["error"] = "Another change came after you opened this form. Nothing is saved."
        found["differences"] = [
            (each.label, current[each.name], filled[each.name])
            for each in action.fields
            if (filled[each.name] or each.sends_empty)  # Another empty field changes nothing.
            and current.get(each.name, filled[each.name]) != filled[each.name]
        ]
        return "action", found

    return await answer(request, api, values, error.status)


async def _form_values(
    request: Request, api: RestCalls, action: PageAction, texts: Mapping[str, str], tag: str = ""
) -> Values:
    effects: Rows = []
    error = ""
    button = ""
    unreachable: list[str] = []
    hidden = {COMPARED: tag} if tag else {}
    try:
        query, body = values_of(action.fields, texts)
        planned: Document = {}
        if action.has_dry_run:
            planned = (
                await api.call(
                    action.method,
                    action.rest_path(request.path_params),
                    action.rest_query(request.path_params, {**query, "dryRun": True}),
                    _body_of(request, action, body),
                )
            ).document
            effects = action.rows(planned)
            unreachable = planned.get("unreachable", [])
        button = action.button(planned, request.path_params)
        if action.begins_operation and button:
            hidden[COUNTED_AT] = str(planned["asOfMs"])
            hidden[COUNTED] = str(planned["count"])
            hidden[KEY] = secrets.token_hex(16)
        if "etag" in planned:
            hidden[COMPARED] = planned["etag"]
    except InvalidField as invalid:
        # The fields of a first visit are empty.
        error = invalid.detail if SENT in request.query_params or request.method == "POST" else ""
    except CallProblem as problem:
        if problem.status is HTTPStatus.UNAUTHORIZED:
            raise
        # So REST may reject them.
        is_first = SENT not in request.query_params and request.method == "GET"
        is_empty = is_first and problem.status is HTTPStatus.BAD_REQUEST
        error = "" if is_empty else problem.detail
    return {
        "action": action,
        "title": _named(action.title, request.path_params),
        "about": _named(action.about, request.path_params),
        "back": action.back_url(request.path_params),
        "texts": texts,
        "effects": effects,
        "button": button,
        "error": error,
        "unreachable": unreachable,
        "differences": [],
        "sent": SENT,
        "show": SHOW,
        "planned": PLANNED,
        "plan": plan_of(texts),
        "hidden": hidden,
        "is_live": False,
    }


def _body_of(request: Request, action: PageAction, body: Document) -> Document | None:
    has_body = action.body or any(not each.is_query for each in action.fields)
    of_path = {name: request.path_params[parameter] for name, parameter in action.body.items()}
    # A filter without fields matches everything, and is sent, too.
    fixed: Document = {"filter": {}} if action.begins_operation else {}
    return {**fixed, **body, **of_path} if has_body else None


def _named(text: str, path: Mapping[str, str]) -> str:
    return text.format(**path)
