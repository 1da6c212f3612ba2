"""The replica state: what of a replica must survive beside its log, in two alternating copies.

     0            4            8                12               20                28
    ┌────────────┬────────────┬────────────────┬────────────────┬─────────────────┬──────────────┐
    │ magic  u32 │ crc32  u32 │ generation u32 │ epoch_seen i64 │ confirm     i64 │ clean_end    │
    │            │            │                │                │                 │ i64          │
    └────────────┴────────────┴────────────────┴────────────────┴─────────────────┴──────────────┘
     36                52           56
    ┌─────────────────┬────────────┬──────────────────────────────────────┐
    │ boot_id 16 bytes│ count  u32 │ count entries: epoch i64, start  i64 │
    └─────────────────┴────────────┴──────────────────────────────────────┘

Big-endian. The intact copy with the higher generation counts; the crc covers all behind itself.
`confirm` may be less than what is confirmed, and is never more. `clean_end` and `boot_id`
are no longer written, but for -1 and zeros: `durable_mark.py` has come in their place. Entries of
the epoch journal that begin at the log's end or behind it do not count.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

MAGIC = 0x544D5253  # "TMRS"
_PREFIX = struct.Struct(">II")
_FIELDS = struct.Struct(">Iqqq16sI")
_ENTRY = struct.Struct(">qq")
FIELDS_SIZE = 56
assert _PREFIX.size + _FIELDS.size == FIELDS_SIZE, "part of the disk format"
NO_BOOT_ID = bytes(16)
NOT_CLEAN = -1  # for what is no longer written


class ReplicaState(NamedTuple):
    """The replica state, decoded."""

    generation: int = 0
    epoch_seen: int = 0
    confirm: int = 0
    clean_end: int = NOT_CLEAN
    boot_id: bytes = NO_BOOT_ID
    journal: tuple[tuple[int, int], ...] = ()  # epoch, and where it begins


def encode(state: ReplicaState) -> bytes:
    """Encode a copy."""
    *fields, _ = state
    entries = b"".join(_ENTRY.pack(*entry) for entry in state.journal)
    body = _FIELDS.pack(*fields, len(state.journal)) + entries
    return _PREFIX.pack(MAGIC, crc32(body)) + body


def find(data: bytes | None) -> ReplicaState | None:
    """Decode a copy; None where it is missing, torn or damaged."""
    if data is None or len(data) < FIELDS_SIZE:
        return None
    magic, crc = _PREFIX.unpack_from(data)
    generation, epoch_seen, confirm, clean_end, boot_id, count = _FIELDS.unpack_from(
        data, _PREFIX.size
    )
    end = FIELDS_SIZE + count * _ENTRY.size
    if magic != MAGIC or end > len(data) or crc32(data[_PREFIX.size : end]) != crc:
        return None
    journal = tuple(_ENTRY.iter_unpack(data[FIELDS_SIZE:end]))
    return ReplicaState(generation, epoch_seen, confirm, clean_end, boot_id, journal)
