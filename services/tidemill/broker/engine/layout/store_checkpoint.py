"""The checkpoint file: how far the derived files are durable.

     0            4             8                    16                   24               32
    ┌────────────┬─────────────┬────────────────────┬────────────────────┬────────────────┐
    │ magic  u32 │ version u32 │ derived_offset i64 │ durable_offset i64 │ min_offset i64 │
    └────────────┴─────────────┴────────────────────┴────────────────────┴────────────────┘
     32          36          40
    ┌───────────┬───────────┐
    │ epoch u32 │ crc32 u32 │
    └───────────┴───────────┘

Queue and index files describe everything before derived_offset. The newest snapshot begins there,
and so does the replay. At the time of the write, the log was durable up to durable_offset, its
epoch was `epoch`, and it began, or was about to begin, at min_offset. The crc covers the 36 bytes
before it. Big-endian. The file is written to `checkpoint.new`, synced, and renamed.
Then `checkpoint.new` is created again, with zeros: on a full disk the next one needs no block.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

MAGIC = 0x544D4331  # "TMC1"
VERSION = 1
FIELDS = struct.Struct(">IIqqqI")
SIZE = FIELDS.size + 4
assert SIZE == 40, "part of the disk format"


class StoreCheckpoint(NamedTuple):
    """The checkpoint file, decoded."""

    derived_offset: int
    durable_offset: int
    min_offset: int
    epoch: int


def encode(checkpoint: StoreCheckpoint) -> bytes:
    """Encode the checkpoint file."""
    fields = FIELDS.pack(MAGIC, VERSION, *checkpoint)
    return fields + crc32(fields).to_bytes(4, "big")


def find(data: bytes | None) -> StoreCheckpoint | None:
    """Decode a checkpoint file; return None if it is missing or damaged."""
    if data is None or len(data) != SIZE:
        return None
    magic, version, *fields = FIELDS.unpack_from(data)
    if (magic, version) != (MAGIC, VERSION) or crc32(data[:-4]) != int.from_bytes(data[-4:], "big"):
        return None
    return StoreCheckpoint._make(fields)
