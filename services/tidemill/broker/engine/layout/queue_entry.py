"""One entry of a consume queue: the position of a message in the commit log.

     0                 8          12                20
    ┌─────────────────┬──────────┬─────────────────┐
    │ log_offset  i64 │ size u32 │ tag_hash    i64 │   big-endian
    └─────────────────┴──────────┴─────────────────┘

Entry n of a queue starts at byte n * SIZE, so a queue offset is an index, never a search. An entry
has no checksum: the commit log is the truth, and the broker rebuilds the queue from it.
"""

from __future__ import annotations

import struct

ENTRY = struct.Struct(">qIq")
SIZE = 20  # bytes
assert ENTRY.size == SIZE, "the consume queue entry is part of the disk format"
