"""The number of timers that are due soon, by topic, for the scaler."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.disk.counted_work import Meter
from tests.support.worlds.timer_world import DAY_MS, MINUTE_MS, SECOND_MS, TimerWorld
from tidemill.broker.engine.timer.due_count import BUCKETS_MAX, WITHIN_MAX, DueHistogram
from tidemill.broker.engine.timer.status import TimerState
from tidemill.common.errors import BadRequest


def count(world: TimerWorld, *within_ms: int) -> dict[str, list[int]]:
    """Count the timers due within each duration, by the name of the topic."""
    counted = world.engine.timers.commands.count_due(within_ms, firing_ms=world.now_ms)
    while counted.step():
        pass
    topics = world.engine.catalog.topics
    return {topics[topic_id].name: counts for topic_id, counts in counted.counts.items()}


def test_timers_due_within_a_horizon_are_counted_by_topic() -> None:
    world = TimerWorld()
    for n in range(3):
        world.schedule(f"near{n}", topic="one", delay_ms=30 * SECOND_MS)
    world.schedule("edge", topic="one", delay_ms=MINUTE_MS)
    world.schedule("behind", topic="one", delay_ms=MINUTE_MS + 1)
    world.schedule("other", topic="two", delay_ms=5 * SECOND_MS)
    world.schedule("far", topic="three", delay_ms=DAY_MS)
    assert count(world, 10 * SECOND_MS, MINUTE_MS) == {"one": [0, 4], "two": [1, 1]}
    assert count(world, DAY_MS) == {"one": [5], "two": [1], "three": [1]}


def test_cancelled_moved_and_delivered_timers_are_not_counted() -> None:
    world = TimerWorld()
    cancelled = world.schedule("cancelled", delay_ms=20 * SECOND_MS)
    moved = world.schedule("moved", delay_ms=20 * SECOND_MS)
    world.schedule("delivered", delay_ms=5 * SECOND_MS)
    assert sum(n for [n] in count(world, MINUTE_MS).values()) == 3
    world.cancel(cancelled.queue_offset)
    world.reschedule(moved.queue_offset, world.now_ms + DAY_MS)
    world.advance(6 * SECOND_MS)
    assert count(world, MINUTE_MS) == {}


def test_a_quarantined_timer_is_not_counted() -> None:
    world = TimerWorld()
    broken = world.schedule("broken", delay_ms=20 * SECOND_MS).queue_offset
    world.schedule("whole", delay_ms=20 * SECOND_MS)
    world.engine.timers.quarantined[broken] = 0
    assert [*count(world, MINUTE_MS).values()] == [[1]]


def test_the_count_equals_the_statuses_of_all_timers() -> None:
    world = TimerWorld()
    for n in range(2_000):
        world.schedule(f"m{n}", topic=f"topic{n % 3}", delay_ms=1_000 + n * 40, commit=n % 200 == 0)
    world.commit()
    world.advance(10 * SECOND_MS)
    within = (0, 5 * SECOND_MS, 33 * SECOND_MS)
    statuses = [world.engine.timers.commands.status(n) for n in range(2_000)]  # type: ignore[arg-type]  # Consecutive ids.
    expected: dict[str, list[int]] = {}
    for status in statuses:
        if status.state == TimerState.PENDING:
            ahead_ms = status.due_at_ms - world.now_ms
            if ahead_ms <= within[-1]:
                counts = expected.setdefault(status.topic, [0] * len(within))
                for place, horizon_ms in enumerate(within):
                    counts[place] += ahead_ms <= horizon_ms
    assert expected
    assert count(world, *within) == expected


@pytest.mark.parametrize("within", [(), (-1,), (2, 1), range(WITHIN_MAX + 1)])
def test_too_many_or_unsorted_horizons_are_rejected(within: Sequence[int]) -> None:
    with pytest.raises(BadRequest, match="horizons"):
        count(TimerWorld(), *within)


def histogram(
    world: TimerWorld, step_ms: int, buckets: int, topic: str | None = None
) -> DueHistogram:
    """Return a whole histogram."""
    topics = world.engine.catalog.topics
    topic_id = next((each for each in topics if topics[each].name == topic), None)
    counted = world.engine.timers.commands.due_histogram(
        step_ms, buckets, firing_ms=world.now_ms, topic_id=topic_id
    )
    while counted.step():
        pass
    return counted


def test_a_histogram_has_each_pending_timer_once() -> None:
    world = TimerWorld()
    for n in range(2_000):
        world.schedule(f"m{n}", topic=f"topic{n % 3}", delay_ms=1_000 + n * 40, commit=n % 200 == 0)
    world.commit()
    world.advance(10 * SECOND_MS)
    for topic in (None, "topic1"):
        found = histogram(world, 10 * SECOND_MS, 4, topic)
        statuses = [world.engine.timers.commands.status(n) for n in range(2_000)]  # type: ignore[arg-type]  # Consecutive ids.
        due = [
            status.due_at_ms
            for status in statuses
            if status.state == TimerState.PENDING and topic in (None, status.topic)
        ]
        begin = found.from_ms
        assert begin <= world.now_ms < begin + 10 * SECOND_MS
        assert begin % (10 * SECOND_MS) == 0
        places = [(at - begin) // (10 * SECOND_MS) for at in due]
        assert found.counts.tolist() == [places.count(number) for number in range(4)]
        assert found.later == sum(place >= 4 for place in places)
        assert found.overdue == sum(place < 0 for place in places)
        assert sum(found.by_topic.values()) == (len(due) if topic is None else 0)


def test_a_histogram_of_a_topic_without_timers_reads_none() -> None:
    world = TimerWorld()
    for n in range(100):
        world.schedule(f"m{n}", topic="late", delay_ms=DAY_MS)
    near = world.schedule("near", topic="near", delay_ms=DAY_MS).queue_offset
    world.commit()
    meter = Meter(world.engine)
    assert histogram(world, SECOND_MS, 10, "near").later == 1
    assert meter.take().items > 0
    world.cancel(near)
    meter.take()
    assert histogram(world, SECOND_MS, 10, "near").later == 0
    assert meter.take().items == 0


def test_an_overdue_timer_is_in_front_of_the_first_bucket() -> None:
    world = TimerWorld()
    world.schedule("near", delay_ms=30 * SECOND_MS)
    counted = world.engine.timers.commands.due_histogram(
        SECOND_MS, 10, firing_ms=world.now_ms + MINUTE_MS, topic_id=None
    )
    while counted.step():
        pass
    assert (counted.overdue, counted.later, counted.counts.sum()) == (1, 0, 0)


@pytest.mark.parametrize(("step_ms", "buckets"), [(0, 1), (1, 0), (1, BUCKETS_MAX + 1)])
def test_a_histogram_has_bounds(step_ms: int, buckets: int) -> None:
    with pytest.raises(BadRequest, match="buckets"):
        histogram(TimerWorld(), step_ms, buckets)
