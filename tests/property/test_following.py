"""A second engine that sees only the committed bytes of the log: equal state, and take-over."""

from __future__ import annotations

from tests.support.worlds.engine_world import GROUP, TOPIC, World
from tests.support.worlds.timer_world import DAY_MS, TimerWorld
from tidemill.broker.engine.configuration.administration import ResetTarget


def test_a_follower_has_the_same_state_after_every_round() -> None:
    world = World(is_followed=True)
    world.topic(queues=2)
    world.group(max_attempts=3)
    world.send(*[f"a{n}" for n in range(40)], tag="a")
    world.send(*[f"b{n}" for n in range(40)], queue_id=1, tag="b")
    first = world.pop(32)
    world.ack(*first[:20])
    world.change(first[21], 90_000)
    world.pop(5, tags=("b",))
    world.advance(31_000)
    world.drain()
    world.engine.administration.reset_offset(GROUP, TOPIC, ResetTarget(offset=3), world.now_ms)
    world.commit()
    world.pop(32)
    world.restart()
    world.pop(32)
    world.fail_over()
    assert world.drain()


def test_a_follower_takes_over_an_ordered_group_with_a_batch_in_flight() -> None:
    world = World(is_followed=True)
    world.group(is_ordered=True, max_attempts=5)
    world.send(*[f"m{n}" for n in range(20)])
    popped = world.pop(4)
    world.ack(popped[1])
    world.fail_over()
    assert world.bodies() == [], "the batch is still in flight"
    world.ack(popped[0], popped[2])
    world.advance(31_000)
    assert world.bodies(2) == ["m3", "m4"]


def test_a_follower_keeps_its_timers_linked_over_many_revolutions() -> None:
    world = TimerWorld(is_followed=True)
    for day in range(1, 30):
        world.schedule(f"day {day}", delay_ms=day * DAY_MS)
    far = world.schedule("far", delay_ms=60 * DAY_MS)
    for _ in range(20):
        world.schedule("soon", delay_ms=3_000)
        world.advance(DAY_MS)
    assert world.follower is not None
    world.follower.compare_deeply(world.engine)
    world.cancel(far[0])
    world.fail_over()
    world.advance(15 * DAY_MS)
    assert [text for text in world.texts() if text.startswith("day")] == [
        f"day {day}" for day in range(1, 30)
    ]
    world.check()
