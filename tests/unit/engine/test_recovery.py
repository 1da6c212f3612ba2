"""Starts with changed or missing files."""

from __future__ import annotations

from random import Random
from zlib import crc32

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.engine_world import GROUP, World
from tidemill.broker.engine.layout.config import encode_item
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.store.segment import CorruptStore
from tidemill.common.errors import BadRequest, MessageCorrupted


def filled_world() -> World:
    """Make a world with three segments, the first two in a checkpoint."""
    world = World(FaultyDisk(Random(0)))
    world.group()
    for n in range(20):
        world.send(f"m{n}", size=130_000)
    world.checkpoint()
    return world


def test_a_cut_segment_stops_the_start() -> None:
    world = World(FaultyDisk(Random(0)))
    world.send("m0", "m1")
    disk = world.disk.after_kill()
    disk.open("log/00000000000000000000.log").resize(300_001)
    world.disk = disk
    with pytest.raises(CorruptStore, match="was cut"):
        world.open()


def test_a_missing_first_segment_stops_the_start() -> None:
    world = filled_world()
    disk = world.disk.after_kill()
    disk.remove("log/00000000000000000000.log")
    world.disk = disk
    with pytest.raises(CorruptStore, match=r"knows of it from 0 on.*store mend DIR --from BACKUP"):
        world.open()


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_missing_or_empty_last_segment_stops_the_start_and_the_other_files_stay(
    is_removed: bool,
) -> None:
    world = World(FaultyDisk(Random(0)), segment_bytes=64 << 10)
    world.send(*[f"m{n}" for n in range(60)], size=1_800)
    world.background()
    world.checkpoint()
    disk = world.disk.after_kill()
    [*_, last, _ready] = before = disk.names("log")
    if is_removed:
        disk.remove(last)
        before.remove(last)
    else:
        disk.cut(last, 0)
    with pytest.raises(
        CorruptStore, match=rf"{last} is missing or empty.*store mend DIR --from BACKUP"
    ):
        World(disk, config=world.config)
    assert disk.names("log") == before


def test_an_unreadable_checkpoint_file_makes_the_start_longer() -> None:
    world = World(FaultyDisk(Random(0)))
    world.send("m0")
    world.checkpoint()
    disk = world.disk.after_kill()
    disk.spoil("checkpoint", 0)
    again = World(disk, config=world.config)
    assert (again.report.damaged_file, again.report.replayed_from) == ("checkpoint", 0)
    assert again.drain() == ["m0"]
    again.restart()
    assert again.report.damaged_file == ""


def test_a_segment_that_retention_dropped_is_not_missed() -> None:
    world = filled_world()
    world.retire()
    assert world.engine.log.min_offset > 0
    world.restart()
    assert world.engine.log.min_offset > 0


def test_a_renamed_segment_is_not_deleted() -> None:
    world = World(FaultyDisk(Random(0)))
    world.send("m0")
    disk = world.disk.after_kill()
    disk.rename("log/00000000000000000000.log", "log/saved.log")
    world.disk = disk
    with pytest.raises(CorruptStore, match=r"log/saved\.log is not a segment"):
        world.open()
    assert disk.names("log") == ["log/saved.log"]


def test_an_empty_file_of_an_unfinished_segment_is_ignored() -> None:
    disk = FaultyDisk(Random(0))
    disk.open("log/00000000000000000000.log", create=True)
    world = World(disk)
    world.send("m0")
    assert world.bodies() == ["m0"]


def test_a_log_of_a_later_version_is_rejected_with_a_clear_error() -> None:
    world = World(FaultyDisk(Random(0)))
    world.engine.log.append(RecordKind.CONFIG, encode_item({"op": "fromTheFuture"}), 0)
    world.commit()
    with pytest.raises(CorruptStore, match=r"fromTheFuture.*later one"):
        world.restart()


def test_an_attempt_id_of_any_kind_survives_a_restart_or_is_rejected() -> None:
    world = World(FaultyDisk(Random(0)))
    world.group(is_ordered=True)
    world.send("m0")
    with pytest.raises(BadRequest, match="at most 255 bytes"):
        world.pop(1, attempt_id="é" * 128)
    longest = "é" * 127
    assert world.bodies(1, attempt_id=longest) == ["m0"]
    world.restart()
    assert world.bodies(1, attempt_id=longest) == ["m0"]


@pytest.mark.parametrize("data", [b"", b"\x01", bytes(56), b"\x01\x01\x01\x00\xff\xff" + bytes(60)])
def test_an_invalid_message_is_rejected_and_not_stored(data: bytes) -> None:
    world = World()
    topic_id = world.topic()
    end = world.engine.log.log_end
    with pytest.raises(MessageCorrupted):
        world.engine.commands.send(
            TopicId(topic_id),
            QueueId(0),
            data,
            crc32(data),
            now_ms=world.now_ms,
            firing_ms=world.now_ms,
        )
    assert world.engine.log.log_end == end


def test_expired_messages_of_an_ordered_group_are_counted_as_ready() -> None:
    world = World()
    world.group(is_ordered=True)
    world.send("m0", "m1", "m2")
    world.pop(2, invisible_ms=1_000)
    world.advance(1_001)
    group = world.engine.catalog.find_group(GROUP)
    assert group is not None
    (progress,) = world.engine.inspection.group_progress(group)
    assert (progress.ready_count, progress.in_flight_count) == (3, 0)


def test_damage_to_the_first_records_of_a_small_log_stops_the_start() -> None:
    world = World(FaultyDisk(Random(0)))
    disk = world.disk.after_kill()
    disk.damage("log/00000000000000000000.log", 20)
    world.disk = disk
    with pytest.raises(CorruptStore, match="damaged at byte 0"):
        world.open()
