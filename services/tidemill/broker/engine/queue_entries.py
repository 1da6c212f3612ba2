"""Entries of consume queues as arrays, for counts over many messages."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from tidemill.broker.engine.layout.queue_entry import SIZE
from tidemill.broker.engine.store.consume_queue import ConsumeQueue

ENTRIES_A_SLICE: Final = 16_384  # a millisecond to copy and add up
ENTRY_TYPE: Final = np.dtype([("log_offset", ">i8"), ("size", ">u4"), ("tag_hash", ">i8")])
assert ENTRY_TYPE.itemsize == SIZE, "the same entries"

Entries = npt.NDArray[np.void]


def read_entries(queue: ConsumeQueue, offset: int, count: int) -> Entries:
    """Return up to `count` entries from `offset` on. Raises BlockFileDamaged.

    Their blocks are verified again: messages are removed because of these sizes.
    """
    return np.frombuffer(queue.data(offset, count, recheck=True), dtype=ENTRY_TYPE)


def size_of(entries: Entries) -> int:
    """Return the sum of the record sizes in bytes."""
    return int(entries["size"].sum(dtype=np.int64))
