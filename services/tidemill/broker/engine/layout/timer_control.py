"""Bodies of TIMER and FRONTIER records: changes of timers without a message.

    TIMER     0        1              9               17                  25
             ┌────────┬──────────────┬───────────────┬───────────────────┬──────────────────┐
             │ op  u8 │ timer_id i64 │ due_at_ms i64 │ new_due_at_ms i64 │ operation_id u64 │
             └────────┴──────────────┴───────────────┴───────────────────┴──────────────────┘
    FRONTIER  0                 8
             ┌─────────────────┐
             │ frontier_ms i64 │   big-endian
             └─────────────────┘

due_at_ms is the previous due time. new_due_at_ms is 0 for a cancel. Only a change by a bulk
operation has operation_id (ADR 0098). Earlier records settle every timer that is due up to
frontier_ms.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from tidemill.broker.engine.layout.numbers import TimerId
from tidemill.broker.engine.layout.record import UnknownRecord

_CONTROL = struct.Struct(">Bqqq")
CONTROL_SIZE = 25  # bytes
_OF_OPERATION = struct.Struct(">BqqqQ")
OF_OPERATION_SIZE = 33  # bytes
_FRONTIER = struct.Struct(">q")
assert _CONTROL.size == CONTROL_SIZE, "part of the disk format"
assert _OF_OPERATION.size == OF_OPERATION_SIZE, "part of the disk format"


class TimerOperation(IntEnum):
    """The kinds of changes."""

    CANCEL = 1
    RESCHEDULE = 2


_OPERATIONS = frozenset(map(int, TimerOperation))


class TimerControl(NamedTuple):
    """A TIMER record's body, decoded."""

    operation: int
    timer_id: TimerId
    due_at_ms: int
    new_due_at_ms: int
    operation_id: int = 0  # of a bulk operation; 0: none


class Frontier(NamedTuple):
    """A FRONTIER record's body, decoded."""

    frontier_ms: int


def encode(control: TimerControl) -> bytes:
    """Encode the body of a TIMER record."""
    return _OF_OPERATION.pack(*control) if control.operation_id else _CONTROL.pack(*control[:-1])


def decode(body: bytes | memoryview) -> TimerControl:
    """Decode the body of a TIMER record. Raises UnknownRecord."""
    layout = {CONTROL_SIZE: _CONTROL, OF_OPERATION_SIZE: _OF_OPERATION}.get(len(body))
    if layout is None:
        raise UnknownRecord(f"TIMER record with {len(body)} bytes")
    control = TimerControl(*layout.unpack(body))
    if control.operation not in _OPERATIONS:
        raise UnknownRecord(f"TIMER record with operation {control.operation}")
    return control


def encode_frontier(frontier: Frontier) -> bytes:
    """Encode the body of a FRONTIER record."""
    return _FRONTIER.pack(frontier.frontier_ms)


def decode_frontier(body: bytes | memoryview) -> Frontier:
    """Decode the body of a FRONTIER record."""
    return Frontier._make(_FRONTIER.unpack(body))
