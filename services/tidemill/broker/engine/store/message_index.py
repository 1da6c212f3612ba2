"""Index by message id and key: from a 64-bit hash to log offsets.

New pairs are collected in two arrays; a checkpoint sorts them in blocks of a bounded size, so that
no slice is long, and writes the blocks to an `index/` file. A look-up bisects each block and scans
the tail; whoever asks reads the record and compares, since hashes may collide. Derived: the log
rebuilds it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import final

import numpy as np

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.store.block_file import Block, BlockFile

FOLDER = "index"
BLOCK_PAIRS_MAX = 8192  # sorted in about half a millisecond
PAIR_SIZE = 16  # bytes


@final
class MessageIndex:
    """All (hash, log offset) pairs of the messages in the log."""

    def __init__(self) -> None:
        self.hashes = array("Q")
        self.offsets = array("q")
        self.files: list[BlockFile] = []

    def add(self, hashes: memoryview | bytes, log_offset: LogOffset) -> None:
        """Add the big-endian u64 `hashes` of the message at `log_offset`."""
        for at in range(0, len(hashes), 8):
            self.hashes.append(int.from_bytes(hashes[at : at + 8], "big"))
            self.offsets.append(log_offset)

    def blocks(self, count: int) -> Iterator[Block]:
        """Yield the oldest `count` pairs of the tail as sorted blocks."""
        for begin in range(0, count, BLOCK_PAIRS_MAX):
            end = min(begin + BLOCK_PAIRS_MAX, count)
            hashes = np.array(self.hashes[begin:end], dtype=">u8")
            offsets = np.array(self.offsets[begin:end], dtype=">i8")
            order = np.argsort(hashes, kind="stable")
            data = hashes[order].tobytes() + offsets[order].tobytes()
            yield Block(0, 0, 0, end - begin, data)

    def take_over(self, file: BlockFile, count: int) -> None:
        """Answer from `file` what the oldest `count` pairs of the tail answered."""
        self.files.append(file)
        del self.hashes[:count]
        del self.offsets[:count]

    def drop_before(self, log_offset: LogOffset) -> list[BlockFile]:
        """Give up the files that only know records before `log_offset`, and return them."""
        gone = [file for file in self.files if file.to_offset <= log_offset]
        self.files = [file for file in self.files if file.to_offset > log_offset]
        return gone

    def find(self, hash_: int) -> Iterator[LogOffset]:
        """Yield the log offsets of messages with this hash, newest file first, tail before."""
        if self.hashes:
            tail = np.frombuffer(self.hashes, dtype=np.uint64)
            matches = np.flatnonzero(tail == hash_).tolist()
            del tail  # The array cannot grow while it is lent.
            yield from [LogOffset(self.offsets[at]) for at in reversed(matches)]
        for file in reversed(self.files):
            for number, row in enumerate(file.rows):
                yield from _find_in_block(file, number, row.items, hash_)


def _find_in_block(file: BlockFile, number: int, items: int, hash_: int) -> list[LogOffset]:
    try:
        data = file.block(number, items * PAIR_SIZE)
    except BlockFileDamaged:
        # A cache: a miss is reported as not found, never as something else. The file is noted.
        return []
    hashes = np.frombuffer(data, dtype=">u8", count=items)
    offsets = np.frombuffer(data, dtype=">i8", offset=items * 8)
    begin = int(np.searchsorted(hashes, np.uint64(hash_), side="left"))
    end = int(np.searchsorted(hashes, np.uint64(hash_), side="right"))
    return [LogOffset(int(offset)) for offset in offsets[begin:end]]
