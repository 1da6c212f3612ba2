"""Flow control: the windows of a connection and its streams, and the data that waits for them.

`OutgoingFlow` is what the peer lets us send. Data without a window is queued. A stream whose window
stays closed does not delay other streams.

`IncomingFlow` is what we let the peer send. We open our connection window again at once, because a
closed one would make streams wait for each other. We open a stream's window again when the
application has read its data (`consume`). A message that is larger than the window gets the
remaining bytes from a budget that all streams of the connection share (`make_room`).
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

# So large that no client of ours fills it within a round trip.
CONNECTION_WINDOW_BYTES: Final = 16 << 20
# Of what waits for a stream's window, taken before it counts as moving; and of a message that was
# let come beyond its window, sent. Whoever does less within the time for a stall
# (`Limits.stall_timeout_s`), a kilobyte a second, holds it for nothing.
PROGRESS_BYTES: Final = 64 << 10
_TOO_FAR: Final = "a window grows by nothing, or too far"
_pack_header: Final = HEADER.pack

# What follows the last byte of a stream's queue is its connection's to send.
Drained = Callable[["Stream"], None]


@final
class OutgoingFlow:
    """What the peer lets us send, and what waits until it lets us send more."""

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
        self.granted_bytes = frames.DEFAULT_WINDOW_BYTES  # by the peer so far
        self.frame_bytes = frames.DEFAULT_FRAME_BYTES
        self.queued_bytes = 0  # of all streams
        self.blocked: dict[int, Stream] = {}  # streams with something queued
        self._output = output
        self._allowances = allowances

    @property
    def sent_bytes(self) -> int:
        """How much data has found its windows open so far."""
        return self.granted_bytes - self.window

    def grow(self, increment: int) -> None:
        """Let the connection send more."""
        self.window += increment
        self.granted_bytes += increment
        if increment == 0 or self.window > frames.WINDOW_MAX:
            raise ConnectionFailure(_code_of(increment), _TOO_FAR)

    def grow_stream(self, stream: Stream, increment: int) -> None:
        """Let a stream send more."""
        stream.send_window += increment
        if increment == 0 or stream.send_window > frames.WINDOW_MAX:
            raise StreamFailure(stream.id, _code_of(increment), _TOO_FAR)

    def resize(self, streams: Iterable[Stream], change: int) -> None:
        """Let every stream send more, or less: a window may become negative."""
        for stream in streams:
            stream.send_window += change
            if stream.send_window > frames.WINDOW_MAX:
                raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "a window is too large")

    def queue(self, stream: Stream, data: bytes, now_s: float) -> None:
        """Let data wait for the windows."""
        if stream.queue is None:
            stream.queue = deque()
            stream.moved_at_s, stream.unmoved_bytes = now_s, 0
        stream.queue.append(memoryview(data))
        stream.queued_bytes += len(data)
        self.queued_bytes += len(data)
        self.blocked[stream.id] = stream

    def send_blocked(self, now_s: float, drained: Drained) -> None:
        """Send of what waits: a frame of each stream in turn, while the windows allow.

        Who has had a turn goes to the end, so that a window that opens little by little serves all.
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
        """Send what waits on one stream, while the windows allow."""
        while stream.queue and stream.send_window > 0 and self.window > 0:
            self._send_frame(stream, now_s, drained)

    def forget(self, stream: Stream) -> None:
        """Drop what waits on a stream that has ended."""
        self.queued_bytes -= stream.queued_bytes  # The stream keeps its count: never sent.
        stream.queue = None
        del self.blocked[stream.id]

    def _send_frame(self, stream: Stream, now_s: float, drained: Drained) -> None:
        """Send one DATA frame out of the queue; after the last one the stream is `drained`."""
        assert stream.queue, "only streams with something queued are sent of"
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
    """What we let the peer send."""

    __slots__ = (
        "_is_stopped",
        "_output",
        "_stream_window_bytes",
        "budget_bytes",
        "budget_left",
        "wanting",
        "window",
    )

    def __init__(self, output: list[bytes], *, stream_window_bytes: int, budget_bytes: int) -> None:
        self.window = CONNECTION_WINDOW_BYTES  # of the connection
        self.budget_bytes = budget_bytes  # for messages that are larger than a stream's window
        self.budget_left = budget_bytes
        self.wanting: deque[Stream] = deque()  # streams that wait for room
        self._output = output
        self._stream_window_bytes = stream_window_bytes
        self._is_stopped = False

    def received(self, length: int) -> None:
        """Count what a DATA frame takes of the connection's window, and open it again."""
        self.window -= length
        if self.window < CONNECTION_WINDOW_BYTES // 2:
            if self.window < 0:
                raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "the window is overrun")
            more = CONNECTION_WINDOW_BYTES - self.window
            self._output.append(frames.encode_window_update(0, more))
            self.window = CONNECTION_WINDOW_BYTES

    def consume(self, stream: Stream, count: int, now_s: float) -> None:
        """Let the peer send more on `stream`: the application has read `count` bytes."""
        if stream.state in REMOTE_ENDED:
            return
        returned = min(count, stream.large_bytes)
        if returned:
            stream.large_bytes -= returned
            self._return(returned, now_s)
        stream.owed_bytes += count - returned
        if stream.owed_bytes * 2 >= self._stream_window_bytes:
            self.repay(stream)

    def repay(self, stream: Stream) -> None:
        """Open a stream's window again by all that was read of it."""
        if stream.owed_bytes and stream.state not in REMOTE_ENDED:
            stream.receive_window += stream.owed_bytes
            self._output.append(frames.encode_window_update(stream.id, stream.owed_bytes))
            stream.owed_bytes = 0

    def make_room(self, stream: Stream, count: int, now_s: float) -> None:
        """Let the peer send `count` bytes in all, out of the budget, when it has room."""
        missing = count - stream.receive_window
        if missing <= 0 or stream.state in REMOTE_ENDED:
            return
        assert missing <= self.budget_bytes, "no message is larger than the budget"
        if not stream.wanted_bytes:
            self.wanting.append(stream)
        stream.wanted_bytes = missing
        self._return(0, now_s)

    def want_nothing(self, stream: Stream, now_s: float) -> None:
        """Let the next stream have its turn: this one gets nothing more."""
        self.wanting.remove(stream)
        stream.wanted_bytes = 0
        self._return(0, now_s)

    def forget(self, stream: Stream, now_s: float) -> None:
        """Take back what a stream that has ended wants and has of the budget."""
        if stream.wanted_bytes:
            self.want_nothing(stream, now_s)
        if stream.large_bytes:
            returned, stream.large_bytes = stream.large_bytes, 0
            self._return(returned, now_s)

    def stop(self) -> None:
        """Grant nothing more: a closed connection has said its last words."""
        self._is_stopped = True

    def _return(self, count: int, now_s: float) -> None:
        """Return room to the budget, and grant it to those who wait, in their order."""
        self.budget_left += count
        while self.wanting and not self._is_stopped:
            stream = self.wanting[0]
            granted = stream.wanted_bytes
            if granted > self.budget_left:
                return
            self.budget_left -= granted
            stream.large_bytes += granted
            stream.receive_window += granted
            stream.moved_at_s = now_s
            self._output.append(frames.encode_window_update(stream.id, granted))
            stream.wanted_bytes = 0
            self.wanting.popleft()


def _code_of(increment: int) -> ErrorCode:
    return ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR
