"""The AUDIT record: one change by an operator, directly before the change itself (level 3).

     0              8     (end of the body; the tail follows)
    ┌──────────────┬────────────────────────────────────┐
    │ sequence  u64│ fields: a JSON object               │  big-endian
    └──────────────┴────────────────────────────────────┘

The time of the change is that of the record. The next record is the first one of the change. If it
is EPOCH_START, the change was not applied, and the AUDIT record does not count (ADR 0072).

Snapshots and STATE records have rows, one for each record of the audit log:

     0              8              16         17           21
    ┌──────────────┬──────────────┬──────────┬────────────┬────────────────┐
    │ sequence  u64│ at_ms     i64│ flags  u8│ size    u32│ fields         │  x n
    └──────────────┴──────────────┴──────────┴────────────┴────────────────┘

Flag OPEN: the next record of the log decides whether the change was applied.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from tidemill.broker.engine.layout.record import UnknownRecord

SEQUENCE = struct.Struct(">Q")
ROW = struct.Struct(">QqBI")
ROW_SIZE: Final = 21  # bytes, without the fields
assert ROW.size == ROW_SIZE, "part of the disk format"
FLAG_OPEN: Final = 1


class Audit(NamedTuple):
    """An AUDIT record, decoded."""

    sequence: int
    fields: bytes  # a JSON object


class AuditRow(NamedTuple):
    """A record of the audit log in a snapshot or a STATE record."""

    sequence: int
    at_ms: int  # Unix
    fields: bytes
    is_open: bool = False


def encode(audit: Audit) -> tuple[bytes, bytes]:
    """Return body and tail of an AUDIT record."""
    return SEQUENCE.pack(audit.sequence), audit.fields


def decode(body: bytes | memoryview, tail: bytes | memoryview) -> Audit:
    """Decode an AUDIT record."""
    return Audit(SEQUENCE.unpack(body)[0], bytes(tail))


def encode_rows(rows: Sequence[AuditRow]) -> bytes:
    """Encode rows of the audit log."""
    return b"".join(
        [
            ROW.pack(row.sequence, row.at_ms, FLAG_OPEN if row.is_open else 0, len(row.fields))
            + row.fields
            for row in rows
        ]
    )


def decode_rows(data: bytes | memoryview) -> list[AuditRow]:
    """Decode rows of the audit log. Raises UnknownRecord."""
    rows, at = [], 0
    while at < len(data):
        sequence, at_ms, flags, size = ROW.unpack_from(data, at)
        if flags & ~FLAG_OPEN:
            raise UnknownRecord(f"audit row with flags {flags}")
        at += ROW_SIZE
        rows.append(AuditRow(sequence, at_ms, bytes(data[at : at + size]), bool(flags)))
        at += size
    return rows
