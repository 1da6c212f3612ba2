"""Waits between timers and files: segments for timers, flushes for rounds, the hand for chains."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.engine_world import SMALL
from tests.support.worlds.timer_world import DAY_MS, HOUR_MS, SECOND_MS, TIMERS, TimerWorld
from tidemill.broker.engine.timer import evacuation

RETAINING = replace(SMALL, segment_bytes=32 << 10, retention_ms=HOUR_MS, checkpoint_log_bytes=8_000)


def test_a_segment_stays_while_it_has_the_message_of_a_pending_timer() -> None:
    """T-10, with an evacuation that is too slow."""
    world = TimerWorld(timer=replace(TIMERS, evacuation_rate_bytes=1), config=RETAINING)
    for n in range(400):
        world.schedule(f"m{n}", delay_ms=2 * DAY_MS + n, commit=n % 40 == 39)
    for _ in range(10):
        world.advance(HOUR_MS)
        world.background()
        world.check()
    assert world.engine.log.min_offset == 0
    world.advance(2 * DAY_MS)
    world.background()
    world.check()
    assert len(world.texts()) == 400
    assert world.engine.log.min_offset > 0, "the segment is removed then"


def test_a_segment_stays_while_a_replay_needs_its_timers() -> None:
    never = replace(TIMERS, flush_period_ms=1 << 50, flush_log_bytes=1 << 50)
    world = TimerWorld(timer=never, config=RETAINING)
    for n in range(400):
        world.schedule(f"m{n}", delay_ms=2_000, commit=n % 40 == 39)
    for _ in range(10):
        world.advance(HOUR_MS)
        world.background()
    assert len(world.texts()) == 400
    assert len(world.engine.log.segments) > 2
    assert world.engine.log.min_offset == 0


@pytest.mark.parametrize("is_prepared", [False, True])
def test_an_evacuation_stops_reading_a_removed_segment(
    monkeypatch: pytest.MonkeyPatch, is_prepared: bool
) -> None:
    """Its file is cut or used again: the fake disk fails if a view of it exists."""
    monkeypatch.setattr(evacuation, "RECORDS_A_SLICE", 4)
    world = TimerWorld(config=RETAINING)
    world.schedule("far", delay_ms=DAY_MS)
    number = 0
    while len(world.engine.log.segments) < 3:
        world.send(f"m{number}", topic="beside", size=300)
        number += 1
    if is_prepared:
        for _ in world.engine.log.prepare(slice_bytes=4096):
            pass
    world.checkpoint()
    world.judge()
    world.now_ms += 2 * HOUR_MS
    world.engine.timers.index.link_gathered()
    while not world.engine.timers.evacuation.evacuated:
        assert world.engine.timers.evacuation.step(world.now_ms)
        world.commit()
    world.judge()
    world.retire()
    for _ in range(100):
        if not world.engine.timers.evacuation.step(world.now_ms):
            break
    assert world.engine.log.min_offset > 0
    world.sleep(2 * DAY_MS)
    assert world.texts() == ["far"]


@pytest.mark.parametrize("seed", range(8))
def test_a_flush_waits_for_the_round_to_stay_behind_the_log(seed: int) -> None:
    world = TimerWorld(FaultyDisk(Random(seed)))
    world.schedule("answered", delay_ms=HOUR_MS)
    world.checkpoint()
    world.now_ms += 11 * SECOND_MS
    world.engine.run_due(world.now_ms, firing_ms=world.now_ms)
    world.commit()
    world.schedule("not answered", delay_ms=HOUR_MS, commit=False)
    for _ in range(40):
        for file in world.engine.background.step(world.now_ms, firing_ms=world.now_ms) or []:
            file.sync()
    world.restart(power_cut=True)
    world.check()
    world.advance(2 * HOUR_MS)
    assert world.texts() == ["answered"]


@pytest.mark.parametrize("power_cut", [False, True])
def test_the_hand_waits_for_all_of_a_long_chain(power_cut: bool) -> None:
    """A restart at any time continues with the timers that are not delivered."""
    timer = replace(TIMERS, load_chunk_records=64, flush_period_ms=1)
    world = TimerWorld(FaultyDisk(Random(3)), timer=timer)
    for n in range(3_000):
        world.schedule(f"m{n}", delay_ms=5_000, commit=n % 500 == 499)
    world.checkpoint()
    world.sleep(5_500)
    for _ in range(60):
        world.now_ms += 1_000
        for _ in range(2):
            world.engine.run_due(world.now_ms, firing_ms=world.now_ms)
            world.commit()
        world.background()
        world.check()
        world.restart(power_cut=power_cut)
    world.sleep(2_000)
    assert sorted(world.texts()) == sorted(f"m{n}" for n in range(3_000))


def test_a_rebuild_keeps_the_outcome_of_timers_without_a_schedule() -> None:
    world = TimerWorld(config=RETAINING)
    for n in range(100):
        world.schedule(f"m{n}", delay_ms=80 * SECOND_MS, commit=n == 99)
    while len(world.engine.log.segments) < 3:
        world.send("filler", topic="filler", size=2_000)
    world.sleep(100 * SECOND_MS)
    world.now_ms += HOUR_MS - 50 * SECOND_MS
    while world.engine.log.min_offset == 0:
        world.sleep(10 * SECOND_MS)
        world.background()
    for folder in ("timer", "timer/timerlog", "timer/state"):
        for name in world.disk.names(folder):
            world.disk.remove(name)
    world.restart()
    assert world.engine.timers.index.next_id == 100
    assert world.schedule("next", delay_ms=5_000).queue_offset == 100
    world.sleep(10_000)
    assert world.texts()[-1] == "next"
    world.check()
