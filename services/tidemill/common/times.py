"""Times as people write and read them: 1h30m, 2027-01-01T08:00:00Z, "in 3 m 20 s"."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import typer

DURATION = "DURATION"  # name in help texts for the input of `duration_ms`
INSTANT = "TIME"  # name in help texts for the input of `instant_ms`

_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
# Each unit at most once, the largest first, because "30m1h" is probably a mistake.
_DURATION = re.compile("".join(rf"(?:(\d{{1,15}}){unit}(?![a-z]))?" for unit in _UNITS_MS))
_NUMBER = re.compile(r"\d{1,15}(?:\.\d{1,15})?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_SHOWN_MS_MAX = 253_402_300_799_999  # the end of the year 9999


def duration_ms(text: str) -> int:
    """Read a duration such as 250ms, 10m, 1h30m or 2d; end the command for other text."""
    found = _DURATION.fullmatch(text.strip())
    if not found or not any(found.groups()):
        raise typer.BadParameter(f"{text!r} is not a duration; write 250ms, 10m, 1h30m or 2d")
    parts = zip(found.groups(default="0"), _UNITS_MS.values(), strict=True)
    return sum(int(count) * unit_ms for count, unit_ms in parts)


def duration_within_ms(option: str, text: str, *, least: str, most: str) -> int:
    """Read the duration of an option; end the command if it is outside of the limits."""
    found = duration_ms(text)
    if not duration_ms(least) <= found <= duration_ms(most):
        raise typer.BadParameter(f"{option} is from {least} to {most}, not {text.strip()}")
    return found


def duration_text(duration_ms: int) -> str:
    """Return a duration as `duration_ms` reads it: 1h30m."""
    parts = []
    for unit, unit_ms in _UNITS_MS.items():
        if count := duration_ms // unit_ms:
            parts.append(f"{count}{unit}")
        duration_ms %= unit_ms
    return "".join(parts) or "0s"


def seconds(given: str | float) -> float:
    """Read a duration, or a number of seconds; end the command for other values.

    Files of options have numbers where a command line has text.
    """
    text = str(given).strip()
    return float(text) if _NUMBER.fullmatch(text) else duration_ms(text) / 1000


def instant_ms(text: str) -> int:
    """Read a time with its zone, such as 2027-01-01T08:00:00Z; end the command for other text.

    Fractions of a millisecond are rounded up, so that no time is too early.
    """
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a time; write 2027-01-01T08:00:00Z or 2027-01-01T09:00:00+01:00"
        ) from None
    if at.tzinfo is None:
        raise typer.BadParameter(f"{text!r} has no time zone; add Z for UTC, or +01:00")
    return -((_EPOCH - at) // _MILLISECOND)


def utc(at_ms: int) -> str:
    """Return an instant as text for people."""
    if not 0 <= at_ms <= _SHOWN_MS_MAX:
        return f"{at_ms} ms"
    at = _EPOCH + at_ms * _MILLISECOND
    return at.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")


def from_now(at_ms: int, now_ms: int) -> str:
    """Return the distance of an instant from now: "in 3 m 20 s", or "2 h 1 m ago"."""
    if at_ms >= now_ms:
        return f"in {span(at_ms - now_ms)}"
    return f"{span(now_ms - at_ms)} ago"


def age(at_ms: int | None, now_ms: int) -> str | None:
    """Return the age of an instant in its two largest units: "3 m 20 s"."""
    if at_ms is None:
        return None
    return span(max(now_ms - at_ms, 0))


def span(duration_ms: int) -> str:
    """Return a duration in its two largest units: "3 m 20 s"."""
    seconds = duration_ms // 1000
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86_400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} m"
    if minutes:
        return f"{minutes} m {seconds % 60} s"
    return f"{seconds} s"
