"""The server over real sockets, mostly with grpcio as its client."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from random import Random

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.e2e.conftest import Certificates
from tests.support.clients import http2_peer as peer
from tests.support.clients.http2_peer import grpc_message
from tests.support.clients.rpc_server import (
    BATCH_SIZE,
    GREETING,
    SERVICE,
    WAIT_S,
    RawClient,
    RunningServer,
    request_to,
    rpc_server,
)
from tests.support.eventually import eventually
from tidemill.transport.aio import health as health_service
from tidemill.transport.aio import reflection, server, server_protocol
from tidemill.transport.aio.call import RpcCall, server_streaming, unary
from tidemill.transport.aio.health import HealthService
from tidemill.transport.aio.server import DRAINED_PER_STEP, drain_steps
from tidemill.transport.aio.writer import BUFFER_BYTES
from tidemill.transport.http2 import frames
from tidemill.transport.http2.frames import ErrorCode, Setting
from tidemill.transport.http2.limits import Limit, Limits

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Client:
    """Methods of the test server by name, on a channel of grpcio."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def unary(self, method: str) -> grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]:
        return self.channel.unary_unary(f"/{SERVICE}/{method}")

    def stream(self, method: str) -> grpc.aio.UnaryStreamMultiCallable[bytes, bytes]:
        return self.channel.unary_stream(f"/{SERVICE}/{method}")

    def exchange(self) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        return self.channel.stream_stream(f"/{SERVICE}/Exchange")(timeout=WAIT_S)


def with_client(running: RunningServer, use: Callable[[Client], Awaitable[None]]) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(running.address, options=UNLIMITED) as channel:
            await use(Client(channel))

    asyncio.run(run())


