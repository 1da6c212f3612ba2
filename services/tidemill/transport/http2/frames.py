"""HTTP/2 frames on the wire (RFC 9113 sections 4 and 6).

     0         3      4       5            9
    ┌─────────┬──────┬───────┬────────────┬─────────┐
    │ length  │ type │ flags │ stream id  │ payload │   big-endian
    │   u24   │  u8  │  u8   │ u31 (top 0)│         │
    └─────────┴──────┴───────┴────────────┴─────────┘

A single u32 holds length and type, because reading two values is slower.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

from tidemill.transport.http2.limits import Limit

HEADER: Final = struct.Struct(">IBI")  # length << 8 | type, flags, stream id
HEADER_SIZE: Final = 9
assert HEADER.size == HEADER_SIZE, "the frame header is part of the protocol"

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # the first bytes of a client

DATA: Final = 0x0
HEADERS: Final = 0x1
PRIORITY: Final = 0x2
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9

END_STREAM: Final = 0x1  # of DATA and HEADERS
ACK: Final = 0x1  # of SETTINGS and PING
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY_FLAG: Final = 0x20  # of HEADERS

STREAM_ID_MAX: Final = (1 << 31) - 1
WINDOW_MAX: Final = (1 << 31) - 1
DEFAULT_WINDOW_BYTES: Final = 65_535
DEFAULT_FRAME_BYTES: Final = 16_384
FRAME_BYTES_LIMIT: Final = (1 << 24) - 1


class Setting(IntEnum):
    """Parameters of a SETTINGS frame (RFC 9113 section 6.5.2)."""

    HEADER_TABLE_SIZE = 0x1
    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6


class ErrorCode(IntEnum):
    """Why a stream or a connection ends (RFC 9113 section 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class ConnectionFailure(Exception):
    """The peer broke the protocol or a limit, which ends the connection."""

    def __init__(self, code: ErrorCode, reason: str, *, limit: Limit | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.limit = limit  # the exceeded limit; None if the peer broke the protocol


class StreamFailure(Exception):
    """The peer broke the protocol, which ends one stream."""

    def __init__(self, stream_id: int, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.stream_id = stream_id
        self.code = code


_U32 = struct.Struct(">I")
_PAIR = struct.Struct(">II")
_SETTING = struct.Struct(">HI")
SETTING_SIZE: Final = _SETTING.size
PING_SIZE: Final = 8
PRIORITY_SIZE: Final = 5
GOAWAY_SIZE_MIN: Final = _PAIR.size
SETTINGS_ACK: Final = HEADER.pack(SETTINGS, ACK, 0)


def encode_settings(settings: dict[Setting, int]) -> bytes:
    """Encode a SETTINGS frame."""
    payload = b"".join(_SETTING.pack(setting, value) for setting, value in settings.items())
    return HEADER.pack(len(payload) << 8 | SETTINGS, 0, 0) + payload


def decode_settings(payload: bytes) -> list[tuple[int, int]]:
    """Decode the parameters of a SETTINGS frame in order, including unknown ones."""
    return list(_SETTING.iter_unpack(payload))


def encode_ping(payload: bytes, *, is_ack: bool) -> bytes:
    """Encode a PING frame of 8 bytes."""
    return HEADER.pack(PING_SIZE << 8 | PING, ACK if is_ack else 0, 0) + payload


def encode_goaway(last_stream_id: int, code: ErrorCode, reason: str = "") -> bytes:
    """Encode a GOAWAY frame; `reason` helps to debug the connection."""
    text = reason.encode()[:200]
    head = HEADER.pack((GOAWAY_SIZE_MIN + len(text)) << 8 | GOAWAY, 0, 0)
    return head + _PAIR.pack(last_stream_id, code) + text


def decode_goaway(payload: bytes) -> tuple[int, int, bytes]:
    """Return last stream id, error code and debug text of a GOAWAY frame."""
    last_stream_id, code = _PAIR.unpack_from(payload)
    return last_stream_id & STREAM_ID_MAX, code, payload[GOAWAY_SIZE_MIN:]


def encode_rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    """Encode a RST_STREAM frame."""
    return HEADER.pack(_U32.size << 8 | RST_STREAM, 0, stream_id) + _U32.pack(code)


def encode_window_update(stream_id: int, increment: int) -> bytes:
    """Encode a WINDOW_UPDATE frame; stream 0 is the connection."""
    return HEADER.pack(_U32.size << 8 | WINDOW_UPDATE, 0, stream_id) + _U32.pack(increment)


def decode_u32(payload: bytes) -> int:
    """Decode the payload of RST_STREAM and WINDOW_UPDATE."""
    return int.from_bytes(payload[: _U32.size], "big")


def encode_headers(stream_id: int, block: bytes, frame_bytes_max: int, *, is_last: bool) -> bytes:
    """Encode a header block in as many frames as necessary."""
    flags = END_STREAM if is_last else 0
    if len(block) <= frame_bytes_max:
        return HEADER.pack(len(block) << 8 | HEADERS, flags | END_HEADERS, stream_id) + block
    parts = []
    kind = HEADERS
    for begin in range(0, len(block), frame_bytes_max):
        part = block[begin : begin + frame_bytes_max]
        if begin + frame_bytes_max >= len(block):
            flags |= END_HEADERS
        parts += [HEADER.pack(len(part) << 8 | kind, flags, stream_id), part]
        kind, flags = CONTINUATION, 0
    return b"".join(parts)
