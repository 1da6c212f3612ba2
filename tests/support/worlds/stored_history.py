"""A store with several files of each kind, and everything that its consumers receive."""

from __future__ import annotations

from functools import cache
from random import Random

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.engine_world import GROUP, World

SEGMENT = 64 << 10
TOPICS = ("orders", "returns")
START_MS = 1_000_000
MESSAGES = 120  # one in each millisecond


def history() -> World:
    """Make a world with several files of each kind.

    The oldest is partly before the log's minimum.
    """
    world = World(
        FaultyDisk(Random(0)), segment_bytes=SEGMENT, retention_bytes=3 * SEGMENT, now_ms=START_MS
    )
    world.group()
    for n in range(MESSAGES):
        world.now_ms += 1
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


def restarted(disk: FaultyDisk) -> World:
    return World(disk, segment_bytes=SEGMENT, retention_bytes=3 * SEGMENT)


def delivered(world: World) -> dict[str, list[str]]:
    """Return the deliveries of two groups, an existing and a new one, with attempts and order."""
    found = {
        f"{group} {topic}": drain(world, group, topic)
        for group in (GROUP, "late")
        for topic in TOPICS
    }
    world.advance(60_001)
    world.background()
    world.run_due()
    return found | {"again": drain(world, GROUP, "orders")}


def bodies(found: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the bodies per group, sorted."""
    return {name: sorted(one.split()[0] for one in popped) for name, popped in found.items()}


def drain(world: World, group: str, topic: str) -> list[str]:
    """Pop all messages in their order. Some come only after a rebuild."""
    found: list[str] = []
    while True:
        popped = world.pop(group=group, topic=topic, invisible_ms=600_000)
        found += [f"{one.body} {one.offset} {one.attempt}" for one in popped]
        if not popped and not world.engine.rebuilds.is_due:
            return found
        world.background()


@cache
def expected() -> dict[str, list[str]]:
    return delivered(restarted(disk_of_history().after_kill()))
