"""The body of a MESSAGE record: the position of the message, and its cause.

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

    with flag SCHEDULE (a delayed message, on the hidden topic):
     16             24             32             36             38               39
    ┌──────────────┬──────────────┬──────────────┬──────────────┬────────────────┬──────────────┐
    │ timer_id i64 │ due_at_ms i64│ topic_id u32 │ queue_id u16 │ origin_size u8 │ origin       │
    └──────────────┴──────────────┴──────────────┴──────────────┴────────────────┴──────────────┘

    with flag REMAINS beside SCHEDULE (the intact parts of a damaged message), after the origin:
    ┌───────────────────┐  log offset of the damaged message. If it is negative, the position is
    │ log_offset i64    │  unknown, in a segment that begins before -log_offset.
    └───────────────────┘

    with flag TIMER (the result of a delayed message):
     16             24             32          33               34
    ┌──────────────┬──────────────┬───────────┬────────────────┬────────┐
    │ timer_id i64 │ due_at_ms i64│ reason u8 │ origin_size u8 │ origin │
    └──────────────┴──────────────┴───────────┴────────────────┴────────┘

    with flag STUB (a dead message without its content), after all other parts:
    ┌───────────────┐  bytes of the tail: the fixed fields, the key hashes and the message id
    │ tail_size u32 │
    └───────────────┘

The record's tail is the stored message (`tidemill.message.stored_message`). `attempts` counts the
earlier deliveries: 0 for an original.

A copy on a retry or dead-letter topic contains its cause: the delivery that it settles (slot, id,
index). Copy and settlement are one record. root is the position of the original. origin is the name
of its topic, which may be deleted later.

A delayed message contains its target and its due time. A later record with the same timer id and
flag SCHEDULE is its evacuated copy (on queue 1) or its intact parts (on queue 2). The delivered or
dead-lettered message names the timer that it settles.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

from tidemill.broker.engine.layout import record
from tidemill.broker.engine.layout.numbers import (
    DeliverySlot,
    GroupId,
    LogOffset,
    QueueId,
    QueueOffset,
    TimerId,
    TopicId,
)
from tidemill.broker.engine.layout.record import UnknownRecord
from tidemill.message import stored_message

FLAG_CAUSE = 1
FLAG_SCHEDULE = 2
FLAG_TIMER = 4
FLAG_REMAINS = 8  # beside SCHEDULE
FLAG_STUB = record.STUB
FLAGS_KNOWN = FLAG_CAUSE | FLAG_SCHEDULE | FLAG_TIMER | FLAG_REMAINS | FLAG_STUB
PLACE = struct.Struct(">IHHq")
PLACE_SIZE = 16
CAUSE = struct.Struct(">IIqBBqIHqB")
CAUSE_SIZE = 41
assert PLACE.size == PLACE_SIZE, "part of the disk format"
TARGET = struct.Struct(">qqIHB")
TARGET_SIZE = 23
TIMER_CAUSE = struct.Struct(">qqBB")
TIMER_CAUSE_SIZE = 18
_ORIGINAL = struct.Struct(">q")
assert CAUSE.size == CAUSE_SIZE, "part of the disk format"
assert TARGET.size == TARGET_SIZE, "part of the disk format"
assert TIMER_CAUSE.size == TIMER_CAUSE_SIZE, "part of the disk format"


# Maximum head of a record before its blob; the origin's size is a u8.
HEAD_BYTES_MAX = PLACE_SIZE + CAUSE_SIZE + 255
# Make a named tuple without a call of Python code: a start decodes millions of records.
_tuple = tuple.__new__


class Reason(IntEnum):
    """The reason for a copy."""

    INVISIBLE_DURATION_ENDED = 1
    ATTEMPTS_EXHAUSTED = 2
    FORWARDED_BY_CLIENT = 3
    # The message is damaged, or its copy does not fit into a segment. The copy has no body.
    DAMAGED = 4


class TimerReason(IntEnum):
    """The result of a delayed message."""

    DELIVERED = 0
    TOPIC_DELETED = 1
    EXPIRED = 2
    # The message is damaged. The copy has no body.
    DAMAGED = 3


class MessagePosition(NamedTuple):
    """The position of a message in its queue, and its number of attempts."""

    topic_id: TopicId
    queue_id: QueueId
    attempts: int
    queue_offset: QueueOffset


class Cause(NamedTuple):
    """The delivery that a copy settles, and the position of the original."""

    group_id: GroupId
    slot: DeliverySlot
    delivery_id: LogOffset
    message_index: int
    reason: int
    first_popped_at_ms: int
    root_topic_id: TopicId
    root_queue_id: QueueId
    root_offset: int
    origin: str


class TimerTarget(NamedTuple):
    """The target of a delayed message, and its due time."""

    timer_id: TimerId
    due_at_ms: int
    topic_id: TopicId
    queue_id: QueueId
    origin: str


class SalvagedTimer(NamedTuple):
    """A damaged delayed message that could not be copied. The blob has its intact parts."""

    target: TimerTarget
    log_offset: LogOffset  # of the damaged message; negative: see the module docstring


class TimerCause(NamedTuple):
    """The timer that a message settles."""

    timer_id: TimerId
    due_at_ms: int
    reason: int
    origin: str  # "" for a delivered message


class MessageEntry(NamedTuple):
    """A MESSAGE record: a stored message, its position, and its cause."""

    topic_id: TopicId
    queue_id: QueueId
    attempts: int
    queue_offset: QueueOffset
    flags: int  # 0, or the flag that tells the type of `cause`
    cause: Cause | TimerTarget | SalvagedTimer | TimerCause | None
    blob: bytes | memoryview
    blob_crc: int


def encode(message: MessageEntry) -> bytes:
    """Encode the body of a MESSAGE record; its tail is the blob as it is."""
    place = PLACE.pack(*message[:4])
    cause = message.cause
    if cause is None:
        return place
    if isinstance(cause, TimerTarget):
        return place + encode_target(cause)
    if isinstance(cause, SalvagedTimer):
        return place + encode_target(cause.target) + _ORIGINAL.pack(cause.log_offset)
    if isinstance(cause, TimerCause):
        return place + encode_timer_cause(cause)
    return place + encode_cause(cause)


def decode(body: bytes | memoryview, flags: int, blob: memoryview, blob_crc: int) -> MessageEntry:
    """Decode a MESSAGE record without copying the blob. Raises UnknownRecord."""
    cause: Cause | TimerTarget | SalvagedTimer | TimerCause | None = None
    if not flags:
        return _tuple(MessageEntry, (*PLACE.unpack_from(body), 0, None, blob, blob_crc))
    if flags & ~FLAGS_KNOWN:
        raise UnknownRecord(f"MESSAGE record with flags {flags}")
    if flags & FLAG_STUB:
        body = body[: -record.STUB_TAIL.size]
    if flags & FLAG_CAUSE:
        cause = decode_cause(body)
    elif flags & FLAG_SCHEDULE:
        cause = decode_remains(body) if flags & FLAG_REMAINS else decode_target(body)
    elif flags & FLAG_TIMER:
        cause = decode_timer_cause(body)
    return MessageEntry._make((*PLACE.unpack_from(body), flags, cause, blob, blob_crc))


def encode_cause(cause: Cause) -> bytes:
    """Encode `cause` as it follows the position."""
    origin = cause.origin.encode()
    return CAUSE.pack(*cause[:-1], len(origin)) + origin


def decode_cause(body: bytes | memoryview) -> Cause:
    """Decode the cause in a message record's body."""
    *fields, origin_size = CAUSE.unpack_from(body, PLACE_SIZE)
    begin = PLACE_SIZE + CAUSE_SIZE
    return Cause._make((*fields, str(body[begin : begin + origin_size], "utf-8")))


