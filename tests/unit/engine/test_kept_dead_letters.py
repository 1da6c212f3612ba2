"""Messages of a dead-letter topic whose consumer fails: they stay, and no copy is made."""

from __future__ import annotations

import pytest

from tests.support.disk.log_checker import judge
from tests.support.worlds.engine_world import GROUP, TOPIC, World
from tidemill.broker.engine.events.event import EventKind, EventQuery

DEAD = f"%DLQ%{GROUP}"
SECOND_MS = 1_000


def world_with_dead_letters(*, is_ordered: bool) -> World:
    world = World(is_followed=True)
    world.topic(TOPIC)
    world.group(max_attempts=2, is_ordered=is_ordered)
    world.send("a", "b", "c")
    for one in world.pop(3):
        world.engine.commands.dead_letter(one.delivery, world.now_ms)
    world.commit()
    return world


def dead_count(world: World) -> int:
    topic = world.engine.catalog.find_topic(DEAD)
    assert topic is not None
    return sum(queue.max_offset for queue in world.engine.catalog.queues_of(topic))


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("forwards", [False, True])
def test_a_failed_dead_letter_stays_in_its_topic(is_ordered: bool, forwards: bool) -> None:
    world = world_with_dead_letters(is_ordered=is_ordered)
    rounds = 0
    while popped := world.pop(3, topic=DEAD, invisible_ms=SECOND_MS):
        rounds += 1
        assert rounds < 10, "the group receives its dead letters without end"
        if forwards:
            for one in popped:
                world.engine.commands.dead_letter(one.delivery, world.now_ms)
            world.commit()
        world.advance(SECOND_MS)
    assert dead_count(world) == 3
    pair = world.group(), world.engine.catalog.topic_ids[DEAD]
    assert world.engine.state.counts["dead_letter_kept", *pair] == 3
    (notice,) = world.engine.consumption.redelivery.take_kept_notices()
    assert notice == (DEAD, GROUP, 3)
    assert world.bodies(topic=DEAD, group="another") == ["a", "b", "c"]
    world.restart(power_cut=True)
    assert world.pop(3, topic=DEAD) == []
    judge(world)


def test_the_event_of_a_kept_dead_letter_says_so() -> None:
    world = world_with_dead_letters(is_ordered=False)
    for one in world.pop(1, topic=DEAD):
        world.engine.commands.dead_letter(one.delivery, world.now_ms)
    world.commit()
    read = world.engine.events.read(
        EventQuery(kinds=frozenset({EventKind.DEAD_LETTERED})),
        from_position=0,
        from_index=0,
        until_position=0,
        log_bytes_max=1 << 20,
        events_max=100,
    )
    events = []
    while read.step():
        events += read.take()
    events += read.take()
    assert [event.reason for event in events][-1] == "kept"
