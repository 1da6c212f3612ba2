"""The space of the log: its bytes by state, the freed bytes, and the space of topics."""

from __future__ import annotations

from random import Random
from zlib import crc32

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.engine_world import World, blob
from tests.support.worlds.packed_worlds import (
    SEGMENT,
    delete_topic,
    pack_all,
    small_world,
    two_topics,
)
from tests.unit.engine.test_retention_rules import RetainingWorld
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.upkeep import live_bytes
from tidemill.broker.engine.upkeep.freed_bytes import Freeing
from tidemill.broker.engine.upkeep.log_space import (
    QUEUES_A_SLICE,
    TOPICS_A_SLICE,
    DerivedBytes,
    LogBytes,
    TopicSpace,
)

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
ARCHIVE = "archive"


def count(world: World) -> LogBytes:
    """Count the live bytes, and return the bytes of the log by state."""
    for _ in world.engine.live_bytes.count():
        pass
    counts = world.engine.log_space.find_bytes()
    assert counts is not None
    return counts


def file_bytes(world: World) -> int:
    """Return the bytes of the files of the log, without the unused end of the newest one."""
    log = world.engine.log
    sizes = sum(one.file_size for one in (*log.held, *log.segments))
    return sizes - (log.segments[-1].end - log.log_end)


def disk_bytes(world: World) -> int:
    """Return the bytes of the files of the log."""
    return sum(one.file_size for one in world.engine.log.segments)


def bytes_in(world: World, folder: str) -> int:
    """Return the bytes of the files of a folder."""
    disk = world.disk
    return sum(len(disk.read(name) or b"") for name in disk.names(folder))


def find(world: World, name: str) -> TopicSpace:
    found = world.engine.log_space.find_topic(name, world.now_ms)
    assert found is not None
    return found


def record_bytes(world: World, topic: str) -> int:
    queue = world.engine.catalog.queue(world.topic(topic), QueueId(0))
    return sum(size for _, size, _ in queue.walk(queue.min_offset))


def test_the_bytes_are_unknown_before_the_first_count() -> None:
    world = small_world()
    world.send("a")
    assert world.engine.log_space.find_bytes() is None
    assert not world.engine.log_space.is_known
    assert count(world).live > 0
    assert world.engine.log_space.is_known


def test_each_message_is_live_then_dead_then_a_stub() -> None:
    world = small_world()
    two_topics(world)
    before = count(world)
    gone, kept = record_bytes(world, "gone"), record_bytes(world, "kept")
    assert before.live == gone + kept
    assert (before.dead, before.stub, before.pinned) == (0, 0, 0)
    assert sum(before) == file_bytes(world)
    world.purge("gone")
    dead = count(world)
    assert (dead.live, dead.dead) == (kept, gone)
    assert sum(dead) == file_bytes(world)
    assert pack_all(world)
    packed = count(world)
    assert packed.live == kept
    assert 0 < packed.dead <= 2 * SEGMENT, "only the two newest segments are not packed"
    headers = [one.pack.header for one in world.engine.log.segments if one.pack is not None]
    assert packed.stub == sum(header.stub_bytes for header in headers) > 0
    assert packed.control > 0
    assert sum(packed) == file_bytes(world)


def test_messages_that_died_before_a_start_count_as_control() -> None:
    world = small_world()
    two_topics(world)
    count(world)
    world.purge("gone")
    dead = count(world)
    world.restart()
    after = count(world)
    assert (after.dead, after.live) == (0, dead.live)
    assert after.control >= dead.control + dead.dead
    assert sum(after) == file_bytes(world)


def test_pending_delayed_messages_are_pinned_and_then_dead() -> None:
    world, data = small_world(), blob("later", size=1_000)
    engine = world.engine
    engine.timers.commands.schedule(
        engine.catalog.topics[world.topic("b")],
        QueueId(0),
        data,
        crc32(data),
        due_at_ms=world.now_ms + HOUR_MS,
        now_ms=world.now_ms,
        firing_ms=world.now_ms,
    )
    world.commit()
    before = count(world)
    assert before.pinned > 1_000
    assert before.live == 0
    world.advance(2 * HOUR_MS)
    after = count(world)
    assert after.pinned == 0
    assert after.live > 1_000
    assert after.dead == before.pinned
    assert sum(after) == file_bytes(world)


