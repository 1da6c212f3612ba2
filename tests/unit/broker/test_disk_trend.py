"""The free space on the disk: log lines and forecast."""

from __future__ import annotations

import math

from structlog.testing import capture_logs

from tests.support.worlds.engine_world import World
from tidemill.broker.server.round.disk_trend import SAMPLE_PERIOD_MS, DiskTrend

RESERVE_BYTES = 1 << 20


def test_the_begin_and_the_end_of_a_full_disk_are_each_logged_once() -> None:
    world, trend = World(disk_reserve_bytes=RESERVE_BYTES), DiskTrend()
    with capture_logs() as logs:
        for number, free_bytes in enumerate([2, 0.5, 0.4, 0.9, 1.5, 3, 0.1]):
            world.leave_room(int(free_bytes * RESERVE_BYTES))
            trend.update(world.engine, number * 1000)
    assert [line["event"].partition(":")[0] for line in logs] == [
        "disk full",
        "disk has room",
        "disk full",
    ]
    assert logs[0]["reserve_mib"] == 1


def test_the_forecast_of_a_full_disk_follows_the_last_hour() -> None:
    world, trend = World(disk_reserve_bytes=RESERVE_BYTES), DiskTrend()
    assert trend.full_in_s == math.inf
    for minute in range(10):
        world.leave_room((100 - minute) << 20)
        trend.update(world.engine, minute * 6 * SAMPLE_PERIOD_MS)
    assert 91 * 59 < trend.full_in_s < 91 * 61, "a MiB a minute"
    world.leave_room(200 << 20)
    trend.update(world.engine, 60 * SAMPLE_PERIOD_MS)
    assert trend.full_in_s == math.inf
