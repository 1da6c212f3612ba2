"""Each limit by its name: a client over the limit is disconnected or rejected, and counted.

Other clients are served. Time limits are fractions of a second here; the server checks every
second.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

from tests.e2e.conftest import Certificates
from tests.support.clients import http2_peer as peer
from tests.support.clients.rpc_server import (
    WAIT_S,
    RawClient,
    RunningServer,
    request_to,
    rpc_server,
)
from tests.support.eventually import eventually
from tidemill.transport.http2 import frames
from tidemill.transport.http2.frames import ErrorCode, Setting
from tidemill.transport.http2.limits import Limit, Limits

MESSAGE_BYTES_MAX = 1 << 20
NO_WINDOW = frames.PREFACE + peer.settings({Setting.INITIAL_WINDOW_SIZE: 0})


@dataclass(frozen=True, slots=True)
class Attack:
    """A way to exceed a limit, and the server for it."""

    overstep: Callable[[RunningServer], None]
    limits: Limits = field(default_factory=Limits)
    listen: dict[str, Any] = field(default_factory=dict)


def is_calmed(attacker: RawClient) -> bool:
    """Return whether the server ended the connection because of the limit."""
    last = attacker.to_the_end()[-1]
    code = int.from_bytes(last.payload[4:8], "big")
    return (last.kind, code) == (frames.GOAWAY, ErrorCode.ENHANCE_YOUR_CALM)


def flood(raw: bytes) -> Callable[[RunningServer], None]:
    """Send `raw`, which exceeds the limit, on a started stream."""

    def overstep(running: RunningServer) -> None:
        with RawClient(running.port) as attacker:
            attacker.send(peer.headers(1, request_to("Echo")))
            attacker.send_if_open(raw)
            assert is_calmed(attacker)

    return overstep


def reset_rapidly(running: RunningServer) -> None:
    with RawClient(running.port) as attacker:
        for n in range(Limits().resets_burst + 200):
            stream_id = 2 * n + 1
            request = peer.request(stream_id, b"rapid", request_to("Hang"))
            attacker.send_if_open(request + peer.rst_stream(stream_id))
        assert is_calmed(attacker)
    eventually(lambda: running.server.call_count == 0)


def open_too_many_streams(running: RunningServer) -> None:
    with RawClient(running.port) as attacker:
        for n in range(5):
            attacker.send(peer.request(2 * n + 1, b"many", request_to("Hang")))
        refused = attacker.until(lambda one: one.kind == frames.RST_STREAM)
        assert (refused.stream_id, refused.number) == (9, ErrorCode.REFUSED_STREAM)
        # A client that returns a connection may open another.
        attacker.send(peer.rst_stream(1))
        assert attacker.call(11) == peer.grpc_message(b"hello")


def read_nothing(running: RunningServer) -> None:
    with RawClient(running.port, NO_WINDOW) as attacker:
        attacker.send(peer.request(1, b"200000", request_to("Large")))
        assert is_calmed(attacker)


def keep_a_window_closed(running: RunningServer) -> None:
    with RawClient(running.port, NO_WINDOW) as attacker:
        attacker.send(peer.request(1, b"1000", request_to("Large")))
        attacker.send(peer.request(3, b"keeps the connection", request_to("Hang")))
        reset = attacker.until(lambda one: one.kind == frames.RST_STREAM)
        assert (reset.stream_id, reset.number) == (1, ErrorCode.CANCEL)
        attacker.pong()


def say_nothing(running: RunningServer) -> None:
    with RawClient(running.port, greeting=b"") as attacker:
        attacker.send(frames.PREFACE[:7])
        attacker.to_the_end()


def send_half_a_request(running: RunningServer) -> None:
    with RawClient(running.port) as attacker:
        half = peer.data(1, peer.grpc_message(b"half", length=1_000))
        attacker.send(peer.headers(1, request_to("Echo")) + half)
        trailers = attacker.until(lambda one: one.stream_id == 1 and one.is_last)
        assert peer.fields_of(trailers.payload)["grpc-status"] == "4"


def stay_idle(running: RunningServer) -> None:
    with RawClient(running.port) as idle:
        last = idle.to_the_end()[-1]
        assert (last.kind, last.payload[4:8]) == (frames.GOAWAY, bytes(4))


def answer_no_ping(running: RunningServer) -> None:
    with RawClient(running.port) as dead:
        dead.send(peer.request(1, b"dead", request_to("Hang")))
        dead.to_the_end()
        assert peer.of(frames.PING, dead.frames)


def open_too_many_connections(running: RunningServer) -> None:
    with contextlib.ExitStack() as opened:
        for _ in range(2):
            opened.enter_context(RawClient(running.port)).pong()
        refused = RawClient(running.port, greeting=b"")
        assert opened.enter_context(refused).to_the_end() == []
    # A closed connection makes room.
    eventually(lambda: len(running.server.connections) == 1)
    with RawClient(running.port) as again:
        again.pong()


def hold_too_much(running: RunningServer) -> None:
    with RawClient(running.port) as attacker:
        for n in range(4):
            attacker.send(peer.request(2 * n + 1, bytes(10_000), request_to("Hang")))
        trailers = attacker.until(lambda one: one.stream_id == 7 and one.is_last)
        assert peer.fields_of(trailers.payload)["grpc-status"] == "8"
        # A client that returns room may use it again.
        attacker.send(peer.rst_stream(1))
        assert attacker.call(9) == peer.grpc_message(b"hello")


def send_a_message_that_is_too_large(running: RunningServer) -> None:
    with RawClient(running.port) as attacker:
        too_long = peer.grpc_message(b"", length=MESSAGE_BYTES_MAX + 1)
        attacker.send(peer.headers(1, request_to("Echo")) + peer.data(1, too_long))
        trailers = attacker.until(lambda one: one.stream_id == 1 and one.is_last)
        assert peer.fields_of(trailers.payload)["grpc-status"] == "8"
        assert attacker.call(3)


# One field of 4 KiB in the table, and its index many times: a megabyte from 4 KiB.
BOMB = b"\x40\x01a\x7f\xa1\x1e" + b"v" * 4_000 + b"\xbe" * 300
SECONDS = 0.2

ATTACKS = {
    Limit.CONTINUATIONS: Attack(
        flood(
            peer.headers(3, is_complete=False)
            + peer.continuation(3, b"", is_complete=False) * Limits().continuations_max
        )
    ),
    Limit.HEADER_BYTES: Attack(
        flood(peer.frame(frames.HEADERS, BOMB, stream_id=3, flags=frames.END_HEADERS))
    ),
    Limit.STREAMS: Attack(open_too_many_streams, Limits(streams_max=4)),
    Limit.RESETS: Attack(reset_rapidly),
    Limit.SETTINGS: Attack(flood(peer.settings() * 40)),
    Limit.PINGS: Attack(flood(peer.ping() * 300)),
    Limit.EMPTY_DATA: Attack(flood(peer.data(1) * 300)),
    Limit.CONTROL: Attack(flood(peer.window_update(1, 1) * 5_000)),
    Limit.UNREAD: Attack(read_nothing, Limits(unread_bytes_max=100_000)),
    Limit.STALLED: Attack(keep_a_window_closed, Limits(stall_timeout_s=SECONDS)),
    Limit.HANDSHAKE: Attack(say_nothing, Limits(handshake_timeout_s=SECONDS)),
    Limit.REQUEST: Attack(send_half_a_request, Limits(stall_timeout_s=SECONDS)),
    Limit.IDLE: Attack(stay_idle, Limits(idle_timeout_s=SECONDS)),
    Limit.KEEPALIVE: Attack(
        answer_no_ping, Limits(keepalive_period_s=SECONDS, keepalive_timeout_s=SECONDS)
    ),
    Limit.CONNECTIONS: Attack(open_too_many_connections, listen={"connections_max": 3}),
    Limit.CONNECTIONS_PER_ADDRESS: Attack(
        open_too_many_connections, listen={"connections_per_address_max": 3}
    ),
    Limit.MEMORY: Attack(hold_too_much, Limits(held_bytes_max=50_000)),
    Limit.MESSAGE_BYTES: Attack(send_a_message_that_is_too_large),
}


def test_every_limit_is_exceeded_here() -> None:
    # Age is an ordinary end of a connection; see test_server.py.
    assert set(ATTACKS) == set(Limit) - {Limit.AGE}


@pytest.mark.parametrize("limit", ATTACKS)
def test_a_client_over_a_limit_is_ended_and_counted_and_others_are_served(limit: Limit) -> None:
    attack = ATTACKS[limit]
    with (
        rpc_server(attack.limits, message_bytes_max=MESSAGE_BYTES_MAX, **attack.listen) as running,
        HonestClient(running.port) as honest,
    ):
        attack.overstep(running)
        honest.stop()
        assert running.hits(limit) == 1
        others = set(Limit) - {limit}
        assert {other: running.hits(other) for other in others} == dict.fromkeys(others, 0)


class HonestClient:
    """A client that calls all the time; all its calls must be answered."""

    def __init__(self, port: int) -> None:
        self._client = RawClient(port)
        self._thread = threading.Thread(target=self._run, name="honest client")
        self._is_stopped = threading.Event()
        self._called = threading.Event()
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._called.wait(WAIT_S)
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_stopped.set()
        self._thread.join(WAIT_S)

    def stop(self) -> None:
        """Fail unless every call was answered, including one that starts now."""
        self._called.clear()
        assert self._called.wait(WAIT_S), self._failure
        self._is_stopped.set()
        self._thread.join(WAIT_S)
        assert self._failure is None, self._failure

    def _run(self) -> None:
        try:
            stream_id = 1
            with self._client as client:
                while not self._is_stopped.is_set():
                    content = client.call(stream_id, b"x" * 100)
                    assert content == peer.grpc_message(b"x" * 100)
                    client.frames.clear()
                    stream_id += 2
                    self._called.set()
                    # As clients do sometimes; it also paces this one.
                    client.pong()
        except BaseException as error:  # noqa: BLE001  # Told by `stop`, in the test's thread.
            self._failure = error


# ---------------------------------------------------------------- more ways to the same limits


def test_a_slow_tls_handshake_is_ended(certificates: Certificates) -> None:
    with rpc_server(tls="optional", handshake_timeout_s=SECONDS, **certificates.served) as running:
        for begun in (b"", b"\x16\x03\x01"):  # nothing; the start of a TLS record
            with RawClient(running.port, greeting=b"") as attacker:
                attacker.send(begun)
                attacker.to_the_end()
        assert running.hits(Limit.HANDSHAKE) >= 1
        with RawClient(running.port) as honest:
            assert honest.call(1)


def test_an_incomplete_frame_ends_its_connection() -> None:
    with rpc_server(Limits(stall_timeout_s=SECONDS)) as running:
        with RawClient(running.port) as attacker:
            attacker.send(peer.request(1, b"keeps it open", request_to("Hang")) + peer.ping()[:10])
            assert is_calmed(attacker)
        assert running.hits(Limit.REQUEST) == 1


def test_connections_that_are_reset_at_once_are_not_counted() -> None:
    """Their address may be unknown by the time they are served."""
    with rpc_server(connections_per_address_max=5) as running:
        for _ in range(50):
            one = socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        server = running.server

        def accepted() -> int:
            return server.accepted_count + server.misuse.hits[Limit.CONNECTIONS_PER_ADDRESS]

        eventually(lambda: accepted() == 50)
        eventually(lambda: not server.listener._open)
        with RawClient(running.port) as honest:
            assert honest.call(1)


def test_a_client_that_pings_without_calls_stays_connected() -> None:
    """Some clients ping every 10 s for hours. The test gives the core an hour of time."""
    connection = peer.greeted_server(Limits(idle_timeout_s=float("inf")))
    for now_s in range(0, 3_600, 10):
        assert connection.receive(peer.ping(), float(now_s)) == []
        assert connection.check(float(now_s)) == []
        assert connection.take_output() == peer.ping(is_ack=True)
