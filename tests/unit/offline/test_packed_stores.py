"""The offline tools read packs: check, copy, and mend in both directions."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk, FaultyFile
from tests.support.worlds.engine_world import World
from tests.support.worlds.packed_worlds import (
    delete_topic,
    drop_dead_entries,
    floors,
    move_floor,
    pack_all,
    small_world,
    two_topics,
)
from tidemill.broker.engine.layout import pack
from tidemill.broker.offline.check import CheckReport, check
from tidemill.broker.offline.copy import copy
from tidemill.broker.offline.findings import OF_THE_LOG, Damage
from tidemill.broker.offline.mend import mend
from tidemill.broker.offline.packed_file import PackedFile, read_header
from tidemill.broker.offline.rebuild import MendReport
from tidemill.broker.offline.source import Source


def packed_world(seed: int = 0) -> tuple[World, list[str]]:
    """Return a world with packs, and the texts of its live messages."""
    world = small_world(FaultyDisk(Random(seed)))
    kept = two_topics(world)
    world.purge("gone")
    assert pack_all(world)
    return world, kept


def checked(world: World, source: Source | None = None) -> CheckReport:
    steps = check(source or world.disk)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            report = end.value
            assert isinstance(report, CheckReport)
            return report


def copied(world: World) -> FaultyDisk:
    target = FaultyDisk(Random(1))
    for _ in copy(world.disk, target):
        pass
    return target


def first_pack(world: World) -> str:
    return next(name for name in world.disk.names("log") if name.endswith(".pack"))


def test_a_sound_store_with_packs_has_no_finding() -> None:
    world, _ = packed_world()
    assert checked(world).findings == []
    assert checked(world).log_end == world.engine.log.log_end


def test_a_copy_has_the_packs_and_all_live_messages() -> None:
    world, kept = packed_world()
    target = copied(world)
    assert target.read(first_pack(world)) == world.disk.read(first_pack(world))
    again = World(target, config=world.config, now_ms=world.now_ms)
    assert again.drain(topic="kept") == kept
    assert again.drain(topic="gone") == []


def test_a_pack_reads_as_the_segment_that_it_was() -> None:
    """Byte by byte and as a whole, also with a damaged directory."""
    for is_damaged in (False, True):
        world, _ = packed_world()
        file = world.disk.open(first_pack(world))
        header = read_header(file)
        assert header is not None
        if is_damaged:
            world.disk.damage(first_pack(world), header.records_end + 5)
        packed = PackedFile(file, header)
        assert packed.is_directory_damaged == is_damaged
        whole = packed.read_at(0, packed.size())
        for begin in range(0, packed.size(), 611):
            size = begin % 1_000
            assert packed.read_at(begin, size) == whole[begin : begin + size]


@pytest.mark.parametrize("is_backup_packed", [False, True])
def test_a_damaged_pack_is_mended_from_a_backup(*, is_backup_packed: bool) -> None:
    world = small_world(FaultyDisk(Random(0)))
    kept = two_topics(world)
    world.purge("gone")
    backup = None if is_backup_packed else copied(world)
    assert pack_all(world)
    backup = backup or copied(world)
    name = first_pack(world)
    header = read_header(world.disk.open(name))
    assert header is not None
    world.disk.damage(name, pack.HEADER_SIZE + 40)
    found = [one for one in checked(world).findings if one.damage in OF_THE_LOG]
    assert [one.file for one in found] == [name]
    world.disk = world.disk.after_kill()
    for _ in mend(world.disk, backup, is_dry=False):
        pass
    assert name not in world.disk.names("log"), "a whole segment is in its place"
    assert not [one for one in checked(world).findings if one.damage in OF_THE_LOG]
    world.restart()
    assert world.drain(topic="kept") == kept
    assert world.drain(topic="gone") == []
    delete_topic(world, "kept")
    world.checkpoint()
    assert pack_all(world), "the mended segment can be packed again"


def test_a_damaged_segment_is_mended_from_a_backup_with_a_pack() -> None:
    """The backup was taken from a store that has packed, as after a restore of an old directory."""
    world = small_world(FaultyDisk(Random(0)))
    kept = two_topics(world)
    world.purge("gone")
    before = world.disk.after_kill()
    assert pack_all(world)
    backup, name = copied(world), first_pack(world)
    world.disk = before
    world.disk.damage(name.replace(".pack", ".log"), 50)
    for _ in mend(world.disk, backup, is_dry=False):
        pass
    world.open()
    assert world.drain(topic="kept") == kept
    assert world.drain(topic="gone") == []


def test_a_cut_pack_is_reported() -> None:
    world, _ = packed_world()
    name = first_pack(world)
    data = world.disk.read(name) or b""
    world.disk.cut(name, len(data) - 200)
    assert {(one.damage, one.file) for one in checked(world).findings if one.stops_start} >= {
        (Damage.SEGMENT_CUT, name)
    }


class PackingSource:
    """A disk beside a broker that packs after a listing of the log, or before an open of a pack.

    If the log `grows`, the packs rely on records of segments that the listing does not have.
    """

    def __init__(
        self, world: World, *, at_listing: int = 0, at_open: int = 0, grows: bool = False
    ) -> None:
        self._world = world
        self._at_listing, self._at_open = at_listing, at_open
        self._grows = grows

    def names(self, folder: str) -> list[str]:
        found = list(self._world.disk.names(folder))
        if folder == "log":
            self._at_listing -= 1
            if self._at_listing == 0:
                if self._grows:
                    two_topics(self._world)
                    self._world.purge("gone")
                assert pack_all(self._world)
        return found

    def open(self, name: str) -> FaultyFile:
        if name.endswith(".pack"):
            self._at_open -= 1
            if self._at_open == 0:
                delete_topic(self._world, "kept")
                assert pack_all(self._world)
        return self._world.disk.open(name)

    def read(self, name: str) -> bytes | None:
        return self._world.disk.read(name)


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("at_listing", [1, 2, 3, 4])
def test_a_copy_beside_a_broker_that_packs_is_whole(at_listing: int, *, grows: bool) -> None:
    world = small_world()
    kept = two_topics(world)
    world.purge("gone")
    target = FaultyDisk(Random(1))
    for _ in copy(PackingSource(world, at_listing=at_listing, grows=grows), target):
        pass
    found = World(target, config=world.config, now_ms=world.now_ms).drain(topic="kept")
    assert found[: len(kept)] == kept


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("at_listing", [1, 2, 3, 4])
def test_a_check_beside_a_broker_that_packs_finds_nothing(at_listing: int, *, grows: bool) -> None:
    world = small_world()
    two_topics(world)
    world.purge("gone")
    assert checked(world, PackingSource(world, at_listing=at_listing, grows=grows)).findings == []


@pytest.mark.parametrize("at_open", [1, 2, 3, 9])
def test_a_copy_of_a_pack_that_is_packed_again_starts(at_open: int) -> None:
    world = small_world()
    two_topics(world, kept_size=15_000)
    world.purge("gone")
    assert pack_all(world)
    target = FaultyDisk(Random(1))
    for _ in copy(PackingSource(world, at_open=at_open), target):
        pass
    World(target, config=world.config, now_ms=world.now_ms)


def floored_world(seed: int = 0) -> tuple[World, list[str], FaultyDisk]:
    """Return a world with gaps, the live texts, and a copy from before the floor."""
    world = small_world(FaultyDisk(Random(seed)))
    kept = two_topics(world)
    world.purge("gone")
    world.checkpoint()
    before = copied(world)
    move_floor(world, floors(world)[-1])
    assert pack_all(world)
    return world, kept, before


def mended(disk: FaultyDisk, backup: FaultyDisk) -> MendReport:
    steps = mend(disk, backup, is_dry=False)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            report = end.value
            assert isinstance(report, MendReport)
            return report


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("at", [40, 68 + 100, 68 + 640 + 10])
def test_a_pack_with_gaps_is_mended(*, is_packed: bool, at: int) -> None:
    """The backup has whole segments from before the state floor, or the same packs."""
    world, kept, before = floored_world()
    assert checked(world).findings == []
    backup = copied(world) if is_packed else before
    world.disk.damage(first_pack(world), pack.HEADER_SIZE + at)
    world.disk = world.disk.after_kill()
    assert [one for one in checked(world).findings if one.damage in OF_THE_LOG]
    assert mended(world.disk, backup).mended
    assert not [one for one in checked(world).findings if one.damage in OF_THE_LOG]
    world.open()
    assert world.drain(topic="kept") == kept
    assert world.drain(topic="gone") == []


def test_a_backup_with_gaps_does_not_mend_a_log_that_ends_before_they_were_stated() -> None:
    """The mended log would lack the state of the missing records."""
    world, _, before = floored_world()
    backup = copied(world)
    before.damage(first_pack(world).replace(".pack", ".log"), 50)
    report = mended(before, backup)
    assert not [one for one in report.mended if "taken from the backup" in one]
    assert "the backup is newer" in report.left[0]


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_copy_misses_no_entries_that_a_merge_drops_beside_it(*, is_deleted: bool) -> None:
    """The record by which they are dead is behind the end of the copy."""
    world = small_world(files_merged=4)
    texts = [f"m{n}" for n in range(200)]
    for n, text in enumerate(texts):
        world.send(text, topic="stays", size=1_000)
        world.send(f"x{n}", topic="other")
        if n % 20 == 0:
            world.checkpoint()
    world.checkpoint()
    target = FaultyDisk(Random(1))
    is_copied = False
    for progress in copy(world.disk, target):
        if progress.what == "verified" and not is_copied:
            is_copied = True
            if is_deleted:
                delete_topic(world, "stays")
            else:
                world.purge("stays")
            assert world.engine.merges.is_due
            drop_dead_entries(world.engine)
    assert is_copied
    restored = World(target.after_kill(), config=world.config)
    assert restored.drain(topic="stays", group="g") == texts
