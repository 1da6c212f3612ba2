"""Changing the due time in a stored message."""

from __future__ import annotations

import struct
from zlib import crc32

from tidemill.message import stored_message

_DUE = struct.Struct(">q")


def due_time(blob: bytes | memoryview) -> int:
    """Return the due time of a stored message, 0 if it has none."""
    return int(_DUE.unpack_from(blob, stored_message.DUE_AT)[0])


def with_due_time(
    blob: bytes | memoryview, crc: int, due_at_ms: int
) -> tuple[bytes | memoryview, int]:
    """Return the message with the due time `due_at_ms`, and its CRC."""
    if due_time(blob) == due_at_ms:
        return blob, crc
    changed = bytearray(blob)
    _DUE.pack_into(changed, stored_message.DUE_AT, due_at_ms)
    return bytes(changed), crc32(changed)
