"""One entry of the timer state table: the state of the timer with this id.

     0                8            12              20             24         25          29      32
    ┌────────────────┬────────────┬───────────────┬──────────────┬──────────┬───────────┬─────────┐
    │ log_offset i64 │ size   u32 │ due_at_ms i64 │ topic_id u32 │ state u8 │ crc32 u32 │ 3 zeros │
    └────────────────┴────────────┴───────────────┴──────────────┴──────────┴───────────┴─────────┘

Big-endian. log_offset and size describe the record with the newest copy of the message. The crc
covers the 25 bytes before it. An unused id has 32 zeros. Entry n of a file belongs to the timer id
(number in the file's name) + n.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from tidemill.broker.engine.layout.array_crc import crc32_of_rows
from tidemill.broker.engine.layout.numbers import LogOffset, TopicId

SIZE = 32  # bytes
CRC_AT = 25
_FIELDS = struct.Struct(">qIqIB")
_ENTRY = struct.Struct(">qIqIBI3x")
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


class TimerEntry(NamedTuple):
    """An entry, decoded."""

    log_offset: LogOffset
    size: int
    due_at_ms: int
    topic_id: TopicId
    state: int


class TimerEntryDamaged(Exception):
    """The checksum of an entry that was read from the disk is wrong."""


def write(buffer: bytearray, at: int, entry: TimerEntry) -> None:
    """Write an entry. `seal` computes its checksum later."""
    _ENTRY.pack_into(buffer, at, *entry, 0)


def read(buffer: bytearray | memoryview, at: int) -> TimerEntry:
    """Decode an entry without checks."""
    return TimerEntry._make(_FIELDS.unpack_from(buffer, at))


def seal(rows: np.ndarray) -> None:
    """Compute the checksums of all used entries."""
    used = np.flatnonzero(rows["state"])
    rows["crc"][used] = _crcs(rows[used])


def is_intact(rows: np.ndarray) -> np.ndarray:
    """Return for each entry whether it is unused or its checksum is right."""
    is_unused = ~rows.view(np.uint8).reshape(-1, SIZE).any(axis=1)
    intact: np.ndarray = (rows["crc"] == _crcs(rows)) | is_unused
    return intact


def _crcs(rows: np.ndarray) -> np.ndarray:
    raw = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, SIZE)
    return crc32_of_rows(raw[:, :CRC_AT])
