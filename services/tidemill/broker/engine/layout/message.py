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

    with flag HALF (a half message, on the hidden topic; ADR 0085):
     16           24           28           30           32                 40            44
    ┌────────────┬────────────┬────────────┬────────────┬──────────────────┬─────────────┬───────┐
    │ half_id i64│ topic u32  │ queue u16  │ checks u16 │ next_check_ms i64│ period u32  │ ...   │
    └────────────┴────────────┴────────────┴────────────┴──────────────────┴─────────────┴───────┘
     44               46          50                51
    ┌────────────────┬───────────┬─────────────────┬───────────┐
    │ checks_max u16 │ owner u32 │ client_size u8  │ client id │
    └────────────────┴───────────┴─────────────────┴───────────┘

    with flag OUTCOME (the message settles a half message), after the other parts:
    ┌──────────────┬───────────┬────────────┬────────────────┬────────┐
    │ half_id i64  │ reason u8 │ checks u16 │ origin_size u8 │ origin │
    └──────────────┴───────────┴────────────┴────────────────┴────────┘

    with flag REPLAY (the message replays a dead letter), or beside CAUSE (a copy of a replayed
    message), after the other parts: `layout.dead_letter`

    with flag KEYED (the message has a dedup key), after the other parts: `layout.dedup`

    with flag STUB (a dead message without its content), after all other parts:
    ┌───────────────┐  bytes of the tail: the fixed fields, the key hashes and the message id
    │ tail_size u32 │
    └───────────────┘

The record's tail is the stored message (`tidemill.message.stored_message`). `attempts` counts the
earlier deliveries: 0 for an original.

A copy on a retry or dead-letter topic contains its cause: the delivery that it settles (slot, id,
index). Copy and settlement are one record. root is the position of the original. origin is the name
of its topic, which may be deleted later. A replay is the copy of a dead letter that it settles.

A delayed message contains its target and its due time. A later record with the same timer id and
flag SCHEDULE is its evacuated copy (on queue 1) or its intact parts (on queue 2). The delivered or
dead-lettered message names the timer that it settles.

A half message has the half id 0 in its first record: the log offset of this record is the id. Its
copies (on queue 1) name it. OUTCOME stands alone (a committed message, or an expired one on the
dead-letter topic of half messages), beside SCHEDULE (a commit with a future due time), or beside
HALF (an expired half message that is open again, under a new id).

KEYED stands alone, beside SCHEDULE, or beside HALF, with or without OUTCOME. A message on queue 3
of the hidden timer topic replaces the message of a pending timer with the same key: its timer id is
that of this timer.

It is one module, because the parts of a body stand one behind the other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias
from zlib import crc32

