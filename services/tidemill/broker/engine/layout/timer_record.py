"""One record of the timer log: a timer's link in the chain of a slot.

     0          4             12          16                  24         28
    ┌──────────┬─────────────┬───────────┬───────────────────┬──────────┬───────────────┐
    │ size u32 │ prevPos i64 │ magic u32 │ enqueueTime   i64 │ delay    │ offsetPy  i64 │
    │          │             │           │                   │ i32      │               │
    └──────────┴─────────────┴───────────┴───────────────────┴──────────┴───────────────┘
     36            40             44             52            60
    ┌─────────────┬──────────────┬──────────────┬─────────────┬───────────┐
    │ sizePy  u32 │ topic_id u32 │ timerId  i64 │ dueMs   i64 │ crc32 u32 │   big-endian
    └─────────────┴──────────────┴──────────────┴─────────────┴───────────┘

These are the reference's 52 bytes, with a use for the reserved word, plus the exact due time and a
checksum over the 60 bytes before it.

    prevPos          position of the slot's previous record; -1 ends the chain
    magic            bit 0 SCHEDULE, 1 PARKED, 2 CANCEL, 3 EVACUATED, 4 RESCHEDULED-OUT,
                     5 RESCHEDULED-IN; bits 24 to 31 are the version
    enqueueTime      time of the record; in seconds, plus delay, it is the second of the slot
    offsetPy, sizePy position of the message in the commit log
    topic_id         incarnation of its topic; the reference has a hash of the name

64 divides the size of a file and of a page, so files need no filler and no record straddles a
sector.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

import numpy as np

from tidemill.broker.engine.layout.array_crc import crc32_of_rows
from tidemill.broker.engine.layout.numbers import LogOffset, TimerId, TopicId

VERSION = 1
SIZE = 64  # bytes
SCHEDULE = 1
PARKED = 2
CANCEL = 4
EVACUATED = 8
RESCHEDULED_OUT = 16
RESCHEDULED_IN = 32
LINKS = SCHEDULE | RESCHEDULED_IN | EVACUATED  # records that put a timer into a slot
NO_POSITION = -1

_RECORD = struct.Struct(">IqIqiqIIqqI")
CRC_AT = SIZE - 4
assert _RECORD.size == SIZE, "the timer log record is part of the disk format"

DTYPE = np.dtype(
    [
        ("size", ">u4"),
        ("prev", ">i8"),
        ("magic", ">u4"),
        ("enqueued", ">i8"),
        ("delay", ">i4"),
        ("offset", ">i8"),
        ("body_size", ">u4"),
        ("topic_id", ">u4"),
        ("timer_id", ">i8"),
        ("due", ">i8"),
        ("crc", ">u4"),
    ]
)
assert DTYPE.itemsize == SIZE, "the array form is the record"


class TimerRecord(NamedTuple):
    """A record, decoded."""

    size: int
    previous: int
    magic: int
    enqueued_at_ms: int
    delay_s: int
    log_offset: LogOffset
    body_size: int
    topic_id: TopicId
    timer_id: TimerId
    due_at_ms: int
    crc: int

    @property
    def slot_s(self) -> int:
        """The second of the slot that contains the record."""
        return self.enqueued_at_ms // 1000 + self.delay_s


def encode(
    previous: int,
    kind: int,
    enqueued_at_ms: int,
    slot_s: int,
    log_offset: LogOffset,
    body_size: int,
    topic_id: TopicId,
    timer_id: TimerId,
    due_at_ms: int,
) -> bytes:
    """Encode a record of `kind`, a sum of the bits above. `seal` computes its checksum later."""
    return _RECORD.pack(
        SIZE,
        previous,
        VERSION << 24 | kind,
        enqueued_at_ms,
        slot_s - enqueued_at_ms // 1000,
        log_offset,
        body_size,
        topic_id,
        timer_id,
        due_at_ms,
        0,
    )


def seal(rows: np.ndarray) -> None:
    """Compute the checksums of records."""
    raw = rows.view(np.uint8).reshape(-1, SIZE)
    rows["crc"] = crc32_of_rows(raw[:, :CRC_AT])


def decode(view: memoryview | bytes | bytearray, at: int) -> TimerRecord:
    """Decode a record without checks."""
    return TimerRecord._make(_RECORD.unpack_from(view, at))


def find(view: memoryview | bytes | bytearray, at: int) -> TimerRecord | None:
    """Decode the record at `at`; return None if it is not intact."""
    record = decode(view, at)
    if record.size != SIZE or record.magic >> 24 != VERSION:
        return None
    return record if crc32(view[at : at + CRC_AT]) == record.crc else None