async def failure(call: Awaitable[bytes]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value


# ---------------------------------------------------------------- calls of every kind


def test_calls_of_every_kind_are_answered() -> None:
    async def use(client: Client) -> None:
        assert await client.unary("Echo")(b"hello", timeout=WAIT_S) == b"hello"
        assert await client.unary("Echo")(b"", timeout=WAIT_S) == b""
        received = [one async for one in client.stream("Batch")(b"again", timeout=WAIT_S)]
        assert received == [b"again"] * BATCH_SIZE
        call = client.exchange()
        for number in range(50):
            await call.write(b"%d" % number)
            assert await call.read() == b"%d" % number
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK

    with rpc_server() as running:
        with_client(running, use)


def test_large_messages_go_both_ways_at_the_same_time() -> None:
    """More than the budget of a connection holds at once."""
    random = Random(3)
    messages = [random.randbytes(size) for size in (65_530, 65_531, 1 << 20, 5_000_000, 5_000_001)]

    async def use(client: Client) -> None:
        calls = [client.unary("Echo")(one, timeout=WAIT_S) for one in messages * 3]
        assert await asyncio.gather(*calls) == messages * 3

    with rpc_server(message_bytes_max=8 << 20) as running:
        with_client(running, use)


@pytest.mark.parametrize("text", ["plain", "100 % grün 🌊", "淘" * 5_000, ""])
def test_a_status_and_its_message_reach_the_client(text: str) -> None:
    async def use(client: Client) -> None:
        failed = await failure(client.unary("Fail")(f"5 {text}".encode(), timeout=WAIT_S))
        assert failed.code() is grpc.StatusCode.NOT_FOUND
        details = failed.details() or ""
        assert text.startswith(details)
        assert len(details) >= min(len(text), 400)

    with rpc_server() as running:
        with_client(running, use)


def test_an_exception_of_a_handler_is_unknown_without_details() -> None:
    async def use(client: Client) -> None:
        failed = await failure(client.unary("Raise")(b"secret", timeout=WAIT_S))
        assert failed.code() is grpc.StatusCode.UNKNOWN
        assert "secret" not in (failed.details() or "")

    with rpc_server() as running:
        with_client(running, use)


# ---------------------------------------------------------------- time and cancellation


def test_a_call_after_its_deadline_is_ended_and_its_handler_cancelled() -> None:
    with rpc_server() as running, RawClient(running.port) as client:
        fields = request_to("Hang", ("grpc-timeout", "60m"))
        client.send(peer.request(1, b"late", fields))
        trailers = client.until(lambda one: one.stream_id == 1 and one.is_last)
        assert peer.fields_of(trailers.payload)["grpc-status"] == "4"
        eventually(lambda: running.calls.cancelled == ["late"])
        assert running.server.call_count == 0


def test_a_cancelled_call_cancels_its_handler() -> None:
    async def use(client: Client) -> None:
        call = client.unary("Hang")(b"cancelled", timeout=WAIT_S)
        hanging = asyncio.ensure_future(call)
        assert await asyncio.to_thread(running.calls.started.acquire, timeout=WAIT_S)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hanging

    with rpc_server() as running:
        with_client(running, use)
        eventually(lambda: running.calls.cancelled == ["cancelled"])
        eventually(lambda: running.server.call_count == 0)


def test_a_lost_connection_cancels_its_handlers() -> None:
    with rpc_server() as running:
        with RawClient(running.port) as client:
            for n in range(3):
                client.send(peer.request(2 * n + 1, b"lost", request_to("Hang")))
            for _ in range(3):
                assert running.calls.started.acquire(timeout=WAIT_S)
        eventually(lambda: running.calls.cancelled == ["lost"] * 3)
        eventually(lambda: not running.server.connections)


def test_a_call_that_is_cancelled_before_its_handler_starts_is_removed() -> None:
    with rpc_server() as running, RawClient(running.port) as client:
        client.send(peer.request(1, b"never", request_to("Hang")) + peer.rst_stream(1))
        client.pong()
        client.pong()  # The loop has had a turn.
        assert running.server.call_count == 0


def test_a_deadline_leaves_nothing_behind_if_its_call_ends_before() -> None:
    with rpc_server() as running, RawClient(running.port) as client:
        for n in range(50):
            fields = request_to("Echo", ("grpc-timeout", f"{n + 1}H"))
            client.send(peer.request(2 * n + 1, b"quick", fields))
        client.until(lambda one: one.stream_id == 99 and one.is_last)
        assert len(running.server.deadlines) < 10


# ---------------------------------------------------------------- slow readers


def test_a_slow_reader_delays_only_its_own_stream() -> None:
    greeting = frames.PREFACE + peer.settings({Setting.INITIAL_WINDOW_SIZE: 50_000})
    with rpc_server() as running:
        with RawClient(running.port, greeting + peer.window_update(0, 1 << 30)) as client:
            client.send(peer.request(1, b"x" * 10_000, request_to("Endless")))
            eventually(lambda: _received(client, 1) == 50_000)
            for stream_id in (3, 5, 7):
                assert client.call(stream_id) == grpc_message(b"hello")
            assert _received(client, 1) == 50_000
            [connection] = running.server.connections
            held = connection._connection.http.queued_bytes
            assert 0 < held <= 256 << 10
            client.send(peer.window_update(1, 30_000))
            eventually(lambda: _received(client, 1) == 80_000)
        eventually(lambda: running.calls.sent_counts)


def _received(client: RawClient, stream_id: int) -> int:
    client.pong()
    return len(peer.content(client.frames, stream_id))


@pytest.mark.parametrize(
    ("window_bytes", "whole_count"), [(0, 0), (1_004, 0), (1_005, 1), (7_034, 6)]
)
def test_a_handler_knows_how_many_messages_were_sent_at_a_cancel(
    window_bytes: int, whole_count: int
) -> None:
    greeting = frames.PREFACE + peer.settings({Setting.INITIAL_WINDOW_SIZE: window_bytes})
    with rpc_server() as running, RawClient(running.port, greeting) as client:
        client.send(peer.request(1, b"x" * 1_000, request_to("Endless")))
        assert running.calls.started.acquire(timeout=WAIT_S)
        eventually(lambda: _received(client, 1) == window_bytes)
        client.send(peer.rst_stream(1))
        eventually(lambda: running.calls.sent_counts == [whole_count])


def test_a_grpcio_client_that_does_not_read_delays_only_itself() -> None:
    async def use(client: Client) -> None:
        endless = client.stream("Endless")(b"x" * 10_000, timeout=WAIT_S)
        assert await endless.read() == b"x" * 10_000
        for _ in range(20):
            assert await client.unary("Echo")(b"hello", timeout=WAIT_S) == b"hello"
        endless.cancel()

    with rpc_server() as running:
        with_client(running, use)
        eventually(lambda: running.calls.sent_counts)


# ---------------------------------------------------------------- the end of a server


def test_a_drain_lets_calls_end_and_accepts_no_new_ones() -> None:
    with rpc_server() as running, RawClient(running.port) as client:
        client.send(peer.request(1, b"held", request_to("Hold")))
        client.send(peer.headers(3, request_to("Exchange")))
        assert running.calls.started.acquire(timeout=WAIT_S)
        draining = running.start_drain()
        ping = client.until(lambda one: one.kind == frames.PING and not one.flags)
        [announced] = peer.of(frames.GOAWAY, client.frames)
        assert announced.payload[:4] == b"\x7f\xff\xff\xff"
        # A stream of requests ends with OK.
        trailers = client.until(lambda one: one.stream_id == 3 and one.is_last)
        assert peer.fields_of(trailers.payload)["grpc-status"] == "0"
        # Calls in flight are served, and no later ones.
        assert client.call(5) == grpc_message(b"hello")
        client.send(peer.ping(ping.payload, is_ack=True) + peer.request(7, b"new"))
        refused = client.until(lambda one: one.kind == frames.RST_STREAM and one.stream_id == 7)
        assert refused.number == ErrorCode.REFUSED_STREAM
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S)
        assert not draining.done()
        running.run(running.calls.released.set)
        last = client.until(lambda one: one.stream_id == 1 and one.is_last)
        assert peer.fields_of(last.payload)["grpc-status"] == "0"
        draining.result(WAIT_S)


