"""The client's shell around `grpc.client_connection`: streams to one server on one connection.

    async with connected(address, Limits(), ...) as channel:
        stream = channel.open(path, on_message)
        stream.write(request)
        await stream.wait_ended()

A function receives each response in the turn of the event loop in which it arrives. The link
carries the requests of all clients and should not pay for a task switch per frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Final, cast, final

from tidemill.common.addresses import HostPort
from tidemill.transport.aio.writer import Writer
from tidemill.transport.grpc.client_connection import (
    ClientCall,
    ClientConnection,
    ClientEvent,
    ResponseEnded,
    ResponseMessage,
)
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.events import ConnectionEnded
from tidemill.transport.http2.frames import ErrorCode
from tidemill.transport.http2.limits import Limit

if TYPE_CHECKING:
    from tidemill.transport.http2.limits import Limits

CLOSE_TIMEOUT_S: Final = 1.0  # for the server to read our last frames
CHECK_PERIOD_S: Final = 1.0  # between two checks of the server's liveness


@final
class ClientStream:
    """A bidirectional call."""

    def __init__(
        self, protocol: ClientProtocol, call: ClientCall, on_message: Callable[[bytes], None]
    ) -> None:
        self._protocol = protocol
        self.call = call
        self.on_message = on_message
        self.outcome: asyncio.Future[None] = protocol.loop.create_future()

    @property
    def part_heard_at_s(self) -> float:
        """The time of the last input if a response has arrived in part, in monotonic seconds.

        0 if none has.
        """
        is_partial = self.call.reader is not None or self._protocol.is_within_frame
        return self._protocol.heard_at_s if is_partial else 0.0

    def write(self, message: bytes) -> None:
        """Send a request at once without waiting; the caller limits the requests in flight."""
        self._protocol.write(self.call, message)

    def write_last(self, message: bytes) -> None:
        """Send the last or only request."""
        self._protocol.write(self.call, message, is_last=True)

    def cancel(self) -> None:
        """End the call; `on_message` is not called again."""
        self._protocol.cancel(self)

    def fail(self, error: RpcError) -> None:
        """End the call because a response is invalid."""
        if not self.outcome.done():
            self.outcome.set_exception(error)
        self.cancel()

    async def wait_ended(self) -> None:
        """Wait for the end of the call; raise RpcError unless it is OK."""
        await asyncio.shield(self.outcome)


@final
class Channel:
    """A connection to one server."""

    def __init__(self, protocol: ClientProtocol) -> None:
        self._protocol = protocol

    @property
    def heard_at_s(self) -> float:
        """The time of the last input from the server, in monotonic seconds."""
        return self._protocol.heard_at_s

    def open(self, path: str, on_message: Callable[[bytes], None]) -> ClientStream:
        """Begin a bidirectional call; raise RpcError(UNAVAILABLE) if the server accepts no more."""
        return self._protocol.open(path, on_message)


@contextlib.asynccontextmanager
async def connected(
    address: str,
    limits: Limits,
    *,
    message_bytes_max: int,
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Channel]:
    """Connect to `address` (host:port) for the block; raise RpcError(UNAVAILABLE).

    With `tls` the server must show a certificate for the host of the address.
    """
    protocol = ClientProtocol(address, limits, message_bytes_max)
    try:
        transport = await _dial(protocol, address, timeout_s, tls)
    except BaseException:
        protocol.abandon()
        raise
    try:
        yield Channel(protocol)
    finally:
        protocol.close()
        transport.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await protocol.lost.wait()
        except TimeoutError:
            pass  # The server does not read our last frames.
        finally:
            transport.abort()


async def _dial(
    protocol: ClientProtocol, address: str, timeout_s: float, tls: ssl.SSLContext | None
) -> asyncio.Transport:
    """Connect; raise RpcError(UNAVAILABLE)."""
    try:
        server = HostPort.parse(address)
        async with asyncio.timeout(timeout_s):
            transport, _ = await protocol.loop.create_connection(
                lambda: protocol,
                server.host,
                server.port,
                ssl=tls,
                server_hostname=server.host if tls else None,
            )
    except TimeoutError:
        raise RpcError(RpcCode.UNAVAILABLE, f"{address} did not answer in time") from None
    except (OSError, ValueError, OverflowError) as error:
        # An invalid address counts as an unreachable server: an invalid host name (UnicodeError is
        # a ValueError), or a port that is not a number or too high.
        raise RpcError(RpcCode.UNAVAILABLE, f"cannot connect to {address}: {error}") from error
    return transport


@final
class ClientProtocol(asyncio.Protocol):
    """The transport's callbacks of a client's connection."""

    def __init__(self, address: str, limits: Limits, message_bytes_max: int) -> None:
        self._connection = ClientConnection(
            address, limits, message_bytes_max=message_bytes_max, now_s=time.monotonic()
        )
        self.loop = asyncio.get_running_loop()
        self.lost = asyncio.Event()
        self._writer = Writer(self._connection.http, self.loop)
        self._transport: asyncio.Transport
        self._streams: dict[int, ClientStream] = {}
        self._check_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first frames."""
        self._transport = cast("asyncio.Transport", transport)
        self._writer.attach(transport)
        self._check_later()

    def data_received(self, data: bytes) -> None:
        """Process received data."""
        self._handle(self._connection.receive(data, time.monotonic()))

    def connection_lost(self, error: Exception | None) -> None:
        """End all calls."""
        reason = "the connection was lost" + (f": {error}" if error else "")
        self._handle(self._connection.close(ErrorCode.CANCEL, reason))
        if self._check_timer is not None:
            self._check_timer.cancel()
        self.lost.set()

    def pause_writing(self) -> None:
        """Keep the output and continue to read. Otherwise both ends could wait for each other."""
        self._writer.is_paused = True

    def resume_writing(self) -> None:
        """Continue to write."""
        self._writer.is_paused = False
        self._writer.flush()

    def _handle(self, events: list[ClientEvent]) -> None:
        self._writer.hold()
        try:
            self._handle_each(events)
        finally:
            self._writer.release()

    def _handle_each(self, events: list[ClientEvent]) -> None:
        for event in events:
            if isinstance(event, ResponseMessage):
                stream = self._streams.get(event.call.stream.id)
                if stream is not None:  # The previous message may have cancelled it.
                    stream.on_message(event.message)
                    self._connection.consume(event.call, event.wire_bytes)
            elif isinstance(event, ResponseEnded):
                self._end(event)
            elif isinstance(event, ConnectionEnded):
                self._writer.flush_last()
                if event.limit is Limit.KEEPALIVE:
                    self._transport.abort()  # The server is not reachable.
                else:
                    self._transport.close()

    def _end(self, event: ResponseEnded) -> None:
        stream = self._streams.pop(event.call.stream.id, None)
        if stream is None or stream.outcome.done():
            return
        outcome = stream.outcome
        if event.code is RpcCode.OK:
            outcome.set_result(None)
        else:
            outcome.set_exception(RpcError(event.code, event.message, event.trailers))

    def _check_later(self) -> None:
        self._check_timer = self.loop.call_later(CHECK_PERIOD_S, self._check)

    def _check(self) -> None:
        self._check_later()  # First, so that an error below does not end the checks.
        self._handle(self._connection.check(time.monotonic()))

    # ------------------------------------------------------------ for the channel

    @property
    def heard_at_s(self) -> float:
        """The time of the last input, in monotonic seconds."""
        return self._connection.http.heard_at_s

    @property
    def is_within_frame(self) -> bool:
        """Whether an HTTP/2 frame has arrived in part."""
        return self._connection.http.is_within_frame

    def open(self, path: str, on_message: Callable[[bytes], None]) -> ClientStream:
        """Begin a call."""
        call = self._connection.open(path)
        stream = self._streams[call.stream.id] = ClientStream(self, call, on_message)
        self._writer.flush_soon()
        return stream

    def write(self, call: ClientCall, message: bytes, *, is_last: bool = False) -> None:
        """Send a request."""
        self._connection.send(call, message, is_last=is_last)
        self._writer.flush_now()

    def cancel(self, stream: ClientStream) -> None:
        """End a call."""
        if self._streams.pop(stream.call.stream.id, None) is not None:
            self._connection.cancel(stream.call)
            self._writer.flush_soon()
            if not stream.outcome.done():
                stream.outcome.set_exception(
                    RpcError(RpcCode.CANCELLED, "this side cancelled the call")
                )
                stream.outcome.exception()  # The exception may have no waiting task.

    def abandon(self) -> None:
        """Drop a connection that was established after its caller stopped waiting.

        Its transport is already closed. uvloop's transport reports this neither by `is_closing` nor
        by `connection_lost`: a write raises, and the check timer would run for ever.
        """
        if self._check_timer is not None:
            self._check_timer.cancel()
        self._writer.detach()
        self.lost.set()

    def close(self) -> None:
        """End the connection after its last frames are written."""
        self._handle(self._connection.close(ErrorCode.NO_ERROR, "the client closes the connection"))
