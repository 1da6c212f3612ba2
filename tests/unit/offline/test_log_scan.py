"""A walk over the log ends, whatever the broker writes meanwhile."""

from __future__ import annotations

from random import Random

from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.disk.offline_world import BusySource, finish
from tests.support.worlds.engine_world import TOPIC, World
from tidemill.broker.engine.layout import store_checkpoint
from tidemill.broker.engine.store.segment import CorruptStore
from tidemill.broker.offline.copy import copy
from tidemill.broker.offline.log_scan import LogScan, list_segments

SEGMENT = 64 << 10
READS_MAX = 100  # far more than the files of these worlds take


def durable_offset(world: World) -> int:
    checkpoint = store_checkpoint.find(world.disk.read("checkpoint"))
    assert checkpoint is not None
    return checkpoint.durable_offset


class Sender:
    """A producer that sends a message after each read."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.count = 0

    def send(self) -> None:
        self.count += 1
        assert self.count < READS_MAX, "the walk follows a busy broker forever"
        self.world.send(f"later {self.count}")


def test_a_walk_beside_a_busy_broker_covers_the_durable_log_at_its_begin() -> None:
    world = World(FaultyDisk(Random(0)), segment_bytes=SEGMENT)
    for n in range(20):
        world.send(f"m{n}")
    end = world.engine.log.log_end
    source = BusySource(world.disk, Sender(world).send)
    scan = LogScan(
        source, list_segments(source).segments, begin=0, durable_offset=durable_offset(world)
    )
    assert all(found.end <= scan.end for found in scan.walk())
    assert end <= scan.end <= world.engine.log.log_end


def test_a_copy_has_the_state_of_a_segment_that_is_dropped_meanwhile() -> None:
    """The broker drops the oldest segment during the copy, of which only the log is taken."""
    world = World(FaultyDisk(Random(0)), segment_bytes=SEGMENT)
    world.group("early")
    for n in range(60):
        world.send(f"m{n}", size=1_800)
    world.checkpoint()
    first = world.disk.names("log")[0]

    def retire() -> None:
        if first in world.disk.names("log") and target.all_names():
            world.retire()

    target = FaultyDisk(Random(0))
    report = finish(copy(BusySource(world.disk, retire), target, slice_bytes=4096))
    assert report.log_from == SEGMENT
    for folder in ("queues", "index", "snapshots"):
        for name in target.names(folder):
            target.remove(name)
    copied = World(target.after_power_cut(), segment_bytes=SEGMENT)
    assert copied.engine.catalog.find_group("early") is not None
    assert copied.engine.catalog.find_topic(TOPIC) is not None
    kept = copied.drain(group="late")
    assert kept[-1] == "m59"
    assert kept == [f"m{n}" for n in range(60 - len(kept), 60)]


def test_an_interrupted_copy_does_not_start() -> None:
    world = World(FaultyDisk(Random(0)), segment_bytes=SEGMENT)
    for n in range(60):
        world.send(f"m{n}", size=1_800)
    cut_at = 0
    while True:
        target = FaultyDisk(Random(cut_at))
        target.cut_at = cut_at
        try:
            finish(copy(world.disk, target))
        except PowerCut:
            found = target.after_power_cut()
            cut_at += 1
            if not found.names("log"):
                continue
            try:
                again = World(found, segment_bytes=SEGMENT)
            except CorruptStore:
                continue
            # All segments have their names, which is the last step.
            assert again.drain(group="late") == [f"m{n}" for n in range(60)]
            continue
        return
