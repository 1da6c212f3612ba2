"""An index from a mark, the first 4 bytes of a hash, to the number of a row.

The directory has a part for each value of the first bits of the mark. A part has the marks of its
rows in one byte array, which is searched by one call, and their numbers in the same order. A full
part splits into two by the next bit, so no insertion moves more than the rows of one part.
"""

from __future__ import annotations

from array import array
from typing import Final, final

import numpy as np

from tidemill.broker.engine.dedup.row_blocks import BLOCK_MASK, BLOCK_SHIFT, RowBlock
from tidemill.broker.engine.layout.dedup import ROW_SIZE

MARK_SIZE: Final = 4
_MARK_BITS: Final = 8 * MARK_SIZE
# A search of a full part takes 0.6 us. With fewer rows, the objects of the parts take more memory.
PART_ROWS_MAX: Final = 128
_BUILT_ROWS: Final = 90  # of a part on average, after `build`
ROW_BYTES: Final = 9  # a mark and a number, with the room that arrays keep for more
PART_BYTES: Final = 208  # a part without rows
# If the marks are not spread, parts grow before the directory has more places than this.
_PLACES_A_PART: Final = 16
_from_bytes = int.from_bytes


@final
class _Part:
    """The rows whose marks begin with the same bits, in no order."""

    __slots__ = ("depth", "marks", "numbers")

    def __init__(self, depth: int, marks: bytes = b"", numbers: bytes = b"") -> None:
        self.depth = depth  # bits of the mark that all rows have in common
        self.marks = bytearray(marks)
        self.numbers = array("I", numbers)


@final
class RowIndex:
    """The numbers of rows by a mark. Different rows may have the same mark."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._shift = _MARK_BITS  # from a mark to its place in the directory
        self._parts = [_Part(0)]
        self._part_count = 1
        self._row_count = 0

    @property
    def memory_bytes(self) -> int:
        """The memory of the index."""
        places = 8 * len(self._parts)
        return self._row_count * ROW_BYTES + self._part_count * PART_BYTES + places

    def find(self, mark: bytes) -> list[int]:
        """Return the numbers of the rows with a mark."""
        part = self._part_of(mark)
        found = []
        at = part.marks.find(mark)
        while at >= 0:
            if not at % MARK_SIZE:
                found.append(part.numbers[at // MARK_SIZE])
            at = part.marks.find(mark, at + 1)
        return found

    def find_value(self, value: bytes, blocks: list[RowBlock]) -> int:
        """Return the number of the row that begins with `value`, as its mark does; -1: none.

        It does the same as `find` with a look at the rows, but faster: every keyed send needs it.
        """
        mark = value[:MARK_SIZE]
        part = self._parts[_from_bytes(mark, "big") >> self._shift]
        at = part.marks.find(mark)
        while at >= 0:
            if not at % MARK_SIZE:
                number = part.numbers[at // MARK_SIZE]
                begin = (number & BLOCK_MASK) * ROW_SIZE
                if blocks[number >> BLOCK_SHIFT].rows.startswith(value, begin):
                    return number
            at = part.marks.find(mark, at + 1)
        return -1

    def insert(self, mark: bytes, number: int) -> None:
        """Add a row."""
        part = self._parts[_from_bytes(mark, "big") >> self._shift]
        if len(part.numbers) >= PART_ROWS_MAX and self._split(part, mark):
            part = self._part_of(mark)
        part.marks += mark
        part.numbers.append(number)
        self._row_count += 1

    def remove(self, mark: bytes, number: int) -> None:
        """Remove a row."""
        part = self._part_of(mark)
        marks, at = part.marks, _position(part, mark, number)
        # The last row of the part moves into the gap.
        marks[at * MARK_SIZE : (at + 1) * MARK_SIZE] = marks[-MARK_SIZE:]
        part.numbers[at] = part.numbers[-1]
        del marks[-MARK_SIZE:], part.numbers[-1]
        self._row_count -= 1

    def move(self, mark: bytes, number: int, new_number: int) -> None:
        """Give a row another number."""
        part = self._part_of(mark)
        part.numbers[_position(part, mark, number)] = new_number

    def build(self, marks: np.ndarray) -> None:
        """Replace all rows by rows with consecutive numbers from 0 on. Marks are numbers here."""
        count = len(marks)
        depth = max(int(np.ceil(np.log2(max(count, 1) / _BUILT_ROWS))), 0)
        # In the order of the marks, the rows of a part are next to each other.
        numbers = np.argsort(marks).astype(np.uint32)
        marks = marks[numbers]
        bounds = np.arange(1, 1 << depth, dtype=np.uint64) << np.uint64(_MARK_BITS - depth)
        ends = [*np.searchsorted(marks, bounds).tolist(), count]
        encoded, encoded_numbers = marks.astype(">u4").tobytes(), numbers.tobytes()
        self._parts, begin = [], 0
        for end in ends:
            rows = slice(begin * MARK_SIZE, end * MARK_SIZE)
            self._parts.append(_Part(depth, encoded[rows], encoded_numbers[rows]))
            begin = end
        self._shift = _MARK_BITS - depth
        self._part_count, self._row_count = len(ends), count

    def _part_of(self, mark: bytes) -> _Part:
        return self._parts[_from_bytes(mark, "big") >> self._shift]

    def _split(self, part: _Part, mark: bytes) -> bool:
        """Split a full part, in 0.3 ms at most; return False if its rows stay together."""
        if part.depth == _MARK_BITS - self._shift:
            size = 2 * len(self._parts)
            if size > _PLACES_A_PART * self._part_count:
                return False
            parts = [part] * size
            parts[::2] = parts[1::2] = self._parts
            self._parts = parts
            self._shift -= 1
        depth = part.depth + 1
        marks = np.frombuffer(part.marks, np.uint32)
        numbers = np.frombuffer(part.numbers, np.uint32)
        # The byte of each mark with the next bit, and the bit alone.
        octets = np.frombuffer(part.marks, np.uint8)[(depth - 1) // 8 :: MARK_SIZE]
        bits = octets & (128 >> (depth - 1) % 8)
        width = 1 << _MARK_BITS - self._shift - depth  # places of a half in the directory
        first = (_from_bytes(mark, "big") >> self._shift) // (2 * width) * (2 * width)
        for chosen in ((bits == 0).nonzero()[0], bits.nonzero()[0]):
            half = _Part(depth, marks[chosen].tobytes(), numbers[chosen].tobytes())
            self._parts[first : first + width] = [half] * width
            first += width
        self._part_count += 1
        return True


def _position(part: _Part, mark: bytes, number: int) -> int:
    """Return the position of a row in its part."""
    at = part.marks.find(mark)
    while at % MARK_SIZE or part.numbers[at // MARK_SIZE] != number:
        at = part.marks.find(mark, at + 1)
        assert at >= 0, "the row is in the index"
    return at // MARK_SIZE
