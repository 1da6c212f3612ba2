"""The body of an OPERATION record: a bulk change by operators begins or ends (ADR 0093).

    BEGUN         0      1         2               6              10             18
                 ┌──────┬─────────┬───────────────┬──────────────┬──────────────┬──────────┐
                 │ 1 u8 │ kind u8 │ subject_id u32│ topic_id u32 │ as_of_ms i64 │ begin i64│
                 └──────┴─────────┴───────────────┴──────────────┴──────────────┴──────────┘
                  26         34          38
                 ┌──────────┬───────────┬───────────────┐
                 │ end i64  │ total u32 │ rate_per_s u32│   tail: a JSON object
                 └──────────┴───────────┴───────────────┘
    ENDED         0      1                   9
                 ┌──────┬───────────────────┬──────────┐
                 │ 2 u8 │ operation_id  i64 │ state u8 │   tail: the reason of a failure, UTF-8
                 └──────┴───────────────────┴──────────┘
    ITEMS_FAILED  0      1                   9            17
                 ┌──────┬───────────────────┬────────────┬───────────┐
                 │ 3 u8 │ operation_id  i64 │ cursor i64 │ count u32 │   tail: a JSON array
                 └──────┴───────────────────┴────────────┴───────────┘

Big-endian. The log offset of BEGUN is the id of the operation. It changes the items from `begin`
and before `end` that match its filter and existed at `as_of_ms`: `total` of them, when it began.
`subject_id` is the consumer group of a change of dead letters. `topic_id` is the topic of the
items: a topic that is deleted and created again has other items. It is 0 for timers of all topics.
The JSON object has the filter, the change, the starter and the Idempotency-Key.

ITEMS_FAILED has items that match and cannot be changed. The cursor moves behind them. The JSON
array has the item and the outcome of each.

STATE records and snapshots have operations as JSON, with their cursors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeAlias, final

from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import UnknownRecord

_BEGUN = struct.Struct(">BBIIqqqII")
_BEGUN_SIZE = 42
_ENDED = struct.Struct(">BqB")
_ENDED_SIZE = 10
_FAILED = struct.Struct(">BqqI")
_FAILED_SIZE = 21
assert _BEGUN.size == _BEGUN_SIZE, "part of the disk format"
assert _ENDED.size == _ENDED_SIZE, "part of the disk format"
assert _FAILED.size == _FAILED_SIZE, "part of the disk format"
FAILURES_KEPT_MAX: Final = 100  # of one operation


class _Step(IntEnum):
    BEGUN = 1
    ENDED = 2
    ITEMS_FAILED = 3


class OperationKind(IntEnum):
    """What an operation does with each item."""

    REPLAY = 1  # of dead letters
    DISCARD = 2  # of dead letters
    CANCEL_TIMERS = 3
    RESCHEDULE_TIMERS = 4
    FIRE_TIMERS = 5


class OperationState(IntEnum):
    """The state of an operation. All states but RUNNING are final."""

    RUNNING = 1  # in no record of an end
    DONE = 2
    CANCELLED = 3
    FAILED = 4


class OperationBegun(NamedTuple):
    """An operation begins."""

    kind: int
    subject_id: int
    topic_id: int
    as_of_ms: int
    begin: int
    end: int
    total: int
    rate_per_s: int
    details: str  # JSON


class OperationEnded(NamedTuple):
    """An operation ends."""

    operation_id: LogOffset
    state: int
    error: str


class ItemFailure(NamedTuple):
    """An item that an operation could not change."""

    item: int  # its offset or timer id
    outcome: str


class ItemsFailed(NamedTuple):
    """Items that an operation could not change, in their order."""

    operation_id: LogOffset
    cursor: int  # behind them
    failures: list[ItemFailure]


OperationEntry: TypeAlias = OperationBegun | OperationEnded | ItemsFailed


@final
@dataclass(slots=True)
class Operation:
    """One operation, and how far it is."""

    id: LogOffset
    kind: int
    subject_id: int
    topic_id: int
    as_of_ms: int
    begin: int
    end: int
    total: int
    rate_per_s: int
    details: str
    begun_at_ms: int
    state: int = OperationState.RUNNING
    ended_at_ms: int = 0
    cursor: int = 0  # items before it are done
    done: int = 0
    error: str = ""
    failed: int = 0
    failures: list[ItemFailure] = field(default_factory=list)  # the first FAILURES_KEPT_MAX

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.state == OperationState.RUNNING


class StatedOperations(NamedTuple):
    """Operations that are stated again."""

    operations: list[Operation]


def encode(entry: OperationEntry) -> tuple[bytes, bytes]:
    """Return body and tail of an OPERATION record."""
    if isinstance(entry, OperationBegun):
        return _BEGUN.pack(_Step.BEGUN, *entry[:-1]), entry.details.encode()
    if isinstance(entry, ItemsFailed):
        count = len(entry.failures)
        body = _FAILED.pack(_Step.ITEMS_FAILED, entry.operation_id, entry.cursor, count)
        return body, json.dumps(entry.failures).encode()
    body = _ENDED.pack(_Step.ENDED, entry.operation_id, entry.state)
    return body, entry.error.encode()


def decode(body: bytes | memoryview, tail: bytes | memoryview) -> OperationEntry:
    """Decode an OPERATION record. Raises UnknownRecord."""
    text = str(bytes(tail), "utf-8")
    try:
        match body[0]:
            case _Step.BEGUN:
                found = OperationBegun._make((*_BEGUN.unpack(body)[1:], text))
            case _Step.ENDED:
                return OperationEnded._make((*_ENDED.unpack(body)[1:], text))
            case _Step.ITEMS_FAILED:
                _, id_, cursor, _ = _FAILED.unpack(body)
                return ItemsFailed(id_, cursor, [ItemFailure(*each) for each in json.loads(text)])
            case step:
                raise UnknownRecord(f"OPERATION record with step {step}")
    except (struct.error, IndexError) as error:
        raise UnknownRecord("OPERATION record of another size") from error
    if found.kind not in set(OperationKind):
        raise UnknownRecord(f"OPERATION record of an operation of kind {found.kind}")
    return found


def encode_operations(operations: Iterable[Operation]) -> bytes:
    """Encode operations, as a STATE record and a section of a snapshot have them."""
    return json.dumps([asdict(one) for one in operations]).encode()


def decode_operations(data: bytes | memoryview) -> StatedOperations:
    """Decode operations. Raises UnknownRecord for unknown fields."""
    try:
        return StatedOperations([_operation_of(fields) for fields in json.loads(bytes(data))])
    except (TypeError, KeyError) as error:
        raise UnknownRecord(f"an operation with other fields: {error}") from error


def _operation_of(fields: dict[str, Any]) -> Operation:
    failures = [ItemFailure(*each) for each in fields.pop("failures")]
    return Operation(**fields, failures=failures)
