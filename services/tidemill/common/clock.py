"""The clocks that the shells hand to everything below them.

Wall time is what is stored or shown; monotonic time is what is waited for. Both are integers of
milliseconds.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where a shell takes its time from."""

    def wall_ms(self) -> int:
        """Return milliseconds since the Unix epoch; never less than an earlier answer."""
        ...

    def unsteady_wall_ms(self) -> int:
        """Return milliseconds since the Unix epoch as the machine has it, jumps and all."""
        ...

    def monotonic_ms(self) -> int:
        """Return milliseconds since some instant in the past, unmoved by clock changes."""
        ...


class SystemClock:
    """The machine's clocks.

    While the machine's wall clock is behind an earlier answer, somebody having set it back, wall
    time goes on from that answer at the pace of the monotonic clock: a deadline comes after as much
    elapsed time as was asked for, and never early.
    """

    def __init__(self) -> None:
        self._wall_ms = 0  # the last answer, and when it was given
        self._answered_at_ms = 0

    def wall_ms(self) -> int:
        """Return milliseconds since the Unix epoch; never less than an earlier answer."""
        wall_ms, monotonic_ms = self.unsteady_wall_ms(), self.monotonic_ms()
        elapsed_ms = self._wall_ms + monotonic_ms - self._answered_at_ms
        if wall_ms < self._wall_ms:
            wall_ms = elapsed_ms
        self._wall_ms, self._answered_at_ms = wall_ms, monotonic_ms
        return wall_ms

    def unsteady_wall_ms(self) -> int:
        """Return milliseconds since the Unix epoch as the machine has it, jumps and all."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Return milliseconds since some instant in the past, unmoved by clock changes."""
        return time.monotonic_ns() // 1_000_000
