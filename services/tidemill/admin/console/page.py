"""A page: a path, a template, and the function that reads its documents."""

from __future__ import annotations

import gzip
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote, urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from tidemill.admin.console.forms import Field, FieldKind, InvalidField
from tidemill.admin.console.rendering import render
from tidemill.admin.http.browser_defences import POLICY
from tidemill.admin.http.rest_calls import CallProblem, Document, RestCalls

ROOT: Final = "/ui"
LOGIN: Final = f"{ROOT}/login"
GZIP_BYTES_MIN: Final = 2_000
GZIP_LEVEL: Final = 5  # a millisecond for 50 KB
# In the order of the navigation: the path below /ui, the text, and the key after `g`.
NAVIGATION: Final = (
    ("/overview", "Overview", "o"),
    ("/topics", "Topics", "t"),
    ("/groups", "Groups", "r"),
    ("/dead-letters", "Dead letters", "d"),
    ("/timers", "Timers", "i"),
    ("/messages", "Messages", "m"),
    ("/clients", "Clients", "c"),
    ("/cluster", "Cluster", "l"),
    ("/operations", "Operations", "n"),
    ("/settings", "Settings", "e"),
    ("/security", "Security", "s"),
    ("/audit", "Audit", "a"),
)

NAME_ORDER: Final = "name"  # of a list: not a `sort` of the REST API, but its default

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PageCall:
    """One call of a page: the REST API for its caller, and the parts of the URL."""

    api: RestCalls
    path: Mapping[str, str]  # values of the path's parameters
    query: Mapping[str, str]

    def get(self, name: str) -> str | None:
        """Return a query parameter; None if it is missing or empty."""
        return self.query.get(name, "").strip() or None

    def instant_ms(self, name: str) -> int | None:
        """Return a query parameter as a time; None if it is missing or malformed."""
        text = self.get(name)
        try:
            return None if text is None else int(Field(name, name, FieldKind.TIME).value_of(text))
        except InvalidField:
            return None


@dataclass(frozen=True, slots=True)
class Page:
    """A page. `load` returns the values of its template."""

    path: str  # below /ui
    template: str
    load: Callable[[PageCall], Awaitable[Values]]
    is_live: bool = True  # whether the block `live` is sent again while the page is open
    period_s: float = 1.0  # between two renderings of it


async def show(request: Request, page: Page) -> Response:
    """Answer a request of a page."""
    api = rest_of(request)

    async def values() -> tuple[str, Values]:
        call = PageCall(api, request.path_params, request.query_params)
        return page.template, {"is_live": page.is_live, **await page.load(call)}

    return await answer(request, api, values)


async def answer(
    request: Request,
    api: RestCalls,
    values: Callable[[], Awaitable[tuple[str, Values]]],
    status: HTTPStatus = HTTPStatus.OK,
) -> Response:
    """Render the template that `values` returns, or the problem that it raises.

    A request without valid credentials is redirected to the login.
    """
    session: Document | None = None
    renewed: bytes | None = None
    try:
        caller = await api.call("GET", "/session")
        session, renewed = caller.document, caller.headers.get(b"set-cookie")
        template, found = await values()
    except CallProblem as problem:
        if problem.status is HTTPStatus.UNAUTHORIZED:
            return RedirectResponse(_login_of(request), HTTPStatus.SEE_OTHER)
        template, found, status = "problem", {"problem": problem, "is_live": False}, problem.status
    links = request.app.state.action_links.of(api.access)
    response = html(request, template, {**found, **links, "session": session}, status)
    if renewed is not None:
        response.headers["Set-Cookie"] = renewed.decode()
    return response


def html(
    request: Request, template: str, values: Values, status: HTTPStatus = HTTPStatus.OK
) -> HTMLResponse:
    """Render a whole page, with the policy that its nonce needs."""
    nonce = secrets.token_urlsafe(16)
    path = request.scope["path"]
    view = quote(path) + (f"?{request.url.query}" if request.url.query else "")
    values = {
        "navigation": NAVIGATION,
        "root": ROOT,
        "here": path,
        "view": view,
        "nonce": nonce,
        "rendered_at_ms": time.time_ns() // 1_000_000,
        **values,
    }
    text = render(template, values).encode()
    is_gzip = len(text) >= GZIP_BYTES_MIN and "gzip" in request.headers.get("accept-encoding", "")
    response = HTMLResponse(gzip.compress(text, GZIP_LEVEL) if is_gzip else text, status)
    if is_gzip:
        response.headers["Content-Encoding"] = "gzip"
    response.headers["Vary"] = "Accept-Encoding"
    response.headers["Content-Security-Policy"] = POLICY.replace(
        "script-src 'self'", f"script-src 'self' 'nonce-{nonce}'"
    )
    # With `no-referrer`, browsers send `Origin: null` with a form of the same origin.
    response.headers["Referrer-Policy"] = "same-origin"
    response.headers["Cache-Control"] = "no-store"
    return response


def rest_of(request: Request) -> RestCalls:
    """Return the REST API for the caller of a request."""
    return RestCalls(request.app.state.api or request.app, request.scope)


def url(path: str, /, **query: str | int | None) -> str:
    """Return the URL of a page with its query; parameters of None are left out."""
    given = {name: value for name, value in query.items() if value is not None}
    return f"{ROOT}{path}" + (f"?{urlencode(given)}" if given else "")


def order_of(call: PageCall, choices: Mapping[str, str], default: str) -> str:
    """Return the order of a list: a `sort` of the REST API, or "name"."""
    order = call.get("sort") or default
    return order if order in choices else default


def unknown_reasons(rows: Iterable[Document]) -> list[str]:
    """Return why numbers of rows are unknown."""
    return sorted({row["unknown"] for row in rows if "unknown" in row})


def segment(name: str) -> str:
    """Return a name as one segment of a URL."""
    return quote(name, safe="")


def _login_of(request: Request) -> str:
    path = request.scope["path"] if request.method == "GET" else f"{ROOT}/"
    query = f"?{request.url.query}" if request.url.query and request.method == "GET" else ""
    return f"{LOGIN}?{urlencode({'next': path + query})}"
