"""The body of an ACK record: the acks of one round, one entry a pop checkpoint.

     0          4                 12             16
    ┌──────────┬─────────────────┬──────────────┐
    │ slot u32 │ delivery_id i64 │ bits     u32 │  x n, big-endian
    └──────────┴─────────────────┴──────────────┘

Bit i set: message i of the delivery is settled. Acks of one checkpoint in one round share an entry
(the reference's batch ack).
"""

from __future__ import annotations

import struct

ENTRY = struct.Struct(">IqI")
SIZE = 16  # bytes
assert ENTRY.size == SIZE, "part of the disk format"
ENTRIES_MAX = 2048  # of one record: its head stays below the 64 KiB that head_size can say
