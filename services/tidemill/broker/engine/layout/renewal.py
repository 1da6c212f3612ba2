"""The body of a RENEW record: deliveries of one client run out at another time than was said.

     0                  8        9         10           10 + size
    ┌──────────────────┬────────┬─────────┬────────────┬──────────┬─────────────────┐
    │ visible_at_ms i64│ why u8 │ size u8 │ client id  │ slot u32 │ delivery_id i64 │ x n
    └──────────────────┴────────┴─────────┴────────────┴──────────┴─────────────────┘

Big-endian. why: 1 EXTENDED, the client lives and is at work; 2 CLIENT_ENDED and 3 CLIENT_SILENT,
what it held is given back and renews no more; 4 NOT_HANDED_OVER, perhaps the client never got it,
so it renews no more; 5 HANDED_OVER, the client has it after all, and it renews again. What is
settled by then stays as it is.

The tail says what that leaves: for each entry in order its live messages, as bits in a u32; and
behind them the rows (`layout.delivery_rows`) of those deliveries whose CK is in no segment any
more, where there are such.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

HEAD = struct.Struct(">qBB")
HEAD_SIZE = 10  # bytes
ENTRY = struct.Struct(">Iq")
ENTRY_SIZE = 12  # bytes
assert (HEAD.size, ENTRY.size) == (HEAD_SIZE, ENTRY_SIZE), "part of the disk format"
LIVE_SIZE = 4  # bytes
ENTRIES_MAX = 2_048  # of one record: its head stays below the 64 KiB that head_size can say


class RenewalReason(IntEnum):
    """Why a deadline moves."""

    EXTENDED = 1
    CLIENT_ENDED = 2
    CLIENT_SILENT = 3
    NOT_HANDED_OVER = 4
    HANDED_OVER = 5


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
    """Encode which messages of each delivery are live, as the tail begins."""
    return struct.pack(f">{len(live)}I", *live)


def decode_live(tail: bytes | memoryview, entry_count: int) -> Sequence[int]:
    """Decode which messages of each delivery are live."""
    return struct.unpack_from(f">{entry_count}I", tail)


def decode(body: bytes | memoryview) -> Renewal:
    """Decode the body of a RENEW record."""
    visible_at_ms, why, size = HEAD.unpack_from(body)
    end = HEAD_SIZE + size
    client_id = str(body[HEAD_SIZE:end], "utf-8", "replace")
    return Renewal(
        visible_at_ms, RenewalReason(why), client_id, list(ENTRY.iter_unpack(body[end:]))
    )
