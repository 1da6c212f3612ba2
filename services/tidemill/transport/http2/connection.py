"""An HTTP/2 connection as a state machine: bytes and time come in, events and bytes go out.

`receive` reads frames in order and returns their events. Output gathers until `take_output`. The
code never waits and never reads a clock. `Limits` bounds what a peer can do: the worst result of
any input is a `ConnectionEnded` event.

This module receives frames. Other modules handle one subject each: header blocks in frames
(`header_receiver`, `header_frames`), sending on streams and their ends (`streams`,
`stream_states`), windows and the data that waits for them (`flow_control`), the peer's settings
(`settings`), its allowances (`allowances`), its liveness (`liveness`), and the output that it has
read (`read_marks`). The handlers of frames stay together, because they share all of this state.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import ClassVar, Final, final

from tidemill.transport.http2 import frames, header_frames
from tidemill.transport.http2.allowances import Allowances
from tidemill.transport.http2.events import (
    ConnectionEnded,
    DataReceived,
    Event,
    GoAwayReceived,
    MarkReached,
    StreamReset,
)
from tidemill.transport.http2.frames import (
    DATA,
    END_STREAM,
    HEADER,
    HEADER_SIZE,
    HEADERS,
    ConnectionFailure,
    ErrorCode,
    StreamFailure,
)
from tidemill.transport.http2.header_receiver import HeaderReceiver
from tidemill.transport.http2.limits import Limit, Limits
from tidemill.transport.http2.liveness import Liveness
from tidemill.transport.http2.preface import HTTP1_RESPONSE, read_preface
from tidemill.transport.http2.read_marks import ReadMarks
from tidemill.transport.http2.settings import PeerSettings, first_frames
from tidemill.transport.http2.stream import Stream
from tidemill.transport.http2.stream_states import REMOTE_ENDED
from tidemill.transport.http2.streams import StreamTable

_KEEPALIVE_PING: Final = b"tidemill"
_DRAIN_PING: Final = b"draining"
_READ_PING: Final = b"all read"
_ID_MASK: Final = frames.STREAM_ID_MAX
_PADDED_OR_PRIORITY: Final = frames.PADDED | frames.PRIORITY_FLAG
_unpack_header: Final = HEADER.unpack_from


class Role(Enum):
    """The end of the connection that this process is."""

    CLIENT = "client"
    SERVER = "server"


@final
class Connection:
    """One end of a connection. It is one class because every frame changes state that output needs.

    Sending can make a stream writable or exceed a limit. The next `receive` or `check` returns
    these events. Until then a failed connection accepts data and sends nothing.
    """

    def __init__(
        self, role: Role, limits: Limits, *, now_s: float, hits: Counter[Limit] | None = None
    ) -> None:
        """Queue the preface of a client; a server waits for it.

        `hits` counts exceeded limits, also those of other connections that share it.
        """
        self._is_server = role is Role.SERVER
        self._limits = limits
        self._hits = Counter() if hits is None else hits
        # Streams and flow control append to these two as well.
        self._events: list[Event] = []
        self._output: list[bytes] = []
        self._taken_bytes = 0  # of the sent data, no longer in the output
        self.unparsed = b""  # received bytes of an incomplete frame, or for a later turn
        self._settings = PeerSettings(is_server=self._is_server)
        self._allowances = Allowances(limits, now_s)
        self._streams = StreamTable(
            self._events,
            self._output,
            self._settings,
            self._allowances,
            limits,
            is_server=self._is_server,
            now_s=now_s,
        )
        self._outgoing, self._incoming = self._streams.outgoing, self._streams.incoming
        self._headers = HeaderReceiver(
            self._events, self._streams, limits, self._hits, is_server=self._is_server
        )
        self._liveness = Liveness(limits, now_s)
        self._marks = ReadMarks()

        self.has_input = False  # received frames wait for the next `receive`
        self.is_closed = False
        self.is_draining = False  # we or the peer allow no new streams of ours
        self._is_drain_requested = False  # new streams of the peer must end too
        self.is_drain_announced = False
        self.is_drain_acknowledged = False  # the peer has answered and opens no more streams
        self._needs_preface = self._is_server
        self._needs_settings = True
        if not self._is_server:
            self._output += first_frames(limits, is_server=False)

    # ------------------------------------------------------------ output

    def take_output(self) -> bytes:
        """Return the pending output and clear it."""
        output = b"".join(self._output)
        self._output.clear()
        self._taken_bytes = self._outgoing.sent_bytes
        return output

    @property
    def output_bytes(self) -> int:
        """The data bytes in the output, without frames that carry no data."""
        return self._outgoing.sent_bytes - self._taken_bytes

    @property
    def queued_bytes(self) -> int:
        """The bytes of all streams that wait for the peer's windows."""
        return self._outgoing.queued_bytes

    def held_bytes(self, *, output_bytes_min: int) -> int:
        """Return the bytes of queued data, input, output, and room granted beyond windows.

        Output counts if it has more than `output_bytes_min`.
        """
        # Inlined: the link calls it for every frame.
        outgoing, incoming = self._outgoing, self._incoming
        held_bytes = outgoing.queued_bytes + incoming.budget_bytes - incoming.budget_left
        output_bytes = outgoing.granted_bytes - outgoing.window - self._taken_bytes
        if output_bytes > output_bytes_min:
            held_bytes += output_bytes
        return held_bytes + len(self.unparsed)

    def has_window(self, stream: Stream, count: int) -> bool:
        """Return whether the peer's windows allow `count` bytes at once."""
        return count <= stream.send_window and count <= self._outgoing.window

    @property
    def has_output(self) -> bool:
        """Whether there is output."""
        return bool(self._output)

    # ------------------------------------------------------------ input

    def receive(self, data: bytes, now_s: float, *, frames_max: int = sys.maxsize) -> list[Event]:
        """Process bytes that arrived at `now_s`, monotonic seconds; return the events.

        At most `frames_max` frames are read. If `has_input` is true afterwards, call again without
        bytes.
        """
        if self.is_closed:
            return self._take_events()
        self._streams.now_s = self._liveness.heard_at_s = now_s
        buffer = self.unparsed + data if self.unparsed else data
        at, end = 0, len(buffer)
        handlers, frame_bytes_max = self._HANDLERS, self._limits.frame_bytes
        frame_budget = frames_max
        try:
            if self._needs_preface:
                at = self._receive_preface(buffer)
                if not at:
                    self.unparsed = buffer
                    return self._take_events()
            while end - at >= HEADER_SIZE and frame_budget > 0:
                frame_budget -= 1
                length_and_kind, flags, stream_id = _unpack_header(buffer, at)
                length = length_and_kind >> 8
                if length > frame_bytes_max:
                    raise ConnectionFailure(
                        ErrorCode.FRAME_SIZE_ERROR, "a frame is longer than our limit"
                    )
                begin = at + HEADER_SIZE
                if end - begin < length:
                    break
                at = begin + length
                kind = length_and_kind & 0xFF
                if self._needs_settings or self._headers.partial is not None:
                    self._check_order(kind)
                handle = handlers.get(kind)
                if handle is None:
                    self._allowances.take(Limit.CONTROL, now_s)
                    continue
                try:
                    handle(self, stream_id & _ID_MASK, flags, buffer[begin:at])
                except StreamFailure as failure:
                    self._streams.fail(failure)
        except ConnectionFailure as failure:
            self._fail(failure)
        if at < end and not self.is_closed:
            self.unparsed = buffer[at:]
            self.has_input = frame_budget <= 0 and len(self.unparsed) >= HEADER_SIZE
        elif self.unparsed or self.has_input:
            self.unparsed, self.has_input = b"", False
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events = self._events[:]
        self._events.clear()
        return events

    def _receive_preface(self, buffer: bytes) -> int:
        at = read_preface(buffer)
        if at:
            self._needs_preface = False
            self._output += first_frames(self._limits, is_server=True)
            if self._is_drain_requested:
                self._announce_drain()
        return at

    def _check_order(self, kind: int) -> None:
        if self._needs_settings:
            if kind != frames.SETTINGS:
                raise ConnectionFailure(
                    ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS"
                )
            self._needs_settings = False
        if self._headers.partial is not None and kind != frames.CONTINUATION:
            raise ConnectionFailure(
                ErrorCode.PROTOCOL_ERROR, "another frame interrupts a header block"
            )

    # ------------------------------------------------------------ DATA and HEADERS

    def _on_data(self, stream_id: int, flags: int, payload: bytes) -> None:
        length = len(payload)
        self._incoming.count_received(length)
        stream = self._streams.by_id.get(stream_id)
        if stream is None or stream.state in REMOTE_ENDED:
            self._streams.handle_late_frame(
                stream_id, stream, flags, "DATA" if length else "empty DATA"
            )
            return
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise StreamFailure(
                stream_id, ErrorCode.FLOW_CONTROL_ERROR, "the peer sent more than its window"
            )
        if flags & frames.PADDED:
            payload = header_frames.remove_padding(payload)
            stream.unreturned_bytes += length - len(payload)
        is_last = flags & END_STREAM != 0
        if not payload and not is_last:
            self._allowances.take(Limit.EMPTY_DATA, self._streams.now_s)
            return
        if stream.content_left >= 0:
            stream.count_content(len(payload), is_last=is_last)
        stream.content_bytes += len(payload)
        stream.moved_at_s = self._streams.now_s
        if is_last:
            self._streams.end_remote(stream)
        self._events.append(DataReceived(stream, payload, is_last))

    def _on_headers(self, stream_id: int, flags: int, payload: bytes) -> None:
        self._headers.receive(stream_id, flags, payload)

    def _on_continuation(self, stream_id: int, flags: int, payload: bytes) -> None:
        self._headers.receive_continuation(stream_id, flags, payload)

    # ------------------------------------------------------------ the other frames

    def _on_priority(self, stream_id: int, _flags: int, payload: bytes) -> None:
        self._allowances.take(Limit.CONTROL, self._streams.now_s)
        if stream_id == 0:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        if len(payload) != frames.PRIORITY_SIZE:
            raise StreamFailure(stream_id, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY must have 5 bytes")
        if header_frames.depends_on(payload) == stream_id:
            raise StreamFailure(stream_id, ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")

    def _on_rst_stream(self, stream_id: int, _flags: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM must have 4 bytes")
        if self._streams.is_idle(stream_id):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on an idle stream")
        self._allowances.take(Limit.RESETS, self._streams.now_s)
        stream = self._streams.by_id.get(stream_id)
        if stream is not None:
            self._streams.abort(stream, frames.decode_u32(payload))

    def _on_settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id != 0:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFailure(
                    ErrorCode.FRAME_SIZE_ERROR, "a SETTINGS acknowledgement must be empty"
                )
            self._allowances.take(Limit.CONTROL, self._streams.now_s)
            return
        self._allowances.take(Limit.SETTINGS, self._streams.now_s)
        change = self._settings.apply(payload)
        # Before the data that the change allows: until then the peer counts with its old windows.
        self._output.append(frames.SETTINGS_ACK)
        self._outgoing.frame_bytes = self._settings.frame_bytes
        if change:
            self._outgoing.resize(self._streams.by_id.values(), change)
            self._outgoing.send_blocked(self._streams.now_s, self._streams.on_drained)

    def _on_push_promise(self, _stream_id: int, _flags: int, _payload: bytes) -> None:
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "push is not allowed")

    def _on_ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id != 0:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != frames.PING_SIZE:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "PING must have 8 bytes")
        if not flags & frames.ACK:
            self._allowances.take(Limit.PINGS, self._streams.now_s)
            self._output.append(frames.encode_ping(payload, is_ack=True))
            return
        self._allowances.take(Limit.CONTROL, self._streams.now_s)
        if payload == _KEEPALIVE_PING:
            self._liveness.record_answer()
        elif payload == _READ_PING:
            self._events.append(MarkReached(self._marks.record_answer()))
        elif payload == _DRAIN_PING and self.is_drain_announced:
            # The peer knows that we stop. Streams that it opened before are served, and no others.
            self.is_drain_acknowledged = True
            self._go_away(ErrorCode.NO_ERROR)

    def _on_goaway(self, stream_id: int, _flags: int, payload: bytes) -> None:
        if stream_id != 0:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < frames.GOAWAY_SIZE_MIN:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY must have at least 8 bytes")
        last_stream_id, code, text = frames.decode_goaway(payload)
        self._allowances.take(Limit.CONTROL, self._streams.now_s)
        self.is_draining = True
        if not self._is_server:
            for stream in [one for one in self._streams.by_id.values() if one.id > last_stream_id]:
                self._streams.abort(stream, ErrorCode.REFUSED_STREAM)
        self._events.append(GoAwayReceived(code, text.decode("utf-8", "replace")))

    def _on_window_update(self, stream_id: int, _flags: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE must have 4 bytes")
        self._allowances.take(Limit.CONTROL, self._streams.now_s)
        increment = frames.decode_u32(payload) & frames.WINDOW_MAX
        if stream_id == 0:
            self._outgoing.add_window(increment)
            self._outgoing.send_blocked(self._streams.now_s, self._streams.on_drained)
            return
        stream = self._streams.by_id.get(stream_id)
        if stream is not None:
            self._outgoing.add_stream_window(stream, increment)
            if stream.queue:
                self._outgoing.send_queued(stream, self._streams.now_s, self._streams.on_drained)
        elif self._streams.is_idle(stream_id):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")

    # ------------------------------------------------------------ streams

    def open_stream(self, block: bytes) -> Stream | None:
        """Open a stream as a client; return None if the peer accepts no more for now."""
        assert not self._is_server, "only clients open streams"
        if self.is_draining or self.is_closed:
            return None
        stream = self._streams.open_next(block)
        self.is_draining |= self._streams.are_ids_used_up  # A new connection has ids again.
        return stream

    def send_headers(self, stream: Stream, block: bytes, *, is_last: bool) -> None:
        """Send a header block now. If it is the last frame, send it after all queued data."""
        self._streams.send_headers(stream, block, is_last=is_last)

    def send_data(self, stream: Stream, data: bytes, *, is_last: bool = False) -> None:
        """Send as much of `data` as the windows allow; queue the remaining bytes."""
        self._streams.send_data(stream, data, is_last=is_last)
        if stream.queue is not None:
            self._check_unread()

    def send_response(self, stream: Stream, block: bytes, data: bytes, trailers: bytes) -> None:
        """Send a whole response: headers, data, and the trailers that end the stream."""
        self._streams.send_response(stream, block, data, trailers)
        if stream.queue is not None:
            self._check_unread()

    def _check_unread(self) -> None:
        if self._is_server and self._outgoing.queued_bytes > self._limits.unread_bytes_max:
            # The next `receive` or `check` returns the event. The memory is released at once.
            code = ErrorCode.ENHANCE_YOUR_CALM
            self._fail(
                ConnectionFailure(
                    code, "the client does not read its responses", limit=Limit.UNREAD
                )
            )

    def mark_output(self) -> int:
        """Mark the end of the data sent so far; data that waits for a window is not included."""
        return self._marks.add()

    def request_marks(self, now_s: float, *, is_pressing: bool = False) -> float | None:
        """Ask the peer how much it has read; the event `MarkReached` has the answer.

        If it is too early, return the seconds until the next call. A pressing request is sent at
        once, unless a ping is already in flight.
        """
        wait_s = None if self.is_closed else self._marks.wait_s(now_s, is_pressing=is_pressing)
        if wait_s != 0:
            return wait_s
        self._marks.record_ping(now_s)
        self._output.append(frames.encode_ping(_READ_PING, is_ack=False))
        return None

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream at once."""
        self._streams.reset(stream, code)

    def consume(self, stream: Stream, count: int) -> None:
        """Let the peer send more on `stream`, because the application has read `count` bytes."""
        self._incoming.consume(stream, count, self._streams.now_s)

    def has_budget(self, count: int) -> bool:
        """Return whether `count` bytes beyond a stream's window could be granted at once."""
        return not self._incoming.room_requests and count <= self._incoming.budget_left

    def return_window(self, stream: Stream) -> None:
        """Grant the bytes that the application has read at once, with the padding."""
        self._incoming.return_window(stream)

    def leave_window(self, stream: Stream) -> None:
        """Let the peer end a stream whose window is exhausted."""
        self._incoming.leave_window(stream)

    def request_room(self, stream: Stream, count: int) -> None:
        """Let the peer send `count` bytes in total; the budget grants them when it has room.

        The caller keeps `count` within the budget.
        """
        self._incoming.request_room(stream, count, self._streams.now_s)

    # ------------------------------------------------------------ the end of the connection

    @property
    def heard_at_s(self) -> float:
        """The time of the last input from the peer, in monotonic seconds."""
        return self._liveness.heard_at_s

    @property
    def is_within_frame(self) -> bool:
        """Whether a frame has arrived in part."""
        return bool(self._headers.partial or self.unparsed)

    def start_drain(self) -> None:
        """Ask the peer to open no more streams; accept those in flight."""
        # A client that stops may still open streams until it receives our GOAWAY.
        self._is_drain_requested = self.is_draining = True
        if not (self.is_drain_announced or self.is_closed or self._needs_preface):
            self._announce_drain()

    def _announce_drain(self) -> None:
        self.is_drain_announced = True
        self._output.append(frames.encode_goaway(frames.STREAM_ID_MAX, ErrorCode.NO_ERROR))
        self._output.append(frames.encode_ping(_DRAIN_PING, is_ack=False))

    def close(self, code: ErrorCode, reason: str, limit: Limit | None = None) -> list[Event]:
        """End the connection: reset every stream and send GOAWAY last."""
        if not self.is_closed:
            self._fail(ConnectionFailure(code, reason, limit=limit))
        return self._take_events()

    def _go_away(self, code: ErrorCode, reason: str = "") -> None:
        self._headers.accepted_id_max = self._streams.last_id
        last_seen = self._streams.last_id if self._is_server else 0
        self._output.append(frames.encode_goaway(last_seen, code, reason))

    def _fail(self, failure: ConnectionFailure) -> None:
        self.is_closed = True
        self._incoming.stop()
        if failure.limit is not None:
            self._hits[failure.limit] += 1
        if failure.code is ErrorCode.HTTP_1_1_REQUIRED:
            self._output[:] = [HTTP1_RESPONSE]
        else:
            self._go_away(failure.code, failure.reason)
        for stream in list(self._streams.by_id.values()):
            self._streams.abort(stream, failure.code)
        self.unparsed, self._headers.partial = b"", None
        self._events.append(ConnectionEnded(failure.code, failure.reason, failure.limit))

    # ------------------------------------------------------------ as time passes

    def check(self, now_s: float) -> list[Event]:
        """Ask for a sign of life, and end streams without progress.

        Call it about once a second while the connection is open.
        """
        if not self.is_closed:
            self._streams.now_s = now_s
            try:
                self._check(now_s)
            except ConnectionFailure as failure:
                self._fail(failure)
        return self._take_events()

    def _check(self, now_s: float) -> None:
        if self._needs_preface or self._needs_settings:
            self._liveness.check_handshake(now_s)
            return
        if self._liveness.needs_ping(now_s, is_within_frame=self.is_within_frame):
            self._output.append(frames.encode_ping(_KEEPALIVE_PING, is_ack=False))
        is_empty = self._is_server and not self._streams.by_id
        if is_empty and self._liveness.is_idle(now_s, self._streams.busy_at_s):
            if self.is_drain_announced:
                raise ConnectionFailure(ErrorCode.NO_ERROR, "idle", limit=Limit.IDLE)
            # In two steps, because a call may be in flight.
            self.start_drain()
        stall_s = self._limits.stall_timeout_s
        blocked = self._outgoing.blocked.values()
        for stream in [one for one in blocked if now_s - one.moved_at_s > stall_s]:
            self._hits[Limit.STALLED] += 1
            self._streams.reset(stream, ErrorCode.CANCEL)
            self._events.append(StreamReset(stream, ErrorCode.CANCEL))

    # Functions, because a table of bound methods would create a reference cycle.
    _HANDLERS: ClassVar[dict[int, Callable[[Connection, int, int, bytes], None]]] = {
        DATA: _on_data,
        HEADERS: _on_headers,
        frames.PRIORITY: _on_priority,
        frames.RST_STREAM: _on_rst_stream,
        frames.SETTINGS: _on_settings,
        frames.PUSH_PROMISE: _on_push_promise,
        frames.PING: _on_ping,
        frames.GOAWAY: _on_goaway,
        frames.WINDOW_UPDATE: _on_window_update,
        frames.CONTINUATION: _on_continuation,
    }
