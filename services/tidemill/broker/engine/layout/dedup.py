"""The dedup key of a MESSAGE record, and the rows of tables of dedup keys (ADR 0087).

The part KEYED follows all other parts of the body:

     0                16             20               28            29
    ┌────────────────┬──────────────┬────────────────┬─────────────┬─────┐
    │ hash, 16 bytes │ body_crc u32 │ taken_at_ms i64│ key_size u8 │ key │   big-endian
    └────────────────┴──────────────┴────────────────┴─────────────┴─────┘

`hash` is a keyed hash over the scope and the key: topic, message group, and whether the key is a
message id. `body_crc` is the CRC-32 of the body of the
message. `taken_at_ms` is the time of the key by the clock of deduplication, which does not follow
steps of the wall clock. A message that replaces a delayed message repeats the time of the first.

A row of a table, in snapshots and in memory:

     0                16             22              28             32
    ┌────────────────┬──────────────┬───────────────┬──────────────┬─────────┐
    │ hash, 16 bytes │ log_offset   │ taken_at_ms   │ body_crc u32 │ pin i64 │
    │                │ u48          │ u48           │              │         │
    └────────────────┴──────────────┴───────────────┴──────────────┴─────────┘

`log_offset` is that of the message with the key. `pin` keeps the key after the end of its window: a
timer id + 1 if the message is a pending delayed message, a negative half id if it is an open half
message, otherwise 0.

A STATE record has rows with their topic:

     0              4                20                28               36             40
    ┌──────────────┬────────────────┬─────────────────┬────────────────┬──────────────┬─────────┐
    │ topic_id u32 │ hash, 16 bytes │ log_offset  i64 │ taken_at_ms i64│ body_crc u32 │ pin i64 │
    └──────────────┴────────────────┴─────────────────┴────────────────┴──────────────┴─────────┘

If log_offset is -1, the key is free: an operator has freed it.

A section of a snapshot has the rows of one topic, as of the moment of the catalog:

     0              4                12               20
    ┌──────────────┬────────────────┬────────────────┬──────┐
    │ topic_id u32 │ over_until i64 │ clock_lead i64 │ rows │
    └──────────────┴────────────────┴────────────────┴──────┘

Keys taken at `over_until` or before are free: their window was over before it became longer.
`clock_lead` is the time of the clock of deduplication minus wall time, in ms.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from tidemill.broker.engine.layout.numbers import LogOffset, TopicId

KEY_BYTES_MAX: Final = 255
HASH_SIZE: Final = 16
PART = struct.Struct(">16sIqB")
_PART_SIZE = 29
PART_BYTES_MAX: Final = _PART_SIZE + KEY_BYTES_MAX
# The two fields of 48 bits are one of 64 and one of 32.
ROW = struct.Struct(">16sQIIq")
ROW_SIZE: Final = 40
STATED_ROW = struct.Struct(">I16sqqIq")
STATED_ROW_SIZE: Final = 48
_SECTION = struct.Struct(">Iqq")
_SECTION_SIZE = 20
assert PART.size == _PART_SIZE, "part of the disk format"
assert ROW.size == ROW_SIZE, "part of the disk format"
assert STATED_ROW.size == STATED_ROW_SIZE, "part of the disk format"
assert _SECTION.size == _SECTION_SIZE, "part of the disk format"

ROW_DTYPE = np.dtype(
    [("hash", "V16"), ("high", ">u8"), ("low", ">u4"), ("body_crc", ">u4"), ("pin", ">i8")]
)
assert ROW_DTYPE.itemsize == ROW_SIZE, "the array form is the row"
FREED: Final = LogOffset(-1)
NO_PIN: Final = 0


class DedupKey(NamedTuple):
    """The part KEYED of a MESSAGE record."""

    hash: bytes
    body_crc: int
    taken_at_ms: int
    key: bytes


class KeyRow(NamedTuple):
    """A known key: its message, and what keeps it."""

    hash: bytes
    log_offset: LogOffset
    taken_at_ms: int
    body_crc: int
    pin: int


class StatedKeys(NamedTuple):
    """Rows of keys that are stated again, or freed by an operator."""

    rows: Sequence[tuple[TopicId, KeyRow]]


class KeySection(NamedTuple):
    """A section of a snapshot: some rows of one topic."""

    topic_id: TopicId
    over_until_ms: int
    clock_lead_ms: int
    rows: memoryview


def encode_part(key: DedupKey) -> bytes:
    """Encode the part KEYED."""
    return PART.pack(*key[:3], len(key.key)) + key.key


def decode_part(body: bytes | memoryview, at: int) -> DedupKey:
    """Decode the part KEYED at a position in the body of a MESSAGE record."""
    *fields, size = PART.unpack_from(body, at)
    begin = at + _PART_SIZE
    return DedupKey._make((*fields, bytes(body[begin : begin + size])))


def encode_row(row: KeyRow) -> bytes:
    """Encode a row of a table."""
    hash_, log_offset, taken_at_ms, body_crc, pin = row
    high, low = log_offset << 16 | taken_at_ms >> 32, taken_at_ms & 0xFFFFFFFF
    return ROW.pack(hash_, high, low, body_crc, pin)


def taken_at_ms(rows: np.ndarray) -> np.ndarray:
    """Return when the keys of some rows were taken."""
    high = (rows["high"].astype(np.int64) & 0xFFFF) << 32
    times: np.ndarray = high | rows["low"]
    return times


def log_offsets(rows: np.ndarray) -> np.ndarray:
    """Return the log offsets of some rows."""
    return (rows["high"].astype(np.uint64) >> np.uint64(16)).astype(np.int64)


def encode_stated(rows: Iterable[tuple[TopicId, KeyRow]]) -> bytes:
    """Encode the rows of a STATE record."""
    return b"".join([STATED_ROW.pack(topic_id, *row) for topic_id, row in rows])


def decode_stated(data: bytes | memoryview) -> StatedKeys:
    """Decode the rows of a STATE record."""
    return StatedKeys(
        [(TopicId(row[0]), KeyRow._make(row[1:])) for row in STATED_ROW.iter_unpack(data)]
    )


def encode_section(
    topic_id: TopicId, over_until_ms: int, clock_lead_ms: int, rows: bytes | bytearray
) -> bytes:
    """Encode a section of a snapshot."""
    return _SECTION.pack(topic_id, over_until_ms, clock_lead_ms) + rows


def decode_section(data: bytes | memoryview) -> KeySection:
    """Decode a section of a snapshot."""
    topic_id, over_until_ms, clock_lead_ms = _SECTION.unpack_from(data)
    rows = memoryview(data)[_SECTION_SIZE:]
    return KeySection(TopicId(topic_id), over_until_ms, clock_lead_ms, rows)


def pin_of_timer(timer_id: int) -> int:
    """Return the pin of the key of a pending delayed message."""
    return timer_id + 1


def pin_of_half(half_id: int) -> int:
    """Return the pin of the key of an open half message."""
    return -half_id
