"""Index by message id and key: from a 64-bit hash to log offsets.

New pairs are collected in two arrays; a checkpoint sorts them in blocks of a bounded size, so that
no slice is long, and writes the blocks to an `index/` file; files are merged later, their blocks as
they are. A look-up scans the tail and bisects each block, some in a slice; whoever asks reads the
record and compares, since hashes may collide. Derived: the log rebuilds it.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import chain
from typing import final

import numpy as np

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.store.block_file import BlockFile, EncodedBlock
from tidemill.broker.engine.tally import Tally

FOLDER = "index"
BLOCK_PAIRS_MAX = 8192  # sorted in about half a millisecond
PAIR_SIZE = 16  # bytes
_HASH = struct.Struct(">Q")
BLOCKS_A_SLICE = 128  # of a look-up: bisected in half a millisecond when memory has them,
MATCHES_A_SLICE = 256  # or fewer that have so many


@final
class MessageIndex:
    """All (hash, log offset) pairs of the messages in the log."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self.hashes = array("Q")
        self.offsets = array("q")
        self.files: list[BlockFile] = []

    def add(self, hashes: memoryview | bytes, log_offset: LogOffset) -> None:
        """Add the big-endian u64 `hashes` of the message at `log_offset`."""
        for at in range(0, len(hashes), 8):
            self.hashes.append(int.from_bytes(hashes[at : at + 8], "big"))
            self.offsets.append(log_offset)

    def blocks(self, count: int) -> Iterator[EncodedBlock]:
        """Yield the oldest `count` pairs of the tail as sorted blocks."""
        for begin in range(0, count, BLOCK_PAIRS_MAX):
            end = min(begin + BLOCK_PAIRS_MAX, count)
            hashes = np.array(self.hashes[begin:end], dtype=">u8")
            offsets = np.array(self.offsets[begin:end], dtype=">i8")
            order = np.argsort(hashes, kind="stable")
            data = hashes[order].tobytes() + offsets[order].tobytes()
            yield EncodedBlock(0, 0, 0, end - begin, data)

    def replace_tail(self, file: BlockFile, count: int) -> None:
        """Answer from `file` what the oldest `count` pairs of the tail answered."""
        self.files.append(file)
        del self.hashes[:count]
        del self.offsets[:count]

    def drop_before(self, log_offset: LogOffset) -> list[BlockFile]:
        """Give up the files that only know records before `log_offset`, and return them."""
        gone = [file for file in self.files if file.to_offset <= log_offset]
        self.files = [file for file in self.files if file.to_offset > log_offset]
        return gone

    def find(self, hash_: int) -> Iterator[list[LogOffset]]:
        """Return the log offsets of messages with this hash, in slices, each of them bounded.

        The tail comes first, then the newest file. What is there at this call is found, whatever
        comes and goes before the last slice is taken.
        """
        matches: list[int] = []
        if self.hashes:
            tail = np.frombuffer(self.hashes, dtype=np.uint64)
            matches = np.flatnonzero(tail == hash_).tolist()
            del tail  # The array cannot grow while it is lent.
        in_tail = [LogOffset(self.offsets[at]) for at in reversed(matches)]
        end = self.files[-1].to_offset if self.files else 0
        return chain([in_tail], self._find_in_files(hash_, end))

    def find_since(self, hash_: int, begin: LogOffset, *, count_max: int) -> list[LogOffset]:
        """Return log offsets from `begin` on of messages with this hash, the newest first.

        In one slice, for a `begin` that is a minute old. Raises BlockFileDamaged.
        """
        matches: list[int] = []
        if self.hashes:
            tail = np.frombuffer(self.hashes, dtype=np.uint64)
            matches = np.flatnonzero(tail == hash_)[-count_max:].tolist()
            del tail  # The array cannot grow while it is lent.
        found = [LogOffset(self.offsets[at]) for at in reversed(matches)]
        for file in reversed(self.files):
            if file.to_offset <= begin or len(found) >= count_max:
                break
            for number in reversed(range(file.row_count)):
                found += _find_in_intact_block(file, number, hash_)
                self._tally.add(1)
        return [log_offset for log_offset in found[:count_max] if log_offset >= begin]

    def _find_in_files(self, hash_: int, end: int) -> Iterator[list[LogOffset]]:
        """Yield what files tell of the log before `end`, newest first.

        Between two slices files may be merged, or go: a place in a file is worth nothing then, and
        the look-up goes on by log offset.
        """
        found: list[LogOffset] = []
        block_count = 0
        searched = below = end  # what is at or behind either was searched, or found
        while file := next(
            (one for one in reversed(self.files) if one.from_offset < searched), None
        ):
            for number in reversed(range(file.row_count)):
                matches = _find_in_block(file, number, hash_)
                found += [match for match in matches if match < below]
                block_count += 1
                self._tally.add(1)
                if block_count == BLOCKS_A_SLICE or len(found) >= MATCHES_A_SLICE:
                    below = found[-1] if found else below
                    yield found
                    found, block_count = [], 0
                    if file not in self.files:
                        break
            else:
                searched = file.from_offset
        if found:
            yield found


def _find_in_block(file: BlockFile, number: int, hash_: int) -> list[LogOffset]:
    """Find the pairs of a hash in a sorted block, newest first.

    The block is verified when it seems to have some.
    """
    items = file.row(number).items
    try:
        # Its hashes alone: the offsets behind them are wanted of few.
        data = file.read_unverified(number, items * _HASH.size)
    except BlockFileDamaged:
        return []  # The file is noted.
    if len(data) < items * _HASH.size:
        return []  # A cache: a miss is reported as not found, never as something else.

    if not _places_in(data, items, hash_):
        return []
    try:
        return _find_in_intact_block(file, number, hash_)
    except BlockFileDamaged:
        return []  # The file is noted.


def _find_in_intact_block(file: BlockFile, number: int, hash_: int) -> list[LogOffset]:
    """Find the pairs of a hash in a sorted block, newest first. Raises BlockFileDamaged."""
    items = file.row(number).items
    data = file.block(number, items * PAIR_SIZE)
    places = _places_in(data, items, hash_)
    offsets = np.frombuffer(data, dtype=">i8", offset=items * 8)
    # Equal hashes stand in the order of the log.
    return [LogOffset(offset) for offset in reversed(offsets[places.start : places.stop].tolist())]


def _places_in(data: memoryview, items: int, hash_: int) -> range:
    """Return where a hash stands among the sorted ones that a block begins with."""

    def at(n: int) -> int:
        return int(_HASH.unpack_from(data, n * _HASH.size)[0])

    # Not by numpy: it would turn the bytes of all hashes round, and read all of them from the disk.
    begin = bisect_left(range(items), hash_, key=at)
    if begin == items or at(begin) != hash_:
        return range(0)
    return range(begin, bisect_right(range(items), hash_, lo=begin, key=at))
