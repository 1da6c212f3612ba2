"""The replica state: the durable facts beside a replica's log, in two alternating copies.

     0            4            8                12               20                28
    ┌────────────┬────────────┬────────────────┬────────────────┬─────────────────┬────────────┐
    │ magic  u32 │ crc32  u32 │ generation u32 │ epoch_seen i64 │ confirm     i64 │ count  u32 │
    └────────────┴────────────┴────────────────┴────────────────┴─────────────────┴────────────┘
     32
    ┌──────────────────────────────────────┐
    │ count entries: epoch i64, start  i64 │
    └──────────────────────────────────────┘

Big-endian. The intact copy with the higher generation is valid. The crc covers all bytes after it.
`confirm` is at most the confirm offset. Entries of the epoch journal that begin at or after the end
of the log are ignored.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

MAGIC = 0x544D5253  # "TMRS"
_PREFIX = struct.Struct(">II")
_FIELDS = struct.Struct(">IqqI")
_ENTRY = struct.Struct(">qq")
FIELDS_SIZE = 32
assert _PREFIX.size + _FIELDS.size == FIELDS_SIZE, "part of the disk format"


class ReplicaState(NamedTuple):
    """The replica state, decoded."""

    generation: int = 0
    epoch_seen: int = 0
    confirm: int = 0
    journal: tuple[tuple[int, int], ...] = ()  # (epoch, log offset of its first record)


def encode(state: ReplicaState) -> bytes:
    """Encode a copy."""
    *fields, _ = state
    entries = b"".join(_ENTRY.pack(*entry) for entry in state.journal)
    body = _FIELDS.pack(*fields, len(state.journal)) + entries
    return _PREFIX.pack(MAGIC, crc32(body)) + body


def find(data: bytes | None) -> ReplicaState | None:
    """Decode a copy; return None if it is missing, torn or damaged."""
    if data is None or len(data) < FIELDS_SIZE:
        return None
    magic, crc = _PREFIX.unpack_from(data)
    generation, epoch_seen, confirm, count = _FIELDS.unpack_from(data, _PREFIX.size)
    end = FIELDS_SIZE + count * _ENTRY.size
    if magic != MAGIC or end > len(data) or crc32(data[_PREFIX.size : end]) != crc:
        return None
    journal = tuple(_ENTRY.iter_unpack(data[FIELDS_SIZE:end]))
    return ReplicaState(generation, epoch_seen, confirm, journal)
