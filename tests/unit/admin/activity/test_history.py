"""The rings of the busiest topics and consumer groups."""

from __future__ import annotations

import sys
from functools import partial

from tidemill.admin.activity.history import (
    MINUTE_MS,
    MINUTES,
    OBJECTS_MAX,
    SERIES,
    STEP_MS,
    STEPS,
    History,
    HistoryKey,
    HistoryObject,
    Point,
    Ring,
    Series,
)

HOUR_MS = 3_600_000
BEGIN_MS = 1_700_000_040_000  # of a minute
IDLE: Point = (0.0, 0.0, 0.0, 0, 0)


def key(name: str) -> HistoryKey:
    return HistoryKey("topic", name)


def add(history: History, at_ms: int, **points: Point) -> None:
    objects = [
        HistoryObject(key(name), sum(rate or 0 for rate in point[:3]), partial(tuple, point))
        for name, point in points.items()
    ]
    for _ in history.add(at_ms, objects):
        pass


def found(history: History, name: str, from_ms: int, now_ms: int) -> Series:
    series = history.find(key(name), from_ms, now_ms)
    assert series is not None
    return series


def test_points_come_back_in_order_with_their_time() -> None:
    history = History()
    for n in range(3):
        add(history, BEGIN_MS + n * STEP_MS, orders=(float(n), 1.0, None, 7, 9))
    series = found(history, "orders", BEGIN_MS, BEGIN_MS + 3 * STEP_MS)
    assert (series.from_ms, series.step_ms) == (BEGIN_MS, STEP_MS)
    assert series.points == {
        "in": [0, 1, 2],
        "out": [1, 1, 1],
        "ack": [None, None, None],
        "lag": [7, 7, 7],
        "oldestMs": [9, 9, 9],
    }
    later = found(history, "orders", BEGIN_MS + STEP_MS, BEGIN_MS + 3 * STEP_MS)
    assert (later.from_ms, later.points["in"]) == (BEGIN_MS + STEP_MS, [1, 2])
    assert found(history, "orders", BEGIN_MS + HOUR_MS, BEGIN_MS).points["in"] == []


def test_skipped_steps_are_unknown() -> None:
    ring = Ring(STEP_MS, 4)
    for step in (10, 11, 14):
        ring.put(step * STEP_MS, [float(step)] * len(SERIES))
    assert ring.since(0)[0] == 11 * STEP_MS
    assert ring.since(0)[1][0] == [11, None, None, 14]
    ring.put(12 * STEP_MS, [1.0] * len(SERIES))
    assert ring.since(0)[1][0] == [11, None, None, 14], "a clock that goes back changes nothing"
    ring.put(100 * STEP_MS, [5.0] * len(SERIES))
    assert ring.since(0)[1][0] == [None, None, None, 5]


def test_a_longer_range_has_the_means_of_minutes() -> None:
    history = History()
    for n in range(3 * MINUTE_MS // STEP_MS):
        rate = None if n == 1 else float(n // 12)
        add(history, BEGIN_MS + n * STEP_MS, orders=(rate, 0.0, 0.0, n, None))
    now_ms = BEGIN_MS + 3 * MINUTE_MS
    series = found(history, "orders", now_ms - 2 * HOUR_MS, now_ms)
    assert (series.from_ms, series.step_ms) == (BEGIN_MS, MINUTE_MS)
    assert series.points["in"] == [0, 1], "the last minute has not ended"
    assert series.points["lag"] == [5.5, 17.5]
    assert series.points["oldestMs"] == [None, None]


def test_only_a_much_busier_object_displaces_another_one() -> None:
    history = History(objects_max=2)
    busy: Point = (10.0, 0.0, 0.0, 0, 0)
    add(history, BEGIN_MS, first=busy, second=(5.0, 0.0, 0.0, 0, 0), third=IDLE)
    assert history.find(key("third"), 0, 0) is None
    add(history, BEGIN_MS + STEP_MS, third=(9.0, 0.0, 0.0, 0, 0))
    assert history.find(key("third"), 0, 0) is None, "not twice as busy as the second"
    add(history, BEGIN_MS + STEP_MS, third=(11.0, 0.0, 0.0, 0, 0))
    assert history.find(key("third"), 0, 0) is not None
    assert history.find(key("second"), 0, 0) is None
    assert history.find(key("first"), 0, 0) is not None


def test_a_deleted_object_leaves_its_place() -> None:
    history = History(objects_max=1)
    add(history, BEGIN_MS, first=IDLE)
    history.forget_unless(lambda each: each != key("first"))
    add(history, BEGIN_MS + STEP_MS, second=IDLE)
    assert history.find(key("second"), 0, 0) is not None


def test_the_rings_take_at_most_five_mebibytes() -> None:
    rings = [ring for _ in range(OBJECTS_MAX) for ring in (Ring(1, STEPS), Ring(1, MINUTES))]
    size = sum(sys.getsizeof(row) for ring in rings for row in ring._rows)
    assert size <= 5 << 20
