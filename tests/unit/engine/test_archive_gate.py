"""Retention waits for an archive while the disk has room."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.engine_world import TOPIC, World
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.upkeep.archive_gate import QUEUES_A_LOOK

DAY_MS = 86_400_000
SEGMENT = 16_384
ARCHIVE = "archive"


def world_with_gate(*, archive_gate_group: str = ARCHIVE) -> World:
    world = World(
        FaultyDisk(Random(0)),
        segment_bytes=SEGMENT,
        retention_ms=DAY_MS,
        archive_gate_group=archive_gate_group,
    )
    world.leave_room(1 << 30)
    world.group(ARCHIVE)
    return world


def seal(world: World, offset: int, *, topic: str = TOPIC, group: str = ARCHIVE) -> None:
    world.engine.administration.update_pull_offset(
        world.group(group), world.topic(topic), QueueId(0), offset, world.now_ms
    )
    world.commit()


def fill(world: World, *, topic: str = TOPIC) -> None:
    """Add messages of three segments."""
    world.send(*[f"m{n}" for n in range(12)], topic=topic, size=4_000)


def grow_old(world: World, days: int = 2) -> None:
    """Let all messages pass their retention time, then run retention."""
    fill(world, topic="filler")
    world.now_ms += days * DAY_MS
    world.engine.room.measure()
    fill(world, topic="filler")
    world.background()


def first_of(world: World, topic: str = TOPIC) -> int:
    return int(world.engine.catalog.queue(world.topic(topic), QueueId(0)).min_offset)


def live_bytes(world: World) -> int:
    """Return the live bytes of all topics, by the entries of their queues."""
    queues = world.engine.catalog.queues.values()
    return sum(size for queue in queues for _, size, _ in queue.walk(queue.min_offset))


def test_unsealed_messages_are_kept_beyond_retention() -> None:
    world = world_with_gate()
    fill(world)
    seal(world, 5)
    grow_old(world)
    assert 0 < first_of(world) <= 5, "retention did not stop at the segment of the sealed offset"
    gate = world.engine.retention.gate
    assert gate.is_holding
    assert (gate.gives_way, gate.passed_count) == (False, 0)
    seal(world, 12)
    world.background()
    assert first_of(world) == 12
    assert not gate.is_holding


def test_a_topic_is_lifted_from_the_gate_alone_and_may_be_held_again() -> None:
    world = world_with_gate()
    for topic in (TOPIC, "kept"):
        fill(world, topic=topic)
        seal(world, 0, topic=topic)
    grow_old(world)
    assert (first_of(world), first_of(world, "kept")) == (0, 0)
    administration = world.engine.administration
    administration.forget_pull_offsets(world.group(ARCHIVE), world.topic(), world.now_ms)
    world.commit()
    end = world.engine.log.log_end
    administration.forget_pull_offsets(world.group(ARCHIVE), world.topic(), world.now_ms)
    assert world.engine.log.log_end == end, "deleting a missing pull offset wrote a record"
    for restart in (world.background, world.restart, world.checkpoint, world.restart):
        restart()
        keys = [key[1] for key in world.engine.catalog.pull_offsets.all]
        assert keys == [world.topic("kept")]
    gate = world.engine.retention.gate
    assert gate.sealed_offset(world.topic(), QueueId(0)) is None
    grow_old(world)
    assert first_of(world, "kept") == 0
    # The oldest segment holds messages of both topics. Once "kept" is sealed, retention takes it.
    seal(world, 12, topic="kept")
    world.background()
    assert first_of(world) == 12
    fill(world)
    seal(world, 12)
    grow_old(world)
    grow_old(world)
    assert first_of(world) == 12
    assert world.engine.retention.gate.is_holding


@pytest.mark.parametrize("gate_group", ["", "another"])
def test_pull_offsets_of_other_groups_keep_nothing(gate_group: str) -> None:
    world = world_with_gate(archive_gate_group=gate_group)
    fill(world)
    seal(world, 0)
    grow_old(world)
    assert first_of(world) == 12


def test_an_unarchived_queue_is_not_kept() -> None:
    world = world_with_gate()
    seal(world, 0)
    fill(world, topic="not archived")
    grow_old(world)
    assert first_of(world, "not archived") == 12


def test_the_limit_by_size_waits_for_the_archive_too() -> None:
    world = World(
        FaultyDisk(Random(0)),
        segment_bytes=SEGMENT,
        retention_bytes=2 * SEGMENT,
        archive_gate_group=ARCHIVE,
    )
    world.leave_room(1 << 30)
    world.group(ARCHIVE)
    fill(world)
    seal(world, 0)
    fill(world, topic="filler")
    world.background()
    assert first_of(world) == 0
    seal(world, 12)
    world.background()
    assert first_of(world) > 0
    assert live_bytes(world) <= 2 * SEGMENT


def test_the_gate_gives_way_before_messages_are_refused() -> None:
    world = world_with_gate()
    gate = world.engine.retention.gate
    fill(world)
    seal(world, 0)
    grow_old(world)
    assert first_of(world) == 0
    assert gate.take_notices() == []
    world.leave_room(3 * SEGMENT)
    world.background()
    assert first_of(world) > 0
    assert gate.passed_count > 0
    (notice,) = gate.take_notices()
    assert (notice.gives_way, notice.topic) == (True, TOPIC)
    assert not world.engine.room.is_full
    # The disk has room again. The gate keeps the remaining messages and issues one notice.
    passed = gate.passed_count
    world.leave_room(1 << 30)
    world.background()
    assert gate.passed_count == passed
    assert [each.gives_way for each in gate.take_notices()] == [False]


def test_the_archive_gate_never_lets_the_log_fill_the_disk() -> None:
    world = world_with_gate()
    seal(world, 0)
    world.leave_room(16 * SEGMENT)
    for n in range(60):
        world.send(f"m{n}", size=8_000)
        world.now_ms += DAY_MS
        world.engine.room.measure()
        world.background()
        assert not world.engine.room.is_full
    assert world.engine.retention.gate.passed_count > 0


def test_without_the_group_nothing_is_kept() -> None:
    world = world_with_gate()
    fill(world)
    seal(world, 0)
    grow_old(world)
    assert first_of(world) == 0
    world.engine.administration.delete_group(ARCHIVE, world.now_ms)
    world.commit()
    world.background()
    assert first_of(world) == 12
    assert not world.engine.retention.gate.is_holding


@pytest.mark.parametrize("only_the_log", [False, True])
def test_sealed_offsets_survive_a_restart_and_a_failover(only_the_log: bool) -> None:
    world = world_with_gate()
    fill(
        world, topic="first"
    )  # Retention takes the record of the offset, so the engine writes it again.
    seal(world, 12, topic="first")
    fill(world)
    seal(world, 5)
    grow_old(world)
    disk = world.disk.after_kill()
    if only_the_log:
        for folder in ("queues", "index", "snapshots"):
            for name in disk.names(folder):
                disk.remove(name)
        disk.remove("checkpoint")
    world.disk = disk
    world.open()
    grow_old(world)
    assert 0 < first_of(world) <= 5
    queue = world.topic(), QueueId(0)
    assert world.engine.retention.gate.sealed_offset(*queue) == 5


def test_the_archive_gate_holds_after_a_failover() -> None:
    world = World(
        FaultyDisk(Random(0)),
        segment_bytes=SEGMENT,
        retention_ms=DAY_MS,
        archive_gate_group=ARCHIVE,
        is_followed=True,
    )
    world.leave_room(1 << 30)
    world.group(ARCHIVE)
    fill(world)
    seal(world, 5)
    world.fail_over()
    world.leave_room(1 << 30)
    grow_old(world)
    assert first_of(world) <= 5
    assert world.engine.retention.gate.is_holding


def test_a_look_at_very_many_queues_is_done_in_parts() -> None:
    world = world_with_gate()
    wide = world.topic("wide", queues=QUEUES_A_LOOK + 100)
    fill(world)
    seal(world, 5)  # The gate gets this offset first and examines its queue last.
    for number in range(QUEUES_A_LOOK + 100):
        world.engine.administration.update_pull_offset(
            world.group(ARCHIVE), wide, QueueId(number), 0, world.now_ms
        )
    world.commit()
    grow_old(world)
    assert 0 < first_of(world) <= 5
    seal(world, 12)
    world.background()
    assert first_of(world) == 12
