"""Invariants 12 to 20 of pop.md section 10: no message is delivered twice without need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.disk.log_checker import judge
from tests.support.disk.observation import observe
from tests.support.worlds.engine_world import GROUP, TOPIC, PoppedMessage, World
from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.layout.numbers import DeliverySlot, GroupId, LogOffset, QueueId, TopicId
from tidemill.broker.engine.pop.deliveries import AckResult, Delivery
from tidemill.common.errors import InvalidReceiptHandle
from tidemill.message.receipt_handle import HandleSigner
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


def cut_everywhere(
    prepare: Callable[[World], None],
    act: Callable[[World], None],
    check: Callable[[World, bool], None],
) -> None:
    """Cut the power at every disk operation of `act`, restart, and check."""
    for cut in range(200):
        world = World(FaultyDisk(Random(cut)))
        prepare(world)
        world.disk.cut_at = len(world.disk.operations) + cut
        is_cut = False
        try:
            act(world)
        except PowerCut:
            is_cut = True
        world.restart(power_cut=True)
        check(world, is_cut)
        judge(world)
        if not is_cut:
            assert cut > 1, "there was an operation to cut"
            return
    raise AssertionError("the scenario has more operations than cuts")


def copies(world: World, topic: str) -> int:
    found = world.engine.catalog.find_topic(topic)
    return world.engine.catalog.queue(found.id, QueueId(0)).max_offset if found else 0


@pytest.mark.parametrize("group", [GROUP, "fifo"])
def test_invariant_12_an_acked_message_is_never_delivered_again(group: str) -> None:
    random = Random(12)
    world = World(FaultyDisk(random))
    world.group("fifo", is_ordered=True)
    world.send(*[f"m{n}" for n in range(10)])
    acked: set[str] = set()
    for turn in range(30):
        popped = world.pop(4, group=group, invisible_ms=1_000)
        assert not acked & {one.body for one in popped}
        chosen = random.sample(popped, len(popped) // 2)
        assert world.ack(*chosen) == [AckResult.APPLIED] * len(chosen)
        acked.update(one.body for one in chosen)
        if turn % 3 == 0:
            world.checkpoint()
        world.restart(power_cut=turn % 2 == 0)
        world.advance(1_000)
    judge(world)


def test_invariant_12_an_ack_is_answered_after_it_is_durable() -> None:
    async def main() -> None:
        world = RoundWorld()
        world.world.send("m0")
        async with world.running(), world.proxy() as proxy:
            await proxy.send(world.pop_frame(1))
            (batch,) = (await proxy.reply()).pops[0].batches
            world.syncs.gate.clear()
            frame = pb.RequestFrame()
            for column, value in (
                ("request_ids", 2),
                ("group_ids", world.group_id),
                ("topic_ids", world.topic_id),
                ("slots", batch.slot),
                ("delivery_ids", batch.delivery_id),
                ("indexes", 0),
                ("visible_at_ms", batch.visible_at_ms),
            ):
                getattr(frame.acks, column).append(value)
            await proxy.send(frame)
            for _ in range(50):
                await asyncio.sleep(0)
            assert proxy.replies.empty()
            world.syncs.gate.set()
            assert list((await proxy.reply()).acks.results) == [pb.ACK_RESULT_APPLIED]
            after = World(world.world.disk.after_power_cut())
            after.advance(60_000)
            assert after.bodies() == []

    asyncio.run(main())


@pytest.mark.parametrize("group", [GROUP, "fifo"])
def test_invariant_13_a_live_delivery_is_exclusive_through_any_restart(group: str) -> None:
    world = World()
    world.group("fifo", is_ordered=True)
    world.send("m0", "m1")
    world.pop(2, group=group, invisible_ms=10_000)
    for power_cut in (False, True, False):
        world.restart(power_cut=power_cut)
        world.checkpoint()
        assert world.bodies(group=group, attempt_id="another") == []
        world.advance(3_000)
    world.advance(1_000)
    assert sorted(world.drain(group=group)) == ["m0", "m1"]


def test_invariant_14_power_cuts_during_a_revive_leave_one_retry_copy() -> None:
    def prepare(world: World) -> None:
        world.send("m0", "m1", "m2")
        world.pop(3, invisible_ms=1_000)
        world.now_ms += 1_000

    def check(world: World, is_cut: bool) -> None:
        world.run_due()
        assert copies(world, f"%RETRY%{GROUP}+{TOPIC}") == 3
        assert sorted(world.drain()) == ["m0", "m1", "m2"]

    cut_everywhere(prepare, World.run_due, check)


def test_invariant_15_power_cuts_while_dead_lettering_leave_one_dead_letter() -> None:
    def prepare(world: World) -> None:
        world.group(max_attempts=1)
        world.group("fifo", is_ordered=True, max_attempts=1)
        world.send("m0", "m1")
        world.pop(2, invisible_ms=1_000)
        for one in world.pop(2, group="fifo", invisible_ms=1_000):
            world.change(one, 1_000)
        world.now_ms += 1_000

    def check(world: World, is_cut: bool) -> None:
        world.run_due()
        for group in (GROUP, "fifo"):
            assert copies(world, f"%DLQ%{group}") == 2
            assert world.bodies(group=group) == []

    cut_everywhere(prepare, World.run_due, check)


@pytest.mark.parametrize("group", [GROUP, "fifo"])
def test_invariant_16_change_invisible_leaves_exactly_one_live_delivery(group: str) -> None:
    handles: dict[str, PoppedMessage | None] = {}

    def prepare(world: World) -> None:
        world.group("fifo", is_ordered=True)
        world.send("m0")
        (handles["old"],) = world.pop(1, group=group, invisible_ms=10_000)

    def act(world: World) -> None:
        assert handles["old"] is not None
        handles["new"] = None
        handles["new"] = world.change(handles["old"], 50_000)

    def check(world: World, is_cut: bool) -> None:
        old, new = handles["old"], handles["new"]
        assert old is not None
        found = world.engine.catalog.find_group(group)
        assert found is not None
        (progress,) = world.engine.inspection.group_progress(found)
        assert progress.in_flight_count == 1
        (result,) = world.ack(old)
        if new is not None:
            assert result is AckResult.GONE
            with pytest.raises(InvalidReceiptHandle):
                world.change(old, 1_000)
            assert world.ack(new) == [AckResult.APPLIED]
        world.advance(10_000)
        assert world.bodies(group=group) == []
        world.advance(40_000)
        assert len(world.drain(group=group)) == (result is AckResult.GONE and new is None)

    cut_everywhere(prepare, act, check)


@pytest.mark.parametrize("restarts", [False, True])
def test_invariant_17_repeated_acks_equal_one(restarts: bool) -> None:
    world = World()
    world.send("m0", "m1")
    (m0, m1) = world.pop(2)
    assert world.ack(m0) == [AckResult.APPLIED]
    before = observe(world.engine, world.now_ms)
    for _ in range(3):
        if restarts:
            world.restart()
        assert world.ack(m0, m0) == [AckResult.ALREADY] * 2
        assert observe(world.engine, world.now_ms) == before
    assert world.ack(m1, m1) == [AckResult.APPLIED, AckResult.ALREADY]
    assert world.ack(m0) == [AckResult.ALREADY], "also when its delivery has left the table"


def test_invariant_17_two_acks_of_one_round_equal_one_through_a_power_cut() -> None:
    world = World()
    world.send("m0", "m1")
    (m0, _) = world.pop(2)
    for _ in range(2):
        world.engine.commands.ack(m0.delivery, world.now_ms)
    world.commit()
    world.restart(power_cut=True)
    judge(world)
    assert world.ack(m0) == [AckResult.ALREADY]


@pytest.mark.parametrize("late_ms", [-1, 0, 1])
def test_invariant_18_the_result_of_a_late_ack_depends_on_the_revive(late_ms: int) -> None:
    world = World()
    world.send("m0")
    (m0,) = world.pop(1, invisible_ms=1_000)
    world.now_ms += 1_000 + late_ms
    (result,) = world.ack(m0)  # Before the revive: it settles, late or not.
    world.advance(2_000)
    assert (result, world.bodies()) == (AckResult.APPLIED, [])
    world.send("m1")
    (m1,) = world.pop(1, invisible_ms=1_000)
    world.advance(1_000)  # The revive came first.
    assert world.ack(m1) == [AckResult.GONE]
    (again,) = world.pop(1, invisible_ms=9_000)
    assert world.ack(m1) == [AckResult.GONE]
    assert (again.body, world.ack(again)) == ("m1", [AckResult.APPLIED])


def test_invariant_18_an_ack_in_the_round_of_the_revive_has_one_outcome() -> None:
    for ack_first in (True, False):
        world = World()
        world.send("m0")
        (m0,) = world.pop(1, invisible_ms=1_000)
        world.now_ms += 1_000
        if ack_first:
            result = world.engine.commands.ack(m0.delivery, world.now_ms)
            world.engine.run_due(world.now_ms, firing_ms=world.now_ms)
        else:
            world.engine.run_due(world.now_ms, firing_ms=world.now_ms)
            result = world.engine.commands.ack(m0.delivery, world.now_ms)
        world.commit()
        world.restart(power_cut=True)
        judge(world)
        assert result is (AckResult.APPLIED if ack_first else AckResult.GONE)
        assert world.bodies() == ([] if ack_first else ["m0"])


def test_invariant_18_a_late_ack_of_a_dead_lettered_message_is_rejected() -> None:
    """Other messages of its ordered delivery are still waiting for the next pop."""
    world = World()
    world.group("fifo", is_ordered=True, max_attempts=2)
    world.send("m0")
    world.pop(1, group="fifo", invisible_ms=1_000)
    world.advance(1_000)
    world.send("m1")
    m0, m1 = world.pop(2, group="fifo", invisible_ms=1_000)
    assert (m0.attempt, m1.attempt) == (2, 1)
    world.advance(1_000)
    assert world.bodies(group="auditor", topic="%DLQ%fifo") == ["m0"]
    assert world.ack(m0, m1) == [AckResult.GONE, AckResult.APPLIED]


def forgeries(delivery: Delivery) -> list[Delivery]:
    return [
        delivery._replace(delivery_id=LogOffset(delivery.delivery_id + 1)),
        delivery._replace(delivery_id=LogOffset(delivery.delivery_id + (1 << 32))),
        delivery._replace(delivery_id=LogOffset(delivery.delivery_id - 1)),
        delivery._replace(slot=DeliverySlot(delivery.slot + 1)),
        delivery._replace(slot=DeliverySlot(1 << 31)),
        delivery._replace(message_index=delivery.message_index + 2),
        delivery._replace(message_index=31),
        delivery._replace(group_id=GroupId(delivery.group_id + 1)),
        delivery._replace(topic_id=TopicId(delivery.topic_id + 1)),
    ]


def test_invariant_19_a_forged_delivery_changes_nothing() -> None:
    world = World()
    world.topic("other")
    world.group("other")
    world.send("m0", "m1")
    (m0, _) = world.pop(2)
    before = observe(world.engine, world.now_ms)
    for forged in forgeries(m0.delivery):
        result = world.engine.commands.ack(forged, world.now_ms)
        assert result is not AckResult.APPLIED, forged
        if forged.message_index != m0.delivery.message_index:
            assert result is AckResult.GONE, "the delivery has no such message"
        with pytest.raises(InvalidReceiptHandle):
            world.engine.commands.change_invisible(
                forged, invisible_duration_ms=1, suspend=False, now_ms=world.now_ms
            )
        with pytest.raises(InvalidReceiptHandle):
            world.engine.commands.dead_letter(forged, world.now_ms)
        assert observe(world.engine, world.now_ms) == before, forged
    world.commit()
    world.restart()
    assert observe(world.engine, world.now_ms) == before


def test_invariant_19_a_handle_of_an_older_epoch_changes_nothing() -> None:
    world = World()
    world.send("m0", "m1")
    (m0, m1) = world.pop(2)
    world.engine.administration.reset_offset(GROUP, TOPIC, ResetTarget(earliest=True), world.now_ms)
    world.commit()
    again = world.pop(2)
    before = observe(world.engine, world.now_ms)
    assert world.ack(m0, m1) == [AckResult.GONE] * 2
    with pytest.raises(InvalidReceiptHandle):
        world.change(m0, 1)
    assert observe(world.engine, world.now_ms) == before
    assert world.ack(*again) == [AckResult.APPLIED] * 2


def test_invariant_19_the_proxy_refuses_handles_that_were_changed_anywhere() -> None:
    world = World()
    world.send("m0")
    (m0,) = world.pop(1)
    signer = HandleSigner(world.engine.catalog.handle_secret, world.engine.catalog.broker_name)
    one = m0.delivery
    signed = signer.sign(
        GROUP, TOPIC, slot=one.slot, delivery_id=one.delivery_id, visible_at_ms=one.visible_at_ms
    )
    text = signed.handle(0).decode()
    for at in range(len(text)):
        for letter in "A", "z", "9", "_":
            changed = text[:at] + letter + text[at + 1 :]
            if changed != text:
                with pytest.raises(InvalidReceiptHandle):
                    signer.open(changed, GROUP, TOPIC)
    for group, topic in ((GROUP, "other"), ("other", TOPIC), (GROUP + TOPIC, "")):
        with pytest.raises(InvalidReceiptHandle):
            signer.open(text, group, topic)
    with pytest.raises(InvalidReceiptHandle):
        HandleSigner(bytes(32), world.engine.catalog.broker_name).open(text, GROUP, TOPIC)


def test_invariant_20_one_response_never_holds_a_message_twice() -> None:
    random = Random(20)
    world = World(retention_bytes=4 << 20)
    world.topic(queues=4)
    for turn in range(60):
        for queue_id in range(4):
            world.send(f"m{turn}-{queue_id}", queue_id=queue_id, tag=random.choice("ab"))
        tags = random.choice([(), ("a",), ("a", "b")])
        popped = world.pop(random.randint(1, 32), invisible_ms=700, tags=tags)
        bodies = [one.body for one in popped]
        assert len(set(bodies)) == len(bodies)
        world.ack(*random.sample(popped, len(popped) // 2))
        world.advance(500)
        if turn % 10 == 0:
            world.restart()
