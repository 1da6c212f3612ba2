"""A connection of HTTP/2 as a state machine: bytes and the time in, events and bytes out.

`receive` reads frames, in their order, and returns what they mean. What is to be sent gathers until
`take_output`. Nothing waits, nothing is read from a clock, and a peer can do no more than `Limits`
allow: whatever it sends, the worst that comes of it is a `Failed` event.

    a stream   open ──(END_STREAM from both)──> forgotten
               open ──(RST_STREAM of either)──> forgotten

The ids that we have reset are remembered for a while: the peer may have sent more before it knew.

Windows. Ours for the connection is opened again at once: it would make streams wait for each other.
Ours for a stream is opened again when the application has read (`consume`), and beyond its size out
of a budget that the connection's streams share (`make_room`). The peer's windows make `send_data`
queue; a stream whose window stays closed delays no other.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable
from enum import Enum
from typing import ClassVar, Final, final

from tidemill.transport.http2 import frames, header_block
from tidemill.transport.http2.events import (
    DataReceived,
    Event,
    Failed,
    GoAwayReceived,
    RequestReceived,
    ResponseReceived,
    StreamReset,
    StreamWritable,
)
from tidemill.transport.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADER,
    HEADER_SIZE,
    HEADERS,
    ConnectionFailure,
    ErrorCode,
    Setting,
    StreamFailure,
)
from tidemill.transport.http2.header_block import Malformed
from tidemill.transport.http2.limits import Allowance, Limit, Limits
from tidemill.transport.http2.stream import Stream

# So large that no client of ours fills it within a round trip.
CONNECTION_WINDOW_BYTES: Final = 16 << 20
RESETS_REMEMBERED: Final = 4_096  # more than a peer's allowance of resets and all its streams
_KEEPALIVE_PING: Final = b"tidemill"
_DRAIN_PING: Final = b"draining"
_TLS: Final = b"\x16"  # a handshake begins with it
_HTTP1: Final = re.compile(rb"(GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS|CONNECT) ")
_HTTP1_ANSWER: Final = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"\r\nThis port speaks gRPC, which is HTTP/2 without an upgrade.\n"
)
_ID_MASK: Final = frames.STREAM_ID_MAX
_unpack_header: Final = HEADER.unpack_from
_pack_header: Final = HEADER.pack


class Role(Enum):
    """Which end of the connection this is."""

    CLIENT = "client"
    SERVER = "server"


@final
class Connection:
    """One end of a connection.

    What sending brings about (a stream writable again, a limit overstepped) is told by the next
    `receive` or `check`; until then a connection that has failed takes what it is given and sends
    nothing.
    """

    def __init__(
        self, role: Role, limits: Limits, *, now_s: float, hits: Counter[Limit] | None = None
    ) -> None:
        """Queue a client's preface; a server's waits for it.

        `hits` counts overstepped limits, perhaps for many connections.
        """
        self._is_server = role is Role.SERVER
        self._limits = limits
        self._hits = Counter() if hits is None else hits
        self._now_s = now_s
        self._streams: dict[int, Stream] = {}
        self._last_stream_id = 0  # highest that the peer, or as a client we, have opened
        self._next_stream_id = 1
        self._recent_resets: dict[int, None] = {}
        self._events: list[Event] = []
        self._output: list[bytes] = []
        self._unparsed = b""
        self._decoder = header_block.HeaderDecoder(limits.header_list_bytes)
        # A header block whose last frame has not come: its stream, its flags, its parts.
        self._block: tuple[int, int, list[bytes]] | None = None
        self._block_bytes = 0

        self._send_window = frames.DEFAULT_WINDOW_BYTES
        self._peer_window_bytes = frames.DEFAULT_WINDOW_BYTES  # of a new stream
        self._peer_frame_bytes = frames.DEFAULT_FRAME_BYTES
        self._peer_streams_max = frames.STREAM_ID_MAX
        # We use no table, but a peer with a smaller one waits to be told so (RFC 7541 section 4.2).
        self._must_shrink_table = False
        self._receive_window = CONNECTION_WINDOW_BYTES
        self._blocked: dict[int, Stream] = {}  # streams with something queued
        self._queued_bytes = 0
        self._large_left = limits.large_messages_bytes
        self._wanting: deque[Stream] = deque()  # streams that wait for room

        self.is_closed = False
        self.is_draining = False  # no new streams of ours, by our will or the peer's
        self._wants_drain = False  # none of the peer's either
        self._is_drain_announced = False
        self._accept_until = frames.STREAM_ID_MAX  # highest stream id that is served
        self._needs_preface = self._is_server
        self._speaks_http1 = False
        self._needs_settings = True
        self._opened_at_s = self._heard_at_s = self._busy_at_s = now_s
        self._ping_sent_at_s: float | None = None

        def allowance(burst: int, per_s: int) -> Allowance:
            return Allowance(burst=burst, per_s=per_s, now_s=now_s)

        self._resets = allowance(limits.resets_burst, limits.resets_per_s)
        self._settings = allowance(limits.settings_burst, limits.settings_per_s)
        self._pings = allowance(limits.pings_burst, limits.pings_per_s)
        self._empty_data = allowance(limits.empty_data_burst, limits.empty_data_per_s)
        self._control = allowance(limits.control_burst, limits.control_per_s)
        self._earned = 0  # pieces of data sent that the allowances do not know of yet

        if not self._is_server:
            self._greet()

    def _greet(self) -> None:
        limits = self._limits
        settings = {
            Setting.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
            Setting.MAX_FRAME_SIZE: limits.frame_bytes,
            Setting.MAX_HEADER_LIST_SIZE: limits.header_list_bytes,
        }
        if self._is_server:
            settings[Setting.MAX_CONCURRENT_STREAMS] = limits.streams_max
        else:
            settings[Setting.ENABLE_PUSH] = 0
            self._output.append(frames.PREFACE)
        self._output.append(frames.encode_settings(settings))
        more = CONNECTION_WINDOW_BYTES - frames.DEFAULT_WINDOW_BYTES
        self._output.append(frames.encode_window_update(0, more))

    # ------------------------------------------------------------ output

    def take_output(self) -> bytes:
        """Return what is to be sent, and forget it."""
        output, self._output = self._output, []
        return b"".join(output)

    @property
    def queued_bytes(self) -> int:
        """What waits for the peer's windows, of all streams."""
        return self._queued_bytes

    @property
    def has_output(self) -> bool:
        """Whether there is something to send."""
        return bool(self._output)

    @property
    def stream_count(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    # ------------------------------------------------------------ input

    def receive(self, data: bytes, now_s: float) -> list[Event]:
        """Take bytes that arrived at `now_s`, monotonic seconds; return what they mean."""
        if self.is_closed:
            return self._take_events()
        self._now_s = self._heard_at_s = now_s
        buffer = self._unparsed + data if self._unparsed else data
        at, end = 0, len(buffer)
        handlers, frame_bytes_max = self._HANDLERS, self._limits.frame_bytes
        try:
            if self._needs_preface:
                at = self._receive_preface(buffer)
            while end - at >= HEADER_SIZE and not self._needs_preface:
                length_and_kind, flags, stream_id = _unpack_header(buffer, at)
                length = length_and_kind >> 8
                if length > frame_bytes_max:
                    raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "a frame is too long")
                begin = at + HEADER_SIZE
                if end - begin < length:
                    break
                at = begin + length
                kind = length_and_kind & 0xFF
                if self._needs_settings or self._block is not None:
                    self._check_order(kind)
                handle = handlers.get(kind)
                if handle is None:
                    self._count(self._control, Limit.CONTROL)
                    continue
                try:
                    handle(self, stream_id & _ID_MASK, flags, buffer[begin:at])
                except StreamFailure as failure:
                    self._reset_failed(failure)
        except ConnectionFailure as failure:
            self._fail(failure)
        self._unparsed = buffer[at:] if at < end and not self.is_closed else b""
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _receive_preface(self, buffer: bytes) -> int:
        """Return where the preface ends, 0 while it is not complete."""
        preface = frames.PREFACE
        if not buffer.startswith(preface):
            if preface.startswith(buffer):
                return 0
            self._speaks_http1 = _HTTP1.match(buffer) is not None
            if self._speaks_http1:
                raise ConnectionFailure(ErrorCode.HTTP_1_1_REQUIRED, "the client speaks HTTP/1.1")
            reason = "this is not HTTP/2"
            if buffer[:1] == _TLS:
                reason = "the client uses TLS, and it is off here"
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, reason)
        self._needs_preface = False
        self._greet()
        if self._wants_drain:
            self._announce_drain()
        return len(preface)

    def _check_order(self, kind: int) -> None:
        if self._needs_settings:
            if kind != frames.SETTINGS:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "SETTINGS comes first")
            self._needs_settings = False
        if self._block is not None and kind != frames.CONTINUATION:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")

    def _count(self, allowance: Allowance, limit: Limit) -> None:
        if allowance.take(self._now_s):
            return
        # Peers answer our data with frames: they are allowed those.
        self._control.earn(2 * self._earned)
        self._pings.earn(self._earned)
        self._resets.earn(self._earned)
        self._earned = 0
        if not allowance.take(self._now_s):
            raise ConnectionFailure(
                ErrorCode.ENHANCE_YOUR_CALM, f"too many frames: {limit}", limit=limit
            )

    # ------------------------------------------------------------ DATA

    def _on_data(self, stream_id: int, flags: int, payload: bytes) -> None:
        length = len(payload)
        self._receive_window -= length
        if self._receive_window < CONNECTION_WINDOW_BYTES // 2:
            if self._receive_window < 0:
                raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "the window is overrun")
            more = CONNECTION_WINDOW_BYTES - self._receive_window
            self._output.append(frames.encode_window_update(0, more))
            self._receive_window = CONNECTION_WINDOW_BYTES
        stream = self._streams.get(stream_id)
        if stream is None or stream.is_remote_closed:
            self._on_late(stream_id, stream, flags, "DATA" if length else "empty DATA")
            return
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise StreamFailure(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "the window is overrun")
        if flags & frames.PADDED:
            payload = _without_padding(payload)
            stream.owed_bytes += length - len(payload)
        is_last = flags & END_STREAM != 0
        if not payload and not is_last:
            self._count(self._empty_data, Limit.EMPTY_DATA)
            return
        if stream.content_left >= 0:
            _count_content(stream, len(payload), is_last=is_last)
        stream.moved_at_s = self._now_s
        if is_last:
            self._close_remote(stream)
        self._events.append(DataReceived(stream, payload, is_last))

    def _on_late(self, stream_id: int, stream: Stream | None, flags: int, frame: str) -> None:
        """Take a frame for a stream that the peer may not send on any more, or never could."""
        if stream is not None:
            raise StreamFailure(
                stream_id, ErrorCode.STREAM_CLOSED, f"{frame} after the end of the stream"
            )
        if stream_id in self._recent_resets:
            # It was on its way when we reset the stream; after its last frame nothing is.
            if flags & END_STREAM:
                del self._recent_resets[stream_id]
            elif frame != "DATA":
                self._count(self._control, Limit.CONTROL)
            return
        if self._is_idle(stream_id):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"{frame} on an idle stream")
        raise ConnectionFailure(ErrorCode.STREAM_CLOSED, f"{frame} on a closed stream")

    # ------------------------------------------------------------ HEADERS

    def _on_headers(self, stream_id: int, flags: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "HEADERS on an even stream")
        if flags & frames.PADDED:
            payload = _without_padding(payload)
        if flags & frames.PRIORITY_FLAG:
            if len(payload) < 5:
                raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "HEADERS without its priority")
            depends_on_itself = frames.decode_u32(payload) & _ID_MASK == stream_id
            payload = payload[5:]
        else:
            depends_on_itself = False
        if flags & END_HEADERS:
            self._on_block(stream_id, flags, payload)
        else:
            self._block, self._block_bytes = (stream_id, flags, [payload]), len(payload)
        # In a block that is not complete it is read over, as priorities are: a stream that has not
        # been opened cannot be reset.
        if depends_on_itself and flags & END_HEADERS:
            raise StreamFailure(stream_id, ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")

    def _on_continuation(self, stream_id: int, flags: int, payload: bytes) -> None:
        if self._block is None or self._block[0] != stream_id:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        _, first_flags, parts = self._block
        parts.append(payload)
        self._block_bytes += len(payload)
        if len(parts) > self._limits.continuations_max:
            raise ConnectionFailure(
                ErrorCode.ENHANCE_YOUR_CALM, "a header block in too many frames",
                limit=Limit.CONTINUATIONS,
            )  # fmt: skip
        if self._block_bytes > self._limits.header_block_bytes:
            raise ConnectionFailure(
                ErrorCode.ENHANCE_YOUR_CALM, "a header block is too long",
                limit=Limit.HEADER_BYTES,
            )  # fmt: skip
        if flags & END_HEADERS:
            self._block = None
            self._on_block(stream_id, first_flags, b"".join(parts))

    def _on_block(self, stream_id: int, flags: int, block: bytes) -> None:
        if len(block) > self._limits.header_block_bytes:
            raise ConnectionFailure(
                ErrorCode.ENHANCE_YOUR_CALM, "a header block is too long",
                limit=Limit.HEADER_BYTES,
            )  # fmt: skip
        # Every block is decoded, also of a stream that is refused: the table depends on it.
        decoded = self._decoder.decode(block)
        is_last = flags & END_STREAM != 0
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.is_remote_closed:
            self._on_more_headers(stream, decoded, is_last=is_last)
        elif stream is None and self._is_server and stream_id > self._last_stream_id:
            self._on_request(stream_id, decoded, is_last=is_last)
        else:
            self._on_late(stream_id, stream, flags, "HEADERS")

    def _on_request(
        self, stream_id: int, decoded: list[tuple[str, str, bool]], *, is_last: bool
    ) -> None:
        self._last_stream_id = stream_id
        if stream_id > self._accept_until:
            raise StreamFailure(stream_id, ErrorCode.REFUSED_STREAM, "the server stops")
        if len(self._streams) >= self._limits.streams_max:
            self._hits[Limit.STREAMS] += 1
            raise StreamFailure(stream_id, ErrorCode.REFUSED_STREAM, "too many streams")
        try:
            pseudo, fields = header_block.check_request(decoded)
            content_left = header_block.content_length(fields)
        except Malformed as error:
            raise StreamFailure(stream_id, ErrorCode.PROTOCOL_ERROR, str(error)) from None
        stream = self._add_stream(stream_id)
        if content_left >= 0:
            stream.content_left = content_left
            _count_content(stream, 0, is_last=is_last)
        if is_last:
            stream.is_remote_closed = True
        self._events.append(RequestReceived(stream, pseudo, fields, is_last))

    def _on_more_headers(
        self, stream: Stream, decoded: list[tuple[str, str, bool]], *, is_last: bool
    ) -> None:
        try:
            if not self._is_server:
                fields = header_block.check_response(decoded)
            elif is_last:
                fields = header_block.check_trailers(decoded)
                if stream.content_left > 0:
                    raise Malformed("the content is not as long as announced")
            else:
                raise Malformed("trailers do not end the stream")
        except Malformed as error:
            raise StreamFailure(stream.id, ErrorCode.PROTOCOL_ERROR, str(error)) from None
        stream.moved_at_s = self._now_s
        if is_last:
            self._close_remote(stream)
        if not self._is_server:
            self._events.append(ResponseReceived(stream, fields, is_last))
        elif is_last:
            self._events.append(DataReceived(stream, b"", is_last))

    def _add_stream(self, stream_id: int) -> Stream:
        stream = self._streams[stream_id] = Stream(
            stream_id,
            send_window=self._peer_window_bytes,
            receive_window=self._limits.stream_window_bytes,
            now_s=self._now_s,
        )
        return stream

    # ------------------------------------------------------------ the other frames

    def _on_priority(self, stream_id: int, _flags: int, payload: bytes) -> None:
        self._count(self._control, Limit.CONTROL)
        if stream_id == 0:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "PRIORITY of the connection")
        if len(payload) != 5:
            raise StreamFailure(stream_id, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY has 5 bytes")
        if frames.decode_u32(payload) & _ID_MASK == stream_id:
            raise StreamFailure(stream_id, ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")

    def _on_rst_stream(self, stream_id: int, _flags: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM has 4 bytes")
        if self._is_idle(stream_id):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "RST_STREAM of an idle stream")
        self._count(self._resets, Limit.RESETS)
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream)
            self._events.append(StreamReset(stream, frames.decode_u32(payload)))

    def _on_settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id != 0:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement is empty")
            self._count(self._control, Limit.CONTROL)
            return
        if len(payload) % frames.SETTING_SIZE:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS has 6 bytes each")
        self._count(self._settings, Limit.SETTINGS)
        window_bytes = self._peer_window_bytes
        for setting, value in frames.decode_settings(payload):
            if setting == Setting.INITIAL_WINDOW_SIZE:
                if value > frames.WINDOW_MAX:
                    raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "a window is too large")
                window_bytes = value
            else:
                self._apply_setting(setting, value)
        # Before what it allows us to send: until then the peer counts with its old windows.
        self._output.append(frames.SETTINGS_ACK)
        # Once a frame: one has room for 2730 windows, and each may let every stream send a byte.
        self._resize_windows(window_bytes)

    def _resize_windows(self, window_bytes: int) -> None:
        change = window_bytes - self._peer_window_bytes
        if not change:
            return
        self._peer_window_bytes = window_bytes
        for stream in self._streams.values():
            stream.send_window += change
            if stream.send_window > frames.WINDOW_MAX:
                raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "a window is too large")
        self._send_blocked()

    def _apply_setting(self, setting: int, value: int) -> None:
        if setting == Setting.MAX_FRAME_SIZE:
            if not frames.DEFAULT_FRAME_BYTES <= value <= frames.FRAME_BYTES_LIMIT:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "a frame size out of range")
            self._peer_frame_bytes = value
        elif setting == Setting.ENABLE_PUSH:
            if value > 1 or (value and not self._is_server):
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH out of range")
        elif setting == Setting.MAX_CONCURRENT_STREAMS:
            self._peer_streams_max = value
        elif setting == Setting.HEADER_TABLE_SIZE:
            # The smallest value is told, also where a larger one follows it.
            self._must_shrink_table |= value < header_block.TABLE_BYTES

    def _on_push_promise(self, _stream_id: int, _flags: int, _payload: bytes) -> None:
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "nobody may push here")

    def _on_ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id != 0:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != frames.PING_SIZE:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "PING has 8 bytes")
        if not flags & frames.ACK:
            self._count(self._pings, Limit.PINGS)
            self._output.append(frames.encode_ping(payload, is_ack=True))
            return
        self._count(self._control, Limit.CONTROL)
        if payload == _KEEPALIVE_PING:
            self._ping_sent_at_s = None
        elif payload == _DRAIN_PING and self._is_drain_announced:
            # The peer has seen that we stop: what it opened before is served, and no more.
            self._go_away(ErrorCode.NO_ERROR)

    def _on_goaway(self, stream_id: int, _flags: int, payload: bytes) -> None:
        if stream_id != 0:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "GOAWAY of a stream")
        if len(payload) < frames.GOAWAY_SIZE_MIN:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY has 8 bytes or more")
        last_stream_id, code, text = frames.decode_goaway(payload)
        self._count(self._control, Limit.CONTROL)
        self.is_draining = True
        if not self._is_server:
            for stream in [one for one in self._streams.values() if one.id > last_stream_id]:
                self._forget(stream)
                self._events.append(StreamReset(stream, ErrorCode.REFUSED_STREAM))
        self._events.append(GoAwayReceived(code, text.decode("utf-8", "replace")))

    def _on_window_update(self, stream_id: int, _flags: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE has 4 bytes")
        self._count(self._control, Limit.CONTROL)
        increment = frames.decode_u32(payload) & frames.WINDOW_MAX
        if stream_id == 0:
            self._send_window += increment
            if increment == 0 or self._send_window > frames.WINDOW_MAX:
                raise ConnectionFailure(
                    ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR,
                    "a window grows by nothing, or too far",
                )
            self._send_blocked()
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            if self._is_idle(stream_id):
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "a window of an idle stream")
            return
        stream.send_window += increment
        if increment == 0 or stream.send_window > frames.WINDOW_MAX:
            raise StreamFailure(
                stream_id,
                ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR,
                "a window grows by nothing, or too far",
            )
        if stream.queue:
            self._send_queued(stream)

    def _is_idle(self, stream_id: int) -> bool:
        """Whether no stream of this id was ever open; only clients open streams, the odd ones."""
        return stream_id > self._last_stream_id or not stream_id & 1

    # ------------------------------------------------------------ sending

    def open_stream(self, block: bytes) -> Stream | None:
        """Open a stream as a client; None where the peer takes no more for now."""
        assert not self._is_server, "only clients open streams"
        if self.is_draining or self.is_closed or len(self._streams) >= self._peer_streams_max:
            return None
        stream_id = self._last_stream_id = self._next_stream_id
        self._next_stream_id += 2
        if self._next_stream_id > frames.STREAM_ID_MAX:
            self.is_draining = True  # Another connection has ids again.
        stream = self._add_stream(stream_id)
        self.send_headers(stream, block, is_last=False)
        return stream

    def send_headers(self, stream: Stream, block: bytes, *, is_last: bool) -> None:
        """Send a header block, now; as the last frame after everything that is queued."""
        if stream.is_reset:
            return
        if is_last and stream.queue:
            stream.trailers = block
            return
        if self._must_shrink_table:
            self._must_shrink_table = False
            block = header_block.NO_TABLE + block
        self._output.append(
            frames.encode_headers(stream.id, block, self._peer_frame_bytes, is_last=is_last)
        )
        if is_last:
            self._close_local(stream)

    def send_data(self, stream: Stream, data: bytes, *, is_last: bool = False) -> None:
        """Send `data`, as far as the windows are open; the rest as they open."""
        if stream.is_reset:
            return
        assert not stream.is_local_closed, "nothing follows the last frame"
        length = len(data)
        if stream.queue is None and (
            not length  # Needs no window, and may not wait for one: nobody would open it.
            or (
                length <= self._peer_frame_bytes
                and length <= stream.send_window
                and length <= self._send_window
            )
        ):
            stream.send_window -= length
            self._send_window -= length
            flags = END_STREAM if is_last else 0
            self._output.append(_pack_header(length << 8, flags, stream.id))
            self._output.append(data)
            self._earned += 1
            if is_last:
                self._close_local(stream)
            return
        if is_last:
            stream.trailers = b""
        if length:
            self._queue(stream, data)

    def send_response(self, stream: Stream, block: bytes, data: bytes, trailers: bytes) -> None:
        """Send a whole response: headers, data, and trailers that end the stream."""
        length = len(data)
        if (
            stream.is_reset
            or self._must_shrink_table
            or length > self._peer_frame_bytes
            or length > stream.send_window
            or length > self._send_window
        ):
            self.send_headers(stream, block, is_last=False)
            self.send_data(stream, data)
            self.send_headers(stream, trailers, is_last=True)
            return
        # What nearly every unary call comes to, written out.
        self._send_window -= length
        stream_id = stream.id
        self._output += (
            _pack_header(len(block) << 8 | HEADERS, END_HEADERS, stream_id),
            block,
            _pack_header(length << 8, 0, stream_id),
            data,
            _pack_header(len(trailers) << 8 | HEADERS, END_HEADERS | END_STREAM, stream_id),
            trailers,
        )
        self._earned += 1
        self._close_local(stream)

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream at once."""
        if stream.is_reset or stream.id not in self._streams:
            return
        self._forget(stream)
        self._remember_reset(stream.id)
        self._output.append(frames.encode_rst_stream(stream.id, code))

    def _queue(self, stream: Stream, data: bytes) -> None:
        if stream.queue is None:
            stream.queue = deque()
            stream.moved_at_s = self._now_s
        stream.queue.append(memoryview(data))
        stream.queued_bytes += len(data)
        self._queued_bytes += len(data)
        self._blocked[stream.id] = stream
        self._send_queued(stream)
        if self._is_server and self._queued_bytes > self._limits.unread_bytes_max:
            # Told by the next `receive` or `check`; what is held is let go at once.
            self._fail(
                ConnectionFailure(
                    ErrorCode.ENHANCE_YOUR_CALM, "responses stay unread", limit=Limit.UNREAD
                )
            )

    def _send_blocked(self) -> None:
        """Send of what waits: a frame of each stream in turn, while the windows allow.

        Who has had a turn goes to the end, so that a window that opens little by little serves all.
        """
        has_moved = True
        while has_moved and self._send_window > 0 and self._blocked:
            has_moved = False
            for stream in list(self._blocked.values()):
                if stream.send_window > 0 and self._send_window > 0:
                    self._send_frame(stream)
                    if stream.queue:
                        self._blocked[stream.id] = self._blocked.pop(stream.id)
                    has_moved = True

    def _send_queued(self, stream: Stream) -> None:
        while stream.queue and stream.send_window > 0 and self._send_window > 0:
            self._send_frame(stream)

    def _send_frame(self, stream: Stream) -> None:
        """Send one DATA frame out of the queue, and the end of the stream after the last one."""
        assert stream.queue, "only streams with something queued are sent of"
        first = stream.queue[0]
        length = min(len(first), stream.send_window, self._send_window, self._peer_frame_bytes)
        stream.send_window -= length
        self._send_window -= length
        stream.queued_bytes -= length
        self._queued_bytes -= length
        stream.moved_at_s = self._now_s
        self._output += (_pack_header(length << 8, 0, stream.id), bytes(first[:length]))
        if length < len(first):
            stream.queue[0] = first[length:]
            return
        stream.queue.popleft()
        self._earned += 1
        if stream.queue:
            return
        stream.queue = None
        del self._blocked[stream.id]
        if stream.trailers is None:
            self._events.append(StreamWritable(stream))
        elif stream.trailers:
            self.send_headers(stream, stream.trailers, is_last=True)
        else:
            self._output.append(_pack_header(DATA, END_STREAM, stream.id))
            self._close_local(stream)

    # ------------------------------------------------------------ our windows

    def consume(self, stream: Stream, count: int) -> None:
        """Let the peer send more on `stream`: the application has read `count` bytes."""
        if stream.is_remote_closed or stream.is_reset:
            return
        returned = min(count, stream.large_bytes)
        if returned:
            stream.large_bytes -= returned
            self._return_room(returned)
        stream.owed_bytes += count - returned
        if stream.owed_bytes * 2 >= self._limits.stream_window_bytes:
            stream.receive_window += stream.owed_bytes
            self._output.append(frames.encode_window_update(stream.id, stream.owed_bytes))
            stream.owed_bytes = 0

    def make_room(self, stream: Stream, count: int) -> None:
        """Let the peer send `count` bytes in all, out of the budget, when it has room.

        The caller keeps `count` within the budget.
        """
        missing = count - stream.receive_window
        if missing <= 0 or stream.is_remote_closed or stream.is_reset:
            return
        assert missing <= self._limits.large_messages_bytes, "no message is larger than the budget"
        if not stream.wanted_bytes:
            self._wanting.append(stream)
        stream.wanted_bytes = missing
        self._return_room(0)

    def _return_room(self, count: int) -> None:
        self._large_left += count
        # A closed connection has said its last words.
        while self._wanting and not self.is_closed:
            stream = self._wanting[0]
            granted = stream.wanted_bytes
            if granted > self._large_left:
                return
            self._large_left -= granted
            stream.large_bytes += granted
            stream.receive_window += granted
            stream.moved_at_s = self._now_s
            self._output.append(frames.encode_window_update(stream.id, granted))
            stream.wanted_bytes = 0
            self._wanting.popleft()

    def _want_nothing(self, stream: Stream) -> None:
        """Let the next stream have its turn: this one gets nothing more."""
        self._wanting.remove(stream)
        stream.wanted_bytes = 0
        self._return_room(0)

    # ------------------------------------------------------------ ends

    def _close_remote(self, stream: Stream) -> None:
        stream.is_remote_closed = True
        if stream.wanted_bytes:
            self._want_nothing(stream)
        if stream.is_local_closed:
            self._forget(stream, is_reset=False)

    def _close_local(self, stream: Stream) -> None:
        stream.is_local_closed = True
        if stream.is_remote_closed:
            self._forget(stream, is_reset=False)
        elif self._is_server:
            # The response is complete, and nobody reads the rest of the request (section 8.1).
            self.reset(stream, ErrorCode.NO_ERROR)

    def _forget(self, stream: Stream, *, is_reset: bool = True) -> None:
        del self._streams[stream.id]
        self._busy_at_s = self._now_s
        if is_reset:
            stream.is_reset = True
        if stream.queue is not None:
            self._queued_bytes -= stream.queued_bytes  # The stream keeps its count: never sent.
            stream.queue = None
            del self._blocked[stream.id]
        if stream.wanted_bytes:
            self._want_nothing(stream)
        if stream.large_bytes:
            returned, stream.large_bytes = stream.large_bytes, 0
            self._return_room(returned)

    def _reset_failed(self, failure: StreamFailure) -> None:
        """End one stream by the peer's fault, or refuse it."""
        stream = self._streams.get(failure.stream_id)
        if stream is not None:
            self._forget(stream)
            self._events.append(StreamReset(stream, failure.code))
        self._remember_reset(failure.stream_id)
        # Faults of a peer cost it as much as resets: both make us open and close streams.
        self._count(self._resets, Limit.RESETS)
        self._output.append(frames.encode_rst_stream(failure.stream_id, failure.code))

    def _remember_reset(self, stream_id: int) -> None:
        if len(self._recent_resets) >= RESETS_REMEMBERED:
            del self._recent_resets[next(iter(self._recent_resets))]
        self._recent_resets[stream_id] = None

    def start_drain(self) -> None:
        """Tell the peer to open no more streams, first without refusing those on their way."""
        # A client that goes away for its part may still open streams until it is told.
        self._wants_drain = self.is_draining = True
        if not (self._is_drain_announced or self.is_closed or self._needs_preface):
            self._announce_drain()

    def _announce_drain(self) -> None:
        self._is_drain_announced = True
        self._output.append(frames.encode_goaway(frames.STREAM_ID_MAX, ErrorCode.NO_ERROR))
        self._output.append(frames.encode_ping(_DRAIN_PING, is_ack=False))

    def close(self, code: ErrorCode, reason: str, limit: Limit | None = None) -> list[Event]:
        """End the connection: every stream is reset, and GOAWAY is the last of the output."""
        if not self.is_closed:
            self._fail(ConnectionFailure(code, reason, limit=limit))
        return self._take_events()

    def _go_away(self, code: ErrorCode, reason: str = "") -> None:
        self._accept_until = self._last_stream_id
        last_seen = self._last_stream_id if self._is_server else 0
        self._output.append(frames.encode_goaway(last_seen, code, reason))

    def _fail(self, failure: ConnectionFailure) -> None:
        self.is_closed = True
        if failure.limit is not None:
            self._hits[failure.limit] += 1
        if self._speaks_http1:
            self._output = [_HTTP1_ANSWER]
        else:
            self._go_away(failure.code, failure.reason)
        for stream in list(self._streams.values()):
            self._forget(stream)
            self._events.append(StreamReset(stream, failure.code))
        self._unparsed, self._block = b"", None
        self._events.append(Failed(failure.code, failure.reason, failure.limit))

    # ------------------------------------------------------------ as time passes

    def check(self, now_s: float) -> list[Event]:
        """Ask for signs of life and end what has stood still for too long.

        To be called every second or so while the connection is open.
        """
        if self.is_closed:
            return self._take_events()
        self._now_s = now_s
        limits = self._limits
        if self._needs_preface or self._needs_settings:
            if now_s - self._opened_at_s > limits.handshake_timeout_s:
                return self.close(ErrorCode.SETTINGS_TIMEOUT, "no preface came", Limit.HANDSHAKE)
            return []
        silent_s = now_s - self._heard_at_s
        if (self._block or self._unparsed) and silent_s > limits.stall_timeout_s:
            return self.close(ErrorCode.ENHANCE_YOUR_CALM, "a frame stays away", Limit.REQUEST)
        if self._ping_sent_at_s is not None:
            if self._heard_at_s > self._ping_sent_at_s:
                self._ping_sent_at_s = None
            elif now_s - self._ping_sent_at_s > limits.keepalive_timeout_s:
                return self.close(ErrorCode.NO_ERROR, "the peer is silent", Limit.KEEPALIVE)
        elif silent_s > limits.keepalive_period_s:
            self._ping_sent_at_s = now_s
            self._output.append(frames.encode_ping(_KEEPALIVE_PING, is_ack=False))
        if not self._streams and self._is_server:
            if now_s - self._busy_at_s > limits.idle_timeout_s:
                if self._is_drain_announced:
                    return self.close(ErrorCode.NO_ERROR, "idle", Limit.IDLE)
                # In two steps: a call may be on its way.
                self.start_drain()
            return []
        for stream in [one for one in self._blocked.values() if self._has_stalled(one)]:
            self._hits[Limit.STALLED] += 1
            self.reset(stream, ErrorCode.CANCEL)
            self._events.append(StreamReset(stream, ErrorCode.CANCEL))
        return self._take_events()

    def _has_stalled(self, stream: Stream) -> bool:
        return self._now_s - stream.moved_at_s > self._limits.stall_timeout_s

    # Functions and not bound methods: a table of those would make each connection hold itself.
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


def _without_padding(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]


def _count_content(stream: Stream, count: int, *, is_last: bool) -> None:
    stream.content_left -= count
    if stream.content_left < 0 or (is_last and stream.content_left):
        raise StreamFailure(
            stream.id, ErrorCode.PROTOCOL_ERROR, "the content is not as long as announced"
        )
