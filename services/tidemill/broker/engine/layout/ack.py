"""The body of an ACK record: acks of one round, one entry a pop checkpoint.

     0          4                 12             16
    ┌──────────┬─────────────────┬──────────────┐
    │ slot u32 │ delivery_id i64 │ bits     u32 │  x n, big-endian
    └──────────┴─────────────────┴──────────────┘

Bit i set: message i of the delivery is settled. Acks of one checkpoint in one record share an entry
(the reference's batch ack).

Flag EXPIRED in the record's header: what it settles was not acked by its clients; retention has
taken it. The tail, where there is one, is the rows (`layout.delivery_rows`) of those deliveries of
the record whose CK is in no segment any more.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

ENTRY = struct.Struct(">IqI")
SIZE = 16  # bytes
assert ENTRY.size == SIZE, "part of the disk format"
FLAG_EXPIRED = 1
ENTRIES_MAX = 2048  # of one record: its head stays below the 64 KiB that head_size can say


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
