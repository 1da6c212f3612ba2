"""Derived files: header, directory, blocks. They are written once, then renamed into place.

     0            4             8           12               16               24
    ┌────────────┬─────────────┬───────────┬────────────────┬────────────────┬──────────────┐
    │ magic  u32 │ version u32 │ count u32 │ directory_crc  │ from_offset    │ to_offset    │
    │            │             │           │ u32            │ i64            │ i64          │
    └────────────┴─────────────┴───────────┴────────────────┴────────────────┴──────────────┘
     32
    ┌─────────────────────┬─────────┐   row: key_1 u32 │ key_2 u32 │ first i64 │ items u32 │
    │ count directory rows│ blocks  │        crc u32 │ position u64                      32 bytes
    └─────────────────────┴─────────┘   (crc over the block, position of the block in the file)

Big-endian. A file describes the log from from_offset to to_offset. If it is missing or damaged, the
broker rebuilds it from the log. The magic and the folder tell the kind of file:

    queues/     "TMQ1"  one or more blocks per queue: consume queue entries; keys topic_id and
                        queue_id, first is the first queue offset
    index/      "TMI1"  blocks of key hashes, sorted (u64 x items, then i64 log offsets x items);
                        first is the log offset of the first message; 0: unknown
    snapshots/  "TMS1"  sections of the pop state; key_1 is the section's kind, key_2 its slot or
                        queue number, first the log offset that the section covers
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple
from zlib import crc32

HEADER = struct.Struct(">IIIIqq")
ROW = struct.Struct(">IIqIIQ")
_POSITION = struct.Struct(">Q")
HEADER_SIZE = 32
ROW_SIZE = 32
_POSITION_AT = 24  # byte of a row
VERSION = 1
QUEUE_MAGIC = 0x544D5131
INDEX_MAGIC = 0x544D4931
SNAPSHOT_MAGIC = 0x544D5331
assert HEADER.size == HEADER_SIZE, "part of the disk format"
assert ROW.size == ROW_SIZE, "part of the disk format"


class DirectoryRow(NamedTuple):
    """A row of the directory."""

    key_1: int
    key_2: int
    first: int
    items: int
    crc: int
    position: int


class BlockFileDamaged(Exception):
    """The file is damaged. The log has the same information."""


def encode_header(
    magic: int, directory: bytes | bytearray, *, from_offset: int, to_offset: int
) -> bytes:
    """Encode the header of a directory of packed rows."""
    count = len(directory) // ROW_SIZE
    return HEADER.pack(magic, VERSION, count, crc32(directory), from_offset, to_offset)


class BlockFileHeader(NamedTuple):
    """The range of the log that a file covers, and its packed directory."""

    from_offset: int
    to_offset: int
    directory: bytes


def decode_header(view: memoryview, magic: int) -> BlockFileHeader:
    """Return the header and the directory after it. Raises BlockFileDamaged."""
    if len(view) < HEADER_SIZE:
        raise BlockFileDamaged("too short")
    found, version, count, crc, from_offset, to_offset = HEADER.unpack_from(view)
    directory = bytes(view[HEADER_SIZE : HEADER_SIZE + count * ROW_SIZE])
    if (found, version) != (magic, VERSION):
        raise BlockFileDamaged("another kind or version of file")
    if len(directory) != count * ROW_SIZE or crc32(directory) != crc:
        raise BlockFileDamaged("directory checksum mismatch")
    return BlockFileHeader(from_offset, to_offset, directory)


def directory_end(view: memoryview, magic: int) -> int:
    """Return the end of the directory according to the header; 0 if the header is invalid."""
    if len(view) < HEADER_SIZE:
        return 0
    found, version, count, *_ = HEADER.unpack_from(view)
    return HEADER_SIZE + count * ROW_SIZE if (found, version) == (magic, VERSION) else 0


def rows_of(directory: bytes) -> Iterator[DirectoryRow]:
    """Decode the rows of a packed directory."""
    return map(DirectoryRow._make, ROW.iter_unpack(directory))


def position_of(directory: bytes, number: int) -> int:
    """Return the position of a block in the file."""
    position: int = _POSITION.unpack_from(directory, number * ROW_SIZE + _POSITION_AT)[0]
    return position
