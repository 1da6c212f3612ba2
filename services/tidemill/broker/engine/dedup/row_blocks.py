"""Rows of dedup keys without holes, in blocks.

A snapshot takes the blocks as they are; a block that it shares is copied before its next change.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np

from tidemill.broker.engine.layout.dedup import (
    NO_PIN,
    ROW,
    ROW_DTYPE,
    ROW_SIZE,
    KeyRow,
    encode_row,
    taken_at_ms,
)

BLOCK_SHIFT: Final = 12
BLOCK_ROWS: Final = 1 << BLOCK_SHIFT  # 164 KB: a copy takes 20 us
BLOCK_MASK: Final = BLOCK_ROWS - 1
NEVER_MS: Final = 1 << 62
# Makes a named tuple without a call of Python code: every keyed send reads rows.
_tuple = tuple.__new__
_pack_row = ROW.pack


@final
class RowBlock:
    """Some rows, encoded."""

    __slots__ = ("is_shared", "rows")

    def __init__(self, rows: bytearray) -> None:
        self.rows = rows
        self.is_shared = False


@final
class RowBlocks:
    """The rows by number, from 0 on."""

    def __init__(self) -> None:
        self.blocks: list[RowBlock] = []
        self.count = 0

    def row(self, number: int) -> KeyRow:
        """Return a row."""
        block = self.blocks[number >> BLOCK_SHIFT]
        hash_, high, low, crc, pin = ROW.unpack_from(block.rows, (number & BLOCK_MASK) * ROW_SIZE)
        return _tuple(KeyRow, (hash_, high >> 16, (high & 0xFFFF) << 32 | low, crc, pin))

    def append(
        self, hash_: bytes, log_offset: int, taken_at_ms: int, body_crc: int, pin: int
    ) -> int:
        """Add a row behind the last one; return its number."""
        number = self.count
        if not number & BLOCK_MASK:
            self.blocks.append(RowBlock(bytearray()))
        block = self.blocks[number >> BLOCK_SHIFT]
        if block.is_shared:
            block = self._writable(number >> BLOCK_SHIFT)
        high, low = log_offset << 16 | taken_at_ms >> 32, taken_at_ms & 0xFFFFFFFF
        block.rows += _pack_row(hash_, high, low, body_crc, pin)
        self.count = number + 1
        return number

    def put(self, number: int, row: KeyRow) -> None:
        """Replace a row."""
        self.replace(number, encode_row(row))

    def replace(self, number: int, encoded: bytes | bytearray) -> None:
        """Replace a row by an encoded one."""
        begin = (number & BLOCK_MASK) * ROW_SIZE
        self._writable(number >> BLOCK_SHIFT).rows[begin : begin + ROW_SIZE] = encoded

    def take_last(self) -> bytes:
        """Remove the last row, and return it encoded."""
        self.count -= 1
        number = self.count >> BLOCK_SHIFT
        block = self._writable(number)
        encoded = bytes(block.rows[-ROW_SIZE:])
        if self.count & BLOCK_MASK:
            del block.rows[-ROW_SIZE:]
        else:
            del self.blocks[number]
        return encoded

    def marks(self, block_number: int) -> np.ndarray:
        """Return the first 32 bits of the hashes of a block."""
        rows = self.blocks[block_number].rows
        count = len(rows) // ROW_SIZE
        return np.ndarray(count, ">u4", rows, strides=(ROW_SIZE,)).astype(np.uint64)

    def columns(self, block_number: int) -> np.ndarray:
        """Return a copy of the rows of a block as an array."""
        return np.frombuffer(bytes(self.blocks[block_number].rows), dtype=ROW_DTYPE)

    def loose_times(self, block_number: int) -> np.ndarray:
        """Return when the keys of a block were taken; `NEVER_MS` for a key with a pin."""
        rows = self._view(block_number)
        times = taken_at_ms(rows)
        times[rows["pin"] != NO_PIN] = NEVER_MS
        return times

    def newest_ms(self, block_number: int) -> int:
        """Return when the newest key of a block was taken."""
        return int(taken_at_ms(self._view(block_number)).max())

    def hashes_and_pins(self) -> tuple[np.ndarray, list[int], list[int]]:
        """Return the first 32 bits of all hashes, and the pins with the numbers of their rows."""
        hashes = [np.zeros(0, np.uint64)]
        pins: list[int] = []
        numbers: list[int] = []
        for n in range(len(self.blocks)):
            rows = self._view(n)
            hashes.append(self.marks(n))
            pinned = np.flatnonzero(rows["pin"] != NO_PIN)
            pins += rows["pin"][pinned].tolist()
            numbers += (pinned + (n << BLOCK_SHIFT)).tolist()
        return np.concatenate(hashes), pins, numbers

    def _view(self, block_number: int) -> np.ndarray:
        # Rows cannot be added or removed while the array is in use.
        return np.frombuffer(self.blocks[block_number].rows, dtype=ROW_DTYPE)

    def load(self, encoded: memoryview) -> None:
        """Add the rows of a full block of a snapshot, or of the last block."""
        self.blocks.append(RowBlock(bytearray(encoded)))
        self.count += len(encoded) // ROW_SIZE

    def freeze(self) -> list[bytearray]:
        """Return the encoded blocks as of now; they never change."""
        for block in self.blocks:
            block.is_shared = True
        return [block.rows for block in self.blocks]

    def _writable(self, block_number: int) -> RowBlock:
        block = self.blocks[block_number]
        if block.is_shared:
            block = self.blocks[block_number] = RowBlock(block.rows[:])
        return block
