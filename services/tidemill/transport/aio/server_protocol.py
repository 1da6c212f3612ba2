"""One client's connection at a server: the transport's callbacks, its calls and their tasks.

The module is one class and the protocol of its server, because a lost connection, a cancelled call
and a failed task must all clean up the same state.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, assert_never, cast, final

import structlog

from tidemill.common.addresses import HostPort
from tidemill.transport.aio.call import DisconnectError, RpcCall, RpcKind
from tidemill.transport.aio.listener import ConnectionProtocol
from tidemill.transport.aio.offenders import FLOODS
from tidemill.transport.aio.read_confirmations import ReadConfirmations
from tidemill.transport.aio.reply_room import ReplyRoom
from tidemill.transport.aio.tls import names_of
from tidemill.transport.aio.writer import Writer
from tidemill.transport.grpc.connection_memory import SMALL_REPLY_BYTES
from tidemill.transport.grpc.server_call import (
    CallEnded,
    CallStarted,
    CallWritable,
    MessageReceived,
    RequestsEnded,
)
from tidemill.transport.grpc.server_connection import CALLS_PER_TURN, ServerConnection
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.events import ConnectionEnded, MarkReached
from tidemill.transport.http2.frames import ErrorCode
from tidemill.transport.http2.limits import Limit
from tidemill.transport.http2.preface import REMOTING

if TYPE_CHECKING:
    from tidemill.common.deadlines import Deadlines
    from tidemill.transport.aio.call import RpcMethod, UnaryHandler
    from tidemill.transport.aio.misuse_log import MisuseLog
    from tidemill.transport.aio.offenders import Offenders
    from tidemill.transport.grpc.address_share import AddressShare
    from tidemill.transport.grpc.memory import MemoryAccount
    from tidemill.transport.grpc.server_call import RequestPolicy, ServerCall, ServerEvent
    from tidemill.transport.http2.limits import Limits

log = structlog.get_logger()

# Read from one connection in a turn of the event loop, as one piece: less than a millisecond. A
# connection that fills it continues after all others have had a turn.
READ_BYTES_PER_TURN: Final = 256 << 10
FRAMES_PER_TURN: Final = 128  # of one connection: a millisecond
# Queued data of a connection, behind the windows of its streams, at which other streams wait too.
QUEUED_BYTES_MAX: Final = 16 << 20
# Output of this size is written at once, so that other calls of this turn see a full transport.
# Otherwise a small response could wait behind many messages of megabytes on a slow connection.
FLUSH_BYTES: Final = 64 << 10
CLOSE_TIMEOUT_S: Final = 5.0  # for the client to read the last frames of a closed connection
PATH_CHARS_SHOWN: Final = 256  # of an unknown path in the error text
# Ends of connections without an error of the client.
_ORDINARY: Final = frozenset({Limit.IDLE, Limit.KEEPALIVE})
_ORDINARY_CODES: Final = frozenset({ErrorCode.NO_ERROR, ErrorCode.CANCEL})


class ConnectionOwner(Protocol):
    """The server of a connection, as `ServerProtocol` uses it; `RpcServer` is one."""

    methods: Mapping[str, RpcMethod]
    policies: Mapping[str, RequestPolicy]
    limits: Limits
    message_bytes_max: int
    misuse: MisuseLog
    account: MemoryAccount
    offenders: Offenders
    deadlines: Deadlines[RpcCall]
    is_draining: bool

    def share_of(self, address: str) -> AddressShare:
        """Return the memory of a client's address."""

    def add(self, connection: ServerProtocol, /) -> None:
        """Add an open connection."""

    def remove(self, connection: ServerProtocol, /) -> None:
        """Remove a lost connection."""

    def continue_later(self, connection: ServerProtocol, /) -> None:
        """Call `continue_reading` after other connections have had their turns."""

    def recheck(self) -> None:
        """Check again whether calls and connections have ended."""

    def add_ending(self, task: asyncio.Task[None], /) -> None:
        """Wait for the task of a cancelled call before the server stops."""


