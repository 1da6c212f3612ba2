"""The body of an EXPIRE record: messages that a group never popped before retention removes them.

     0              4              8             10           18
    ┌──────────────┬──────────────┬─────────────┬────────────┬────────────┐
    │ group_id u32 │ topic_id u32 │ queue_id u16│ begin  i64 │ end    i64 │  x n, big-endian
    └──────────────┴──────────────┴─────────────┴────────────┴────────────┘

The group gets no message of the queue from `begin` to before `end`, even if retention keeps the
segment after all.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId

ROW = struct.Struct(">IIHqq")
ROW_SIZE = 26  # bytes
assert ROW.size == ROW_SIZE, "part of the disk format"
ROWS_MAX = 2_048  # of one record: its head stays below 64 KiB, the maximum of head_size


class ExpiredRange(NamedTuple):
    """Queue offsets that a group no longer gets."""

    group_id: GroupId
    topic_id: TopicId
    queue_id: QueueId
    begin: int
    end: int


class Expiry(NamedTuple):
    """An EXPIRE record's body, decoded."""

    ranges: list[ExpiredRange]


def encode(expiry: Expiry) -> bytes:
    """Encode the body of an EXPIRE record."""
    pack = ROW.pack
    return b"".join([pack(*one) for one in expiry.ranges])


def decode(body: bytes | memoryview) -> Expiry:
    """Decode the body of an EXPIRE record."""
    return Expiry([ExpiredRange._make(row) for row in ROW.iter_unpack(body)])
