"""One entry of the timer state table: what is true of the timer with this id.

     0                8            12              20             24         25          29      32
    ┌────────────────┬────────────┬───────────────┬──────────────┬──────────┬───────────┬─────────┐
    │ log_offset i64 │ size   u32 │ due_at_ms i64 │ topic_id u32 │ state u8 │ crc32 u32 │ 3 zeros │
    └────────────────┴────────────┴───────────────┴──────────────┴──────────┴───────────┴─────────┘

Big-endian. log_offset and size are the record of the newest copy of the message; the crc covers the
25 bytes before it. An id that was never given out is 32 zeros. Entry n of a file is the timer with
the id (number in the file's name) + n.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

import numpy as np

SIZE = 32  # bytes
CRC_AT = 25
_FIELDS = struct.Struct(">qIqIB")
_ENTRY = struct.Struct(">qIqIBI3x")
_CRC = struct.Struct(">I")
assert _ENTRY.size == SIZE, "the timer entry is part of the disk format"
assert _FIELDS.size == CRC_AT, "part of the disk format"

DTYPE = np.dtype(
    {
        "names": ["log_offset", "size", "due", "topic_id", "state", "crc"],
        "formats": [">i8", ">u4", ">i8", ">u4", "u1", ">u4"],
        "offsets": [0, 8, 12, 20, 24, 25],
        "itemsize": SIZE,
    }
)
_ZEROS = bytes(SIZE)


class TimerEntry(NamedTuple):
    """An entry, decoded."""

    log_offset: int
    size: int
    due_at_ms: int
    topic_id: int
    state: int


class EntryDamaged(Exception):
    """The entry's checksum is wrong."""


def write(buffer: bytearray, at: int, entry: TimerEntry) -> None:
    """Write an entry."""
    fields = _FIELDS.pack(*entry)
    _ENTRY.pack_into(buffer, at, *entry, crc32(fields))


def read(buffer: bytearray | memoryview, at: int) -> TimerEntry:
    """Decode an entry. Raises EntryDamaged."""
    *fields, crc = _ENTRY.unpack_from(buffer, at)
    entry = TimerEntry._make(fields)
    if crc32(buffer[at : at + CRC_AT]) != crc and bytes(buffer[at : at + SIZE]) != _ZEROS:
        raise EntryDamaged
    return entry
