"""The commit log: which records survive, which are cut, and which are rejected."""

from __future__ import annotations

import zlib
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.engine_world import SMALL, World
from tidemill.broker.engine.layout import record
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.log_opening import SEARCH_BYTES, DurabilityProofs, LogOpening
from tidemill.broker.engine.store.mappings import Mappings
from tidemill.broker.engine.store.segment import CorruptStore
from tidemill.common.errors import MessageBodyTooLarge

SEGMENT = 4096
BODY = b"b" * 100
SIZE = record.HEADER_SIZE + len(BODY)


def open_log(disk: FaultyDisk) -> tuple[CommitLog, list[int]]:
    """Recover a log; return it with the offsets of its records."""
    mappings = Mappings(disk)
    log = CommitLog(disk, mappings, segment_bytes=SEGMENT)
    opening = LogOpening(log, disk, mappings)
    opening.find_segments(durable_offset=0)
    found = [one.log_offset for one in opening.scan(LogOffset(0))] if log.segments else []
    if log.segments:
        opening.finish(DurabilityProofs())
    log.epoch += 1
    return log, found


def commit(log: CommitLog) -> None:
    log.write()
    log_offset, files = log.begin_sync()
    for file in files:
        file.sync()
    log.note_synced(log_offset)


def append(log: CommitLog, count: int, body: bytes = BODY) -> list[int]:
    return [log.append(RecordKind.STATE, body, 0) for _ in range(count)]


def test_records_are_recovered_in_order_across_segments() -> None:
    disk = FaultyDisk(Random(0))
    log, _ = open_log(disk)
    offsets = append(log, 100)
    commit(log)
    assert len(log.segments) > 2
    again, found = open_log(disk.after_power_cut())
    assert found == offsets
    assert again.log_end == log.log_end


def test_a_record_never_crosses_a_segment() -> None:
    log, _ = open_log(FaultyDisk(Random(0)))
    for offset in append(log, 200):
        assert offset // SEGMENT == (offset + SIZE - 1) // SEGMENT


def test_a_record_larger_than_a_segment_is_rejected_and_changes_nothing() -> None:
    log, _ = open_log(FaultyDisk(Random(0)))
    append(log, 1)
    end = log.log_end
    with pytest.raises(MessageBodyTooLarge):
        log.append(RecordKind.MESSAGE, BODY, 0, tail=bytes(SEGMENT), tail_crc=0)
    assert log.log_end == end


def test_a_record_can_be_read_before_and_after_it_is_written() -> None:
    log, _ = open_log(FaultyDisk(Random(0)))
    (offset,) = append(log, 1, b"early")
    assert bytes(log.record_at(LogOffset(offset)).body) == b"early"
    commit(log)
    assert bytes(log.record_at(LogOffset(offset)).body) == b"early"


def test_unsynced_records_are_not_committed() -> None:
    log, _ = open_log(FaultyDisk(Random(0)))
    append(log, 3)
    log.write()
    assert log.committed_offset == 0
    log.note_synced(log.begin_sync()[0])
    assert log.committed_offset == log.log_end


def test_a_torn_record_after_a_lost_one_never_comes_back() -> None:
    """Records of a torn round that survive must not join later records."""
    disk = FaultyDisk(Random(0))
    log, _ = open_log(disk)
    append(log, 2)
    commit(log)
    first, *rest = append(log, 3)
    commit(log)
    # The first record of the last round is lost and the others survive: a torn, unsynced round.
    disk.damage(log.segments[0].name, first + 60)
    torn, found = open_log(disk.after_kill())
    assert found == [0, SIZE]
    assert torn.log_end == first
    assert append(torn, 1) == [first]
    commit(torn)
    _, found = open_log(disk_of(torn).after_power_cut())
    assert found == [0, SIZE, first]
    assert not set(rest) & set(found)


def test_a_start_does_not_read_the_unused_part_of_a_segment() -> None:
    disk = FaultyDisk(Random(0))
    log = CommitLog(disk, Mappings(disk), segment_bytes=16 << 20)
    offsets = append(log, 3)
    commit(log)
    disk = disk.after_kill()
    _, found = open_log(disk)
    assert found == offsets
    assert disk.read_bytes < 4 * SEARCH_BYTES


def test_a_stop_leaves_no_segment_behind_the_log_end() -> None:
    """A start would search it for records and then delete it."""
    disk = FaultyDisk(Random(0))
    log, _ = open_log(disk)
    append(log, 3)
    commit(log)
    for files in log.prepare(slice_bytes=SEGMENT):
        for file in files:
            file.sync()
    assert len(disk.names("log")) == 2
    log.close()
    assert disk.names("log") == [log.segments[0].name]


