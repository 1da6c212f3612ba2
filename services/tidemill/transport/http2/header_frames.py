"""Header blocks in HEADERS and CONTINUATION frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from tidemill.transport.http2 import frames
from tidemill.transport.http2.frames import ConnectionFailure, ErrorCode
from tidemill.transport.http2.limits import Limit

if TYPE_CHECKING:
    from tidemill.transport.http2.limits import Limits


def remove_padding(payload: bytes) -> bytes:
    """Return the content of a padded frame."""
    if not payload or payload[0] >= len(payload):
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "the padding is longer than the frame")
    return payload[1 : len(payload) - payload[0]]


def first_part(stream_id: int, flags: int, payload: bytes) -> tuple[bytes, bool]:
    """Return the part of a block in a HEADERS frame, and whether its stream depends on itself."""
    if not stream_id & 1:
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "HEADERS on an even stream")
    if flags & frames.PADDED:
        payload = remove_padding(payload)
    if not flags & frames.PRIORITY_FLAG:
        return payload, False
    if len(payload) < frames.PRIORITY_SIZE:
        raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "HEADERS is too short for its priority")
    return payload[frames.PRIORITY_SIZE :], depends_on(payload) == stream_id


def depends_on(priority: bytes) -> int:
    """Return the stream id in a priority field."""
    return frames.decode_u32(priority) & frames.STREAM_ID_MAX


def block_too_long() -> ConnectionFailure:
    """Return the failure for a header block that is too long."""
    return ConnectionFailure(
        ErrorCode.ENHANCE_YOUR_CALM, "a header block is too long", limit=Limit.HEADER_BYTES
    )


@final
class PartialBlock:
    """A header block without its last frame."""

    __slots__ = ("_parts", "flags", "size", "stream_id")

    def __init__(self, stream_id: int, flags: int, part: bytes) -> None:
        self.stream_id = stream_id
        self.flags = flags  # of the HEADERS frame
        self.size = len(part)
        self._parts = [part]

    def add(self, part: bytes, limits: Limits) -> None:
        """Append the next part; raise ConnectionFailure if there are too many."""
        self._parts.append(part)
        self.size += len(part)
        if len(self._parts) > limits.continuations_max:
            raise ConnectionFailure(
                ErrorCode.ENHANCE_YOUR_CALM,
                "a header block has too many frames",
                limit=Limit.CONTINUATIONS,
            )
        if self.size > limits.header_block_bomb_bytes:
            raise block_too_long()

    def join(self) -> bytes:
        """Return the block."""
        return b"".join(self._parts)
