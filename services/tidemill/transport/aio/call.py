"""What those who serve calls see of one: the shell's side of the seam."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.transport.grpc.messages import PREFIX_SIZE
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.header_block import Fields

if TYPE_CHECKING:
    from tidemill.transport.aio.server import ServerProtocol
    from tidemill.transport.grpc.server_call import RequestPolicy, ServerCall

# One batch: a call has no more than this, or one message, unsent.
SEND_BYTES_MAX: Final = 256 << 10


class RpcKind(Enum):
    """How many messages go which way."""

    UNARY = "unary"
    SERVER_STREAMING = "server streaming"
    BIDIRECTIONAL = "bidirectional"


class DisconnectError(Exception):
    """Raised by a send whose message cannot be handed over any more."""


class RequestTooLarge(RpcError):
    """Raised by the iteration over requests for one that was thrown away; others may follow it."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(
            RpcCode.RESOURCE_EXHAUSTED, f"a message of {size_bytes} bytes is over the limit"
        )
        self.size_bytes = size_bytes


UnaryHandler = Callable[["RpcCall", bytes], Awaitable[bytes]]
StreamingHandler = Callable[["RpcCall", bytes], Awaitable[None]]
BidirectionalHandler = Callable[["RpcCall"], Awaitable[None]]


class RpcMethod(NamedTuple):
    """How a method is served. Streams are answered through the call's `send` and `send_all`."""

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
    """Return a method with a stream in both directions; the call iterates over the requests."""
    return RpcMethod(RpcKind.BIDIRECTIONAL, handle, policy)


