"""Invariants 1 to 11 of pop.md section 10: no message is lost."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.disk.log_checker import judge
from tests.support.disk.observation import observe
from tests.support.seeds import seeds
from tests.support.worlds.engine_world import GROUP, TOPIC, World
from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.engine.layout.numbers import DeliverySlot, GroupId, LogOffset, QueueId, TopicId
from tidemill.broker.engine.pop.deliveries import AckResult, Delivery
from tidemill.broker.engine.store.disk import DiskFailed
from tidemill.common.errors import DiskFull, Overloaded

SECOND_MS = 1_000


def test_invariant_1_every_group_gets_all_sent_messages_through_power_cuts() -> None:
    random = Random(1)
    world = World(FaultyDisk(random), checkpoint_log_bytes=5_000)
    for name in (GROUP, "auditor"):
        world.group(name, max_attempts=100)
    sent: list[str] = []
    seen: dict[str, set[str]] = {GROUP: set(), "auditor": set()}
    for turn in range(60):
        sent += (texts := [f"m{turn}-{n}" for n in range(random.randint(0, 9))])
        world.send(*texts, size=200)
        for group, bodies in seen.items():
            popped = world.pop(random.randint(1, 32), group=group, invisible_ms=2_000)
            acked = popped[: random.randint(0, len(popped))]
            world.ack(*acked)
            bodies.update(one.body for one in acked)
        world.background()
        world.restart(power_cut=random.random() < 0.5)
        world.advance(random.randint(0, 1_500))
    for group, bodies in seen.items():
        for _ in range(40):
            world.advance(2_000)
            popped = world.pop(group=group, invisible_ms=2_000)
            world.ack(*popped)
            assert not bodies & {one.body for one in popped}
            bodies.update(one.body for one in popped)
        assert bodies == set(sent)


@pytest.mark.parametrize("seed", seeds("offsets after crashes", 5))
def test_invariant_2_and_3_no_message_below_the_consumer_offset_is_lost_by_a_crash(
    seed: int,
) -> None:
    """The log checker folds the log by itself. Positions never cross or fall below the log's."""
    random = Random(seed)
    world = World(FaultyDisk(random), checkpoint_log_bytes=5_000)
    world.group(max_attempts=3)
    world.group("fifo", is_ordered=True)
    for turn in range(30):
        world.send(*[f"m{turn}-{n}" for n in range(6)])
        for group in (GROUP, "fifo"):
            popped = world.pop(random.randint(1, 9), group=group, invisible_ms=1_500)
            random.shuffle(popped)
            world.ack(*popped[:3])
            if popped[3:]:
                world.change(popped[3], 5_000)
        world.background()
        world.restart(power_cut=turn % 3 == 0)
        judge(world)
        world.advance(random.randint(0, 2_000))


def test_invariant_4_no_response_leaves_before_its_checkpoint_is_durable() -> None:
    async def main() -> None:
        world = RoundWorld()
        world.world.send("m0")
        async with world.running(), world.proxy() as proxy:
            world.syncs.gate.clear()
            await proxy.send(world.pop_frame(1))
            for _ in range(50):
                await asyncio.sleep(0)
            assert proxy.replies.empty()
            unanswered = world.world.disk
            world.syncs.gate.set()
            (pop,) = (await proxy.reply()).pops
            (batch,) = pop.batches
            after = World(unanswered.after_power_cut())
            delivery = Delivery(
                GroupId(world.group_id),
                TopicId(world.topic_id),
                DeliverySlot(batch.slot),
                LogOffset(batch.delivery_id),
                0,
                batch.visible_at_ms,
            )
            assert after.bodies() == []
            assert after.engine.commands.ack(delivery, after.now_ms) is AckResult.APPLIED

    asyncio.run(main())