from tidemill.broker.engine.layout import dead_letter, dedup, record
from tidemill.broker.engine.layout.dead_letter import Replay
from tidemill.broker.engine.layout.dedup import DedupKey
from tidemill.broker.engine.layout.numbers import (
    DeliverySlot,
    GroupId,
    HalfId,
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
FLAG_HALF = 16  # feature level 4, as OUTCOME
FLAG_OUTCOME = 32  # also beside SCHEDULE or HALF
FLAG_KEYED = 64  # feature level 4; alone, or beside SCHEDULE or HALF
FLAG_REPLAY = 256  # feature level 5; alone, or beside CAUSE
FLAG_STUB = record.STUB
_FLAGS_OF_CAUSE = (
    FLAG_CAUSE | FLAG_SCHEDULE | FLAG_TIMER | FLAG_REMAINS | FLAG_HALF | FLAG_OUTCOME | FLAG_REPLAY
)
FLAGS_KNOWN = _FLAGS_OF_CAUSE | FLAG_KEYED | FLAG_STUB
PLACE = struct.Struct(">IHHq")
PLACE_SIZE = 16
# The position and the part KEYED of a message without another part.
_KEYED_PLACE = struct.Struct(PLACE.format + dedup.PART.format[1:])
CAUSE = struct.Struct(">IIqBBqIHqB")
CAUSE_SIZE = 41
assert PLACE.size == PLACE_SIZE, "part of the disk format"
TARGET = struct.Struct(">qqIHB")
TARGET_SIZE = 23
TIMER_CAUSE = struct.Struct(">qqBB")
TIMER_CAUSE_SIZE = 18
_ORIGINAL = struct.Struct(">q")
_HALF = struct.Struct(">qIHHqIHIB")
_HALF_SIZE = 35
_OUTCOME = struct.Struct(">qBHB")
_OUTCOME_SIZE = 12
assert _HALF.size == _HALF_SIZE, "part of the disk format"
assert _OUTCOME.size == _OUTCOME_SIZE, "part of the disk format"
assert CAUSE.size == CAUSE_SIZE, "part of the disk format"
assert TARGET.size == TARGET_SIZE, "part of the disk format"
assert TIMER_CAUSE.size == TIMER_CAUSE_SIZE, "part of the disk format"


# Maximum head of a record before its blob; the sizes of origins and client ids are a u8.
HEAD_BYTES_MAX = PLACE_SIZE + _HALF_SIZE + 255 + _OUTCOME_SIZE + 255 + dedup.PART_BYTES_MAX
# Make a named tuple without a call of Python code: a start decodes millions of records.
_tuple = tuple.__new__
_pack_keyed = _KEYED_PLACE.pack


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


class OutcomeReason(IntEnum):
    """The result of a half message."""

    COMMITTED = 0
    EXPIRED = 1
    RECOVERED = 2  # of an expired one


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
    replays: int = 0  # of the message before this copy; otherwise, flag REPLAY is beside CAUSE


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


class HalfMessage(NamedTuple):
    """A half message: its target, its checks, and the client that sent it."""

    half_id: HalfId  # 0 in its first record
    topic_id: TopicId
    queue_id: QueueId
    checks: int  # that were written to a producer
    next_check_ms: int
    period_ms: int  # between two checks
    checks_max: int
    owner: int  # owner id of the client (`message.client_key`)
    client_id: str


class HalfOutcome(NamedTuple):
    """The half message that a message settles."""

    half_id: HalfId
    reason: int
    checks: int
    origin: str  # the target topic of an expired message; otherwise ""


class CommittedTimer(NamedTuple):
    """A committed half message that waits for its due time."""

    target: TimerTarget
    outcome: HalfOutcome


class RecoveredHalf(NamedTuple):
    """An expired half message that is open again."""

    half: HalfMessage
    outcome: HalfOutcome


KeyedCause: TypeAlias = TimerTarget | HalfMessage | RecoveredHalf


class KeyedMessage(NamedTuple):
    """A message with a dedup key; a plain message has no other cause."""

    cause: KeyedCause | None
    key: DedupKey


MessageCause: TypeAlias = (
    Cause
    | TimerTarget
    | SalvagedTimer
    | TimerCause
    | HalfMessage
    | HalfOutcome
    | CommittedTimer
    | RecoveredHalf
    | KeyedMessage
    | Replay
)


class MessageEntry(NamedTuple):
    """A MESSAGE record: a stored message, its position, and its cause."""

    topic_id: TopicId
    queue_id: QueueId
    attempts: int
    queue_offset: QueueOffset
    flags: int  # 0, or the flags that tell the type of `cause`
    cause: MessageCause | None
    blob: bytes | memoryview
    blob_crc: int


def encode(message: MessageEntry) -> bytes:
    """Encode the body of a MESSAGE record; its tail is the blob as it is."""
    return PLACE.pack(*message[:4]) + _encode_parts(message.cause)


def encode_keyed(topic_id: int, queue_id: int, queue_offset: int, key: DedupKey) -> bytes:
    """Encode the body of a MESSAGE record with KEYED alone, with one call."""
    hash_, body_crc, taken_at_ms, text = key
    size = len(text)
    return (
        _pack_keyed(topic_id, queue_id, 0, queue_offset, hash_, body_crc, taken_at_ms, size) + text
    )


def _encode_parts(cause: MessageCause | None) -> bytes:
    match cause:
        case None:
            return b""
        case KeyedMessage(other, key):
            return _encode_parts(other) + dedup.encode_part(key)
        case Cause():
            return encode_cause(cause)
        case Replay():
            return dead_letter.encode_replay(cause)
        case TimerTarget():
            return encode_target(cause)
        case TimerCause():
            return encode_timer_cause(cause)
        case HalfMessage():
            return _encode_half(cause)
        case HalfOutcome():
            return _encode_outcome(cause)
        case CommittedTimer(target, outcome):
            return encode_target(target) + _encode_outcome(outcome)
        case RecoveredHalf(half, outcome):
            return _encode_half(half) + _encode_outcome(outcome)
        case SalvagedTimer(target, log_offset):
            return encode_target(target) + _ORIGINAL.pack(log_offset)


def decode(body: bytes | memoryview, flags: int, blob: memoryview, blob_crc: int) -> MessageEntry:
    """Decode a MESSAGE record without copying the blob. Raises UnknownRecord."""
    if not flags:
        return _tuple(MessageEntry, (*PLACE.unpack_from(body), 0, None, blob, blob_crc))
    if flags & ~FLAGS_KNOWN:
        raise UnknownRecord(f"MESSAGE record with flags {flags}")
    if flags & FLAG_STUB:
        body = body[: -record.STUB_TAIL.size]
    decode_part = _DECODERS.get(flags & _FLAGS_OF_CAUSE)
    if decode_part is None:
        raise UnknownRecord(f"MESSAGE record with flags {flags}")
    cause = decode_part(body)
    if flags & FLAG_KEYED:
        cause = _decode_keyed(body, flags, cause)
    return MessageEntry._make((*PLACE.unpack_from(body), flags, cause, blob, blob_crc))


def encode_cause(cause: Cause) -> bytes:
    """Encode `cause` as it follows the position."""
    origin = cause.origin.encode()
    number = dead_letter.NUMBER.pack(cause.replays) if cause.replays else b""
    return CAUSE.pack(*cause[:-2], len(origin)) + origin + number


def decode_cause(body: bytes | memoryview) -> Cause:
    """Decode the cause in a message record's body, without the number of its replays."""
    *fields, origin_size = CAUSE.unpack_from(body, PLACE_SIZE)
    begin = PLACE_SIZE + CAUSE_SIZE
    return Cause._make((*fields, str(body[begin : begin + origin_size], "utf-8"), 0))


def decode_copy(body: bytes | memoryview) -> Cause:
    """Decode the cause of a copy of a replayed message."""
    cause = decode_cause(body)
    at = PLACE_SIZE + CAUSE_SIZE + len(cause.origin.encode())
    return cause._replace(replays=dead_letter.NUMBER.unpack_from(body, at)[0])


def decode_replay(body: bytes | memoryview) -> Replay:
    """Decode the dead letter that a message replays."""
    return dead_letter.decode_replay(body, PLACE_SIZE)


def copy_flags(cause: Cause) -> int:
    """Return the flags of a copy with a cause."""
    return FLAG_CAUSE | FLAG_REPLAY if cause.replays else FLAG_CAUSE


def source_of(body: bytes | memoryview, flags: int) -> Cause | Replay | None:
    """Return the original of a copy or a replay; None for another message."""
    if flags & FLAG_CAUSE:
        return decode_copy(body) if flags & FLAG_REPLAY else decode_cause(body)
    return decode_replay(body) if flags & FLAG_REPLAY else None


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


def _encode_half(half: HalfMessage) -> bytes:
    client_id = half.client_id.encode()
    return _HALF.pack(*half[:-1], len(client_id)) + client_id


def decode_half(body: bytes | memoryview) -> HalfMessage:
    """Decode the target, the checks and the client of a half message."""
    *fields, size = _HALF.unpack_from(body, PLACE_SIZE)
    begin = PLACE_SIZE + _HALF_SIZE
    return HalfMessage._make((*fields, str(body[begin : begin + size], "utf-8")))


def _encode_outcome(outcome: HalfOutcome) -> bytes:
    origin = outcome.origin.encode()
    return _OUTCOME.pack(*outcome[:-1], len(origin)) + origin


def decode_outcome(body: bytes | memoryview, at: int = PLACE_SIZE) -> HalfOutcome:
    """Decode the half message that a message settles."""
    *fields, size = _OUTCOME.unpack_from(body, at)
    begin = at + _OUTCOME_SIZE
    return HalfOutcome._make((*fields, str(body[begin : begin + size], "utf-8")))


def decode_committed_timer(body: bytes | memoryview) -> CommittedTimer:
    """Decode the target of a committed and delayed message, and the half message."""
    target = decode_target(body)
    at = PLACE_SIZE + TARGET_SIZE + len(target.origin.encode())
    return CommittedTimer(target, decode_outcome(body, at))


def _decode_recovered(body: bytes | memoryview) -> RecoveredHalf:
    half = decode_half(body)
    at = PLACE_SIZE + _HALF_SIZE + len(half.client_id.encode())
    return RecoveredHalf(half, decode_outcome(body, at))


def _decode_keyed(body: bytes | memoryview, flags: int, cause: MessageCause | None) -> KeyedMessage:
    """Add the dedup key of a message to its cause. Raises UnknownRecord."""
    match cause:
        case None:
            at = PLACE_SIZE
        case TimerTarget():
            at = PLACE_SIZE + TARGET_SIZE + len(cause.origin.encode())
        case HalfMessage():
            at = PLACE_SIZE + _HALF_SIZE + len(cause.client_id.encode())
        case RecoveredHalf(half, outcome):
            at = PLACE_SIZE + _HALF_SIZE + len(half.client_id.encode())
            at += _OUTCOME_SIZE + len(outcome.origin.encode())
        case _:
            raise UnknownRecord(f"MESSAGE record with flags {flags}")
    return KeyedMessage(cause, dedup.decode_part(body, at))


def key_of(body: bytes | memoryview, flags: int) -> DedupKey | None:
    """Return the dedup key of a MESSAGE record; None if it has none. Raises UnknownRecord."""
    if not flags & FLAG_KEYED:
        return None
    cause = decode(body, flags, memoryview(b""), 0).cause
    assert isinstance(cause, KeyedMessage), "the flag tells the type"
    return cause.key


# By the flags of a record, without KEYED and STUB. 0: a message without a cause.
_DECODERS: Final[dict[int, Callable[[bytes | memoryview], MessageCause | None]]] = {
    0: lambda _: None,
    FLAG_CAUSE: decode_cause,
    FLAG_CAUSE | FLAG_REPLAY: decode_copy,
    FLAG_REPLAY: decode_replay,
    FLAG_SCHEDULE: decode_target,
    FLAG_SCHEDULE | FLAG_REMAINS: decode_remains,
    FLAG_TIMER: decode_timer_cause,
    FLAG_HALF: decode_half,
    FLAG_OUTCOME: decode_outcome,
    FLAG_SCHEDULE | FLAG_OUTCOME: decode_committed_timer,
    FLAG_HALF | FLAG_OUTCOME: _decode_recovered,
}


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
