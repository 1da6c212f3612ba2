"""Sections of a snapshot: parts of the state, each with the log offset that it covers.

A snapshot is a block file (`layout.block_file`, magic "TMS1"). In a directory row, key_1 is the
kind of the section and key_2 its number. The section contains everything before the log offset
`first`.

    1 CATALOG     JSON array of configuration items (`layout.config`); all of one moment
    2 QUEUES      JSON [[topic_id, queue_id, end offset, stated_at], ...]; covers the file's begin;
                  the row of a queue that was trimmed has a fifth number, the low (level 2)
    3 PROGRESS    progress of groups in some queues that are not ordered (`layout.progress_rows`)
    4 ORDERED     one ordered queue and its deliveries, as of one moment:

         0         4            4 + size
        ┌─────────┬────────────┬──────────────────────────────────────┐
        │ size u32│ progress of│ its deliveries (`delivery_rows`)      │
        │         │ one queue  │                                      │
        └─────────┴────────────┴──────────────────────────────────────┘

    5 DELIVERIES  the used slots among SLOTS_A_SLICE of the delivery table (`layout.delivery_rows`),
                  without live ordered deliveries; the number is that of the slice
    7 AUDIT       records of the audit log (`layout.audit`), of the moment of the catalog (level 3)
    8 TRANSACTIONS
                  rows of the table of transactions (`layout.transaction`), of the moment of the
                  catalog (level 4)
    9 KEYS        rows of the dedup keys of one topic (`layout.dedup`), of the moment of the catalog
                  (level 4)
   11 LETTERS     settled dead letters of one topic (`layout.dead_letter`), of the moment of the
                  catalog (level 5)
   12 OPERATIONS  operations with their cursors (`layout.operation`), of the moment of the catalog
                  (level 5)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from tidemill.broker.engine.layout import delivery_rows, progress_rows
from tidemill.broker.engine.layout.delivery_rows import DeliveryRows
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.layout.progress_rows import ProgressRow

SLOTS_A_SLICE = 2048  # of the delivery table in one section: encoded in less than a millisecond


class SnapshotSection(IntEnum):
    """The kinds of sections."""

    CATALOG = 1
    QUEUES = 2
    PROGRESS = 3
    ORDERED = 4
    DELIVERIES = 5
    AUDIT = 7
    TRANSACTIONS = 8
    KEYS = 9
    LETTERS = 11
    OPERATIONS = 12


class QueueEnd(NamedTuple):
    """The end of a queue, and the record that states it."""

    topic_id: TopicId
    queue_id: QueueId
    end_offset: int
    stated_at: int
    low: int = 0  # messages before it are dead


def encode_items(items: Sequence[dict[str, Any] | bytes]) -> bytes:
    """Encode a CATALOG section; items may be encoded already."""
    encoded = [item if isinstance(item, bytes) else json.dumps(item).encode() for item in items]
    return b"[" + b", ".join(encoded) + b"]"


def decode_items(data: bytes | memoryview) -> list[dict[str, Any]]:
    """Decode a CATALOG section."""
    items: list[dict[str, Any]] = json.loads(bytes(data))
    return items


def encode_ends(ends: Sequence[tuple[int, ...]]) -> bytes:
    """Encode a QUEUES section from tuples with the fields of `QueueEnd`."""
    return json.dumps(ends).encode()


def decode_ends(data: bytes | memoryview) -> list[QueueEnd]:
    """Decode a QUEUES section."""
    return [QueueEnd(*fields) for fields in json.loads(bytes(data))]


def encode_ordered(row: ProgressRow, deliveries: DeliveryRows) -> bytes:
    """Encode an ORDERED section."""
    fields = progress_rows.encode([row])
    return len(fields).to_bytes(4, "big") + fields + delivery_rows.encode(deliveries)


def decode_ordered(data: bytes | memoryview) -> tuple[list[ProgressRow], DeliveryRows]:
    """Decode an ORDERED section."""
    end = 4 + int.from_bytes(data[:4], "big")
    return progress_rows.decode(data[4:end]), delivery_rows.decode(data[end:])
