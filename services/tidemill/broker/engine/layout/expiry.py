"""The body of an EXPIRE record: what groups never popped of what retention is about to take.

     0              4              8             10           18
    ┌──────────────┬──────────────┬─────────────┬────────────┬────────────┐
    │ group_id u32 │ topic_id u32 │ queue_id u16│ begin  i64 │ end    i64 │  x n, big-endian
    └──────────────┴──────────────┴─────────────┴────────────┴────────────┘

From `begin` on, and before `end`, the group gets nothing of the queue any more, whether or not the
segment goes in the end.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId

ROW = struct.Struct(">IIHqq")
ROW_SIZE = 26  # bytes
assert ROW.size == ROW_SIZE, "part of the disk format"
ROWS_MAX = 2_048  # of one record: its head stays below the 64 KiB that head_size can say


class ExpiredRange(NamedTuple):
    """Offsets of one queue that one group gets no more."""

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
