"""The REST API closes connections of slow clients and serves others meanwhile."""

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
ANSWER_BYTES = 32 << 20  # more than the buffers of both sides
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
    with listening("127.0.0.1", 0) as listeners:
        address = listeners[0].getsockname()

        async def connect() -> Ends:
            reader, writer = await asyncio.open_connection(*address)
            opened.append(writer)
            return reader, writer

        async with asyncio.timeout(WAIT_S), serving(application, listeners, 0):
            yield connect
            for writer in opened:
                writer.transport.abort()


async def app_that_reads_the_body(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await app(scope, receive, send)


async def is_served(ends: Ends) -> bool:
    reader, writer = ends
    writer.write(HEAD)
    answer = await reader.readuntil(b"\r\n\r\n")
    return answer.startswith(b"HTTP/1.1 200") and len(await reader.readexactly(1)) == 1


async def is_closed(ends: Ends) -> bool:
    try:
        return await ends[0].read() == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("sent", [b"", HEAD[:-1]], ids=["silent", "half a head"])
def test_a_client_without_a_complete_head_is_closed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.01)

    async def scenario() -> None:
        async with served() as connect:
            ends = await connect()
            ends[1].write(sent)
            assert await is_closed(ends)

    asyncio.run(scenario())


def test_a_client_with_an_incomplete_second_request_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with served() as connect:
            ends = await connect()
            monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.01)
            assert await is_served(ends)
            ends[1].write(HEAD[:-1])  # The keep-alive timeout of uvicorn ends here.
            assert await is_closed(ends)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_does_not_read_the_answer_is_closed(
    monkeypatch: pytest.MonkeyPatch, *, is_stream: bool
) -> None:
    """A stream of events has a shorter time than another answer."""
    bound, other = "STREAM_TIMEOUT_S", "ANSWER_TIMEOUT_S"
    if is_stream:
        monkeypatch.setattr(connections, "STREAMS", {"/large"})
    else:
        bound, other = other, bound
    monkeypatch.setattr(connections, bound, 0.01)
    monkeypatch.setattr(connections, other, 10 * WAIT_S)
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 10 * WAIT_S)
    is_lost = asyncio.Event()
    connection_lost = connections.HttpConnection.connection_lost

    def note(connection: connections.HttpConnection, error: Exception | None) -> None:
        connection_lost(connection, error)
        is_lost.set()

    monkeypatch.setattr(connections.HttpConnection, "connection_lost", note)

    async def scenario() -> None:
        async with served() as connect:
            _, writer = await connect()
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            writer.write(HEAD.replace(b"/ ", b"/large "))
            async with asyncio.timeout(WAIT_S):
                await is_lost.wait()

    asyncio.run(scenario())


def test_unread_answers_have_a_bound_and_the_oldest_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "UNREAD_BYTES_MAX", 3 * ANSWER_BYTES)

    async def scenario() -> None:
        async with served() as connect:
            ends = [await connect() for _ in range(6)]
            for reader, writer in ends:
                writer.write(HEAD.replace(b"/ ", b"/large "))
                await reader.readuntil(b"\r\n\r\n")
            assert await is_served(await connect())
            for reader, _ in ends[:3]:
                with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                    await reader.readexactly(ANSWER_BYTES)
            for reader, _ in ends[3:]:
                assert len(await reader.readexactly(ANSWER_BYTES)) == ANSWER_BYTES

    with capture_logs() as logs:
        asyncio.run(scenario())
    [line] = [line for line in logs if line["event"] == "clients were refused"]
    assert line["log_level"] == "warning"


def test_the_head_timeout_does_not_cut_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with served() as connect:
            reader, writer = await connect()
            assert await is_served((reader, writer))
            monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0)
            writer.write(HEAD.replace(b"/ ", b"/large "))
            # The connection may end when the remaining bytes fit into the buffers.
            assert await reader.readexactly(ANSWER_BYTES // 2)

    asyncio.run(scenario())


def test_a_new_connection_replaces_the_one_that_was_idle_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 2)

    async def scenario() -> None:
        async with served() as connect:
            first, second = await connect(), await connect()
            assert await is_served(first)
            assert await is_served(await connect())
            assert await is_closed(second)
            assert await is_served(first)

    asyncio.run(scenario())


BODY_HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"


@pytest.mark.parametrize("limit", ["CONNECTIONS_MAX", "CONNECTIONS_PER_ADDRESS_MAX"])
def test_endless_bodies_do_not_lock_out_other_clients(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, limit, 2)
    begun = asyncio.Semaphore(0)

    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        begun.release()
        await app_that_reads_the_body(scope, receive, send)

    async def scenario() -> None:
        async with served(reads) as connect:
            slow = [await connect(), await connect()]
            for _, writer in slow:
                writer.write(BODY_HEAD)
                await begun.acquire()
            assert await is_served(await connect())
            assert await is_closed(slow[0])
            slow[1][1].write(bytes(100))
            assert (await slow[1][0].readline()).startswith(b"HTTP/1.1 200")

    asyncio.run(scenario())


def test_invalid_requests_are_one_log_line_per_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with served() as connect:
            for _ in range(5):
                reader, writer = await connect()
                writer.write(b"\0\0\r\n\r\n")
                assert (await reader.read()).startswith(b"HTTP/1.1 400")
            # After the answer has begun, no 400 can be sent.
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


def test_a_disconnect_within_a_body_counts_as_unanswered() -> None:
    counted = AdminMetrics()
    is_served_once = asyncio.Event()

    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await app(scope, receive, send)  # Some frameworks answer in spite of the disconnect.

    measured = RequestCounter(reads, counted, RouteTemplates([]))

    async def served_once(scope: Scope, receive: Receive, send: Send) -> None:
        await measured(scope, receive, send)
        is_served_once.set()

    async def scenario() -> None:
        async with served(served_once) as connect:
            _, writer = await connect()
            writer.write(BODY_HEAD)
            await writer.drain()
            writer.close()
            await is_served_once.wait()

    asyncio.run(scenario())
    assert [status for _, _, status in counted.requests] == [UNANSWERED]