@final
class RpcCall:
    """One call that is being served. A handler is cancelled when the client or the time is gone."""

    __slots__ = (
        "_are_requests_ended",
        "_protocol",
        "_requests",
        "_taken",
        "_waiter",
        "_writers",
        "call",
        "method",
        "request",
        "sent_count",
        "task",
        "tell_read",
        "tick",
    )

    def __init__(self, protocol: ServerProtocol, call: ServerCall, method: RpcMethod) -> None:
        self._protocol = protocol
        self.call = call
        self.method = method
        self.request: bytes | None = None  # of a method with one, once it has come
        self.task: asyncio.Task[None] | None = None
        self.tick = 0  # of its deadline
        self.sent_count = 0  # messages that have left us
        # Who is to hear that the client has read the whole answer; few calls have one.
        self.tell_read: Callable[[], None] | None = None
        # For streams of requests. Few wait here, MESSAGES_UNREAD_MAX.
        self._requests: deque[tuple[bytes, int, int, int]] | None = None
        self._taken: tuple[int, int] | None = None  # by the reader, of a request it has in hand
        self._are_requests_ended = False
        self._waiter: asyncio.Future[None] | None = None  # of the reader
        self._writers: list[asyncio.Future[None]] = []  # senders that wait for room

    @property
    def metadata(self) -> Fields:
        """The call's header fields."""
        return self.call.metadata

    @property
    def time_remaining_s(self) -> float | None:
        """Seconds until the client's deadline; None where it has set none."""
        if self.call.timeout_s is None:
            return None
        return self.call.timeout_s - (time.monotonic() - self.call.stream.opened_at_s)

    def peer(self) -> str:
        """Return the client's address."""
        return self._protocol.peer

    def has_room(self, size_bytes: int) -> bool:
        """Whether the connection may hold as much more, as far as that is its own doing.

        Not while others wait for room.
        """
        return self._protocol.has_room(size_bytes)

    def hold(self, size_bytes: int) -> bool:
        """Take room for a reply until the call ends; False where there is none."""
        return self._protocol.hold(self.call, size_bytes)

    async def hold_in_turn(self, size_bytes: int, *, timeout_s: float) -> bool:
        """Do as `hold`, and wait for the room where the client has yet to read for it.

        One after the other, in the order of asking. False: in that time there was none, or, before
        it is over, it is the process that has none.
        """
        return await self._protocol.hold_in_turn(self.call, size_bytes, timeout_s)

    def release(self, size_bytes: int) -> None:
        """Give back room that was taken and is not needed."""
        self._protocol.release(self.call, size_bytes)

    def expire(self) -> None:
        """End the call: its time is up."""
        self._protocol.expire(self)

    @property
    def connection(self) -> Hashable:
        """What this call has in common with the others of its connection, and with no other."""
        return self._protocol

    def leave(self) -> None:
        """Let the client know that it has to leave this connection, and end its streams."""
        self._protocol.drain()

    # ------------------------------------------------------------ responses

    async def send(self, message: bytes) -> None:
        """Send one message; wait while the client does not read. Raises DisconnectError."""
        await self.send_all((message,))

    async def send_all(self, messages: Sequence[bytes]) -> None:
        """Send messages together, in one write where they fit; see `send`.

        However it ends, `sent_count` has grown by the messages that have left.
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
                self.sent_count += _whole(batch, self.call.queued_total_bytes - unsent - before)
                raise
            self.sent_count += len(batch)

    def when_read(self, tell: Callable[[], None]) -> None:
        """Call `tell` once the client's transport has read this call's answer to its end.

        Never where that is not known: the call or the connection ended before.
        """
        self.tell_read = tell

    def write(self, message: bytes) -> None:
        """Send one message, a batch in itself, at once and without waiting.

        The caller keeps an eye on `unsent_bytes`.
        """
        self._protocol.write(self.call, message)

    @property
    def unsent_bytes(self) -> int:
        """What waits for the client to read."""
        return self.call.stream.queued_bytes

    async def drained(self) -> None:
        """Wait until nothing is unsent, or the client is gone."""
        while not self.call.is_ended and (self.unsent_bytes or self._protocol.is_paused):
            await self._room()

    async def _send_batch(self, batch: Sequence[bytes]) -> None:
        protocol = self._protocol
        # Before it takes more: a connection holds what was given to it, read or not.
        while protocol.is_congested and not self.call.is_ended:
            protocol.crowd.add(self)
            await self._room()
        if self.call.is_ended:
            raise DisconnectError
        if protocol.send(self.call, batch):
            # Whoever sends on and on keeps nobody else waiting, however fast its client reads.
            await asyncio.sleep(0)
        while self.unsent_bytes or protocol.is_paused:
            await self._room()

    async def _room(self) -> None:
        """Wait until there may be room."""
        room: asyncio.Future[None] = self._protocol.loop.create_future()
        self._writers.append(room)
        await room

    def wake_writers(self) -> None:
        """Go on sending: there may be room."""
        writers, self._writers = self._writers, []
        for room in writers:
            if not room.done():
                room.set_result(None)

    # ------------------------------------------------------------ requests

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        """Return the next request of a stream, until the client or the server ends it.

        Raises RequestTooLarge for one that was, and goes on with the next one after that.

        For one task only. Whoever asks for the next one is done with the last one: only then its
        room is given back, and the client may send more.
        """
        assert self._waiter is None, "one task reads the requests"
        if self._taken is not None:
            self._protocol.consumed(self.call, *self._taken)
            self._taken = None
            if self._requests:
                # One in a turn of the loop: whoever sends many keeps nobody else waiting.
                await asyncio.sleep(0)
        while not self._requests:
            if self._are_requests_ended:
                raise StopAsyncIteration
            self._waiter = self._protocol.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        request, wire_bytes, held_bytes, skipped_bytes = self._requests.popleft()
        self._taken = wire_bytes, held_bytes
        if skipped_bytes:
            raise RequestTooLarge(skipped_bytes)
        return request

    def put_request(
        self, message: bytes, wire_bytes: int, held_bytes: int, skipped_bytes: int = 0
    ) -> None:
        """Take a request that has come, and the room that it has; or that it was thrown away."""
        if self._requests is None:
            self._requests = deque()
        self._requests.append((message, wire_bytes, held_bytes, skipped_bytes))
        self._wake_reader()

    def end_requests(self) -> None:
        """Let the iteration end after what has come already."""
        self._are_requests_ended = True
        self._wake_reader()

    def _wake_reader(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _whole(batch: Sequence[bytes], sent_bytes: int) -> int:
    """Return how many messages of `batch` the first `sent_bytes` hold as a whole."""
    count = 0
    for message in batch:
        sent_bytes -= len(message) + PREFIX_SIZE
        if sent_bytes < 0:
            break
        count += 1
    return count
