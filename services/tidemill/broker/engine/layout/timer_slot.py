"""One slot of the timer wheel: the chain of timers of one second.

     0             8                 16              24        28
    ┌─────────────┬─────────────────┬───────────────┬─────────┬───────────┐
    │ timeMs  i64 │ firstPos    i64 │ lastPos   i64 │ num u32 │ magic u32 │   big-endian
    └─────────────┴─────────────────┴───────────────┴─────────┴───────────┘

timeMs is the start of the slot's second. A slot with another second than the expected one is empty.
firstPos and lastPos are the positions of the chain's oldest and newest record in the timer log. num
counts schedules minus cancels, and is never negative. It is a hint for admission; correctness does
not depend on it. magic: bits 24 to 31 are the version, bits 0 to 23 the low bits of the CRC-32 over
the 28 bytes before it. Without the CRC, a flipped bit in lastPos would silently cut a chain.

    slot of time t = floor(t / 1000) mod the number of slots (1,209,600: 14 days)
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from tidemill.broker.engine.layout.array_crc import crc32_of_rows

VERSION = 1
SIZE = 32  # bytes
_SLOT = struct.Struct(">qqqII")
unpack_from, pack_into = _SLOT.unpack_from, _SLOT.pack_into  # for the hot path
CRC_AT = SIZE - 4
CRC_MASK = 0xFFFFFF
UNSEALED = VERSION << 24  # magic word of a slot whose checksum `seal` will compute
NUM_MAX = 0xFFFFFFFF
assert _SLOT.size == SIZE, "the slot is part of the disk format"

DTYPE = np.dtype(
    [("time", ">i8"), ("first", ">i8"), ("last", ">i8"), ("num", ">u4"), ("magic", ">u4")]
)
assert DTYPE.itemsize == SIZE, "the array form is the slot"


class TimerSlot(NamedTuple):
    """A slot, decoded."""

    time_ms: int
    first: int
    last: int
    num: int
    magic: int


def read(buffer: bytearray | memoryview, at: int) -> TimerSlot:
    """Decode a slot without checks."""
    return TimerSlot._make(_SLOT.unpack_from(buffer, at))


def seal(rows: np.ndarray) -> None:
    """Compute the checksums of all used slots."""
    used = np.flatnonzero(rows["magic"])
    rows["magic"][used] = _magic(rows[used])


def is_intact(rows: np.ndarray) -> np.ndarray:
    """Return for each slot whether it is unused, or its checksum and version are right."""
    is_unused = ~rows.view(np.uint8).reshape(-1, SIZE).any(axis=1)
    intact: np.ndarray = (rows["magic"] == _magic(rows)) | is_unused
    return intact


def _magic(rows: np.ndarray) -> np.ndarray:
    raw = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, SIZE)
    return np.uint32(UNSEALED) | crc32_of_rows(raw[:, :CRC_AT]) & np.uint32(CRC_MASK)
