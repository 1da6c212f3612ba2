"""One bit flips in a file that says again what the log says: nothing stops, nothing is missing."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest

from tests.support.engine_world import GROUP, World
from tests.support.faulty_disk import FaultyDisk

SEEDS = 20
SEGMENT = 64 << 10
TOPICS = ("orders", "returns")
FOLDERS = ("queues", "index", "snapshots")


def history() -> World:
    """Make a world with several files of each kind, the oldest in part below the log's minimum."""
    world = World(FaultyDisk(Random(0)), segment_bytes=SEGMENT, retention_bytes=3 * SEGMENT)
    world.group()
    for n in range(120):
        world.send(f"m{n}", topic=TOPICS[n % 2], size=1_800)
        if n % 20 == 19:
            world.checkpoint()
    world.send("taken", topic="returns")
    taken = world.pop(8, topic="orders", invisible_ms=60_000)
    world.ack(*taken[:3])
    world.checkpoint()
    world.send("the last", topic="orders")
    world.retire()
    assert world.engine.log.min_offset > 0
    return world


@cache
def disk_of_history() -> FaultyDisk:
    return history().disk


def derived_files() -> list[str]:
    disk = disk_of_history()
    return [*(name for folder in FOLDERS for name in disk.names(folder)), "checkpoint"]


def restarted(disk: FaultyDisk) -> World:
    return World(disk, segment_bytes=SEGMENT, retention_bytes=3 * SEGMENT)


def flip(disk: FaultyDisk, name: str, seed: int) -> None:
    random = Random(f"{name} {seed}")
    data = disk.read(name)
    assert data
    disk.damage(name, random.randrange(len(data)), bits=1 << random.randrange(8))


def delivered(world: World) -> dict[str, list[str]]:
    """Return all that two groups get, one of which was there before, with attempts and order."""
    found = {}
    for group in (GROUP, "late"):
        for topic in TOPICS:
            bodies = []
            while more := world.pop(group=group, topic=topic, invisible_ms=600_000):
                bodies += [f"{one.body} {one.offset} {one.attempt}" for one in more]
            found[f"{group} {topic}"] = bodies
    world.advance(60_001)
    found["again"] = [f"{one.body} {one.attempt}" for one in world.pop(topic="orders")]
    return found


@cache
def expected() -> dict[str, list[str]]:
    return delivered(restarted(disk_of_history().after_kill()))


@pytest.mark.parametrize("name", derived_files())
def test_a_start_over_a_damaged_derived_file_finds_everything(name: str) -> None:
    for seed in range(SEEDS):
        disk = disk_of_history().after_kill()
        flip(disk, name, seed)
        world = restarted(disk)
        assert world.engine.log.min_offset > 0


@pytest.mark.parametrize("name", derived_files()[:-1])
@pytest.mark.parametrize("position", range(16, 32, 3))
def test_a_range_that_is_not_that_of_the_name_is_not_believed(name: str, position: int) -> None:
    disk = disk_of_history().after_kill()
    disk.damage(name, position, bits=64)
    assert delivered(restarted(disk)) == expected()
