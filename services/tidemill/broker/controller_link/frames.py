"""Messages on a stream of bytes between two processes of one replica.

     0            4
    ┌────────────┬─────────────────┐
    │ size  u32  │ message  (size) │   big-endian
    └────────────┴─────────────────┘

Both ends come from one build, so frames have no version and no checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, final

_SIZE: Final = struct.Struct(">I")
SIZE_BYTES: Final = 4
assert _SIZE.size == SIZE_BYTES, "the size precedes each message"
# The target of a transfer to the replica with the least lag. No replica has this number.
LEAST_LAG_TARGET: Final = (1 << 32) - 1
MESSAGE_BYTES_MAX: Final = 1 << 20  # a view of a group takes some hundred bytes per replica


class InvalidSupervisorFrame(Exception):
    """The other end sent a frame that is too large."""


def encode(message: bytes) -> bytes:
    """Return a message with its size."""
    assert len(message) <= MESSAGE_BYTES_MAX, "messages of a session are small"
    return _SIZE.pack(len(message)) + message


@final
class FrameReader:
    """The buffer that turns received bytes into whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def receive(self, data: bytes) -> Iterator[bytes]:
        """Add bytes, and yield the messages that are complete. Raises InvalidSupervisorFrame."""
        self._buffer += data
        while len(self._buffer) >= SIZE_BYTES:
            (size,) = _SIZE.unpack_from(self._buffer)
            if size > MESSAGE_BYTES_MAX:
                raise InvalidSupervisorFrame(
                    f"a message of {size} bytes; at most {MESSAGE_BYTES_MAX} are allowed"
                )
            end = SIZE_BYTES + size
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[SIZE_BYTES:end])
            del self._buffer[:end]
            yield message
