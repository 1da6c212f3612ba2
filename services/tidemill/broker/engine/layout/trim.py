"""The body of a TRIM record: the first messages of queues that are still alive (level 2).

     0              4             6            7
    ┌──────────────┬─────────────┬────────────┬──────────┐
    │ topic_id u32 │ queue_id u16│ reason  u8 │ low  i64 │  x n, big-endian
    └──────────────┴─────────────┴────────────┴──────────┘

The messages of the queue before `low` are dead: no consumer and no reader gets them again.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.layout.record import UnknownRecord

ROWS_MAX = 512  # of a record; its writer splits longer lists
ROW = struct.Struct(">IHBq")
ROW_SIZE = 15  # bytes
assert ROW.size == ROW_SIZE, "part of the disk format"


class TrimReason(IntEnum):
    """Why messages are dead."""

    TIME = 1  # older than the `ms` of the topic
    BYTES = 2  # the topic, or all topics together, had too many bytes
    ACKED = 3  # all consumer groups have settled them
    PURGE = 4  # an operator has purged the topic
    DISK = 5  # the disk was full, and `disk_full_policy` allows it
    STATED = 6  # before the state floor moves, its record is stated again


class TrimmedQueue(NamedTuple):
    """The new begin of a queue."""

    topic_id: TopicId
    queue_id: QueueId
    reason: TrimReason
    low: int  # queue offset of the first message that is alive


class Trim(NamedTuple):
    """A TRIM record's body, decoded."""

    queues: list[TrimmedQueue]


def encode(trim: Trim) -> bytes:
    """Encode the body of a TRIM record."""
    return b"".join([ROW.pack(*one) for one in trim.queues])


def decode(body: bytes | memoryview) -> Trim:
    """Decode the body of a TRIM record. Raises UnknownRecord."""
    try:
        return Trim(
            [
                TrimmedQueue(topic_id, queue_id, TrimReason(reason), low)
                for topic_id, queue_id, reason, low in ROW.iter_unpack(body)
            ]
        )
    except ValueError as error:
        raise UnknownRecord(f"TRIM record: {error}") from error
