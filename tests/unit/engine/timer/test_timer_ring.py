"""The ring of slots: its end, timers due beyond it, and clocks that jump by whole revolutions."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.support.worlds.timer_world import DAY_MS, HOUR_MS, SECOND_MS, TIMERS, TimerWorld
from tidemill.broker.engine.layout.timer_control import Frontier

SLOTS = TIMERS.wheel_slots


def test_a_paused_process_parks_distant_timers_again_and_moves_the_hand() -> None:
    """Parked timers must not go to slots that are loaded already, which would stop the hand."""
    world = TimerWorld()
    for n in range(50):
        world.schedule(f"far-{n}", delay_ms=3 * DAY_MS + n)
    world.schedule("near", delay_ms=21 * HOUR_MS)
    world.now_ms += 20 * HOUR_MS
    world.sleep(2 * SECOND_MS)
    timers = world.engine.timers
    assert timers.near.outstanding_count == 0, "no slot is loaded days ahead"
    assert timers.index.links.hand_s > world.now_ms // 1000 - SLOTS
    world.sleep(HOUR_MS)
    assert world.texts() == ["near"]
    assert world.delivered[0].stored_at_ms == world.delivered[0].due_at_ms
    world.check()


def test_a_pause_of_many_revolutions_delivers_the_backlog_at_once() -> None:
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
def test_the_frontier_stays_before_the_backlog_of_an_outage(is_wheel_lost: bool) -> None:
    """After a long outage the hand begins after timers that are in the first slot."""
    world = TimerWorld()
    for n in range(200):
        world.schedule(f"m{n}", delay_ms=SECOND_MS + n)
    world.background()
    world.now_ms += 2 * HOUR_MS
    if is_wheel_lost and "timer/wheel" in world.disk.names("timer"):
        world.disk.remove("timer/wheel")
    world.restart()
    # The log checker compares each FRONTIER record with the pending timers.
    world.sleep(5 * SECOND_MS)
    assert len(world.texts()) == 200
    assert world.timers.frontier_ms > world.now_ms - 10 * SECOND_MS


@pytest.mark.parametrize("stride_ms", [2 * SLOTS * SECOND_MS, SLOTS * SECOND_MS // 10])
def test_a_rebuild_after_many_revolutions_links_timers_at_the_present(stride_ms: int) -> None:
    """With an old hand the rebuilt ring would end before the present."""
    world = TimerWorld()
    for n in range(5):
        world.schedule(f"m{n}", delay_ms=(n + 1) * HOUR_MS // 6)
    world.schedule("far", delay_ms=30 * HOUR_MS)
    world.sleep(SECOND_MS)
    index = world.engine.timers.index
    index.links.is_damaged = True
    end_ms = world.now_ms + 2 * SLOTS * SECOND_MS
    while world.now_ms < end_ms:
        world.now_ms += stride_ms
        world.run_due()
    world.schedule("near", delay_ms=HOUR_MS)
    world.schedule("next", delay_ms=HOUR_MS // 2)
    take_census(world)
    world.background()
    assert not world.engine.timers.index.links.is_damaged
    world.sleep(2 * SECOND_MS)
    assert sorted(world.texts()) == ["m0", "m1", "m2", "m3", "m4"]
    assert world.engine.timers.near.outstanding_count == 0, "no slot is loaded hours ahead"
    assert index.links.hand_s >= world.now_ms // 1000 - 1
    world.sleep(2 * HOUR_MS)
    world.advance(28 * HOUR_MS)
    assert world.texts()[-3:] == ["next", "near", "far"]
    assert world.delivered[-3].stored_at_ms == world.delivered[-3].due_at_ms
    world.check()


def take_census(world: TimerWorld) -> None:
    """Count as the background does, while the links are damaged."""
    timers = world.engine.timers
    for files in chain(timers.census.take(world.now_ms), timers.janitor.audit.run(world.now_ms)):
        for file in files:
            file.sync()


def test_a_follower_continues_when_the_hand_passes_damaged_links() -> None:
    world = TimerWorld()
    for n in range(3):
        world.schedule(f"m{n}", delay_ms=(n + 1) * 20 * SECOND_MS)
    index = world.engine.timers.index
    index.link_gathered()
    slot_s = index.links.wheel.filled(index.links.hand_s + 1, index.links.ring_end_s)[1]
    index.links.wheel.link(slot_s, index.links.timer_log.end + 64, change=1)
    index.is_following = True
    frontier_s = world.now_ms // 1000 + 50
    index.apply_frontier(Frontier(frontier_s * 1000), world.now_ms)
    assert index.links.is_damaged
    assert index.links.hand_s == frontier_s
    index.is_following = False
    world.background()
    assert not world.engine.timers.index.links.is_damaged
    world.sleep(70 * SECOND_MS)
    assert sorted(world.texts()) == ["m0", "m1", "m2"]
    world.check()
