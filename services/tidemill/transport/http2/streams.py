"""The streams of a connection: opening, sending and ending.

A stream is removed when both sides have sent their last frame or one side has reset it. The ids of
streams that we reset are kept for a while, because the peer may have sent frames before it knew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from tidemill.transport.http2 import frames, header_block
from tidemill.transport.http2.events import Event, StreamReset, StreamWritable
from tidemill.transport.http2.flow_control import IncomingFlow, OutgoingFlow
from tidemill.transport.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADER,
    HEADERS,
    ConnectionFailure,
    ErrorCode,
    StreamFailure,
)
from tidemill.transport.http2.limits import Limit
from tidemill.transport.http2.stream import RecentResets, Stream
from tidemill.transport.http2.stream_states import (
    LOCAL_ENDED,
    ON_LOCAL_END,
    ON_REMOTE_END,
    ON_RESET,
    StreamState,
)

if TYPE_CHECKING:
    from tidemill.transport.http2.allowances import Allowances
    from tidemill.transport.http2.limits import Limits
    from tidemill.transport.http2.settings import PeerSettings

_RESET: Final = StreamState.RESET
_CLOSED: Final = StreamState.CLOSED
_pack_header: Final = HEADER.pack


@final
class StreamTable:
    """The streams of one end of a connection."""

    def __init__(
        self,
        events: list[Event],
        output: list[bytes],
        settings: PeerSettings,
        allowances: Allowances,
        limits: Limits,
        *,
        is_server: bool,
        now_s: float,
    ) -> None:
        self.by_id: dict[int, Stream] = {}
        self.last_id = 0  # the highest that the client has opened
        self.now_s = now_s  # time of the current or last `receive` or `check`
        self.busy_at_s = now_s  # the end of the last stream
        self.outgoing = OutgoingFlow(output, allowances)
        self.incoming = IncomingFlow(
            output,
            stream_window_bytes=limits.stream_window_bytes,
            budget_bytes=limits.large_messages_bytes,
        )
        self._next_id = 1
        self._recent_resets = RecentResets()
        self._events = events
        self._output = output
        self._settings = settings
        self._allowances = allowances
        self._stream_window_bytes = limits.stream_window_bytes
        self._is_server = is_server

    def open_next(self, block: bytes) -> Stream | None:
        """Open a stream as a client; return None if the peer accepts no more for now."""
        if len(self.by_id) >= self._settings.streams_max:
            return None
        stream_id = self.last_id = self._next_id
        self._next_id += 2
        stream = self.add(stream_id)
        self.send_headers(stream, block, is_last=False)
        return stream

    @property
    def are_ids_used_up(self) -> bool:
        """Whether a client has used all stream ids of this connection."""
        return self._next_id > frames.STREAM_ID_MAX

    def add(self, stream_id: int) -> Stream:
        """Create a stream."""
        stream = self.by_id[stream_id] = Stream(
            stream_id,
            send_window=self._settings.window_bytes,
            receive_window=self._stream_window_bytes,
            now_s=self.now_s,
        )
        return stream

    def is_idle(self, stream_id: int) -> bool:
        """Return whether no stream of this id was ever opened; clients use odd ids."""
        return stream_id > self.last_id or not stream_id & 1

    def handle_late_frame(
        self, stream_id: int, stream: Stream | None, flags: int, frame: str
    ) -> None:
        """Handle a frame for a stream on which the peer may not send."""
        if stream is not None:
            raise StreamFailure(
                stream_id, ErrorCode.STREAM_CLOSED, f"{frame} after the end of the stream"
            )
        if stream_id in self._recent_resets:
            # Sent before the peer received our reset. No frame follows its last one.
            if flags & END_STREAM:
                self._recent_resets.discard(stream_id)
            elif frame != "DATA":
                self._allowances.take(Limit.CONTROL, self.now_s)
            return
        if self.is_idle(stream_id):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"{frame} on an idle stream")
        raise ConnectionFailure(ErrorCode.STREAM_CLOSED, f"{frame} on a closed stream")

    # ------------------------------------------------------------ sending

    def send_headers(self, stream: Stream, block: bytes, *, is_last: bool) -> None:
        """Send a header block now. If it is the last frame, send it after all queued data."""
        if stream.state is _RESET:
            return
        if is_last and stream.queue:
            stream.trailers = block
            return
        if self._settings.must_shrink_table:
            self._settings.must_shrink_table = False
            block = header_block.EMPTY_TABLE + block
        self._output.append(
            frames.encode_headers(stream.id, block, self.outgoing.frame_bytes, is_last=is_last)
        )
        if is_last:
            self._end_local(stream)

    def send_data(self, stream: Stream, data: bytes, *, is_last: bool = False) -> None:
        """Send as much of `data` as the windows allow; queue the remaining bytes."""
        if stream.state is _RESET:
            return
        assert stream.state not in LOCAL_ENDED, "no data may follow the last frame"
        outgoing, length = self.outgoing, len(data)
        if stream.queue is None and (
            not length  # Empty data needs no window and must not wait for one.
            or (
                length <= outgoing.frame_bytes
                and length <= stream.send_window
                and length <= outgoing.window
            )
        ):
            stream.send_window -= length
            outgoing.window -= length
            flags = END_STREAM if is_last else 0
            self._output.append(_pack_header(length << 8, flags, stream.id))
            self._output.append(data)
            self._allowances.earned += 1
            self._allowances.earned_bytes += length
            if is_last:
                self._end_local(stream)
            return
        if is_last:
            stream.trailers = b""
        if length:
            outgoing.enqueue(stream, data, self.now_s)
            outgoing.send_queued(stream, self.now_s, self.on_drained)

    def send_response(self, stream: Stream, block: bytes, data: bytes, trailers: bytes) -> None:
        """Send a whole response: headers, data, and the trailers that end the stream."""
        outgoing, length = self.outgoing, len(data)
        if (
            stream.state is _RESET
            or self._settings.must_shrink_table
            or length > outgoing.frame_bytes
            or length > stream.send_window
            or length > outgoing.window
        ):
            self.send_headers(stream, block, is_last=False)
            self.send_data(stream, data)
            self.send_headers(stream, trailers, is_last=True)
            return
        # Inlined, because nearly every unary call ends here.
        outgoing.window -= length
        stream_id = stream.id
        self._output += (
            _pack_header(len(block) << 8 | HEADERS, END_HEADERS, stream_id),
            block,
            _pack_header(length << 8, 0, stream_id),
            data,
            _pack_header(len(trailers) << 8 | HEADERS, END_HEADERS | END_STREAM, stream_id),
            trailers,
        )
        self._allowances.earned += 1
        self._allowances.earned_bytes += length
        self._end_local(stream)

    def on_drained(self, stream: Stream) -> None:
        """After the last queued byte, send the end of the stream if it is known."""
        if stream.trailers is None:
            self._events.append(StreamWritable(stream))
        elif stream.trailers:
            self.send_headers(stream, stream.trailers, is_last=True)
        else:
            self._output.append(_pack_header(DATA, END_STREAM, stream.id))
            self._end_local(stream)

    # ------------------------------------------------------------ ends of streams

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream at once."""
        if stream.id in self.by_id:
            stream.state = ON_RESET[stream.state]
            self._remove(stream)
            self._recent_resets.add(stream.id)
            self._output.append(frames.encode_rst_stream(stream.id, code))

    def end_remote(self, stream: Stream) -> None:
        """Record that the peer has sent its last frame."""
        stream.state = state = ON_REMOTE_END[stream.state]
        if stream.requested_bytes:
            self.incoming.cancel_room_request(stream, self.now_s)
        if state is _CLOSED:
            self._remove(stream)

    def _end_local(self, stream: Stream) -> None:
        """Record that we have sent our last frame."""
        stream.state = state = ON_LOCAL_END[stream.state]
        if state is _CLOSED:
            self._remove(stream)
        elif self._is_server:
            # The response is complete. The remaining request is not needed (section 8.1).
            self.reset(stream, ErrorCode.NO_ERROR)

    def abort(self, stream: Stream, code: int) -> None:
        """End a stream early and emit the event."""
        stream.state = ON_RESET[stream.state]
        self._remove(stream)
        self._events.append(StreamReset(stream, code))

    def fail(self, failure: StreamFailure) -> None:
        """End or refuse one stream because of an error of the peer."""
        stream = self.by_id.get(failure.stream_id)
        if stream is not None:
            self.abort(stream, failure.code)
        self._recent_resets.add(failure.stream_id)
        # Errors of a peer count like resets, because both open and close streams.
        self._allowances.take(Limit.RESETS, self.now_s)
        self._output.append(frames.encode_rst_stream(failure.stream_id, failure.code))

    def _remove(self, stream: Stream) -> None:
        del self.by_id[stream.id]
        self.busy_at_s = self.now_s
        if stream.queue is not None:
            self.outgoing.remove(stream)
        if stream.requested_bytes or stream.large_bytes:
            self.incoming.remove(stream, self.now_s)
