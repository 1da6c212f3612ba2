"""The durable mark: how far a replica's log is durable, in two alternating copies.

     0            4            8                12            20              28
    ┌────────────┬────────────┬────────────────┬─────────────┬───────────────┬───────────────────┐
    │ magic  u32 │ crc32  u32 │ generation u32 │ durable i64 │ led_epoch i64 │ boot_id 16 bytes  │
    └────────────┴────────────┴────────────────┴─────────────┴───────────────┴───────────────────┘
     44
    ┌───────────────┐
    │ is_doubtful u8│
    └───────────────┘

Big-endian. The intact copy with the higher generation is valid. The crc covers all bytes after it.
The log is durable before `durable`, and maybe further. `led_epoch` is the last epoch that this
store led as a master; 0 means none. `boot_id` identifies the boot of the machine that wrote
everything after `durable`; zeros mean unknown. `is_doubtful` is 1 after a possible loss of
acknowledged bytes, until the replica is a member of its sync state set again.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

MAGIC = 0x544D444D  # "TMDM"
_PREFIX = struct.Struct(">II")
_FIELDS = struct.Struct(">Iqq16s?")
SIZE = 45
assert _PREFIX.size + _FIELDS.size == SIZE, "part of the disk format"
NO_BOOT_ID = bytes(16)


class DurableMark(NamedTuple):
    """The mark, decoded."""

    generation: int = 0
    durable: int = 0
    led_epoch: int = 0
    boot_id: bytes = NO_BOOT_ID
    is_doubtful: bool = False


def encode(mark: DurableMark) -> bytes:
    """Encode a copy."""
    body = _FIELDS.pack(*mark)
    return _PREFIX.pack(MAGIC, crc32(body)) + body


def find(data: bytes | None) -> DurableMark | None:
    """Decode a copy; return None if it is missing, torn or damaged."""
    if data is None or len(data) != SIZE:
        return None
    magic, crc = _PREFIX.unpack_from(data)
    if magic != MAGIC or crc32(data[_PREFIX.size :]) != crc:
        return None
    return DurableMark._make(_FIELDS.unpack_from(data, _PREFIX.size))
