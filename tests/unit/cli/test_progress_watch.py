"""How fast a group is between two looks, and when it has caught up."""

from __future__ import annotations

from typing import Any

from tidemill.cli.progress_watch import HEAD, GroupRates, line_of, pace_of


def look(lag: int, stored: int, **more: object) -> dict[str, Any]:
    total = {"lag": lag, "ready": lag, "blocked": 0, "inFlight": 0, "stored": stored}
    return {"group": "billing", "total": total, **more}


def test_a_group_faster_than_its_sends_catches_up() -> None:
    # 20 have come and 60 have gone in two seconds: 20 a second less, 100 are left.
    pace = pace_of(look(140, 1_000), look(100, 1_020), 2.0)
    assert pace == GroupRates(in_per_s=10.0, out_per_s=30.0, caught_up_in_ms=5_000)
    assert line_of(look(100, 1_020), pace, "10:00:00").split() == [
        "10:00:00",
        "100",
        "100",
        "0",
        "10.0",
        "30.0",
        "5",
        "s",
    ]


def test_a_group_that_is_slower_never_catches_up() -> None:
    pace = pace_of(look(100, 1_000), look(120, 1_040), 2.0)
    assert pace == GroupRates(in_per_s=20.0, out_per_s=10.0, caught_up_in_ms=None)
    assert line_of(look(120, 1_040), pace, "10:00:00").endswith("never at this pace")


def test_a_group_without_lag_has_caught_up() -> None:
    pace = pace_of(look(0, 10), look(0, 12), 2.0)
    assert pace == GroupRates(in_per_s=1.0, out_per_s=1.0, caught_up_in_ms=0)
    assert line_of(look(0, 12), pace, "10:00:00").endswith("now")


def test_looks_that_do_not_compare_have_no_pace() -> None:
    whole, part = look(10, 100), look(5, 50, unreachable=["broker-1"])
    assert pace_of(whole, part, 2.0) is None
    assert pace_of(part, whole, 2.0) is None
    assert pace_of(whole, look(10, 90), 2.0) is None, "a topic was deleted"
    assert pace_of(look(10, 100), look(50, 100), 2.0) is None, "the group was reset"
    assert "without broker-1: unreachable" in line_of(part, None, "10:00:00")


def test_lines_stand_below_their_heads() -> None:
    line = line_of(look(123_456, 1), GroupRates(1.5, 2.5, 1_000), "10:00:00")
    assert line.index("1.5") + 3 == HEAD.index("IN/S") + 4
