"""Who may come in: the names this API answers to, the token, and how large and slow a body may be.

One ASGI application around the other, so that nothing is parsed, routed or read for whom it refuses
(ADR 0019). A refusal is a problem document as any other.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Callable, Collection
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from tidemill.admin.http.problems import problem
from tidemill.common.errors import CODES, Overloaded
from tidemill.common.file_changes import FileChanges
from tidemill.common.lifecycle import StartError

if TYPE_CHECKING:
    from fastapi.responses import JSONResponse
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = structlog.get_logger()

GUARDED: Final = "/api/"  # paths that need the token; the pages beside them hold no secret
# Of all requests that are being read, as far as they have come: some of the largest. Beyond it 429.
BODIES_BYTES_MAX: Final = 64 << 20
# Of each, not counted there, so that large ones never keep ordinary ones out. The number of
# connections bounds it.
ORDINARY_BYTES_MAX: Final = 64 << 10
# Of a request that is no message: names, numbers, a list of waits. JSON of nothing but commas takes
# some forty times its size when it is parsed.
OTHER_BODY_BYTES_MAX: Final = 64 << 10
BODY_PAUSE_S: Final = 10.0  # without a byte of a body; then, and after the next, 408
BODY_TIMEOUT_S: Final = 60.0  # for a whole body: the largest message, at a megabit/s
TOKEN_BYTES_MAX: Final = 4_096  # a file with more is another file
# The rest of a refused body is not read, so the connection has no further request.
CLOSE: Final = {"Connection": "close"}
_AUTHORITY: Final = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:@/\[\]]+)(:\d*)?")


@final
class TokenFile:
    """A bearer token, read again when its file has changed."""

    def __init__(self, file: str) -> None:
        """Read the file; raise StartError when it holds no token."""
        self._file = file
        self._changes = FileChanges([file])
        try:
            self._token = _read_token(file)
        except (OSError, ValueError) as error:
            raise StartError(
                f"admin_token_file {file!r} holds no token: {error}; write one line into it,"
                " such as `openssl rand -hex 32` makes"
            ) from error

    def admits(self, authorization: str) -> bool:
        """Whether the header shows the token. Takes as long for a wrong one that begins rightly."""
        if self._changes.detect():
            self._read_again()
        scheme, _, shown = authorization.partition(" ")
        is_token = hmac.compare_digest(shown.strip().encode(), self._token)
        return is_token and scheme.lower() == "bearer"

    def _read_again(self) -> None:
        try:
            self._token = _read_token(self._file)
        except (OSError, ValueError) as error:
            log.error(  # noqa: TRY400  # The reason says it all.
                "token not read again, the old one stays", file=self._file, reason=str(error)
            )
        else:
            log.info("token read again", file=self._file)


def _read_token(file: str) -> bytes:
    with Path(file).open("rb") as opened:
        content = opened.read(TOKEN_BYTES_MAX + 1)
    token = content.strip()
    if len(content) > TOKEN_BYTES_MAX:
        raise ValueError(f"it is longer than {TOKEN_BYTES_MAX} bytes")
    if not token:
        raise ValueError("it is empty")
    if not all(0x21 <= byte <= 0x7E for byte in token):  # What a header can carry (RFC 6750).
        raise ValueError("a token is one word of ASCII characters")
    return token


@final
class AccessControl:
    """Lets requests through to `app`, or answers them itself."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str] = (),
        token: TokenFile | None = None,
        body_bytes_max: int,
        large: re.Pattern[str] | None = None,
    ) -> None:
        """Let bodies be as large as `body_bytes_max` on paths that are `large`, or on all."""
        self._app = app
        self._large = large
        self._hosts = {host.lower().strip("[]").rstrip(".") for host in hosts} - {""}
        self._token = token
        self._body_bytes_max = body_bytes_max
        self._held_bytes = 0  # of the bodies of all requests under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refused = self._find_refusal(scope, headers)
        if refused is not None:
            await refused(scope, receive, send)
            return
        body = _RequestBody(receive, self._most(scope), self._hold)
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._held_bytes -= body.held_bytes

    def _find_refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        names = headers.getlist("host")
        if len(names) != 1 or not self._is_known(names[0], scope):
            return _refusal(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"this API does not answer to the name {', '.join(names)!r}; call it by its"
                " address, or add the name to admin_hosts",
            )
        is_guarded = self._token is not None and scope["path"].startswith(GUARDED)
        if is_guarded and not self._shows_token(headers):
            refused = _refusal(
                HTTPStatus.UNAUTHORIZED, "send the token of this API as Authorization: Bearer TOKEN"
            )
            refused.headers["WWW-Authenticate"] = 'Bearer realm="tidemill"'
            return refused
        # What is no number, or there twice, the server has refused before.
        most = self._most(scope)
        if int(headers.get("content-length", 0)) > most:
            refused = _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large(most))
            refused.headers.update(CLOSE)
            return refused
        return None

    def _most(self, scope: Scope) -> int:
        """Return how large the body of a request may be."""
        if self._large is None or self._large.fullmatch(scope["path"]):
            return self._body_bytes_max
        return min(self._body_bytes_max, OTHER_BODY_BYTES_MAX)

    def _is_known(self, authority: str, scope: Scope) -> bool:
        host = _host_of(authority)
        if host in self._hosts or host == "localhost":
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        # An address cannot be bound again, but the one that was called may not be ours to answer.
        arrived_at = (scope.get("server") or ("", 0))[0]
        return address.is_loopback or host == arrived_at

    def _shows_token(self, headers: Headers) -> bool:
        shown = headers.getlist("authorization")
        return len(shown) == 1 and self._token is not None and self._token.admits(shown[0])

    def _hold(self, size_bytes: int) -> None:
        """Count bytes of a body; raise Overloaded when too many are being read at once."""
        if self._held_bytes + size_bytes > BODIES_BYTES_MAX:
            raise Overloaded("the requests that are being read fill the room for them; try again")
        self._held_bytes += size_bytes