def test_a_drain_answers_calls_that_a_client_started_before_it_knew() -> None:
    with rpc_server() as running, RawClient(running.port) as client:
        assert client.call(1) == grpc_message(b"hello")
        draining = running.start_drain()
        ping = client.until(lambda one: one.kind == frames.PING and one.payload == b"draining")
        assert not draining.done()  # No call is in progress.
        assert client.call(3) == grpc_message(b"hello")
        assert not draining.done()
        client.send(peer.ping(ping.payload, is_ack=True))
        draining.result(WAIT_S)


def answer_pings(client: RawClient) -> None:
    """Answer each ping until the server ends the connection."""
    while not client.is_ended:
        for one in client.read():
            if one.kind == frames.PING and not one.flags:
                client.send_if_open(peer.ping(one.payload, is_ack=True))


def test_a_drained_server_stops_although_a_client_keeps_its_tls_connection_open(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gRPC's C core does while a reference to a call exists."""
    for module in (server, server_protocol):
        monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 10 * WAIT_S)
    trust = ssl.create_default_context(cafile=certificates.authority)
    with contextlib.ExitStack() as opened:
        running = opened.enter_context(
            rpc_server(
                tls="required",
                tls_certificate_file=str(certificates.folder / "server.crt"),
                tls_key_file=str(certificates.folder / "server.key"),
            )
        )
        with RawClient(running.port, tls=trust) as client:
            assert client.call(1) == grpc_message(b"hello")
            answering = threading.Thread(target=answer_pings, args=(client,))
            answering.start()
            running.drain()
            opened.close()  # It waits for the end of the server, before that of the client.
            answering.join(WAIT_S)


def test_a_grpcio_client_survives_a_drain_with_all_calls_answered() -> None:
    async def use(client: Client) -> None:
        held = client.unary("Hold")(b"held", timeout=WAIT_S)
        exchange = client.exchange()
        await exchange.write(b"one")
        assert await exchange.read() == b"one"
        waiting = asyncio.ensure_future(held)
        assert await asyncio.to_thread(running.calls.started.acquire, timeout=WAIT_S)
        draining = running.start_drain()
        assert await exchange.read() is grpc.aio.EOF
        assert await exchange.code() is grpc.StatusCode.OK
        assert (await failure(client.unary("Echo")(b"new", timeout=WAIT_S))).code() is (
            grpc.StatusCode.UNAVAILABLE
        )
        running.loop.call_soon_threadsafe(running.calls.released.set)
        assert await waiting == b"held"
        await asyncio.to_thread(draining.result, WAIT_S)

    with rpc_server() as running:
        with_client(running, use)


