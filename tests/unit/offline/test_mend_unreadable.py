"""Mending beside unreadable pages and after power cuts: nothing becomes worse unnoticed."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.disk.faulty_disk import BLOCK, FaultyDisk, PowerCut
from tests.support.disk.offline_world import finish
from tests.support.worlds.engine_world import TOPIC, World
from tidemill.broker.engine.store.segment import CorruptStore
from tidemill.broker.offline.check import check
from tidemill.broker.offline.copy import copy
from tidemill.broker.offline.findings import Damage
from tidemill.broker.offline.mend import mend

SEGMENT = 64 << 10


def backup_of(disk: FaultyDisk) -> FaultyDisk:
    target = FaultyDisk(Random(2))
    finish(copy(disk, target))
    return target


def test_a_mend_never_replaces_acknowledged_messages_in_an_unreadable_page() -> None:
    world = World(FaultyDisk(Random(1)), segment_bytes=SEGMENT, checkpoint_log_bytes=1 << 20)
    world.send(*[f"old{n}" for n in range(30)], size=300)
    while True:  # Until the page of the log end has room for another message.
        world.send("known", size=400)
        world.checkpoint()
        world.checkpoint()
        durable_offset = world.engine.log.log_end
        if 700 < durable_offset % BLOCK < BLOCK - 1_500:
            break
    target = backup_of(world.disk)
    world.send("answered", size=400)
    disk = world.disk.after_power_cut()
    name = disk.names("log")[0]
    disk.spoil(name, durable_offset // BLOCK)
    report = finish(mend(disk, target, is_dry=False))
    assert not report.is_whole
    assert any("may hold acknowledged messages" in one for one in report.left)
    with pytest.raises(CorruptStore):
        World(disk, config=world.config, now_ms=world.now_ms)


def test_a_mend_reports_an_unreadable_page_that_prevents_the_start() -> None:
    world = World(FaultyDisk(Random(1)), segment_bytes=SEGMENT, checkpoint_log_bytes=1 << 20)
    world.send(*[f"m{n}" for n in range(10)], size=1_500)
    world.checkpoint()
    world.checkpoint()
    target = backup_of(world.disk)
    world.send(*[f"later{n}" for n in range(10)], size=1_500)
    disk = world.disk.after_power_cut()
    name = disk.names("log")[0]
    disk.damage(name, 4_000)
    disk.spoil(name, (world.engine.log.log_end - 1) // BLOCK)
    for is_dry in (True, False):
        report = finish(mend(disk, target, is_dry=is_dry))
        assert not report.is_whole
        assert any(Damage.UNREADABLE.value in one for one in report.left)


def test_a_mended_segment_has_no_unreadable_pages() -> None:
    world = World(FaultyDisk(Random(1)), segment_bytes=SEGMENT, checkpoint_log_bytes=32 << 10)
    world.send(*[f"m{n}" for n in range(40)], size=11_000)
    world.background()
    target = backup_of(world.disk)
    disk = world.disk.after_power_cut()
    name = disk.names("log")[0]
    data = disk.read(name)
    assert data is not None
    assert 0 < data.find(b"TMPD") < SEGMENT - BLOCK - 8, "the page lies behind the pad"
    disk.spoil(name, SEGMENT // BLOCK - 1)
    assert not finish(mend(disk, target, is_dry=False)).is_whole, "nothing is to be mended"
    disk.damage(name, 20_000)
    report = finish(mend(disk, target, is_dry=False))
    assert report.is_whole, report.left
    assert Damage.UNREADABLE not in {one.damage for one in finish(check(disk)).findings}
    for folder in ("queues", "index", "snapshots"):
        for derived in disk.names(folder):
            disk.remove(derived)
    World(disk, config=world.config, now_ms=world.now_ms)  # It reads the whole log.


def test_a_power_cut_during_a_mend_leaves_no_queue_file_over_a_hole() -> None:
    world = World(FaultyDisk(Random(1)), segment_bytes=SEGMENT)
    world.send(*[f"m{n}" for n in range(40)], size=1_500)
    world.checkpoint()
    target = backup_of(world.disk)
    disk = world.disk.after_power_cut()
    queue = world.engine.catalog.open_queues[world.engine.catalog.topic_ids[TOPIC]][0]
    for n in (20, 21, 22):
        at = queue.entry(n)[0]
        name = f"log/{at - at % SEGMENT:020d}.log"
        disk.damage(name, at % SEGMENT + 10)
    # The broker rebuilds a damaged queue file over the hole.
    name = disk.names("queues")[0]
    data = disk.read(name)
    assert data is not None
    disk.damage(name, len(data) // 2)
    broken = World(disk, config=world.config, now_ms=world.now_ms + 1_000)
    broken.bodies(1, group="probe")
    broken.background()
    broken.checkpoint()
    disk = broken.disk.after_power_cut()

    whole = disk.after_kill()
    begin = len(whole.operations)
    finish(mend(whole, target.after_kill(), is_dry=False))
    for cut in range(len(whole.operations) - begin):
        for outlive in (FaultyDisk.after_kill, FaultyDisk.after_power_cut):
            partly = disk.after_kill()
            partly.cut_at = len(partly.operations) + cut
            with pytest.raises(PowerCut):
                finish(mend(partly, target.after_kill(), is_dry=False))
            partly = outlive(partly)
            report = finish(mend(partly, target.after_kill(), is_dry=False))
            assert report.is_whole, report.left
            again = World(partly, config=world.config, now_ms=world.now_ms + 2_000)
            assert {"m20", "m21", "m22"} <= set(again.drain(group="fresh"))
