"""The gRPC server: a thin asyncio shell around `grpc.server_connection`.

    server = RpcServer(methods, Limits(), ListenSettings(host=..., port=...))
    async with server.serving(): ...

One protocol a connection, one task a call, one `write` a turn of the loop for all that is ready. A
client that does not read what we send is not read either, and waits alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Final, assert_never, cast, final
from weakref import WeakValueDictionary

import structlog

from tidemill.common.deadlines import Deadlines
from tidemill.transport.aio.call import DisconnectError, RpcCall, RpcKind, RpcMethod, UnaryHandler
from tidemill.transport.aio.listener import ConnectionProtocol, ListenSettings, RpcListener
from tidemill.transport.aio.notices import MisuseLog
from tidemill.transport.aio.offenders import FLOODS, Offenders
from tidemill.transport.aio.read_answers import ReadConfirmations
from tidemill.transport.aio.writer import Writer
from tidemill.transport.grpc.connection_memory import SMALL_REPLY_BYTES
from tidemill.transport.grpc.memory import AddressShare, MemoryAccount
from tidemill.transport.grpc.server_call import (
    CallEnded,
    CallStarted,
    CallWritable,
    MessageReceived,
    RequestsEnded,
    ServerCall,
    ServerEvent,
)
from tidemill.transport.grpc.server_connection import CALLS_PER_TURN, ServerConnection
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.events import ConnectionEnded, MarkReached
from tidemill.transport.http2.frames import ErrorCode
from tidemill.transport.http2.limits import Limit

if TYPE_CHECKING:
    from tidemill.transport.http2.limits import Limits

log = structlog.get_logger()

PATH_CHARS_SHOWN: Final = 256  # of an unknown path in its error; one byte of request per byte

# Of a request: four bodies of the largest kind. Far above one, so that a body over its own limit
# gets a code of its own in a response.
MESSAGE_BYTES_MAX: Final = 16 << 20
# Of all connections of a server, where nobody has said how much.
HELD_BYTES_MAX: Final = 1 << 30
# What one connection is read in a turn of the loop, in one piece of the transport: a fraction of a
# millisecond. One that fills it is read on when everybody else has had a turn.
READ_BYTES_PER_TURN: Final = 256 << 10
FRAMES_PER_TURN: Final = 128  # of one connection: they take a millisecond
SWEEP_PERIOD_S: Final = 1.0  # between two looks at what stands still
# Of a connection, queued behind the windows of its streams, before other streams wait too.
QUEUED_BYTES_MAX: Final = 16 << 20
# Of output that is written at once, so that the others of this turn see that the transport is full:
# were all of them taken, an answer of a few bytes would wait behind as many messages of megabytes,
# over a slow line for longer than its caller.
FLUSH_BYTES: Final = 64 << 10
SWEPT_PER_TURN: Final = 256  # connections looked at in one turn of the loop: under a millisecond
ANSWER_READ_S: Final = 1.0  # at the end, for clients to tell that they have read their answers
# Connections that are told to leave by a drain, in one step of it: their clients come back at once,
# somewhere else, and are to do that one after the other.
LEAVING_PER_STEP: Final = 5
LEAVING_STEP_S: Final = 0.01  # between two steps: 500 connections take a second
LEAVE_HEARD_S: Final = 2.0  # for clients to answer that they have heard; a dead one never does
LEAVING_SHARE: Final = 0.25  # of a drain's time at most; the rest is for the calls to end
CLOSE_TIMEOUT_S: Final = 5.0  # for a closed connection's last words to be read
# Ends of connections that are no client's fault.
_ORDINARY: Final = frozenset({Limit.IDLE, Limit.KEEPALIVE})
_ORDINARY_CODES: Final = frozenset({ErrorCode.NO_ERROR, ErrorCode.CANCEL})
_NO_CALLS: Final = "the server stops"


@final
class RpcServer:
    """Serves methods by path; `address` tells where it listens."""

    def __init__(
        self,
        methods: Mapping[str, RpcMethod],
        limits: Limits,
        listen: ListenSettings,
        *,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        held_bytes_max: int = HELD_BYTES_MAX,
    ) -> None:
        self.methods = methods
        self.policies = {
            path: method.policy for path, method in methods.items() if method.policy is not None
        }
        self.limits = limits
        self.message_bytes_max = message_bytes_max
        self.notices = MisuseLog()
        self.account = MemoryAccount(held_bytes_max)
        self._is_offering = False  # room, at the end of this turn of the loop
        # Of the account, by address; each is there for as long as a connection of it.
        self._addresses: WeakValueDictionary[str, AddressShare] = WeakValueDictionary()
        self.offenders = Offenders(limits)
        self.accepted_count = 0
        self.connections: set[ServerProtocol] = set()
        self.deadlines: Deadlines[RpcCall] = Deadlines(_expire)
        self.ending: set[asyncio.Task[None]] = set()  # of calls that were cancelled
        self.is_draining = False
        self.listener = RpcListener(listen, self._new_connection, self.notices)
        # Connections that have more than a turn's worth, in the order of their next turns.
        self._rest: deque[ServerProtocol] = deque()
        self._is_going_on = False
        self._sweeping: asyncio.TimerHandle | None = None
        self._unswept: list[ServerProtocol] = []  # of the sweep under way
        self._quiet = asyncio.Event()  # set when a connection ends, and while draining a call

    @property
    def address(self) -> str:
        """Where the server listens."""
        return self.listener.address

    @property
    def call_count(self) -> int:
        """How many calls are being served."""
        return sum(len(connection.calls) for connection in self.connections)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[RpcServer]:
        """Serve until the block ends; raise StartError where nobody can listen."""
        self.account.queue.on_room = self._offer_room_soon
        async with self.listener.listening():
            try:
                yield self
            finally:
                self.account.queue.on_room = None
                self.listener.close()
                for connection in list(self.connections):
                    connection.close(_NO_CALLS)
                await self._until(lambda: not self.connections, CLOSE_TIMEOUT_S)
                for connection in list(self.connections):
                    connection.abort()
                await self._until(lambda: not (self.connections or self.ending), CLOSE_TIMEOUT_S)
                if self._sweeping is not None:
                    self._sweeping.cancel()

    async def drain(self, timeout_s: float) -> None:
        """Accept nothing new, end streams of requests, and wait for the calls under way."""
        self.is_draining = True
        # First: a client that is told to leave comes back at once, and is to find another process
        # that shares the port.
        self.listener.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._let_leave(timeout_s * LEAVING_SHARE)
                await self.listener.connected()
                await self._until(self._is_drained, timeout_s)
                # What a client has begun before it heard of it is on its way, and is answered too.
                await self._until(self._is_heard, LEAVE_HEARD_S)
                await self._until(self._is_drained, timeout_s)
        # What they have got is theirs, if that is known.
        await self._until(lambda: not any(c.read_answers for c in self.connections), ANSWER_READ_S)

    async def _let_leave(self, spread_s_max: float) -> None:
        """Tell all connections to leave, spread over a while; some know it already."""
        left: list[ServerProtocol] = []
        for connection in self.connections:
            if connection.is_told_to_leave:
                connection.drain()
            else:
                left.append(connection)
        steps = leaving_steps(len(left), spread_s_max)
        for step in range(steps):
            if step:
                await asyncio.sleep(LEAVING_STEP_S)
            for connection in left[step::steps]:
                connection.drain()

    def _is_drained(self) -> bool:
        """Whether no call is under way, and every client knows that it has to leave.

        One that is cut off before it has heard anything takes that for an outage.
        """
        return not (self.call_count or self.ending) and all(
            connection.is_told_to_leave for connection in self.connections
        )

    def _is_heard(self) -> bool:
        """Whether every client has said that it opens no call here any more."""
        return all(connection.has_heard_to_leave for connection in self.connections)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._quiet.clear()
                    await self._quiet.wait()

    # ------------------------------------------------------------ for the connections

    def _new_connection(self, peer_host: str, peer_port: int) -> ServerProtocol:
        return ServerProtocol(self, peer_host, peer_port)

    def share_of(self, address: str) -> AddressShare:
        """Return what the connections of a client's address hold together."""
        share = self._addresses.get(address)
        if share is None:
            share = self._addresses[address] = AddressShare()
        return share

    def opened(self, connection: ServerProtocol) -> None:
        """Look after a new connection."""
        self.accepted_count += 1
        self.connections.add(connection)
        if self._sweeping is None:
            self._sweep_later()

    def closed(self, connection: ServerProtocol) -> None:
        """Forget a connection."""
        self.connections.discard(connection)
        self.listener.closed(connection.peer_host)
        self._quiet.set()

    def go_on_later(self, connection: ServerProtocol) -> None:
        """Let a connection go on with what it has when others have had their turn."""
        self._rest.append(connection)
        if not self._is_going_on:
            self._is_going_on = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """Let some go on that have more than a turn's worth: together they begin what one may.

        Whoever comes with little is served beside them, however many they are.
        """
        left = CALLS_PER_TURN
        for _ in range(len(self._rest)):
            left -= 1 + self._rest.popleft().go_on()
            if left <= 0:
                break
        self._is_going_on = bool(self._rest)
        if self._rest:
            asyncio.get_running_loop().call_soon(self._go_on)

    def _offer_room_soon(self) -> None:
        """Give those who wait the room that comes free in this turn of the loop."""
        if not self._is_offering:
            self._is_offering = True
            asyncio.get_running_loop().call_soon(self._offer_room)

    def _offer_room(self) -> None:
        self._is_offering = False
        self.account.queue.grant_room()

    def look_again(self) -> None:
        """Let those look again who wait for calls and connections to end."""
        self._quiet.set()

    def ended(self, task: asyncio.Task[None]) -> None:
        """Forget the task of a call that was cancelled."""
        self.ending.discard(task)
        self._quiet.set()

    def _sweep_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweeping = loop.call_later(SWEEP_PERIOD_S, self._sweep)

    def _sweep(self) -> None:
        """Look at every connection, some in each turn of the loop."""
        now_s = time.monotonic()
        left = self._unswept or list(self.connections)
        self._unswept = left[SWEPT_PER_TURN:]
        # First: whatever comes of this look, there is another one.
        if self._unswept:
            self._sweeping = asyncio.get_running_loop().call_later(0, self._sweep)
        elif self.connections:
            self._sweep_later()
        else:
            self._sweeping = None
        for connection in left[:SWEPT_PER_TURN]:
            if connection in self.connections:
                connection.check(now_s)


