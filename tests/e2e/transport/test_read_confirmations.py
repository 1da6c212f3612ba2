"""A server knows that a response was read when the client answers a later ping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
from tidemill.transport.aio import read_confirmations, server
from tidemill.transport.aio.call import RpcCall, server_streaming
from tidemill.transport.http2 import frames


@contextmanager
def serving() -> Iterator[tuple[RunningServer, list[bytes]]]:
    """Serve a method with confirmed responses; also return the list of confirmed ones."""
    read: list[bytes] = []

    def noting(request: bytes) -> Callable[[], None]:
        return lambda: read.append(request)

    async def answer(call: RpcCall, request: bytes) -> None:
        await call.send_all([request] * 3)
        call.when_read(noting(request))

    with rpc_server(more_methods={f"/{SERVICE}/Read": server_streaming(answer)}) as running:
        yield running, read


def is_ping(frame: peer.Frame) -> bool:
    return frame.kind == frames.PING and not frame.flags & frames.ACK


def test_a_response_is_read_when_the_ping_after_its_end_is_answered() -> None:
    with serving() as (running, read), RawClient(running.port) as client:
        client.send(peer.request(1, b"one", request_to("Read")))
        ping = client.until(is_ping)
        kinds = [frame.kind for frame in client.frames]
        last = client.until_last(1)
        assert client.frames.index(last) < kinds.index(frames.PING), "after the trailers"
        client.pong()
        assert read == []
        client.send(peer.ping(ping.payload, is_ack=True))
        client.pong()
        assert read == [b"one"]


def test_many_responses_share_a_ping() -> None:
    with serving() as (running, read), RawClient(running.port) as client:
        client.send(peer.request(1, b"0", request_to("Read")))
        ping = client.until(is_ping)
        for n in range(1, 100):
            client.send(peer.request(2 * n + 1, b"%d" % n, request_to("Read")))
        client.until_last(199)
        assert len([one for one in client.frames if is_ping(one)]) == 1
        client.send(peer.ping(ping.payload, is_ack=True))
        client.pong()
        assert read == [b"0"]
        client.frames.clear()
        client.until(is_ping)
        client.send(peer.ping(ping.payload, is_ack=True))
        client.pong()
        assert read == [b"%d" % n for n in range(100)]


@pytest.mark.parametrize("how", ["lost", "reset", "drain"])
def test_a_response_without_an_answered_ping_is_not_confirmed(how: str) -> None:
    with serving() as (running, read):
        with RawClient(running.port) as client:
            client.send(peer.request(1, b"one", request_to("Read")))
            client.until(is_ping)
            if how == "reset":
                client.send(peer.rst_stream(1))
                client.pong()
            elif how == "drain":
                running.drain()
        eventually(lambda: not running.server.connections)
        assert read == []


def test_a_stopping_server_waits_for_the_last_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONFIRM_TIMEOUT_S", 20.0)  # A busy machine is slow.
    with serving() as (running, read), RawClient(running.port) as client:
        client.send(peer.request(1, b"one", request_to("Read")))
        ping = client.until(is_ping)
        draining = running.start_drain()
        for _ in range(20):  # Turns of its loop, more than an immediate stop takes.
            client.pong()
        assert not draining.done()
        client.send(peer.ping(ping.payload, is_ack=True))
        draining.result(20)
        assert read == [b"one"]


def test_every_response_is_confirmed_however_many_are_read_during_a_ping() -> None:
    count = 1_500
    with serving() as (running, read), RawClient(running.port) as client:
        client.send(peer.request(1, b"0", request_to("Read")))
        ping = client.until(is_ping)
        # One round trip, as behind a slow balancer; the client reads meanwhile.
        for first in range(1, count, 50):
            last = min(first + 50, count)
            for n in range(first, last):
                client.send(peer.request(2 * n + 1, b"%d" % n, request_to("Read")))
            client.until_last(2 * last - 1)
        client.frames.clear()
        client.send(peer.ping(ping.payload, is_ack=True))
        client.until(is_ping)
        client.send(peer.ping(ping.payload, is_ack=True))
        client.pong()
        assert read == [b"%d" % n for n in range(count)]
        assert running.server.misuse.unconfirmed_count == 0


def test_responses_over_the_limit_are_counted_and_older_ones_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_confirmations, "UNCONFIRMED_MAX", 4)
    with serving() as (running, read), RawClient(running.port) as client:
        client.send(peer.request(1, b"0", request_to("Read")))
        ping = client.until(is_ping)
        for n in range(1, 6):
            client.send(peer.request(2 * n + 1, b"%d" % n, request_to("Read")))
            client.until_last(2 * n + 1)
        assert running.server.misuse.unconfirmed_count == 2
        for _ in range(2):
            client.frames.clear()
            client.send(peer.ping(ping.payload, is_ack=True))
            if len(read) < 1:
                client.until(is_ping)
        client.pong()
        assert read == [b"0", b"1", b"2", b"3"]
