"""Room on the disk: what is said of it, and what is foreseen."""

from __future__ import annotations

import math

from structlog.testing import capture_logs

from tests.support.worlds.engine_world import World
from tidemill.broker.server.round.disk_room import SAMPLE_PERIOD_MS, DiskRoom

RESERVE_BYTES = 1 << 20


def test_a_full_disk_is_said_once_and_so_is_its_end() -> None:
    world, room = World(disk_reserve_bytes=RESERVE_BYTES), DiskRoom()
    with capture_logs() as logs:
        for number, free_bytes in enumerate([2, 0.5, 0.4, 0.9, 1.5, 3, 0.1]):
            world.leave_room(int(free_bytes * RESERVE_BYTES))
            room.look(world.engine, number * 1000)
    assert [line["event"].partition(":")[0] for line in logs] == [
        "disk full",
        "disk has room",
        "disk full",
    ]
    assert logs[0]["reserve_mib"] == 1


def test_when_the_disk_is_full_follows_from_the_last_hour() -> None:
    world, room = World(disk_reserve_bytes=RESERVE_BYTES), DiskRoom()
    assert room.full_in_s == math.inf
    for minute in range(10):
        world.leave_room((100 - minute) << 20)
        room.look(world.engine, minute * 6 * SAMPLE_PERIOD_MS)
    assert 91 * 59 < room.full_in_s < 91 * 61, "a MiB a minute"
    world.leave_room(200 << 20)
    room.look(world.engine, 60 * SAMPLE_PERIOD_MS)
    assert room.full_in_s == math.inf
