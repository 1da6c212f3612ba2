"""An operator releases a locked queue of an ordered group: its deliveries count as expired."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.worlds.engine_world import GROUP, TOPIC, PoppedMessage, World
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.broker.engine.queries.inspection import QueueLock
from tidemill.common.errors import Conflict, InvalidReceiptHandle

HIDDEN_MS = 3_600_000
SOON_MS = 1_000


def expire(world: World) -> None:
    world.advance(SOON_MS)


def ordered_world(*, max_attempts: int = 5) -> World:
    world = World(is_followed=True)
    world.group(is_ordered=True, max_attempts=max_attempts)
    return world


def lock_of(world: World) -> QueueLock | None:
    key = world.group(), world.topic(), QueueId(0)
    return world.engine.inspection.find_lock(key)


def progress_of(world: World) -> tuple[int, int]:
    group = world.engine.catalog.find_group(GROUP)
    assert group is not None
    (queue,) = world.engine.inspection.group_progress(group)
    return queue.ready_count, queue.in_flight_count


# Each has the invisible duration of the batch, and the event that ends it.
ENDINGS = pytest.mark.parametrize(
    ("hidden_ms", "end"),
    [(SOON_MS, expire), (HIDDEN_MS, World.release_lock)],
    ids=["expiry", "release"],
)


@ENDINGS
def test_a_released_batch_is_redelivered_first_and_counts_as_an_attempt(
    hidden_ms: int, end: Callable[[World], None]
) -> None:
    world = ordered_world()
    world.send("m0", "m1", "m2")
    first = world.pop(2, invisible_ms=hidden_ms)
    world.ack(first[0])
    assert world.bodies() == [], "the batch locks the queue"
    end(world)
    assert progress_of(world) == (2, 0)
    again = world.pop(2)
    assert [(one.body, one.attempt) for one in again] == [("m1", 2), ("m2", 1)]


@ENDINGS
def test_the_old_handle_is_valid_until_the_message_is_redelivered(
    hidden_ms: int, end: Callable[[World], None]
) -> None:
    world = ordered_world()
    world.send("m0", "m1")
    m0, m1 = world.pop(2, invisible_ms=hidden_ms)
    end(world)
    assert world.ack(m0) == [AckResult.APPLIED]
    assert world.bodies(1) == ["m1"]
    assert world.ack(m1) == [AckResult.GONE]
    with pytest.raises(InvalidReceiptHandle):
        world.change(m1, 5_000)


@ENDINGS
@pytest.mark.parametrize("what", ["restart", "power cut", "fail over", "checkpoint", "log alone"])
def test_the_old_handle_is_rejected_after_a_restart_too(
    hidden_ms: int, end: Callable[[World], None], what: str
) -> None:
    world = ordered_world()
    world.send("m0", "m1")
    m0, m1 = world.pop(2, invisible_ms=hidden_ms)
    end(world)
    live_on(world, what)
    world.ack(m1)
    assert world.bodies() == ["m0"], "released after the restart too"
    live_on(world, what)
    assert world.ack(m0) == [AckResult.GONE]


def live_on(world: World, what: str) -> None:
    match what:
        case "fail over":
            world.fail_over()
        case "checkpoint":
            world.checkpoint()
            world.restart()
        case "log alone":
            disk = world.disk.after_kill()
            for folder in ("queues", "index", "snapshots"):
                for name in disk.names(folder):
                    disk.remove(name)
            world.disk = disk
            world.open()
        case _:
            world.restart(power_cut=what == "power cut")


@ENDINGS
def test_a_release_dead_letters_messages_without_an_attempt_left(
    hidden_ms: int, end: Callable[[World], None]
) -> None:
    world = ordered_world(max_attempts=1)
    world.send("m0")
    world.pop(1, invisible_ms=hidden_ms)
    end(world)
    world.run_due()
    assert world.bodies(topic=f"%DLQ%{GROUP}", group="auditor") == ["m0"]
    assert progress_of(world) == (0, 0)


def test_a_release_wakes_a_waiting_consumer() -> None:
    world = ordered_world()
    world.send("m0")
    world.pop(1, invisible_ms=HIDDEN_MS)
    world.engine.take_ready()
    world.release_lock()
    world.run_due()
    assert (world.group(), world.topic()) in world.engine.take_ready()[1]


def test_an_ack_of_the_same_round_is_not_undone() -> None:
    world = ordered_world()
    world.send("m0", "m1")
    m0, _ = world.pop(2, invisible_ms=HIDDEN_MS)
    assert world.engine.commands.ack(m0.delivery, world.now_ms) is AckResult.APPLIED
    world.release_lock()
    assert world.bodies() == ["m1"]


def test_a_lock_shows_its_holder_and_its_deadline() -> None:
    world = ordered_world()
    world.send("m0", "m1", "m2", "m3")
    began_ms = world.now_ms
    first = world.pop(2, invisible_ms=HIDDEN_MS, client_id="alice", attempt_id="a")
    world.ack(first[0])
    lock = QueueLock(1, 1, lock_id(world, first[1]), "alice", began_ms, began_ms + HIDDEN_MS, 2)
    assert lock_of(world) == lock
    world.pop(2, client_id="bob", attempt_id="a")
    assert lock_of(world) == lock._replace(client_id="bob"), (
        "the client that repeated the attempt holds it"
    )
    world.restart()
    assert lock_of(world) == lock._replace(client_id="alice"), (
        "no record contains the client that repeated"
    )
    world.release_lock()
    assert lock_of(world) is None
    with pytest.raises(Conflict, match="queue 0 is not locked"):
        world.release_lock()


def lock_id(world: World, popped: PoppedMessage) -> str:
    topic = world.engine.catalog.find_topic(TOPIC)
    assert topic is not None
    lock = lock_of(world)
    assert lock is not None
    found = world.find(topic, message_id=lock.message_id)
    assert [one.queue_offset for one in found] == [popped.offset]
    return lock.message_id


def test_a_queue_without_a_poll_is_not_locked() -> None:
    world = ordered_world()
    world.send("m0")
    with pytest.raises(Conflict):
        world.release_lock()
    assert not world.engine.state.progress, "the next pop is still the first one"
