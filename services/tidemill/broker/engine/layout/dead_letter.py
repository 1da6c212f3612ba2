"""Settled dead letters: the part REPLAY of a MESSAGE, and the body of a DEAD_LETTER (ADR 0093).

The part REPLAY alone follows the position. The message is a replay, which settles a dead letter:

     16                24             28                  32
    ┌─────────────────┬──────────────┬───────────────────┬─────────────────┐
    │ operation_id i64│ group_id u32 │ dead_topic_id u32 │ dead_offset i64 │
    └─────────────────┴──────────────┴───────────────────┴─────────────────┘
     40           42                    50                  54                 56
    ┌────────────┬─────────────────────┬───────────────────┬──────────────────┬─────────────────┐
    │ number u16 │ first_popped_ms i64 │ root_topic_id u32 │ root_queue_id u16│ root_offset i64 │
    └────────────┴─────────────────────┴───────────────────┴──────────────────┴─────────────────┘
     64               65
    ┌────────────────┬────────┐
    │ origin_size u8 │ origin │   big-endian
    └────────────────┴────────┘

`dead_topic_id` and `dead_offset` are the position of the dead letter. `number` counts the replays
of the message, with this one. `operation_id` is 0 if no operation has replayed it.

Beside CAUSE, the part is behind the cause: the copy is of a replayed message.

    ┌────────────┐
    │ number u16 │
    └────────────┘

The body of a DEAD_LETTER record: an operator discards dead letters.

     0              4              8                 16
    ┌──────────────┬──────────────┬─────────────────┬───────────────────────────────┐
    │ group_id u32 │ topic_id u32 │ operation_id i64│ begin i64, end i64       x n  │
    └──────────────┴──────────────┴─────────────────┴───────────────────────────────┘

`topic_id` is that of the dead-letter topic. The offsets from `begin` and before `end` are settled.

A range of settled dead letters, in snapshots and in STATE records. There, its topic precedes it:

     0             8            16                24                32          33
    ┌────────────┬────────────┬──────────────────┬─────────────────┬───────────┐
    │ begin  i64 │ end    i64 │ settled_at_ms i64│ operation_id i64│ state  u8 │
    └────────────┴────────────┴──────────────────┴─────────────────┴───────────┘

`settled_at_ms` is 0 if the offsets were settled at several times.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.layout.record import UnknownRecord

RANGES_A_RECORD: Final = 1_000  # of a DEAD_LETTER record, whose head has at most 64 KiB
_REPLAY = struct.Struct(">qIIqHqIHqB")
_REPLAY_SIZE = 49
NUMBER = struct.Struct(">H")
_DISCARD = struct.Struct(">IIq")
_DISCARD_SIZE = 16
_RANGE = struct.Struct(">qq")
_ROW = struct.Struct(">qqqqB")
ROW_SIZE = 33
_TOPIC = struct.Struct(">I")
assert _REPLAY.size == _REPLAY_SIZE, "part of the disk format"
assert _DISCARD.size == _DISCARD_SIZE, "part of the disk format"
assert _ROW.size == ROW_SIZE, "part of the disk format"


class DeadLetterState(IntEnum):
    """The state of a dead letter. REPLAYED and DISCARDED are final."""

    OPEN = 0  # in no record
    REPLAYED = 1
    DISCARDED = 2


class Replay(NamedTuple):
    """The dead letter that a message replays, and the position of the original."""

    operation_id: int
    group_id: GroupId
    dead_topic_id: TopicId
    dead_offset: int
    replays: int
    first_popped_at_ms: int
    root_topic_id: TopicId
    root_queue_id: QueueId
    root_offset: int
    origin: str


class DeadLettersDiscarded(NamedTuple):
    """A DEAD_LETTER record's body, decoded."""

    group_id: GroupId
    topic_id: TopicId
    operation_id: int
    ranges: list[tuple[int, int]]  # begin, end


class SettledRange(NamedTuple):
    """Adjacent dead letters that were settled alike."""

    begin: int
    end: int
    settled_at_ms: int  # 0: at several times
    operation_id: int
    state: int


class StatedLetters(NamedTuple):
    """Settled dead letters of a topic, which are stated again."""

    topic_id: TopicId
    ranges: Sequence[SettledRange]


def encode_replay(replay: Replay) -> bytes:
    """Encode the part REPLAY of a message that replays a dead letter."""
    origin = replay.origin.encode()
    return _REPLAY.pack(*replay[:-1], len(origin)) + origin


def decode_replay(body: bytes | memoryview, at: int) -> Replay:
    """Decode the part REPLAY at byte `at` of the body."""
    *fields, origin_size = _REPLAY.unpack_from(body, at)
    begin = at + _REPLAY_SIZE
    return Replay._make((*fields, str(body[begin : begin + origin_size], "utf-8")))


def encode(entry: DeadLettersDiscarded) -> bytes:
    """Encode the body of a DEAD_LETTER record."""
    head = _DISCARD.pack(entry.group_id, entry.topic_id, entry.operation_id)
    return head + b"".join([_RANGE.pack(*one) for one in entry.ranges])


def decode(body: bytes | memoryview) -> DeadLettersDiscarded:
    """Decode the body of a DEAD_LETTER record. Raises UnknownRecord."""
    try:
        group_id, topic_id, operation_id = _DISCARD.unpack_from(body)
        ranges = [(begin, end) for begin, end in _RANGE.iter_unpack(body[_DISCARD_SIZE:])]
    except struct.error as error:
        raise UnknownRecord("DEAD_LETTER record of another size") from error
    return DeadLettersDiscarded(GroupId(group_id), TopicId(topic_id), operation_id, ranges)


def encode_ranges(topic_id: TopicId, ranges: Iterable[SettledRange]) -> bytes:
    """Encode ranges of a topic, as a STATE record and a section of a snapshot have them."""
    return _TOPIC.pack(topic_id) + b"".join([_ROW.pack(*one) for one in ranges])


def decode_ranges(data: bytes | memoryview) -> StatedLetters:
    """Decode ranges of a topic. Raises UnknownRecord."""
    try:
        (topic_id,) = _TOPIC.unpack_from(data)
        ranges = [SettledRange._make(row) for row in _ROW.iter_unpack(data[_TOPIC.size :])]
    except struct.error as error:
        raise UnknownRecord("settled dead letters of another size") from error
    return StatedLetters(TopicId(topic_id), ranges)
