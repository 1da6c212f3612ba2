"""A full disk, or a nearly full one: sends are rejected, all other work continues.

The disk has exactly its capacity: a write that does not fit fails and ends the process. No write
and no start may fail, whatever clients, deadlines, timers and background work do.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from random import Random

import pytest

from tests.support.disk.faulty_disk import UNBOUNDED, FaultyDisk
from tests.support.seeds import seeds
from tests.support.worlds.engine_world import GROUP, TOPIC, PoppedMessage
from tests.support.worlds.timer_world import (
    HOUR_MS,
    SECOND_MS,
    START_MS,
    TIMERS,
    TimerWorld,
    UnjudgedWorld,
)
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.metadata.catalog import Topic
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.broker.engine.room import COPY_RESERVE_PART
from tidemill.common.errors import DiskFull, InvalidReceiptHandle, Overloaded, TopicNotFound

RESERVE_BYTES = 4 << 20
CAPACITY_BYTES = 12 << 20
BODY_BYTES = 20_000
OTHER = "payments"
SMALL_RESERVE_BYTES = 512 << 10
STEPS = 400


def small_world(seed: int = 0) -> TimerWorld:
    world = UnjudgedWorld(
        FaultyDisk(Random(seed), capacity_bytes=CAPACITY_BYTES),
        now_ms=START_MS,
        timer=TIMERS,
        segment_bytes=256 << 10,
        checkpoint_log_bytes=512 << 10,
        disk_reserve_bytes=RESERVE_BYTES,
        auto_create_topics=True,
        auto_create_groups=True,
    )
    world.group(max_attempts=50)
    return world


def fill(world: TimerWorld) -> list[str]:
    """Send until messages are rejected; return the stored ones."""
    sent: list[str] = []
    with contextlib.suppress(DiskFull):
        while True:
            world.send(f"m{len(sent)}", size=BODY_BYTES)
            sent.append(f"m{len(sent)}")
            world.background()
            world.engine.room.measure()
    return sent


def test_revive_waits_for_room_and_acks_do_not() -> None:
    world = small_world()
    sent = fill(world)
    popped: list[PoppedMessage] = []
    with contextlib.suppress(DiskFull):
        while more := world.pop(invisible_ms=5 * SECOND_MS):
            popped += more
            world.engine.room.measure()
    for _ in range(400):
        world.advance(6 * SECOND_MS)
        world.background()
        world.engine.room.measure()
        with contextlib.suppress(DiskFull):
            popped = world.pop(invisible_ms=5 * SECOND_MS) or popped
    assert not world.engine.room.may_copy, "copies used all of their share"
    world.restart()
    assert set(world.ack(*popped)) <= {AckResult.APPLIED, AckResult.GONE}
    assert len(sent) > 100


def test_work_that_waits_for_room_continues_when_there_is_some() -> None:
    world = small_world()
    sent = fill(world)
    popped = world.pop(4, invisible_ms=5 * SECOND_MS)
    world.leave_room(0)
    world.engine.take_ready()
    world.now_ms += 6 * SECOND_MS
    assert not world.engine.run_due(world.now_ms, firing_ms=world.now_ms)
    due_ms = world.engine.next_due_ms(world.now_ms, firing_ms=world.now_ms)
    assert due_ms is not None
    assert due_ms > world.now_ms, "it is not tried again and again"
    with pytest.raises(DiskFull):
        world.engine.commands.dead_letter(popped[0].delivery, world.now_ms)
    world.leave_room(RESERVE_BYTES)
    world.run_due()
    assert {one.body for one in popped} <= set(world.drain())
    assert sent


def test_no_derived_file_is_written_when_other_programs_have_used_the_reserve() -> None:
    """Timers and checkpoints are due and wait. Acks continue in the existing segment."""
    world = small_world()
    for n in range(20):
        world.send(f"m{n}", size=BODY_BYTES)
        world.schedule(f"later{n}", delay_ms=HOUR_MS)
    popped = world.pop(8, invisible_ms=HOUR_MS)
    world.leave_room(0)
    for one in popped:
        assert world.ack(one) == [AckResult.APPLIED]
        world.advance(10 * SECOND_MS)
        world.background()
    assert world.engine.timers.index.links.timer_log.has_unwritten
    due_ms = world.engine.background.next_ms()
    assert due_ms is not None
    assert due_ms > world.now_ms, "it is not tried again and again"
    world.leave_room(RESERVE_BYTES)
    world.advance(2 * SECOND_MS)
    world.background()
    assert not world.engine.timers.index.links.timer_log.has_unwritten


def test_a_checkpoint_continues_without_a_snapshot_that_does_not_fit() -> None:
    """Other programs use most of the reserve with many deliveries in flight: no write and no start
    fails.
    """
    world = world_in_flight()
    snapshot_bytes = world.engine.checkpoints.snapshot_size.size_bytes
    assert snapshot_bytes > 200_000
    names = world.disk.names("snapshots")
    world.leave_room(snapshot_bytes + 100_000)
    for _ in range(3):
        derived = world.engine.store.derived_offset
        world.group(f"group-{derived}")  # a logged change
        world.commit()
        world.checkpoint()
        assert world.engine.store.derived_offset > derived
        assert world.engine.checkpoints.is_without_snapshot
        assert world.disk.names("snapshots") == names
        world.restart()
    world.leave_room(2 * RESERVE_BYTES)
    world.send("there is room")
    world.checkpoint()
    assert not world.engine.checkpoints.is_without_snapshot
    assert world.disk.names("snapshots") != names


def test_a_snapshot_that_runs_out_of_room_leaves_no_file() -> None:
    world = world_in_flight()
    names = world.disk.names("snapshots")
    steps = world.engine.checkpoints.write()
    while not world.disk.read("snapshots/unfinished"):
        for file in next(steps):
            file.sync()
    world.leave_room(RESERVE_BYTES // 32)
    for files in steps:
        for file in files:
            file.sync()
    assert world.engine.checkpoints.is_without_snapshot
    assert world.disk.names("snapshots") == names
    world.restart()


def test_an_unfinished_snapshot_is_deleted_before_other_writes() -> None:
    world = world_in_flight()
    steps = world.engine.checkpoints.write()
    while not world.disk.read("snapshots/unfinished"):
        for file in next(steps):
            file.sync()
    next(steps)
    free_bytes = world.disk.free_bytes()
    world.restart()
    assert "snapshots/unfinished" not in world.disk.names("snapshots")
    assert world.disk.free_bytes() > free_bytes


def test_a_checkpoint_that_does_not_fit_waits() -> None:
    world = world_in_flight()
    derived = world.engine.store.derived_offset
    world.leave_room(RESERVE_BYTES // 32)
    world.checkpoint()
    assert world.engine.checkpoints.waits_for_room
    assert not world.engine.checkpoints.is_due
    assert world.engine.store.derived_offset == derived
    world.leave_room(RESERVE_BYTES)
    world.background()
    assert world.engine.store.derived_offset > derived


def test_the_reserve_is_at_least_as_large_as_the_next_snapshot() -> None:
    world = world_in_flight(reserve_bytes=100_000)
    world.leave_room(world.engine.checkpoints.snapshot_size.size_bytes - 1)
    world.engine.room.measure()
    assert world.engine.room.is_full
    world.leave_room(world.engine.checkpoints.snapshot_size.size_bytes + 50_000)
    world.engine.room.measure()
    assert not world.engine.room.is_full


def world_in_flight(*, reserve_bytes: int = RESERVE_BYTES) -> TimerWorld:
    """Open a world with so many deliveries in flight that its snapshot is large."""
    world = UnjudgedWorld(
        FaultyDisk(Random(1), capacity_bytes=64 << 20),
        segment_bytes=256 << 10,
        checkpoint_log_bytes=64 << 10,
        disk_reserve_bytes=reserve_bytes,
    )
    world.group()
    world.send("first")
    world.checkpoint()
    for _ in range(40):
        world.send(*["m"] * 100)
    for _ in range(4_000):
        world.pop(1, invisible_ms=HOUR_MS)
    return world


def test_a_deleted_topic_makes_room_at_once() -> None:
    world = small_world()
    fill(world)
    before = world.disk.free_bytes()
    world.engine.administration.delete_topic(TOPIC, world.now_ms)
    world.commit()
    world.background()
    world.engine.room.measure()
    assert world.disk.free_bytes() > before + 4 * BODY_BYTES * 20
    world.send("again", topic=OTHER)
    assert world.bodies(topic=OTHER) == ["again"]


def test_a_topic_that_has_messages_keeps_its_segments() -> None:
    world = small_world()
    world.send("kept", topic=OTHER)
    fill(world)
    world.engine.administration.delete_topic(TOPIC, world.now_ms)
    world.commit()
    world.background()
    assert world.engine.log.min_offset == 0
    assert world.bodies(topic=OTHER) == ["kept"]


def test_a_rejected_send_creates_no_topic() -> None:
    world = small_world()
    fill(world)
    with pytest.raises(DiskFull, match="rejects messages"):
        world.engine.administration.ensure("new", "", world.now_ms)
    assert world.engine.catalog.find_topic("new") is None
    world.engine.administration.ensure(TOPIC, GROUP, world.now_ms)


def test_no_segment_is_prepared_early_from_the_reserve() -> None:
    world = small_world()
    fill(world)
    names = world.disk.names("log")
    assert len(names) == len(world.engine.log.segments), "no segment is prepared"
    assert world.disk.free_bytes() > RESERVE_BYTES * 3 // 4


def world_of_small_messages(capacity_bytes: int) -> TimerWorld:
    """Open a world with large derived files: a thousandth of the default sizes."""
    return UnjudgedWorld(
        FaultyDisk(Random(1), capacity_bytes=capacity_bytes),
        segment_bytes=128 << 10,
        checkpoint_log_bytes=64 << 10,
        files_merged=16,
        disk_reserve_bytes=SMALL_RESERVE_BYTES,
        auto_create_topics=True,
        auto_create_groups=True,
    )


def fill_by_hundreds(world: TimerWorld) -> None:
    with contextlib.suppress(DiskFull):
        for first in itertools.count(0, 100):
            world.engine.room.measure()
            world.send(*[f"{first + n}" for n in range(100)])
            world.background()
    world.commit()


@pytest.mark.parametrize("capacity_kib", range(6_000, 9_000, 250))
def test_files_are_merged_only_with_room_above_the_reserve(capacity_kib: int) -> None:
    world = world_of_small_messages(capacity_kib << 10)
    fill_by_hundreds(world)
    assert world.disk.free_bytes() > SMALL_RESERVE_BYTES * 3 // 4
    assert not world.disk.read("queues/unfinished")
    assert not world.disk.read("index/unfinished")
    world.restart()
    world.background()


def test_a_merge_without_disk_space_leaves_no_file_and_restarts() -> None:
    world = world_of_small_messages(UNBOUNDED)
    merges = world.engine.merges
    while not merges.is_due:
        for n in range(20):
            world.send(*["m"] * 5, topic=TOPIC if n == 0 else f"topic-{n}")
        for files in world.engine.checkpoints.write() if world.engine.checkpoints.is_due else ():
            for file in files:
                file.sync()
    before, names = entries(world), world.disk.names("queues")
    world.disk.capacity_bytes = 64 << 20
    steps = merges.merge()
    while not world.disk.read("queues/unfinished"):
        next(steps)
    next(steps)
    world.leave_room(SMALL_RESERVE_BYTES - 1)
    for files in steps:
        for file in files:
            file.sync()
    assert world.disk.names("queues") == names
    world.background()
    assert world.disk.names("queues") == names, "the merge waits"
    world.disk.capacity_bytes = 64 << 20
    world.background()
    assert len(world.disk.names("queues")) < len(names)
    assert entries(world) == before


def entries(world: TimerWorld) -> list[tuple[int, int, int]]:
    queue = world.engine.catalog.queues_of(topic_of(world))[0]
    return list(queue.walk(queue.min_offset))


def topic_of(world: TimerWorld) -> Topic:
    topic = world.engine.catalog.find_topic(TOPIC)
    assert topic is not None
    return topic


def test_the_largest_file_is_rebuilt_on_a_full_disk() -> None:
    world = world_of_small_messages(28 << 20)
    fill_by_hundreds(world)
    file = max(world.engine.store.queue_files, key=lambda one: one.size_bytes)
    assert file.size_bytes > SMALL_RESERVE_BYTES // 8, "the files were merged"
    assert file.row(0).key_1 == topic_of(world).id
    before = entries(world)
    world.restart()
    world.disk.damage(file.name, file.row(0).position + 7)
    with pytest.raises(BlockFileDamaged):
        entries(world)
    world.background()
    assert world.engine.rebuilds.counts["queues"] == 1
    assert entries(world) == before


@pytest.mark.parametrize("seed", seeds("full disk", 30))
def test_no_write_fails_on_a_full_disk_in_any_history(seed: int) -> None:
    random, world = Random(seed), small_world(seed)
    fill(world)
    popped: list[PoppedMessage] = []
    refused = (DiskFull, InvalidReceiptHandle, Overloaded, TopicNotFound)

    def pop() -> None:
        nonlocal popped
        popped = world.pop(random.randint(1, 32), invisible_ms=random.choice((1_000, 60_000)))

    def schedule() -> None:
        delay_ms = random.choice((2 * SECOND_MS, HOUR_MS))
        world.schedule("timer", delay_ms=delay_ms, size=BODY_BYTES)

    def delete() -> None:
        world.engine.administration.delete_topic(TOPIC, world.now_ms)
        popped.clear()

    def dead_letter() -> None:
        for one in popped[:2]:
            world.engine.commands.dead_letter(one.delivery, world.now_ms)
        world.commit()

    steps: list[tuple[Callable[[], object], int]] = [
        (lambda: world.send("more", size=BODY_BYTES), 20),
        (pop, 20),
        (lambda: world.ack(*popped[: random.randint(0, 8)]), 10),
        (lambda: world.change(popped[0], 3_000) if popped else None, 3),
        (dead_letter, 3),
        (schedule, 10),
        (lambda: world.advance(random.choice((500, 2_000, 61_000))), 20),
        (world.background, 12),
        (world.restart, 2),
        (delete, 1),
    ]
    actions, weights = [one for one, _ in steps], [weight for _, weight in steps]
    for _ in range(STEPS):
        with contextlib.suppress(*refused):
            random.choices(actions, weights)[0]()
        world.engine.room.measure()
        assert world.disk.free_bytes() > RESERVE_BYTES // COPY_RESERVE_PART // 2
