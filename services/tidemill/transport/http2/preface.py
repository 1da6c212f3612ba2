"""The first bytes of a client, and the detection of other protocols."""

from __future__ import annotations

import re
from typing import Final

from tidemill.transport.http2.frames import PREFACE, ConnectionFailure, ErrorCode

HTTP1_RESPONSE: Final = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"\r\nThis port speaks gRPC, which is HTTP/2 without an upgrade.\n"
)
_TLS: Final = b"\x16"  # first byte of a handshake
_HTTP1: Final = re.compile(rb"(GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS|CONNECT) ")


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
    raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2")
