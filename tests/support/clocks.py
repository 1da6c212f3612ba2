"""Clocks that tests move."""

from __future__ import annotations


class ManualClock:
    """Both clocks in one; `advance` moves them together."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self.now_ms = now_ms

    def wall_ms(self) -> int:
        return self.now_ms

    def unsteady_wall_ms(self) -> int:
        return self.wall_ms()

    def monotonic_ms(self) -> int:
        return self.now_ms

    def advance(self, by_ms: int) -> None:
        self.now_ms += by_ms