def test_connections_in_the_backlog_are_asked_to_leave_at_a_drain() -> None:
    """At the end the kernel resets an established connection that was not accepted."""
    clients: list[RawClient] = []
    with rpc_server() as running:

        def connect_and_drain() -> None:
            # In the server's loop, so that it accepts nothing meanwhile.
            clients.extend(RawClient(running.port) for _ in range(3))
            asyncio.ensure_future(running.server.drain(WAIT_S))  # noqa: RUF006  # It is short.

        running.run(connect_and_drain)
        for client in clients:
            with client:
                goaway = client.until(lambda one: one.kind == frames.GOAWAY)
                assert int.from_bytes(goaway.payload[4:8], "big") == ErrorCode.NO_ERROR


def test_many_connections_are_asked_to_leave_in_steps() -> None:
    async def drain(running: RunningServer) -> int:
        draining = asyncio.ensure_future(running.server.drain(WAIT_S))
        await asyncio.sleep(0)  # The first step has happened, and no later one.
        told_count = sum(one.is_drain_announced for one in running.server.connections)
        await draining
        return told_count

    with rpc_server() as running, contextlib.ExitStack() as opened:
        clients = [
            opened.enter_context(RawClient(running.port)) for _ in range(DRAINED_PER_STEP * 3)
        ]
        for client in clients:
            assert client.call(1)
        counts = asyncio.run_coroutine_threadsafe(drain(running), running.loop).result(WAIT_S)
        assert counts == DRAINED_PER_STEP
        for client in clients:
            client.until(lambda one: one.kind == frames.GOAWAY)


def test_asking_many_connections_to_leave_takes_a_part_of_a_drain() -> None:
    assert [drain_steps(count, 1.0) for count in (0, 1, DRAINED_PER_STEP + 1)] == [1, 1, 2]
    assert drain_steps(100_000, 1.0) == 100
    assert drain_steps(100_000, 0.0) == 1


def test_a_drain_waits_until_a_new_client_can_be_asked_to_leave() -> None:
    with rpc_server() as running, RawClient(running.port, greeting=b"") as client:
        eventually(lambda: running.server.accepted_count)
        draining = running.start_drain()
        eventually(lambda: running.server.is_draining)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S)
        assert not draining.done()
        client.send(GREETING)
        client.until(lambda one: one.kind == frames.GOAWAY)
        draining.result(WAIT_S)


def test_a_client_that_was_asked_to_leave_reconnects_to_another_server_of_the_port() -> None:
    with (
        rpc_server(reuse_port=True) as first,
        rpc_server(reuse_port=True, port=first.port) as second,
        contextlib.ExitStack() as opened,
    ):
        clients = []
        while not second.server.accepted_count:
            clients.append(opened.enter_context(RawClient(first.port)))
            assert clients[-1].call(1)
        draining = second.start_drain()
        clients[-1].until(lambda one: one.kind == frames.GOAWAY)
        for _ in range(20):
            with RawClient(first.port) as client:
                assert client.call(1)
        draining.result(WAIT_S)
        assert second.server.accepted_count == 1


def test_an_old_connection_is_asked_to_leave_and_its_calls_end() -> None:
    limits = Limits(age_max_s=0.01, age_grace_s=WAIT_S)
    with rpc_server(limits) as running, RawClient(running.port) as client:
        client.send(peer.request(1, b"held", request_to("Hold")))
        client.send(peer.headers(3, request_to("Exchange")))
        goaway = client.until(lambda one: one.kind == frames.GOAWAY)
        assert int.from_bytes(goaway.payload[4:8], "big") == ErrorCode.NO_ERROR
        client.until(lambda one: one.stream_id == 3 and one.is_last)
        running.run(running.calls.released.set)
        last = client.until(lambda one: one.stream_id == 1 and one.is_last)
        assert peer.fields_of(last.payload)["grpc-status"] == "0"
        client.to_the_end()
        assert running.hits(Limit.AGE) == 1


def test_the_calls_of_an_old_connection_are_ended_after_a_grace_time() -> None:
    limits = Limits(age_max_s=0.01, age_grace_s=0.01)
    with rpc_server(limits) as running, RawClient(running.port) as client:
        client.send(peer.request(1, b"forever", request_to("Hang")))
        client.to_the_end()
        eventually(lambda: running.calls.cancelled == ["forever"])


