"""The routes of the console: pages, actions, results, live parts, login and files."""

from __future__ import annotations

import base64
import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.routing import compile_path

from tidemill.admin.console.action_links import ActionLinks
from tidemill.admin.console.actions import PageAction, perform, show_form
from tidemill.admin.console.forms import InvalidField, read_form
from tidemill.admin.console.page import (
    LOGIN,
    ROOT,
    Page,
    PageCall,
    Values,
    answer,
    html,
    rest_of,
    segment,
    show,
)
from tidemill.admin.console.pages import (
    audit,
    clients,
    cluster,
    dead_letters,
    definitions,
    groups,
    messages,
    operations,
    overview,
    processes,
    runbooks,
    security,
    tail,
    timer_changes,
    timers,
    topics,
)
from tidemill.admin.console.rendering import render_block
from tidemill.admin.console.results import Results
from tidemill.admin.http.live import LiveResponse, LiveViews, key_of
from tidemill.admin.http.rest_calls import CallProblem
from tidemill.common.errors import BadRequest

FILES: Final = f"{ROOT}/files"
HOME: Final = "/overview"  # the page behind /ui/
PAGES: Final[tuple[Page, ...]] = (
    *overview.PAGES,
    *topics.PAGES,
    *tail.PAGES,
    *groups.PAGES,
    *dead_letters.PAGES,
    *timers.PAGES,
    *operations.PAGES,
    *messages.PAGES,
    *clients.PAGES,
    *cluster.PAGES,
    *processes.PAGES,
    *runbooks.PAGES,
    *security.PAGES,
    *audit.PAGES,
)
ACTIONS: Final[tuple[PageAction, ...]] = (
    *topics.ACTIONS,
    *groups.ACTIONS,
    *dead_letters.ACTIONS,
    *timers.ACTIONS,
    *timer_changes.ACTIONS,
    *operations.ACTIONS,
    *messages.ACTIONS,
    *clients.ACTIONS,
    *cluster.ACTIONS,
    *processes.ACTIONS,
    *definitions.ACTIONS,
    *security.ACTIONS,
)

Endpoint = Callable[[Request], Awaitable[Response]]


def add_console(app: FastAPI) -> None:
    """Serve the console below `/ui/`. `/` redirects there."""
    results, views = Results(), app.state.live_views
    app.state.action_links = ActionLinks(ACTIONS)
    # Names of files change with their versions or their content is small, so browsers ask again.
    app.mount(FILES, StaticFiles(packages=[("tidemill.admin.console", "static")]), name="console")

    def serve(path: str, endpoint: Endpoint, *methods: str) -> None:
        app.add_route(path, endpoint, methods=list(methods), include_in_schema=False)

    async def to_home(_request: Request) -> Response:
        return RedirectResponse(f"{ROOT}{HOME}")

    for path in ("/", ROOT, f"{ROOT}/"):
        serve(path, to_home, "GET")
    serve(f"{ROOT}/new-topic", _to_new_topic, "GET")
    serve(f"{ROOT}/new-user", _to_new_user, "GET")
    serve(LOGIN, _show_login, "GET")
    serve(LOGIN, _log_in, "POST")
    serve(f"{ROOT}/logout", _log_out, "POST")
    serve(f"{ROOT}/results/{{key}}", functools.partial(_show_result, results), "GET")
    serve(f"{ROOT}/events", functools.partial(_stream, views), "GET")
    # Actions first: a page of a name would match their last segment.
    for action in ACTIONS:
        serve(ROOT + action.path, functools.partial(_form, action), "GET")
        serve(ROOT + action.path, functools.partial(_perform, action, results), "POST")
    for page in PAGES:
        serve(ROOT + page.path, functools.partial(_page, page), "GET")


async def _to_new_topic(request: Request) -> Response:
    """Lead to the form of the topic with the entered name."""
    name = segment(request.query_params.get("topic", "").strip())
    return RedirectResponse(f"{ROOT}/topics/{name}/set" if name else f"{ROOT}/topics")


async def _to_new_user(request: Request) -> Response:
    """Lead to the form of the user with the entered name."""
    name = segment(request.query_params.get("name", "").strip())
    return RedirectResponse(f"{ROOT}/security/users/{name}/set" if name else f"{ROOT}/security")


async def _page(page: Page, request: Request) -> Response:
    return await show(request, page)


