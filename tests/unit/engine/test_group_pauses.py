"""Pauses of consumer groups: pops find nothing until the pause ends."""

from __future__ import annotations

import pytest

from tests.support.worlds.engine_world import GROUP, World
from tidemill.broker.engine.message_filter import EVERY_MESSAGE
from tidemill.broker.engine.metadata.group_pause import PAUSE_MS_MAX, REASON_CHARS_MAX, GroupPause
from tidemill.common.errors import BadRequest, Conflict, GroupNotFound

HOUR_MS = 3_600_000


def pause(world: World, duration_ms: int = HOUR_MS, reason: str = "") -> None:
    wanted = GroupPause(until_ms=world.now_ms + duration_ms, by="ops", reason=reason)
    world.engine.group_pauses.put(GROUP, wanted, now_ms=world.now_ms)
    world.commit()


def resume(world: World) -> None:
    world.engine.group_pauses.put(GROUP, None, now_ms=world.now_ms)
    world.commit()


def ready_count(world: World) -> int:
    ids = world.group(), world.topic()
    found = world.engine.consumption.ready_count(*ids, wanted=EVERY_MESSAGE, now_ms=world.now_ms)
    return found.ready_count


@pytest.fixture
def world() -> World:
    world = World(is_followed=True)
    world.group()
    assert world.bodies() == []
    world.send("a", "b")
    return world


def test_a_paused_group_gets_nothing_and_another_group_does(world: World) -> None:
    pause(world)
    assert world.bodies() == []
    assert ready_count(world) == 0
    assert world.bodies(group="other") == ["a", "b"]


def test_a_resumed_group_gets_its_messages_at_once(world: World) -> None:
    pause(world)
    world.engine.take_ready()
    resume(world)
    assert world.engine.next_due_ms(world.now_ms, firing_ms=world.now_ms) == 0
    world.run_due()
    _, keys = world.engine.take_ready()
    assert keys == {(world.group(), world.topic())}  # Parked polls are tried again.
    assert world.bodies() == ["a", "b"]


def test_the_end_of_a_pause_needs_no_record_and_wakes_polls(world: World) -> None:
    pause(world, HOUR_MS)
    world.run_due()
    world.engine.take_ready()
    log_end = world.engine.log.log_end
    assert world.engine.next_due_ms(world.now_ms, firing_ms=world.now_ms) == (
        world.now_ms + HOUR_MS
    )
    world.advance(HOUR_MS - 1)
    assert world.engine.take_ready() == (set(), set())
    assert ready_count(world) == 0
    world.advance(1)
    assert world.engine.log.log_end == log_end
    assert world.engine.take_ready()[1] == {(world.group(), world.topic())}
    assert ready_count(world) == 2
    assert world.engine.next_due_ms(world.now_ms, firing_ms=world.now_ms) is None
    assert world.bodies() == ["a", "b"]


def test_deliveries_in_flight_are_acked_and_expire_during_a_pause(world: World) -> None:
    first, second = world.pop(2, invisible_ms=1_000)
    pause(world)
    world.ack(first)
    world.advance(1_000)
    assert world.bodies() == []
    resume(world)
    [again] = world.pop()
    assert (again.body, again.attempt) == (second.body, 2)


def test_a_first_poll_during_a_pause_begins_the_group(world: World) -> None:
    pause(world)
    world.engine.administration.put_group(GROUP, max_attempts=3, now_ms=world.now_ms)
    assert world.bodies(topic="new") == []
    world.send("c", topic="new")
    resume(world)
    world.run_due()
    assert (world.group(), world.topic("new")) in world.engine.take_ready()[1]
    assert world.bodies(topic="new") == ["c"]


@pytest.mark.parametrize("power_cut", [False, True])
def test_a_pause_survives_a_restart_and_its_end_wakes_polls(
    world: World, *, power_cut: bool
) -> None:
    pause(world, HOUR_MS, "database moves")
    world.restart(power_cut=power_cut)
    group = world.engine.catalog.find_group(GROUP)
    assert group is not None
    assert group.paused is not None
    assert group.paused.reason == "database moves"
    assert world.bodies() == []
    world.advance(HOUR_MS)
    assert world.engine.take_ready()[1] == {(world.group(), world.topic())}


def test_a_pause_survives_a_failover(world: World) -> None:
    pause(world)
    world.fail_over()
    assert world.bodies() == []
    world.advance(HOUR_MS)
    assert world.bodies() == ["a", "b"]


def test_a_second_pause_changes_the_end_and_an_equal_one_writes_nothing(world: World) -> None:
    pause(world, HOUR_MS)
    log_end = world.engine.log.log_end
    pause(world, HOUR_MS)
    assert world.engine.log.log_end == log_end
    pause(world, 2 * HOUR_MS)
    world.advance(HOUR_MS)
    assert world.bodies() == []
    world.advance(HOUR_MS)
    assert world.bodies() == ["a", "b"]


def test_a_deleted_group_leaves_no_pause(world: World) -> None:
    pause(world)
    world.engine.administration.delete_group(GROUP, world.now_ms)
    world.commit()
    world.run_due()
    world.engine.take_ready()
    assert world.engine.next_due_ms(world.now_ms, firing_ms=world.now_ms) is None
    assert world.bodies() == ["a", "b"]  # A new group of the name.


@pytest.mark.parametrize("duration_ms", [0, -1, PAUSE_MS_MAX + 1])
def test_a_pause_ends_in_the_future_within_thirty_days(world: World, duration_ms: int) -> None:
    with pytest.raises(Conflict):
        pause(world, duration_ms)
    assert world.bodies() == ["a", "b"]


@pytest.mark.parametrize("reason", ["x" * (REASON_CHARS_MAX + 1), "two\nlines", "\x1b[31mred"])
def test_the_reason_of_a_pause_is_one_short_line(world: World, reason: str) -> None:
    with pytest.raises(BadRequest):
        pause(world, reason=reason)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_pause_begins_again_after_the_clock_is_set_back(
    world: World, *, is_resumed: bool
) -> None:
    pause(world, HOUR_MS)
    world.advance(HOUR_MS)
    world.engine.take_ready()
    world.now_ms -= HOUR_MS // 2
    world.run_due()
    assert ready_count(world) == 0
    if is_resumed:
        resume(world)
        world.run_due()
    else:
        assert world.engine.next_due_ms(world.now_ms, firing_ms=world.now_ms) is not None
        world.advance(HOUR_MS // 2)
    assert world.engine.take_ready()[1] == {(world.group(), world.topic())}
    assert ready_count(world) == 2


def test_a_resume_after_the_end_of_a_pause_wakes_polls(world: World) -> None:
    pause(world, HOUR_MS)
    world.advance(HOUR_MS)
    world.engine.take_ready()
    resume(world)
    world.run_due()
    assert world.engine.take_ready()[1] == {(world.group(), world.topic())}
    assert world.engine.next_due_ms(world.now_ms, firing_ms=world.now_ms) is None


def test_a_pause_needs_a_group() -> None:
    with pytest.raises(GroupNotFound):
        pause(World())
