"""Access control of the REST API: host name, credentials, and size and duration of a request body.

It is an ASGI application around the API, so that a rejected request is not parsed, routed or read
(ADR 0019). The answer is a problem document.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from http import HTTPStatus
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from tidemill.admin.http.actor import Actor, make_actor, set_actor
from tidemill.admin.http.banned_callers import Identities
from tidemill.admin.http.browser_defences import find_foreign_page, with_headers
from tidemill.admin.http.forwarded import IpNetworks, with_caller_address
from tidemill.admin.http.problems import problem
from tidemill.admin.http.refused_login import RefusedLogin
from tidemill.admin.http.request_access import OPEN, set_access
from tidemill.common.addresses import host_of_authority, is_ip, normalized_hosts, unmapped
from tidemill.common.errors import CODES, Overloaded, ServiceError, codes_of

if TYPE_CHECKING:
    from fastapi.responses import JSONResponse
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

GUARDED: Final = "/api/"  # paths that need credentials; the other pages contain no secrets
# All received bytes of bodies in progress: a few of the largest. Above it, the answer is 429.
BODIES_BYTES_MAX: Final = 64 << 20
# The first bytes of each body, which do not count there: large bodies never keep out ordinary ones.
# The number of connections bounds their sum.
ORDINARY_BYTES_MAX: Final = 64 << 10
# Of a request without a message: names, numbers, a list of durations. Parsing JSON that consists of
# commas takes forty times its size.
OTHER_BODY_BYTES_MAX: Final = 64 << 10
BODY_PAUSE_S: Final = 10.0  # without a byte of a body; afterwards the answer is 408
BODY_TIMEOUT_S: Final = 60.0  # of a whole body, else 408: the largest message at 1 Mbit/s
# After this time, the end of a body checks its caller again: a slow body keeps no lost right.
IDENTITY_AGE_S: Final = 0.5
# The remaining bytes of a rejected body are not read, so the connection cannot be used again.
CLOSE: Final = {"Connection": "close"}


class BodyLimit(NamedTuple):
    """The size limit of a request body."""

    bytes_max: int
    remedy: str = ""  # of a larger body


OTHER_BODIES: Final = BodyLimit(OTHER_BODY_BYTES_MAX)


class ForeignPageReports(Protocol):
    """The receiver of requests from pages of other sites."""

    def note_refusal(self, scope: Scope, actor: Actor, reason: str) -> None:
        """Note a refused request."""


@final
class AccessControl:
    """Filter that passes requests on to `app` or rejects them."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str] = (),
        identities: Identities,
        body_bytes_max: int,
        large: Mapping[re.Pattern[str], BodyLimit] | None = None,
        reports: ForeignPageReports | None = None,
        balancers: IpNetworks = (),
    ) -> None:
        """Allow bodies up to `body_bytes_max`, and on paths that match `large` up to its value.

        The other paths have small bodies, unless `large` is None.

        `identities` checks the credentials of requests to the API. `balancers` are the networks
        whose X-Forwarded-For is believed.
        """
        self._balancers = balancers
        self._app = app
        self._reports = reports
        self._identities = identities
        self._large = large
        self._hosts = normalized_hosts(hosts)
        self._body_limit = BodyLimit(
            body_bytes_max, "raise admin_body_bytes_max, or send less at once"
        )
        self._held_bytes = 0  # of the bodies of all requests in progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = with_caller_address(scope, self._balancers)
        send = with_headers(scope, send)
        headers = Headers(scope=scope)
        refusal = self._find_refusal(scope, headers)
        if refusal is None:
            refusal = await self._identify(scope)
        if refusal is None:
            refusal = self._find_large_body(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        async def identify_again() -> None:
            refusal = await self._identify(scope)
            if refusal is not None:
                detail = json.loads(bytes(refusal.body))["detail"]
                wait_s = refusal.headers.get("Retry-After")
                headers = CLOSE if wait_s is None else {**CLOSE, "Retry-After": wait_s}
                raise HTTPException(refusal.status_code, detail, headers)

        body = _RequestBody(receive, self._body_limit_of(scope), self._hold, identify_again)
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._held_bytes -= body.held_bytes

    def _find_refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        names = headers.getlist("host")
        if len(names) != 1 or not self._is_known(names[0], scope):
            return _refusal(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"the host name {', '.join(names)!r} is not allowed; call this API by its address,"
                " or add the name to admin_hosts",
            )
        if reason := find_foreign_page(scope):
            if self._reports is not None:
                self._reports.note_refusal(scope, make_actor(scope), reason)
            return _refusal(HTTPStatus.FORBIDDEN, reason)
        return None

    async def _identify(self, scope: Scope) -> JSONResponse | None:
        """Store the caller in the state of the request, or return the answer of a refusal."""
        if not scope["path"].startswith(GUARDED):
            set_actor(scope, make_actor(scope))
            set_access(scope, OPEN)
            return None
        try:
            actor, access = await self._identities.identify(scope)
        except RefusedLogin as refused:
            return refused.answer(self._identities.challenge)
        except ServiceError as error:
            codes = codes_of(error)
            return problem(codes.http, type(error).__name__, error.message, codes.rocketmq)
        set_actor(scope, actor)
        set_access(scope, access)
        return None

    def _find_large_body(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        # The server has already rejected a header that is repeated or not a number.
        size_bytes, limit = int(headers.get("content-length", 0)), self._body_limit_of(scope)
        if size_bytes > limit.bytes_max:
            refusal = _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large(limit))
            refusal.headers.update(CLOSE)
            return refusal
        return None

    def _body_limit_of(self, scope: Scope) -> BodyLimit:
        """Return the size limit of the body of a request."""
        if self._large is None:
            return self._body_limit
        path = scope["path"]
        limits = (limit for pattern, limit in self._large.items() if pattern.fullmatch(path))
        own = next(limits, OTHER_BODIES)
        return own if own.bytes_max < self._body_limit.bytes_max else self._body_limit

    def _is_known(self, authority: str, scope: Scope) -> bool:
        host = host_of_authority(authority)
        if host in self._hosts or host == "localhost":
            return True
        try:
            address = ip_address(host)
        except ValueError:
            return False
        # DNS rebinding needs a name, so an address is allowed if the connection arrived there.
        arrived_at = unmapped((scope.get("server") or ("", 0))[0])
        return address.is_loopback or (is_ip(arrived_at) and address == ip_address(arrived_at))

    def _hold(self, size_bytes: int) -> None:
        """Count bytes of a body. Raises Overloaded above the limit for all bodies."""
        if self._held_bytes + size_bytes > BODIES_BYTES_MAX:
            raise Overloaded(
                f"the bodies of all current requests have at most {BODIES_BYTES_MAX} bytes; try"
                " again"
            )
        self._held_bytes += size_bytes


@final
class _RequestBody:
    """The body of a request, with its size and its timeouts."""

    def __init__(
        self,
        receive: Receive,
        limit: BodyLimit,
        hold: Callable[[int], None],
        identify: Callable[[], Awaitable[None]],
    ) -> None:
        self._receive = receive
        self._identify = identify  # raises HTTPException
        self._identified_at_s = asyncio.get_running_loop().time()
        self._limit = limit
        self._hold = hold
        self._size_bytes = 0
        self._is_whole = False
        self._end_s: float | None = None  # set by the first read
        self.held_bytes = 0

    async def receive(self) -> Message:
        """Receive the next part. Raises HTTPException above a limit; the application answers it."""
        # After a whole body, the next message is the disconnect of the client.
        was_whole = self._is_whole
        message = await (self._receive() if self._is_whole else self._receive_in_time())
        self._is_whole = not message.get("more_body", False)
        self._size_bytes += len(message.get("body", b""))
        if self._size_bytes > self._limit.bytes_max:
            detail = _too_large(self._limit)
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail, CLOSE)
        new_bytes = max(self._size_bytes - ORDINARY_BYTES_MAX, 0) - self.held_bytes
        try:
            self._hold(new_bytes)
        except Overloaded as error:
            status = CODES[Overloaded].http
            raise HTTPException(status, error.message, CLOSE) from error
        self.held_bytes += new_bytes
        age_s = asyncio.get_running_loop().time() - self._identified_at_s
        if self._is_whole and not was_whole and age_s >= IDENTITY_AGE_S:
            await self._identify()
        return message

    async def _receive_in_time(self) -> Message:
        now_s = asyncio.get_running_loop().time()
        if self._end_s is None:
            self._end_s = now_s + BODY_TIMEOUT_S
        try:
            async with asyncio.timeout_at(min(now_s + BODY_PAUSE_S, self._end_s)):
                return await self._receive()
        except TimeoutError as error:
            detail = (
                f"the body did not arrive in time; send it within {BODY_TIMEOUT_S:g} s and without"
                f" pauses of {BODY_PAUSE_S:g} s"
            )
            raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, detail, CLOSE) from error


def _refusal(status: HTTPStatus, detail: str) -> JSONResponse:
    return problem(status, status.phrase, detail, status * 100)


def _too_large(limit: BodyLimit) -> str:
    remedy = f"; {limit.remedy}" if limit.remedy else ""
    return f"the body is too large; at most {limit.bytes_max} bytes are allowed{remedy}"