@final
class ServerProtocol(ConnectionProtocol):
    """One client's connection. It is one class because transport, calls and tasks end together."""

    def __init__(self, server: ConnectionOwner, peer_host: str, peer_port: int) -> None:
        self._server = server
        self.peer_host = peer_host
        family = "ipv6" if ":" in peer_host else "ipv4"
        self.peer = f"{family}:{HostPort(peer_host, peer_port)}"
        self.certificate_names: tuple[str, ...] = ()
        now_s = time.monotonic()
        self._connection = ServerConnection(
            server.offenders.limits_of(peer_host, now_s),
            message_bytes_max=server.message_bytes_max,
            now_s=now_s,
            hits=server.misuse.hits,
            account=server.account,
            address=server.share_of(peer_host),
            policies=server.policies,
        )
        self.loop = asyncio.get_running_loop()
        self.calls: dict[int, RpcCall] = {}
        self.waiting_senders: set[RpcCall] = set()  # until the connection is not congested
        # Calls that wait for a turn after large replies; at most as many as there are streams.
        self._delayed_calls: deque[asyncio.Future[None]] = deque()
        self._memory = self._connection.memory
        self._reply_room = ReplyRoom(self._memory, self.loop)
        self._writer = Writer(self._connection.http, self.loop, self._memory.count_buffered)
        self._memory.on_grant = self._writer.flush_soon
        self._transport: asyncio.Transport
        self.read_confirmations = ReadConfirmations(
            self._connection.http, self._writer, self.loop, server.misuse
        )
        self.has_read_all = False  # the client, before the server stops
        self._has_pending_turn = False  # nothing is read until it has had its turn
        self._unread_bytes = 0  # of the transport at the last check, while paused
        self._moved_at_s = 0.0  # the last change of it
        self._closed_at_s: float | None = None
        self._is_old = False
        age_s = server.limits.age_max_s * random.uniform(0.9, 1.1)
        self._age_limit_at_s = time.monotonic() + (age_s or math.inf)

    # ------------------------------------------------------------ callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first frames."""
        self.is_open = True
        self._transport = cast("asyncio.Transport", transport)
        self.certificate_names = names_of(transport.get_extra_info("peercert"))
        self._server.add(self)
        if self._server.is_draining:
            self._connection.http.start_drain()
        self._writer.attach(transport)

    def data_received(self, data: bytes) -> None:
        """Process one turn's worth of received data; process more in the next turns.

        The transport is paused meanwhile. Otherwise it would read more in this turn.
        """
        self._writer.hold()
        try:
            now_s = time.monotonic()
            for event in self._connection.receive(data, now_s, frames_max=FRAMES_PER_TURN):
                # Inlined: nearly all events are of these two types.
                if type(event) is MessageReceived:
                    self._on_message(event)
                elif type(event) is CallStarted:
                    self._on_call(event.call)
                else:
                    self._on_event(event)
        finally:
            self._writer.release()
        if self._server.is_draining:
            self._server.recheck()
        if len(data) >= READ_BYTES_PER_TURN or self._connection.has_more or self._delayed_calls:
            self._continue_later()
        if self.waiting_senders and not self.is_congested:
            senders, self.waiting_senders = self.waiting_senders, set()
            for call in senders:
                call.wake_senders()

    def _continue_later(self) -> None:
        """Continue after the turns of other connections, if the client reads its responses."""
        if not (self._has_pending_turn or self._writer.is_paused or self._transport.is_closing()):
            self._has_pending_turn = True
            self._transport.pause_reading()
            self._server.continue_later(self)

    def continue_reading(self) -> int:
        """Process more received data and read more; return the number of started calls."""
        self._has_pending_turn = False
        if self._transport.is_closing() or self._writer.is_paused:
            return 0
        begun = 0
        if self._delayed_calls and not self._connection.has_reply_debt:
            self._resume_delayed_call()
            begun = CALLS_PER_TURN  # Its cost is unknown; assume a whole turn.
        if self._connection.has_more or self._delayed_calls:
            self.data_received(b"")
            begun += self._connection.begun_count
        if not (self._has_pending_turn or self._writer.is_paused or self._transport.is_closing()):
            self._transport.resume_reading()
        return begun

    def eof_received(self) -> bool:
        """Close the connection, because HTTP/2 has no half-closed connections."""
        return False

    def connection_lost(self, _exc: Exception | None) -> None:
        """End all calls."""
        for event in self._connection.close(ErrorCode.CANCEL, "the connection was lost"):
            self._on_event(event)
        self.read_confirmations.clear()
        self._writer.detach()
        self._server.remove(self)

    def pause_writing(self) -> None:
        """Pause the calls and the reading, because the client does not read."""
        self._writer.is_paused = True
        self._unread_bytes, self._moved_at_s = self._writer.buffered_bytes, time.monotonic()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Continue, because the client has read."""
        self._writer.is_paused = False
        self._writer.flush()
        if self._connection.has_more or self._delayed_calls:
            self._continue_later()
        elif not (self._has_pending_turn or self._writer.is_paused):
            self._transport.resume_reading()
        for call in list(self.calls.values()):
            call.wake_senders()

    # ------------------------------------------------------------ events

    def _on_event(self, event: ServerEvent) -> None:
        if isinstance(event, MessageReceived):
            self._on_message(event)
        elif isinstance(event, CallStarted):
            self._on_call(event.call)
        elif isinstance(event, RequestsEnded):
            self._on_requests_ended(event.call)
        elif isinstance(event, CallEnded):
            ended = self.calls.get(event.call.stream.id)
            if ended is not None:
                self._cancel(ended)
        elif isinstance(event, CallWritable):
            writable = self.calls.get(event.call.stream.id)
            if writable is not None:
                writable.wake_senders()
        elif isinstance(event, MarkReached):
            self.read_confirmations.confirm(event.mark)
            if self._server.is_draining:
                self._server.recheck()
        elif isinstance(event, ConnectionEnded):
            self._on_connection_ended(event)
        else:
            assert_never(event)

    def _on_call(self, call: ServerCall) -> None:
        method = self._server.methods.get(call.path)
        if method is None:
            message = f"{call.path[:PATH_CHARS_SHOWN]} is not served here"
            self._connection.finish(call, RpcCode.UNIMPLEMENTED, message)
            return
        served = self.calls[call.stream.id] = RpcCall(self, call, method)
        if method.kind is not RpcKind.UNARY:
            self._start_deadline(served)
        if method.kind is RpcKind.BIDIRECTIONAL:
            call.has_request_stream = True
            # Rust clients wait for the headers before they send requests.
            self._connection.start(call)
            if self._server.is_draining and self.is_drain_announced:
                served.end_requests()
            self._start(served, self._run_stream(served))

    def _on_message(self, event: MessageReceived) -> None:
        call, message, wire_bytes, is_last, held_bytes, skipped_bytes = event
        served = self.calls.get(call.stream.id)
        if served is None:
            return
        if served.method.kind is RpcKind.BIDIRECTIONAL:
            served.put_request(message, wire_bytes, held_bytes, skipped_bytes)
            if is_last:
                served.end_requests()
        elif served.request is not None:
            self._reject(served, "a call of this method has one request")
        else:
            served.request = message
            if is_last:
                self._on_request(served, message)

    def _on_requests_ended(self, call: ServerCall) -> None:
        served = self.calls.get(call.stream.id)
        if served is None:
            return
        if served.method.kind is RpcKind.BIDIRECTIONAL:
            served.end_requests()
        elif served.request is None:
            self._reject(served, "a call of this method needs a request")
        else:
            self._on_request(served, served.request)

    def _on_request(self, served: RpcCall, request: bytes) -> None:
        served.request = None  # Owned by the handler now, which keeps the parts that it needs.
        if served.method.kind is not RpcKind.UNARY:
            self._start(served, self._run_stream(served, request))
        else:
            self._answer(served, request)

    def _answer(self, served: RpcCall, request: bytes) -> None:
        """Call the handler of a unary method."""
        handle = cast("UnaryHandler", served.method.handle)
        try:
            answering = handle(served, request)
        except Exception as error:  # noqa: BLE001  # The boundary of every call.
            self._finish_failed(served, error)
            self._end(served)
        else:
            if answering is not None:
                self.answer_in_task(served, answering)

    def answer_in_task(self, served: RpcCall, answering: Coroutine[Any, Any, bytes]) -> None:
        """Await the response to a unary call in a task."""
        self._start_deadline(served)
        served.answering = answering
        self._start(served, self._run_unary(served))

    def _start_deadline(self, served: RpcCall) -> None:
        """End the call at the deadline of its client, unless that is done already.

        A handler that answers without a task has a deadline of its own. `check` of the connection
        ends a call whose request does not arrive in time.
        """
        remaining_s = served.time_remaining_s
        if remaining_s is not None and not served.tick:
            served.tick = self._server.deadlines.add(served, remaining_s)

    def _on_connection_ended(self, event: ConnectionEnded) -> None:
        misuse = self._server.misuse
        if event.limit in FLOODS:
            self._server.offenders.add(self.peer_host, time.monotonic())
        if event.limit is not None and event.limit not in _ORDINARY:
            misuse.report(event.limit, peer=self.peer_host, reason=event.reason)
        elif event.limit is None and event.code not in _ORDINARY_CODES:
            kind = event.code.name.lower()
            misuse.report_failure(
                kind, peer=self.peer_host, reason=event.reason, is_per_peer=event.reason == REMOTING
            )
        self._writer.flush_last()
        self._closed_at_s = time.monotonic()
        self._transport.close()

    def _reject(self, served: RpcCall, reason: str) -> None:
        self._connection.finish(served.call, RpcCode.INTERNAL, reason)
        self._cancel(served)

    # ------------------------------------------------------------ tasks of calls

    def _start(self, served: RpcCall, run: Coroutine[None, None, None]) -> None:
        # The call owns the task: `_cancel` cancels it, and it calls `_end` at its end.
        served.task = self.loop.create_task(run)

    async def _run_unary(self, served: RpcCall) -> None:
        try:
            if self._connection.has_reply_debt:
                await self._wait_for_turn()
            answering, served.answering = served.answering, None
            assert answering is not None, "a call has one task"
            response = await answering
        except Exception as error:  # noqa: BLE001  # The boundary of every call.
            self._finish_failed(served, error)
            self._end(served)
        except BaseException:
            self._end(served)
            raise
        else:
            self.respond(served, response)

    def respond(self, served: RpcCall, response: bytes) -> None:
        """Answer a unary call, and end it."""
        self._connection.respond(served.call, response)
        if len(response) > SMALL_REPLY_BYTES:
            self._flush_if_large()
        self._end(served)

    async def _wait_for_turn(self) -> None:
        """Wait until the replies of this connection leave turns to other connections."""
        turn: asyncio.Future[None] = self.loop.create_future()
        self._delayed_calls.append(turn)
        self._continue_later()
        await turn

    def _resume_delayed_call(self) -> None:
        """Resume the next call that waits for a turn."""
        while self._delayed_calls:
            turn = self._delayed_calls.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    async def _run_stream(self, served: RpcCall, *request: bytes) -> None:
        handle = cast("Callable[..., Awaitable[None]]", served.method.handle)
        try:
            serving = handle(served, *request)
            del request
            await serving
        except Exception as error:  # noqa: BLE001  # The boundary of every call.
            self._finish_failed(served, error)
        else:
            is_sent = not (served.call.is_ended or served.call.stream.queue)
            self._connection.finish(served.call, RpcCode.OK)
            if is_sent and served.on_read is not None:
                self.read_confirmations.add(served.on_read)
        finally:
            self._end(served)

    def _finish_failed(self, served: RpcCall, error: Exception) -> None:
        if isinstance(error, RpcError):
            self._connection.finish(served.call, error.code, error.message, error.trailers)
        elif not isinstance(error, DisconnectError):
            log.error("call failed unexpectedly", path=served.call.path, exc_info=error)
            # UNKNOWN, as in grpcio. Methods of Tidemill have their own boundary.
            self._connection.finish(served.call, RpcCode.UNKNOWN, "the server failed")

    def _end(self, served: RpcCall) -> None:
        """Remove a call whose handler has ended."""
        if not served.call.is_ended:  # It was cancelled, but not by its client.
            self._connection.finish(served.call, RpcCode.CANCELLED, "the call was cancelled")
        served.task = None
        self._remove(served)
        self._writer.flush_soon()

    def _cancel(self, served: RpcCall) -> None:
        """End a call that its client does not wait for, or that was answered already."""
        # Removed here too, because a task that never ran does not run its `finally`.
        self._remove(served)
        # A cancelled task refers to its frames and so to the call. The call must not refer to the
        # task. Otherwise both would wait for the garbage collector.
        task, served.task = served.task, None
        if task is not None and not task.done():
            task.cancel()
            self._server.add_ending(task)
        on_cancel, served.on_cancel = served.on_cancel, None
        if on_cancel is not None:
            on_cancel()

    def _remove(self, served: RpcCall) -> None:
        if served.answering is not None:
            served.answering.close()  # Its task has not begun it.
            served.answering = None
        if served.tick:
            self._server.deadlines.discard(served, served.tick)
        self.calls.pop(served.call.stream.id, None)
        self._reply_room.grant()
        if self._server.is_draining:
            self._server.recheck()

    # ------------------------------------------------------------ for the calls

    @property
    def is_paused(self) -> bool:
        """Whether the client does not read the sent data."""
        return self._writer.is_paused

    @property
    def is_congested(self) -> bool:
        """Whether the connection should get no more data for now."""
        return self._writer.is_paused or self._connection.http.queued_bytes > QUEUED_BYTES_MAX

    def send(self, call: ServerCall, batch: Sequence[bytes]) -> bool:
        """Send messages; return whether they are much for one turn of the event loop."""
        self._connection.send(call, batch)
        return self._flush_if_large()

    def _flush_if_large(self) -> bool:
        """Write large output at once, and other output at the end of the turn."""
        is_large = self._connection.http.output_bytes >= FLUSH_BYTES
        if is_large:
            self._writer.flush_now()
        else:
            self._writer.flush_soon()
        return is_large

    def write(self, call: ServerCall, message: bytes) -> None:
        """Send a message at once."""
        self._connection.send(call, (message,))
        self._writer.flush_now()

    def has_room(self, count: int) -> bool:
        """Return whether the connection itself may hold `count` more bytes."""
        return self._reply_room.has_room(count)

    def hold(self, call: ServerCall, count: int) -> bool:
        """Take room until the call ends; return False if there is none."""
        return self._memory.hold(call, count)

    async def hold_in_turn(self, call: ServerCall, count: int, timeout_s: float) -> bool:
        """Take room when the connection has it; return False if there is none in time."""
        return await self._reply_room.hold_in_turn(call, count, timeout_s)

    def release(self, call: ServerCall, count: int) -> None:
        """Return room before the call ends."""
        self._memory.release(call, count)
        self._reply_room.grant()

    def consume(self, call: ServerCall, wire_bytes: int, held_bytes: int) -> None:
        """Let the client send more, because a request of a stream was answered."""
        if held_bytes:
            self.release(call, held_bytes)
        self._connection.consume(call, wire_bytes)
        if self._connection.http.has_output:
            self._writer.flush_soon()
        if self._connection.has_more:
            self._continue_later()

    def expire(self, served: RpcCall) -> None:
        """End a call after its deadline."""
        self._connection.finish(served.call, RpcCode.DEADLINE_EXCEEDED, "the deadline has passed")
        self._cancel(served)
        self._writer.flush_soon()

    # ------------------------------------------------------------ for the server

    def check(self, now_s: float) -> None:
        """End calls and connections without progress."""
        if self._closed_at_s is not None:
            if now_s - self._closed_at_s > CLOSE_TIMEOUT_S:
                self._transport.abort()
            return
        if self._writer.is_paused and not self._connection.http.is_closed:
            # Reading is paused, so the client cannot answer a ping. It must read.
            self._writer.count()
            unread_bytes = self._writer.buffered_bytes
            if unread_bytes != self._unread_bytes:
                self._unread_bytes, self._moved_at_s = unread_bytes, now_s
            elif now_s - self._moved_at_s > self._server.limits.stall_timeout_s:
                self._server.misuse.hits[Limit.STALLED] += 1
                self._transport.abort()
            return
        self._writer.recount()
        self.read_confirmations.expire(now_s)
        for event in self._connection.check(now_s):
            self._on_event(event)
        self._check_age(now_s)
        if self._connection.http.has_output:
            self._writer.flush_soon()

    def _check_age(self, now_s: float) -> None:
        if now_s < self._age_limit_at_s:
            return
        if not self._is_old:
            self._is_old = True
            self._server.misuse.hits[Limit.AGE] += 1
            self.drain()
        # Not before the next check, because a call may be in flight.
        elif not self.calls or now_s > self._age_limit_at_s + self._server.limits.age_grace_s:
            self.close("the connection is old; open another")

    @property
    def is_drain_announced(self) -> bool:
        """Whether the client was asked to leave; the client must send its first frames before."""
        return self._connection.http.is_drain_announced or self._transport.is_closing()

    @property
    def is_drain_acknowledged(self) -> bool:
        """Whether the client has answered that it opens no more calls here."""
        return self._connection.http.is_drain_acknowledged or self._transport.is_closing()

    def drain(self) -> None:
        """Ask the client to leave, and end its streams of requests."""
        self._connection.http.start_drain()
        for served in self.calls.values():
            if served.method.kind is RpcKind.BIDIRECTIONAL:
                served.end_requests()
        self._writer.flush_soon()

    def request_last_confirmation(self) -> None:
        """Ask a client that opens no more calls whether it has read everything."""
        if self.is_drain_acknowledged and not (self.calls or self._transport.is_closing()):
            self.read_confirmations.add(self._on_all_read)

    def _on_all_read(self) -> None:
        self.has_read_all = True

    def close(self, reason: str) -> None:
        """End the connection after its last frames are written."""
        for event in self._connection.close(ErrorCode.NO_ERROR, reason):
            self._on_event(event)

    def abort(self) -> None:
        """End the connection now."""
        self._transport.abort()
