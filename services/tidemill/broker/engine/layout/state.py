"""A STATE record: facts of an old segment, repeated before retention removes that segment.

A start also states the deliveries that it brings back from the future: visible_at_ms and
popped_at_ms of their rows are valid from this record on. If an operator releases ordered
deliveries, a STATE record has their rows with the flag RELEASED.

0         1 (the record's tail)
┌─────────┬──────────────────────────────────────────────────────────────┐
│ what u8 │ 1 CONFIG      one configuration item (`layout.config`)        │
│         │ 2 QUEUES      JSON [[topic_id, queue_id, end offset], ...]    │
│         │ 3 PROGRESS    how far groups are (`layout.progress_rows`)     │
│         │ 4 DELIVERIES  live deliveries (`layout.delivery_rows`)        │
│         │ 5 KEYS        rows of dedup keys (`layout.dedup`)             │
│         │ 8 AUDIT       records of the audit log (`layout.audit`)       │
│         │ 9 LETTERS     settled dead letters (`layout.dead_letter`)     │
│         │ 10 OPERATIONS operations with their cursors (`layout.operation`) │
└─────────┴──────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

from tidemill.broker.engine.layout import (
    audit,
    config,
    dead_letter,
    dedup,
    delivery_rows,
    operation,
    progress_rows,
)
from tidemill.broker.engine.layout.audit import AuditRow
from tidemill.broker.engine.layout.dead_letter import StatedLetters
from tidemill.broker.engine.layout.dedup import StatedKeys
from tidemill.broker.engine.layout.delivery_rows import DeliveryRows
from tidemill.broker.engine.layout.numbers import QueueId, QueueOffset, TopicId
from tidemill.broker.engine.layout.operation import StatedOperations
from tidemill.broker.engine.layout.progress_rows import ProgressRow
from tidemill.broker.engine.layout.record import UnknownRecord


class StateKind(IntEnum):
    """The content of a STATE record: the first byte of its body."""

    CONFIG = 1
    QUEUES = 2
    PROGRESS = 3
    DELIVERIES = 4
    KEYS = 5  # feature level 4
    AUDIT = 8  # feature level 3
    LETTERS = 9  # feature level 5
    OPERATIONS = 10  # feature level 5


class StatedConfig(NamedTuple):
    """One configuration item."""

    item: dict[str, Any]


class StatedQueues(NamedTuple):
    """Ends of queues: (topic id, queue id, offset of the next message)."""

    ends: list[tuple[TopicId, QueueId, QueueOffset]]


class StatedProgress(NamedTuple):
    """Progress of groups in some queues."""

    rows: list[ProgressRow]


class StatedDeliveries(NamedTuple):
    """Live deliveries."""

    deliveries: DeliveryRows


class StatedAudit(NamedTuple):
    """Records of the audit log."""

    rows: list[AuditRow]


State: TypeAlias = (
    StatedConfig
    | StatedQueues
    | StatedProgress
    | StatedDeliveries
    | StatedAudit
    | StatedKeys
    | StatedLetters
    | StatedOperations
)


def encode(state: State) -> tuple[bytes, bytes]:
    """Return body and tail of a STATE record."""
    match state:
        case StatedConfig(item):
            return bytes([StateKind.CONFIG]), config.encode_item(item)
        case StatedQueues(ends):
            return bytes([StateKind.QUEUES]), json.dumps(ends).encode()
        case StatedProgress(rows):
            return bytes([StateKind.PROGRESS]), progress_rows.encode(rows)
        case StatedDeliveries(deliveries):
            return bytes([StateKind.DELIVERIES]), delivery_rows.encode(deliveries)
        case StatedAudit(rows):
            return bytes([StateKind.AUDIT]), audit.encode_rows(rows)
        case StatedKeys(rows):
            return bytes([StateKind.KEYS]), dedup.encode_stated(rows)
        case StatedOperations(operations):
            return bytes([StateKind.OPERATIONS]), operation.encode_operations(operations)
        case StatedLetters(topic_id, ranges):
            return bytes([StateKind.LETTERS]), dead_letter.encode_ranges(topic_id, ranges)


def decode(body: bytes | memoryview, tail: bytes | memoryview) -> State:
    """Decode a STATE record. Raises UnknownRecord."""
    match body[0]:
        case StateKind.CONFIG:
            return StatedConfig(config.decode_item(tail))
        case StateKind.QUEUES:
            return StatedQueues([(row[0], row[1], row[2]) for row in json.loads(bytes(tail))])
        case StateKind.PROGRESS:
            return StatedProgress(progress_rows.decode(tail))
        case StateKind.DELIVERIES:
            return StatedDeliveries(delivery_rows.decode(tail))
        case StateKind.AUDIT:
            return StatedAudit(audit.decode_rows(tail))
        case StateKind.KEYS:
            return dedup.decode_stated(tail)
        case StateKind.OPERATIONS:
            return operation.decode_operations(tail)
        case StateKind.LETTERS:
            return dead_letter.decode_ranges(tail)
        case what:
            raise UnknownRecord(f"STATE record of kind {what}")
