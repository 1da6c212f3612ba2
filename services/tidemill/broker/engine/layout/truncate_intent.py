"""The intent to truncate: while the file is there, the log ends where it says, whatever it holds.

     0            4            8
    ┌────────────┬────────────┬─────────────┐
    │ magic  u32 │ crc32  u32 │ cut     i64 │   big-endian; the crc covers the cut
    └────────────┴────────────┴─────────────┘

Written and synced before the first byte is taken away, deleted when the last one is gone. A torn
one was never synced, and nothing had been taken away.
"""

from __future__ import annotations

import struct
from zlib import crc32

MAGIC = 0x544D5449  # "TMTI"
_PREFIX = struct.Struct(">II")
_CUT = struct.Struct(">q")
SIZE = 16
assert _PREFIX.size + _CUT.size == SIZE, "part of the disk format"


def encode(cut: int) -> bytes:
    """Encode the file."""
    body = _CUT.pack(cut)
    return _PREFIX.pack(MAGIC, crc32(body)) + body


def find(data: bytes | None) -> int | None:
    """Decode the file; None where it is missing or torn."""
    if data is None or len(data) != SIZE:
        return None
    magic, crc = _PREFIX.unpack_from(data)
    if magic != MAGIC or crc32(data[_PREFIX.size :]) != crc:
        return None
    return int(_CUT.unpack_from(data, _PREFIX.size)[0])