async def _form(action: PageAction, request: Request) -> Response:
    return await show_form(request, action)


async def _perform(action: PageAction, results: Results, request: Request) -> Response:
    return await perform(request, action, results)


async def _show_result(results: Results, request: Request) -> Response:
    api = rest_of(request)

    async def values() -> tuple[str, Values]:
        session = await api.get("/session")
        found = results.find(request.path_params["key"], session.get("user", ""))
        return "result", {"result": found, "is_live": False}

    return await answer(request, api, values)


# ---------------------------------------------------------------- login


async def _show_login(request: Request) -> Response:
    return _login_page(request, request.query_params.get("next", ""))


async def _log_in(request: Request) -> Response:
    """Begin a session, and go to the page that asked for it."""
    form: Mapping[str, str] = {}
    try:
        form = await read_form(request)
        pair = f"{form.get('user', '').strip()}:{form.get('secret', '')}".encode()
        basic = b"Basic " + base64.b64encode(pair)
        done = await rest_of(request).call(
            "POST", "/session", more_headers={b"authorization": basic, b"cookie": b""}
        )
    except (InvalidField, CallProblem) as error:
        after, user = form.get("next", ""), form.get("user", "")
        return _login_page(request, after, error.detail, user, error.status)
    response = RedirectResponse(_own_page(form.get("next", "")), HTTPStatus.SEE_OTHER)
    response.headers["Set-Cookie"] = done.headers[b"set-cookie"].decode()
    return response


async def _log_out(request: Request) -> Response:
    response = RedirectResponse(LOGIN, HTTPStatus.SEE_OTHER)
    try:
        done = await rest_of(request).call("DELETE", "/session")
    except CallProblem:
        return response  # The session has ended already.
    if b"set-cookie" in done.headers:
        response.headers["Set-Cookie"] = done.headers[b"set-cookie"].decode()
    return response


def _login_page(
    request: Request,
    after: str,
    error: str = "",
    user: str = "",
    status: HTTPStatus = HTTPStatus.OK,
) -> Response:
    values = {"after": after, "error": error, "user": user, "session": None, "is_live": False}
    return html(request, "login", values, status)


def _own_page(path: str) -> str:
    """Return a path of the console; the first page for every other address."""
    try:
        parts = urlsplit(path)
    except ValueError:
        return f"{ROOT}/"
    is_own = not parts.scheme and not parts.netloc and parts.path.startswith(f"{ROOT}/")
    return path if is_own and "\\" not in path else f"{ROOT}/"


# ---------------------------------------------------------------- live parts


class _View(NamedTuple):
    """A page with the parts of its URL."""

    page: Page
    path: dict[str, str]
    query: dict[str, str]


_PATTERNS: Final = [(page, compile_path(ROOT + page.path)[0]) for page in PAGES if page.is_live]


def _find_view(view: str) -> _View:
    """Return the page of a path with its query. Raises BadRequest."""
    with contextlib.suppress(ValueError):  # of a malformed address
        found = _match_view(view)
        if found is not None:
            return found
    raise BadRequest(f"{view[:200]!r} is not the address of a live page")


def _match_view(view: str) -> _View | None:
    parts = urlsplit(view)
    for page, pattern in _PATTERNS:
        if match := pattern.match(parts.path):
            path = {name: unquote(value) for name, value in match.groupdict().items()}
            return _View(page, path, dict(parse_qsl(parts.query, keep_blank_values=True)))
    return None


async def _stream(views: LiveViews, request: Request) -> Response:
    """Stream the live part of a page."""
    api = rest_of(request)
    view = request.query_params.get("view", "")
    page, path, query = _find_view(view)

    async def render() -> str:
        values = await page.load(PageCall(api, path, query))
        links = request.app.state.action_links.of(api.access)
        return render_block(page.template, "live", {**values, **links, "root": ROOT})

    try:
        session = await api.get("/session")
    except CallProblem as problem:
        raise HTTPException(problem.status, problem.detail) from None
    key = key_of(request, view, session.get("user", ""))
    with contextlib.ExitStack() as opened:
        opened.enter_context(views.counted(key.caller))
        events = opened.enter_context(views.opened(key, render, period_s=page.period_s))
        encoded = (event.encoded async for event in events)
        return LiveResponse(encoded, opened.pop_all())
