"""Whether the disk is too slow for this replica to be waited for: pure, told of each sync.

One that stalls for a moment is not: the lag of a replica is watched by its master. Slow is a disk
on which no sync has come back within a second for five (failover.md 20); the first that does ends
it. A disk that nobody writes to says nothing any more after a while.
"""

from __future__ import annotations

from typing import Final, final

SLOW_SYNC_MS: Final = 1_000  # thousands of times what a good disk takes
SLOW_FOR_MS: Final = 5_000  # longer than a stall that passes
FORGET_MS: Final = 10_000  # without a sync: it may be well again


@final
class SyncPace:
    """How the last syncs went; one at a time."""

    def __init__(self) -> None:
        self._began_at_ms: int | None = None  # of the one under way
        self._slow_since_ms: int | None = None  # when the first of only slow ones began
        self._ended_at_ms = 0

    def began(self, now_ms: int) -> None:
        """Hear that a sync has begun."""
        if now_ms - self._ended_at_ms > FORGET_MS:
            self._slow_since_ms = None
        self._began_at_ms = now_ms

    def ended(self, now_ms: int) -> None:
        """Hear that it has ended."""
        assert self._began_at_ms is not None, "it has begun"
        if now_ms - self._began_at_ms <= SLOW_SYNC_MS:
            self._slow_since_ms = None
        elif self._slow_since_ms is None:
            self._slow_since_ms = self._began_at_ms
        self._began_at_ms, self._ended_at_ms = None, now_ms

    def is_slow(self, now_ms: int) -> bool:
        """Whether the disk is slow."""
        since_ms, began_at_ms = self._slow_since_ms, self._began_at_ms
        if began_at_ms is not None and now_ms - began_at_ms > SLOW_SYNC_MS:
            since_ms = began_at_ms if since_ms is None else since_ms
        elif now_ms - self._ended_at_ms > FORGET_MS:
            return False
        return since_ms is not None and now_ms - since_ms >= SLOW_FOR_MS
