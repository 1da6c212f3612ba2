"""The memory of a call is free when it ends, without the garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest

from tests.support.clients import http2_peer as peer
from tests.support.clients.rpc_server import (
    SERVICE,
    RawClient,
    RunningServer,
    request_to,
    rpc_server,
)
from tests.support.eventually import eventually
from tidemill.transport.aio import server
from tidemill.transport.aio.call import RpcCall, unary
from tidemill.transport.aio.writer import BUFFER_BYTES
from tidemill.transport.grpc.server_connection import CALLS_PER_TURN, MESSAGES_UNREAD_MAX
from tidemill.transport.http2 import frames
from tidemill.transport.http2.limits import Limit, Limits

CALLS = 50
OPEN_WIDE = (
    frames.PREFACE
    + peer.settings({frames.Setting.INITIAL_WINDOW_SIZE: frames.WINDOW_MAX})
    + peer.window_update(0, 1 << 30)
)


@pytest.fixture(autouse=True)
def _without_a_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def calls_left() -> int:
    return sum(isinstance(one, RpcCall) for one in gc.get_objects())


def everything_is_free(running: RunningServer) -> None:
    eventually(lambda: not running.server.ending and running.server.call_count == 0)
    eventually(lambda: calls_left() == 0)
    eventually(lambda: running.server.account.bytes == 0)


@pytest.mark.parametrize("method", ["Hang", "Exchange", "Batch", "Fail", "Echo"])
def test_ended_calls_leave_nothing(method: str) -> None:
    with rpc_server() as running:
        with RawClient(running.port) as client:
            for n in range(CALLS):
                client.send(peer.request(2 * n + 1, b"5 " + bytes(9_000), request_to(method)))
            client.pong()
            for n in range(CALLS):
                client.send(peer.rst_stream(2 * n + 1))
            client.pong()
            everything_is_free(running)
        everything_is_free(running)


def test_calls_of_a_lost_connection_leave_nothing() -> None:
    with rpc_server() as running:
        with RawClient(running.port) as client:
            for n in range(CALLS):
                client.send(peer.request(2 * n + 1, bytes(9_000), request_to("Hang")))
            client.pong()
            assert running.server.account.bytes > CALLS * 9_000
        everything_is_free(running)


def test_responses_that_wait_for_a_window_are_counted_and_freed() -> None:
    no_window = frames.PREFACE + peer.settings({frames.Setting.INITIAL_WINDOW_SIZE: 0})
    with rpc_server(Limits(unread_bytes_max=1 << 20)) as running:
        with RawClient(running.port, no_window) as client:
            for n in range(5):
                client.send(peer.request(2 * n + 1, b"100000", request_to("Large")))
            client.pong()
            eventually(lambda: running.server.account.bytes > 500_000)
            client.send(peer.rst_stream(1))
            client.pong()
            eventually(lambda: running.server.account.bytes < 500_000)
        everything_is_free(running)


def test_unread_replies_are_counted_and_limited() -> None:
    """A client that reads nothing gets the transport's buffer and no more calls."""
    reply_bytes, call_count = 4 << 20, 20
    made: list[bytes] = []

    async def large(_call: RpcCall, request: bytes) -> bytes:
        made.append(request)
        return bytes(reply_bytes)

    with (
        rpc_server(more_methods={f"/{SERVICE}/Many": unary(large)}) as running,
        RawClient(running.port, OPEN_WIDE) as client,
    ):
        client.send(
            b"".join(peer.request(2 * n + 1, b"", request_to("Many")) for n in range(call_count))
        )
        eventually(lambda: [one.is_paused for one in running.server.connections] == [True])
        for _ in range(100):  # Turns of the event loop.
            running.run(lambda: None)
        # The buffers of loopback in the kernel, and that of the transport.
        assert len(made) <= 4
        assert BUFFER_BYTES < running.server.account.bytes <= 4 * reply_bytes
        for n in range(call_count):
            client.until_last(2 * n + 1)
            client.frames.clear()
        assert len(made) == call_count
        everything_is_free(running)