def test_invariant_5_a_checkpoint_that_cannot_be_registered_delivers_nothing() -> None:
    world = World(deliveries_max=2, disk_reserve_bytes=1 << 20)
    world.send("m0", "m1", "m2")
    (first,), (second,) = world.pop(1), world.pop(1)
    progress = world.engine.state.progress[world.group(), world.topic(), QueueId(0)]
    with pytest.raises(Overloaded):
        world.pop(1)
    world.leave_room(1 << 10)
    with pytest.raises(DiskFull):
        world.pop(1)
    assert (progress.pop_offset, progress.in_flight) == (2, 2)
    world.leave_room(1 << 30)
    world.ack(first, second)
    assert world.bodies() == ["m2"]


def test_invariant_5_a_failed_write_ends_the_process_and_undoes_its_pop() -> None:
    world = World()
    world.send("m0")
    world.group()
    world.disk.fails_writes = True
    with pytest.raises(DiskFailed):
        world.pop(1)
    world.restart()
    assert world.bodies() == ["m0"]


@pytest.mark.parametrize("power_cut", [None, False, True])
@pytest.mark.parametrize("duration", [1_000, 65_536, 65_537, 3_600_000])
def test_invariant_6_an_unacked_message_comes_back_at_its_deadline_and_not_before(
    power_cut: bool | None, duration: int
) -> None:
    world = World()
    world.send("m0")
    world.pop(1, invisible_ms=duration)
    if power_cut is not None:
        world.restart(power_cut=power_cut)
    world.now_ms += duration - 1
    assert world.bodies() == []
    due_at_ms = world.engine.next_due_ms(world.now_ms, firing_ms=world.now_ms)
    assert due_at_ms is not None
    assert due_at_ms <= world.now_ms + 1, "the loop wakes up in time"
    world.now_ms += 1
    assert world.bodies() == ["m0"]


@pytest.mark.parametrize("duration", [1, 999, 65_536, 65_537, 70_000, 3_600_000, 12 * 3_600_000])
def test_invariant_6_a_loop_that_sleeps_until_the_next_deadline_is_in_time(duration: int) -> None:
    world = World()
    world.send("m0")
    world.pop(1, invisible_ms=duration)
    deadline_ms = world.now_ms + duration
    for _ in range(10):
        due_at_ms = world.engine.next_due_ms(world.now_ms, firing_ms=world.now_ms)
        if due_at_ms is None:
            break
        world.now_ms = max(world.now_ms, due_at_ms)
        world.run_due()
        world.engine.take_ready()
    assert world.now_ms == deadline_ms
    assert world.bodies() == ["m0"]


def test_invariant_6_messages_due_during_an_outage_are_ready_after_the_start() -> None:
    world = World()
    world.send("m0")
    world.pop(1, invisible_ms=5_000)
    world.now_ms += 60_000
    world.restart(power_cut=True)
    due_at_ms = world.engine.next_due_ms(world.now_ms, firing_ms=world.now_ms)
    assert due_at_ms is not None
    assert due_at_ms <= world.now_ms
    assert world.bodies() == ["m0"]


def test_invariant_7_messages_of_a_lost_proxy_are_redelivered_at_their_deadline() -> None:
    async def main() -> None:
        world = RoundWorld()
        world.world.send("m0")
        async with world.running():
            async with world.proxy() as gone:
                await gone.send(world.pop_frame(1))
                assert (await gone.reply()).pops[0].batches
            async with world.proxy() as other:
                await other.send(world.pop_frame(2, poll_ms=60_000))
                for _ in range(50):
                    await asyncio.sleep(0)
                world.advance(29_999)
                for _ in range(50):
                    await asyncio.sleep(0)
                assert other.replies.empty()
                world.advance(1)
                assert (await other.reply()).pops[0].batches

    asyncio.run(main())


def test_invariant_8_a_revive_that_fails_is_done_after_the_restart() -> None:
    world = World()
    world.send("m0")
    world.pop(1, invisible_ms=1_000)
    world.now_ms += 1_000
    world.disk.fails_writes = True
    with pytest.raises(DiskFailed):
        world.run_due()
    world.restart()
    assert world.bodies() == ["m0"]


