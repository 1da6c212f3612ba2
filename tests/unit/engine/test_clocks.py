"""Wall clocks that are wrong: for a second, for an hour, until a restart."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.engine_world import World
from tests.support.faulty_disk import FaultyDisk
from tests.support.timer_world import SECOND_MS, TimerWorld
from tidemill.broker.engine.engine import AckResult

HOUR_MS = 3600 * 1000
DAY_MS = 24 * HOUR_MS
RETENTION_MS = 3 * DAY_MS


class TwoClocks(World):
    """A world whose wall clock (`now_ms`) can be wrong, and whose monotonic clock is not."""

    monotonic_ms: int

    def __init__(self) -> None:
        self.monotonic_ms = 5_000
        super().__init__(FaultyDisk(Random(0)), retention_ms=RETENTION_MS)

    def elapse(self, duration_ms: int) -> None:
        self.now_ms += duration_ms
        self.monotonic_ms += duration_ms

    def fill(self, count: int) -> None:
        for n in range(count):
            self.send(f"filler{n}", size=100_000)
        self.background()

    @property
    def has_retired(self) -> bool:
        return self.engine.log.min_offset > 0


def test_a_clock_that_is_days_ahead_for_a_second_costs_no_message() -> None:
    world = TwoClocks()
    world.group()
    world.fill(40)
    world.elapse(HOUR_MS)
    world.now_ms += 4 * DAY_MS
    world.background()
    assert not world.has_retired
    world.now_ms -= 4 * DAY_MS
    world.elapse(SECOND_MS)
    world.background()
    assert not world.has_retired
    assert len(world.drain()) == 40


def test_what_has_served_its_time_on_both_clocks_goes() -> None:
    world = TwoClocks()
    world.fill(40)
    world.elapse(RETENTION_MS - HOUR_MS)
    world.background()
    assert not world.has_retired
    world.elapse(2 * HOUR_MS)
    world.background()
    assert world.has_retired


def test_the_time_before_a_start_counts() -> None:
    world = TwoClocks()
    world.fill(40)
    world.elapse(RETENTION_MS - HOUR_MS)
    world.restart()
    world.monotonic_ms = 7_000  # The machine was started anew.
    world.background()
    assert not world.has_retired
    world.elapse(2 * HOUR_MS)
    world.background()
    assert world.has_retired


def test_a_clock_that_was_far_behind_at_the_start_keeps_nothing_for_ever() -> None:
    world = TwoClocks()
    world.fill(40)
    true_ms, world.now_ms = world.now_ms, 1_000_000
    world.restart()
    world.background()
    world.now_ms = true_ms
    world.elapse(RETENTION_MS + HOUR_MS)
    world.background()
    assert world.has_retired


@pytest.mark.parametrize("flushed", [False, True])
def test_what_was_popped_by_a_clock_that_was_ahead_comes_back_in_its_time(flushed: bool) -> None:
    world = World()
    world.group()
    world.send("m0", "m1")
    world.now_ms += HOUR_MS
    (first, _) = world.pop(2, invisible_ms=30 * SECOND_MS)
    if flushed:
        world.checkpoint()
    world.now_ms -= HOUR_MS
    world.restart()
    assert world.bodies() == []
    world.advance(29 * SECOND_MS)
    assert world.bodies() == []
    world.advance(2 * SECOND_MS)
    assert sorted(world.bodies()) == ["m0", "m1"]
    assert world.ack(first) == [AckResult.GONE], "its handle says that it still has an hour"


def test_a_live_delivery_of_a_clock_that_was_ahead_is_acked_by_its_handle() -> None:
    world = World()
    world.group()
    world.send("m0")
    world.now_ms += HOUR_MS
    (popped,) = world.pop(1, invisible_ms=30 * SECOND_MS)
    world.now_ms -= HOUR_MS
    world.restart()
    assert world.ack(popped) == [AckResult.APPLIED]
    world.advance(2 * HOUR_MS)
    assert world.bodies() == []


def test_timers_come_in_time_after_a_clock_that_was_ahead() -> None:
    """More of them than are loaded at once wait in the slot behind the hand."""

    def restart() -> None:
        world.checkpoint()
        world.engine.finish(world.now_ms)
        world.restart()

    world = TimerWorld()
    for n in range(3):
        world.schedule(f"then{n}", delay_ms=SECOND_MS)
        world.sleep(20 * SECOND_MS)
        world.background()
    world.now_ms -= HOUR_MS
    restart()
    assert world.engine.timers.index.hand_s > world.now_ms // 1000 + 3_000
    for n in range(600):
        world.schedule(f"m{n}", delay_ms=20 * SECOND_MS, commit=n % 50 == 49)
    restart()
    world.sleep(25 * SECOND_MS)
    late = [one.stored_at_ms - one.due_at_ms for one in world.delivered if one.text[0] == "m"]
    assert len(late) == 600
    assert max(late) <= 2 * SECOND_MS


def test_a_clock_that_is_days_ahead_at_the_start_and_set_right_soon_costs_no_message() -> None:
    world = TwoClocks()
    world.group()
    world.fill(40)
    world.now_ms += 4 * DAY_MS
    world.restart()
    for _ in range(5):
        world.elapse(2 * SECOND_MS)
        world.background()
    assert not world.has_retired
    world.now_ms -= 4 * DAY_MS
    for _ in range(12):
        world.elapse(10 * SECOND_MS)
        world.background()
    assert not world.has_retired
    assert len(world.drain()) == 40
