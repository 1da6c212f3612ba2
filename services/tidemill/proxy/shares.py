"""Shares of a limited resource by address: an address gets at most as much as is free.

The largest user is rejected first, and a new address finds room (ADR 0017). The key is the address,
because clients choose their own ids.
"""

from __future__ import annotations

from collections import Counter
from typing import final


@final
class AddressShares:
    """The used shares by address."""

    __slots__ = ("_by_address", "_count_max", "total")

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._by_address: Counter[str] = Counter()
        self.total = 0

    def has_room(self, address: str) -> bool:
        """Whether an address may take one more."""
        return self._by_address[address] < self._count_max - self.total

    def take(self, address: str) -> None:
        """Count one more."""
        self._by_address[address] += 1
        self.total += 1

    def give_back(self, address: str) -> None:
        """Count one less."""
        self.total -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]
