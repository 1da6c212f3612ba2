"""The clock for due timers and deadlines. It waits out jumps of the wall clock.

It follows the wall clock while that runs like the monotonic clock. After a jump of more than
JUMP_MS in either direction it holds: it runs like the monotonic clock for `hold_ms`, and then takes
the wall time, even if that is earlier. Otherwise it never goes back. Going back fires no timer
twice, because a delivered timer is settled in the state table.
"""

from __future__ import annotations

from typing import final

JUMP_MS = 500
HOLD_MS = 10_000


@final
class FiringClock:
    """The firing time, from readings of the two clocks."""

    def __init__(self, *, hold_ms: int = HOLD_MS) -> None:
        self._hold_ms = hold_ms
        self._wall_ms = 0  # the last reading
        self._monotonic_ms = 0
        self._hold_until_ms = 0  # monotonic; 0: no hold
        self._firing_ms = 0
        self.last_step_ms = 0  # the last jump

    @property
    def is_holding(self) -> bool:
        """Whether the clock is waiting out a jump."""
        return self._hold_until_ms > 0

    def read(self, wall_ms: int, monotonic_ms: int) -> int:
        """Return the firing time, from the current readings of the two clocks."""
        if not self._wall_ms:
            self._wall_ms, self._monotonic_ms, self._firing_ms = wall_ms, monotonic_ms, wall_ms
            return wall_ms
        elapsed_ms = monotonic_ms - self._monotonic_ms
        step_ms = wall_ms - (self._wall_ms + elapsed_ms)
        self._wall_ms, self._monotonic_ms = wall_ms, monotonic_ms
        if abs(step_ms) > JUMP_MS:
            self.last_step_ms = step_ms
            # A second jump that undoes the first one ends the hold.
            is_undone = self.is_holding and abs(wall_ms - self._firing_ms - elapsed_ms) <= JUMP_MS
            self._hold_until_ms = 0 if is_undone else monotonic_ms + self._hold_ms
        elif self.is_holding and monotonic_ms >= self._hold_until_ms:
            self._hold_until_ms = 0
            self._firing_ms = wall_ms
        target_ms = self._firing_ms + elapsed_ms if self.is_holding else wall_ms
        self._firing_ms = max(self._firing_ms, target_ms)
        return self._firing_ms
