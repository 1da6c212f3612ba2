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
        self._allowance = float(AUTO_CREATE_BURST)
        self._refilled_at_ms = 0

    def check_topics(self, count: int) -> None:
        """Raise Conflict if `count` topics, retry topics included, are the maximum."""
        if count >= self._topics_max:
            raise Conflict(
                f"{count} topics exist, including retry and dead-letter topics; the limit is"
                f" topics_max = {self._topics_max}. Delete topics, or raise topics_max"
            )

    def check_groups(self, count: int) -> None:
        """Raise Conflict if `count` consumer groups are the maximum."""
        if count >= self._groups_max:
            raise Conflict(
                f"{count} consumer groups exist; the limit is groups_max = {self._groups_max}."
                f" Delete consumer groups, or raise groups_max"
            )

    def take(self, now_ms: int) -> None:
        """Take one automatic creation from the allowance. Raises Overloaded."""
        passed_ms = max(now_ms - self._refilled_at_ms, 0)
        self._allowance = min(self._allowance + passed_ms * self._per_s / 1000, AUTO_CREATE_BURST)
        self._refilled_at_ms = now_ms
        if self._allowance < 1:
            raise Overloaded(
                f"too many topics and groups are created by their first use; the limit is"
                f" auto_create_per_s = {self._per_s}. Create them in advance, or retry later"
            )
        self._allowance -= 1
