"""Derived files: header, directory, blocks. Written once, renamed into place, never changed.

     0            4             8           12               16               24
    ┌────────────┬─────────────┬───────────┬────────────────┬────────────────┬──────────────┐
    │ magic  u32 │ version u32 │ count u32 │ directory_crc  │ from_offset    │ to_offset    │
    │            │             │           │ u32            │ i64            │ i64          │
    └────────────┴─────────────┴───────────┴────────────────┴────────────────┴──────────────┘
     32
    ┌─────────────────────┬─────────┐   row: key_1 u32 │ key_2 u32 │ first i64 │ items u32 │
    │ count directory rows│ blocks  │        crc u32 │ position u64                      32 bytes
    └─────────────────────┴─────────┘   (crc over the block, position of the block in the file)

Big-endian. Such a file states what the log says from from_offset to to_offset; whatever is missing
or damaged is read from the log again. Its kind is in the magic and in its folder:

    queues/     "TMQ1"  one or more blocks a queue: consume queue entries; keys topic_id and
                        queue_id, first is the first queue offset
    index/      "TMI1"  blocks of key hashes, sorted (u64 x items, then i64 log offsets x items)
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
_POSITION_AT = 24  # in a row
VERSION = 1
QUEUE_MAGIC = 0x544D5131
INDEX_MAGIC = 0x544D4931
SNAPSHOT_MAGIC = 0x544D5331
assert HEADER.size == HEADER_SIZE, "part of the disk format"
assert ROW.size == ROW_SIZE, "part of the disk format"


class DirectoryRow(NamedTuple):
    """One directory row."""

    key_1: int
    key_2: int
    first: int
    items: int
    crc: int
    position: int


class BlockFileDamaged(Exception):
    """The file cannot be used; what it says is in the log."""


def encode_header(
    magic: int, directory: bytes | bytearray, *, from_offset: int, to_offset: int
) -> bytes:
    """Encode the header of a directory of packed rows."""
    count = len(directory) // ROW_SIZE
    return HEADER.pack(magic, VERSION, count, crc32(directory), from_offset, to_offset)


class BlockFileHeader(NamedTuple):
    """What a file says of itself: the stretch of the log, and its packed directory."""

    from_offset: int
    to_offset: int
    directory: bytes


def decode_header(view: memoryview, magic: int) -> BlockFileHeader:
    """Return the header and the directory behind it. Raises BlockFileDamaged."""
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
    """Return where the directory ends by what the header says; 0 where it is none."""
    if len(view) < HEADER_SIZE:
        return 0
    found, version, count, *_ = HEADER.unpack_from(view)
    return HEADER_SIZE + count * ROW_SIZE if (found, version) == (magic, VERSION) else 0


def rows_of(directory: bytes) -> Iterator[DirectoryRow]:
    """Decode the rows of a packed directory."""
    return map(DirectoryRow._make, ROW.iter_unpack(directory))


def position_of(directory: bytes, number: int) -> int:
    """Return where a block begins."""
    position: int = _POSITION.unpack_from(directory, number * ROW_SIZE + _POSITION_AT)[0]
    return position
