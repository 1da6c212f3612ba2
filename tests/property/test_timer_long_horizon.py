"""400 days of virtual time with three days of retention: no timer is lost, and no file piles up.

`TIMER_SOAK_COUNT` sets the number of timers. Each has up to 150 evacuated copies.
"""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random

import pytest

from tests.support.worlds.engine_world import SMALL
from tests.support.worlds.timer_world import DAY_MS, HOUR_MS, TIMERS, TimerWorld

pytestmark = pytest.mark.heavy

COUNT = int(os.environ.get("TIMER_SOAK_COUNT", "6000"))
DAYS = 400
STRIDE_MS = 8 * HOUR_MS
SEGMENT_BYTES = max(64 << 10, COUNT * 200 // 8 // 4096 * 4096)
CONFIG = replace(
    SMALL, segment_bytes=SEGMENT_BYTES, checkpoint_log_bytes=SEGMENT_BYTES, retention_ms=3 * DAY_MS
)
TIMER = replace(
    TIMERS,
    wheel_slots=1_209_600,
    timer_log_file_bytes=max(64 * 4096, COUNT * 64 // 8 // 64 * 64),
    table_file_entries=1024,
    load_chunk_records=262_144,
    flush_log_bytes=SEGMENT_BYTES // 2,
)


def test_all_timers_of_400_days_are_delivered_in_time_on_a_small_disk() -> None:
    random = Random(7)
    world = TimerWorld(config=CONFIG, timer=TIMER)
    begin_ms = world.now_ms
    for n in range(COUNT):
        due_at_ms = begin_ms + random.randrange(DAY_MS, DAYS * DAY_MS)
        world.schedule(f"m{n}", due_at_ms=due_at_ms, commit=n % 500 == 499)
    world.commit()
    world.background()
    largest = 0
    for stride in range(DAYS * DAY_MS // STRIDE_MS + 1):
        world.now_ms += STRIDE_MS
        world.run_due()
        world.background()
        if stride % 100 == 99:
            world.check()
            world.restart(power_cut=stride % 200 == 199)
        used = sum(world.disk.open(name).size() for name in world.disk.names("log"))
        pinned = world.engine.timers.index.counts.pinned_bytes
        # The pinned messages, the writes of three days and a stride, and whole segments.
        assert used <= 4 * pinned + 12 * SEGMENT_BYTES, f"{used} bytes for {pinned} at {stride}"
        timer_log = world.engine.timers.index.links.timer_log
        largest = max(largest, timer_log.size_bytes)
    world.check()
    assert not world.timers.open
    assert len(world.delivered) == COUNT
    for one in world.delivered:
        assert 0 <= one.stored_at_ms - one.due_at_ms <= STRIDE_MS
    assert max(one.copies for one in world.timers.timers.values()) > 50, "they were evacuated"
    assert largest <= 3 * 64 * COUNT + 4 * TIMER.timer_log_file_bytes
    assert world.engine.log.min_offset > 10 * SEGMENT_BYTES
