"""A repair from a backup gives back every byte; what it cannot verify it does not write."""

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
from tidemill.broker.offline.check import NoStore, check
from tidemill.broker.offline.copy import CopyRefused, copy
from tidemill.broker.offline.findings import Damage
from tidemill.broker.offline.repair import RepairReport, repair

SEGMENT = 64 << 10
MESSAGES = 120
FLIPS = 30


def opened(disk: FaultyDisk) -> TimerWorld:
    return TimerWorld(disk, segment_bytes=SEGMENT, timer=TIMERS)


@cache
def disks() -> tuple[FaultyDisk, FaultyDisk]:
    """Return a store that is stopped, and a backup of it that was made some time before."""
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
    """Return the bytes of a segment that the backup has, too."""
    checkpoint = store_checkpoint.find(disks()[1].read("checkpoint"))
    data = disks()[0].read(name)
    assert checkpoint is not None
    assert data is not None
    pad = data.find(b"TMPD")
    end = min(checkpoint.durable_offset - int(name[4:-4]), len(data))
    return range(min(end, pad + 8) if pad >= 0 else end)


def repaired(disk: FaultyDisk, source: FaultyDisk | None, *, is_dry: bool = False) -> RepairReport:
    return finish(repair(disk, source, TIMERS, is_dry=is_dry))


def contents(disk: FaultyDisk, folder: str = "log") -> dict[str, bytes | None]:
    """Return what the files of a folder say: behind the pad of a segment nothing counts."""
    found: dict[str, bytes | None] = {}
    for name in disk.names(folder):
        data = disk.read(name)
        assert data is not None
        pad = data.find(b"TMPD")
        found[name] = data[: pad + 8] if pad >= 0 else data
    return found


def segments() -> list[str]:
    return disks()[0].names("log")


def test_there_are_several_segments() -> None:
    assert len(segments()) > 3
    assert len(backed_up_bytes(segments()[-1])) > 1_000


def assert_sound_but_for_caches(disk: FaultyDisk) -> None:
    """What was derived from the log while it was damaged is to be derived again."""
    found = {one.damage for one in finish(check(disk, TIMERS)).findings}
    assert found <= {Damage.QUEUES, Damage.INDEX}


@pytest.mark.parametrize("name", [f"log/{n * SEGMENT:020d}.log" for n in range(4)])
def test_a_flipped_bit_is_mended_byte_by_byte(name: str) -> None:
    random = Random(name)
    for _ in range(FLIPS):
        disk = store()
        for _ in range(random.randint(1, 3)):
            disk.damage(name, random.choice(backed_up_bytes(name)), bits=1 << random.randrange(8))
        report = repaired(disk, backup())
        assert report.is_whole, report.left
        disk = disk.after_power_cut()
        assert contents(disk) == contents(store()), "what was mended is durable"
        assert_sound_but_for_caches(disk)
    opened(disk)


@pytest.mark.parametrize("page", [0, 3, 14])
def test_a_page_that_cannot_be_read_is_written_again_from_the_backup(page: int) -> None:
    disk = store()
    name = disk.names("log")[1]
    disk.spoil(name, page)
    report = repaired(disk, backup())
    assert report.is_whole, report.left
    assert contents(disk) == contents(store()), "it can be read again"
    assert_sound_but_for_caches(disk)
    opened(disk)


def test_a_copy_takes_what_can_be_read_and_says_what_cannot() -> None:
    disk, target = store(), FaultyDisk(Random(2))
    name = disk.names("log")[1]
    disk.spoil(name, 3)
    report = finish(copy(disk, target))
    assert any(one.startswith(f"{name}, byte 12288: reading") for one in report.damaged)
    assert Damage.UNREADABLE not in {one.damage for one in finish(check(target, TIMERS)).findings}
    assert repaired(target, backup()).is_whole
    assert contents(target)[name] == contents(store())[name]


