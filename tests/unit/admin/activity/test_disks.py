"""The time until a disk is full."""

from __future__ import annotations

from tidemill.admin.activity.disks import (
    NO_ANSWER,
    NO_GROWTH,
    PERIOD_MS,
    POINTS_MAX,
    SPAN_MIN_MS,
    TOO_SHORT,
    DiskForecast,
    DiskForecasts,
    DiskPoint,
)

GIB = 1 << 30


def grown(minutes: int, *, bytes_per_minute: int, room_bytes: int = GIB) -> DiskForecasts:
    """Return the forecasts after some minutes of growth, with the room at their end."""
    known = DiskForecasts()
    for minute in range(minutes + 1):
        room = room_bytes + (minutes - minute) * bytes_per_minute
        known.note("b", DiskPoint(minute * PERIOD_MS, minute * bytes_per_minute, room))
    return known


def test_a_growing_disk_is_full_when_its_room_is_used() -> None:
    known = grown(20, bytes_per_minute=GIB // 64)
    assert known.of("b", now_ms=20 * PERIOD_MS) == DiskForecast(64 * PERIOD_MS)
    # Time passes also between two points.
    assert known.of("b", now_ms=21 * PERIOD_MS) == DiskForecast(63 * PERIOD_MS)


def test_a_full_disk_is_full_now() -> None:
    known = grown(1, bytes_per_minute=1, room_bytes=0)
    assert known.of("b", now_ms=PERIOD_MS) == DiskForecast(0)


def test_an_unknown_time_has_a_reason() -> None:
    known = grown(9, bytes_per_minute=1)
    assert known.of("b", now_ms=9 * PERIOD_MS) == DiskForecast(None, TOO_SHORT)
    assert known.of("other", now_ms=0) == DiskForecast(None, TOO_SHORT)
    minutes = SPAN_MIN_MS // PERIOD_MS
    for change in (0, -5):
        known = grown(minutes, bytes_per_minute=change)
        assert known.of("b", now_ms=SPAN_MIN_MS) == DiskForecast(None, NO_GROWTH)
    late_ms = SPAN_MIN_MS + 4 * PERIOD_MS
    known = grown(minutes, bytes_per_minute=5)
    assert known.of("b", now_ms=late_ms) == DiskForecast(None, NO_ANSWER)


def test_growth_is_that_of_the_last_hour() -> None:
    known = grown(POINTS_MAX + 20, bytes_per_minute=GIB)
    end_ms = (POINTS_MAX + 20) * PERIOD_MS
    for minute in range(1, POINTS_MAX + 1):
        known.note("b", DiskPoint(end_ms + minute * PERIOD_MS, 0, GIB))
    assert known.of("b", now_ms=end_ms + POINTS_MAX * PERIOD_MS).unknown == NO_GROWTH
    known.forget_unless(frozenset())
    assert known.of("b", now_ms=end_ms).unknown == TOO_SHORT