@pytest.mark.parametrize("is_zero", [False, True])
@pytest.mark.parametrize("lost_bytes", [2 * SIZE, SEARCH_BYTES - 2, SEARCH_BYTES, 5_000_000])
def test_a_record_behind_a_broken_one_is_found(lost_bytes: int, *, is_zero: bool) -> None:
    """It states that the log before it was durable, so the broken record is damage."""
    disk = FaultyDisk(Random(0))
    log = CommitLog(disk, Mappings(disk), segment_bytes=16 << 20)
    append(log, 1)
    tail = b"t" * (lost_bytes - SIZE)
    lost = log.append(RecordKind.MESSAGE, BODY, 0, tail=tail, tail_crc=zlib.crc32(tail))
    commit(log)
    append(log, 1)
    commit(log)
    if is_zero:
        disk.zero(log.segments[0].name, lost, lost_bytes)
    else:
        disk.damage(log.segments[0].name, lost)
    with pytest.raises(CorruptStore, match=rf"\b{lost}\b"):
        open_log(disk.after_kill())


def disk_of(log: CommitLog) -> FaultyDisk:
    disk = log._disk
    assert isinstance(disk, FaultyDisk)
    return disk


@pytest.mark.parametrize("position", [0, 5, 20, 35, 60, 147])
def test_damage_to_durable_bytes_stops_the_start_with_file_and_offset(position: int) -> None:
    disk = FaultyDisk(Random(0))
    log, _ = open_log(disk)
    offsets = []
    for _ in range(5):
        offsets += append(log, 1)
        commit(log)
    disk.damage(log.segments[0].name, offsets[2] + position)
    with pytest.raises(CorruptStore, match=r"00000\.log is damaged at byte 296 .*store mend DIR"):
        open_log(disk.after_kill())


def test_damage_in_an_older_segment_stops_the_start() -> None:
    disk = FaultyDisk(Random(0))
    log, _ = open_log(disk)
    append(log, 60)
    commit(log)
    append(log, 60)
    commit(log)
    disk.damage(log.segments[0].name, 50)
    with pytest.raises(CorruptStore):
        open_log(disk.after_kill())


def test_a_missing_segment_stops_the_start() -> None:
    disk = FaultyDisk(Random(0))
    log, _ = open_log(disk)
    append(log, 100)
    commit(log)
    disk.remove(log.segments[1].name)
    with pytest.raises(CorruptStore, match="hole"):
        open_log(disk.after_kill())


def test_a_record_of_an_unknown_kind_stops_the_start() -> None:
    world = World(FaultyDisk(Random(0)), config=SMALL)
    world.engine.log.append(99, b"from the future", 0)  # type: ignore[arg-type]  # that is the point
    world.commit()
    with pytest.raises(CorruptStore, match=r"kind 99.*later"):
        world.restart()


def test_a_log_without_its_oldest_segment_opens_with_all_other_records() -> None:
    disk = FaultyDisk(Random(0))
    log, _ = open_log(disk)
    append(log, 100)
    commit(log)
    end = log.log_end
    for files in log.drop_oldest():
        for file in files:
            file.sync()
    again, found = open_log_from(disk.after_kill(), SEGMENT)
    assert again.log_end == end
    assert min(found) == SEGMENT


def open_log_from(disk: FaultyDisk, offset: int) -> tuple[CommitLog, list[int]]:
    mappings = Mappings(disk)
    log = CommitLog(disk, mappings, segment_bytes=SEGMENT)
    opening = LogOpening(log, disk, mappings)
    opening.find_segments(durable_offset=0)
    found = [one.log_offset for one in opening.scan(LogOffset(offset))]
    opening.finish(DurabilityProofs())
    return log, found


def test_a_prepared_segment_is_used_and_an_unfinished_one_is_deleted() -> None:
    disk = FaultyDisk(Random(0))
    log, _ = open_log(disk)
    append(log, 15)
    commit(log)
    assert log.needs_preparation
    for files in log.prepare(slice_bytes=1024):
        for file in files:
            file.sync()
    assert disk.names("log") == [f"log/{0:020d}.log", f"log/{SEGMENT:020d}.log"]
    again, found = open_log(disk.after_power_cut())
    assert len(found) == 15
    assert len(again.segments) == 1
    append(log, 15)
    commit(log)
    assert log.segments[1].start == SEGMENT
