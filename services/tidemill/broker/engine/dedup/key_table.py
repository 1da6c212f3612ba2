"""The known dedup keys of one topic. Only the fold changes it, apart from keys that are over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

import numpy as np

from tidemill.broker.engine.dedup.row_blocks import BLOCK_ROWS, BLOCK_SHIFT, NEVER_MS, RowBlocks
from tidemill.broker.engine.dedup.row_index import MARK_SIZE, PART_BYTES, ROW_BYTES, RowIndex
from tidemill.broker.engine.layout.dedup import NO_PIN, ROW_SIZE, KeyRow, taken_at_ms
from tidemill.broker.engine.layout.numbers import LogOffset, TopicId

# An odd number whose products spread consecutive pins over all parts.
_PIN_FACTOR: Final = 0x9E3779B1
_MASK: Final = (1 << 8 * MARK_SIZE) - 1
# A key takes its row and its share of a part of the index that is at least half full.
KEY_BYTES: Final = 54
REBUILT_ROWS_MAX: Final = 2_048  # an index that is far too large is built again, in a millisecond
MISSING: Final = -1
BLOCKS_A_SWEEP: Final = 16  # under a millisecond
_from_bytes = int.from_bytes


@final
class KeyTable:
    """The keys of one topic."""

    def __init__(self, topic_id: TopicId) -> None:
        self.topic_id = topic_id
        # Keys taken at this time or before are free: their window was over before it grew.
        self.over_until_ms = 0
        self._rows = RowBlocks()
        self._index = RowIndex()  # by the first bits of the hash
        self._pins = RowIndex()
        self.pinned_count = 0
        # The last look-up since the last change.
        self._found_hash = b""
        self._found_number = MISSING
        self._swept_block = 0  # the next block of the sweep
        self.oldest_ms = NEVER_MS  # no key without a pin was taken before
        self._sweep_oldest_ms = NEVER_MS  # the same for keys that the sweep has left, and new ones

    def __len__(self) -> int:
        return self._rows.count

    @property
    def memory_bytes(self) -> int:
        """The memory of the rows and of their indexes."""
        pins: int = self._pins.memory_bytes if self.pinned_count else 0
        return self._rows.count * ROW_SIZE + self._index.memory_bytes + pins

    # ------------------------------------------------------------ queries

    def find(self, hash_: bytes) -> KeyRow | None:
        """Return the row of a key; its window may be over."""
        rows = self._rows
        number = self._index.find_value(hash_, rows.blocks)
        self._found_hash, self._found_number = hash_, number
        return None if number == MISSING else rows.row(number)

    def find_pinned(self, pin: int) -> KeyRow | None:
        """Return the row with a pin."""
        if not self.pinned_count:
            return None
        for number in self._pins.find(_mark_of_pin(pin)):
            row = self._rows.row(number)
            if row.pin == pin:
                return row
        return None

    def is_known(self, row: KeyRow, *, now_ms: int, window_ms: int) -> bool:
        """Whether a key is not free: it has a pin, or its window is not over."""
        taken_at_ms = row.taken_at_ms
        return row.pin != NO_PIN or (
            now_ms < taken_at_ms + window_ms and taken_at_ms > self.over_until_ms
        )

    def block_count(self) -> int:
        """Return the number of blocks of rows."""
        return len(self._rows.blocks)

    def rows_of(self, block_number: int) -> np.ndarray:
        """Return a copy of the rows of a block; rows may move to other blocks afterwards."""
        return self._rows.columns(block_number)

    def has_old_pin(self, block_number: int, until_ms: int) -> bool:
        """Whether a row of a block has a pin and was taken at `until_ms` or before."""
        rows = self._rows.columns(block_number)
        return bool(((rows["pin"] != NO_PIN) & (taken_at_ms(rows) <= until_ms)).any())

    def newest_ms(self) -> int | None:
        """Return when the newest key was taken; None: there is none."""
        blocks = range(len(self._rows.blocks))
        return max([self._rows.newest_ms(number) for number in blocks], default=None)

    # ------------------------------------------------------------ changes

    def put(self, row: KeyRow) -> None:
        """Add or replace the row of a key."""
        hash_, _, taken_at_ms, _, pin = row
        if hash_ is self._found_hash:
            number = self._found_number  # A send looks its key up, and stores it at once.
        else:
            number = self._index.find_value(hash_, self._rows.blocks)
        self._found_hash = b""
        if number == MISSING:
            number = self._rows.append(*row)
            self._index.insert(hash_[:MARK_SIZE], number)
            before = NO_PIN
        else:
            before = self._rows.row(number).pin
            if before not in {NO_PIN, pin}:
                self._remove_pin(before, number)
            self._rows.put(number, row)
        if pin:
            if pin != before:
                self._insert_pin(pin, number)
        elif taken_at_ms < self._sweep_oldest_ms:
            self._note_oldest(taken_at_ms)

    def put_new(self, hash_: bytes, log_offset: LogOffset, taken_at_ms: int, body_crc: int) -> None:
        """Add the row of a key without a pin, which the last look-up has not found.

        Does the same as `put`, but faster: nearly all sends with keys store a new one.
        """
        if hash_ is not self._found_hash or self._found_number != MISSING:
            self.put(KeyRow(hash_, log_offset, taken_at_ms, body_crc, NO_PIN))
            return
        self._found_hash = b""
        number = self._rows.append(hash_, log_offset, taken_at_ms, body_crc, NO_PIN)
        self._index.insert(hash_[:MARK_SIZE], number)
        if taken_at_ms < self._sweep_oldest_ms:
            self._note_oldest(taken_at_ms)

    def _note_oldest(self, taken_at_ms: int) -> None:
        self._sweep_oldest_ms = taken_at_ms
        self.oldest_ms = min(self.oldest_ms, taken_at_ms)

    def remove(self, hash_: bytes) -> None:
        """Forget a key, if it is known."""
        number = self._index.find_value(hash_, self._rows.blocks)
        if number != MISSING:
            self._remove(number, self._rows.row(number))

    def _remove(self, number: int, row: KeyRow) -> None:
        if row.pin:
            self._remove_pin(row.pin, number)
        self._remove_loose(number, row.hash[:MARK_SIZE])

    def _remove_loose(self, number: int, mark: bytes) -> None:
        """Remove a row without a pin; `mark` is the begin of its hash."""
        self._found_hash = b""
        self._index.remove(mark, number)
        moved = self._rows.take_last()
        last = self._rows.count
        if number != last:
            # No holes: the last row moves.
            self._index.move(moved[:MARK_SIZE], last, number)
            pin = _from_bytes(moved[-8:], "big", signed=True)
            if pin:
                self._pins.move(_mark_of_pin(pin), last, number)
            self._rows.replace(number, moved)

    def _insert_pin(self, pin: int, number: int) -> None:
        self._pins.insert(_mark_of_pin(pin), number)
        self.pinned_count += 1

    def _remove_pin(self, pin: int, number: int) -> None:
        self._pins.remove(_mark_of_pin(pin), number)
        self.pinned_count -= 1
        if not self.pinned_count:
            self._pins.clear()

    # ------------------------------------------------------------ keys that are over

    def is_sweep_due(self, over_ms: int) -> bool:
        """Whether a sweep may find keys taken at `over_ms` or before, or is in progress."""
        return self.oldest_ms <= max(over_ms, self.over_until_ms) or self._swept_block > 0

    def sweep(self, *, over_ms: int, limit: int) -> int:
        """Remove up to `limit` keys taken at `over_ms` or before; return the number.

        It looks at a bounded number of rows, and continues where the last call ended.
        """
        over_ms = max(over_ms, self.over_until_ms)
        removed = 0
        for _ in range(BLOCKS_A_SWEEP):
            if removed >= limit or self._swept_block >= len(self._rows.blocks):
                break
            number = self._swept_block
            times = self._rows.loose_times(number)
            over = np.flatnonzero(times <= over_ms)[::-1]
            chosen = over[: limit - removed].tolist()
            marks = self._rows.marks(number)[over[: limit - removed]].astype(">u4").tobytes()
            # From the last row on: the rows that move into the gaps are not among the chosen ones.
            for n, at in enumerate(chosen):
                mark = marks[n * MARK_SIZE : (n + 1) * MARK_SIZE]
                self._remove_loose((number << BLOCK_SHIFT) + at, mark)
            removed += len(chosen)
            if len(chosen) < len(over):
                break
            if number >= len(self._rows.blocks):
                continue
            times[over] = NEVER_MS
            self._sweep_oldest_ms = min(self._sweep_oldest_ms, int(times.min()))
            # Rows that moved here came from the end, and may be over as well.
            if not chosen or number == len(self._rows.blocks) - 1:
                self._swept_block += 1
        if self._rows.count <= REBUILT_ROWS_MAX:
            self._shrink()
        return removed

    def end_sweep(self) -> int | None:
        """End a sweep that has seen all rows; return when the oldest loose key was taken, if any.

        None: the sweep has not ended.
        """
        if self._swept_block < len(self._rows.blocks):
            return None
        oldest_ms, self._sweep_oldest_ms, self._swept_block = self._sweep_oldest_ms, NEVER_MS, 0
        self.oldest_ms = oldest_ms
        return oldest_ms

    def _shrink(self) -> None:
        """Build an index again that has far more parts than the remaining keys need."""
        if self._index.memory_bytes > 8 * (PART_BYTES + self._rows.count * ROW_BYTES):
            self._build()

    # ------------------------------------------------------------ snapshots

    def freeze(self) -> list[bytearray]:
        """Return the rows as of now, as encoded blocks that never change."""
        return self._rows.freeze()

    def load(self, encoded: memoryview) -> None:
        """Add rows of a snapshot. Call `end_load` after the last ones."""
        for begin in range(0, len(encoded), ROW_SIZE * BLOCK_ROWS):
            self._rows.load(encoded[begin : begin + ROW_SIZE * BLOCK_ROWS])

    def end_load(self) -> None:
        """Build the indexes of loaded rows: 0.3 s for a million keys."""
        blocks = range(len(self._rows.blocks))
        self.oldest_ms = min(
            [int(self._rows.loose_times(n).min()) for n in blocks], default=NEVER_MS
        )
        self._build()

    def _build(self) -> None:
        hashes, pins, numbers = self._rows.hashes_and_pins()
        self._index.build(hashes)
        self._pins.clear()
        self.pinned_count = 0
        for pin, number in zip(pins, numbers, strict=True):
            self._insert_pin(pin, number)

    def walk(self) -> Iterator[KeyRow]:
        """Yield all rows, for tests and small tables."""
        for number in range(self._rows.count):
            yield self._rows.row(number)


def _mark_of_pin(pin: int) -> bytes:
    return (pin * _PIN_FACTOR & _MASK).to_bytes(MARK_SIZE, "big")
