"""Message ids in the format of the official clients, unique without coordination.

    ┌────────────┬────────┬──────────┬────────────────┬──────────────┐
    │ version u8 │ MAC, 6 │ pid, u16 │ started_s, u32 │ sequence u32 │   34 hexadecimal digits
    └────────────┴────────┴──────────┴────────────────┴──────────────┘

`started_s` counts from 2021-01-01 UTC, to the start of the process.
"""

from __future__ import annotations

import os
import struct
import uuid
from datetime import UTC, datetime
from itertools import count

VERSION = 1
_FIELDS = struct.Struct(">B6sHII")
_BEGIN_S = int(datetime(2021, 1, 1, tzinfo=UTC).timestamp())
_MASK_16, _MASK_32 = (1 << 16) - 1, (1 << 32) - 1


class MessageIds:
    """Generator of the message ids of one process."""

    def __init__(self, now_ms: int) -> None:
        self._mac = uuid.getnode().to_bytes(6, "big")
        self._pid = os.getpid() & _MASK_16
        self._started_s = now_ms // 1000 - _BEGIN_S & _MASK_32
        self._sequence = count()

    def make(self) -> str:
        """Return a new id."""
        sequence = next(self._sequence) & _MASK_32
        return _FIELDS.pack(VERSION, self._mac, self._pid, self._started_s, sequence).hex().upper()
