"""Calls of clients between two slices of a checkpoint or of a retirement, and a later start."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.disk.quiet import has_pending
from tests.support.worlds.engine_world import GROUP, TOPIC, World
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.pop.deliveries import AckResult

SLICES = range(14)  # more than either job has here


def at(number: int, action: Callable[[], None]) -> Callable[[], None]:
    """Return a callback for each slice that acts after one of them."""
    left = [action]
    calls = iter(range(1 << 20))
    return lambda: left.pop()() if left and next(calls) >= number else None


@pytest.mark.parametrize("how", ["ack", "dead letter"])
@pytest.mark.parametrize("number", SLICES)
def test_an_ordered_batch_that_is_settled_during_a_checkpoint_does_not_come_back(
    number: int, how: str
) -> None:
    """A batch may begin and end between the section of its queue and that of its slots."""
    world = World()
    world.group(is_ordered=True)
    world.send("m0", "m1", "m2")
    world.ack(*world.pop(1))

    def settle() -> None:
        first, second = world.pop(2)
        world.change(first, 60_000)
        if how == "ack":
            assert world.ack(second) == [AckResult.APPLIED]
        else:
            world.engine.commands.dead_letter(second.delivery, world.now_ms)
            world.commit()

    action = at(number, settle)
    world.checkpoint(action)
    action()
    world.restart()
    world.advance(61_000)
    assert world.bodies() in ([], ["m1"])
    if not world.engine.state.progress:
        pytest.fail("the group is known")


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("number", SLICES)
def test_an_ack_during_a_retirement_is_kept_without_snapshots(
    number: int, is_ordered: bool
) -> None:
    world = World(segment_bytes=64 << 10, retention_bytes=64 << 10)
    world.group(is_ordered=is_ordered)
    world.send("m0", "m1", "m2")
    popped = world.pop(2, invisible_ms=10_000_000)
    world.send(*[f"x{n}" for n in range(44)], topic="other", size=4_000)
    world.checkpoint()

    def ack() -> None:
        world.ack(popped[0])

    action = at(number, ack)
    for files in world.engine.retention.retire_oldest(world.now_ms):
        for file in files:
            file.sync()
        if has_pending(world.engine):
            world.commit()
        action()
    action()
    assert world.engine.log.min_offset > 0
    disk = world.disk.after_kill()
    for name in disk.names("snapshots"):
        disk.remove(name)
    world.disk = disk
    world.open()
    assert world.ack(popped[0]) == [AckResult.ALREADY]
    states = list(world.engine.state.progress.values())
    assert sum(one.in_flight for one in states) == 1
    pending = [one.ordered.pending for one in states if one.ordered is not None]
    low = min(one.queue.min_offset for one in states)
    assert all(0 not in offsets or low > 0 for offsets in pending), "retention removed it meanwhile"


def test_each_start_raises_the_epoch_also_if_a_checkpoint_leaves_nothing_to_replay() -> None:
    world = World()
    world.send("m0")
    epochs = [world.engine.log.epoch]
    for _ in range(3):
        world.checkpoint()
        world.restart()
        epochs.append(world.engine.log.epoch)
    assert epochs == [epochs[0] + n for n in range(4)]


def test_a_deleted_topic_leaves_no_queue_entries_in_memory() -> None:
    world = World()
    for n in range(20):
        world.send(*["m"] * 50, topic=f"topic-{n}")
        world.pop(1, topic=f"topic-{n}")
        world.engine.administration.delete_topic(f"topic-{n}", world.now_ms)
        world.run_due()
    assert sum(len(owner.queue.tail) for owner in world.engine.state.owners) == 0


def test_due_void_deliveries_leave_the_table_of_an_engine_that_followed() -> None:
    world = World(is_followed=True)
    world.send(*[f"m{n}" for n in range(50)])
    world.pop(32, invisible_ms=1_000)
    world.now_ms += 2_000
    # The second engine sees time pass; the first has revived nothing yet.
    world.engine.administration.put_group(GROUP, max_attempts=5, now_ms=world.now_ms)
    world.commit()
    target = ResetTarget(latest=True)
    world.engine.administration.reset_offset(GROUP, TOPIC, target, world.now_ms)
    world.commit()
    world.fail_over()
    world.advance(10_000)
    assert world.engine.state.table.used_count == 0
