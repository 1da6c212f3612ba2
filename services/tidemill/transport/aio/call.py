"""A call as its handler sees it: metadata, requests, responses and memory."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, final

from tidemill.transport.grpc.messages import PREFIX_SIZE
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.header_block import Fields

if TYPE_CHECKING:
    from tidemill.transport.grpc.server_call import RequestPolicy, ServerCall

SEND_BYTES_MAX: Final = 256 << 10  # of one batch: the most that a call has unsent, or one message


class RpcKind(Enum):
    """The numbers of requests and responses of a method."""

    UNARY = "unary"
    SERVER_STREAMING = "server streaming"
    BIDIRECTIONAL = "bidirectional"


class DisconnectError(Exception):
    """A message cannot be sent, because the client has disconnected."""


class RequestTooLarge(RpcError):
    """A request of a stream was discarded as too large; the iteration may continue."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(
            RpcCode.RESOURCE_EXHAUSTED, f"a message of {size_bytes} bytes is over the limit"
        )
        self.size_bytes = size_bytes


# Returns the response, or None: then the handler answers with `RpcCall.respond`, without a task.
UnaryHandler = Callable[["RpcCall", bytes], Coroutine[Any, Any, bytes] | None]
StreamingHandler = Callable[["RpcCall", bytes], Awaitable[None]]
BidirectionalHandler = Callable[["RpcCall"], Awaitable[None]]


class RpcMethod(NamedTuple):
    """A method and its handler; a stream is sent with `send` and `send_all` of the call."""

    kind: RpcKind
    handle: UnaryHandler | StreamingHandler | BidirectionalHandler
    policy: RequestPolicy | None = None  # of requests; None: that of the server


def unary(handle: UnaryHandler, policy: RequestPolicy | None = None) -> RpcMethod:
    """Return a method with one request and one response."""
    return RpcMethod(RpcKind.UNARY, handle, policy)


def server_streaming(handle: StreamingHandler, policy: RequestPolicy | None = None) -> RpcMethod:
    """Return a method with one request and a stream of responses."""
    return RpcMethod(RpcKind.SERVER_STREAMING, handle, policy)


def bidirectional(handle: BidirectionalHandler, policy: RequestPolicy | None = None) -> RpcMethod:
    """Return a method with two streams; the handler iterates over the requests of the call."""
    return RpcMethod(RpcKind.BIDIRECTIONAL, handle, policy)


class CallConnection(Protocol):
    """The connection of a call, as `RpcCall` uses it; `ServerProtocol` is one."""

    loop: asyncio.AbstractEventLoop
    peer: str  # address of the client
    waiting_senders: set[RpcCall]  # calls that wait until the connection is not congested

    def __hash__(self) -> int:
        """Return the hash of the connection's identity."""

    @property
    def certificate_names(self) -> Sequence[str]:
        """The names in the client's certificate; none without a certificate."""

    @property
    def is_paused(self) -> bool:
        """Whether the client does not read the sent data."""

    @property
    def is_congested(self) -> bool:
        """Whether the connection should get no more data for now."""

    def send(self, call: ServerCall, batch: Sequence[bytes]) -> bool:
        """Send messages; return whether they are much for one turn of the event loop."""

    def write(self, call: ServerCall, message: bytes) -> None:
        """Send a message at once."""

    def respond(self, served: RpcCall, response: bytes) -> None:
        """Answer a unary call, and end it."""

    def answer_in_task(self, served: RpcCall, answering: Coroutine[Any, Any, bytes]) -> None:
        """Await the response to a unary call in a task."""

    def consume(self, call: ServerCall, wire_bytes: int, held_bytes: int) -> None:
        """Let the client send more, because a request of a stream was answered."""

    def has_room(self, count: int) -> bool:
        """Return whether the connection itself may hold `count` more bytes."""

    def hold(self, call: ServerCall, count: int) -> bool:
        """Take room until the call ends; return False if there is none."""

    async def hold_in_turn(self, call: ServerCall, count: int, timeout_s: float) -> bool:
        """Take room when the connection has it; return False if there is none in time."""

    def release(self, call: ServerCall, count: int) -> None:
        """Return room before the call ends."""

    def expire(self, served: RpcCall) -> None:
        """End a call after its deadline."""

    def drain(self) -> None:
        """Ask the client to leave, and end its streams of requests."""


