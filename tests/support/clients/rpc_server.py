"""Our gRPC server in a thread of the test, and a raw client for it.

The server is the real one, with real sockets on loopback. The client sends bytes on a socket, so a
test may send data that no library would.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import uvloop

from tests.support.clients import http2_peer as peer
from tests.support.clients.binary_fields import decode_binary
from tests.support.clients.http2_peer import Frame
from tidemill.transport.aio import metrics
from tidemill.transport.aio.call import RpcCall, RpcMethod, bidirectional, server_streaming, unary
from tidemill.transport.aio.listener import ListenSettings
from tidemill.transport.aio.server import HELD_BYTES_MAX, MESSAGE_BYTES_MAX, RpcServer
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2 import frames
from tidemill.transport.http2.limits import Limit, Limits

SERVICE = "tidemill.test.Transport"
WAIT_S = 20.0  # much more than loopback needs
BATCH_SIZE = 16
# A client that reads as fast as possible; the connection's window never closes.
GREETING = peer.CLIENT_GREETING + peer.window_update(0, 1 << 30)


class Calls:
    """The methods of the server, and the ends of their calls."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.sent_counts: list[int] = []
        self.started = threading.Semaphore(0)
        self.released = asyncio.Event()  # lets `Hold` continue; set it in the loop of the server

    def methods(self) -> Mapping[str, RpcMethod]:
        return {
            f"/{SERVICE}/Echo": unary(self._echo),
            f"/{SERVICE}/Fail": unary(self._fail),
            f"/{SERVICE}/Raise": unary(self._raise),
            f"/{SERVICE}/Large": unary(self._large),
            f"/{SERVICE}/Meta": unary(self._meta),
            f"/{SERVICE}/Hang": unary(self._hang),
            f"/{SERVICE}/Hold": unary(self._hold),
            f"/{SERVICE}/Batch": server_streaming(self._batch),
            f"/{SERVICE}/Endless": server_streaming(self._endless),
            f"/{SERVICE}/Exchange": bidirectional(self._exchange),
        }

    async def _echo(self, _call: RpcCall, request: bytes) -> bytes:
        return request

    async def _fail(self, _call: RpcCall, request: bytes) -> bytes:
        """End with the status in the request: `5 no such thing`."""
        code, _, message = request.decode().partition(" ")
        if int(code) == RpcCode.OK:
            return b""
        raise RpcError(RpcCode(int(code)), message)

    async def _raise(self, _call: RpcCall, request: bytes) -> bytes:
        raise LookupError(request.decode())

    async def _large(self, _call: RpcCall, request: bytes) -> bytes:
        """Respond with as many bytes as the request says."""
        return bytes(int(request))

    async def _meta(self, call: RpcCall, request: bytes) -> bytes:
        """Respond with the metadata that the request names, each in hex."""
        name = request.decode()
        values = call.metadata[name].split(",") if name in call.metadata else []
        raw = [decode_binary(one) if name.endswith("-bin") else one.encode() for one in values]
        return b" ".join(one.hex().encode() for one in raw)

    async def _hang(self, _call: RpcCall, request: bytes) -> bytes:
        self.started.release()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.decode())
            raise
        return b""

    async def _hold(self, _call: RpcCall, request: bytes) -> bytes:
        self.started.release()
        await self.released.wait()
        return request

    async def _batch(self, call: RpcCall, request: bytes) -> None:
        await call.send_all([request] * BATCH_SIZE)

    async def _endless(self, call: RpcCall, request: bytes) -> None:
        """Send the request many times, in batches, until the call ends."""
        self.started.release()
        try:
            while True:
                await call.send_all([request] * BATCH_SIZE)
        finally:
            self.sent_counts.append(call.sent_count)

    async def _exchange(self, call: RpcCall) -> None:
        async for request in call:
            await call.send(request)


class RunningServer:
    """A server that serves in its thread."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.server: RpcServer
        self.loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    @property
    def port(self) -> int:
        return int(self.server.address.rpartition(":")[2])

    @property
    def address(self) -> str:
        return self.server.address

    def hits(self, limit: Limit) -> int:
        """Return how often a limit was exceeded, from the metrics."""
        [family] = [one for one in metrics.collect(self.server) if "limit_hits" in one.name]
        [sample] = [one for one in family.samples if one.labels == {"limit": limit.value}]
        assert sample.name == "rocketmq_grpc_limit_hits_total"
        return int(sample.value)

    def run(self, call: Callable[[], object]) -> None:
        """Call a function in the server's loop, and wait until it has run."""
        done = threading.Event()

        def called() -> None:
            call()
            done.set()

        self.loop.call_soon_threadsafe(called)
        assert done.wait(WAIT_S)

    def drain(self, timeout_s: float = WAIT_S) -> None:
        """Drain the server, and wait for the end."""
        asyncio.run_coroutine_threadsafe(self.server.drain(timeout_s), self.loop).result(WAIT_S)

    def start_drain(self) -> Any:
        return asyncio.run_coroutine_threadsafe(self.server.drain(WAIT_S), self.loop)