def test_no_copy_is_made_where_what_was_answered_cannot_be_read() -> None:
    disk = store()
    name = disk.names("log")[-1]
    data = disk.read(name)
    assert data is not None
    disk.spoil(name, len(data.rstrip(b"\0")) // BLOCK)
    with pytest.raises(CopyRefused, match="cannot be read at byte"):
        finish(copy(disk, FaultyDisk(Random(2))))


@pytest.mark.parametrize("size", [0, 1, 4096, 5000, 32768, SEGMENT - 1])
@pytest.mark.parametrize("name", [f"log/{n * SEGMENT:020d}.log" for n in range(3)])
def test_a_segment_that_is_cut_or_missing_is_taken_whole(name: str, size: int) -> None:
    disk = store()
    if size:
        disk.cut(name, size)
    else:
        disk.remove(name)
    report = repaired(disk, backup())
    assert report.is_whole, report.left
    disk = disk.after_power_cut()
    assert contents(disk) == contents(store())
    assert_sound_but_for_caches(disk)


def test_all_segments_but_the_last_may_be_missing() -> None:
    disk = store()
    for name in segments()[:-1]:
        disk.remove(name)
    assert repaired(disk, backup()).is_whole
    assert contents(disk) == contents(store())


def test_a_log_of_which_nothing_is_left_is_taken_from_a_backup_that_has_all_of_it() -> None:
    disk, target = store(), FaultyDisk(Random(2))
    finish(copy(disk, target))
    for name in disk.names("log"):
        disk.remove(name)
    found = {one.damage for one in finish(check(disk, TIMERS)).findings if one.stops_start}
    assert found == {Damage.SEGMENT_MISSING}
    older = repaired(disk.after_kill(), backup())
    assert not older.is_whole, "what was answered since is not in it"
    nameless = disk.after_kill()
    for name in nameless.names("snapshots"):
        nameless.remove(name)
    assert not repaired(nameless, target).is_whole, "nothing says that it is the same store"

    whole = disk.after_kill()
    begin = len(whole.operations)
    assert repaired(whole, target).is_whole
    for cut in range(len(whole.operations) - begin):
        partly = disk.after_kill()
        partly.cut_at = len(partly.operations) + cut
        with pytest.raises(PowerCut):
            repaired(partly, target)
        partly = partly.after_power_cut()
        report = repaired(partly, target)
        assert report.is_whole, report.left
        if cut % 5 == 0:
            opened(partly)
    opened(whole)


def test_what_the_backup_does_not_have_yet_is_left_as_it_is() -> None:
    disk = store()
    name = segments()[-1]
    disk.damage(name, backed_up_bytes(name)[-1] + 60)
    before = contents(disk)
    report = repaired(disk, backup())
    assert (len(report.left), report.mended, report.is_whole) == (1, [], False)
    assert contents(disk) == before
    disk.cut(name, 5_000)
    before = contents(disk)
    report = repaired(disk, backup())
    assert not report.is_whole
    assert contents(disk) == before


def test_what_is_damaged_in_the_backup_too_is_left_as_it_is() -> None:
    disk, source = store(), backup()
    name = segments()[1]
    disk.damage(name, 100)
    disk.damage(name, 20_000)
    source.damage(name, 110)
    report = repaired(disk, source)
    assert (len(report.left), len(report.mended)) == (1, 1)
    (finding,) = finish(check(disk, TIMERS)).findings
    assert finding.position <= 100


def test_a_dry_run_says_the_same_and_changes_nothing() -> None:
    disk = store()
    disk.damage(segments()[0], 1_000)
    disk.remove(segments()[1])
    disk.damage(disk.names("queues")[0], 60)
    dry, operations = disk.after_kill(), len(disk.operations)
    assert repaired(dry, backup(), is_dry=True).mended[:2] == repaired(disk, backup()).mended[:2]
    assert dry.operations == []
    assert len(disk.operations) > operations


def test_a_backup_of_another_store_is_refused() -> None:
    disk, source = store(), other_store()
    disk.damage(segments()[0], 1_000)
    before = contents(disk)
    with pytest.raises(NoStore):
        repaired(disk, source)
    assert contents(disk) == before


def other_store() -> FaultyDisk:
    """Return a store that began like this one, with another secret."""
    disk = FaultyDisk(Random(0))
    open_engine(disk, SMALL, now_ms=1, entropy=bytes(range(1, 33)))
    return disk


def test_a_backup_that_was_restored_and_lived_on_gives_nothing_of_its_new_life() -> None:
    """Its records have the same sizes at the same log offsets, and say other things."""
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
        report = repaired(disk, other.disk)
        assert not report.is_whole
        assert contents(disk) == before


def parted(*, before: int) -> tuple[FaultyDisk, FaultyDisk, int]:
    """Return two stores that have lived on from one, and the log offset at which they part."""
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


def test_the_record_at_which_two_lives_part_is_not_taken_from_the_other_one() -> None:
    disk, source, end = parted(before=50)
    name = disk.names("log")[end // SEGMENT]
    disk.damage(name, end % SEGMENT + 20)
    before = contents(disk)
    report = repaired(disk, source)
    assert (len(report.left), report.mended) == (1, [])
    assert "lived on" in report.left[0]
    assert contents(disk) == before


def test_a_cut_segment_is_not_taken_from_another_life() -> None:
    disk, source, end = parted(before=40)
    name = disk.names("log")[end // SEGMENT]
    disk.cut(name, end % SEGMENT + 5_000)
    before = contents(disk)
    assert not repaired(disk, source).is_whole
    assert contents(disk) == before


@pytest.mark.parametrize("folder", ["queues", "index", "snapshots", "timer", "timer/state"])
def test_damaged_files_that_a_start_makes_again_are_deleted(folder: str) -> None:
    for name in store().names(folder):
        disk = store()
        disk.damage(name, 20)
        report = repaired(disk, None)
        assert report.is_whole
        assert name not in disk.names(folder)
        world = opened(disk.after_power_cut())
        assert len(world.drain(group="late")) == MESSAGES + 1
        assert len(list(world.timers.open)) == 1


def test_derived_files_stay_where_the_log_is_damaged_too() -> None:
    disk = store()
    (name, *_) = disk.names("queues")
    disk.damage(name, 20)
    disk.damage(segments()[0], 1_000)
    report = repaired(disk, None)
    assert (len(report.left), report.mended) == (2, [])
    assert name in disk.names("queues")
    assert repaired(disk, backup()).is_whole
    assert name not in disk.names("queues")


def test_a_repair_that_is_cut_short_leaves_nothing_worse() -> None:
    """Whatever was done by then, the next repair ends what it began."""
    cut_at = 0
    while True:
        disk = store()
        disk.damage(segments()[0], 1_000)
        disk.cut(segments()[1], 5_000)
        disk.remove(segments()[2])
        disk.cut_at = len(disk.operations) + cut_at
        try:
            repaired(disk, backup())
        except PowerCut:
            again = disk.after_power_cut()
            assert repaired(again, backup()).is_whole
            assert contents(again) == contents(store()), f"cut at {cut_at}"
            cut_at += 1
            continue
        assert cut_at > 5
        return


def test_a_sound_store_is_left_alone() -> None:
    disk = store()
    report = repaired(disk, backup())
    assert (report.mended, report.left, report.is_whole) == ([], [], True)
    assert disk.operations == []
    assert World(disk, segment_bytes=SEGMENT, timer=TIMERS).bodies(1, topic=TOPIC) == ["m0"]
