"""Who keeps the REST API waiting is let go, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from tidemill.admin.http import connections
from tidemill.admin.http.metrics import UNANSWERED, AdminMetrics, RequestCounter
from tidemill.admin.http.route_templates import RouteTemplates
from tidemill.admin.process import listening, serving

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

WAIT_S = 30.0  # far more than anything here takes
ANSWER_BYTES = 32 << 20  # more than the buffers of both ends
HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Ends]]


async def app(scope: Scope, _receive: Receive, send: Send) -> None:
    body = bytes(ANSWER_BYTES if scope["path"] == "/large" else 1)
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def served(application: ASGIApp = app) -> AsyncIterator[Connect]:
    opened: list[asyncio.StreamWriter] = []
    with listening("127.0.0.1", 0) as listener:
        address = listener.getsockname()

        async def connect() -> Ends:
            reader, writer = await asyncio.open_connection(*address)
            opened.append(writer)
            return reader, writer

        async with asyncio.timeout(WAIT_S), serving(application, listener, 0):
            yield connect
            for writer in opened:
                writer.transport.abort()


async def reads_its_body(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await app(scope, receive, send)


async def is_served(ends: Ends) -> bool:
    reader, writer = ends
    writer.write(HEAD)
    answer = await reader.readuntil(b"\r\n\r\n")
    return answer.startswith(b"HTTP/1.1 200") and len(await reader.readexactly(1)) == 1


async def is_let_go(ends: Ends) -> bool:
    try:
        return await ends[0].read() == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("said", [b"", HEAD[:-1]], ids=["silent", "half a head"])
def test_who_sends_no_head_is_let_go(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.01)

    async def scenario() -> None:
        async with served() as connect:
            ends = await connect()
            ends[1].write(said)
            assert await is_let_go(ends)

    asyncio.run(scenario())


def test_who_begins_a_second_request_and_does_not_end_it_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with served() as connect:
            ends = await connect()
            monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.01)
            assert await is_served(ends)
            ends[1].write(HEAD[:-1])  # The server's own wait for the next request ends here.
            assert await is_let_go(ends)

    asyncio.run(scenario())


def test_who_does_not_read_the_answer_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANSWER_TIMEOUT_S", 0.01)
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 10 * WAIT_S)
    gone = asyncio.Event()
    lost = connections.HttpConnection.connection_lost

    def note(connection: connections.HttpConnection, error: Exception | None) -> None:
        lost(connection, error)
        gone.set()

    monkeypatch.setattr(connections.HttpConnection, "connection_lost", note)

    async def scenario() -> None:
        async with served() as connect:
            _, writer = await connect()
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            writer.write(HEAD.replace(b"/ ", b"/large "))
            await gone.wait()

    asyncio.run(scenario())


def test_the_wait_for_the_next_request_ends_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with served() as connect:
            reader, writer = await connect()
            assert await is_served((reader, writer))
            monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0)
            writer.write(HEAD.replace(b"/ ", b"/large "))
            # When the rest fits into the buffers, it may end.
            assert await reader.readexactly(ANSWER_BYTES // 2)

    asyncio.run(scenario())


def test_a_newcomer_takes_the_place_of_who_has_waited_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 2)

    async def scenario() -> None:
        async with served() as connect:
            first, second = await connect(), await connect()
            assert await is_served(first)
            assert await is_served(await connect())
            assert await is_let_go(second)
            assert await is_served(first)

    asyncio.run(scenario())


BODY_HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"


@pytest.mark.parametrize("limit", ["CONNECTIONS_MAX", "CONNECTIONS_PER_ADDRESS_MAX"])
def test_bodies_that_never_end_lock_nobody_out(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, limit, 2)
    begun = asyncio.Semaphore(0)

    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        begun.release()
        await reads_its_body(scope, receive, send)

    async def scenario() -> None:
        async with served(reads) as connect:
            slow = [await connect(), await connect()]
            for _, writer in slow:
                writer.write(BODY_HEAD)
                await begun.acquire()
            assert await is_served(await connect())
            assert await is_let_go(slow[0])
            slow[1][1].write(bytes(100))
            assert (await slow[1][0].readline()).startswith(b"HTTP/1.1 200")

    asyncio.run(scenario())


def test_what_is_no_request_is_a_line_of_log_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with served() as connect:
            for _ in range(5):
                reader, writer = await connect()
                writer.write(b"\0\0\r\n\r\n")
                assert (await reader.read()).startswith(b"HTTP/1.1 400")
            # After its answer has begun there is none that could be sent.
            reader, writer = await connect()
            writer.write(HEAD.replace(b"GET / ", b"POST / ")[:-2])
            writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.write(b"zz\r\n")
            assert b"400" not in await reader.read()

    with capture_logs() as logs:
        asyncio.run(scenario())
    assert [(line["kind"], line["count"]) for line in logs] == [("http_request", 1)]
    assert not [one for one in caplog.records if "Invalid" in one.message or one.exc_info]


def test_a_sender_that_goes_in_the_middle_of_its_body_is_counted_as_gone() -> None:
    counted = AdminMetrics()
    gone = asyncio.Event()

    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await app(scope, receive, send)  # As a framework does that cannot tell.

    measured = RequestCounter(reads, counted, RouteTemplates([]))

    async def served_once(scope: Scope, receive: Receive, send: Send) -> None:
        await measured(scope, receive, send)
        gone.set()

    async def scenario() -> None:
        async with served(served_once) as connect:
            _, writer = await connect()
            writer.write(BODY_HEAD)
            await writer.drain()
            writer.close()
            await gone.wait()

    asyncio.run(scenario())
    assert [status for _, _, status in counted.requests] == [UNANSWERED]
