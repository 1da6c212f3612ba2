"""A start on disks that do not know their holes, and with zeros before the remnants of a log."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path
from random import Random

import pytest

from tests.support.disk.faulty_disk import BLOCK, Content, FaultyDisk
from tests.unit.engine.test_commit_log import BODY, SEGMENT, SIZE, append, commit, open_log
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.log_opening import SEARCH_BYTES
from tidemill.broker.engine.store.mappings import Mappings
from tidemill.broker.engine.store.segment import CorruptStore
from tidemill.broker.posix_disk import PosixDisk


@pytest.mark.parametrize("lost_bytes", [SEARCH_BYTES, 5_000_000])
def test_a_record_behind_written_zeros_is_found(
    monkeypatch: pytest.MonkeyPatch, lost_bytes: int
) -> None:
    """A prepared segment is filled with zeros, so no part of it is a hole."""
    monkeypatch.setattr(Content, "find_data", lambda content, at: min(at, len(content.now)))
    disk = FaultyDisk(Random(0))
    log = CommitLog(disk, Mappings(disk), segment_bytes=16 << 20)
    append(log, 1)
    tail = b"t" * (lost_bytes - SIZE)
    lost = log.append(RecordKind.MESSAGE, BODY, 0, tail=tail, tail_crc=zlib.crc32(tail))
    commit(log)
    append(log, 1)
    commit(log)
    disk.zero(log.segments[0].name, lost, lost_bytes)
    with pytest.raises(CorruptStore, match=rf"\b{lost}\b"):
        open_log(disk.after_kill())


def test_torn_bytes_behind_a_hole_are_cut() -> None:
    """They begin with no record, and would remain behind later records."""
    disk = FaultyDisk(Random(0))
    log = CommitLog(disk, Mappings(disk), segment_bytes=16 * SEGMENT)
    append(log, 2)
    commit(log)
    torn_at = 5 * BLOCK + 7
    file = disk.open(log.segments[0].name)
    file.write_at(torn_at, [b"torn"])
    file.close()
    again, found = open_log(disk.after_kill())
    assert found == [0, SIZE]
    opened = again._disk
    assert isinstance(opened, FaultyDisk)
    content = opened.read(again.segments[0].name)
    assert content is not None
    assert not content[again.log_end :].strip(b"\0")


def test_a_file_system_without_support_for_holes_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = PosixDisk(tmp_path).open("log/file", create=True)
    file.resize(1 << 20)
    file.write_at(700_000, [b"data"])

    def reject(_fd: int, _offset: int, _whence: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "lseek", reject)
    assert file.find_data(4_096) == 4_096
    file.close()


def test_the_hole_at_the_end_of_a_file_is_not_read(tmp_path: Path) -> None:
    file = PosixDisk(tmp_path).open("log/file", create=True)
    file.write_at(0, [b"data"])
    file.resize(16 << 20)
    file.sync()
    assert file.find_data(8 << 20) in {8 << 20, 16 << 20}
    try:
        os.lseek(file.fileno(), 8 << 20, os.SEEK_DATA)
    except OSError as error:
        is_hole = error.errno == errno.ENXIO
    else:
        is_hole = False  # The file system does not know its holes.
    assert file.find_data(8 << 20) == (16 << 20 if is_hole else 8 << 20)
    file.close()


def prepared(disk: FaultyDisk) -> CommitLog:
    """Return an opened log with a prepared segment."""
    first, _ = open_log(disk)
    append(first, 3)
    commit(first)
    first.close()
    log, _ = open_log(disk)
    for files in log.prepare(slice_bytes=SEGMENT):
        for file in files:
            file.sync()
    assert len(disk.names("log")) == 2
    return log


def test_a_start_and_a_stop_leave_no_file_open() -> None:
    disk = FaultyDisk(Random(0))
    log = prepared(disk)
    log.close()
    assert disk.open_files == 0


def test_a_stop_ignores_that_the_prepared_segment_cannot_be_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = FaultyDisk(Random(0))
    log = prepared(disk)

    def reject(name: str) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), name)

    with monkeypatch.context() as patched:
        patched.setattr(disk, "delete", reject)
        log.close()
    _, found = open_log(disk.after_kill())
    assert len(found) == 3


def test_a_second_close_deletes_nothing() -> None:
    """The next process may have prepared a segment of that name."""
    disk = FaultyDisk(Random(0))
    log = prepared(disk)
    log.close()
    later = prepared(disk)
    names = disk.names("log")
    log._next.close()
    assert disk.names("log") == names
    later.close()
