"""The header of every record of the commit log.

     0            4            8          12             16        17     18       20
    ┌────────────┬────────────┬──────────┬──────────────┬─────────┬──────┬────────┬───────────┐
    │ magic  u32 │ head_crc   │ size u32 │ tail_crc u32 │ version │ kind │ flags  │ epoch u32 │
    │            │ u32        │          │              │ u8      │ u8   │ u16    │           │
    └────────────┴────────────┴──────────┴──────────────┴─────────┴──────┴────────┴───────────┘
     24                 32                40             44              46
    ┌──────────────────┬─────────────────┬──────────────┬───────────────┬──────────┬──────┬──────┐
    │ stored_at_ms i64 │ log_offset  i64 │ unsynced u32 │ head_size u16 │ reserved │ body │ tail │
    └──────────────────┴─────────────────┴──────────────┴───────────────┴──────────┴──────┴──────┘

Big-endian. `size` is the whole record. head_crc covers the head (header and body, head_size bytes)
from byte 8 on. tail_crc covers the tail. The writer of a message computes tail_crc once. log_offset
repeats the record's own position, so bytes of another position never pass for a record.

`unsynced` is log_offset minus the durable offset at the time of the write. It separates a torn tail
from damage. If an intact record follows a broken one, and the broken one was already durable when
the intact one was written, then durable bytes are lost.

If the next record does not fit into a segment, a pad fills the remaining bytes: magic `TMPD` and
the number of these bytes, u32 each. Fewer than 8 bytes stay as they are.

A **stub** is a record with flag STUB: a dead message without its content (MESSAGE, ADR 0067), or a
gap, which stands for a run of missing records (FLOOR, `floor.py`). `size` is still the size of what
it replaces, so the next record has the log offset as before. The last 4 bytes of its head say how
many bytes of tail follow. The rest is undefined in a segment, and missing in a pack.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

from tidemill.broker.engine.layout.numbers import LogOffset

MAGIC = 0x544D5231  # "TMR1"
PAD_MAGIC = 0x544D5044  # "TMPD"
VERSION = 1
PREFIX = struct.Struct(">II")
COVERED = struct.Struct(">IIBBHIqqIHxx")
HEADER = struct.Struct(">IIIIBBHIqqIHxx")
HEADER_SIZE = 48  # bytes
PAD = struct.Struct(">II")
assert HEADER.size == PREFIX.size + COVERED.size == HEADER_SIZE, "part of the disk format"
CRC_FROM = PREFIX.size
UNSYNCED_MAX = 0xFFFFFFFF
# Indexes of fields in the tuple that HEADER unpacks to, for paths too hot for a `RecordHeader`.
SIZE, TAIL_CRC, FLAGS, STORED_AT_MS, LOG_OFFSET, UNSYNCED, HEAD_SIZE = 2, 3, 6, 8, 9, 10, 11
KIND_POSITION = 17  # byte of the kind
STUB = 0x8000  # flag of a MESSAGE or FLOOR record
STUB_TAIL = struct.Struct(">I")  # at the end of a stub's head: the bytes of its tail
STORED_AT_MS_POSITION = 24  # first byte of stored_at_ms
MAGIC_BYTES = MAGIC.to_bytes(4, "big")


class RecordKind(IntEnum):
    """The kinds of records. The set is closed: a new capability adds a kind and its fold."""

    EPOCH_START = 1
    MESSAGE = 2
    CK = 3
    ACK = 4
    CONFIG = 5
    STATE = 6
    TIMER = 7
    FRONTIER = 8
    RENEW = 9
    EXPIRE = 10
    TRANSACTION = 11
    TRIM = 12
    FLOOR = 13
    AUDIT = 16
    DEAD_LETTER = 17
    OPERATION = 18


KINDS = frozenset(int(kind) for kind in RecordKind)
_MESSAGE, _FLOOR = int(RecordKind.MESSAGE), int(RecordKind.FLOOR)


class RecordHeader(NamedTuple):
    """A record's header, decoded."""

    magic: int
    head_crc: int
    size: int
    tail_crc: int
    version: int
    kind: int
    flags: int
    epoch: int
    stored_at_ms: int
    log_offset: LogOffset
    unsynced: int
    head_size: int


class UnknownRecord(Exception):
    """An intact record of a newer version or of an unknown kind."""


def is_stub(header: RecordHeader) -> bool:
    """Return whether a record is a dead message without its content, or a gap."""
    return bool(header.flags & STUB) and header.kind in {_MESSAGE, _FLOOR}


def is_gap(header: RecordHeader) -> bool:
    """Return whether a record stands for a run of missing records."""
    return bool(header.flags & STUB) and header.kind == _FLOOR


def stored_size(view: memoryview, at: int, header: RecordHeader) -> int:
    """Return the bytes of the record at `view[at:]` that have a meaning: fewer for a stub.

    The head must be intact.
    """
    if not is_stub(header):
        return header.size
    (tail_size,) = STUB_TAIL.unpack_from(view, at + header.head_size - STUB_TAIL.size)
    return min(header.head_size + int(tail_size), header.size)


def find_head(
    view: memoryview, at: int, *, log_offset: LogOffset, room: int | None = None
) -> RecordHeader | None:
    """Return the header of the record at `view[at:]` if its head is intact.

    The tail is not checked. `room` is the space for the record if `view` ends with its head.
    """
    if len(view) - at < HEADER_SIZE:
        return None
    room = len(view) - at if room is None else room
    header = RecordHeader._make(HEADER.unpack_from(view, at))
    is_intact = (
        header.magic == MAGIC
        and header.log_offset == log_offset
        and HEADER_SIZE <= header.head_size <= header.size <= room
        and crc32(view[at + CRC_FROM : at + header.head_size]) == header.head_crc
    )
    return header if is_intact else None


def find_damage(
    view: memoryview, at: int, *, log_offset: LogOffset, room: int | None = None
) -> str:
    """Return the reason why no intact record is at `view[at:]`, or "" if one is.

    `room` is the space for the record if `view` ends with a damaged head.

    Checks magic, size, head CRC, own position and tail CRC, in this order. Raises UnknownRecord for
    an intact head of another version or of an unknown kind. That is not damage, and skipping it
    would lose it.
    """
    if len(view) - at < HEADER_SIZE:
        return "no room for a header"
    room = len(view) - at if room is None else room
    header = RecordHeader._make(HEADER.unpack_from(view, at))
    if header.magic != MAGIC:
        return "no record begins here"
    if not HEADER_SIZE <= header.head_size <= header.size <= room:
        return "impossible size"
    if crc32(view[at + CRC_FROM : at + header.head_size]) != header.head_crc:
        return "head checksum mismatch"
    if header.log_offset != log_offset:
        return f"left over from log offset {header.log_offset}"
    tail_end = at + stored_size(view, at, header)
    if crc32(view[at + header.head_size : tail_end]) != header.tail_crc:
        return "tail checksum mismatch"
    if header.version != VERSION or header.kind not in KINDS:
        raise UnknownRecord(
            f"record of version {header.version}, kind {header.kind} at log offset {log_offset}"
        )
    return ""
