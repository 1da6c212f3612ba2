"""The levels of ready messages: what notifications and pops of a PRIORITY topic answer."""

from __future__ import annotations

from tests.support.worlds.engine_world import GROUP, TOPIC
from tests.unit.engine.test_priorities import HIGH, LevelWorld, level_of
from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.message_filter import EVERY_MESSAGE, MessageFilter
from tidemill.broker.engine.pop.readiness import NOTHING_READY, ReadyMessages
from tidemill.broker.engine.pop.ready_levels import ReadyLevels
from tidemill.broker.server.wire.filters import find_filter


def ids(world: LevelWorld) -> tuple[GroupId, TopicId]:
    return GroupId(world.group(GROUP)), TopicId(world.topic(TOPIC))


def ready(
    world: LevelWorld, *, level_min: int = 0, wanted: MessageFilter = EVERY_MESSAGE
) -> ReadyMessages:
    return world.engine.consumption.ready_count(
        *ids(world), wanted=wanted, now_ms=world.now_ms, level_min=level_min
    )


def levels(world: LevelWorld) -> ReadyLevels | None:
    found = world.engine.consumption.remaining_count(*ids(world))
    assert found == ready(world)
    return found.levels


def test_the_highest_level_and_the_oldest_messages_are_known() -> None:
    world = LevelWorld()
    world.pop()
    assert ready(world) == NOTHING_READY
    times = {}
    for level in (3, 0, 5):
        world.put(level, 2)
        times[level] = world.now_ms
        world.now_ms += 10
    assert levels(world) == ReadyLevels(5, times[3], times[3])
    assert ready(world).ready_count == 6
    world.ack(*world.pop(2))
    assert levels(world) == ReadyLevels(3, times[3], times[0])
    world.ack(*world.pop(2))
    assert levels(world) == ReadyLevels(0, times[0], 0)


def test_before_its_first_pop_a_group_may_have_messages_of_any_level() -> None:
    world = LevelWorld()
    world.put(1)
    assert ready(world) == ReadyMessages(1, is_unsure=True, levels=ReadyLevels(HIGH, 0, 0))
    assert world.engine.consumption.remaining_count(*ids(world)) is None
    assert ready(world, level_min=HIGH + 1) == NOTHING_READY, "no news for a proxy that knows it"
    world.pop()
    assert ready(world) == NOTHING_READY


def test_a_retry_counts_at_its_level() -> None:
    world = LevelWorld()
    world.put(0)
    world.put(HIGH)
    [popped] = world.pop(1, invisible_ms=1_000)
    assert level_of(popped) == HIGH
    found = levels(world)
    assert found is not None
    assert found.highest == 0
    world.now_ms += 1_000
    world.run_due()
    found = levels(world)
    assert found is not None
    assert found.highest == HIGH


def test_only_levels_that_are_waited_for_count() -> None:
    world = LevelWorld()
    world.pop()
    world.put(2, 3)
    assert ready(world, level_min=3) == NOTHING_READY
    world.put(4)
    found = ready(world, level_min=3)
    assert (found.ready_count, found.levels and found.levels.highest) == (1, 4)


def test_a_pop_takes_nothing_below_the_level_that_it_wants() -> None:
    world = LevelWorld()
    world.put(2, 3)
    assert world.pop(8, level_min=3) == []
    world.put(3)
    assert [level_of(one) for one in world.pop(8, level_min=3)] == [3, 2, 2, 2]


def test_a_filter_names_the_highest_level_with_a_match() -> None:
    world = LevelWorld()
    world.pop()
    world.send("6-0", queue_id=6, tag="other")
    world.send("1-1", queue_id=1, tag="wanted")
    wanted = find_filter(["wanted"], "")
    found = ready(world, wanted=wanted)
    assert (found.ready_count, found.levels and found.levels.highest) == (1, 1)
    assert ready(world, level_min=2, wanted=wanted) == NOTHING_READY


def test_other_topics_and_ordered_groups_have_no_remaining_levels() -> None:
    world = LevelWorld(is_ordered=True)
    world.put(5)
    world.ack(*world.pop(1))
    assert world.engine.consumption.remaining_count(*ids(world)) is None
    world.put(3)
    found = ready(world)
    assert (found.ready_count, found.levels and found.levels.highest) == (1, 3)
