"""The ring of slots: its ends, what waits beyond it, and a clock that goes by revolutions."""

from __future__ import annotations

import pytest

from tests.support.timer_world import DAY_MS, HOUR_MS, SECOND_MS, TIMERS, TimerWorld

SLOTS = TIMERS.wheel_slots


def test_a_paused_process_parks_again_what_is_still_far_and_the_hand_goes_on() -> None:
    """Parked timers once went to slots that were loaded already, and held the hand there."""
    world = TimerWorld()
    for n in range(50):
        world.schedule(f"far-{n}", delay_ms=3 * DAY_MS + n)
    world.schedule("near", delay_ms=21 * HOUR_MS)
    world.now_ms += 20 * HOUR_MS
    world.sleep(2 * SECOND_MS)
    timers = world.engine.timers
    assert timers.near.outstanding_count == 0, "nothing is loaded days ahead"
    assert timers.index.hand_s > world.now_ms // 1000 - SLOTS
    world.sleep(HOUR_MS)
    assert world.texts() == ["near"]
    assert world.delivered[0].stored_at_ms == world.delivered[0].due_at_ms
    world.check()


def test_after_a_pause_of_many_revolutions_the_backlog_comes_at_once() -> None:
    world = TimerWorld()
    for n in range(40):
        world.schedule(f"m{n}", delay_ms=(n + 1) * HOUR_MS)
    world.now_ms += 39 * HOUR_MS
    world.run_due()
    assert sorted(world.texts()) == sorted(f"m{n}" for n in range(39))
    world.sleep(HOUR_MS)
    assert world.texts()[-1] == "m39"
    world.check()


@pytest.mark.parametrize("is_wheel_lost", [False, True])
def test_the_frontier_says_nothing_of_what_an_outage_has_left(is_wheel_lost: bool) -> None:
    """After a long one the hand begins behind timers that wait in the first slot."""
    world = TimerWorld()
    for n in range(200):
        world.schedule(f"m{n}", delay_ms=SECOND_MS + n)
    world.background()
    world.now_ms += 2 * HOUR_MS
    if is_wheel_lost and "timer/wheel" in world.disk.names("timer"):
        world.disk.remove("timer/wheel")
    world.restart()
    # The fold holds each FRONTIER record against what is open.
    world.sleep(5 * SECOND_MS)
    assert len(world.texts()) == 200
    assert world.timers.frontier_ms > world.now_ms - 10 * SECOND_MS
