"""The other end of an HTTP/2 connection, written by hand: frames as bytes, valid and invalid.

Our encoder writes the output of the product. Tests build their input here, so that an error in one
does not hide in the other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple

from jh2._hazmat import Decoder

from tidemill.transport.http2 import frames
from tidemill.transport.http2.connection import Connection, Role
from tidemill.transport.http2.limits import Limits

Fields = Sequence[tuple[str, str]]

GRPC_REQUEST: Fields = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test.Service/Method"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)
RESPONSE: Fields = ((":status", "200"), ("content-type", "application/grpc"))
OK_TRAILERS: Fields = (("grpc-status", "0"),)


class Frame(NamedTuple):
    """A received frame."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def is_last(self) -> bool:
        return bool(self.flags & frames.END_STREAM)

    @property
    def number(self) -> int:
        """The payload of RST_STREAM and WINDOW_UPDATE."""
        return int.from_bytes(self.payload[:4], "big")


# ---------------------------------------------------------------- writing


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream_id: int = 0) -> bytes:
    head = struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream_id)
    return head + payload


def settings(
    values: Mapping[frames.Setting, int] | Mapping[int, int] | Iterable[tuple[int, int]] = (),
) -> bytes:
    pairs: Iterable[tuple[int, int]] = values.items() if isinstance(values, Mapping) else values
    return frame(frames.SETTINGS, b"".join(struct.pack(">HI", *pair) for pair in pairs))


SETTINGS_ACK = frame(frames.SETTINGS, flags=frames.ACK)
CLIENT_GREETING = frames.PREFACE + settings()


def block(fields: Fields) -> bytes:
    """Encode short fields as literals without indexing and without Huffman code."""
    coded = bytearray()
    for name, value in fields:
        coded.append(0)
        for text in (name.encode(), value.encode()):
            coded += _length(len(text)) + text
    return bytes(coded)


def _length(size: int) -> bytes:
    if size < 127:
        return bytes((size,))
    size -= 127
    coded = bytearray((127,))
    while size >= 128:
        coded.append(size % 128 + 128)
        size //= 128
    coded.append(size)
    return bytes(coded)


def headers(
    stream_id: int,
    fields: Fields = GRPC_REQUEST,
    *,
    is_last: bool = False,
    is_complete: bool = True,
    padding: int | None = None,
    priority: bytes = b"",
) -> bytes:
    flags = is_last * frames.END_STREAM | is_complete * frames.END_HEADERS
    payload = priority + block(fields)
    flags |= frames.PRIORITY_FLAG if priority else 0
    return frame(
        frames.HEADERS,
        padded(payload, padding),
        stream_id=stream_id,
        flags=flags | (frames.PADDED if padding is not None else 0),
    )


def continuation(stream_id: int, payload: bytes, *, is_complete: bool) -> bytes:
    flags = frames.END_HEADERS if is_complete else 0
    return frame(frames.CONTINUATION, payload, flags=flags, stream_id=stream_id)


def data(
    stream_id: int, payload: bytes = b"", *, is_last: bool = False, padding: int | None = None
) -> bytes:
    flags = (frames.END_STREAM if is_last else 0) | (frames.PADDED if padding is not None else 0)
    return frame(frames.DATA, padded(payload, padding), flags=flags, stream_id=stream_id)


def padded(payload: bytes, padding: int | None) -> bytes:
    return payload if padding is None else bytes((padding,)) + payload + bytes(padding)


def ping(payload: bytes = b"12345678", *, is_ack: bool = False) -> bytes:
    return frame(frames.PING, payload, flags=frames.ACK if is_ack else 0)


def rst_stream(stream_id: int, code: int = frames.ErrorCode.CANCEL) -> bytes:
    return frame(frames.RST_STREAM, struct.pack(">I", code), stream_id=stream_id)


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(frames.WINDOW_UPDATE, struct.pack(">I", increment), stream_id=stream_id)


def priority(stream_id: int, depends_on: int = 0) -> bytes:
    return frame(frames.PRIORITY, struct.pack(">IB", depends_on, 15), stream_id=stream_id)


def goaway(last_stream_id: int, code: int = 0, text: bytes = b"") -> bytes:
    return frame(frames.GOAWAY, struct.pack(">II", last_stream_id, code) + text)


