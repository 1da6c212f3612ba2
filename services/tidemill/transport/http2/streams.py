"""The streams of a connection: opening them, sending on them, and how they end.

A stream is forgotten when both sides have sent their last frame, or one has reset it. The ids that
we have reset are remembered for a while: the peer may have sent more before it knew.
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
        self.last_id = 0  # highest that the peer, or as a client we, have opened
        self.now_s = now_s  # of what is being received or checked, or was last
        self.busy_at_s = now_s  # when the last stream ended
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
        """Open a stream as a client; None where the peer takes no more for now."""
        if len(self.by_id) >= self._settings.streams_max:
            return None
        stream_id = self.last_id = self._next_id
        self._next_id += 2
        stream = self.add(stream_id)
        self.send_headers(stream, block, is_last=False)
        return stream

    @property
    def are_ids_used_up(self) -> bool:
        """Whether a client can open no more streams on this connection."""
        return self._next_id > frames.STREAM_ID_MAX

    def add(self, stream_id: int) -> Stream:
        """Know of a new stream."""
        stream = self.by_id[stream_id] = Stream(
            stream_id,
            send_window=self._settings.window_bytes,
            receive_window=self._stream_window_bytes,
            now_s=self.now_s,
        )
        return stream

    def is_idle(self, stream_id: int) -> bool:
        """Whether no stream of this id was ever open; only clients open streams, the odd ones."""
        return stream_id > self.last_id or not stream_id & 1

    def on_late(self, stream_id: int, stream: Stream | None, flags: int, frame: str) -> None:
        """Take a frame for a stream that the peer may not send on any more, or never could."""
        if stream is not None:
            raise StreamFailure(
                stream_id, ErrorCode.STREAM_CLOSED, f"{frame} after the end of the stream"
            )
        if stream_id in self._recent_resets:
            # It was on its way when we reset the stream; after its last frame nothing is.
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
        """Send a header block, now; as the last frame after everything that is queued."""
        if stream.state is _RESET:
            return
        if is_last and stream.queue:
            stream.trailers = block
            return
        if self._settings.must_shrink_table:
            self._settings.must_shrink_table = False
            block = header_block.NO_TABLE + block
        self._output.append(
            frames.encode_headers(stream.id, block, self.outgoing.frame_bytes, is_last=is_last)
        )
        if is_last:
            self._end_local(stream)

    def send_data(self, stream: Stream, data: bytes, *, is_last: bool = False) -> None:
        """Send `data`, as far as the windows are open; the rest as they open."""
        if stream.state is _RESET:
            return
        assert stream.state not in LOCAL_ENDED, "nothing follows the last frame"
        outgoing, length = self.outgoing, len(data)
        if stream.queue is None and (
            not length  # Needs no window, and may not wait for one: nobody would open it.
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
            outgoing.queue(stream, data, self.now_s)
            outgoing.send_queued(stream, self.now_s, self.on_drained)

    def send_response(self, stream: Stream, block: bytes, data: bytes, trailers: bytes) -> None:
        """Send a whole response: headers, data, and trailers that end the stream."""
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
        # What nearly every unary call comes to, written out.
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
        """Send the end of a stream, where it is known, after the last byte that was queued."""
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
            self._forget(stream)
            self._recent_resets.add(stream.id)
            self._output.append(frames.encode_rst_stream(stream.id, code))

    def end_remote(self, stream: Stream) -> None:
        """Know that the peer has sent its last frame."""
        stream.state = state = ON_REMOTE_END[stream.state]
        if stream.wanted_bytes:
            self.incoming.want_nothing(stream, self.now_s)
        if state is _CLOSED:
            self._forget(stream)

    def _end_local(self, stream: Stream) -> None:
        """Know that we have sent our last frame."""
        stream.state = state = ON_LOCAL_END[stream.state]
        if state is _CLOSED:
            self._forget(stream)
        elif self._is_server:
            # The response is complete, and nobody reads the rest of the request (section 8.1).
            self.reset(stream, ErrorCode.NO_ERROR)

    def break_off(self, stream: Stream, code: int) -> None:
        """End a stream before its time, and tell."""
        stream.state = ON_RESET[stream.state]
        self._forget(stream)
        self._events.append(StreamReset(stream, code))

    def fail(self, failure: StreamFailure) -> None:
        """End one stream by the peer's fault, or refuse it."""
        stream = self.by_id.get(failure.stream_id)
        if stream is not None:
            self.break_off(stream, failure.code)
        self._recent_resets.add(failure.stream_id)
        # Faults of a peer cost it as much as resets: both make us open and close streams.
        self._allowances.take(Limit.RESETS, self.now_s)
        self._output.append(frames.encode_rst_stream(failure.stream_id, failure.code))

    def _forget(self, stream: Stream) -> None:
        del self.by_id[stream.id]
        self.busy_at_s = self.now_s
        if stream.queue is not None:
            self.outgoing.forget(stream)
        if stream.wanted_bytes or stream.large_bytes:
            self.incoming.forget(stream, self.now_s)
