"""The body of a RENEW record: deliveries of one client get another deadline.

     0                  8        9         10           10 + size
    ┌──────────────────┬────────┬─────────┬────────────┬──────────┬─────────────────┐
    │ visible_at_ms i64│ why u8 │ size u8 │ client id  │ slot u32 │ delivery_id i64 │ x n
    └──────────────────┴────────┴─────────┴────────────┴──────────┴─────────────────┘

Big-endian. Values of why:

    1 EXTENDED          the client is alive and works on the messages
    2 CLIENT_ENDED      the client has ended: its deliveries are given back
    3 CLIENT_SILENT     the client is silent: its deliveries are given back
    4 NOT_HANDED_OVER   the client may not have the deliveries: they are not renewed
    5 HANDED_OVER       the client has them after all: they are renewed again
    6 DISCONNECTED      the client has no connection left: unless it returns, the deadline stays

Messages that are already settled do not change. The tail starts with the live messages of each
entry, in order, as bits of a u32. Then it has the rows (`layout.delivery_rows`) of those deliveries
whose CK is in no segment.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from tidemill.broker.engine.layout.record import UnknownRecord

HEAD = struct.Struct(">qBB")
HEAD_SIZE = 10  # bytes
ENTRY = struct.Struct(">Iq")
ENTRY_SIZE = 12  # bytes
assert (HEAD.size, ENTRY.size) == (HEAD_SIZE, ENTRY_SIZE), "part of the disk format"
LIVE_SIZE = 4  # bytes
ENTRIES_MAX = 2_048  # of one record: its head stays below 64 KiB, the maximum of head_size


class RenewalReason(IntEnum):
    """The reason for another deadline."""

    EXTENDED = 1
    CLIENT_ENDED = 2
    CLIENT_SILENT = 3
    NOT_HANDED_OVER = 4
    HANDED_OVER = 5
    DISCONNECTED = 6


_REASONS = frozenset(map(int, RenewalReason))


class Renewal(NamedTuple):
    """A RENEW record's body, decoded; the entries are (slot, delivery id)."""

    visible_at_ms: int
    why: RenewalReason
    client_id: str
    entries: list[tuple[int, int]]


def encode(renewal: Renewal) -> bytes:
    """Encode the body of a RENEW record."""
    visible_at_ms, why, client_id, entries = renewal
    encoded, pack = client_id.encode(), ENTRY.pack
    head = HEAD.pack(visible_at_ms, why, len(encoded)) + encoded
    return head + b"".join([pack(slot, delivery_id) for slot, delivery_id in entries])


def encode_live(live: Sequence[int]) -> bytes:
    """Encode the live messages of each delivery, the beginning of the tail."""
    return struct.pack(f">{len(live)}I", *live)


def decode_live(tail: bytes | memoryview, entry_count: int) -> Sequence[int]:
    """Decode the live messages of each delivery."""
    return struct.unpack_from(f">{entry_count}I", tail)


def decode(body: bytes | memoryview) -> Renewal:
    """Decode the body of a RENEW record. Raises UnknownRecord."""
    visible_at_ms, why, size = HEAD.unpack_from(body)
    if why not in _REASONS:
        raise UnknownRecord(f"RENEW record with reason {why}")
    end = HEAD_SIZE + size
    client_id = str(body[HEAD_SIZE:end], "utf-8", "replace")
    return Renewal(
        visible_at_ms, RenewalReason(why), client_id, list(ENTRY.iter_unpack(body[end:]))
    )