def test_a_grpcio_client_does_not_notice_the_age_limit() -> None:
    async def use(client: Client) -> None:
        while running.server.accepted_count < 3:
            assert await client.unary("Echo")(b"hello", timeout=WAIT_S) == b"hello"

    with rpc_server(Limits(age_max_s=0.01)) as running:
        with_client(running, use)


def test_two_servers_share_a_port() -> None:
    with (
        rpc_server(reuse_port=True) as first,
        rpc_server(reuse_port=True, port=first.port) as second,
    ):
        for _ in range(40):
            with RawClient(first.port) as client:
                assert client.call(1)
        assert first.server.accepted_count > 0
        assert second.server.accepted_count > 0
        second.drain()


# ---------------------------------------------------------------- TLS


def test_tls_negotiates_http_2(certificates: Certificates) -> None:
    context = ssl.create_default_context(cafile=certificates.authority)
    context.set_alpn_protocols(["h2", "http/1.1"])
    with rpc_server(tls="required", **certificates.served) as running:
        with RawClient(running.port, tls=context) as client:
            assert isinstance(client.socket, ssl.SSLSocket)
            assert client.socket.selected_alpn_protocol() == "h2"
            assert client.call(1) == grpc_message(b"hello")
        with RawClient(running.port) as plain:
            assert peer.of(frames.SETTINGS, plain.to_the_end()) == []


def test_both_kinds_of_clients_are_served_on_one_port(certificates: Certificates) -> None:
    context = ssl.create_default_context(cafile=certificates.authority)
    with rpc_server(tls="optional", **certificates.served) as running:
        for tls in (None, context, None, context):
            with RawClient(running.port, tls=tls) as client:
                assert client.call(1) == grpc_message(b"hello")


@pytest.mark.parametrize("shows_certificate", [True, False])
def test_grpcio_presents_its_certificate_on_request(
    certificates: Certificates, shows_certificate: bool
) -> None:
    files = [certificates.authority, *reversed(certificates.client)]
    authority, key, chain = (Path(one).read_bytes() for one in files)
    credentials = grpc.ssl_channel_credentials(
        authority, *((key, chain) if shows_certificate else (None, None))
    )

    async def use(address: str) -> bytes:
        async with grpc.aio.secure_channel(address, credentials) as channel:
            return await Client(channel).unary("Echo")(b"hello", timeout=WAIT_S)

    with rpc_server(
        tls="required", tls_client_ca_file=certificates.authority, **certificates.served
    ) as running:
        address = f"localhost:{running.port}"
        if shows_certificate:
            assert asyncio.run(use(address)) == b"hello"
        else:
            assert asyncio.run(failure(use(address))).code() is grpc.StatusCode.UNAVAILABLE


# ---------------------------------------------------------------- other clients than gRPC


def test_a_client_of_http_1_gets_a_sentence() -> None:
    with rpc_server() as running, RawClient(running.port, greeting=b"") as client:
        client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b"".join(iter(lambda: client.socket.recv(4_096), b""))
    assert answer.startswith(b"HTTP/1.1 505 ")
    assert b"gRPC" in answer


def test_a_browser_gets_a_sentence() -> None:
    fields = ((":method", "GET"), (":scheme", "http"), (":path", "/"), ("accept", "text/html"))
    with rpc_server() as running, RawClient(running.port) as client:
        client.send(peer.headers(1, fields, is_last=True))
        client.until(lambda one: one.stream_id == 1 and one.is_last)
        [headers] = peer.of(frames.HEADERS, client.frames)
        assert peer.fields_of(headers.payload)[":status"] == "405"
        assert b"gRPC" in peer.content(client.frames, 1)
        assert client.call(3)


# ---------------------------------------------------------------- health and reflection


def test_health_and_its_changes_are_reported() -> None:
    check = health_pb2.HealthCheckRequest
    statuses = health_pb2.HealthCheckResponse

    async def use(client: Client) -> None:
        def ask(service: str) -> Awaitable[bytes]:
            path = f"/{health_service.SERVICE}/Check"
            request = check(service=service).SerializeToString()
            unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
            unary = client.channel.unary_unary(path)
            return unary(request, timeout=WAIT_S)

        async def watched() -> AsyncIterator[int]:
            path = f"/{health_service.SERVICE}/Watch"
            watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
            watch = client.channel.unary_stream(path)
            async for one in watch(b"", timeout=WAIT_S):
                yield statuses.FromString(one).status

        for service in ("", SERVICE):
            assert statuses.FromString(await ask(service)).status == statuses.SERVING
        assert (await failure(ask("nobody"))).code() is grpc.StatusCode.NOT_FOUND
        seen = []
        async for status in watched():
            seen.append(status)
            running.loop.call_soon_threadsafe(health.drain)
        assert seen == [statuses.SERVING, statuses.NOT_SERVING]
        assert statuses.FromString(await ask("")).status == statuses.NOT_SERVING

    health = HealthService([SERVICE])
    with rpc_server(more_methods=health.methods()) as running:
        with_client(running, use)


