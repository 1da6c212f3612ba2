"""The contract of a disk, for the real disk and the faulty one."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tidemill.broker.engine.store.disk import (
    DROPPED,
    Disk,
    DiskFailed,
    DiskHasNoSpace,
    File,
    drop_file,
)
from tidemill.broker.posix_disk import IOV_MAX, PosixDisk, PosixFile

NAME = "log/00000000000000000000"
DISKS: dict[str, Callable[[Path], Disk]] = {
    "posix": PosixDisk,
    "faulty": lambda _: FaultyDisk(Random(0)),
}


def failing_file() -> File:
    """Return a file of the fake whose writes fail."""
    disk = FaultyDisk(Random(0))
    file = disk.open(NAME, create=True)
    disk.fails_writes = True
    return file


FAILING: dict[str, Callable[[], File]] = {
    "posix": lambda: PosixFile(NAME, Path("/dev/full"), os.O_RDWR),
    "faulty": failing_file,
}


@pytest.fixture(params=DISKS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    """Return an empty disk of each kind."""
    return DISKS[request.param](tmp_path / "data")


def made(disk: Disk, name: str = NAME, content: bytes = b"") -> File:
    """Create a file with content."""
    file = disk.open(name, create=True)
    file.write_at(0, [content])
    return file


# ------------------------------------------------------------ names


def test_a_new_disk_is_empty(disk: Disk) -> None:
    assert disk.names("log") == []
    assert disk.read(NAME) is None


def test_names_are_sorted_and_include_their_folder(disk: Disk) -> None:
    for name in ("log/b", "log/a", "log/c", "other/d", "log/below/e"):
        made(disk, name)
    assert disk.names("log") == ["log/a", "log/b", "log/c"]
    assert disk.names("log/below") == ["log/below/e"]


def test_a_new_file_creates_all_folders_above_it(disk: Disk) -> None:
    made(disk, "a/b/c/file", b"deep")
    assert disk.names("a/b/c") == ["a/b/c/file"]
    assert disk.read("a/b/c/file") == b"deep"


def test_a_file_needs_no_folder(disk: Disk) -> None:
    made(disk, "format", b"1")
    assert disk.read("format") == b"1"
    disk.folder(".").sync()


def test_a_file_is_created_only_once(disk: Disk) -> None:
    made(disk, content=b"first")
    with pytest.raises(FileExistsError):
        disk.open(NAME, create=True)
    assert disk.read(NAME) == b"first"


def test_a_missing_file_cannot_be_opened_renamed_or_deleted(disk: Disk) -> None:
    made(disk, "log/other")
    with pytest.raises(FileNotFoundError):
        disk.open(NAME)
    with pytest.raises(FileNotFoundError):
        disk.rename(NAME, "log/target")
    with pytest.raises(FileNotFoundError):
        disk.delete(NAME)


def test_a_missing_folder_cannot_be_synced(disk: Disk) -> None:
    with pytest.raises(FileNotFoundError):
        disk.folder("log").sync()


def test_a_rename_replaces_the_target(disk: Disk) -> None:
    made(disk, "log/new", b"new")
    made(disk, "log/old", b"old")
    disk.rename("log/new", "log/old")
    assert disk.names("log") == ["log/old"]
    assert disk.read("log/old") == b"new"


def test_a_rename_needs_the_folder_of_the_target(disk: Disk) -> None:
    made(disk)
    with pytest.raises(FileNotFoundError):
        disk.rename(NAME, "elsewhere/file")
    assert disk.names("log") == [NAME]


def test_an_open_file_stays_the_same_file_after_a_rename(disk: Disk) -> None:
    file = made(disk, content=b"before")
    disk.rename(NAME, "log/renamed")
    file.write_at(0, [b"behind"])
    assert disk.read("log/renamed") == b"behind"


def test_an_open_file_and_its_view_outlive_a_deletion(disk: Disk) -> None:
    file = made(disk, content=b"still there")
    view = file.view()
    disk.delete(NAME)
    assert disk.names("log") == []
    assert disk.read(NAME) is None
    assert file.read_at(0, 100) == b"still there"
    assert bytes(view) == b"still there"
    file.write_at(0, [b"STILL"])
    assert file.read_at(0, 100) == b"STILL there"


def test_a_deleted_name_can_be_used_again(disk: Disk) -> None:
    old = made(disk, content=b"old")
    disk.delete(NAME)
    made(disk, content=b"new")
    assert old.read_at(0, 10) == b"old"
    assert disk.read(NAME) == b"new"


def test_a_file_has_the_name_under_which_it_was_opened(disk: Disk) -> None:
    assert made(disk).name == NAME
    assert disk.open(NAME).name == NAME
    assert disk.folder("log").name == "log"


def test_a_folder_can_be_synced_repeatedly(disk: Disk) -> None:
    made(disk)
    disk.folder("log").sync()
    disk.delete(NAME)
    disk.folder("log").sync()
    disk.folder("log").sync()
    assert disk.names("log") == []


# ------------------------------------------------------------ content


def test_a_new_file_is_empty(disk: Disk) -> None:
    file = disk.open(NAME, create=True)
    assert file.size() == 0
    assert file.read_at(0, 10) == b""
    assert bytes(file.view()) == b""
    assert disk.read(NAME) == b""


def test_buffers_of_any_kind_are_written_in_order(disk: Disk) -> None:
    file = disk.open(NAME, create=True)
    file.write_at(0, [b"one ", bytearray(b"two "), memoryview(b"-three-")[1:-1], b""])
    assert disk.read(NAME) == b"one two three"
    file.write_at(4, [b"T", b"W", b"O"])
    assert disk.read(NAME) == b"one TWO three"


def test_buffers_beyond_the_limit_of_one_call_are_written(disk: Disk) -> None:
    file = disk.open(NAME, create=True)
    buffers = [bytes([n % 251]) * (n % 3) for n in range(2 * IOV_MAX + 10)]
    file.write_at(7, buffers)
    assert file.read_at(7, 1 << 20) == b"".join(buffers)


def test_data_is_found_behind_a_hole(disk: Disk) -> None:
    file = disk.open(NAME, create=True)
    file.resize(1 << 20)
    assert file.find_data(0) in {0, 1 << 20}, "a file system may not know its holes"
    file.write_at(700_000, [b"data"])
    assert 0 <= file.find_data(0) <= 700_000
    assert file.find_data(700_001) == 700_001
    assert 700_004 < file.find_data(800_000) <= 1 << 20
    assert file.find_data(1 << 20) == 1 << 20


def test_empty_buffers_write_nothing(disk: Disk) -> None:
    file = made(disk, content=b"same")
    file.write_at(2, [])
    file.write_at(100, [b""])
    assert disk.read(NAME) == b"same"


def test_the_caller_may_change_a_written_buffer(disk: Disk) -> None:
    buffer = bytearray(b"written")
    file = disk.open(NAME, create=True)
    file.write_at(0, [buffer])
    buffer[:] = b"another"
    assert disk.read(NAME) == b"written"


def test_a_write_beyond_the_end_fills_the_gap_with_zeros(disk: Disk) -> None:
    file = made(disk, content=b"ab")
    file.write_at(5, [b"c"])
    assert file.size() == 6
    assert disk.read(NAME) == b"ab\0\0\0c"


def test_a_read_ends_at_the_end_of_the_file(disk: Disk) -> None:
    file = made(disk, content=b"0123456789")
    assert file.read_at(2, 3) == b"234"
    assert file.read_at(8, 5) == b"89"
    assert file.read_at(10, 5) == b""
    assert file.read_at(1_000, 5) == b""
    assert file.read_at(3, 0) == b""


def test_two_handles_of_one_file_see_the_same_content(disk: Disk) -> None:
    first = made(disk, content=b"a")
    second = disk.open(NAME)
    second.write_at(1, [b"b"])
    assert first.read_at(0, 10) == b"ab"
    assert first.size() == second.size() == 2


def test_written_bytes_are_there_after_the_file_is_opened_again(disk: Disk) -> None:
    file = made(disk, content=b"kept")
    file.sync()
    file.close()
    file = disk.open(NAME)
    assert file.size() == 4
    assert file.read_at(0, 4) == b"kept"


def test_a_cut_and_extended_file_has_zeros(disk: Disk) -> None:
    file = made(disk, content=b"0123456789")
    file.resize(4)
    assert file.size() == 4
    assert disk.read(NAME) == b"0123"
    file.resize(8)
    assert disk.read(NAME) == b"0123\0\0\0\0"


# ------------------------------------------------------------ views


def test_a_view_shows_later_writes_of_every_handle(disk: Disk) -> None:
    file = disk.open(NAME, create=True)
    file.resize(mmap.PAGESIZE)
    view = file.view()
    file.write_at(10, [b"later"])
    disk.open(NAME).write_at(15, [b"!"])
    assert bytes(view[10:16]) == b"later!"
    assert len(view) == mmap.PAGESIZE


def test_a_view_cannot_be_written(disk: Disk) -> None:
    view = made(disk, content=b"fixed").view()
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1


def test_a_view_keeps_its_length_when_the_file_grows(disk: Disk) -> None:
    file = made(disk, content=b"0123")
    before = file.view()
    file.resize(6)
    file.write_at(4, [b"45"])
    assert bytes(before) == b"0123"
    assert bytes(file.view()) == b"012345"


def test_a_view_shows_writes_after_the_file_grew(disk: Disk) -> None:
    file = made(disk, content=b"0123")
    view = file.view()
    file.resize(8)
    file.write_at(0, [b"ABCDEFGH"])
    assert bytes(view) == b"ABCD"


def test_a_view_outlives_its_handle(disk: Disk) -> None:
    file = made(disk, content=b"kept")
    view = file.view()
    file.close()
    assert bytes(view) == b"kept"


# ------------------------------------------------------------ sync, failures and room


def test_sync_and_advice_do_not_change_the_content(disk: Disk) -> None:
    file = made(disk, content=b"0123456789")
    file.advise(2, 5)
    file.sync()
    assert disk.read(NAME) == b"0123456789"


def test_a_reload_does_not_change_the_content(disk: Disk) -> None:
    file = made(disk, content=b"0123456789")
    file.reload()
    assert disk.read(NAME) == b"0123456789"
    assert bytes(file.view()) == b"0123456789"
    file.write_at(4, [b"ABC"])
    assert disk.read(NAME) == b"0123ABC789"


FULL: dict[str, Callable[[], File]] = {
    "posix": FAILING["posix"],
    "faulty": lambda: FaultyDisk(Random(0), capacity_bytes=0).open(NAME, create=True),
}


@pytest.mark.parametrize("kind", FULL)
def test_a_write_to_a_full_disk_names_the_reason(kind: str) -> None:
    with pytest.raises(DiskHasNoSpace, match=NAME):
        FULL[kind]().write_at(0, [b"x"])


def test_a_reload_shows_the_content_after_a_failed_sync() -> None:
    """Only for the fake: the real one would need a failing disk."""
    seen = set()
    for seed in range(20):
        disk = FaultyDisk(Random(seed))
        file = made(disk, content=b"durable")
        file.sync()
        disk.folder("log").sync()
        file.write_at(0, [b"LOST"])
        disk.sync_fails_at = 0
        with pytest.raises(DiskFailed, match=NAME):
            file.sync()
        found = disk.after_kill()
        assert found.read(NAME) == b"LOSTble", "still in the page cache"
        file = found.open(NAME)
        file.sync()
        file.reload()
        assert found.read(NAME) == found.after_power_cut().read(NAME)
        seen.add(found.read(NAME))
    assert {b"durable", b"LOSTble"} < seen, "lost, kept and torn"


def test_a_kill_makes_nothing_durable() -> None:
    disk = FaultyDisk(Random(2))
    made(disk, content=b"written")
    found = disk.after_kill()
    assert found.read(NAME) == b"written"
    contents = {found.after_kill().after_power_cut().read(NAME) for _ in range(50)}
    assert {None, b"written"} <= contents


def test_a_file_may_be_closed_twice(disk: Disk) -> None:
    file = made(disk)
    file.close()
    file.close()


@pytest.mark.parametrize("kind", FAILING)
def test_a_failure_is_a_disk_failure_and_names_the_file(kind: str) -> None:
    file = FAILING[kind]()
    with pytest.raises(DiskFailed, match=NAME):
        file.write_at(0, [b"no room"])
    with pytest.raises(DiskFailed, match=NAME):
        file.resize(100)
    file.close()


def test_the_free_bytes_are_a_part_of_the_volume(disk: Disk) -> None:
    made(disk, content=bytes(1 << 20))
    assert 0 < disk.free_bytes() < disk.total_bytes()


def test_a_file_is_renamed_first_and_dropped_in_slices(disk: Disk) -> None:
    file = disk.open(NAME, create=True)
    file.resize(20 << 20)
    made(disk, "log/next")
    steps = drop_file(disk, NAME)
    to_sync = next(steps)
    assert [one.name for one in to_sync] == ["log"]
    assert disk.names("log") == [f"log/{DROPPED}", "log/next"]
    sizes = [len(disk.read(f"log/{DROPPED}") or b"") for _ in steps]
    assert sizes == sorted(sizes, reverse=True)
    assert disk.names("log") == ["log/next"]


def test_a_failed_read_names_the_file() -> None:
    """The begin of a process's memory is not mapped, so the system cannot read it."""
    disk = PosixDisk(Path("/proc/self"))
    with pytest.raises(DiskFailed, match="reading mem"):
        disk.read("mem")
    assert disk.read("no such file") is None
