"""One slot of the timer wheel: the chain of timers of one second.

     0             8                 16              24        28
    ┌─────────────┬─────────────────┬───────────────┬─────────┬───────────┐
    │ timeMs  i64 │ firstPos    i64 │ lastPos   i64 │ num u32 │ magic u32 │   big-endian
    └─────────────┴─────────────────┴───────────────┴─────────┴───────────┘

timeMs is the start of the slot's second; any other second than the one that is looked for means
empty. firstPos and lastPos are the positions of the chain's oldest and newest record in the timer
log. num counts schedules minus cancels, never below 0: a hint for admission and never for
correctness. magic: bits 24 to 31 the version, bits 0 to 23 the low bits of the CRC-32 over the 28
bytes before it, since a flipped bit in lastPos would cut a chain without any other sign.

    slot of time t = floor(t / 1000) mod the number of slots (1,209,600: 14 days)
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

import numpy as np

VERSION = 2
SIZE = 32  # bytes
_FIELDS = struct.Struct(">qqqI")
_SLOT = struct.Struct(">qqqII")
_MAGIC = struct.Struct(">I")
CRC_MASK = 0xFFFFFF
NUM_MAX = 0xFFFFFFFF
assert _SLOT.size == SIZE, "the slot is part of the disk format"
assert _FIELDS.size + _MAGIC.size == SIZE, "part of the disk format"

DTYPE = np.dtype(
    [("time", ">i8"), ("first", ">i8"), ("last", ">i8"), ("num", ">u4"), ("magic", ">u4")]
)
assert DTYPE.itemsize == SIZE, "the array form is the slot"


class Slot(NamedTuple):
    """A slot, decoded."""

    time_ms: int
    first: int
    last: int
    num: int
    magic: int


def write(buffer: bytearray, at: int, time_ms: int, first: int, last: int, num: int) -> None:
    """Write a slot."""
    _FIELDS.pack_into(buffer, at, time_ms, first, last, num)
    crc = crc32(memoryview(buffer)[at : at + _FIELDS.size])
    _MAGIC.pack_into(buffer, at + _FIELDS.size, VERSION << 24 | crc & CRC_MASK)


def read(buffer: bytearray, at: int) -> Slot:
    """Decode a slot, unchecked."""
    return Slot._make(_SLOT.unpack_from(buffer, at))


def is_intact(buffer: bytearray, at: int) -> bool:
    """Return whether the slot's checksum and version are right."""
    crc = crc32(memoryview(buffer)[at : at + _FIELDS.size])
    return bool(_MAGIC.unpack_from(buffer, at + _FIELDS.size)[0] == VERSION << 24 | crc & CRC_MASK)
