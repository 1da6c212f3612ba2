"""The intent to truncate. While the file exists, the log ends at `offset`, whatever it contains.

     0            4            8              16
    ┌────────────┬────────────┬──────────────┬───────────┐
    │ magic  u32 │ crc32  u32 │ offset   i64 │ epoch i64 │
    └────────────┴────────────┴──────────────┴───────────┘
     24               32            40
    ┌────────────────┬─────────────┬─────────────────────┐
    │ size_bytes i64 │ records i64 │ confirmed_bytes i64 │   big-endian; the crc covers the rest
    └────────────────┴─────────────┴─────────────────────┘

The replica syncs the file before it removes the first byte, and renames it after it removes the
last one. The renamed file reports the last cut. A torn file was never synced, so nothing was
removed.
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


class LogCut(NamedTuple):
    """The end of the log that a replica removes, because the master of `epoch` does not have it."""

    offset: int
    epoch: int
    size_bytes: int
    records: int
    confirmed_bytes: int  # confirmed before; only an unclean election removes confirmed bytes


def encode(cut: LogCut) -> bytes:
    """Encode the file."""
    body = _CUT.pack(*cut)
    return _PREFIX.pack(MAGIC, crc32(body)) + body


def find(data: bytes | None) -> LogCut | None:
    """Decode the file; return None if it is missing or torn."""
    if data is None or len(data) != SIZE:
        return None
    magic, crc = _PREFIX.unpack_from(data)
    if magic != MAGIC or crc32(data[_PREFIX.size :]) != crc:
        return None
    return LogCut(*_CUT.unpack_from(data, _PREFIX.size))
