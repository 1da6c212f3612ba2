"""A connection of HTTP/2 as a state machine: bytes and the time in, events and bytes out.

`receive` reads frames, in their order, and returns what they mean. What is to be sent gathers until
`take_output`. Nothing waits, nothing is read from a clock, and a peer can do no more than `Limits`
allow: whatever it sends, the worst that comes of it is a `ConnectionEnded` event.

Here frames come in. What has a subject of its own stands beside: what is sent on streams and how
they end (`streams`, `stream_states`), windows and what waits for them (`flow_control`), what the
peer wants of us (`settings`), what it may do (`allowances`), whether it is there (`liveness`), what
it has read (`read_marks`), and how header blocks come in frames (`header_frames`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import ClassVar, Final, final

from tidemill.transport.http2 import frames, header_block, header_frames
from tidemill.transport.http2.allowances import Allowances
from tidemill.transport.http2.events import (
    ConnectionEnded,
    DataReceived,
    Event,
    GoAwayReceived,
    MarkReached,
    RequestReceived,
    ResponseReceived,
    StreamReset,
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
    StreamFailure,
)
from tidemill.transport.http2.header_block import Decoded, MalformedHeaders
from tidemill.transport.http2.header_frames import PartialBlock
from tidemill.transport.http2.limits import Limit, Limits
from tidemill.transport.http2.liveness import Liveness
from tidemill.transport.http2.preface import HTTP1_ANSWER, read_preface
from tidemill.transport.http2.read_marks import ReadMarks
from tidemill.transport.http2.settings import PeerSettings, greeting
from tidemill.transport.http2.stream import Stream
from tidemill.transport.http2.stream_states import ON_REMOTE_END, REMOTE_ENDED
from tidemill.transport.http2.streams import StreamTable

_KEEPALIVE_PING: Final = b"tidemill"
_DRAIN_PING: Final = b"draining"
_READ_PING: Final = b"all read"
_ID_MASK: Final = frames.STREAM_ID_MAX
_PADDED_OR_PRIORITY: Final = frames.PADDED | frames.PRIORITY_FLAG
_unpack_header: Final = HEADER.unpack_from


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
        # Streams and flow control add to these two as well.
        self._events: list[Event] = []
        self._output: list[bytes] = []
        self._taken_bytes = 0  # of all data that was sent: what has left the output
        self.unparsed = b""  # of what has come: what waits for the rest of its frame, or its turn
        self._decoder = header_block.HeaderDecoder(limits.header_list_bomb_bytes)
        self._block: PartialBlock | None = None
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
        self._liveness = Liveness(limits, now_s)
        self._marks = ReadMarks()

        self.has_input = False  # frames that have come wait for the next `receive`
        self.is_closed = False
        self.is_draining = False  # no new streams of ours, by our will or the peer's
        self._wants_drain = False  # none of the peer's either
        self.is_drain_announced = False
        self.is_drain_heard = False  # the peer has answered: it opens no stream any more
        self._accept_until = frames.STREAM_ID_MAX  # highest stream id that is served
        self._needs_preface = self._is_server
        self._needs_settings = True
        if not self._is_server:
            self._output += greeting(limits, is_server=False)

    # ------------------------------------------------------------ output

    def take_output(self) -> bytes:
        """Return what is to be sent, and forget it."""
        output = b"".join(self._output)
        self._output.clear()
        self._taken_bytes = self._outgoing.sent_bytes
        return output

    @property
    def output_bytes(self) -> int:
        """How much data the output holds, beside the frames that carry no data."""
        return self._outgoing.sent_bytes - self._taken_bytes

    @property
    def queued_bytes(self) -> int:
        """What waits for the peer's windows, of all streams."""
        return self._outgoing.queued_bytes

    def held_bytes(self, *, output_bytes_min: int) -> int:
        """Return what waits, here and at the windows, and what the peer was let send beyond those.

        Output counts where it is more than `output_bytes_min`.
        """
        # Written out: it is asked for with every frame of a link.
        outgoing, incoming = self._outgoing, self._incoming
        held_bytes = outgoing.queued_bytes + incoming.budget_bytes - incoming.budget_left
        output_bytes = outgoing.granted_bytes - outgoing.window - self._taken_bytes
        if output_bytes > output_bytes_min:
            held_bytes += output_bytes
        return held_bytes + len(self.unparsed)

    def has_window(self, stream: Stream, count: int) -> bool:
        """Whether the peer's windows let `count` bytes be sent at once."""
        return count <= stream.send_window and count <= self._outgoing.window

    @property
    def has_output(self) -> bool:
        """Whether there is something to send."""
        return bool(self._output)

    # ------------------------------------------------------------ input

    def receive(self, data: bytes, now_s: float, *, frames_max: int = sys.maxsize) -> list[Event]:
        """Take bytes that arrived at `now_s`, monotonic seconds; return what they mean.

        Of frames `frames_max` are read; where `has_input` holds afterwards, go on with no bytes.
        """
        if self.is_closed:
            return self._take_events()
        self._streams.now_s = self._liveness.heard_at_s = now_s
        buffer = self.unparsed + data if self.unparsed else data
        at, end = 0, len(buffer)
        handlers, frame_bytes_max = self._HANDLERS, self._limits.frame_bytes
        frames_left = frames_max
        try:
            if self._needs_preface:
                at = self._receive_preface(buffer)
                if not at:
                    self.unparsed = buffer
                    return self._take_events()
            while end - at >= HEADER_SIZE and frames_left > 0:
                frames_left -= 1
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
            self.has_input = frames_left <= 0 and len(self.unparsed) >= HEADER_SIZE
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
            self._output += greeting(self._limits, is_server=True)
            if self._wants_drain:
                self._announce_drain()
        return at

    def _check_order(self, kind: int) -> None:
        if self._needs_settings:
            if kind != frames.SETTINGS:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "SETTINGS comes first")
            self._needs_settings = False
        if self._block is not None and kind != frames.CONTINUATION:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")

    # ------------------------------------------------------------ DATA and HEADERS

    def _on_data(self, stream_id: int, flags: int, payload: bytes) -> None:
        length = len(payload)
        self._incoming.received(length)
        stream = self._streams.by_id.get(stream_id)
        if stream is None or stream.state in REMOTE_ENDED:
            self._streams.on_late(stream_id, stream, flags, "DATA" if length else "empty DATA")
            return
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise StreamFailure(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "the window is overrun")
        if flags & frames.PADDED:
            payload = header_frames.without_padding(payload)
            stream.owed_bytes += length - len(payload)
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
        part, depends_on_itself = payload, False
        if flags & _PADDED_OR_PRIORITY or not stream_id & 1:
            part, depends_on_itself = header_frames.first_part(stream_id, flags, payload)
        if not flags & END_HEADERS:
            # Its priority is read over: a stream that has not been opened cannot be reset.
            self._block = PartialBlock(stream_id, flags, part)
            return
        self._on_block(stream_id, flags, part)
        if depends_on_itself:
            raise StreamFailure(stream_id, ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")

    def _on_continuation(self, stream_id: int, flags: int, payload: bytes) -> None:
        block = self._block
        if block is None or block.stream_id != stream_id:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        block.add(payload, self._limits)
        if flags & END_HEADERS:
            self._block = None
            self._on_block(stream_id, block.flags, block.join())

    def _on_block(self, stream_id: int, flags: int, block: bytes) -> None:
        # Every block is decoded, also of a stream that is refused: the table depends on it.
        decoded = self._decoder.decode(block)
        is_last = flags & END_STREAM != 0
        stream = self._streams.by_id.get(stream_id)
        try:
            if stream is not None and stream.state not in REMOTE_ENDED:
                self._check_header_bytes(stream_id, len(block), header_block.list_bytes(decoded))
                self._on_more_headers(stream, decoded, is_last=is_last)
            elif stream is None and self._is_server and stream_id > self._streams.last_id:
                self._streams.last_id = stream_id
                self._on_request(stream_id, len(block), decoded, is_last=is_last)
            else:
                self._streams.on_late(stream_id, stream, flags, "HEADERS")
        except MalformedHeaders as error:
            raise StreamFailure(stream_id, ErrorCode.PROTOCOL_ERROR, str(error)) from None

    def _check_header_bytes(self, stream_id: int, block_bytes: int, header_bytes: int) -> None:
        """Raise StreamFailure for a header list that is too long.

        Not what ends the connection: it may be one that a proxy shares among many clients.
        """
        limits = self._limits
        if block_bytes > limits.header_block_bytes or header_bytes > limits.header_list_bytes:
            self._hits[Limit.HEADER_BYTES] += 1
            raise StreamFailure(
                stream_id, ErrorCode.ENHANCE_YOUR_CALM, "the header list is too long"
            )

    def _on_request(
        self, stream_id: int, block_bytes: int, decoded: Decoded, *, is_last: bool
    ) -> None:
        known = header_block.known_request(decoded)
        header_bytes = header_block.list_bytes(decoded) if known is None else known[1]
        self._check_header_bytes(stream_id, block_bytes, header_bytes)
        if stream_id > self._accept_until:
            raise StreamFailure(stream_id, ErrorCode.REFUSED_STREAM, "the server stops")
        if len(self._streams.by_id) >= self._limits.streams_max:
            self._hits[Limit.STREAMS] += 1
            raise StreamFailure(stream_id, ErrorCode.REFUSED_STREAM, "too many streams")
        fields = header_block.check_request(decoded) if known is None else known[0]
        content_left = header_block.content_length(fields) if "content-length" in fields else -1
        stream = self._streams.add(stream_id)
        stream.header_bytes = header_bytes
        if content_left >= 0:
            stream.content_left = content_left
            stream.count_content(0, is_last=is_last)
        if is_last:
            stream.state = ON_REMOTE_END[stream.state]
        self._events.append(RequestReceived(stream, fields, is_last))

    def _on_more_headers(self, stream: Stream, decoded: Decoded, *, is_last: bool) -> None:
        if not self._is_server:
            fields = header_block.check_response(decoded)
        elif is_last:
            fields = header_block.check_trailers(decoded)
            if stream.content_left > 0:
                raise MalformedHeaders("the content is not as long as announced")
        else:
            raise MalformedHeaders("trailers do not end the stream")
        stream.moved_at_s = self._streams.now_s
        if is_last:
            self._streams.end_remote(stream)
        if not self._is_server:
            self._events.append(ResponseReceived(stream, fields, is_last))
        elif is_last:
            self._events.append(DataReceived(stream, b"", is_last))

    # ------------------------------------------------------------ the other frames

    def _on_priority(self, stream_id: int, _flags: int, payload: bytes) -> None:
        self._allowances.take(Limit.CONTROL, self._streams.now_s)
        if stream_id == 0:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "PRIORITY of the connection")
        if len(payload) != frames.PRIORITY_SIZE:
            raise StreamFailure(stream_id, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY has 5 bytes")
        if header_frames.depends_on(payload) == stream_id:
            raise StreamFailure(stream_id, ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")

    def _on_rst_stream(self, stream_id: int, _flags: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM has 4 bytes")
        if self._streams.is_idle(stream_id):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "RST_STREAM of an idle stream")
        self._allowances.take(Limit.RESETS, self._streams.now_s)
        stream = self._streams.by_id.get(stream_id)
        if stream is not None:
            self._streams.break_off(stream, frames.decode_u32(payload))

    def _on_settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id != 0:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement is empty")
            self._allowances.take(Limit.CONTROL, self._streams.now_s)
            return
        self._allowances.take(Limit.SETTINGS, self._streams.now_s)
        change = self._settings.apply(payload)
        # Before what it allows us to send: until then the peer counts with its old windows.
        self._output.append(frames.SETTINGS_ACK)
        self._outgoing.frame_bytes = self._settings.frame_bytes
        if change:
            self._outgoing.resize(self._streams.by_id.values(), change)
            self._outgoing.send_blocked(self._streams.now_s, self._streams.on_drained)

    def _on_push_promise(self, _stream_id: int, _flags: int, _payload: bytes) -> None:
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "nobody may push here")

    def _on_ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id != 0:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != frames.PING_SIZE:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "PING has 8 bytes")
        if not flags & frames.ACK:
            self._allowances.take(Limit.PINGS, self._streams.now_s)
            self._output.append(frames.encode_ping(payload, is_ack=True))
            return
        self._allowances.take(Limit.CONTROL, self._streams.now_s)
        if payload == _KEEPALIVE_PING:
            self._liveness.answered()
        elif payload == _READ_PING:
            self._events.append(MarkReached(self._marks.answered()))
        elif payload == _DRAIN_PING and self.is_drain_announced:
            # The peer has seen that we stop: what it opened before is served, and no more.
            self.is_drain_heard = True
            self._go_away(ErrorCode.NO_ERROR)

    def _on_goaway(self, stream_id: int, _flags: int, payload: bytes) -> None:
        if stream_id != 0:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "GOAWAY of a stream")
        if len(payload) < frames.GOAWAY_SIZE_MIN:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY has 8 bytes or more")
        last_stream_id, code, text = frames.decode_goaway(payload)
        self._allowances.take(Limit.CONTROL, self._streams.now_s)
        self.is_draining = True
        if not self._is_server:
            for stream in [one for one in self._streams.by_id.values() if one.id > last_stream_id]:
                self._streams.break_off(stream, ErrorCode.REFUSED_STREAM)
        self._events.append(GoAwayReceived(code, text.decode("utf-8", "replace")))

    def _on_window_update(self, stream_id: int, _flags: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE has 4 bytes")
        self._allowances.take(Limit.CONTROL, self._streams.now_s)
        increment = frames.decode_u32(payload) & frames.WINDOW_MAX
        if stream_id == 0:
            self._outgoing.grow(increment)
            self._outgoing.send_blocked(self._streams.now_s, self._streams.on_drained)
            return
        stream = self._streams.by_id.get(stream_id)
        if stream is not None:
            self._outgoing.grow_stream(stream, increment)
            if stream.queue:
                self._outgoing.send_queued(stream, self._streams.now_s, self._streams.on_drained)
        elif self._streams.is_idle(stream_id):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "a window of an idle stream")

    # ------------------------------------------------------------ streams

    def open_stream(self, block: bytes) -> Stream | None:
        """Open a stream as a client; None where the peer takes no more for now."""
        assert not self._is_server, "only clients open streams"
        if self.is_draining or self.is_closed:
            return None
        stream = self._streams.open_next(block)
        self.is_draining |= self._streams.are_ids_used_up  # Another connection has ids again.
        return stream

    def send_headers(self, stream: Stream, block: bytes, *, is_last: bool) -> None:
        """Send a header block, now; as the last frame after everything that is queued."""
        self._streams.send_headers(stream, block, is_last=is_last)

    def send_data(self, stream: Stream, data: bytes, *, is_last: bool = False) -> None:
        """Send `data`, as far as the windows are open; the rest as they open."""
        self._streams.send_data(stream, data, is_last=is_last)
        if stream.queue is not None:
            self._check_unread()

    def send_response(self, stream: Stream, block: bytes, data: bytes, trailers: bytes) -> None:
        """Send a whole response: headers, data, and trailers that end the stream."""
        self._streams.send_response(stream, block, data, trailers)
        if stream.queue is not None:
            self._check_unread()

    def _check_unread(self) -> None:
        if self._is_server and self._outgoing.queued_bytes > self._limits.unread_bytes_max:
            # Told by the next `receive` or `check`; what is held is let go at once.
            code = ErrorCode.ENHANCE_YOUR_CALM
            self._fail(ConnectionFailure(code, "responses stay unread", limit=Limit.UNREAD))

    def mark_output(self) -> int:
        """Mark what was sent so far, and nothing that still waits for a window."""
        return self._marks.add()

    def ask_for_marks(self, now_s: float, *, is_pressing: bool = False) -> float | None:
        """Ask the peer to tell what it has read, which the event `MarkReached` says.

        Returns in how many seconds to call again, where that is too soon now; what is pressing is
        asked at once, unless a ping is out already.
        """
        wait_s = None if self.is_closed else self._marks.wait_s(now_s, is_pressing=is_pressing)
        if wait_s != 0:
            return wait_s
        self._marks.asked(now_s)
        self._output.append(frames.encode_ping(_READ_PING, is_ack=False))
        return None

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream at once."""
        self._streams.reset(stream, code)

    def consume(self, stream: Stream, count: int) -> None:
        """Let the peer send more on `stream`: the application has read `count` bytes."""
        self._incoming.consume(stream, count, self._streams.now_s)

    def has_budget(self, count: int) -> bool:
        """Whether `count` bytes beyond a stream's window could be granted at once."""
        return not self._incoming.wanting and count <= self._incoming.budget_left

    def repay(self, stream: Stream) -> None:
        """Let the peer send at once what `consume` has not let it send yet, padding among it."""
        self._incoming.repay(stream)

    def make_room(self, stream: Stream, count: int) -> None:
        """Let the peer send `count` bytes in all, out of the budget, when it has room.

        The caller keeps `count` within the budget.
        """
        self._incoming.make_room(stream, count, self._streams.now_s)

    # ------------------------------------------------------------ the end of the connection

    @property
    def heard_at_s(self) -> float:
        """When anything came from the peer last, in monotonic seconds."""
        return self._liveness.heard_at_s

    def start_drain(self) -> None:
        """Tell the peer to open no more streams, first without refusing those on their way."""
        # A client that goes away for its part may still open streams until it is told.
        self._wants_drain = self.is_draining = True
        if not (self.is_drain_announced or self.is_closed or self._needs_preface):
            self._announce_drain()

    def _announce_drain(self) -> None:
        self.is_drain_announced = True
        self._output.append(frames.encode_goaway(frames.STREAM_ID_MAX, ErrorCode.NO_ERROR))
        self._output.append(frames.encode_ping(_DRAIN_PING, is_ack=False))

    def close(self, code: ErrorCode, reason: str, limit: Limit | None = None) -> list[Event]:
        """End the connection: every stream is reset, and GOAWAY is the last of the output."""
        if not self.is_closed:
            self._fail(ConnectionFailure(code, reason, limit=limit))
        return self._take_events()

    def _go_away(self, code: ErrorCode, reason: str = "") -> None:
        self._accept_until = self._streams.last_id
        last_seen = self._streams.last_id if self._is_server else 0
        self._output.append(frames.encode_goaway(last_seen, code, reason))

    def _fail(self, failure: ConnectionFailure) -> None:
        self.is_closed = True
        self._incoming.stop()
        if failure.limit is not None:
            self._hits[failure.limit] += 1
        if failure.code is ErrorCode.HTTP_1_1_REQUIRED:
            self._output[:] = [HTTP1_ANSWER]
        else:
            self._go_away(failure.code, failure.reason)
        for stream in list(self._streams.by_id.values()):
            self._streams.break_off(stream, failure.code)
        self.unparsed, self._block = b"", None
        self._events.append(ConnectionEnded(failure.code, failure.reason, failure.limit))

    # ------------------------------------------------------------ as time passes

    def check(self, now_s: float) -> list[Event]:
        """Ask for signs of life and end what has stood still for too long.

        To be called every second or so while the connection is open.
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
        is_within_frame = bool(self._block or self.unparsed)
        if self._liveness.wants_ping(now_s, is_within_frame=is_within_frame):
            self._output.append(frames.encode_ping(_KEEPALIVE_PING, is_ack=False))
        is_empty = self._is_server and not self._streams.by_id
        if is_empty and self._liveness.is_idle(now_s, self._streams.busy_at_s):
            if self.is_drain_announced:
                raise ConnectionFailure(ErrorCode.NO_ERROR, "idle", limit=Limit.IDLE)
            # In two steps: a call may be on its way.
            self.start_drain()
        stall_s = self._limits.stall_timeout_s
        blocked = self._outgoing.blocked.values()
        for stream in [one for one in blocked if now_s - one.moved_at_s > stall_s]:
            self._hits[Limit.STALLED] += 1
            self._streams.reset(stream, ErrorCode.CANCEL)
            self._events.append(StreamReset(stream, ErrorCode.CANCEL))

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
