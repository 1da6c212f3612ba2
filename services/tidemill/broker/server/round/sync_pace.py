"""Detection of a disk that is too slow for the others to wait for this replica; pure.

A disk is slow if for five seconds no sync has ended within one second. The first sync that does
ends this state. A disk that stalls for a moment is not slow; the master observes the lag of the
replica in any case. Without syncs the state is forgotten after ten seconds.
"""

from __future__ import annotations

from typing import Final, final

SLOW_SYNC_MS: Final = 1_000  # thousands of times the sync time of a good disk
SLOW_FOR_MS: Final = 5_000  # longer than a passing stall
FORGET_MS: Final = 10_000  # without a sync; the disk may be fast again


@final
class SyncPace:
    """The durations of the last syncs, which run one at a time."""

    def __init__(self) -> None:
        self._began_at_ms: int | None = None  # of the running sync
        self._slow_since_ms: int | None = None  # begin of the first of consecutive slow syncs
        self._ended_at_ms = 0

    def note_begin(self, now_ms: int) -> None:
        """Note that a sync begins."""
        if now_ms - self._ended_at_ms > FORGET_MS:
            self._slow_since_ms = None
        self._began_at_ms = now_ms

    def note_end(self, now_ms: int) -> None:
        """Note that the running sync has ended."""
        assert self._began_at_ms is not None, "a sync begins before it ends"
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
