"""Shares of a limited resource: a user or address gets at most as much as is free.

The largest one is rejected first, and a new one finds room (ADR 0017). Calls of a known user share
its part, from all addresses. Calls without a user share that of their address, because clients
choose their own ids.
"""

from __future__ import annotations

from collections import Counter
from typing import final

from tidemill.common.addresses import host_of_peer


def sharer_of(user: str, peer: str) -> str:
    """Return the key of the shares of a call; `user` is "" if it is unknown."""
    return f"user {user}" if user else host_of_peer(peer)


@final
class Shares:
    """The used shares by user or address."""

    __slots__ = ("_by_sharer", "_count_max", "total")

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._by_sharer: Counter[str] = Counter()
        self.total = 0

    def has_room(self, sharer: str) -> bool:
        """Whether a user or address may take one more."""
        return self._by_sharer[sharer] < self._count_max - self.total

    def take(self, sharer: str) -> None:
        """Count one more."""
        self._by_sharer[sharer] += 1
        self.total += 1

    def give_back(self, sharer: str) -> None:
        """Count one less."""
        self.total -= 1
        self._by_sharer[sharer] -= 1
        if not self._by_sharer[sharer]:
            del self._by_sharer[sharer]
