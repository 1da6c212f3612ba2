"""Invariants 43 to 46 of pop.md section 10: bounds, counters, fairness, deletion."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.seeds import seeds
from tests.support.worlds.engine_world import GROUP, TOPIC, World
from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.broker.engine.pop.revive import (
    REVIVE_MESSAGES_A_TURN,
    REVIVE_MESSAGES_A_WINDOW,
    REVIVE_WINDOW_MS,
)
from tidemill.broker.engine.store.disk import DiskFailed
from tidemill.common.errors import InvalidReceiptHandle, Overloaded


def progress_sum(engine: Engine, group: str) -> int:
    found = engine.catalog.find_group(group)
    assert found is not None
    return sum(one.in_flight_count for one in engine.inspection.group_progress(found))


def test_invariant_43_deliveries_are_rejected_at_their_limit_and_continue_below_it() -> None:
    world = World(deliveries_max=20)
    world.send(*[f"m{n}" for n in range(40)])
    popped = [one for _ in range(20) for one in world.pop(1)]
    assert len(popped) == 20
    with pytest.raises(Overloaded, match="deliveries_max"):
        world.pop(1)
    world.restart()
    with pytest.raises(Overloaded):
        world.pop(1)
    world.ack(*popped)
    assert len(world.pop()) == 20


def test_invariant_43_polls_are_rejected_at_their_limit() -> None:
    async def main() -> None:
        world = RoundWorld(parked_max=2)
        async with world.running(), world.proxy() as proxy:
            for n in range(3):
                await proxy.send(world.pop_frame(n, poll_ms=10_000))
            reply = await proxy.reply()
            assert [(one.request_id, one.error) for one in reply.failures] == [(2, "Overloaded")]
            assert world.polls.count == 2

    asyncio.run(main())


def test_invariant_43_calls_waiting_for_a_stalled_disk_are_bounded() -> None:
    async def main() -> None:
        world = RoundWorld(pending_bytes_max=10_000)
        async with world.running(), world.proxy() as proxy:
            world.syncs.gate.clear()
            for n in range(200):
                await proxy.send(world.append_frame("x" * 1_000, first_id=n))
            for _ in range(500):
                await asyncio.sleep(0)
            assert world.rounds.pending_count <= 12
            assert proxy.replies.empty()
            world.syncs.gate.set()
            answered: set[int] = set()
            while len(answered) < 200:
                answered.update((await proxy.reply()).appends.request_ids)

    asyncio.run(main())


def test_invariant_43_a_failed_write_ends_the_process_without_replies() -> None:
    async def main() -> None:
        world = RoundWorld()
        async with world.running(), world.proxy() as proxy:
            world.world.disk.fails_writes = True
            await proxy.send(world.append_frame("m0"))
            for _ in range(200):
                await asyncio.sleep(0)
            assert proxy.replies.empty()

    with pytest.raises(BaseExceptionGroup) as failed:
        asyncio.run(main())
    assert failed.value.subgroup(DiskFailed) is not None


@pytest.mark.parametrize("seed", seeds("counters", 4))
def test_invariant_44_counters_are_the_live_deliveries_after_any_mix(seed: int) -> None:
    random = Random(seed)
    world = World(FaultyDisk(random))
    world.topic(queues=3)
    groups = [GROUP, "fifo"]
    world.group(max_attempts=3)
    world.group("fifo", is_ordered=True, max_attempts=3)
    held = []
    for turn in range(80):
        world.send(f"m{turn}a", f"m{turn}b", queue_id=turn % 3)
        group = random.choice(groups)
        held += world.pop(random.randint(1, 8), group=group, invisible_ms=random.randint(1, 3_000))
        for one in random.sample(held, min(len(held), 3)):
            world.ack(one, one)
        for one in random.sample(held, min(len(held), 2)):
            try:
                held.append(world.change(one, random.randint(0, 3_000)))
            except InvalidReceiptHandle:
                continue
        if turn % 20 == 19:
            target = ResetTarget(offset=random.randint(0, turn))
            world.engine.administration.reset_offset(group, TOPIC, target, world.now_ms)
            world.commit()
        if turn % 7 == 0:
            world.checkpoint()
            world.restart(power_cut=turn % 2 == 0)
        world.advance(random.randint(0, 800))
        state = world.engine.state
        for progress in state.progress.values():
            live = sum(
                state.table.live[slot].bit_count()
                for slot in state.table.in_use(0, len(state.table.ids)).tolist()
                if state.owners[state.table.owners[slot]] is progress
                and state.table.ids[slot] >= progress.void_before
            )
            assert progress.in_flight == live
    for group in groups:
        for _ in range(100):
            popped = world.pop(group=group, invisible_ms=1_000)
            world.ack(*popped)
            world.advance(1_000)
        assert progress_sum(world.engine, group) == 0
    world.advance(10_000)
    assert world.engine.state.table.used_count == 0, "no slot is left behind"


def two_groups_due_together(count: int, *, modest_first: bool = True) -> World:
    """Give one group `count` due messages, and another group one message due at the same time."""
    world = World(segment_bytes=16 << 20)
    for begin in range(0, count, 1_000):
        world.send(*[f"m{begin + n}" for n in range(1_000)])
    if modest_first:
        world.pop(1, group="modest", invisible_ms=1_000)
    while world.pop(32, group="greedy", invisible_ms=1_000):
        pass
    if not modest_first:
        world.pop(1, group="modest", invisible_ms=1_000)
    world.now_ms += 1_000
    return world


@pytest.mark.parametrize("modest_first", [False, True])
def test_invariant_45_a_group_that_never_acks_does_not_delay_another(modest_first: bool) -> None:
    world = two_groups_due_together(20_000, modest_first=modest_first)
    turns = 0
    while progress_sum(world.engine, "modest"):
        world.engine.run_due(world.now_ms, firing_ms=world.now_ms)
        world.commit()
        turns += 1
        assert turns < 50, "about a millisecond each"
    assert progress_sum(world.engine, "greedy") > 10_000


def test_invariant_45_the_work_of_a_window_and_of_a_turn_is_bounded() -> None:
    world = two_groups_due_together(20_000)
    left = progress_sum(world.engine, "greedy")
    in_window = 0
    while True:
        is_more = world.engine.run_due(world.now_ms, firing_ms=world.now_ms)
        world.commit()
        now_left = progress_sum(world.engine, "greedy")
        assert left - now_left <= REVIVE_MESSAGES_A_TURN + 32
        in_window += left - now_left
        left = now_left
        if not is_more:
            break
    assert in_window <= REVIVE_MESSAGES_A_WINDOW + 32
    world.engine.take_ready()
    assert (
        world.engine.next_due_ms(world.now_ms, firing_ms=world.now_ms)
        == world.now_ms + REVIVE_WINDOW_MS
    )
    world.now_ms += REVIVE_WINDOW_MS
    world.engine.run_due(world.now_ms, firing_ms=world.now_ms)
    assert progress_sum(world.engine, "greedy") < left


@pytest.mark.parametrize("what", ["topic", "group"])
@pytest.mark.parametrize("group", [GROUP, "fifo"])
@pytest.mark.parametrize("restarts", [False, True])
def test_invariant_46_a_deleted_group_leaves_nothing_and_may_begin_again(
    what: str, group: str, restarts: bool
) -> None:
    world = World()
    world.group(max_attempts=5)
    world.group("fifo", is_ordered=True)
    world.send("old0", "old1", "old2")
    for duration in (1_000, 5_000):
        popped = world.pop(2, group=group, invisible_ms=duration)
        world.advance(1_000)
    if what == "topic":
        world.engine.administration.delete_topic(TOPIC, world.now_ms)
    else:
        world.engine.administration.delete_group(group, world.now_ms)
    world.commit()
    if restarts:
        world.checkpoint()
        world.restart(power_cut=True)
    ids = {topic.id for topic in world.engine.catalog.topics.values()}
    assert world.ack(*popped) == [AckResult.GONE] * len(popped)
    world.advance(20_000)
    assert {topic.id for topic in world.engine.catalog.topics.values()} == ids, "no retry topic"
    assert world.engine.state.table.used_count == 0
    assert not [name for name in world.engine.catalog.topic_ids if name.startswith("%RETRY%")]
    world.group("fifo", is_ordered=True)
    if what == "topic":
        world.send("new0")
    expected = ["new0"] if what == "topic" else ["old0", "old1", "old2"]
    popped = world.pop(group=group)
    assert [(one.body, one.attempt) for one in popped] == [(body, 1) for body in expected]


def test_invariant_46_an_id_is_never_used_again() -> None:
    world = World()
    seen: set[int] = set()
    for _ in range(5):
        topic_id, group_id = world.topic(), world.group()
        assert not {topic_id, group_id} & seen
        seen |= {topic_id, group_id}
        world.engine.administration.delete_topic(TOPIC, world.now_ms)
        world.engine.administration.delete_group(GROUP, world.now_ms)
        world.commit()
        world.checkpoint()
        world.restart()
