"""Clocks that tests move."""

from __future__ import annotations


class ManualClock:
    """Both clocks in one; `advance` moves them together, `step` the wall clock alone."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self.now_ms = now_ms
        self._wrong_by_ms = 0
        self._wall_ms = 0  # the last answer

    def wall_ms(self) -> int:
        self._wall_ms = max(self._wall_ms, self.unsteady_wall_ms())
        return self._wall_ms

    def unsteady_wall_ms(self) -> int:
        return self.now_ms + self._wrong_by_ms

    def monotonic_ms(self) -> int:
        return self.now_ms

    def advance(self, by_ms: int) -> None:
        self.now_ms += by_ms

    def step(self, by_ms: int) -> None:
        self._wrong_by_ms += by_ms
