"""The work of slices, counted in items and bytes instead of time.

A limit on the work keeps a slice short on any machine and under any load. Slices count their work
here. The caller that limits a slice gives it an allowance. Single sends, pops and acks are not
counted, because each command has its own limit.
"""

from __future__ import annotations

from typing import final

# About a millisecond of copying. A larger message has a slice of its own.
SLICE_BYTES = 1 << 20


@final
class Tally:
    """Items and bytes that slices have processed since the start; only differences matter."""

    __slots__ = ("items", "size_bytes")

    def __init__(self) -> None:
        self.items = 0
        self.size_bytes = 0

    def add(self, items: int, *, size_bytes: int = 0) -> None:
        """Count processed items and bytes."""
        self.items += items
        self.size_bytes += size_bytes


@final
class Allowance:
    """The work that a slice may do from now on."""

    __slots__ = ("_bytes_end", "_items_end", "_tally")

    def __init__(self, tally: Tally, *, items: int, size_bytes: int = SLICE_BYTES) -> None:
        self._tally = tally
        self._items_end = tally.items + items
        self._bytes_end = tally.size_bytes + size_bytes

    @property
    def items_left(self) -> int:
        """The remaining items; negative if the last step exceeded the allowance."""
        return self._items_end - self._tally.items

    @property
    def is_spent(self) -> bool:
        """Whether no further work may begin."""
        tally = self._tally
        return tally.items >= self._items_end or tally.size_bytes >= self._bytes_end
