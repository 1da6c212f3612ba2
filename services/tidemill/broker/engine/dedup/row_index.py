"""An index from a hash of 32 bits to the number of a row, with open addressing.

A place has the hash of a row and its number, so most other rows are passed without a look at them.
The directory has a part for each value of the first bits of the hash. A part has up to 4,096 places
and is at most 75 % full. A full part grows, or splits into two by the next bit. So no insertion
moves more than the rows of one part.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final, final

import numpy as np

from tidemill.broker.engine.dedup.row_blocks import BLOCK_MASK, BLOCK_SHIFT, RowBlock
from tidemill.broker.engine.layout.dedup import ROW_SIZE

# A part grows in small steps, so that few places are empty.
SIZES: Final = (8, 16, 32, 64, 128, 256, 512, 1_024, *range(2_048, 4_097, 512))
_LOAD_MAX: Final = 0.75
_ROOMY_LOAD: Final = 0.65  # of a part that was just built
_BUILT_ROWS: Final = 2_048  # of a part on average, after `build`
PLACE_BYTES: Final = 8
HASH_BITS: Final = 32
_MASK: Final = (1 << HASH_BITS) - 1
_EMPTY: Final = 0


@final
class _Part:
    """The rows whose hashes begin with the same bits.

    A place has the remaining bits of the hash, moved to the left, and the number + 1.
    """

    __slots__ = ("count", "depth", "places", "size")

    def __init__(self, size: int, depth: int) -> None:
        self.places = array("Q", bytes(PLACE_BYTES * size))
        self.size = size
        self.depth = depth  # bits of the hash that all rows have in common
        self.count = 0


@final
class RowIndex:
    """The numbers of rows by a hash. Different rows may have the same hash."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._bits = 0  # of the directory
        self._parts = [_Part(SIZES[0], 0)]
        self.memory_bytes: int = SIZES[0] * PLACE_BYTES

    def find(self, hash_: int) -> Iterator[int]:
        """Yield the numbers of the rows with a hash."""
        part = self._parts[hash_ >> HASH_BITS - self._bits]
        places, size = part.places, part.size
        at = (hash_ << part.depth & _MASK) * size >> HASH_BITS
        while place := places[at]:
            if place >> HASH_BITS == hash_:
                yield (place & _MASK) - 1
            at += 1
            if at == size:
                at = 0

    def find_value(self, hash_: int, value: bytes, blocks: list[RowBlock]) -> int:
        """Return the number of the row that begins with `value`, and has a hash; -1: none.

        It does the same as `find` with a look at the rows, but faster: every keyed send needs it.
        """
        part = self._parts[hash_ >> HASH_BITS - self._bits]
        places, size = part.places, part.size
        at = (hash_ << part.depth & _MASK) * size >> HASH_BITS
        while place := places[at]:
            if place >> HASH_BITS == hash_:
                number = (place & _MASK) - 1
                begin = (number & BLOCK_MASK) * ROW_SIZE
                if blocks[number >> BLOCK_SHIFT].rows[begin : begin + len(value)] == value:
                    return number
            at += 1
            if at == size:
                at = 0
        return -1

    def insert(self, hash_: int, number: int) -> None:
        """Add a row."""
        part = self._parts[hash_ >> HASH_BITS - self._bits]
        while part.count >= part.size * _LOAD_MAX:
            self._enlarge(part, hash_)
            part = self._parts[hash_ >> HASH_BITS - self._bits]
        _put(part, hash_ << HASH_BITS | number + 1)

    def remove(self, hash_: int, number: int) -> None:
        """Remove a row."""
        part = self._parts[hash_ >> HASH_BITS - self._bits]
        places, size, depth = part.places, part.size, part.depth
        gap = _place_of(part, hash_, number)
        part.count -= 1
        at = gap + 1 if gap + 1 < size else 0
        # Rows behind the gap move into it, unless they would then be before their first place.
        while place := places[at]:
            first = (place >> HASH_BITS << depth & _MASK) * size >> HASH_BITS
            if (at - first) % size >= (at - gap) % size:
                places[gap] = place
                gap = at
            at = at + 1 if at + 1 < size else 0
        places[gap] = _EMPTY

    def move(self, hash_: int, number: int, new_number: int) -> None:
        """Give a row another number."""
        part = self._parts[hash_ >> HASH_BITS - self._bits]
        part.places[_place_of(part, hash_, number)] = hash_ << HASH_BITS | new_number + 1

    def build(self, hashes: np.ndarray) -> None:
        """Replace all rows by rows with consecutive numbers from 0 on."""
        numbers = np.arange(len(hashes), dtype=np.uint64)
        self._build(hashes.astype(np.uint64) << np.uint64(HASH_BITS) | numbers + np.uint64(1))

    def _build(self, places: np.ndarray) -> None:
        count = len(places)
        bits = max(int(np.ceil(np.log2(max(count, 1) / _BUILT_ROWS))), 0)
        # The order of the places is that of the hashes, so each part is a range of them.
        places = np.sort(places)
        bounds = np.arange(1, 1 << bits, dtype=np.uint64) << np.uint64(2 * HASH_BITS - bits)
        ends = [*np.searchsorted(places, bounds).tolist(), count]
        self._bits, self._parts, self.memory_bytes, begin = bits, [], 0, 0
        for end in ends:
            part = _build_part(places[begin:end], bits)
            self._parts.append(part)
            self.memory_bytes += part.size * PLACE_BYTES
            begin = end

    def _enlarge(self, part: _Part, hash_: int) -> None:
        """Make a full part larger, or split it: 0.2 ms at most."""
        found = np.sort(np.frombuffer(part.places, np.uint64))[-part.count :]
        width = 1 << self._bits - part.depth  # places of the part in the directory
        first = (hash_ >> HASH_BITS - self._bits) // width * width
        if part.size < SIZES[-1]:
            new = [_build_part(found, part.depth, part.size + 1)]
        else:
            if width == 1:
                self._bits += 1
                self._parts = [one for one in self._parts for _ in range(2)]
                first, width = first * 2, 2
            depth = part.depth + 1
            bound = (first + width // 2) << 2 * HASH_BITS - self._bits
            middle = int(np.searchsorted(found, np.uint64(bound)))
            new = [_build_part(half, depth) for half in (found[:middle], found[middle:])]
        each = width // len(new)
        for n, one in enumerate(new):
            self._parts[first + n * each : first + (n + 1) * each] = [one] * each
            self.memory_bytes += one.size * PLACE_BYTES
        self.memory_bytes -= part.size * PLACE_BYTES


def _put(part: _Part, place: int) -> None:
    places, size = part.places, part.size
    at = (place >> HASH_BITS << part.depth & _MASK) * size >> HASH_BITS
    while places[at]:
        at += 1
        if at == size:
            at = 0
    places[at] = place
    part.count += 1


def _place_of(part: _Part, hash_: int, number: int) -> int:
    places, size = part.places, part.size
    wanted = hash_ << HASH_BITS | number + 1
    at = (hash_ << part.depth & _MASK) * size >> HASH_BITS
    while places[at] != wanted:
        assert places[at] != _EMPTY, "the row is in the index"
        at += 1
        if at == size:
            at = 0
    return at


def _build_part(found: np.ndarray, depth: int, size_min: int = 0) -> _Part:
    """Return a part with some rows, in the order of their hashes, and room for more."""
    count = len(found)
    sizes = [one for one in SIZES if count <= one * _ROOMY_LOAD and one >= size_min]
    size = min(sizes, default=max(SIZES[-1], int(count / _LOAD_MAX) + 1))
    part = _Part(size, depth)
    part.count = count
    if count:
        bits = (found >> np.uint64(HASH_BITS) << np.uint64(depth)) & np.uint64(_MASK)
        firsts = (bits * np.uint64(size) >> np.uint64(HASH_BITS)).astype(np.int64)
        at = np.arange(count, dtype=np.int64)
        # Each row has its first place, or the one behind the row before it.
        taken = np.maximum.accumulate(firsts - at) + at
        places = np.frombuffer(part.places, np.uint64)
        is_inside = taken < size
        places[taken[is_inside]] = found[is_inside]
        beyond = found[~is_inside]
        # The last rows continue at the begin, in the places that are left.
        places[np.flatnonzero(places == _EMPTY)[: len(beyond)]] = beyond
    return part
