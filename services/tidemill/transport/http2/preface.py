"""The first bytes of a client, and what it is that speaks something else."""

from __future__ import annotations

import re
from typing import Final

from tidemill.transport.http2.frames import PREFACE, ConnectionFailure, ErrorCode

HTTP1_ANSWER: Final = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"\r\nThis port speaks gRPC, which is HTTP/2 without an upgrade.\n"
)
_TLS: Final = b"\x16"  # a handshake begins with it
_HTTP1: Final = re.compile(rb"(GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS|CONNECT) ")


def read_preface(buffer: bytes) -> int:
    """Return where the preface ends, 0 while it is not complete.

    Raises ConnectionFailure(HTTP_1_1_REQUIRED) for a client that is to be answered in HTTP/1.1.
    """
    if buffer.startswith(PREFACE):
        return len(PREFACE)
    if PREFACE.startswith(buffer):
        return 0
    if _HTTP1.match(buffer):
        raise ConnectionFailure(ErrorCode.HTTP_1_1_REQUIRED, "the client speaks HTTP/1.1")
    if buffer[:1] == _TLS:
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "the client uses TLS, and it is off here")
    raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2")
