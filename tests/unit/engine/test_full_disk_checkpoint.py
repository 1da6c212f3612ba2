"""A disk without a free block: a deletion frees space, although it needs a new checkpoint.

Before the oldest segment is removed, the checkpoint must state the new begin of the log.
"""

from __future__ import annotations

from functools import cache
from random import Random

import pytest

from tests.support.disk.faulty_disk import BLOCK, FaultyDisk, PowerCut
from tests.support.worlds.engine_world import World
from tests.support.worlds.packed_worlds import DAY_MS, delete_topic, used
from tidemill.broker.engine.upkeep.checkpoint import CHECKPOINT_FILE, NEXT_CHECKPOINT_FILE

MIB = 1 << 20
SEGMENT = 64 << 10
KEPT = [f"kept {n}" for n in range(4)]


def opened(disk: FaultyDisk, *, reserve_bytes: int = 0) -> World:
    return World(
        disk,
        segment_bytes=SEGMENT,
        checkpoint_log_bytes=SEGMENT,
        disk_reserve_bytes=reserve_bytes,
        retention_ms=400 * DAY_MS,
    )


def full_disk(*, reserve_bytes: int = 0, free_bytes: int = 0) -> World:
    """Return a world with old messages of one topic, and the last messages of another."""
    disk = FaultyDisk(Random(0), capacity_bytes=16 * MIB)
    world = opened(disk, reserve_bytes=reserve_bytes)
    while len(world.engine.log.segments) < 6:
        world.send("gone", topic="gone", size=5_000)
        world.background()
    world.send(*KEPT, topic="kept")
    for _ in range(5):
        world.advance(10_000)
        world.background()
    world.leave_room(free_bytes)
    return world


def free_space(world: World) -> None:
    """Delete the topic that takes the space, and run the background work of a minute."""
    if world.engine.catalog.find_topic("gone") is not None:
        delete_topic(world, "gone")
    for _ in range(30):
        world.advance(2_000)
        world.background()


def check(world: World, used_before: int) -> None:
    assert used(world) < used_before // 2
    world.send("sent later", topic="kept")
    assert world.drain(topic="kept", group="g") == [*KEPT, "sent later"]


@pytest.mark.parametrize("reserve_bytes", [0, 4 * MIB])
@pytest.mark.parametrize("free_bytes", [0, BLOCK])
def test_a_deletion_frees_a_full_disk(reserve_bytes: int, free_bytes: int) -> None:
    world = full_disk(reserve_bytes=reserve_bytes, free_bytes=free_bytes)
    before = used(world)
    world.restart()
    free_space(world)
    world.leave_room(8 * MIB)
    check(world, before)


@cache
def deletion() -> tuple[FaultyDisk, int, list[str]]:
    """Return a full disk, its used bytes, and the operations by which a deletion frees space."""
    world = full_disk()
    before = used(world)
    disk = world.disk.after_kill()
    world = opened(disk.after_kill())
    free_space(world)
    assert used(world) < before // 2
    return disk, before, world.disk.operations


@pytest.mark.parametrize("power_cut", [False, True])
def test_a_crash_at_each_operation_leaves_a_store_that_frees_space(power_cut: bool) -> None:
    base, before, operations = deletion()
    for cut_at in range(len(operations)):
        disk = base.after_kill()
        disk.cut_at, disk.random = cut_at, Random(cut_at)
        with pytest.raises(PowerCut):
            free_space(opened(disk))
        disk = disk.after_power_cut() if power_cut else disk.after_kill()
        assert disk.read(CHECKPOINT_FILE) is not None
        world = opened(disk)
        free_space(world)
        check(world, before)


def test_a_disk_without_room_for_the_next_file_does_not_end_the_process() -> None:
    world = full_disk()
    world.leave_room(-BLOCK)  # Another process takes the block of the replaced file.
    for files in world.engine.checkpoints.write_file(
        world.engine.store.derived_offset, min_offset=world.engine.log.min_offset
    ):
        for file in files:
            file.sync()
    assert world.disk.read(NEXT_CHECKPOINT_FILE) == b""


def test_an_unreadable_next_file_is_replaced() -> None:
    world = full_disk(free_bytes=BLOCK)
    world.disk.spoil(NEXT_CHECKPOINT_FILE, 0)
    before = used(world)
    free_space(world)
    check(world, before)
