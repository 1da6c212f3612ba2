"""The wall clock never goes back."""

from __future__ import annotations

import time

import pytest

from tidemill.common.clock import SystemClock


def test_the_wall_clock_continues_at_its_pace_while_the_machine_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SystemClock()
    history = (
        # wall clock of the machine, its monotonic clock, the returned value
        (1_000, 50, 1_000),
        (400, 60, 1_010),
        (900, 560, 1_510),
        (1_600, 570, 1_600),
        (9_000, 580, 9_000),
    )
    for wall_ms, monotonic_ms, shown_ms in history:
        monkeypatch.setattr(time, "time_ns", lambda ms=wall_ms: ms * 1_000_000)
        monkeypatch.setattr(time, "monotonic_ns", lambda ms=monotonic_ms: ms * 1_000_000)
        assert clock.wall_ms() == shown_ms
