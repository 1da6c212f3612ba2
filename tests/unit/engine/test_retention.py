"""Retention, and the state that survives it."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.quiet import has_pending
from tests.support.worlds.engine_world import GROUP, TOPIC, World
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.common.errors import DiskFull

DAY_MS = 86_400_000


def world_with_old_segments() -> World:
    """Make a world with all configuration and deliveries in its oldest segments."""
    world = World(FaultyDisk(Random(0)), retention_ms=DAY_MS)
    world.group(max_attempts=5)
    world.group("ordered", is_ordered=True)
    world.group("resetter")
    world.topic("quiet")
    world.send("q0", "q1", topic="quiet")
    world.send(*[f"m{n}" for n in range(8)], size=100)
    return world


def fill(world: World, mebibytes: int) -> None:
    for n in range(mebibytes * 8):
        world.send(f"filler{world.now_ms}-{n}", topic="filler", size=130_000)


def keep_only_the_log(world: World) -> None:
    disk = world.disk.after_kill()
    for folder in ("queues", "index", "snapshots"):
        for name in disk.names(folder):
            disk.remove(name)
    disk.remove("checkpoint")
    world.disk = disk
    world.open()


def test_the_segments_that_retention_leaves_hold_all_live_state() -> None:
    """All live state survives the loss of snapshots and of the first segments."""
    world = world_with_old_segments()
    live = world.pop(4, invisible_ms=10 * DAY_MS)
    replaced = world.change(live[1], 11 * DAY_MS)
    world.ack(live[0])
    ordered = world.pop(2, group="ordered", invisible_ms=10 * DAY_MS, attempt_id="a1")
    world.ack(ordered[0])
    void = world.pop(2, group="resetter", invisible_ms=10 * DAY_MS)
    world.engine.administration.reset_offset("resetter", TOPIC, ResetTarget(offset=5), world.now_ms)
    world.commit()
    fill(world, 3)
    world.now_ms += 2 * DAY_MS
    world.engine.room.measure()
    fill(world, 1)
    world.background()
    assert world.engine.log.min_offset >= 2 << 20
    topics = {topic.name: topic for topic in world.engine.catalog.topics.values()}
    groups = {group.name: group for group in world.engine.catalog.groups.values()}
    secret = world.engine.catalog.handle_secret
    keep_only_the_log(world)

    catalog = world.engine.catalog
    assert {topic.name: topic for topic in catalog.topics.values()} == topics
    assert {group.name: group for group in catalog.groups.values()} == groups
    assert world.engine.catalog.handle_secret == secret
    quiet = catalog.queue(topics["quiet"].id, QueueId(0))
    assert (quiet.min_offset, quiet.max_offset) == (2, 2), "retention moved the offsets"
    assert world.ack(live[1]) == [AckResult.GONE], "a replaced receipt handle is valid again"
    assert world.ack(void[0]) == [AckResult.GONE], "a delivery from before the reset is valid again"
    assert world.ack(live[2]) == [AckResult.APPLIED]
    assert world.ack(replaced) == [AckResult.APPLIED]
    assert world.ack(ordered[1]) == [AckResult.APPLIED]
    progress = world.engine.state.progress[groups[GROUP].id, topics[TOPIC].id, QueueId(0)]
    low = catalog.queue(topics[TOPIC].id, QueueId(0)).min_offset
    assert low > 4, "retention kept messages that the group did not pop"
    assert (progress.pop_offset, progress.in_flight) == (low, 1)


def test_a_second_segment_deletion_keeps_rewritten_records() -> None:
    world = world_with_old_segments()
    (live,) = world.pop(1, invisible_ms=100 * DAY_MS)
    for _ in range(3):
        fill(world, 2)
        world.now_ms += 2 * DAY_MS
        world.engine.room.measure()
        fill(world, 1)
        world.background()
    keep_only_the_log(world)
    assert world.ack(live) == [AckResult.APPLIED]


def test_retention_by_size_keeps_the_log_below_its_limit() -> None:
    world = World(FaultyDisk(Random(0)), retention_bytes=3 << 20)
    for _ in range(4):
        fill(world, 2)
        world.background()
    assert world.engine.log.log_end - world.engine.log.min_offset <= 3 << 20
    assert world.engine.log.min_offset > 0


def test_retention_gets_on_while_a_checkpoint_is_always_due() -> None:
    world = World(FaultyDisk(Random(0)), retention_bytes=2 << 20, checkpoint_log_bytes=64 << 10)
    engine = world.engine
    for n in range(400):
        # At each slice of the job, the log has grown enough for another checkpoint.
        world.send(f"filler{n}", size=100_000)
        for file in engine.background.step(world.now_ms, firing_ms=world.now_ms) or []:
            file.sync()
        if has_pending(engine):
            world.commit()
    assert engine.log.min_offset > 0


def test_messages_that_are_not_expired_are_delivered() -> None:
    world = World(FaultyDisk(Random(0)), retention_bytes=2 << 20)
    sent = [f"m{n}" for n in range(40)]
    world.group()
    for text in sent:
        world.send(text, size=100_000)
        world.background()
    got = world.drain()
    assert got == sent[len(sent) - len(got) :]
    assert len(got) < len(sent)


def test_the_original_of_a_delivery_may_expire_before_its_revive() -> None:
    world = World(FaultyDisk(Random(0)), retention_bytes=2 << 20)
    world.send("m0", "m1")
    world.pop(2, invisible_ms=60_000)
    fill(world, 4)
    world.background()
    world.advance(70_000)
    assert world.drain() == []
    group_id, topic_id = world.group(), world.topic()
    assert world.engine.state.counts["expired_before_revive", group_id, topic_id] == 2
    assert world.engine.state.progress[group_id, topic_id, QueueId(0)].in_flight == 0


def test_sends_are_rejected_before_the_disk_is_full_and_acks_continue() -> None:
    world = World(
        FaultyDisk(Random(0), capacity_bytes=6 << 20), disk_reserve_bytes=4 << 20, now_ms=5
    )
    world.send("m0", "m1")
    (popped,) = world.pop(1)
    while world.engine.room.free_bytes >= 4 << 20:
        world.send(f"big{world.disk.written_bytes}", size=100_000)
        world.engine.room.measure()
    with pytest.raises(DiskFull, match=r"fewer than the 4 MiB of disk_reserve_bytes: .*rejects"):
        world.send("one too many")
    assert world.ack(popped) == [AckResult.APPLIED]
    assert world.bodies(1) == ["m1"]
    world.advance(40_000)
    assert "m1" in world.drain(), "revive stopped"


def test_a_deleted_topic_makes_room_on_a_full_disk_without_more_log() -> None:
    world = World(
        FaultyDisk(Random(0), capacity_bytes=10 << 20),
        disk_reserve_bytes=4 << 20,
        checkpoint_log_bytes=64 << 20,
    )
    while world.engine.room.free_bytes >= 4 << 20:
        world.send(f"big{world.disk.written_bytes}", size=100_000)
        world.engine.room.measure()
    world.background()
    segments = len(world.engine.log.segments)
    world.engine.administration.delete_topic(TOPIC, world.now_ms)
    world.commit()
    world.background()
    assert len(world.engine.log.segments) < segments - 2
    assert world.engine.log.min_offset > 0


@pytest.mark.parametrize("position", [0, 8, 27, 28, 40])
@pytest.mark.parametrize("bits", [1, 32, 128])
def test_a_damaged_record_does_not_make_its_segment_look_older_or_younger(
    position: int, bits: int
) -> None:
    world = World(FaultyDisk(Random(0)), retention_ms=DAY_MS, now_ms=30 * DAY_MS)
    fill(world, 3)
    world.checkpoint()
    world.disk.damage(world.disk.names("log")[1], position, bits=bits)
    world.restart()
    world.background()
    assert world.engine.log.min_offset == 0
    world.now_ms += DAY_MS
    world.background()
    assert world.engine.log.min_offset > 0
