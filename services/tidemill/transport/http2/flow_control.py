"""Flow control: the windows of a connection and its streams, and the data that waits for them.

`OutgoingFlow` is what the peer lets us send. Data without a window is queued. A stream whose window
stays closed does not delay other streams.

`IncomingFlow` is what we let the peer send. We open our connection window again at once, because a
closed one would make streams wait for each other. We open a stream's window again when the
application has read its data (`consume`). A message that is larger than the window gets the
remaining bytes from a budget that all streams of the connection share (`request_room`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, final

from tidemill.transport.http2 import frames
from tidemill.transport.http2.frames import HEADER, ConnectionFailure, ErrorCode, StreamFailure
from tidemill.transport.http2.stream_states import REMOTE_ENDED

if TYPE_CHECKING:
    from tidemill.transport.http2.allowances import Allowances
    from tidemill.transport.http2.stream import Stream

# So large that no client fills it within a round trip.
CONNECTION_WINDOW_BYTES: Final = 16 << 20
# The amount that counts as progress: of data that waits for a stream's window, or of a message that
# was granted room. A peer that moves less within the stall timeout (`Limits.stall_timeout_s`), a
# kilobyte per second, wastes the memory.
PROGRESS_BYTES: Final = 64 << 10
_BAD_INCREMENT: Final = "a window increment is 0 or too large"
_pack_header: Final = HEADER.pack

# Called after the last queued byte of a stream; the connection then sends the end.
Drained = Callable[["Stream"], None]


@final
class OutgoingFlow:
    """The windows for our data, and the data that waits for them."""

    __slots__ = (
        "_allowances",
        "_output",
        "blocked",
        "frame_bytes",
        "granted_bytes",
        "queued_bytes",
        "window",
    )

    def __init__(self, output: list[bytes], allowances: Allowances) -> None:
        self.window = frames.DEFAULT_WINDOW_BYTES  # of the connection
        self.granted_bytes = frames.DEFAULT_WINDOW_BYTES  # by the peer, in total
        self.frame_bytes = frames.DEFAULT_FRAME_BYTES
        self.queued_bytes = 0  # of all streams
        self.blocked: dict[int, Stream] = {}  # streams with queued data
        self._output = output
        self._allowances = allowances

    @property
    def sent_bytes(self) -> int:
        """The data bytes that have left through the windows."""
        return self.granted_bytes - self.window

    def add_window(self, increment: int) -> None:
        """Increase the window of the connection."""
        self.window += increment
        self.granted_bytes += increment
        if increment == 0 or self.window > frames.WINDOW_MAX:
            raise ConnectionFailure(_code_of(increment), _BAD_INCREMENT)

    def add_stream_window(self, stream: Stream, increment: int) -> None:
        """Increase the window of a stream."""
        stream.send_window += increment
        if increment == 0 or stream.send_window > frames.WINDOW_MAX:
            raise StreamFailure(stream.id, _code_of(increment), _BAD_INCREMENT)

    def resize(self, streams: Iterable[Stream], change: int) -> None:
        """Change the window of every stream; a window may become negative."""
        for stream in streams:
            stream.send_window += change
            if stream.send_window > frames.WINDOW_MAX:
                raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "a window is too large")

    def enqueue(self, stream: Stream, data: bytes, now_s: float) -> None:
        """Queue data until the windows open."""
        if stream.queue is None:
            stream.queue = deque()
            stream.moved_at_s, stream.unmoved_bytes = now_s, 0
        stream.queue.append(memoryview(data))
        stream.queued_bytes += len(data)
        self.queued_bytes += len(data)
        self.blocked[stream.id] = stream

    def send_blocked(self, now_s: float, drained: Drained) -> None:
        """Send queued data while the windows allow: one frame of each stream in turn.

        A stream goes to the end after its turn, so that a slowly opening window serves all streams.
        """
        has_moved = True
        while has_moved and self.window > 0 and self.blocked:
            has_moved = False
            for stream in list(self.blocked.values()):
                if stream.send_window > 0 and self.window > 0:
                    self._send_frame(stream, now_s, drained)
                    if stream.queue:
                        self.blocked[stream.id] = self.blocked.pop(stream.id)
                    has_moved = True

    def send_queued(self, stream: Stream, now_s: float, drained: Drained) -> None:
        """Send the queued data of one stream while the windows allow."""
        while stream.queue and stream.send_window > 0 and self.window > 0:
            self._send_frame(stream, now_s, drained)

    def remove(self, stream: Stream) -> None:
        """Drop the queued data of an ended stream."""
        self.queued_bytes -= stream.queued_bytes  # The stream keeps its count of unsent bytes.
        stream.queue = None
        del self.blocked[stream.id]

    def _send_frame(self, stream: Stream, now_s: float, drained: Drained) -> None:
        """Send one queued DATA frame; call `drained` after the last one."""
        assert stream.queue, "only a stream with queued data has a frame to send"
        first = stream.queue[0]
        length = min(len(first), stream.send_window, self.window, self.frame_bytes)
        stream.send_window -= length
        self.window -= length
        stream.queued_bytes -= length
        self.queued_bytes -= length
        stream.unmoved_bytes += length
        if stream.unmoved_bytes >= PROGRESS_BYTES:
            stream.unmoved_bytes, stream.moved_at_s = 0, now_s
        self._allowances.earned_bytes += length
        self._output += (_pack_header(length << 8, 0, stream.id), bytes(first[:length]))
        if length < len(first):
            stream.queue[0] = first[length:]
            return
        stream.queue.popleft()
        self._allowances.earned += 1
        if not stream.queue:
            stream.queue = None
            del self.blocked[stream.id]
            drained(stream)


@final
class IncomingFlow:
    """The windows for the peer's data, and the budget for large messages."""

    __slots__ = (
        "_is_stopped",
        "_output",
        "_stream_window_bytes",
        "budget_bytes",
        "budget_left",
        "room_requests",
        "window",
    )

    def __init__(self, output: list[bytes], *, stream_window_bytes: int, budget_bytes: int) -> None:
        self.window = CONNECTION_WINDOW_BYTES  # of the connection
        self.budget_bytes = budget_bytes  # for messages larger than a stream's window
        self.budget_left = budget_bytes
        self.room_requests: deque[Stream] = deque()  # streams that wait for room
        self._output = output
        self._stream_window_bytes = stream_window_bytes
        self._is_stopped = False

    def count_received(self, length: int) -> None:
        """Subtract a DATA frame from the connection's window, and open the window again."""
        self.window -= length
        if self.window < CONNECTION_WINDOW_BYTES // 2:
            if self.window < 0:
                raise ConnectionFailure(
                    ErrorCode.FLOW_CONTROL_ERROR, "the peer sent more than its window"
                )
            more = CONNECTION_WINDOW_BYTES - self.window
            self._output.append(frames.encode_window_update(0, more))
            self.window = CONNECTION_WINDOW_BYTES

    def consume(self, stream: Stream, count: int, now_s: float) -> None:
        """Let the peer send more on `stream`, because the application has read `count` bytes."""
        if stream.state in REMOTE_ENDED:
            return
        returned = min(count, stream.large_bytes)
        if returned:
            stream.large_bytes -= returned
            self._release(returned, now_s)
        stream.unreturned_bytes += count - returned
        if stream.unreturned_bytes * 2 >= self._stream_window_bytes:
            self.return_window(stream)

    def return_window(self, stream: Stream) -> None:
        """Open a stream's window again by all read bytes."""
        if stream.unreturned_bytes > 0 and stream.state not in REMOTE_ENDED:
            stream.receive_window += stream.unreturned_bytes
            self._output.append(frames.encode_window_update(stream.id, stream.unreturned_bytes))
            stream.unreturned_bytes = 0

    def leave_window(self, stream: Stream) -> None:
        """Open an exhausted window by one byte, so that the peer can end the stream.

        The end needs no window, but hyper (Rust) waits for one before it looks for more data.
        """
        if stream.receive_window <= 0 and stream.state not in REMOTE_ENDED:
            more = 1 - stream.receive_window
            stream.receive_window += more
            stream.unreturned_bytes -= more  # may be negative until the application reads
            self._output.append(frames.encode_window_update(stream.id, more))

    def request_room(self, stream: Stream, count: int, now_s: float) -> None:
        """Let the peer send `count` bytes in total; the budget grants them when it has room."""
        missing = count - stream.receive_window
        if missing <= 0 or stream.state in REMOTE_ENDED:
            return
        assert missing <= self.budget_bytes, "no message is larger than the budget"
        if not stream.requested_bytes:
            self.room_requests.append(stream)
        stream.requested_bytes = missing
        self._release(0, now_s)

    def cancel_room_request(self, stream: Stream, now_s: float) -> None:
        """Remove the request of a stream that needs no more room, and serve the next one."""
        self.room_requests.remove(stream)
        stream.requested_bytes = 0
        self._release(0, now_s)

    def remove(self, stream: Stream, now_s: float) -> None:
        """Cancel the request of an ended stream and release its part of the budget."""
        if stream.requested_bytes:
            self.cancel_room_request(stream, now_s)
        if stream.large_bytes:
            returned, stream.large_bytes = stream.large_bytes, 0
            self._release(returned, now_s)

    def stop(self) -> None:
        """Grant nothing more, because the connection has sent its last frame."""
        self._is_stopped = True

    def _release(self, count: int, now_s: float) -> None:
        """Add `count` to the budget, and grant the requests in their order."""
        self.budget_left += count
        while self.room_requests and not self._is_stopped:
            stream = self.room_requests[0]
            granted = stream.requested_bytes
            if granted > self.budget_left:
                return
            self.budget_left -= granted
            stream.large_bytes += granted
            stream.receive_window += granted
            stream.moved_at_s = now_s
            self._output.append(frames.encode_window_update(stream.id, granted))
            stream.requested_bytes = 0
            self.room_requests.popleft()


def _code_of(increment: int) -> ErrorCode:
    return ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR
