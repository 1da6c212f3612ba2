"""The clocks that the shells hand down to all other code.

Stored and displayed values use wall time, waits use monotonic time. Both are integers of
milliseconds.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The source of time of a shell."""

    def wall_ms(self) -> int:
        """Return milliseconds since the Unix epoch; never less than an earlier value."""
        ...

    def unsteady_wall_ms(self) -> int:
        """Return milliseconds since the Unix epoch from the machine's clock, which may jump."""
        ...

    def monotonic_ms(self) -> int:
        """Return milliseconds since a fixed instant; clock changes do not affect it."""
        ...


class SystemClock:
    """The machine's clocks.

    If the machine's wall clock is set back, wall time continues from its last value at the pace of
    the monotonic clock. Therefore a deadline never comes before its full time has elapsed.
    """

    def __init__(self) -> None:
        self._wall_ms = 0  # the last value, and the monotonic time of it
        self._answered_at_ms = 0

    def wall_ms(self) -> int:
        """Return milliseconds since the Unix epoch; never less than an earlier value."""
        wall_ms, monotonic_ms = self.unsteady_wall_ms(), self.monotonic_ms()
        elapsed_ms = self._wall_ms + monotonic_ms - self._answered_at_ms
        if wall_ms < self._wall_ms:
            wall_ms = elapsed_ms
        self._wall_ms, self._answered_at_ms = wall_ms, monotonic_ms
        return wall_ms

    def unsteady_wall_ms(self) -> int:
        """Return milliseconds since the Unix epoch from the machine's clock, which may jump."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Return milliseconds since a fixed instant; clock changes do not affect it."""
        return time.monotonic_ns() // 1_000_000
