"""A clock that waits out jumps: by it timers fire and deliveries run out.

Wall time, as long as that goes on like the monotonic clock. After a jump of more than JUMP_MS, in
either direction, it holds: it goes on at the pace of the monotonic clock for `hold_ms`, and then
takes wall time as it is, back or forth. It never goes back otherwise. A step backwards un-fires
nothing and fires nothing twice: what has fired is settled in the state table.
"""

from __future__ import annotations

from typing import final

JUMP_MS = 500
HOLD_MS = 10_000


@final
class FiringClock:
    """Firing time out of readings of the two clocks."""

    def __init__(self, *, hold_ms: int = HOLD_MS) -> None:
        self._hold_ms = hold_ms
        self._wall_ms = 0  # the last reading
        self._monotonic_ms = 0
        self._hold_until_ms = 0  # monotonic; 0: no hold
        self._firing_ms = 0
        self.last_step_ms = 0  # the last jump that was seen

    @property
    def is_holding(self) -> bool:
        """Whether a jump is being waited out."""
        return self._hold_until_ms > 0

    def read(self, wall_ms: int, monotonic_ms: int) -> int:
        """Return firing time, given what the two clocks show now."""
        if not self._wall_ms:
            self._wall_ms, self._monotonic_ms, self._firing_ms = wall_ms, monotonic_ms, wall_ms
            return wall_ms
        elapsed_ms = monotonic_ms - self._monotonic_ms
        step_ms = wall_ms - (self._wall_ms + elapsed_ms)
        self._wall_ms, self._monotonic_ms = wall_ms, monotonic_ms
        if abs(step_ms) > JUMP_MS:
            self.last_step_ms = step_ms
            # A second jump, back to where the first came from, ends what that began.
            is_undone = self.is_holding and abs(wall_ms - self._firing_ms - elapsed_ms) <= JUMP_MS
            self._hold_until_ms = 0 if is_undone else monotonic_ms + self._hold_ms
        elif self.is_holding and monotonic_ms >= self._hold_until_ms:
            self._hold_until_ms = 0
            self._firing_ms = wall_ms
        target_ms = self._firing_ms + elapsed_ms if self.is_holding else wall_ms
        self._firing_ms = max(self._firing_ms, target_ms)
        return self._firing_ms
