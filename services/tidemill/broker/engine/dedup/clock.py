"""The clock of dedup keys: steps of the wall clock neither shorten nor extend a window.

In a process it follows the monotonic clock. It never goes back: the log has its times, and the next
master continues from the last one. Only for the time between two processes the wall clock counts.
"""

from __future__ import annotations

from typing import final


@final
class DedupClock:
    """The time of dedup keys, in ms."""

    def __init__(self) -> None:
        self.now_ms = 0  # as of the last reading
        self.known_ms = 0  # the highest time in the log
        # Time of this clock minus wall time, as of the newest record, and at most 0: the wall clock
        # was set forward by that. If it was set back, this clock waits for it.
        self.lead_ms = 0
        self._offset_ms: int | None = None  # to the monotonic clock; None: not read yet
        self._wall_lead_ms = 0

    def note(self, taken_at_ms: int, stored_at_ms: int) -> None:
        """Note a time in the log, and the wall time of its record."""
        if taken_at_ms >= self.known_ms:
            self.known_ms, self.lead_ms = taken_at_ms, min(taken_at_ms - stored_at_ms, 0)

    def begin_after(self, at_ms: int) -> None:
        """Begin later than a time of this clock, at the next process."""
        self.known_ms = max(self.known_ms, at_ms + 1)

    def read(self, now_ms: int, monotonic_ms: int) -> int:
        """Return the time, from the current readings of the wall clock and the monotonic clock."""
        if self._offset_ms is None:
            self._offset_ms = max(self.known_ms, now_ms + self.lead_ms) - monotonic_ms
        self.now_ms = max(monotonic_ms + self._offset_ms, self.now_ms)
        self._wall_lead_ms = self.now_ms - now_ms
        return self.now_ms

    def restart(self) -> None:
        """Continue from the log at the next reading: this process decides from now on."""
        self._offset_ms = None

    def wall_ms(self, at_ms: int) -> int:
        """Return the wall time of a time of this clock, as of the last reading."""
        return at_ms - self._wall_lead_ms
