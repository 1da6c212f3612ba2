"""The time until the disks of broker groups are full, from their growth in the last hour."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple, final

PERIOD_MS: Final = 60_000
POINTS_MAX: Final = 61  # of an hour
SPAN_MIN_MS: Final = 600_000  # A shorter time tells little: segments are freed in steps.
STALE_MS: Final = 3 * PERIOD_MS

TOO_SHORT: Final = "the disk is known for less than 10 minutes; look again later"
NO_GROWTH: Final = "the disk has not grown in the last hour"
NO_ANSWER: Final = "the broker group has not answered for 3 minutes"


class DiskPoint(NamedTuple):
    """The disk of a broker group at one moment."""

    at_ms: int  # by the monotonic clock
    used_bytes: int
    room_bytes: int  # until sends are rejected


class DiskForecast(NamedTuple):
    """The time until sends are rejected; or None, and the reason."""

    full_in_ms: int | None
    unknown: str = ""


@final
class DiskForecasts:
    """The last hour of the disk of each broker group: 60 points, some 5 KiB each."""

    def __init__(self) -> None:
        self._points: dict[str, deque[DiskPoint]] = {}  # by broker group

    def note(self, broker: str, point: DiskPoint) -> None:
        """Record a disk."""
        self._points.setdefault(broker, deque(maxlen=POINTS_MAX)).append(point)

    def forget_unless(self, brokers: frozenset[str]) -> None:
        """Forget all other broker groups."""
        self._points = {name: known for name, known in self._points.items() if name in brokers}

    def of(self, broker: str, *, now_ms: int) -> DiskForecast:
        """Return the time until the disk is full, if it grows as in the last hour."""
        points = self._points.get(broker)
        if points is None:
            return DiskForecast(None, TOO_SHORT)
        first, last = points[0], points[-1]
        if now_ms - last.at_ms > STALE_MS:
            return DiskForecast(None, NO_ANSWER)
        if last.room_bytes <= 0:
            return DiskForecast(0)
        if last.at_ms - first.at_ms < SPAN_MIN_MS:
            return DiskForecast(None, TOO_SHORT)
        grown_bytes = last.used_bytes - first.used_bytes
        if grown_bytes <= 0:
            return DiskForecast(None, NO_GROWTH)
        left_ms = last.room_bytes * (last.at_ms - first.at_ms) // grown_bytes
        return DiskForecast(max(left_ms - (now_ms - last.at_ms), 0))
