"""The memory of one server connection: room for calls, messages and replies (ADR 0030).

A message larger than its stream's window needs room before its remaining bytes may arrive. If there
is no room, the message waits in the account's `RoomQueue`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, final

from tidemill.transport.grpc.address_share import AddressShare
from tidemill.transport.grpc.memory import MemoryAccount, MemoryShare
from tidemill.transport.grpc.room_queue import RoomTicket
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.flow_control import PROGRESS_BYTES

if TYPE_CHECKING:
    from tidemill.transport.grpc.messages import CompleteMessage, MessageAssembler
    from tidemill.transport.grpc.server_call import ServerCall
    from tidemill.transport.http2.connection import Connection
    from tidemill.transport.http2.limits import Limits

# A call itself, with its stream, its task and its state at the link.
CALL_BYTES: Final = 4 << 10
# Reserved for an incomplete message within the window: overhead of its parts.
RESERVED_BYTES: Final = 1 << 10
# A waiting message costs this beside its bytes: an object, an event, an entry of a queue.
MESSAGE_BYTES: Final = 128
# A reply up to this size is part of the room of its call. A larger one needs room or is rejected.
# Less output is not counted before it is written.
SMALL_REPLY_BYTES: Final = 4 << 10
# A large message waits for room for half of the time of its call, because the other half is for
# sending it, and at most this long. Official clients give a send three seconds.
ROOM_WAIT_S_MAX: Final = 5.0
# An inflated message is parsed, encoded and framed later. Its bytes cost the client almost nothing,
# so it needs room for all copies at once. Other messages have one copy at a time.
INFLATED_COPIES: Final = 4
_NO_MEMORY: Final = "the server has no more memory for this client; retry after a pause"


class MemoryExhausted(RpcError):
    """The server has no memory for a message."""

    def __init__(self) -> None:
        super().__init__(RpcCode.RESOURCE_EXHAUSTED, _NO_MEMORY)


@final
class ConnectionMemory:
    """The memory that one connection holds, and its requests for room in the queue."""

    def __init__(
        self, http: Connection, limits: Limits, account: MemoryAccount, address: AddressShare | None
    ) -> None:
        self.share = MemoryShare(account, limits.held_bytes_max, address)
        self.on_grant: Callable[[], None] = _do_nothing  # called when a waiting message may arrive
        self.foreign_bytes = 0  # of requests that are not gRPC
        self._http = http
        self._queue = account.queue
        self._ticket = RoomTicket(address)
        self._requests: dict[int, ServerCall] = {}  # calls that wait for room, in order
        self.counted_bytes = 0  # of the share, for windows and unwritten output
        self._buffered_bytes = 0  # output that was taken and not written yet
        self._unread_bytes_max = limits.unread_bytes_max
        # A waiting message already holds one window of bytes.
        self._waiting_bytes = CALL_BYTES + limits.stream_window_bytes

    # ------------------------------------------------------------ calls and replies

    def hold(self, call: ServerCall, count: int) -> bool:
        """Take room for `count` bytes until the call ends; return False if there is none."""
        if call.is_ended or not self.share.take(count):
            return False
        call.held_bytes += count
        return True

    def admit(self, call: ServerCall, count: int) -> None:
        """Take room for `count` bytes until the call ends; raise MemoryExhausted."""
        if not self.hold(call, count):
            raise MemoryExhausted

    def release(self, call: ServerCall, count: int) -> None:
        """Return room before the call ends."""
        if not call.is_ended:
            count = min(count, call.held_bytes - CALL_BYTES - call.stream.header_bytes)
            call.held_bytes -= count
            self.share.release(count)

    def has_room_for_reply(self, count: int) -> bool:
        """Return whether a reply of `count` bytes has room."""
        unwritten_bytes = self._http.output_bytes + self._buffered_bytes
        return unwritten_bytes <= self._unread_bytes_max and self.share.is_fair(count)

    def count_buffered(self, count: int) -> bool:
        """Set the bytes of taken output that are not written; return whether more has room."""
        self._buffered_bytes = count
        self.count_windows()
        return self.share.is_fair(0)

    def count_windows(self) -> None:
        """Count the data that the windows of both sides allow, even if there is no room.

        Unread input and unwritten output are included, even if all windows are open.
        """
        counted_bytes = self._http.held_bytes(output_bytes_min=SMALL_REPLY_BYTES)
        counted_bytes += self._buffered_bytes + self.foreign_bytes
        if counted_bytes != self.counted_bytes:
            self.share.count_granted(counted_bytes)
            self.counted_bytes = counted_bytes

    # ------------------------------------------------------------ messages

    def hold_messages(
        self, call: ServerCall, complete: Sequence[CompleteMessage], reader: MessageAssembler
    ) -> list[int]:
        """Hold room for complete messages and for the received part of the next one.

        Return the room of each message. Inflated messages already have room. The announced length
        of a message within the window is not held, so a prefix of five bytes costs nothing.

        Room granted beyond the window is counted with the connection. A message larger than the
        window is held in full, because other messages are granted the free room.
        """
        stream = call.stream
        beyond_bytes = stream.large_bytes
        if call.room_requested_at_s is not None:
            beyond_bytes += self._beyond_bytes(call)
        reading_bytes = max(reader.bound_bytes - beyond_bytes, 0)
        if not beyond_bytes:
            reading_bytes = min(reading_bytes, reader.held_bytes + RESERVED_BYTES)
        held: list[int] = []
        plain_bytes = 0
        for message, _, is_inflated, _ in complete:
            own_bytes = MESSAGE_BYTES if held or call.unread_count else 0
            plain_bytes += own_bytes
            if is_inflated:
                held.append(own_bytes + len(message) * INFLATED_COPIES)
                continue
            held_bytes = max(len(message) - beyond_bytes, 0)
            beyond_bytes = max(beyond_bytes - len(message), 0)
            plain_bytes += held_bytes
            held.append(own_bytes + held_bytes)
        more = reading_bytes + plain_bytes - call.reading_bytes
        call.reading_bytes = reading_bytes
        if more > 0 and stream.large_bytes:
            # The grant includes the first window of the message. Rejecting the message now would
            # waste the granted room.
            call.held_bytes += more
            self.share.add(more)
        elif more > 0:
            self.admit(call, more)
        else:
            self.release(call, -more)
        return held

    def request_room(self, call: ServerCall, reader: MessageAssembler) -> None:
        """Let the remaining bytes of a message arrive when there is room for them.

        Raises MemoryExhausted if there is no room in the queue.
        """
        stream, beyond_bytes = call.stream, self._beyond_bytes(call)
        if call.room_requested_at_s is not None:
            if not beyond_bytes:  # Reading of earlier messages has opened the window.
                self.withdraw(call)
            return
        if call.is_granted:
            # A granted message needs no second grant. If the window is too small nevertheless,
            # padding has used it.
            if beyond_bytes:
                self._http.return_window(stream)
            return
        if not beyond_bytes:
            # A granted message may arrive, even if other messages need room now.
            if not stream.large_bytes and not self.share.is_fair(reader.missing_bytes):
                raise MemoryExhausted
            return
        if not self._queue.is_contended(self._ticket) and self._may_grant(call):
            self._grant(call)
        elif self._queue.join(self._ticket, self, self._waiting_bytes):
            call.room_requested_at_s = self._http.heard_at_s
            self._requests[stream.id] = call
        else:
            raise MemoryExhausted

    def finish_message(self, call: ServerCall) -> None:
        """End the room request of a complete message; the next message makes its own."""
        call.is_granted = False
        self._http.leave_window(call.stream)
        call.message_begun_at_s = self._http.heard_at_s
        if call.room_requested_at_s is not None:
            self.withdraw(call)

    def withdraw(self, call: ServerCall) -> None:
        """Withdraw the room request of a call."""
        call.room_requested_at_s = None
        del self._requests[call.stream.id]
        self._queue.withdraw(self._ticket, self._waiting_bytes)

    def grant_next(self) -> bool:
        """Let the message arrive that has waited longest; return False if there is no room."""
        call = next(iter(self._requests.values()))
        if not self._may_grant(call):
            return False
        self.withdraw(call)
        self._grant(call)
        self.on_grant()
        return True

    @property
    def is_short_of_room(self) -> bool:
        """Whether its next message waits for free room, not for its own memory."""
        call = next(iter(self._requests.values()))
        reserved_bytes = self._queue.reserved_for(self._ticket)
        return self.share.is_short_of_room(self._beyond_bytes(call), reserved_bytes)

    def close(self) -> None:
        """Drop the callback, because it refers to the connection in a cycle."""
        self.on_grant = _do_nothing

    def _beyond_bytes(self, call: ServerCall) -> int:
        """Return the unsent bytes of a call's message that do not fit its window."""
        return max(self._unsent_bytes(call) - call.stream.receive_window, 0)

    def _unsent_bytes(self, call: ServerCall) -> int:
        """Return the bytes of a call's message that the client has not sent yet.

        All frames of a read are subtracted from the window before the first one is processed. The
        content of the later frames has arrived, although the reader does not have it.
        """
        if call.reader is None:
            return 0
        return call.reader.missing_bytes - (call.stream.content_bytes - call.processed_bytes)

    def _may_grant(self, call: ServerCall) -> bool:
        beyond_bytes = self._beyond_bytes(call)
        reserved_bytes = self._queue.reserved_for(self._ticket)
        return self._http.has_budget(beyond_bytes) and self.share.leaves_room(
            beyond_bytes, reserved_bytes
        )

    def _grant(self, call: ServerCall) -> None:
        call.is_granted, call.progress_at_s = True, None
        self._http.request_room(call.stream, self._unsent_bytes(call))
        self.count_windows()


def room_wait_s(call: ServerCall) -> float:
    """Return the time for which a call's message may wait for room."""
    return min(ROOM_WAIT_S_MAX, call.timeout_s / 2) if call.timeout_s else ROOM_WAIT_S_MAX


def is_too_slow(call: ServerCall, now_s: float, patience_s: float) -> bool:
    """Return whether a granted message arrives too slowly for the room that it holds."""
    if not call.is_granted:
        return False
    content_bytes = call.stream.content_bytes
    if call.progress_at_s is None or content_bytes - call.progress_bytes >= PROGRESS_BYTES:
        call.progress_at_s, call.progress_bytes = now_s, content_bytes
    return now_s - call.progress_at_s > patience_s


def _do_nothing() -> None:
    """Do nothing."""