def test_reflection_describes_the_services() -> None:
    methods = reflection.reflection_methods([health_service.SERVICE])
    with (
        rpc_server(more_methods=methods) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        database = ProtoReflectionDescriptorDatabase(channel)
        assert health_service.SERVICE in database.get_services()
        file = database.FindFileContainingSymbol(health_service.SERVICE)
        assert [one.name for one in file.service] == ["Health"]


def test_the_first_frames_of_these_tests_are_accepted() -> None:
    connection = peer.greeted_server()
    assert connection.receive(GREETING.removeprefix(frames.PREFACE), 0.0) == []


def test_calls_get_room_for_their_replies_in_order() -> None:
    taken: list[str] = []

    async def take(call: RpcCall, request: bytes) -> bytes:
        """Take as many bytes as the request says, within its milliseconds, and keep them."""
        size, _, timeout_ms = request.decode().partition(" ")
        is_taken = await call.hold_in_turn(int(size), timeout_s=int(timeout_ms) / 1000)
        taken.append(f"{size} {is_taken} {call.has_room(0)}")
        if is_taken:
            await asyncio.Event().wait()
        return b"none"

    methods = {f"/{SERVICE}/Take": unary(take)}
    limits = Limits(held_bytes_max=100_000)
    with rpc_server(limits, more_methods=methods) as running, RawClient(running.port) as client:
        for stream_id, wanted in ((1, b"60000 20000"), (3, b"60001 20000"), (5, b"100 20000")):
            client.send(peer.request(stream_id, wanted, request_to("Take")))
        assert client.call(7) == grpc_message(b"hello")
        assert taken == ["60000 True True"], "the last one would fit, and waits for its turn"
        assert client.call(9, b"50 1", "Take") == grpc_message(b"none")
        assert taken.pop() == "50 False False"
        client.send(peer.rst_stream(1))
        client.pong()
        eventually(lambda: len(taken) == 3)
        assert taken[1:] == ["60001 True True", "100 True True"]
        # A waiting call that ends blocks no other call and takes nothing.
        client.send(peer.request(11, b"60002 20000", request_to("Take")) + peer.rst_stream(11))
        client.send(peer.request(13, b"101 20000", request_to("Take")))
        eventually(lambda: len(taken) == 4)
        assert taken[3] == "101 True True"
        client.send(b"".join(peer.rst_stream(one) for one in (3, 5, 13)))
        eventually(lambda: running.server.account.bytes < 10_000)


def test_the_transport_holds_one_of_many_large_messages_while_the_client_does_not_read() -> None:
    size, calls = 4 << 20, 6
    released = asyncio.Event()

    async def late(call: RpcCall, request: bytes) -> None:
        """Send a large message when all calls may."""
        await released.wait()
        await call.send(bytes(size))

    methods = {f"/{SERVICE}/Late": server_streaming(late)}
    greeting = (
        frames.PREFACE
        + peer.settings({Setting.INITIAL_WINDOW_SIZE: 1 << 30})
        + peer.window_update(0, 1 << 30)
    )
    with rpc_server(more_methods=methods) as running, RawClient(running.port, greeting) as client:
        for number in range(calls):
            client.send(peer.request(2 * number + 1, b"", request_to("Late")))
        client.pong()
        [connection] = running.server.connections
        running.run(released.set)
        eventually(lambda: connection.is_paused)
        for _ in range(5):  # turns of the loop, enough for all calls
            running.run(lambda: None)
        assert connection._writer.buffered_bytes < size + BUFFER_BYTES
        for number in range(calls):
            client.until_last(2 * number + 1)
            assert len(peer.content(client.frames, 2 * number + 1)) == size + 5