def test_with_little_memory_a_client_that_does_not_read_gets_a_small_buffer() -> None:
    """Small replies are not rejected. A client that reads none of them gets no more calls."""
    # One connection may have a third of it, because the part of its address counts too.
    with rpc_server(held_bytes_max=2 << 20) as running:
        with RawClient(running.port, OPEN_WIDE) as client:
            client.send(
                b"".join(
                    peer.request(2 * n + 1, b"4000", request_to("Large")) for n in range(4_000)
                )
            )
            eventually(lambda: [one.is_paused for one in running.server.connections] == [True])
            for _ in range(100):  # Turns of the event loop.
                running.run(lambda: None)
            overshoot_bytes = 2 * CALLS_PER_TURN * 4_100  # the responses of the last turns
            assert running.server.account.bytes < (2 << 20) // 3 + overshoot_bytes < BUFFER_BYTES
            client.until_last(1)
        everything_is_free(running)


def test_unwritten_output_of_a_lost_connection_is_not_counted() -> None:
    with rpc_server() as running:
        with RawClient(running.port, OPEN_WIDE) as client:
            client.send(peer.request(1, bytes(16_000), request_to("Hold")))
            client.send(peer.request(3, b"%d" % (16 << 20), request_to("Large")))
            eventually(lambda: running.server.account.bytes > BUFFER_BYTES)
            # It is answered after the output in the transport.
            running.run(running.calls.released.set)
            eventually(lambda: running.server.call_count == 0)
            [connection] = running.server.connections
            assert connection._connection.http.output_bytes > 16_000
            del connection
        everything_is_free(running)


def test_unread_requests_of_a_stream_do_not_block_its_connection() -> None:
    raw = peer.grpc_message(b"") * 10_000
    with rpc_server() as running:
        closed = frames.PREFACE + peer.settings({frames.Setting.INITIAL_WINDOW_SIZE: 0})
        with RawClient(running.port, closed) as client:
            client.send(peer.headers(1, request_to("Exchange")))
            for at in range(0, len(raw), 10_000):
                client.send(peer.data(1, raw[at : at + 10_000]))
            client.pong()
            [connection] = running.server.connections
            waiting = [len(call._requests or ()) for call in connection.calls.values()]
            assert 0 < waiting[0] <= MESSAGES_UNREAD_MAX
            assert running.server.account.bytes < 60_000
            client.send(
                peer.settings({frames.Setting.INITIAL_WINDOW_SIZE: 1 << 20})
                + peer.data(1, is_last=True)
            )
            client.until_last(1)
            assert peer.content(client.frames, 1) == raw
        everything_is_free(running)


def test_the_share_of_an_address_exists_as_long_as_its_connections() -> None:
    def addresses(running: RunningServer) -> dict[str, int]:
        return {host: one.bytes for host, one in running.server._addresses.items()}

    with rpc_server() as running:
        with RawClient(running.port) as first, RawClient(running.port) as second:
            for client in (first, second):
                client.send(peer.request(1, bytes(9_000), request_to("Hang")))
                client.pong()
            [(host, held_bytes)] = addresses(running).items()
            assert host == "127.0.0.1"
            assert held_bytes == running.server.account.bytes > 18_000
        everything_is_free(running)
        eventually(lambda: addresses(running) == {})


def test_room_of_an_ended_call_or_connection_goes_to_waiting_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The timer would write the remaining output late.
    monkeypatch.setattr(server, "CHECK_PERIOD_S", 3_600.0)
    begun = peer.headers(1, request_to("Echo")) + peer.data(
        1, peer.grpc_message(b"begun", length=4 << 20)
    )

    def has_room(client: RawClient) -> None:
        client.until(lambda one: one.kind == frames.WINDOW_UPDATE and one.stream_id == 1)

    with rpc_server(held_bytes_max=24 << 20) as running:
        with contextlib.ExitStack() as opened:
            first, second, third = (opened.enter_context(RawClient(running.port)) for _ in range(3))
            for client in (first, second, third):
                client.send(begun)
                client.pong()
            has_room(first)
            assert not any(one.stream_id == 1 for one in second.frames + third.frames)
            first.send(peer.rst_stream(1))
            has_room(second)
            second.socket.close()
            has_room(third)
        everything_is_free(running)
        assert running.hits(Limit.MEMORY) == 0
