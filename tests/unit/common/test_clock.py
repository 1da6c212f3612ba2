"""The wall clock that never goes back."""

from __future__ import annotations

import time

import pytest

from tidemill.common.clock import SystemClock


def test_the_wall_clock_stands_still_while_the_machine_goes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SystemClock()
    for machine_ms, shown_ms in ((1_000, 1_000), (400, 1_000), (999, 1_000), (1_001, 1_001)):
        monkeypatch.setattr(time, "time_ns", lambda ms=machine_ms: ms * 1_000_000)
        assert clock.wall_ms() == shown_ms
