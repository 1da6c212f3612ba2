"""Calls of the REST API in the same process, with the credentials of an outer request.

A call is an ASGI request to the application with its access control. So it has the checks, the
rights and the audit record of a request from outside (ADR 0090).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final
from urllib.parse import urlencode

from tidemill.admin.http.request_access import OPEN, RequestAccess
from tidemill.admin.http.route_templates import PREFIX

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Scope

Document = dict[str, Any]
Query = Mapping[str, str | int | bool | None]

# The headers of the outer request that identify its caller and its page.
COPIED: Final = frozenset(
    {
        b"host",
        b"cookie",
        b"authorization",
        b"origin",
        b"sec-fetch-site",
        b"user-agent",
        b"tidemill-user",
    }
)


@final
class CallProblem(Exception):  # The word of RFC 9457.
    """An answer of the REST API that is no success."""

    def __init__(self, status: HTTPStatus, title: str, detail: str) -> None:
        super().__init__(f"{status.value} {title}: {detail}")
        self.status = status
        self.title = title
        self.detail = detail  # What failed, why, and what to do.


class RestAnswer(NamedTuple):
    """A successful answer."""

    status: HTTPStatus
    document: Document
    headers: Mapping[bytes, bytes]


@final
class RestCalls:
    """The REST API for the caller of one request."""

    def __init__(self, api: ASGIApp, scope: Scope) -> None:
        self._api = api
        self._scope = scope
        self._state: dict[str, Any] = {}  # that the access control fills

    @property
    def access(self) -> RequestAccess:
        """The rights of the caller at its last call."""
        access = self._state.get("access", OPEN)
        assert isinstance(access, RequestAccess)
        return access

    async def get(self, path: str, **query: str | int | bool | None) -> Document:
        """Read a document. Raises CallProblem."""
        return (await self.call("GET", path, query)).document

    async def call(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: Document | None = None,
        *,
        more_headers: Mapping[bytes, bytes] | None = None,
    ) -> RestAnswer:
        """Call the operation of a path below /api/v1. Query parameters of None are left out.

        Raises CallProblem.
        """
        sent = b"" if body is None else json.dumps(body).encode()
        answer = await self._request(method, path, _encoded(query or {}), sent, more_headers or {})
        if answer.status >= HTTPStatus.BAD_REQUEST:
            shown = answer.document
            title, detail = str(shown.get("title", "")), str(shown.get("detail", ""))
            raise CallProblem(answer.status, title, detail)
        return answer

    async def _request(
        self, method: str, path: str, query: str, body: bytes, more_headers: Mapping[bytes, bytes]
    ) -> RestAnswer:
        headers = [pair for pair in self._scope["headers"] if pair[0] in COPIED]
        headers = [pair for pair in headers if pair[0] not in more_headers]
        headers += [(b"accept", b"application/json"), *more_headers.items()]
        if body:
            headers.append((b"content-type", b"application/json"))
            headers.append((b"content-length", str(len(body)).encode()))
        whole = f"{PREFIX}{path}"
        scope = {
            **{key: self._scope.get(key) for key in ("client", "server", "scheme", "asgi")},
            "type": "http",
            "state": self._state,
            "http_version": "1.1",
            "root_path": "",
            "method": method,
            "path": whole,
            "raw_path": whole.encode(),
            "query_string": query.encode(),
            "headers": headers,
        }
        received = _Received()

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        await self._api(scope, receive, received.send)
        return received.answer()


class _Received:
    """The messages of an answer."""

    def __init__(self) -> None:
        self._status = HTTPStatus.INTERNAL_SERVER_ERROR
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []

    async def send(self, message: Message) -> None:
        """Receive a message of the application."""
        if message["type"] == "http.response.start":
            self._status = HTTPStatus(message["status"])
            self._headers = dict(message["headers"])
        else:
            self._parts.append(message.get("body", b""))

    def answer(self) -> RestAnswer:
        """Return the whole answer. An answer without content has an empty document."""
        body = b"".join(self._parts)
        return RestAnswer(self._status, json.loads(body) if body else {}, self._headers)


def _encoded(query: Query) -> str:
    given = {name: value for name, value in query.items() if value is not None}
    return urlencode({name: _text(value) for name, value in given.items()})


def _text(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