@final
class RpcCall:
    """One call in progress. Its handler is cancelled at its deadline or a disconnect."""

    __slots__ = (
        "_are_requests_ended",
        "_current_request",
        "_protocol",
        "_reader",
        "_requests",
        "_senders",
        "answering",
        "call",
        "method",
        "on_cancel",
        "on_read",
        "request",
        "sent_count",
        "task",
        "tick",
    )

    def __init__(self, protocol: CallConnection, call: ServerCall, method: RpcMethod) -> None:
        self._protocol = protocol
        self.call = call
        self.method = method
        self.request: bytes | None = None  # of a method with one request, after its arrival
        self.answering: Coroutine[Any, Any, bytes] | None = None  # until its task awaits it
        self.task: asyncio.Task[None] | None = None
        self.tick = 0  # of its deadline
        self.sent_count = 0  # messages that were sent
        # Called if the call ends before `respond`; only a call without a task has one.
        self.on_cancel: Callable[[], None] | None = None
        # Called after the client has read the whole response; few calls have one.
        self.on_read: Callable[[], None] | None = None
        # Requests of a stream that are not read yet, at most MESSAGES_UNREAD_MAX.
        self._requests: deque[tuple[bytes, int, int, int]] | None = None
        self._current_request: tuple[int, int] | None = None  # sizes of the one being handled
        self._are_requests_ended = False
        self._reader: asyncio.Future[None] | None = None  # waits for a request
        self._senders: list[asyncio.Future[None]] = []  # wait for room

    @property
    def metadata(self) -> Fields:
        """The header fields of the call."""
        return self.call.metadata

    @property
    def time_remaining_s(self) -> float | None:
        """Seconds until the client's deadline; None if there is none."""
        if self.call.timeout_s is None:
            return None
        return self.call.timeout_s - (time.monotonic() - self.call.stream.opened_at_s)

    def peer(self) -> str:
        """Return the address of the client."""
        return self._protocol.peer

    @property
    def certificate_names(self) -> Sequence[str]:
        """The names in the client's certificate; none without a certificate."""
        return self._protocol.certificate_names

    def has_room(self, size_bytes: int) -> bool:
        """Return whether the limit of the connection allows `size_bytes` more.

        It does not while other calls wait for room.
        """
        return self._protocol.has_room(size_bytes)

    def hold(self, size_bytes: int) -> bool:
        """Take room for a reply until the call ends; return False if there is none."""
        return self._protocol.hold(self.call, size_bytes)

    async def hold_in_turn(self, size_bytes: int, *, timeout_s: float) -> bool:
        """Take room as `hold` does; wait in order until the client has read earlier replies.

        Return False if there is no room in time, or at once if the process has none.
        """
        return await self._protocol.hold_in_turn(self.call, size_bytes, timeout_s)

    def release(self, size_bytes: int) -> None:
        """Return room that is not needed."""
        self._protocol.release(self.call, size_bytes)

    def expire(self) -> None:
        """End the call after its deadline."""
        self._protocol.expire(self)

    @property
    def connection(self) -> Hashable:
        """An identity of the connection, equal for its calls only."""
        return self._protocol

    def drain_connection(self) -> None:
        """Ask the client to leave this connection, and end its streams of requests."""
        self._protocol.drain()

    # ------------------------------------------------------------ responses

    def respond(self, response: bytes) -> None:
        """Answer a unary call whose handler has returned None.

        `on_cancel` is called if the call ends before: its client has cancelled it or disconnected.
        Afterwards there is no call to answer.
        """
        self.on_cancel = None
        self._protocol.respond(self, response)

    def answer_in_task(self, answering: Coroutine[Any, Any, bytes]) -> None:
        """Answer a unary call whose handler has returned None with the result of `answering`."""
        self.on_cancel = None
        self._protocol.answer_in_task(self, answering)

    async def send(self, message: bytes) -> None:
        """Send one message; wait while the client does not read. Raises DisconnectError."""
        await self.send_all((message,))

    async def send_all(self, messages: Sequence[bytes]) -> None:
        """Send messages together, in one write if they fit; see `send`.

        In every case `sent_count` increases by the messages that were sent.
        """
        at, count = 0, len(messages)
        while at < count:
            size, first = 0, at
            while at < count and (size == 0 or size + len(messages[at]) <= SEND_BYTES_MAX):
                size += len(messages[at]) + PREFIX_SIZE
                at += 1
            batch = messages if at - first == count else messages[first:at]
            before = self.call.queued_total_bytes
            try:
                await self._send_batch(batch)
            except BaseException:
                unsent = self.call.stream.queued_bytes
                sent_bytes = self.call.queued_total_bytes - unsent - before
                self.sent_count += _complete_count(batch, sent_bytes)
                raise
            self.sent_count += len(batch)

    def when_read(self, notify: Callable[[], None]) -> None:
        """Call `notify` after the client's transport has read the whole response of this call.

        If the call or the connection ends first, `notify` is not called.
        """
        self.on_read = notify

    def write(self, message: bytes) -> None:
        """Send one message at once without waiting, as a batch of its own.

        The caller checks `unsent_bytes`.
        """
        self._protocol.write(self.call, message)

    @property
    def unsent_bytes(self) -> int:
        """The bytes that wait for the client to read."""
        return self.call.stream.queued_bytes

    async def wait_drained(self) -> None:
        """Wait until all messages are sent or the client has disconnected."""
        while not self.call.is_ended and (self.unsent_bytes or self._protocol.is_paused):
            await self._wait_for_room()

    async def _send_batch(self, batch: Sequence[bytes]) -> None:
        protocol = self._protocol
        # Wait first, because a connection holds all messages until they are read.
        while protocol.is_congested and not self.call.is_ended:
            protocol.waiting_senders.add(self)
            await self._wait_for_room()
        if self.call.is_ended:
            raise DisconnectError
        if protocol.send(self.call, batch):
            # A fast client with many messages must not block other calls.
            await asyncio.sleep(0)
        while self.unsent_bytes or protocol.is_paused:
            await self._wait_for_room()

    async def _wait_for_room(self) -> None:
        """Wait until there may be room."""
        room: asyncio.Future[None] = self._protocol.loop.create_future()
        self._senders.append(room)
        await room

    def wake_senders(self) -> None:
        """Wake the senders, because there may be room."""
        senders, self._senders = self._senders, []
        for room in senders:
            if not room.done():
                room.set_result(None)

    # ------------------------------------------------------------ requests

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        """Return the next request of a stream, until the client or the server ends it.

        Raises RequestTooLarge for a discarded request; the next call returns the one after it.

        Only one task may read. The call for the next request ends the last one: its room is
        returned, and the client may send more.
        """
        assert self._reader is None, "one task reads the requests"
        if self._current_request is not None:
            self._protocol.consume(self.call, *self._current_request)
            self._current_request = None
            if self._requests:
                # One request per turn of the event loop, so that a stream does not block others.
                await asyncio.sleep(0)
        while not self._requests:
            if self._are_requests_ended:
                raise StopAsyncIteration
            self._reader = self._protocol.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        request, wire_bytes, held_bytes, skipped_bytes = self._requests.popleft()
        self._current_request = wire_bytes, held_bytes
        if skipped_bytes:
            raise RequestTooLarge(skipped_bytes)
        return request

    def put_request(
        self, message: bytes, wire_bytes: int, held_bytes: int, skipped_bytes: int = 0
    ) -> None:
        """Add a received request with its room, or a discarded one with `skipped_bytes`."""
        if self._requests is None:
            self._requests = deque()
        self._requests.append((message, wire_bytes, held_bytes, skipped_bytes))
        self._wake_reader()

    def end_requests(self) -> None:
        """End the iteration after the received requests."""
        self._are_requests_ended = True
        self._wake_reader()

    def _wake_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)


def _complete_count(batch: Sequence[bytes], sent_bytes: int) -> int:
    """Return the number of messages of `batch` that are complete within `sent_bytes`."""
    count = 0
    for message in batch:
        sent_bytes -= len(message) + PREFIX_SIZE
        if sent_bytes < 0:
            break
        count += 1
    return count
