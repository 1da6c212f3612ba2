"""The status of a call and the trailers with it."""

from __future__ import annotations

import functools
import re
from enum import IntEnum
from typing import Final

from tidemill.transport.http2 import header_block
from tidemill.transport.http2.frames import ErrorCode

Trailers = tuple[tuple[str, str], ...]


class RpcCode(IntEnum):
    """The status codes of gRPC."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class RpcError(Exception):
    """The status other than OK that ends a call; clients raise it for a received status."""

    def __init__(self, code: RpcCode, message: str, trailers: Trailers = ()) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.trailers = trailers  # metadata beside the status


# The status of a call after a reset of its stream, from the gRPC specification.
_CODES_OF_RESETS: Final = {
    ErrorCode.REFUSED_STREAM: RpcCode.UNAVAILABLE,
    ErrorCode.CANCEL: RpcCode.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: RpcCode.RESOURCE_EXHAUSTED,
    ErrorCode.INADEQUATE_SECURITY: RpcCode.PERMISSION_DENIED,
}


def code_of_reset(code: int) -> RpcCode:
    """Return the status of a call after a reset of its stream with `code`."""
    try:
        return _CODES_OF_RESETS.get(ErrorCode(code), RpcCode.INTERNAL)
    except ValueError:
        return RpcCode.INTERNAL


def code_of(number: str) -> RpcCode:
    """Return the status code of a `grpc-status` field; UNKNOWN if it is invalid."""
    try:
        return RpcCode(int(number))
    except ValueError:
        return RpcCode.UNKNOWN


RESPONSE_FIELDS: Final = ((":status", "200"), ("content-type", "application/grpc"))
RESPONSE_BLOCK: Final = header_block.encode(RESPONSE_FIELDS)
OK_TRAILERS: Final = header_block.encode((("grpc-status", "0"),))

# Of an encoded status message. Clients reject header lists of 8 KiB.
MESSAGE_BYTES_MAX: Final = 4_096
# Bytes that need encoding: all except printable ASCII, and the per cent sign.
_ENCODED: Final = re.compile(rb"[^\x20-\x24\x26-\x7e]")
_DECODED: Final = re.compile(rb"%([0-9A-Fa-f]{2})")


def encode_message(message: str) -> str:
    """Percent-encode a status message, cut to the size that clients accept."""
    message = message[:MESSAGE_BYTES_MAX]
    while True:
        raw = message.encode("utf-8", "replace")
        encoded = _ENCODED.sub(lambda found: b"%%%02X" % found[0][0], raw)
        if len(encoded) <= MESSAGE_BYTES_MAX:
            return encoded.decode("ascii")
        # A character needs up to twelve bytes. No character is split.
        message = message[: len(message) * MESSAGE_BYTES_MAX // len(encoded)]


def decode_message(encoded: str) -> str:
    """Decode a status message; invalid escapes stay as they are."""
    raw = _DECODED.sub(lambda found: bytes((int(found[1], 16),)), encoded.encode())
    return raw.decode("utf-8", "replace")


@functools.lru_cache(maxsize=64)  # Servers use few different texts.
def encode_trailers(code: RpcCode, message: str, more: Trailers = ()) -> bytes:
    """Encode the trailers that end a call."""
    if code is RpcCode.OK:
        return OK_TRAILERS
    return header_block.encode((*_fields(code, message), *more))


@functools.lru_cache(maxsize=64)
def encode_trailers_only(code: RpcCode, message: str, more: Trailers = ()) -> bytes:
    """Encode a response that consists only of a status."""
    return header_block.encode((*RESPONSE_FIELDS, *_fields(code, message), *more))


def _fields(code: RpcCode, message: str) -> Trailers:
    return ("grpc-status", str(int(code))), ("grpc-message", encode_message(message))
