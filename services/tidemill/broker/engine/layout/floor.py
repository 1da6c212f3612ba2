"""The body of a FLOOR record: the state floor; and gaps, which replace records before it (level 2).

     0            8
    ┌────────────┐
    │ floor  i64 │  big-endian
    └────────────┘

No state is stated only before log offset `floor` (ADR 0069). So a pack needs no record before it,
except for live messages. A **gap** stands for a run of missing records. It is a FLOOR record with
flag STUB: its size is the size of the run, so the next record has the log offset as before. Its log
offset, store time and epoch are those of the first missing record.

     0            8                  16
    ┌────────────┬──────────────────┬───────────┐
    │ floor  i64 │ stated_before i64│ 0     u32 │  a gap; the u32 says that it has no tail
    └────────────┴──────────────────┴───────────┘

All state from the floor on is stated before log offset `stated_before`.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple
from zlib import crc32

from tidemill.broker.engine.layout import record
from tidemill.broker.engine.layout.record import RecordHeader, RecordKind, UnknownRecord

_FLOOR = struct.Struct(">q")
_GAP = struct.Struct(">qqI")
GAP_SIZE = record.HEADER_SIZE + _GAP.size  # bytes in a pack
assert GAP_SIZE == 68, "part of the disk format"


class Floor(NamedTuple):
    """A FLOOR record's body, decoded."""

    floor: int


class Gap(NamedTuple):
    """The body of a gap, decoded."""

    floor: int
    stated_before: int


def encode(entry: Floor) -> bytes:
    """Encode the body of a FLOOR record."""
    return _FLOOR.pack(entry.floor)


def decode(body: bytes | memoryview) -> Floor:
    """Decode the body of a FLOOR record. Raises UnknownRecord."""
    if len(body) != _FLOOR.size:
        raise UnknownRecord(f"FLOOR record with a body of {len(body)} bytes")
    return Floor(*_FLOOR.unpack(body))


def encode_gap(first: RecordHeader, size: int, gap: Gap) -> bytes:
    """Return the gap that replaces `size` bytes of the log from the record `first` on."""
    covered = record.COVERED.pack(
        size,
        crc32(b""),
        record.VERSION,
        RecordKind.FLOOR,
        record.STUB,
        first.epoch,
        first.stored_at_ms,
        first.log_offset,
        0,
        GAP_SIZE,
    ) + _GAP.pack(*gap, 0)
    return record.PREFIX.pack(record.MAGIC, crc32(covered)) + covered


def decode_gap(body: bytes | memoryview) -> Gap:
    """Decode the body of a gap. Raises UnknownRecord."""
    if len(body) != _GAP.size:
        raise UnknownRecord(f"gap with a body of {len(body)} bytes")
    floor, stated_before, _ = _GAP.unpack(body)
    return Gap(floor, stated_before)


def floor_item(state_floor: int) -> dict[str, Any]:
    """Return the item of a snapshot's catalog that has the state floor."""
    return {"op": "floor", "at": state_floor}