def test_each_byte_returns_once() -> None:
    world = small_world()
    two_topics(world)
    before = disk_bytes(world)
    count(world)
    world.purge("gone")
    count(world)
    assert pack_all(world)
    count(world)
    freed = world.engine.live_bytes.freed.counts
    assert freed[Freeing.PACKED] == before - disk_bytes(world) > 0
    assert freed[Freeing.DELETED] == freed[Freeing.EMPTIED] == 0
    world.purge("kept")
    world.background()
    count(world)
    assert freed[Freeing.DELETED] > 0
    assert freed.total() == before - disk_bytes(world)


def test_a_segment_without_a_live_message_is_emptied() -> None:
    world = small_world()
    world.send("first", topic="kept")
    for n in range(120):
        world.send(f"gone {n}", topic="gone", size=4_000)
    world.checkpoint()
    count(world)
    world.purge("gone")
    count(world)
    assert pack_all(world)
    count(world)
    freed = world.engine.live_bytes.freed.counts
    assert freed[Freeing.EMPTIED] > 2 * freed[Freeing.PACKED] > 0


def test_a_start_counts_no_freed_bytes() -> None:
    world = small_world()
    two_topics(world)
    world.purge("gone")
    assert pack_all(world)
    world.restart()
    count(world)
    assert world.engine.live_bytes.freed.counts.total() == 0


def test_derived_files_have_their_bytes_on_the_disk() -> None:
    world = small_world()
    space = world.engine.log_space
    world.send("a", "b")
    assert space.derived_bytes == DerivedBytes(queues=0, index=0), (
        "a checkpoint writes the first files"
    )
    world.checkpoint()
    first = space.derived_bytes
    world.send("c")
    world.checkpoint()
    found = space.derived_bytes
    assert 0 < first.queues < found.queues == bytes_in(world, "queues")
    assert 0 < first.index < found.index == bytes_in(world, "index")
    world.restart()
    assert world.engine.log_space.derived_bytes == found


def test_the_floor_has_the_age_of_its_record() -> None:
    world = small_world()
    begun_ms = world.now_ms
    world.send("a")
    world.advance(HOUR_MS)
    world.send("b")
    space = world.engine.log_space
    assert space.floor_offset == world.engine.log.state_floor == 0
    assert space.floor_stored_at_ms() == begun_ms
    two_topics(world)
    second = world.engine.log.segments[1].start
    world.engine.log.note_floor(second)
    assert space.floor_offset == second
    assert space.floor_stored_at_ms() == world.now_ms > begun_ms


def test_a_topic_has_live_and_dead_bytes_until_they_are_packed() -> None:
    world = small_world()
    two_topics(world)
    count(world)
    whole = record_bytes(world, "gone")
    assert (find(world, "gone").live_bytes, find(world, "gone").log_bytes) == (whole, whole)
    world.purge("gone", low=50)
    count(world)
    some = find(world, "gone")
    assert some.live_bytes == record_bytes(world, "gone") < whole
    assert some.log_bytes == whole
    world.purge("gone")
    count(world)
    assert pack_all(world)
    count(world)
    last = find(world, "gone")
    assert last.live_bytes == 0
    assert last.log_bytes <= 2 * SEGMENT
    assert find(world, "kept").log_bytes == record_bytes(world, "kept")


def test_a_deletion_frees_about_what_it_says() -> None:
    world = small_world()
    two_topics(world)
    world.send(*[f"last {n}" for n in range(40)], topic="kept", size=4_000)
    world.checkpoint()
    count(world)
    said, before = find(world, "gone").freed_by_deletion_bytes, file_bytes(world)
    delete_topic(world, "gone")
    count(world)
    assert pack_all(world)
    assert before - file_bytes(world) == pytest.approx(said, rel=0.05)


