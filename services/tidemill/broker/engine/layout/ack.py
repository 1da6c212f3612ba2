"""The body of an ACK record: the acks of one round, one entry per pop checkpoint.

     0          4                 12             16
    ┌──────────┬─────────────────┬──────────────┐
    │ slot u32 │ delivery_id i64 │ bits     u32 │  x n, big-endian
    └──────────┴─────────────────┴──────────────┘

Bit i set: message i of the delivery is settled. Acks of one checkpoint in one record share an entry
(a batch ack in the reference).

Flag EXPIRED in the record's header: retention removed these messages, and no client acked them.
Flag KEPT: these messages have no attempt left and stay in the dead-letter topic that they are in.

The optional tail has the rows (`layout.delivery_rows`) of deliveries whose CK is in no segment.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

ENTRY = struct.Struct(">IqI")
SIZE = 16  # bytes
assert ENTRY.size == SIZE, "part of the disk format"
FLAG_EXPIRED = 1
FLAG_KEPT = 2
ENTRIES_MAX = 2048  # of one record: its head stays below 64 KiB, the maximum of head_size


class Acks(NamedTuple):
    """The entries (slot, delivery id, bits) of one ACK record."""

    entries: list[tuple[int, int, int]]
    flags: int = 0


def encode(acks: Acks) -> bytes:
    """Encode the body of an ACK record."""
    pack = ENTRY.pack
    return b"".join([pack(slot, delivery_id, bits) for slot, delivery_id, bits in acks.entries])


def decode(body: bytes | memoryview) -> Acks:
    """Decode the body of an ACK record."""
    return Acks(list(ENTRY.iter_unpack(body)))
