"""The index by message id and key: from a 64-bit hash to log offsets.

New pairs go into two arrays, the tail. A checkpoint sorts them in blocks of bounded size, so that
every slice is short, and writes the blocks to an `index/` file. Files are merged later without
sorting again. A look-up scans the tail and bisects some blocks per slice. The caller reads each
record and compares, because hashes may collide. The index is derived from the log.
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
BLOCKS_A_SLICE = 128  # bisected per slice of a look-up, in half a millisecond from memory
VERIFIED_BLOCKS_A_SLICE = 8  # 1 MiB, of a look-up that verifies each block
MATCHES_A_SLICE = 256  # a slice ends earlier if it has this many matches


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
            yield EncodedBlock(0, 0, self.offsets[begin], end - begin, data)

    def replace_tail(self, file: BlockFile, count: int) -> None:
        """Replace the oldest `count` pairs of the tail by `file`."""
        self.files.append(file)
        del self.hashes[:count]
        del self.offsets[:count]

    def drop_before(self, log_offset: LogOffset) -> list[BlockFile]:
        """Drop and return the files that only describe records before `log_offset`."""
        dropped = [file for file in self.files if file.to_offset <= log_offset]
        self.files = [file for file in self.files if file.to_offset > log_offset]
        return dropped

    def find(self, hash_: int, *, is_strict: bool = False) -> Iterator[list[LogOffset]]:
        """Return the log offsets of messages with this hash, in bounded slices.

        The tail comes first, then the newest file. The result has everything that is present at
        this call, whatever changes before the last slice. A strict look-up verifies each block, and
        its slices raise BlockFileDamaged. Another one skips the pairs of damaged blocks.
        """
        matches: list[int] = []
        if self.hashes:
            tail = np.frombuffer(self.hashes, dtype=np.uint64)
            matches = np.flatnonzero(tail == hash_).tolist()
            del tail  # The array cannot grow while numpy uses it.
        in_tail = [LogOffset(self.offsets[at]) for at in reversed(matches)]
        end = self.files[-1].to_offset if self.files else 0
        return chain([in_tail], self._find_in_files(hash_, end, is_strict=is_strict))

    def find_since(self, hash_: int, begin: LogOffset, *, count_max: int) -> list[LogOffset]:
        """Return log offsets from `begin` on of messages with this hash, newest first.

        Runs in one slice, for a `begin` about a minute ago. Raises BlockFileDamaged.
        """
        matches: list[int] = []
        if self.hashes:
            tail = np.frombuffer(self.hashes, dtype=np.uint64)
            matches = np.flatnonzero(tail == hash_)[-count_max:].tolist()
            del tail  # The array cannot grow while numpy uses it.
        found = [LogOffset(self.offsets[at]) for at in reversed(matches)]
        for file in reversed(self.files):
            if file.to_offset <= begin or len(found) >= count_max:
                break
            for number in reversed(range(file.row_count)):
                found += _find_in_intact_block(file, number, hash_)
                self._tally.add(1)
        return [log_offset for log_offset in found[:count_max] if log_offset >= begin]

    def _find_in_files(self, hash_: int, end: int, *, is_strict: bool) -> Iterator[list[LogOffset]]:
        """Yield the matches in files before log offset `end`, newest first.

        Between two slices files may be merged or deleted. A position in a file is invalid then, so
        the look-up continues by log offset.
        """
        find_in_block = _find_in_intact_block if is_strict else _find_in_block
        blocks_max = VERIFIED_BLOCKS_A_SLICE if is_strict else BLOCKS_A_SLICE
        found: list[LogOffset] = []
        block_count = 0
        searched = below = end  # everything at or after either offset was searched or found
        while file := next(
            (one for one in reversed(self.files) if one.from_offset < searched), None
        ):
            for number in reversed(range(file.row_count)):
                matches = find_in_block(file, number, hash_)
                found += [match for match in matches if match < below]
                block_count += 1
                self._tally.add(1)
                if block_count == blocks_max or len(found) >= MATCHES_A_SLICE:
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

    Verify the block only if it seems to have some.
    """
    items = file.row(number).items
    try:
        # Only its hashes: the offsets after them are rarely needed.
        data = file.read_unverified(number, items * _HASH.size)
    except BlockFileDamaged:
        return []  # The file is in `damaged`.
    if len(data) < items * _HASH.size:
        return []  # A miss is reported as not found.

    if not _places_in(data, items, hash_):
        return []
    try:
        return _find_in_intact_block(file, number, hash_)
    except BlockFileDamaged:
        return []  # The file is in `damaged`.


def _find_in_intact_block(file: BlockFile, number: int, hash_: int) -> list[LogOffset]:
    """Find the pairs of a hash in a sorted block, newest first. Raises BlockFileDamaged."""
    items = file.row(number).items
    data = file.block(number, items * PAIR_SIZE)
    places = _places_in(data, items, hash_)
    offsets = np.frombuffer(data, dtype=">i8", offset=items * 8)
    # Equal hashes are in log order.
    return [LogOffset(offset) for offset in reversed(offsets[places.start : places.stop].tolist())]


def _places_in(data: memoryview, items: int, hash_: int) -> range:
    """Return the range of a hash among the sorted hashes at the begin of a block."""

    def at(n: int) -> int:
        return int(_HASH.unpack_from(data, n * _HASH.size)[0])

    # Without numpy: it would swap the bytes of all hashes, and read all of them from the disk.
    begin = bisect_left(range(items), hash_, key=at)
    if begin == items or at(begin) != hash_:
        return range(0)
    return range(begin, bisect_right(range(items), hash_, lo=begin, key=at))
