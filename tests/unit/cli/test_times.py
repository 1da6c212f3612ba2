"""Times as people write and read them."""

from __future__ import annotations

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from tidemill.common.times import duration_ms, from_now, instant_ms, seconds, utc


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("250ms", 250),
        ("1s", 1_000),
        ("10m", 600_000),
        ("1h30m", 5_400_000),
        ("2d", 172_800_000),
        ("1d2h3m4s5ms", 93_784_005),
        ("0s", 0),
        (" 90s ", 90_000),
    ],
)
def test_a_duration_is_a_sum_of_units(text: str, expected_ms: int) -> None:
    assert duration_ms(text) == expected_ms


@pytest.mark.parametrize("text", ["", "5", "m", "1h 30m", "30m1h", "-1s", "1.5h", "1H", "1mm"])
def test_an_invalid_duration_is_rejected(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="not a duration"):
        duration_ms(text)


@pytest.mark.parametrize(
    ("given", "expected_s"),
    [
        ("60", 60),
        (60, 60),
        ("0", 0),
        (" 0.5 ", 0.5),
        (0.5, 0.5),
        (60.0, 60),
        ("250ms", 0.25),
        ("1h30m", 5_400),
        ("2d", 172_800),
    ],
)
def test_a_number_alone_is_one_of_seconds(given: str | float, expected_s: float) -> None:
    assert seconds(given) == expected_s


@pytest.mark.parametrize("given", ["", "soon", "-1", -1, "1e3", "nan", "inf", ".5", "0.5h", True])
def test_seconds_accept_only_numbers_and_durations(given: str | float) -> None:
    with pytest.raises(typer.BadParameter, match="not a duration"):
        seconds(given)


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("2027-01-01T08:00:00Z", 1_798_790_400_000),
        ("2027-01-01T09:00:00+01:00", 1_798_790_400_000),
        ("2027-01-01 08:00:00.25Z", 1_798_790_400_250),
        ("2027-01-01T08:00:00.000001Z", 1_798_790_400_001),
        ("1969-12-31T23:59:59.9995Z", 0),
    ],
)
def test_an_instant_is_read_with_its_zone_and_never_earlier(text: str, expected_ms: int) -> None:
    assert instant_ms(text) == expected_ms


@pytest.mark.parametrize("text", ["", "tomorrow", "2027-13-01T00:00:00Z", "10m"])
def test_an_invalid_instant_is_rejected(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="not a time"):
        instant_ms(text)


def test_an_instant_without_a_zone_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="no time zone"):
        instant_ms("2027-01-01T08:00:00")


@given(st.integers(0, 253_402_300_799_999))
def test_a_printed_time_can_be_parsed(at_ms: int) -> None:
    assert instant_ms(utc(at_ms)) == at_ms


def test_an_instant_beyond_the_calendar_is_shown_as_a_number() -> None:
    assert utc(2**53) == "9007199254740992 ms"


@pytest.mark.parametrize(
    ("at_ms", "shown"), [(200_000, "in 3 m 20 s"), (0, "in 0 s"), (-7_260_000, "2 h 1 m ago")]
)
def test_the_distance_from_now_has_a_direction(at_ms: int, shown: str) -> None:
    assert from_now(at_ms + 10**12, 10**12) == shown