def leaving_steps(count: int, spread_s_max: float) -> int:
    """Return in how many steps so many connections are told to leave, LEAVING_STEP_S apart."""
    steps_max = max(int(spread_s_max / LEAVING_STEP_S), 1)
    return min(max(math.ceil(count / LEAVING_PER_STEP), 1), steps_max)


def _expire(calls: Iterable[RpcCall]) -> None:
    for call in calls:
        call.expire()


@final
class ServerProtocol(ConnectionProtocol):
    """One client's connection."""

    def __init__(self, server: RpcServer, peer_host: str, peer_port: int) -> None:
        self._server = server
        self.peer_host = peer_host
        host = f"ipv6:[{peer_host}]" if ":" in peer_host else f"ipv4:{peer_host}"
        self.peer = f"{host}:{peer_port}"
        now_s = time.monotonic()
        self._connection = ServerConnection(
            server.offenders.limits_of(peer_host, now_s),
            message_bytes_max=server.message_bytes_max,
            now_s=now_s,
            hits=server.notices.hits,
            account=server.account,
            address=server.share_of(peer_host),
            policies=server.policies,
        )
        self.loop = asyncio.get_running_loop()
        self.calls: dict[int, RpcCall] = {}
        self.crowd: set[RpcCall] = set()  # calls that wait until the connection is not congested
        # Calls whose handlers wait for a turn, because those before them had large replies; as many
        # as there are streams.
        self._held_back: deque[asyncio.Future[None]] = deque()
        # Who waits for room, and how much, in turn: as many as there are streams.
        self._room_wanted: dict[asyncio.Future[bool], tuple[ServerCall, int]] = {}
        self._writer = Writer(
            self._connection.http, self.loop, self._connection.memory.count_buffered
        )
        self._connection.memory.on_grant = self._writer.flush_soon
        self._transport: asyncio.Transport
        self.read_answers = ReadConfirmations(
            self._connection.http, self._writer, self.loop, server.notices
        )
        self._has_rest = False  # of what has come; nothing is read until it has had its turns
        self._unread_bytes = 0  # while paused: what the transport held at the last look
        self._moved_at_s = 0.0  # and when that had changed
        self._closed_at_s: float | None = None
        self._is_old = False
        age_s = server.limits.age_max_s * random.uniform(0.9, 1.1)
        self._leaves_at_s = time.monotonic() + (age_s or math.inf)

    # ------------------------------------------------------------ the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the client."""
        self.is_open = True
        self._transport = cast("asyncio.Transport", transport)
        self._server.opened(self)
        if self._server.is_draining:
            self._connection.http.start_drain()
        self._writer.attach(transport)

    def data_received(self, data: bytes) -> None:
        """Take what the client has sent, a turn's worth of it; the rest in the turns that follow.

        Only then more is read: the transport would read on in this turn.
        """
        self._writer.hold()
        try:
            for event in self._connection.receive(
                data, time.monotonic(), frames_max=FRAMES_PER_TURN
            ):
                # What nearly every event is, written out.
                if type(event) is MessageReceived:
                    self._on_message(event)
                elif type(event) is CallStarted:
                    self._on_call(event.call)
                else:
                    self._on_event(event)
        finally:
            self._writer.release()
        if self._server.is_draining:
            self._server.look_again()
        if len(data) >= READ_BYTES_PER_TURN or self._connection.has_more or self._held_back:
            self._go_on_later()
        if self.crowd and not self.is_congested:
            crowd, self.crowd = self.crowd, set()
            for call in crowd:
                call.wake_writers()

    def _go_on_later(self) -> None:
        """Take more when others have had their turn, and once the client reads what it has got."""
        if not (self._has_rest or self._writer.is_paused or self._transport.is_closing()):
            self._has_rest = True
            self._transport.pause_reading()
            self._server.go_on_later(self)

    def go_on(self) -> int:
        """Take more of what has come, and read on; return how many calls have begun."""
        self._has_rest = False
        if self._transport.is_closing() or self._writer.is_paused:
            return 0
        begun = 0
        if self._held_back and not self._connection.has_reply_debt:
            self._let_go_on()
            begun = CALLS_PER_TURN  # As far as can be known: one is as much as a turn should have.
        if self._connection.has_more or self._held_back:
            self.data_received(b"")
            begun += self._connection.begun_count
        if not (self._has_rest or self._writer.is_paused or self._transport.is_closing()):
            self._transport.resume_reading()
        return begun

    def eof_received(self) -> bool:
        """Close: HTTP/2 knows no half of a connection."""
        return False

    def connection_lost(self, _exc: Exception | None) -> None:
        """End all calls."""
        for event in self._connection.close(ErrorCode.CANCEL, "the connection was lost"):
            self._on_event(event)
        self.read_answers.clear()
        self._writer.detach()
        self._server.closed(self)

    def pause_writing(self) -> None:
        """Let the calls wait, and read no more: whoever does not read need not ask."""
        self._writer.is_paused = True
        self._unread_bytes, self._moved_at_s = self._writer.buffered_bytes, time.monotonic()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on where the client has read."""
        self._writer.is_paused = False
        self._writer.flush()
        if self._connection.has_more or self._held_back:
            self._go_on_later()
        elif not (self._has_rest or self._writer.is_paused):
            self._transport.resume_reading()
        for call in list(self.calls.values()):
            call.wake_writers()

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
                writable.wake_writers()
        elif isinstance(event, MarkReached):
            self.read_answers.read(event.mark)
            if self._server.is_draining:
                self._server.look_again()
        elif isinstance(event, ConnectionEnded):
            self._on_failed(event)
        else:
            assert_never(event)

    def _on_call(self, call: ServerCall) -> None:
        method = self._server.methods.get(call.path)
        if method is None:
            message = f"{call.path[:PATH_CHARS_SHOWN]} is not served here"
            self._connection.finish(call, RpcCode.UNIMPLEMENTED, message)
            return
        served = self.calls[call.stream.id] = RpcCall(self, call, method)
        if call.timeout_s is not None:
            served.tick = self._server.deadlines.add(served, call.timeout_s)
        if method.kind is RpcKind.BIDIRECTIONAL:
            call.has_request_stream = True
            # Rust clients wait for the headers before they go on.
            self._connection.start(call)
            if self._server.is_draining and self.is_told_to_leave:
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
            self._refuse(served, "a call of this method has one request")
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
            self._refuse(served, "a call of this method has a request")
        else:
            self._on_request(served, served.request)

    def _on_request(self, served: RpcCall, request: bytes) -> None:
        if served.method.kind is RpcKind.UNARY:
            self._start(served, self._run_unary(served, request))
        else:
            self._start(served, self._run_stream(served, request))
        served.request = None  # The method's from here on, which keeps of it what it needs.

    def _on_failed(self, event: ConnectionEnded) -> None:
        if event.limit in FLOODS:
            self._server.offenders.note(self.peer_host, time.monotonic())
        if event.limit is not None and event.limit not in _ORDINARY:
            self._server.notices.note(event.limit, peer=self.peer_host, reason=event.reason)
        elif event.limit is None and event.code not in _ORDINARY_CODES:
            kind = event.code.name.lower()
            self._server.notices.fail(kind, peer=self.peer_host, reason=event.reason)
        self._writer.flush_last()
        self._closed_at_s = time.monotonic()
        self._transport.close()

    def _refuse(self, served: RpcCall, reason: str) -> None:
        self._connection.finish(served.call, RpcCode.INTERNAL, reason)
        self._cancel(served)

    # ------------------------------------------------------------ calls

    def _start(self, served: RpcCall, run: Coroutine[None, None, None]) -> None:
        # The call is the task's parent: it cancels the task, and hears of its end in `_end`.
        served.task = self.loop.create_task(run)

    async def _run_unary(self, served: RpcCall, request: bytes) -> None:
        handle = cast("UnaryHandler", served.method.handle)
        try:
            if self._connection.has_reply_debt:
                await self._turn()
            answering = handle(served, request)
            del request
            response = await answering
        except Exception as error:  # noqa: BLE001  # The boundary of every call.
            self._answer_error(served, error)
        else:
            self._connection.respond(served.call, response)
            if len(response) > SMALL_REPLY_BYTES:
                self._flush_if_much()
        finally:
            self._end(served)

    async def _turn(self) -> None:
        """Wait until the replies of this connection leave others their turns."""
        turn: asyncio.Future[None] = self.loop.create_future()
        self._held_back.append(turn)
        self._go_on_later()
        await turn

    def _let_go_on(self) -> None:
        """Let the next call go on that waits for a turn."""
        while self._held_back:
            turn = self._held_back.popleft()
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
            self._answer_error(served, error)
        else:
            is_whole = not (served.call.is_ended or served.call.stream.queue)
            self._connection.finish(served.call, RpcCode.OK)
            if is_whole and served.tell_read is not None:
                self.read_answers.add(served.tell_read)
        finally:
            self._end(served)

    def _answer_error(self, served: RpcCall, error: Exception) -> None:
        if isinstance(error, RpcError):
            self._connection.finish(served.call, error.code, error.message, error.trailers)
        elif not isinstance(error, DisconnectError):
            log.error("call failed unexpectedly", path=served.call.path, exc_info=error)
            # UNKNOWN, as grpcio says it; methods of ours have a boundary of their own.
            self._connection.finish(served.call, RpcCode.UNKNOWN, "the server failed")

    def _end(self, served: RpcCall) -> None:
        """Forget a call whose handler has ended."""
        if not served.call.is_ended:  # It was cancelled, and not by its client.
            self._connection.finish(served.call, RpcCode.CANCELLED, "the call was cancelled")
        served.task = None
        self._forget(served)
        self._writer.flush_soon()

    def _cancel(self, served: RpcCall) -> None:
        """End a call that nobody waits for any more, or that has been answered without it."""
        # Here, and not only when the task ends: one that has never had a turn runs no `finally`.
        self._forget(served)
        # The task keeps how it was cancelled, and with that its frames, which keep the call: it may
        # not keep the task, or both would wait for the garbage collector.
        task, served.task = served.task, None
        if task is not None and not task.done():
            task.cancel()
            self._server.ending.add(task)
            task.add_done_callback(self._server.ended)

    def _forget(self, served: RpcCall) -> None:
        if served.call.timeout_s is not None:
            self._server.deadlines.discard(served, served.tick)
        self.calls.pop(served.call.stream.id, None)
        if self._room_wanted:
            self._offer_room()
        if self._server.is_draining:
            self._server.look_again()

    # ------------------------------------------------------------ for the calls

    @property
    def is_paused(self) -> bool:
        """Whether the client does not read what we send."""
        return self._writer.is_paused

    @property
    def is_congested(self) -> bool:
        """Whether nothing more should be given to the connection for now."""
        return self._writer.is_paused or self._connection.http.queued_bytes > QUEUED_BYTES_MAX

    def send(self, call: ServerCall, batch: Sequence[bytes]) -> bool:
        """Send messages; return whether it was much for a turn of the loop."""
        self._connection.send(call, batch)
        return self._flush_if_much()

    def _flush_if_much(self) -> bool:
        """Write at once what others of this turn should know of, and the rest at its end."""
        is_much = self._connection.http.output_bytes >= FLUSH_BYTES
        if is_much:
            self._writer.flush_now()
        else:
            self._writer.flush_soon()
        return is_much

    def write(self, call: ServerCall, message: bytes) -> None:
        """Send a message at once."""
        self._connection.send(call, (message,))
        self._writer.flush_now()

    def has_room(self, count: int) -> bool:
        """Whether the connection may hold `count` bytes more, as far as that is its own doing."""
        return not self._room_wanted and self._connection.share.has_room(count)

    def hold(self, call: ServerCall, count: int) -> bool:
        """Take room for what is held for a call until it ends; False where there is none."""
        return self._connection.memory.hold(call, count)

    async def hold_in_turn(self, call: ServerCall, count: int, timeout_s: float) -> bool:
        """Take room as soon as the connection has it; see `RpcCall`."""
        taken: asyncio.Future[bool] = self.loop.create_future()
        self._room_wanted[taken] = call, count
        self._offer_room()
        try:
            async with asyncio.timeout(timeout_s):
                return await taken
        except TimeoutError:
            return False
        finally:
            self._room_wanted.pop(taken, None)
            self._offer_room()  # For who comes after it, and may want less.

    def release(self, call: ServerCall, count: int) -> None:
        """Give room back before the call ends."""
        self._connection.memory.release(call, count)
        if self._room_wanted:
            self._offer_room()

    def _offer_room(self) -> None:
        """Give room to those who wait for it, in turn."""
        while self._room_wanted:
            taken, (call, count) = next(iter(self._room_wanted.items()))
            if not taken.done():
                if not self._connection.share.has_room(count):
                    return
                taken.set_result(self._connection.memory.hold(call, count))
            del self._room_wanted[taken]

    def consumed(self, call: ServerCall, wire_bytes: int, held_bytes: int) -> None:
        """Let the client send more: a request of a stream has been answered."""
        if held_bytes:
            self.release(call, held_bytes)
        self._connection.consume(call, wire_bytes)
        if self._connection.http.has_output:
            self._writer.flush_soon()
        if self._connection.has_more:
            self._go_on_later()

    def expire(self, served: RpcCall) -> None:
        """End a call whose time is up."""
        self._connection.finish(served.call, RpcCode.DEADLINE_EXCEEDED, "the deadline has passed")
        self._cancel(served)
        self._writer.flush_soon()

    # ------------------------------------------------------------ for the server

    def check(self, now_s: float) -> None:
        """End what stands still."""
        if self._closed_at_s is not None:
            if now_s - self._closed_at_s > CLOSE_TIMEOUT_S:
                self._transport.abort()
            return
        if self._writer.is_paused and not self._connection.http.is_closed:
            # Not read, the client cannot answer a ping; it is to read.
            self._writer.count()
            unread_bytes = self._writer.buffered_bytes
            if unread_bytes != self._unread_bytes:
                self._unread_bytes, self._moved_at_s = unread_bytes, now_s
            elif now_s - self._moved_at_s > self._server.limits.stall_timeout_s:
                self._server.notices.hits[Limit.STALLED] += 1
                self._transport.abort()
            return
        self._writer.recount()
        self.read_answers.forget_old(now_s)
        for event in self._connection.check(now_s):
            self._on_event(event)
        self._check_age(now_s)
        if self._connection.http.has_output:
            self._writer.flush_soon()

    def _check_age(self, now_s: float) -> None:
        if now_s < self._leaves_at_s:
            return
        if not self._is_old:
            self._is_old = True
            self._server.notices.hits[Limit.AGE] += 1
            self.drain()
        # Not before the next look: a call may be on its way.
        elif not self.calls or now_s > self._leaves_at_s + self._server.limits.age_grace_s:
            self.close("the connection is old; open another")

    @property
    def is_told_to_leave(self) -> bool:
        """Whether the client has been told, which it can be once it has greeted."""
        return self._connection.http.is_drain_announced or self._transport.is_closing()

    @property
    def has_heard_to_leave(self) -> bool:
        """Whether the client has answered to that."""
        return self._connection.http.is_drain_acknowledged or self._transport.is_closing()

    def drain(self) -> None:
        """Let the client know that this server stops, and end its streams of requests."""
        self._connection.http.start_drain()
        for served in self.calls.values():
            if served.method.kind is RpcKind.BIDIRECTIONAL:
                served.end_requests()
        self._writer.flush_soon()

    def close(self, reason: str) -> None:
        """End the connection once its last words are written."""
        for event in self._connection.close(ErrorCode.NO_ERROR, reason):
            self._on_event(event)

    def abort(self) -> None:
        """End the connection now."""
        self._transport.abort()
