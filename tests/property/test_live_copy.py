"""A copy of a store whose broker runs: it starts, and has all that was answered before it began."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.offline_world import SEGMENT, BusySource, Life, finish
from tests.support.seeds import seeds
from tests.support.worlds.timer_world import DAY_MS, MINUTE_MS, TIMERS, TimerWorld
from tidemill.broker.engine.timer.status import TimerState
from tidemill.broker.offline.check import check
from tidemill.broker.offline.copy import copy

SLICE_BYTES = 4096  # so that much happens between the slices of one segment


@pytest.mark.parametrize("seed", seeds("live copies", 150))
def test_a_copy_of_a_live_store_has_all_that_was_answered_before(seed: int) -> None:
    life = Life(seed)
    life.live(life.random.choice((5, 60, 300)))
    life.hide()
    acts = life.random.choice((0, 0.2, 0.5, 1, 2))  # behind each read, on average
    target = FaultyDisk(Random(seed))
    source = BusySource(life.world.disk, lambda: life.live_about(acts))
    report = finish(copy(source, target, slice_bytes=SLICE_BYTES))
    assert not report.damaged
    target = target.after_power_cut()
    assert finish(check(target, life.world.config.timer)).findings == []
    if seed % 2:
        for folder in ("queues", "index", "snapshots"):
            for name in target.names(folder):
                target.remove(name)  # The log alone says it all.
    life.judge(target)


@pytest.mark.parametrize("seed", seeds("live copies of timers", 20))
def test_a_copy_has_all_delayed_messages_that_were_answered_before(seed: int) -> None:
    random = Random(seed)
    world = TimerWorld(
        FaultyDisk(Random(seed)),
        segment_bytes=SEGMENT,
        retention_bytes=4 * SEGMENT,
        checkpoint_log_bytes=SEGMENT // 2,
        timer=TIMERS,
    )

    def act() -> None:
        for _ in range(random.randint(0, 3)):
            delay_ms = random.choice((500, MINUTE_MS, DAY_MS))
            scheduled = world.schedule("t", delay_ms=delay_ms, size=500)
            if random.random() < 0.2 and world.state(scheduled.queue_offset) == TimerState.PENDING:
                world.cancel(scheduled.queue_offset)
        if random.random() < 0.3:
            world.sleep(random.choice((100, 1_000, 11_000)))
        world.background(random.randint(1, 20))

    for _ in range(random.choice((1, 20, 100))):
        act()
    before = dict(world.timers.open)
    target = FaultyDisk(Random(seed))
    finish(copy(BusySource(world.disk, act), target, slice_bytes=SLICE_BYTES))
    copied = TimerWorld(
        target.after_power_cut(), segment_bytes=SEGMENT, timer=TIMERS, now_ms=world.now_ms
    )
    copied.check()
    # What waited then waits in the copy, or was settled in the store meanwhile.
    assert before.keys() - copied.timers.open.keys() <= before.keys() - world.timers.open.keys()
    copied.sleep(2 * DAY_MS)
    assert not copied.timers.open
