"""The identity of the store on a replica's volume. An emptied store gets another one.

     0            4           8
    ┌────────────┬───────────┬────────────────────┐
    │ magic  u32 │ crc32 u32 │ store uuid 16 bytes │
    └────────────┴───────────┴────────────────────┘

Big-endian; the crc covers the uuid. Written once, at the first use of the volume.
"""

from __future__ import annotations

import struct
from zlib import crc32

MAGIC = 0x544D5549  # "TMUI"
UUID_SIZE = 16  # bytes
FIELDS = struct.Struct(">II16s")
SIZE = 24
assert FIELDS.size == SIZE, "part of the disk format"


def encode(store_uuid: bytes) -> bytes:
    """Encode the file."""
    return FIELDS.pack(MAGIC, crc32(store_uuid), store_uuid)


def find(data: bytes | None) -> bytes | None:
    """Decode the file; return None if it is missing or damaged."""
    if data is None or len(data) != SIZE:
        return None
    magic, crc, store_uuid = FIELDS.unpack(data)
    return bytes(store_uuid) if magic == MAGIC and crc == crc32(store_uuid) else None