@contextlib.contextmanager
def rpc_server(
    limits: Limits | None = None,
    *,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    held_bytes_max: int = HELD_BYTES_MAX,
    more_methods: Mapping[str, RpcMethod] | None = None,
    **listen: Any,
) -> Iterator[RunningServer]:
    """Run a server for the block on a free port of loopback."""
    ready: threading.Event = threading.Event()
    failures: list[BaseException] = []
    running: RunningServer

    async def serve() -> None:
        nonlocal running
        running = RunningServer(Calls())
        running.loop, running._stop = asyncio.get_running_loop(), asyncio.Event()
        running.server = RpcServer(
            {**running.calls.methods(), **(more_methods or {})},
            limits or Limits(),
            ListenSettings(**{"host": "127.0.0.1", "port": 0, **listen}),
            message_bytes_max=message_bytes_max,
            held_bytes_max=held_bytes_max,
        )
        async with running.server.serving():
            ready.set()
            await running._stop.wait()

    def run() -> None:
        try:
            uvloop.run(serve())
        except BaseException as error:  # noqa: BLE001  # Raised again in the test's own thread.
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="rpc server")
    thread.start()
    assert ready.wait(WAIT_S)
    try:
        if failures:
            raise failures[0]
        yield running
    finally:
        if not failures:
            running.loop.call_soon_threadsafe(running._stop.set)
        thread.join(WAIT_S)
    assert not thread.is_alive()
    assert not failures, failures


class RawClient:
    """A socket that speaks frames."""

    def __init__(
        self, port: int, greeting: bytes = GREETING, tls: ssl.SSLContext | None = None
    ) -> None:
        plain = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = tls.wrap_socket(plain, server_hostname="localhost") if tls else plain
        self.frames: list[Frame] = []
        self.is_ended = False
        self._rest = b""
        if greeting:
            self.send(greeting)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.socket.close()

    def send(self, raw: bytes) -> None:
        self.socket.sendall(raw)

    def send_if_open(self, raw: bytes) -> None:
        """Send; if the server has already closed, the next read notices."""
        with contextlib.suppress(OSError):
            self.socket.sendall(raw)

    def read(self) -> list[Frame]:
        """Return the frames of one read; none at the end."""
        try:
            raw = self.socket.recv(1 << 18)
        except ConnectionResetError:
            raw = b""
        self.is_ended = not raw
        found, self._rest = peer.parse_some(self._rest + raw)
        self.frames += found
        return found

    def until(self, is_it: Callable[[Frame], bool]) -> Frame:
        """Read until the expected frame, and return it."""
        for one in self.frames:
            if is_it(one):
                return one
        while True:
            for one in self.read():
                if is_it(one):
                    return one
            assert not self.is_ended, f"the server closed after {self.frames}"

    def until_last(self, stream_id: int) -> Frame:
        """Read until the last frame of a stream, and return it."""
        return self.until(lambda one: one.stream_id == stream_id and one.is_last)

    def to_the_end(self) -> list[Frame]:
        """Read until the server closes; return all data."""
        while not self.is_ended:
            self.read()
        return self.frames

    def pong(self, payload: bytes = b"are you?") -> None:
        """Wait until the server has read all data sent so far."""
        self.send(peer.ping(payload))
        self.until(lambda one: one.kind == frames.PING and one.payload == payload)
        self.frames = [one for one in self.frames if one.payload != payload]

    def call(self, stream_id: int, message: bytes = b"hello", method: str = "Echo") -> bytes:
        """Make a unary call; return the content of its response."""
        self.send(peer.request(stream_id, message, request_to(method)))
        last = self.until_last(stream_id)
        assert peer.fields_of(last.payload)["grpc-status"] == "0"
        return peer.content(self.frames, stream_id)


def request_to(method: str, *more: tuple[str, str]) -> peer.Fields:
    fields = dict(peer.GRPC_REQUEST)
    fields[":path"] = f"/{SERVICE}/{method}"
    return (*fields.items(), *more)
