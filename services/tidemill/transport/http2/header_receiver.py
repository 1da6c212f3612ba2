"""Receipt of header blocks: requests, responses and trailers of the peer's streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from tidemill.transport.http2 import frames, header_block, header_frames
from tidemill.transport.http2.events import DataReceived, RequestReceived, ResponseReceived
from tidemill.transport.http2.frames import (
    END_HEADERS,
    END_STREAM,
    ConnectionFailure,
    ErrorCode,
    StreamFailure,
)
from tidemill.transport.http2.header_block import DecodedFields, MalformedHeaders
from tidemill.transport.http2.header_frames import PartialBlock
from tidemill.transport.http2.limits import Limit
from tidemill.transport.http2.stream_states import ON_REMOTE_END, REMOTE_ENDED

if TYPE_CHECKING:
    from collections import Counter

    from tidemill.transport.http2.events import Event
    from tidemill.transport.http2.limits import Limits
    from tidemill.transport.http2.stream import Stream
    from tidemill.transport.http2.streams import StreamTable

_PADDED_OR_PRIORITY: Final = frames.PADDED | frames.PRIORITY_FLAG


@final
class HeaderReceiver:
    """The receiver of header blocks of one connection."""

    __slots__ = (
        "_decoder",
        "_events",
        "_hits",
        "_is_server",
        "_limits",
        "_streams",
        "accepted_id_max",
        "partial",
    )

    def __init__(
        self,
        events: list[Event],
        streams: StreamTable,
        limits: Limits,
        hits: Counter[Limit],
        *,
        is_server: bool,
    ) -> None:
        self.partial: PartialBlock | None = None
        self.accepted_id_max = frames.STREAM_ID_MAX  # new streams above it are refused
        self._decoder = header_block.HeaderDecoder(limits.header_list_bomb_bytes)
        self._events = events
        self._streams = streams
        self._limits = limits
        self._hits = hits
        self._is_server = is_server

    def receive(self, stream_id: int, flags: int, payload: bytes) -> None:
        """Receive a HEADERS frame; raise StreamFailure or ConnectionFailure."""
        part, depends_on_itself = payload, False
        if flags & _PADDED_OR_PRIORITY or not stream_id & 1:
            part, depends_on_itself = header_frames.first_part(stream_id, flags, payload)
        if not flags & END_HEADERS:
            # The priority is ignored, because an unopened stream cannot be reset.
            self.partial = PartialBlock(stream_id, flags, part)
            return
        self._on_block(stream_id, flags, part)
        if depends_on_itself:
            raise StreamFailure(stream_id, ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")

    def receive_continuation(self, stream_id: int, flags: int, payload: bytes) -> None:
        """Receive a CONTINUATION frame; raise StreamFailure or ConnectionFailure."""
        block = self.partial
        if block is None or block.stream_id != stream_id:
            raise ConnectionFailure(
                ErrorCode.PROTOCOL_ERROR, "CONTINUATION without its header block"
            )
        block.add(payload, self._limits)
        if flags & END_HEADERS:
            self.partial = None
            self._on_block(stream_id, block.flags, block.join())

    def _on_block(self, stream_id: int, flags: int, block: bytes) -> None:
        # Every block must be decoded, even that of a refused stream, because it changes the table.
        decoded = self._decoder.decode(block)
        is_last = flags & END_STREAM != 0
        stream = self._streams.by_id.get(stream_id)
        try:
            if stream is not None and stream.state not in REMOTE_ENDED:
                self._check_size(stream_id, len(block), header_block.list_bytes(decoded))
                self._on_more_headers(stream, decoded, is_last=is_last)
            elif stream is None and self._is_server and stream_id > self._streams.last_id:
                self._streams.last_id = stream_id
                self._on_request(stream_id, len(block), decoded, is_last=is_last)
            else:
                self._streams.handle_late_frame(stream_id, stream, flags, "HEADERS")
        except MalformedHeaders as error:
            raise StreamFailure(stream_id, ErrorCode.PROTOCOL_ERROR, str(error)) from None

    def _check_size(self, stream_id: int, block_bytes: int, header_bytes: int) -> None:
        """Raise StreamFailure for a header list that is too long.

        The connection continues, because a proxy may share it among many clients.
        """
        limits = self._limits
        if block_bytes > limits.header_block_bytes or header_bytes > limits.header_list_bytes:
            self._hits[Limit.HEADER_BYTES] += 1
            raise StreamFailure(
                stream_id, ErrorCode.ENHANCE_YOUR_CALM, "the header list is too long"
            )

    def _on_request(
        self, stream_id: int, block_bytes: int, decoded: DecodedFields, *, is_last: bool
    ) -> None:
        known = header_block.known_request(decoded)
        header_bytes = header_block.list_bytes(decoded) if known is None else known[1]
        self._check_size(stream_id, block_bytes, header_bytes)
        if stream_id > self.accepted_id_max:
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

    def _on_more_headers(self, stream: Stream, decoded: DecodedFields, *, is_last: bool) -> None:
        if not self._is_server:
            fields = header_block.check_response(decoded)
        elif is_last:
            fields = header_block.check_trailers(decoded)
            if stream.content_left > 0:
                raise MalformedHeaders("the content is shorter than content-length")
        else:
            raise MalformedHeaders("trailers must end the stream")
        stream.moved_at_s = self._streams.now_s
        if is_last:
            self._streams.end_remote(stream)
        if not self._is_server:
            self._events.append(ResponseReceived(stream, fields, is_last))
        elif is_last:
            self._events.append(DataReceived(stream, b"", is_last))