def test_the_space_of_a_small_share_of_each_segment_returns_on_a_full_disk() -> None:
    world = small_world(FaultyDisk(Random(0), capacity_bytes=64 << 20), disk_reserve_bytes=4 << 20)
    for n in range(120):
        world.send(f"{n}", topic="gone" if n % 5 < 2 else "kept", size=4_000)
    world.checkpoint()
    world.background()
    said, before = find(world, "gone").freed_by_deletion_bytes, disk_bytes(world)
    delete_topic(world, "gone")
    for free_bytes in (8 << 20, 1 << 20):
        is_full = free_bytes < 4 << 20
        world.leave_room(free_bytes)
        world.background()
        world.advance(2_000)
        world.background()
        assert (disk_bytes(world) < before - said // 2) == is_full
    assert before - disk_bytes(world) <= said


def test_a_deletion_frees_the_retries_too() -> None:
    world = small_world()
    world.group(max_attempts=5)
    world.send("a", size=8_000)
    world.pop(1, invisible_ms=1_000)
    count(world)
    before = find(world, "orders").freed_by_deletion_bytes
    world.advance(HOUR_MS)
    count(world)
    names = [name for name in world.engine.log_space.topic_names() if name != "orders"]
    assert len(names) == 1
    retry = find(world, names[0])
    assert retry.live_bytes > 8_000
    assert find(world, "orders").freed_by_deletion_bytes == (before + retry.freed_by_deletion_bytes)


def test_the_topic_of_dead_bytes_is_forgotten_beyond_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_bytes, "DEAD_PAIRS_MAX", 1)
    world = small_world()
    for topic in ("a", "b"):
        world.send(topic, topic=topic, size=1_000)
    count(world)
    whole = record_bytes(world, "a") + record_bytes(world, "b")
    world.purge("a")
    world.purge("b")
    assert count(world).dead == whole
    assert find(world, "a").log_bytes > 1_000
    assert find(world, "b").log_bytes == 0


def test_topic_names_are_in_order_and_omit_what_is_no_topic_of_a_user() -> None:
    world = small_world()
    for name in ("b", "c", "a"):
        world.topic(name)
    delete_topic(world, "c")
    assert world.engine.log_space.topic_names() == ["a", "b"]
    assert world.engine.log_space.find_topic("c", world.now_ms) is None


def test_a_slice_of_topics_is_bounded_in_topics_and_queues() -> None:
    world = small_world()
    names = [f"t{n:03}" for n in range(TOPICS_A_SLICE + 1)]
    for name in names:
        world.topic(name)
    find_topics = world.engine.log_space.find_topics
    found, number = find_topics(names, world.now_ms)
    assert [one.name for one in found] == names[:TOPICS_A_SLICE]
    assert number == TOPICS_A_SLICE
    delete_topic(world, names[0])
    found, number = find_topics(names[:3], world.now_ms)
    assert [one.name for one in found] == names[1:3]
    assert number == 3
    world.topic("wide", queues=QUEUES_A_SLICE)
    assert find_topics(["wide", *names], world.now_ms)[1] == 1


def test_the_retention_of_a_topic_has_the_time_of_the_broker() -> None:
    world = RetainingWorld(retention_ms=3 * DAY_MS)
    world.topic("by default")
    world.retain("kept", ms=-1, bytes=5 << 20, frees_acked=True)
    count(world)
    kept = find(world, "by default").retention
    assert (kept.ms, kept.bytes, kept.frees_acked) == (3 * DAY_MS, None, False)
    kept = find(world, "kept").retention
    assert (kept.ms, kept.bytes, kept.frees_acked) == (-1, 5 << 20, True)


def seal(world: World, topic: str, offset: int) -> None:
    world.engine.administration.update_pull_offset(
        world.group(ARCHIVE), world.topic(topic), QueueId(0), offset, world.now_ms
    )
    world.commit()


def test_old_messages_that_are_not_archived_wait_for_the_archive() -> None:
    world = RetainingWorld(retention_ms=DAY_MS, archive_gate_group=ARCHIVE)
    world.leave_room(1 << 30)
    for topic in ("sealed", "unsealed", "young"):
        world.send("1", "2", topic=topic)
        seal(world, topic, 1)
    world.retain("young", ms=100 * DAY_MS)
    world.retain("ever", ms=-1)
    seal(world, "sealed", 2)
    world.elapse(3 * DAY_MS, step_ms=HOUR_MS)
    waiting = {
        name: find(world, name).waits_for_archive
        for name in ("sealed", "unsealed", "young", "ever")
    }
    assert waiting == {"sealed": False, "unsealed": True, "young": False, "ever": False}
    seal(world, "unsealed", 2)
    world.elapse(HOUR_MS, step_ms=HOUR_MS // 2)
    assert not find(world, "unsealed").waits_for_archive
