"""A wrong wall clock. Python imports this module if PYTHONPATH contains the folder.

A file gives the error of the clock: see `tests/support/processes/wrong_clocks.py`.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

OFFSET_NS = struct.Struct("=q")


def go_wrong(path: str) -> None:
    """Shift time.time and time.time_ns by the offset in the file, which each call reads."""
    with Path(path).open("rb") as file:
        offset = mmap.mmap(file.fileno(), OFFSET_NS.size, prot=mmap.PROT_READ)
    true_ns = time.time_ns

    def time_ns() -> int:
        return true_ns() + int(OFFSET_NS.unpack_from(offset)[0])

    time.time_ns = time_ns
    time.time = lambda: time_ns() / 1e9


if file_of_clock := os.environ.get("WRONG_CLOCK_FILE"):
    go_wrong(file_of_clock)
