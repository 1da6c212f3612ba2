"""What a call held is free when it has ended, and not when the garbage collector comes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.support import http2_peer as peer
from tests.support.eventually import eventually
from tests.support.rpc_server import RawClient, Running, request_to, rpc_server
from tidemill.transport.aio.call import RpcCall
from tidemill.transport.http2 import frames
from tidemill.transport.http2.limits import Limits

CALLS = 50


@pytest.fixture(autouse=True)
def _without_a_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def calls_left() -> int:
    return sum(isinstance(one, RpcCall) for one in gc.get_objects())


def everything_is_free(running: Running) -> None:
    eventually(lambda: not running.server.ending and running.server.call_count == 0)
    eventually(lambda: calls_left() == 0)
    assert running.server.account.bytes == 0


@pytest.mark.parametrize("method", ["Hang", "Exchange", "Batch", "Fail", "Echo"])
def test_calls_that_have_ended_leave_nothing(method: str) -> None:
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


def test_calls_of_a_connection_that_is_lost_leave_nothing() -> None:
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


def test_connections_of_one_address_share_what_it_holds_and_it_is_forgotten_with_them() -> None:
    def addresses(running: Running) -> dict[str, int]:
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
