"""The first bytes of a client, and the detection of other protocols."""

from __future__ import annotations

import re
import struct
from typing import Final

from tidemill.transport.http2.frames import PREFACE, ConnectionFailure, ErrorCode

HTTP1_RESPONSE: Final = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"\r\nThis port speaks gRPC, which is HTTP/2 without an upgrade.\n"
)
_TLS: Final = b"\x16"  # first byte of a handshake
_HTTP1: Final = re.compile(rb"(GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS|CONNECT) ")

# The protocol of RocketMQ 4: frame length u32, encoding of the header u8 (0: JSON), its length u24.
_REMOTING: Final = struct.Struct(">IB3s")
_REMOTING_FRAME_BYTES_MAX: Final = 16 << 20  # so its first byte is 0
REMOTING: Final = (
    "the client speaks the remoting protocol of RocketMQ 4, which is not served; use a RocketMQ 5"
    " gRPC client, and `tidemill` or the REST API instead of mqadmin"
)


def read_preface(buffer: bytes) -> int:
    """Return the end of the preface; 0 while it is incomplete.

    Raises ConnectionFailure(HTTP_1_1_REQUIRED) for a client that expects an HTTP/1.1 response.
    """
    if buffer.startswith(PREFACE):
        return len(PREFACE)
    if PREFACE.startswith(buffer):
        return 0
    if _HTTP1.match(buffer):
        raise ConnectionFailure(ErrorCode.HTTP_1_1_REQUIRED, "the client speaks HTTP/1.1")
    if buffer[:1] == _TLS:
        raise ConnectionFailure(
            ErrorCode.PROTOCOL_ERROR, "the client uses TLS, which is off at this port"
        )
    if buffer[:1] == b"\0":
        if len(buffer) < _REMOTING.size:
            return 0
        if _is_remoting(buffer):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, REMOTING)
    raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2")


def _is_remoting(buffer: bytes) -> bool:
    """Return whether a frame of the remoting protocol begins here."""
    frame_bytes, encoding, header = _REMOTING.unpack_from(buffer)
    header_bytes = int.from_bytes(header)
    is_plausible = 4 < frame_bytes <= _REMOTING_FRAME_BYTES_MAX and encoding in {0, 1}
    return is_plausible and 0 < header_bytes <= frame_bytes - 4
