"""Work counted, not timed: what the owner's slices have touched, in items and bytes.

A slice is short because what it may touch is bounded, on any machine and under any load. What is
done in slices counts here what it touches; whoever bounds a slice gives it an allowance. A message
that is sent, popped or acked by itself is not counted: its own command bounds it.
"""

from __future__ import annotations

from typing import final

# About a millisecond of copying; a message that is larger goes alone.
SLICE_BYTES = 1 << 20


@final
class Tally:
    """Items and bytes that slices have touched since the start; only differences mean anything."""

    __slots__ = ("items", "size_bytes")

    def __init__(self) -> None:
        self.items = 0
        self.size_bytes = 0

    def add(self, items: int, *, size_bytes: int = 0) -> None:
        """Count what is touched."""
        self.items += items
        self.size_bytes += size_bytes


@final
class Allowance:
    """What may be touched from now on."""

    __slots__ = ("_bytes_end", "_items_end", "_tally")

    def __init__(self, tally: Tally, *, items: int, size_bytes: int = SLICE_BYTES) -> None:
        self._tally = tally
        self._items_end = tally.items + items
        self._bytes_end = tally.size_bytes + size_bytes

    @property
    def items_left(self) -> int:
        """How many items may still be touched; below 0 when the last step went beyond."""
        return self._items_end - self._tally.items

    @property
    def is_spent(self) -> bool:
        """Whether nothing more may be begun."""
        tally = self._tally
        return tally.items >= self._items_end or tally.size_bytes >= self._bytes_end
