"""Mending from a backup restores every byte, and writes no unverified byte."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest

from tests.support.disk.faulty_disk import BLOCK, FaultyDisk, PowerCut
from tests.support.disk.offline_world import finish
from tests.support.worlds.engine_world import SMALL, TOPIC, World
from tests.support.worlds.timer_world import DAY_MS, TIMERS, TimerWorld
from tidemill.broker.engine.layout import store_checkpoint
from tidemill.broker.engine.recovery import open_engine
from tidemill.broker.engine.store.disk import DiskFailed
from tidemill.broker.engine.store.segment import CorruptStore
from tidemill.broker.offline.check import NoStore, check
from tidemill.broker.offline.copy import CopyError, copy
from tidemill.broker.offline.findings import Damage
from tidemill.broker.offline.mend import mend
from tidemill.broker.offline.rebuild import MendReport, rebuild

SEGMENT = 64 << 10
MESSAGES = 120
FLIPS = 30


def opened(disk: FaultyDisk) -> TimerWorld:
    return TimerWorld(disk, segment_bytes=SEGMENT, timer=TIMERS)


@cache
def disks() -> tuple[FaultyDisk, FaultyDisk]:
    """Return a stopped store, and an older backup of it."""
    world = opened(FaultyDisk(Random(0)))
    backup = FaultyDisk(Random(1))
    for n in range(MESSAGES):
        world.send(f"m{n}", size=1_800)
        if n % 30 == 29:
            world.checkpoint()
    world.schedule("t", delay_ms=DAY_MS)
    world.now_ms += 20_000
    world.background()
    finish(copy(world.disk, backup))
    world.send("after the backup")
    world.restart()
    return world.disk.after_kill(), backup.after_kill()


def store() -> FaultyDisk:
    return disks()[0].after_kill()


def backup() -> FaultyDisk:
    return disks()[1].after_kill()


def backed_up_bytes(name: str) -> range:
    """Return the bytes of a segment that the backup has."""
    checkpoint = store_checkpoint.find(disks()[1].read("checkpoint"))
    data = disks()[0].read(name)
    assert checkpoint is not None
    assert data is not None
    pad = data.find(b"TMPD")
    end = min(checkpoint.durable_offset - int(name[4:-4]), len(data))
    return range(min(end, pad + 8) if pad >= 0 else end)


def mended(
    disk: FaultyDisk, source: FaultyDisk, *, is_dry: bool = False, accepts_loss: bool = False
) -> MendReport:
    return finish(mend(disk, source, TIMERS, is_dry=is_dry, accepts_loss=accepts_loss))


def contents(disk: FaultyDisk, folder: str = "log") -> dict[str, bytes | None]:
    """Return the content of the files of a folder; of segments up to the pad."""
    found: dict[str, bytes | None] = {}
    for name in disk.names(folder):
        data = disk.read(name)
        assert data is not None
        pad = data.find(b"TMPD")
        found[name] = data[: pad + 8] if pad >= 0 else data
    return found


def segments() -> list[str]:
    return disks()[0].names("log")


def test_the_store_has_several_segments() -> None:
    assert len(segments()) > 3
    assert len(backed_up_bytes(segments()[-1])) > 1_000


def assert_sound_but_for_caches(disk: FaultyDisk) -> None:
    """Files that were derived from the damaged log are rebuilt by the next start."""
    report = finish(check(disk, TIMERS))
    assert {one.damage for one in report.findings} <= {Damage.QUEUES, Damage.INDEX}
    assert report.is_sound, "a next start rebuilds them"


@pytest.mark.parametrize("name", [f"log/{n * SEGMENT:020d}.log" for n in range(4)])
def test_a_mend_restores_flipped_bits(name: str) -> None:
    random = Random(name)
    for _ in range(FLIPS):
        disk = store()
        for _ in range(random.randint(1, 3)):
            disk.damage(name, random.choice(backed_up_bytes(name)), bits=1 << random.randrange(8))
        report = mended(disk, backup())
        assert report.is_whole, report.left
        disk = disk.after_power_cut()
        assert contents(disk) == contents(store()), "the mend is durable"
        assert_sound_but_for_caches(disk)
    opened(disk)


@pytest.mark.parametrize("page", [0, 3, 14])
def test_a_mend_writes_an_unreadable_page_again(page: int) -> None:
    disk = store()
    name = disk.names("log")[1]
    disk.spoil(name, page)
    report = mended(disk, backup())
    assert report.is_whole, report.left
    assert contents(disk) == contents(store()), "it is salvaging again"
    assert_sound_but_for_caches(disk)
    opened(disk)


def test_a_copy_skips_and_reports_an_unreadable_page() -> None:
    disk, target = store(), FaultyDisk(Random(2))
    name = disk.names("log")[1]
    disk.spoil(name, 3)
    report = finish(copy(disk, target))
    assert any(one.startswith(f"{name}, byte 12288: reading") for one in report.damaged)
    assert Damage.UNREADABLE not in {one.damage for one in finish(check(target, TIMERS)).findings}
    assert mended(target, backup()).is_whole
    assert contents(target)[name] == contents(store())[name]


def test_a_copy_fails_at_an_unreadable_page_of_acknowledged_messages() -> None:
    disk = store()
    name = disk.names("log")[-1]
    data = disk.read(name)
    assert data is not None
    disk.spoil(name, len(data.rstrip(b"\0")) // BLOCK)
    with pytest.raises(CopyError, match="cannot be read at byte"):
        finish(copy(disk, FaultyDisk(Random(2))))


@pytest.mark.parametrize("size", [0, 1, 4096, 5000, 32768, SEGMENT - 1])
@pytest.mark.parametrize("name", [f"log/{n * SEGMENT:020d}.log" for n in range(3)])
def test_a_mend_replaces_a_cut_or_missing_segment(name: str, size: int) -> None:
    disk = store()
    if size:
        disk.cut(name, size)
    else:
        disk.remove(name)
    report = mended(disk, backup())
    assert report.is_whole, report.left
    disk = disk.after_power_cut()
    assert contents(disk) == contents(store())
    assert_sound_but_for_caches(disk)


def test_a_mend_replaces_all_segments_before_the_last() -> None:
    disk = store()
    for name in segments()[:-1]:
        disk.remove(name)
    assert mended(disk, backup()).is_whole
    assert contents(disk) == contents(store())


def test_a_mend_replaces_a_missing_log_from_a_complete_backup() -> None:
    disk, target = store(), FaultyDisk(Random(2))
    finish(copy(disk, target))
    for name in disk.names("log"):
        disk.remove(name)
    found = {one.damage for one in finish(check(disk, TIMERS)).findings if one.stops_start}
    assert found == {Damage.SEGMENT_MISSING}
    older = mended(disk.after_kill(), backup())
    assert not older.is_whole, "it lacks acknowledged messages"
    nameless = disk.after_kill()
    for name in nameless.names("snapshots"):
        nameless.remove(name)
    assert not mended(nameless, target).is_whole, "the store is not identified"

    whole = disk.after_kill()
    begin = len(whole.operations)
    assert mended(whole, target, accepts_loss=True).is_whole
    for cut in range(len(whole.operations) - begin):
        partly = disk.after_kill()
        partly.cut_at = len(partly.operations) + cut
        with pytest.raises(PowerCut):
            mended(partly, target, accepts_loss=True)
        partly = partly.after_power_cut()
        report = mended(partly, target, accepts_loss=True)
        assert report.is_whole, report.left
        if cut % 5 == 0:
            opened(partly)
    opened(whole)


def test_a_mend_leaves_damage_behind_the_end_of_the_backup() -> None:
    disk = store()
    name = segments()[-1]
    disk.damage(name, backed_up_bytes(name)[-1] + 60)
    before = contents(disk)
    report = mended(disk, backup())
    assert (len(report.left), report.mended, report.is_whole) == (1, [], False)
    assert contents(disk) == before
    disk.cut(name, 5_000)
    before = contents(disk)
    report = mended(disk, backup())
    assert not report.is_whole
    assert contents(disk) == before


def test_a_mend_leaves_a_segment_that_is_damaged_in_the_backup_too() -> None:
    disk, source = store(), backup()
    name, other = segments()[1:3]
    for damaged in (name, other):
        disk.damage(damaged, 100)
    source.damage(name, 110)
    report = mended(disk, source)
    assert (len(report.left), len(report.mended)) == (1, 1)
    (finding,) = finish(check(disk, TIMERS)).findings
    assert (finding.file, finding.position <= 100) == (name, True)
    assert mended(disk, backup()).is_whole, "another backup has it"


def test_a_dry_run_reports_the_same_and_changes_nothing() -> None:
    disk = store()
    disk.damage(segments()[0], 1_000)
    disk.remove(segments()[1])
    disk.damage(disk.names("queues")[0], 60)
    dry, operations = disk.after_kill(), len(disk.operations)
    assert mended(dry, backup(), is_dry=True).mended[:2] == mended(disk, backup()).mended[:2]
    assert dry.operations == []
    assert len(disk.operations) > operations


def test_a_mend_rejects_a_backup_of_another_store() -> None:
    disk, source = store(), other_store()
    disk.damage(segments()[0], 1_000)
    before = contents(disk)
    with pytest.raises(NoStore):
        mended(disk, source)
    assert contents(disk) == before


def other_store() -> FaultyDisk:
    """Return a store that differs in its secret."""
    disk = FaultyDisk(Random(0))
    open_engine(disk, SMALL, now_ms=1, entropy=bytes(range(1, 33)))
    return disk


def test_a_mend_takes_nothing_from_a_backup_that_lived_on() -> None:
    """Its records have the same sizes at the same log offsets, and other content."""
    disk, source = store(), backup()
    other = opened(source)
    other.now_ms += 1
    for n in range(MESSAGES):
        other.send(f"x{n}", size=1_800)
    world = opened(disk)
    for n in range(MESSAGES):
        world.send(f"y{n}", size=1_800)
    random = Random(0)
    sound = world.disk
    for _ in range(20):
        disk = sound.after_kill()
        name = random.choice([one for one in disk.names("log") if one > segments()[-1]][:-1])
        disk.damage(name, random.randrange(20_000))
        before = contents(disk)
        report = mended(disk, other.disk)
        assert not report.is_whole
        assert contents(disk) == before


def parted(*, before: int) -> tuple[FaultyDisk, FaultyDisk, int]:
    """Return two stores that lived on from one, and the log offset where they differ."""
    first = World(FaultyDisk(Random(0)), segment_bytes=SEGMENT)
    for n in range(before):
        first.send(f"m{n}", size=1_800)
    first.checkpoint()
    other = FaultyDisk(Random(0))
    finish(copy(first.disk, other))
    end = first.engine.log.log_end
    worlds = [
        World(disk, segment_bytes=SEGMENT, now_ms=now_ms)
        for now_ms, disk in enumerate((first.disk.after_kill(), other), 2_000_000)
    ]
    for letter, world in zip("xy", worlds, strict=True):
        for n in range(10):
            world.send(f"{letter}{n}", size=1_800)
        world.restart()
    return worlds[0].disk, worlds[1].disk, end


def test_a_mend_leaves_the_first_record_that_differs_in_the_backup() -> None:
    disk, source, end = parted(before=50)
    name = disk.names("log")[end // SEGMENT]
    disk.damage(name, end % SEGMENT + 20)
    before = contents(disk)
    report = mended(disk, source)
    assert (len(report.left), report.mended) == (1, [])
    assert "lived on" in report.left[0]
    assert contents(disk) == before


def test_a_mend_leaves_a_cut_segment_that_differs_in_the_backup() -> None:
    disk, source, end = parted(before=40)
    name = disk.names("log")[end // SEGMENT]
    disk.cut(name, end % SEGMENT + 5_000)
    before = contents(disk)
    assert not mended(disk, source).is_whole
    assert contents(disk) == before


@pytest.mark.parametrize("part_bytes", [0, 5])
def test_a_mend_leaves_a_cut_between_records_behind_the_end_of_the_backup(part_bytes: int) -> None:
    """The acknowledged record behind the cut would look unwritten."""
    world = World(FaultyDisk(Random(1)), segment_bytes=SEGMENT)
    world.send("backed up", size=500)
    world.checkpoint()
    source = FaultyDisk(Random(2))
    finish(copy(world.disk, source))
    world.send("intact", size=501)
    cut = world.engine.log.log_end + part_bytes
    world.send("cut off", size=500)
    disk = world.disk.after_power_cut()
    (name,) = disk.names("log")
    disk.cut(name, cut)
    before = contents(disk)
    report = finish(mend(disk, source, is_dry=False))
    assert (len(report.left), report.mended) == (1, [])
    assert contents(disk) == before


@pytest.mark.parametrize("is_zeroed", [False, True])
@pytest.mark.parametrize("distance", [-700, -7, 0])
def test_a_mend_ends_the_log_with_the_backup_only_if_the_loss_is_accepted(
    distance: int, is_zeroed: bool
) -> None:
    """An acknowledged message stood behind the end of the backup."""
    world = World(FaultyDisk(Random(1)), segment_bytes=SEGMENT)
    world.send(*[f"m{n}" for n in range(5)], size=500)
    world.checkpoint()
    source = FaultyDisk(Random(2))
    finish(copy(world.disk, source))
    end = world.engine.log.log_end
    world.send("acknowledged", size=500)
    disk = world.disk.after_power_cut()
    (name,) = disk.names("log")
    disk.cut(name, end + distance)
    if is_zeroed:
        disk.open(name).resize(SEGMENT)
    before = contents(disk)
    report = finish(mend(disk, source, is_dry=False))
    if is_zeroed and distance == 0:
        assert (report.mended, report.left) == ([], []), "the log looks as if it ended there"
        return
    assert report.mended == []
    assert f"would end with the backup at log offset {end}" in report.left[0]
    assert contents(disk) == before
    report = finish(mend(disk, source, is_dry=False, accepts_loss=True))
    assert report.is_whole, report.left
    assert World(disk, config=world.config).bodies(9, group="fresh") == [f"m{n}" for n in range(5)]


def test_a_mend_writes_no_segment_of_a_range_that_is_left() -> None:
    disk, source = store(), backup()
    first, missing, other, *_ = segments()
    disk.damage(first, 1_000)
    disk.remove(missing)
    disk.remove(other)
    source.damage(other, 110)
    report = mended(disk, source)
    assert (len(report.left), len(report.mended)) == (1, 1)
    assert missing not in disk.names("log")


@pytest.mark.parametrize("folder", ["queues", "index", "snapshots", "timer", "timer/state"])
def test_a_rebuild_deletes_damaged_derived_files(folder: str) -> None:
    for name in store().names(folder):
        disk = store()
        disk.damage(name, 20)
        report = finish(rebuild(disk, TIMERS, is_dry=False))
        assert report.is_whole
        assert name not in disk.names(folder)
        assert finish(check(disk, TIMERS)).is_sound
        world = opened(disk.after_power_cut())
        assert len(world.drain(group="late")) == MESSAGES + 1
        assert len(list(world.timers.open)) == 1


def test_a_rebuild_keeps_derived_files_of_a_damaged_log() -> None:
    disk = store()
    (name, *_) = disk.names("queues")
    disk.damage(name, 20)
    disk.damage(segments()[0], 1_000)
    report = finish(rebuild(disk, TIMERS, is_dry=False))
    assert (len(report.left), report.mended) == (2, [])
    assert name in disk.names("queues")
    assert mended(disk, backup()).is_whole
    assert name not in disk.names("queues")


def test_a_mend_without_room_for_a_segment_changes_nothing() -> None:
    disk = store()
    disk.damage(segments()[0], 1_000)
    disk.damage(disk.names("index")[0], 60)
    disk.capacity_bytes = disk.total_bytes() - disk.free_bytes() + 2 * BLOCK
    before = {name: disk.read(name) for name in disk.all_names()}
    with pytest.raises(DiskFailed):
        mended(disk, backup())
    assert {name: disk.read(name) for name in disk.all_names()} == before


def test_a_power_cut_during_a_mend_makes_nothing_worse() -> None:
    """The next mend completes it."""
    cut_at = 0
    while True:
        disk = store()
        disk.damage(segments()[0], 1_000)
        disk.cut(segments()[1], 5_000)
        disk.remove(segments()[2])
        disk.cut_at = len(disk.operations) + cut_at
        try:
            mended(disk, backup())
        except PowerCut:
            again = disk.after_power_cut()
            assert mended(again, backup()).is_whole
            assert contents(again) == contents(store()), f"cut at {cut_at}"
            cut_at += 1
            continue
        assert cut_at > 5
        return


def test_a_mend_does_not_write_to_a_sound_store() -> None:
    disk = store()
    report = mended(disk, backup())
    assert (report.mended, report.left, report.is_whole) == ([], [], True)
    assert disk.operations == []
    assert World(disk, segment_bytes=SEGMENT, timer=TIMERS).bodies(1, topic=TOPIC) == ["m0"]


def test_a_second_mend_delivers_the_messages_around_the_first_one() -> None:
    """The first backup mends one range and leaves another; the second mends the rest."""
    world = World(FaultyDisk(Random(1)), segment_bytes=SEGMENT, checkpoint_log_bytes=1 << 10)
    sent = {f"m{n}" for n in range(160)}
    for n in range(160):
        world.send(f"m{n}", size=1_500)
        if n % 40 == 39:
            world.checkpoint()
    sound = FaultyDisk(Random(2))
    finish(copy(world.disk, sound))
    disk = world.disk.after_power_cut()
    engine = world.engine
    queue = engine.catalog.open_queues[engine.catalog.topic_ids[TOPIC]][0]

    def damage(target: FaultyDisk, n: int, byte: int) -> None:
        at = queue.entry(n)[0]
        target.damage(f"log/{at - at % SEGMENT:020d}.log", at % SEGMENT + byte)

    # A broker rebuilds a queue file around three damaged records.
    for n in (20, 21, 22):
        damage(disk, n, 10)
    name = disk.names("queues")[0]
    data = disk.read(name)
    assert data is not None
    disk.damage(name, len(data) // 2)
    broken = World(disk, config=world.config, now_ms=world.now_ms + 1_000)
    broken.bodies(1, group="probe")
    broken.background()
    broken.checkpoint()
    disk = broken.disk.after_power_cut()
    damage(disk, 150, 10)
    damaged = sound.after_kill()
    damage(damaged, 150, 12)
    assert not finish(mend(disk, damaged, is_dry=False)).is_whole
    assert finish(mend(disk, sound.after_kill(), is_dry=False)).is_whole
    again = World(disk, config=world.config, now_ms=world.now_ms + 2_000)
    assert set(again.drain(group="fresh")) == sent


def test_no_start_derives_timer_files_around_damage() -> None:
    """Therefore a mend keeps them."""
    world = opened(FaultyDisk(Random(1)))
    world.schedule("t", delay_ms=DAY_MS)
    at = world.engine.log.log_end - 100
    world.send("behind")
    world.restart()
    world.checkpoint()
    disk = world.disk.after_kill()
    disk.damage(disk.names("log")[0], at)
    for folder in ("timer", "timer/state", "timer/timerlog"):
        for name in disk.names(folder):
            disk.remove(name)
    with pytest.raises(CorruptStore):
        opened(disk)
