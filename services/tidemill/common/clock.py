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

    def monotonic_ms(self) -> int:
        """Return milliseconds since some instant in the past, unmoved by clock changes."""
        ...


class SystemClock:
    """The machine's clocks; a wall clock that is set back stands still until it has caught up."""

    def __init__(self) -> None:
        self._wall_ms_max = 0

    def wall_ms(self) -> int:
        """Return milliseconds since the Unix epoch; never less than an earlier answer."""
        now_ms = time.time_ns() // 1_000_000
        if now_ms > self._wall_ms_max:
            self._wall_ms_max = now_ms
        return self._wall_ms_max

    def monotonic_ms(self) -> int:
        """Return milliseconds since some instant in the past, unmoved by clock changes."""
        return time.monotonic_ns() // 1_000_000
