"""The body of a message record: where the message stands, and what delivery it settles.

     0              4              6             8                  16
    ┌──────────────┬──────────────┬─────────────┬──────────────────┐
    │ topic_id u32 │ queue_id u16 │ attempts u16│ queue_offset i64 │  then, with flag CAUSE:
    └──────────────┴──────────────┴─────────────┴──────────────────┘
     16             20         24                32      33         34                 42
    ┌──────────────┬──────────┬─────────────────┬───────┬──────────┬──────────────────┬─────────┐
    │ group_id u32 │ slot u32 │ delivery_id i64 │ index │ reason   │ first_popped_at  │ root ...│
    │              │          │                 │ u8    │ u8       │ _ms i64          │         │
    └──────────────┴──────────┴─────────────────┴───────┴──────────┴──────────────────┴─────────┘
     42                  46                 48                 56                   57
    ┌───────────────────┬──────────────────┬──────────────────┬────────────────────┬────────────┐
    │ root_topic_id u32 │ root_queue_id u16│ root_offset i64  │ origin_size u8     │ origin     │
    └───────────────────┴──────────────────┴──────────────────┴────────────────────┴────────────┘

The record's tail is the stored message (`tidemill.common.stored_message`). `attempts` counts the
deliveries that came before: 0 for an original. A copy on a retry or dead-letter topic names as its
cause the delivery it settles (slot, identity, index), so copy and settlement are one record; root
is the original's place, and origin the name of its topic, which may be gone when somebody reads.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

FLAG_CAUSE = 1
PLACE = struct.Struct(">IHHq")
PLACE_SIZE = 16
CAUSE = struct.Struct(">IIqBBqIHqB")
CAUSE_SIZE = 41
assert PLACE.size == PLACE_SIZE, "part of the disk format"
assert CAUSE.size == CAUSE_SIZE, "part of the disk format"


class Reason(IntEnum):
    """Why a copy was made."""

    INVISIBLE_DURATION_ENDED = 1
    ATTEMPTS_EXHAUSTED = 2
    FORWARDED_BY_CLIENT = 3


class Place(NamedTuple):
    """Where a message stands."""

    topic_id: int
    queue_id: int
    attempts: int
    queue_offset: int


class Cause(NamedTuple):
    """The delivery that a copy settles, and where the original stands."""

    group_id: int
    slot: int
    delivery_id: int
    message_index: int
    reason: int
    first_popped_at_ms: int
    root_topic_id: int
    root_queue_id: int
    root_offset: int
    origin: str


def encode_cause(cause: Cause) -> bytes:
    """Encode `cause` as it stands behind the place."""
    origin = cause.origin.encode()
    return CAUSE.pack(*cause[:-1], len(origin)) + origin


def decode_cause(body: bytes | memoryview) -> Cause:
    """Decode the cause in a message record's body."""
    *fields, origin_size = CAUSE.unpack_from(body, PLACE_SIZE)
    begin = PLACE_SIZE + CAUSE_SIZE
    return Cause._make((*fields, str(body[begin : begin + origin_size], "utf-8")))
