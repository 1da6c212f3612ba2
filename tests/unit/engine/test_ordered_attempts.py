"""Attempts of ordered groups: only the message that failed counts, not the batch around it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.worlds.engine_world import GROUP, TOPIC, World

DEAD_LETTERS = f"%DLQ%{GROUP}"
UNTOUCHED = [f"m{n}" for n in range(1, 6)]
PUSH_CONSUMER = "push-consumer"


def restart_with_snapshot(world: World) -> None:
    world.checkpoint()
    world.restart(power_cut=True)


def restart_from_log(world: World) -> None:
    for folder in ("queues", "index", "snapshots"):
        for name in world.disk.names(folder):
            world.disk.remove(name)
    world.restart()


INTERRUPTIONS = {
    "none": lambda _world: None,
    "restart": World.restart,
    "snapshot": restart_with_snapshot,
    "log": restart_from_log,
    "failover": World.fail_over,
}


def world_of(*texts: str, max_attempts: int) -> World:
    world = World(is_followed=True)
    world.topic(TOPIC, queues=1)
    world.group(is_ordered=True, max_attempts=max_attempts)
    world.send(*texts)
    return world


@pytest.mark.parametrize("interrupt", INTERRUPTIONS.values(), ids=INTERRUPTIONS)
@pytest.mark.parametrize("max_attempts", [1, 3])
@pytest.mark.parametrize("fails", ["expires", "is changed", "client ends"])
def test_a_poison_message_takes_no_message_behind_it_to_the_dead_letters(
    fails: str, max_attempts: int, interrupt: Callable[[World], None]
) -> None:
    world = world_of("m0", *UNTOUCHED, max_attempts=max_attempts)
    for attempt in range(1, max_attempts + 1):
        client_id = PUSH_CONSUMER if fails == "client ends" else ""
        popped = world.pop(invisible_ms=60_000, client_id=client_id, renews=bool(client_id))
        assert [one.attempt for one in popped] == [attempt, *[1] * len(UNTOUCHED)]
        interrupt(world)
        if fails == "is changed":
            world.change(popped[0], 1_000)
            interrupt(world)
        elif fails == "client ends":
            world.end(PUSH_CONSUMER)
        world.advance(61_000)
        interrupt(world)
    again = world.pop(invisible_ms=60_000)
    assert [(one.body, one.attempt) for one in again] == [(text, 1) for text in UNTOUCHED]
    assert world.bodies(group="auditor", topic=DEAD_LETTERS) == ["m0"]


@pytest.mark.parametrize("interrupt", INTERRUPTIONS.values(), ids=INTERRUPTIONS)
def test_a_changed_message_counts_although_the_next_batch_is_smaller(
    interrupt: Callable[[World], None],
) -> None:
    world = world_of("m0", "m1", "m2", max_attempts=3)
    m0, _, m2 = world.pop(invisible_ms=1_000)
    world.change(world.change(m2, 1_000), 1_000)
    world.ack(m0)
    interrupt(world)
    world.advance(1_000)
    assert [(one.body, one.attempt) for one in world.pop(1, invisible_ms=1_000)] == [("m1", 2)]
    interrupt(world)
    world.advance(1_000)
    popped = world.pop(invisible_ms=1_000)
    assert [(one.body, one.attempt) for one in popped] == [("m1", 3), ("m2", 2)]


def test_a_batch_that_no_client_has_read_counts_no_attempt() -> None:
    world = world_of("m0", "m1", max_attempts=1)
    for _ in range(3):
        popped = world.pop(invisible_ms=1_000)
        assert [(one.body, one.attempt) for one in popped] == [("m0", 1), ("m1", 1)]
        world.give_back(*popped)
    m0, m1 = world.pop(invisible_ms=1_000)
    world.give_back(m1)
    world.ack(m0)
    world.advance(1_000)
    assert [(one.body, one.attempt) for one in world.pop()] == [("m1", 1)]


def test_a_message_that_its_client_forwards_leaves_the_next_one_in_hand() -> None:
    world = world_of("m0", "m1", "m2", max_attempts=3)
    m0, *_ = world.pop(invisible_ms=1_000)
    world.engine.commands.dead_letter(m0.delivery, world.now_ms)
    world.commit()
    world.advance(1_000)
    assert [(one.body, one.attempt) for one in world.pop()] == [("m1", 2), ("m2", 1)]


@pytest.mark.parametrize("interrupt", INTERRUPTIONS.values(), ids=INTERRUPTIONS)
@pytest.mark.parametrize("queues", [1, 3])
def test_a_repeated_attempt_gets_its_whole_batch_also_with_less_room(
    queues: int, interrupt: Callable[[World], None]
) -> None:
    """A quota allows each pop another number. The client has got no message of the first answer."""
    world = World(is_followed=True)
    world.topic(TOPIC, queues=3)
    world.group(is_ordered=True)
    for queue_id in range(queues):
        world.send(*[f"{queue_id}-{n}" for n in range(3)], queue_id=queue_id)
    first = world.pop(invisible_ms=30_000, attempt_id="a")
    assert len(first) == 3 * queues
    world.send("new", queue_id=2)
    interrupt(world)
    for _ in range(3):
        repeated = world.pop(2, invisible_ms=30_000, attempt_id="a")
        old = [one.body for one in repeated if one.body != "new"]
        assert sorted(old) == sorted([one.body for one in first])
    world.ack(*repeated)
    assert set(world.bodies()) | {one.body for one in repeated} >= {"new"}


def test_a_repeated_attempt_returns_its_batches_before_messages_of_other_queues() -> None:
    world = World()
    world.topic(TOPIC, queues=2)
    world.group(is_ordered=True)
    world.send("m0", "m1", queue_id=1)
    first = world.pop(invisible_ms=30_000, attempt_id="a")
    world.send("m2", "m3", queue_id=0)
    for _ in range(2):  # The queues take turns.
        repeated = world.pop(2, invisible_ms=30_000, attempt_id="a")
        assert [one.body for one in repeated] == [one.body for one in first]
