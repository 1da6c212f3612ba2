"""Rings of the numbers of the busiest topics and consumer groups, in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, final

SERIES: Final = ("in", "out", "ack", "lag", "oldestMs")
STEP_MS: Final = 5_000
STEPS: Final = 720  # an hour
MINUTE_MS: Final = 60_000
MINUTES: Final = 1_440  # a day
# 60 objects, 5 series and 2,160 points of 8 bytes take 4.94 MiB.
OBJECTS_MAX: Final = 60
# An untracked object displaces another one only if it is this many times as busy.
DISPLACES_AT: Final = 2.0
OBJECTS_A_SLICE: Final = 20  # a fraction of a millisecond, also if each is compared with all
BUSYNESS_KEPT: Final = 0.99  # of the mean, per sample: its half-life is six minutes

Point = Sequence[float | None]  # one number per series


class HistoryKey(NamedTuple):
    """A topic or a consumer group."""

    kind: str  # "topic" or "group"
    name: str


class HistoryObject(NamedTuple):
    """A topic or a consumer group in one sample."""

    key: HistoryKey
    busyness: float  # messages per second, in, out and acked
    find_point: Callable[[], Point]  # called only for objects with rings


class Series(NamedTuple):
    """The numbers of an object, oldest first."""

    from_ms: int
    step_ms: int
    points: Mapping[str, list[float | None]]


@final
class Ring:
    """The last numbers of one object, one per step of time."""

    def __init__(self, step_ms: int, size: int) -> None:
        self.step_ms = step_ms
        self.size = size
        self._rows = [array("d", [math.nan]) * size for _ in SERIES]
        self._last = -1  # the newest step
        self._first = -1  # the oldest step that was ever put

    def put(self, at_ms: int, point: Point) -> None:
        """Set the numbers of the step of a time; steps since the newest one are unknown."""
        step = at_ms // self.step_ms
        if self._last < 0:
            self._first = step
        elif step < self._last:
            return  # The clock went back.
        else:
            for skipped in range(max(self._last + 1, step - self.size + 1), step):
                self._set(skipped, [None] * len(SERIES))
        self._last = step
        self._set(step, point)

    def since(self, from_ms: int) -> tuple[int, list[list[float | None]]]:
        """Return the time of the first step, and the numbers of each series."""
        if self._last < 0:
            return from_ms, [[] for _ in SERIES]
        oldest = max(self._first, self._last - self.size + 1)
        first = min(max(oldest, from_ms // self.step_ms), self._last + 1)
        steps = range(first, self._last + 1)
        return first * self.step_ms, [
            [_known(row[step % self.size]) for step in steps] for row in self._rows
        ]

    def mean(self, from_ms: int, until_ms: int) -> list[float | None]:
        """Return the mean of each series in a range of time; None: no number is known."""
        steps = range(max(from_ms // self.step_ms, self._first, 0), until_ms // self.step_ms)
        means: list[float | None] = []
        for row in self._rows:
            known = [value for step in steps if not math.isnan(value := row[step % self.size])]
            means.append(sum(known) / len(known) if known else None)
        return means

    def _set(self, step: int, point: Point) -> None:
        for row, value in zip(self._rows, point, strict=True):
            row[step % self.size] = math.nan if value is None else value


def _known(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)


class _Tracked:
    """One object with its rings."""

    def __init__(self) -> None:
        self.hour = Ring(STEP_MS, STEPS)
        self.day = Ring(MINUTE_MS, MINUTES)
        self.busyness = 0.0
        self._minute = -1

    def put(self, at_ms: int, point: Point, busyness: float) -> None:
        self.busyness = self.busyness * BUSYNESS_KEPT + busyness * (1 - BUSYNESS_KEPT)
        minute = at_ms // MINUTE_MS
        if 0 <= self._minute < minute:
            begin_ms = self._minute * MINUTE_MS
            self.day.put(begin_ms, self.hour.mean(begin_ms, begin_ms + MINUTE_MS))
        self._minute = minute
        self.hour.put(at_ms, point)


@final
class History:
    """The rings of the busiest objects."""

    def __init__(self, objects_max: int = OBJECTS_MAX) -> None:
        self._objects_max = objects_max
        self._tracked: dict[HistoryKey, _Tracked] = {}
        self._floor = -1.0

    def add(self, at_ms: int, objects: Iterable[HistoryObject]) -> Iterator[None]:
        """Add one sample of all objects; yield between slices."""
        self._find_floor()
        for number, (key, busyness, find_point) in enumerate(objects):
            tracked = self._tracked.get(key) or self._admit(key, busyness)
            if tracked is not None:
                tracked.put(at_ms, find_point(), busyness)
            if number % OBJECTS_A_SLICE == 0:
                yield

    def forget_unless(self, is_known: Callable[[HistoryKey], bool]) -> None:
        """Drop the objects that were deleted."""
        for key in [key for key in self._tracked if not is_known(key)]:
            del self._tracked[key]

    def _find_floor(self) -> None:
        """Find the busyness above which an untracked object gets rings."""
        self._floor = -1.0
        if len(self._tracked) >= self._objects_max:
            self._floor = DISPLACES_AT * min(one.busyness for one in self._tracked.values())

    def _admit(self, key: HistoryKey, busyness: float) -> _Tracked | None:
        if busyness <= self._floor:
            return None
        if len(self._tracked) >= self._objects_max:
            del self._tracked[min(self._tracked, key=lambda one: self._tracked[one].busyness)]
        tracked = self._tracked[key] = _Tracked()
        tracked.busyness = busyness
        self._find_floor()
        return tracked

    def find(self, key: HistoryKey, from_ms: int, now_ms: int) -> Series | None:
        """Return the history of an object; None if it has none.

        The steps are 5 s if the last hour has all of the range, and minutes otherwise.
        """
        tracked = self._tracked.get(key)
        if tracked is None:
            return None
        is_hour = from_ms >= now_ms - STEPS * STEP_MS
        ring = tracked.hour if is_hour else tracked.day
        begin_ms, rows = ring.since(from_ms)
        return Series(begin_ms, ring.step_ms, dict(zip(SERIES, rows, strict=True)))