def encode_target(target: TimerTarget) -> bytes:
    """Encode `target` as it follows the position."""
    origin = target.origin.encode()
    return TARGET.pack(*target[:-1], len(origin)) + origin


def decode_target(body: bytes | memoryview) -> TimerTarget:
    """Decode the target in a delayed message's body."""
    *fields, origin_size = TARGET.unpack_from(body, PLACE_SIZE)
    begin = PLACE_SIZE + TARGET_SIZE
    return TimerTarget._make((*fields, str(body[begin : begin + origin_size], "utf-8")))


def decode_remains(body: bytes | memoryview) -> SalvagedTimer:
    """Decode the target of a damaged delayed message, and its log offset."""
    (log_offset,) = _ORIGINAL.unpack_from(body, len(body) - _ORIGINAL.size)
    return SalvagedTimer(decode_target(body), LogOffset(log_offset))


def encode_timer_cause(cause: TimerCause) -> bytes:
    """Encode `cause` as it follows the position."""
    origin = cause.origin.encode()
    return TIMER_CAUSE.pack(*cause[:-1], len(origin)) + origin


def decode_timer_cause(body: bytes | memoryview) -> TimerCause:
    """Decode the timer that a message settles."""
    *fields, origin_size = TIMER_CAUSE.unpack_from(body, PLACE_SIZE)
    begin = PLACE_SIZE + TIMER_CAUSE_SIZE
    return TimerCause._make((*fields, str(body[begin : begin + origin_size], "utf-8")))


def encode_stub(whole: bytes | memoryview) -> bytes:
    """Return the stub of a whole, intact MESSAGE record, as it is stored in a pack.

    Its log offset, size, body, key hashes and message id stay, so it produces the same state.
    Raises ValueError if the tail is not a stored message.
    """
    fields = record.HEADER.unpack_from(whole)
    _, _, size, _, version, kind, flags, epoch, stored_at_ms, log_offset, unsynced, of_head = fields
    tail = stored_message.without_content(whole[of_head:size])
    head_size = of_head + record.STUB_TAIL.size
    if head_size + len(tail) > size:
        raise ValueError("the message is smaller than its stub")
    covered = b"".join(
        (
            record.COVERED.pack(
                size,
                crc32(tail),
                version,
                kind,
                flags | FLAG_STUB,
                epoch,
                stored_at_ms,
                log_offset,
                unsynced,
                head_size,
            ),
            whole[record.HEADER_SIZE : of_head],
            record.STUB_TAIL.pack(len(tail)),
        )
    )
    return b"".join((record.PREFIX.pack(record.MAGIC, crc32(covered)), covered, tail))
