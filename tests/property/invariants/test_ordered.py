"""Invariants 30 to 34 of pop.md section 10: ordered groups."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.log_checker import judge
from tests.support.worlds.engine_world import World
from tests.support.worlds.round_world import RoundWorld
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

FIFO = "fifo"


def world_in_order(*, messages: int = 8, max_attempts: int = 17) -> World:
    world = World(FaultyDisk(Random(30)))
    world.group(FIFO, is_ordered=True, max_attempts=max_attempts)
    world.send(*[f"m{n}" for n in range(messages)])
    return world


@pytest.mark.parametrize("power_cut", [None, False, True])
@pytest.mark.parametrize("from_snapshot", [False, True])
def test_invariant_30_one_batch_is_in_flight_until_all_of_it_is_settled(
    power_cut: bool | None, from_snapshot: bool
) -> None:
    world = world_in_order()
    first = world.pop(3, group=FIFO, invisible_ms=10_000, attempt_id="a")

    def happen() -> None:
        if from_snapshot:
            world.checkpoint()
        if power_cut is not None:
            world.restart(power_cut=power_cut)

    happen()
    assert world.bodies(group=FIFO, attempt_id="b") == []
    world.ack(first[2], first[0])
    longer = world.change(first[1], 20_000)
    happen()
    world.advance(19_999)
    assert world.bodies(group=FIFO, attempt_id="b") == []
    world.ack(longer)
    happen()
    assert world.bodies(2, group=FIFO, attempt_id="b") == ["m3", "m4"]
    judge(world)


def test_invariant_30_each_queue_blocks_for_itself() -> None:
    world = World()
    world.topic(queues=2)
    world.group(FIFO, is_ordered=True)
    world.send("a0", "a1", queue_id=0)
    world.send("b0", "b1", queue_id=1)
    popped = world.pop(1, group=FIFO) + world.pop(1, group=FIFO)
    assert sorted(one.body for one in popped) == ["a0", "b0"]
    assert world.bodies(group=FIFO) == []
    world.ack(*[one for one in popped if one.body == "a0"])
    assert world.bodies(group=FIFO) == ["a1"]


@pytest.mark.parametrize("restarts", [False, True])
def test_invariant_31_redelivery_begins_at_the_lowest_gap_without_acked_messages(
    restarts: bool,
) -> None:
    world = world_in_order()
    popped = world.pop(5, group=FIFO, invisible_ms=1_000)
    world.ack(popped[1], popped[3])
    if restarts:
        world.checkpoint()
        world.restart(power_cut=True)
    world.advance(1_000)
    assert world.bodies(1, group=FIFO, invisible_ms=1_000) == ["m0"]
    world.advance(1_000)
    if restarts:
        world.restart()
    assert world.bodies(5, group=FIFO) == ["m0", "m2", "m4", "m5", "m6"]
    judge(world)


def test_invariant_31_a_message_given_back_at_once_comes_before_all_later_ones() -> None:
    world = world_in_order()
    popped = world.pop(3, group=FIFO, invisible_ms=10_000)
    world.change(popped[0], 0)
    assert world.bodies(group=FIFO, attempt_id="b") == [], "two of the batch are still in flight"
    world.ack(*popped[1:])
    assert world.bodies(group=FIFO, attempt_id="b")[0] == "m0"


@pytest.mark.parametrize("restarts", [False, True])
def test_invariant_32_the_same_attempt_gets_the_same_batch_and_counts_once(restarts: bool) -> None:
    world = world_in_order()
    first = world.pop(3, group=FIFO, invisible_ms=10_000, attempt_id="a")
    for _ in range(3):
        if restarts:
            world.checkpoint()
            world.restart()
        again = world.pop(3, group=FIFO, invisible_ms=10_000, attempt_id="a")
        assert [(one.body, one.attempt, one.delivery) for one in again] == [
            (one.body, one.attempt, one.delivery) for one in first
        ]
    world.ack(first[1])
    assert world.bodies(3, group=FIFO, attempt_id="a") == ["m0", "m2"]
    world.advance(10_000)
    late = world.pop(2, group=FIFO, invisible_ms=10_000, attempt_id="a")
    assert [(one.body, one.attempt) for one in late] == [("m0", 1), ("m2", 1)]


def test_invariant_32_an_empty_attempt_id_is_never_a_repeated_attempt() -> None:
    world = world_in_order()
    world.pop(3, group=FIFO)
    assert world.bodies(group=FIFO) == []


def pop_of(world: RoundWorld, request_id: int) -> pb.RequestFrame:
    return world.pop_frame(request_id, poll_ms=60_000, want=1)


@pytest.mark.parametrize("settles", ["ack", "expiry", "dead letter"])
def test_invariant_33_a_waiting_consumer_is_served_in_the_round_that_frees_its_queue(
    settles: str,
) -> None:
    async def main() -> None:
        world = RoundWorld()
        world.group_id = world.world.group(FIFO, is_ordered=True)
        world.world.pop(1, group=FIFO)  # the first pop changes the configuration
        world.world.engine.take_config_changes()
        world.world.send("m0", "m1")
        async with world.running(), world.proxy() as first, world.proxy() as second:
            await first.send(pop_of(world, 1))
            (batch,) = (await first.reply()).pops[0].batches
            await second.send(pop_of(world, 2))
            for _ in range(50):
                await asyncio.sleep(0)
            assert second.replies.empty()
            place = {
                "group_id": world.group_id,
                "topic_id": world.topic_id,
                "slot": batch.slot,
                "delivery_id": batch.delivery_id,
                "visible_at_ms": batch.visible_at_ms,
            }
            if settles == "ack":
                frame = pb.RequestFrame()
                frame.acks.request_ids.append(3)
                frame.acks.group_ids.append(world.group_id)
                frame.acks.topic_ids.append(world.topic_id)
                frame.acks.slots.append(batch.slot)
                frame.acks.delivery_ids.append(batch.delivery_id)
                frame.acks.indexes.append(0)
                frame.acks.visible_at_ms.append(batch.visible_at_ms)
                await first.send(frame)
            elif settles == "dead letter":
                letter = pb.DeadLetterRequest(request_id=3, index=0, **place)
                await first.send(pb.RequestFrame(dead_letters=[letter]))
            else:
                world.advance(30_000)
            rounds = world.rounds.count
            (served,) = (await second.reply()).pops[0].batches
            assert list(served.queue_offsets) == [0 if settles == "expiry" else 1]
            assert world.rounds.count <= rounds + 2

    asyncio.run(main())


@pytest.mark.parametrize("restarts", [False, True])
def test_invariant_34_the_attempt_is_one_more_than_the_earlier_attempts(restarts: bool) -> None:
    world = world_in_order()
    for attempt in range(1, 6):
        for _ in range(2):  # The second is the same attempt, after a lost response.
            (m0,) = world.pop(1, group=FIFO, invisible_ms=1_000, attempt_id=f"a{attempt}")
            assert (m0.body, m0.attempt) == ("m0", attempt)
            if restarts:
                world.checkpoint()
                world.restart(power_cut=True)
        world.advance(1_000)
    world.pop(1, group=FIFO, invisible_ms=1_000, attempt_id="b")
    world.advance(1_000)
    both = world.pop(2, group=FIFO, attempt_id="c")
    assert [(one.body, one.attempt) for one in both] == [("m0", 7), ("m1", 1)]
