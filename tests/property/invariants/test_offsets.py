"""Invariants 21 to 25 of pop.md section 10: offsets and the order of commits."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.quiet import has_pending
from tests.support.worlds.engine_world import GROUP, TOPIC, World
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.queries.inspection import QueueProgress


def progress_of(world: World, group: str = GROUP) -> QueueProgress:
    """Return the progress in the topic itself, without retries."""
    found = world.engine.catalog.find_group(group)
    assert found is not None
    (progress,) = [one for one in world.engine.inspection.group_progress(found) if not one.is_retry]
    return progress


@pytest.mark.parametrize("group", [GROUP, "fifo"])
def test_invariant_21_consumer_offsets_only_grow_through_all_crashes(group: str) -> None:
    random = Random(21)
    world = World(FaultyDisk(random))
    world.group("fifo", is_ordered=True)
    last = 0
    for turn in range(80):
        world.send(f"m{turn}a", f"m{turn}b")
        popped = world.pop(random.randint(1, 6), group=group, invisible_ms=1_000)
        random.shuffle(popped)
        world.ack(*popped[: len(popped) // 2])
        if popped[len(popped) // 2 :]:
            world.change(popped[-1], 1_500)
        if turn % 4 == 0:
            world.checkpoint()
        if turn % 3 == 0:
            world.restart(power_cut=turn % 2 == 0)
        world.advance(400)
        offset = progress_of(world, group).consumer_offset
        assert offset >= last
        last = offset
    assert last > 0


def test_invariant_22_a_batch_commits_only_after_earlier_batches() -> None:
    world = World()
    world.send(*[f"m{n}" for n in range(9)])
    batches = [world.pop(3) for _ in range(3)]
    for batch, offset in ((batches[1], 0), (batches[2], 0), (batches[0][1:], 0)):
        world.ack(*batch)
        assert progress_of(world).consumer_offset == offset
        world.restart()
        assert progress_of(world).consumer_offset == offset
    world.ack(batches[0][0])
    assert progress_of(world).consumer_offset == 9


def test_invariant_23_a_pop_that_matches_nothing_writes_nothing_and_moves_on() -> None:
    world = World()
    world.send("m0", tag="a")
    world.send(*[f"x{n}" for n in range(50)], tag="b")
    world.pop(1, tags=("a",))
    end = world.engine.log.log_end
    assert world.pop(tags=("a",)) == []
    progress = progress_of(world)
    assert not has_pending(world.engine)
    assert world.engine.log.log_end == end
    assert (progress.pop_offset, progress.consumer_offset) == (51, 0)
    world.restart()
    assert progress_of(world).pop_offset == 1, "only memory had the position"
    world.send("m1", tag="a")
    assert world.bodies(tags=("a",)) == ["m1"]


@pytest.mark.parametrize("group", [GROUP, "fifo"])
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("target", range(6))
def test_invariant_24_after_a_reset_nothing_from_before_it_is_delivered(
    group: str, restarts: bool, target: int
) -> None:
    world = World()
    world.group("fifo", is_ordered=True)
    world.send(*[f"m{n}" for n in range(5)])
    world.pop(2, group=group, invisible_ms=1_000)
    world.advance(1_000)
    world.pop(2, group=group, invisible_ms=1_000)
    world.engine.administration.reset_offset(group, TOPIC, ResetTarget(offset=target), world.now_ms)
    world.commit()
    if restarts:
        world.checkpoint()
        world.restart(power_cut=True)
    seen: list[str] = []
    for _ in range(10):
        popped = world.pop(2, group=group, invisible_ms=1_000)
        world.ack(*popped)
        seen += [one.body for one in popped]
        world.advance(1_000)
    assert seen == [f"m{n}" for n in range(target, 5)]


def test_invariant_24_an_ack_of_the_round_of_a_reset_does_not_move_it() -> None:
    for group in (GROUP, "fifo"):
        world = World()
        world.group("fifo", is_ordered=True)
        world.send("m0", "m1", "m2")
        popped = world.pop(3, group=group)
        world.engine.commands.ack(popped[0].delivery, world.now_ms)
        world.engine.administration.reset_offset(group, TOPIC, ResetTarget(offset=1), world.now_ms)
        world.engine.commands.ack(popped[1].delivery, world.now_ms)
        world.commit()
        world.restart(power_cut=True)
        assert world.drain(group=group) == ["m1", "m2"]


@pytest.mark.parametrize("group", [GROUP, "fifo"])
def test_invariant_25_at_quiescence_the_lag_is_nothing_without_further_polls(group: str) -> None:
    world = World()
    world.group("fifo", is_ordered=True)
    world.send(*[f"m{n}" for n in range(20)])
    for _ in range(10):
        popped = world.pop(8, group=group, invisible_ms=1_000)
        world.ack(*popped[1:])
        world.advance(1_000)
    while popped := world.pop(8, group=group):
        world.ack(*popped)
    for _ in range(2):
        found = world.engine.catalog.find_group(group)
        assert found is not None
        for one in world.engine.inspection.group_progress(found):
            assert one.max_offset == one.consumer_offset == one.pop_offset
            assert (one.ready_count, one.in_flight_count, one.oldest_unacked_at_ms) == (0, 0, 0)
        world.restart()
