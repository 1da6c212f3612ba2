"""Limits on the number of topics and groups, and on the rate of their automatic creation.

Every producer may name a topic. Without a limit one client could fill memory, log and metrics.
"""

from __future__ import annotations

from typing import Final, final

from tidemill.common.errors import Conflict, Overloaded

AUTO_CREATE_BURST: Final = 1_000  # an application names all its topics and groups when it starts


@final
class Quota:
    """The limits, and the remaining allowance of the rate."""

    def __init__(self, *, topics_max: int, groups_max: int, auto_create_per_s: int) -> None:
        self._topics_max = topics_max
        self._groups_max = groups_max
        self._per_s = auto_create_per_s
        self._left = float(AUTO_CREATE_BURST)
        self._looked_at_ms = 0

    def check_topics(self, count: int) -> None:
        """Raise Conflict if `count` topics, retry topics included, are the maximum."""
        if count >= self._topics_max:
            raise Conflict(
                f"there are {count} topics, retry and dead-letter topics among them, and "
                f"topics_max is {self._topics_max}; delete some, or raise it"
            )

    def check_groups(self, count: int) -> None:
        """Raise Conflict if `count` consumer groups are the maximum."""
        if count >= self._groups_max:
            raise Conflict(
                f"there are {count} consumer groups, and groups_max is {self._groups_max}; delete "
                f"some, or raise it"
            )

    def take(self, now_ms: int) -> None:
        """Take one automatic creation from the allowance. Raises Overloaded."""
        passed_ms = max(now_ms - self._looked_at_ms, 0)
        self._left = min(self._left + passed_ms * self._per_s / 1000, AUTO_CREATE_BURST)
        self._looked_at_ms = now_ms
        if self._left < 1:
            raise Overloaded(
                f"too many topics and groups were created by their first use: auto_create_per_s is "
                f"{self._per_s}; create them before, or repeat after a pause"
            )
        self._left -= 1
