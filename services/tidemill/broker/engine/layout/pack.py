"""A pack: a sealed segment of the log without the content of its dead messages (ADR 0067).

    ┌───────────────────┬─────────┬─────────┬─────┬──────────────────────────────┬──────────────┐
    │ header 4,096 bytes│ record  │ record  │ ... │ directory, 8 bytes per extent│ header again │
    └───────────────────┴─────────┴─────────┴─────┴──────────────────────────────┴──────────────┘

    header, big-endian
     0           4            8             10          12           16           24
    ┌───────────┬────────────┬─────────────┬───────────┬────────────┬────────────┬──────────┐
    │ magic u32 │ header_crc │ version u16 │ 0 u16     │ directory_ │ start i64  │ end i64  │
    │ "TMLP"    │ u32        │             │           │ crc u32    │            │          │
    └───────────┴────────────┴─────────────┴───────────┴────────────┴────────────┴──────────┘
     32              40               48            56            64             68
    ┌───────────────┬────────────────┬─────────────┬─────────────┬──────────────┬────────────┐
    │ record_end i64│ decided_at i64 │ floor i64   │ file_size   │ extent_count │ stub_      │
    │               │                │             │ i64         │ u32          │ bytes u32  │
    └───────────────┴────────────────┴─────────────┴─────────────┴──────────────┴────────────┘

The records have the order, the bytes and the log offsets of the segment; dead messages are stubs
(`record.py`), and runs of records that are not needed are gaps (`floor.py`). An **extent** is a run
of records that are as far apart in the file as in the log: only a stub or a gap ends one. The
directory has, for each extent, its log offset minus `start` and its position in the file, u32 each.
`record_end` is the log offset behind the last record. `decided_at` is a log offset: the records
before it made the messages dead. `floor` is the state floor: gaps are before it. `stub_bytes` are
the bytes of stubs and gaps in the file. header_crc covers the header from byte 8 to its last field.
The last 72 bytes of the file repeat the header, because nothing else states it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

MAGIC = 0x544D4C50  # "TMLP"
VERSION = 1
HEADER_SIZE = 4096  # bytes: one page
_PREFIX = struct.Struct(">II")
_COVERED = struct.Struct(">HHIqqqqqqII")
EXTENT = struct.Struct(">II")
TRAILER_SIZE = 72  # bytes
assert _PREFIX.size + _COVERED.size == TRAILER_SIZE, "part of the disk format"
assert EXTENT.size == 8, "part of the disk format"


class PackHeader(NamedTuple):
    """The header of a pack, decoded."""

    directory_crc: int
    start: int
    end: int
    record_end: int
    decided_at: int
    floor: int
    file_size: int
    extent_count: int
    stub_bytes: int

    @property
    def records_end(self) -> int:
        """The position behind the last record in the file, where the directory begins."""
        return self.file_size - TRAILER_SIZE - EXTENT.size * self.extent_count


def encode_header(header: PackHeader) -> bytes:
    """Encode the header of a pack."""
    covered = _COVERED.pack(VERSION, 0, *header)
    return _PREFIX.pack(MAGIC, crc32(covered)) + covered


def find_header(page: bytes | memoryview) -> PackHeader | None:
    """Decode the header of a pack; None if it is damaged or of another version."""
    if len(page) < _PREFIX.size + _COVERED.size:
        return None
    magic, crc = _PREFIX.unpack_from(page)
    covered = page[_PREFIX.size : _PREFIX.size + _COVERED.size]
    if magic != MAGIC or crc32(covered) != crc:
        return None
    version, _, *fields = _COVERED.unpack(covered)
    return PackHeader._make(fields) if version == VERSION else None
