"""HEADERS and CONTINUATION: how a header block comes in frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from tidemill.transport.http2 import frames
from tidemill.transport.http2.frames import ConnectionFailure, ErrorCode
from tidemill.transport.http2.limits import Limit

if TYPE_CHECKING:
    from tidemill.transport.http2.limits import Limits


def without_padding(payload: bytes) -> bytes:
    """Return what a padded frame holds."""
    if not payload or payload[0] >= len(payload):
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]


def first_part(stream_id: int, flags: int, payload: bytes) -> tuple[bytes, bool]:
    """Return what a HEADERS frame holds of its block, and whether its stream follows itself."""
    if not stream_id & 1:
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "HEADERS on an even stream")
    if flags & frames.PADDED:
        payload = without_padding(payload)
    if not flags & frames.PRIORITY_FLAG:
        return payload, False
    if len(payload) < frames.PRIORITY_SIZE:
        raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "HEADERS without its priority")
    return payload[frames.PRIORITY_SIZE :], depends_on(payload) == stream_id


def depends_on(priority: bytes) -> int:
    """Return the stream that a priority names."""
    return frames.decode_u32(priority) & frames.STREAM_ID_MAX


def too_long() -> ConnectionFailure:
    """Return what ends a connection whose header block is too long."""
    return ConnectionFailure(
        ErrorCode.ENHANCE_YOUR_CALM, "a header block is too long", limit=Limit.HEADER_BYTES
    )


@final
class PartialBlock:
    """A header block whose last frame has not come."""

    __slots__ = ("_parts", "flags", "size", "stream_id")

    def __init__(self, stream_id: int, flags: int, part: bytes) -> None:
        self.stream_id = stream_id
        self.flags = flags  # of its HEADERS frame
        self.size = len(part)
        self._parts = [part]

    def add(self, part: bytes, limits: Limits) -> None:
        """Take the next part."""
        self._parts.append(part)
        self.size += len(part)
        if len(self._parts) > limits.continuations_max:
            raise ConnectionFailure(
                ErrorCode.ENHANCE_YOUR_CALM,
                "a header block in too many frames",
                limit=Limit.CONTINUATIONS,
            )
        if self.size > limits.header_block_bomb_bytes:
            raise too_long()

    def join(self) -> bytes:
        """Return the block."""
        return b"".join(self._parts)