@final
class _RequestBody:
    """What a request brings, counted and timed as it comes."""

    def __init__(self, receive: Receive, bytes_max: int, hold: Callable[[int], None]) -> None:
        self._receive = receive
        self._bytes_max = bytes_max
        self._hold = hold
        self._size_bytes = 0
        self._is_whole = False
        self._until_s: float | None = None  # set when somebody begins to read
        self.held_bytes = 0

    async def receive(self) -> Message:
        """Receive the next part; raise HTTPException beyond a limit, which the app answers."""
        # Of a whole body the next message is that the caller has gone.
        message = await (self._receive() if self._is_whole else self._receive_in_time())
        self._is_whole = not message.get("more_body", False)
        self._size_bytes += len(message.get("body", b""))
        if self._size_bytes > self._bytes_max:
            detail = _too_large(self._bytes_max)
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail, CLOSE)
        new_bytes = max(self._size_bytes - ORDINARY_BYTES_MAX, 0) - self.held_bytes
        try:
            self._hold(new_bytes)
        except Overloaded as error:
            status = CODES[Overloaded].http
            raise HTTPException(status, error.message, CLOSE) from error
        self.held_bytes += new_bytes
        return message

    async def _receive_in_time(self) -> Message:
        now_s = asyncio.get_running_loop().time()
        if self._until_s is None:
            self._until_s = now_s + BODY_TIMEOUT_S
        try:
            async with asyncio.timeout_at(min(now_s + BODY_PAUSE_S, self._until_s)):
                return await self._receive()
        except TimeoutError as error:
            detail = (
                f"a request's body comes within {BODY_TIMEOUT_S:g} s, without pauses of"
                f" {BODY_PAUSE_S:g} s"
            )
            raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, detail, CLOSE) from error


def _host_of(authority: str) -> str:
    """Return the host in `host:port` or `[address]:port` as names are compared; "": neither."""
    found = _AUTHORITY.fullmatch(authority.strip().lower())
    return found[1].strip("[]").rstrip(".") if found else ""


def _refusal(status: HTTPStatus, detail: str) -> JSONResponse:
    return problem(status, status.phrase, detail, status * 100)


def _too_large(bytes_max: int) -> str:
    name = "" if bytes_max == OTHER_BODY_BYTES_MAX else " (admin_body_bytes_max)"
    return f"this request has at most {bytes_max} bytes{name}"
