"""Bodies of TRANSACTION records, and the rows of a table of transactions (ADR 0085).

    CHECKED       0      1              9            11
                 ┌──────┬──────────────┬────────────┬────────────────────┐
                 │ 1 u8 │ half_id  i64 │ checks u16 │ next_check_ms  i64 │
                 └──────┴──────────────┴────────────┴────────────────────┘
    ROLLED_BACK   0      1              9
                 ┌──────┬──────────────┬──────────┐
                 │ 2 u8 │ half_id  i64 │ actor u8 │   big-endian
                 └──────┴──────────────┴──────────┘

`checks` counts the checks that were written to a producer, with this one.

A row of the table, in snapshots and in memory:

     0              8                16             24             28              32
    ┌──────────────┬────────────────┬──────────────┬──────────────┬───────────────┬────────────┐
    │ half_id  i64 │ log_offset i64 │ time_ms  i64 │ topic_id u32 │ period_ms u32 │ checks u16 │
    └──────────────┴────────────────┴──────────────┴──────────────┴───────────────┴────────────┘
     34              35
    ┌───────────────┬──────────┐
    │ checks_max u8 │ state u8 │
    └───────────────┴──────────┘

log_offset is that of the newest record with the half message, or of the record that ended it.
time_ms is the time of the next check, or of the end.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from tidemill.broker.engine.layout.numbers import HalfId, LogOffset, TopicId
from tidemill.broker.engine.layout.record import UnknownRecord

CHECKS_MAX = 100  # that a policy may ask for; a row has one byte for it
_CHECKED = struct.Struct(">BqHq")
_CHECKED_SIZE = 19
_ROLLED_BACK = struct.Struct(">BqB")
_ROLLED_BACK_SIZE = 10
ROW = struct.Struct(">qqqIIHBB")
ROW_SIZE = 36
assert _CHECKED.size == _CHECKED_SIZE, "part of the disk format"
assert _ROLLED_BACK.size == _ROLLED_BACK_SIZE, "part of the disk format"
assert ROW.size == ROW_SIZE, "part of the disk format"

ROW_DTYPE = np.dtype(
    [
        ("half_id", ">i8"),
        ("log_offset", ">i8"),
        ("time_ms", ">i8"),
        ("topic_id", ">u4"),
        ("period_ms", ">u4"),
        ("checks", ">u2"),
        ("checks_max", "u1"),
        ("state", "u1"),
    ]
)
assert ROW_DTYPE.itemsize == ROW_SIZE, "the array form is the row"


class _Operation(IntEnum):
    CHECKED = 1
    ROLLED_BACK = 2


class TransactionActor(IntEnum):
    """The caller that rolled a half message back."""

    CLIENT = 1
    OPERATOR = 2


class TransactionState(IntEnum):
    """The state of a transaction. All states but HALF are final for its id."""

    HALF = 1
    COMMITTED = 2
    ROLLED_BACK = 3
    EXPIRED = 4
    RECOVERED = 5  # after EXPIRED: the message is a half message again, under a new id


class CheckWritten(NamedTuple):
    """A check of a half message was written to a producer's stream."""

    half_id: HalfId
    checks: int
    next_check_ms: int


class RolledBack(NamedTuple):
    """A half message was rolled back."""

    half_id: HalfId
    actor: int


class TransactionRow(NamedTuple):
    """One transaction."""

    half_id: HalfId
    log_offset: LogOffset
    time_ms: int
    topic_id: TopicId
    period_ms: int
    checks: int
    checks_max: int
    state: int


def encode(entry: CheckWritten | RolledBack) -> bytes:
    """Encode the body of a TRANSACTION record."""
    if isinstance(entry, CheckWritten):
        return _CHECKED.pack(_Operation.CHECKED, *entry)
    return _ROLLED_BACK.pack(_Operation.ROLLED_BACK, *entry)


def decode(body: bytes | memoryview) -> CheckWritten | RolledBack:
    """Decode the body of a TRANSACTION record. Raises UnknownRecord."""
    match body[0]:
        case _Operation.CHECKED:
            return CheckWritten._make(_CHECKED.unpack(body)[1:])
        case _Operation.ROLLED_BACK:
            return RolledBack._make(_ROLLED_BACK.unpack(body)[1:])
        case operation:
            raise UnknownRecord(f"TRANSACTION record with operation {operation}")
