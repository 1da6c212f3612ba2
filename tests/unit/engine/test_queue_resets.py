"""Resets of single queues to exact offsets."""

from __future__ import annotations

import pytest

from tests.support.worlds.engine_world import GROUP, TOPIC, World
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.common.errors import IllegalOffset, QueueNotFound

QUEUES, MESSAGES = 3, 4


def filled_world() -> World:
    world = World()
    world.topic(queues=QUEUES)
    for n in range(QUEUES * MESSAGES):
        world.send(f"m{n}", queue_id=n % QUEUES)
    assert len(world.pop(32)) == QUEUES * MESSAGES
    return world


def positions(world: World) -> list[int]:
    group, topic = world.engine.catalog.find_group(GROUP), world.engine.catalog.find_topic(TOPIC)
    assert group is not None
    assert topic is not None
    return world.engine.inspection.consumer_offsets(group, topic)


def reset(world: World, offsets: dict[int, int]) -> list[int]:
    target = ResetTarget(queues={QueueId(queue): offset for queue, offset in offsets.items()})
    done = world.engine.administration.reset_offset(GROUP, TOPIC, target, world.now_ms)
    world.commit()
    return done


def test_only_the_named_queues_move_also_after_a_restart() -> None:
    world = filled_world()
    world.ack(*world.pop(1))
    before = positions(world)
    assert reset(world, {2: MESSAGES, 0: 0}) == [0, MESSAGES], "in the order of the queues"
    assert positions(world) == [0, before[1], MESSAGES]
    world.restart()
    assert positions(world) == [0, before[1], MESSAGES]
    assert sorted(world.drain()) == ["m0", "m3", "m6", "m9"], "only queue 0 comes again"


@pytest.mark.parametrize("offset", [1, MESSAGES + 1])
def test_an_offset_outside_its_queue_is_refused_and_moves_no_queue(offset: int) -> None:
    world = filled_world()
    world.purge(queue_id=1, low=2)
    before, log_end = positions(world), world.engine.log.log_end
    with pytest.raises(IllegalOffset, match=f"2 to {MESSAGES}, and {offset} is outside"):
        reset(world, {0: 1, 1: offset})
    assert (positions(world), world.engine.log.log_end) == (before, log_end)


def test_an_unknown_queue_is_refused() -> None:
    world = filled_world()
    with pytest.raises(QueueNotFound, match=f"0 to {QUEUES - 1}, not {QUEUES}"):
        reset(world, {0: 0, QUEUES: 0})
    assert not world.drain(), "queue 0 has not moved"


def test_retries_stay_because_they_do_not_belong_to_one_queue() -> None:
    world = World()
    world.topic(queues=QUEUES)
    world.send("failed", queue_id=0)
    [failed] = world.pop(1)
    world.change(failed, 1_000)
    world.advance(2_000)
    reset(world, {1: 0})
    assert world.drain() == ["failed"]
    target = ResetTarget(latest=True)
    world.send("again", queue_id=0)
    [again] = world.pop(1)
    world.change(again, 1_000)
    world.advance(2_000)
    world.engine.administration.reset_offset(GROUP, TOPIC, target, world.now_ms)
    world.commit()
    assert world.drain() == [], "a reset of all queues voids the retries"
