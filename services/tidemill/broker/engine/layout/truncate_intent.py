"""The intent to truncate: while the file is there, the log ends where it says, whatever it holds.

     0            4            8              16
    ┌────────────┬────────────┬──────────────┬───────────┐
    │ magic  u32 │ crc32  u32 │ offset   i64 │ epoch i64 │
    └────────────┴────────────┴──────────────┴───────────┘
     24               32            40
    ┌────────────────┬─────────────┬─────────────────────┐
    │ size_bytes i64 │ records i64 │ confirmed_bytes i64 │   big-endian; the crc covers the rest
    └────────────────┴─────────────┴─────────────────────┘

Written and synced before the first byte is taken away, and given another name when the last one is
gone: under that it says what was cut last. A torn one was never synced, and nothing had been taken
away. The first version has another magic, and ends behind the offset.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

MAGIC = 0x544D5443  # "TMTC"
_PREFIX = struct.Struct(">II")
_CUT = struct.Struct(">qqqqq")
SIZE = 48
assert _PREFIX.size + _CUT.size == SIZE, "part of the disk format"

FIRST_MAGIC = 0x544D5449  # "TMTI"
_FIRST = struct.Struct(">q")
_BODIES = {MAGIC: _CUT, FIRST_MAGIC: _FIRST}


class Cut(NamedTuple):
    """What is cut from the end of the log, since the master of `epoch` does not have it."""

    offset: int
    epoch: int = 0
    size_bytes: int = 0  # 0: nobody has noted more than the offset
    records: int = 0
    confirmed_bytes: int = 0  # that were confirmed: only an unclean election takes such away


def encode(cut: Cut) -> bytes:
    """Encode the file."""
    body = _CUT.pack(*cut)
    return _PREFIX.pack(MAGIC, crc32(body)) + body


def find(data: bytes | None) -> Cut | None:
    """Decode the file; None where it is missing or torn."""
    if data is None or len(data) < _PREFIX.size:
        return None
    magic, crc = _PREFIX.unpack_from(data)
    body = _BODIES.get(magic)
    if body is None or len(data) != _PREFIX.size + body.size:
        return None
    return (
        Cut(*body.unpack_from(data, _PREFIX.size)) if crc32(data[_PREFIX.size :]) == crc else None
    )