def test_invariant_8_a_power_cut_at_any_operation_of_a_revive_loses_nothing() -> None:
    for cut in range(60):
        world = World(FaultyDisk(Random(cut)))
        world.send("m0", "m1")
        world.pop(2, invisible_ms=1_000)
        world.now_ms += 1_000
        world.disk.cut_at = len(world.disk.operations) + cut
        is_cut = False
        try:
            world.run_due()
            world.checkpoint()
        except PowerCut:
            is_cut = True
        world.restart(power_cut=True)
        assert sorted(world.drain()) == ["m0", "m1"]
        judge(world)
        if not is_cut:
            return
    raise AssertionError("the scenario has more operations than cuts")


@pytest.mark.parametrize(("count", "duration"), [(100_000, 1_000), (20_000, 100_000)])
def test_invariant_9_a_hundred_thousand_deliveries_of_one_deadline_all_come_back(
    count: int, duration: int
) -> None:
    """Near and distant deadlines are in lists of different kinds."""
    world = World(segment_bytes=16 << 20)
    world.run_due()
    engine, now_ms = world.engine, world.now_ms
    group_id, topic_id = world.group(), world.topic()
    for begin in range(0, count, 10_000):
        world.send(*[f"m{begin + n}" for n in range(10_000)])
        for _ in range(10_000):
            engine.commands.pop(
                GroupId(group_id),
                TopicId(topic_id),
                max_messages=1,
                invisible_duration_ms=duration,
                attempt_id="",
                now_ms=now_ms,
            )
        engine.commit(world.now_ms)
    (progress,) = engine.inspection.group_progress(engine.catalog.groups[group_id])
    assert progress.in_flight_count == count
    world.now_ms += duration
    elapsed_ms = 0
    while progress.in_flight_count:
        # Every window of 100 ms does its share, whatever else is due.
        while engine.run_due(world.now_ms, firing_ms=world.now_ms):
            engine.commit(world.now_ms)
        engine.commit(world.now_ms)
        left = engine.inspection.group_progress(engine.catalog.groups[group_id])[0]
        assert left.in_flight_count < progress.in_flight_count
        progress = left
        world.now_ms += 100
        elapsed_ms += 100
    assert elapsed_ms <= 3_000
    retry_id = engine.catalog.retry_topic_ids[group_id, topic_id]
    assert engine.catalog.queue(retry_id, QueueId(0)).max_offset == count


def test_invariant_10_messages_that_a_group_loses_to_retention_are_counted() -> None:
    world = World(retention_bytes=2 << 20)
    world.group()
    sent = [f"m{n}" for n in range(40)]
    assert world.bodies() == []
    for text in sent:
        world.send(text, size=100_000)
    world.background()
    got = world.drain()
    skipped = world.engine.state.counts["expired", world.group(), world.topic()]
    assert got == sent[skipped:]
    assert 0 < skipped < len(sent)


def test_invariant_11_a_clean_stop_and_start_change_nothing() -> None:
    world = World()
    world.group("fifo", is_ordered=True)
    world.send(*[f"m{n}" for n in range(20)], size=100)
    popped = world.pop(8, invisible_ms=50_000)
    world.ack(*popped[2:5])
    world.change(popped[0], 90_000)
    ordered = world.pop(4, group="fifo", attempt_id="a")
    world.ack(ordered[0])
    world.pop(3, invisible_ms=1_000)
    world.advance(2_000)
    before = observe(world.engine, world.now_ms)
    assert len([key for key in before if key.startswith("delivery")]) >= 3
    for _ in range(3):
        world.checkpoint()
        world.engine.close()
        world.restart()
        assert observe(world.engine, world.now_ms) == before
    assert world.engine.catalog.find_topic(TOPIC) is not None