def grpc_message(message: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    size = len(message) if length is None else length
    return struct.pack(">BI", compressed, size) + message


def request(
    stream_id: int,
    message: bytes = b"hello",
    fields: Fields = GRPC_REQUEST,
    *,
    frame_bytes: int = 16_384,
) -> bytes:
    """Return a whole unary call; the caller checks the windows."""
    content = grpc_message(message)
    pieces = [content[at : at + frame_bytes] for at in range(0, len(content), frame_bytes)]
    return headers(stream_id, fields) + b"".join(
        data(stream_id, piece, is_last=index == len(pieces) - 1)
        for index, piece in enumerate(pieces)
    )


# ---------------------------------------------------------------- reading


def parse(raw: bytes) -> list[Frame]:
    """Return the frames of `raw`, without the preface of a client."""
    found, rest = parse_some(raw.removeprefix(frames.PREFACE))
    assert not rest, f"{len(rest)} bytes are no frame"
    return found


def parse_some(raw: bytes) -> tuple[list[Frame], bytes]:
    """Return the complete frames of `raw`, and the remaining bytes."""
    found, at = [], 0
    while len(raw) - at >= 9:
        length = int.from_bytes(raw[at : at + 3], "big")
        if len(raw) - at - 9 < length:
            break
        stream_id = int.from_bytes(raw[at + 5 : at + 9], "big")
        begin = at + 9
        found.append(Frame(raw[at + 3], raw[at + 4], stream_id, raw[begin : begin + length]))
        at = begin + length
    return found, raw[at:]


def fields_of(raw_block: bytes) -> dict[str, str]:
    return {name: value for name, value, _ in Decoder(1 << 20).decode(raw_block, False)}


def of(kind: int, found: Iterable[Frame]) -> list[Frame]:
    return [one for one in found if one.kind == kind]


def content(found: Iterable[Frame], stream_id: int) -> bytes:
    """Return the content of a stream's DATA frames."""
    return b"".join(
        one.payload for one in found if one.kind == frames.DATA and one.stream_id == stream_id
    )


def pieces(raw: bytes, random: Random, size_max: int = 40) -> Iterator[bytes]:
    """Cut bytes at random places."""
    at = 0
    while at < len(raw):
        size = random.choice((1, 2, 3, 9, random.randint(1, size_max), len(raw)))
        yield raw[at : at + size]
        at += size


# ---------------------------------------------------------------- connections to try things on


def greeted_server(limits: Limits | None = None, *, now_s: float = 0.0) -> Connection:
    """Return a server's end after its handshake."""
    connection = Connection(Role.SERVER, limits or Limits(), now_s=now_s)
    assert connection.receive(CLIENT_GREETING + SETTINGS_ACK, now_s) == []
    connection.take_output()
    return connection


def greeted_client(limits: Limits | None = None, *, now_s: float = 0.0) -> Connection:
    """Return a client's end after its handshake."""
    connection = Connection(Role.CLIENT, limits or Limits(), now_s=now_s)
    assert connection.receive(settings() + SETTINGS_ACK, now_s) == []
    connection.take_output()
    return connection


def check_accounts(connection: Connection) -> None:
    """Assert that the sums of a connection are those of its streams."""
    limits, streams = connection._limits, connection._streams.by_id.values()
    assert connection.queued_bytes == sum(
        sum(map(len, stream.queue)) for stream in streams if stream.queue is not None
    )
    assert all(stream.queued_bytes == sum(map(len, stream.queue or ())) for stream in streams)
    assert set(connection._outgoing.blocked) == {one.id for one in streams if one.queue is not None}
    granted = sum(stream.large_bytes for stream in streams)
    assert connection._incoming.budget_left + granted == limits.large_messages_bytes
    assert connection._incoming.budget_left >= 0
    assert all(stream.large_bytes >= 0 for stream in streams)
    assert len(connection._incoming.room_requests) <= len(streams)
    for stream in streams:
        assert stream.send_window <= frames.WINDOW_MAX
        assert 0 <= stream.receive_window <= frames.WINDOW_MAX
        assert stream.receive_window <= limits.stream_window_bytes + stream.large_bytes
    assert connection._outgoing.window <= frames.WINDOW_MAX or connection.is_closed
    assert len(connection.unparsed) < frames.HEADER_SIZE + limits.frame_bytes
    assert (
        connection._headers.partial is None
        or connection._headers.partial.size <= limits.header_block_bytes
    )
    assert len(connection._streams._recent_resets._ids) <= 1_024
    assert connection._events == [] or not connection.is_closed
    if connection._is_server:
        assert len(streams) <= limits.streams_max
