"""`disk_full_policy`: which messages die on a full disk, when, and which must not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any
from zlib import crc32

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.engine_world import blob
from tests.unit.engine.test_retention_rules import RetainingWorld
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.layout.trim import TrimReason
from tidemill.broker.engine.store.segment import Record
from tidemill.broker.engine.upkeep.retention_rules import DiskTrim
from tidemill.common.errors import DiskFull

MIB = 1 << 20
KIB = 1 << 10
SECOND_MS = 1_000
DAY_MS = 86_400_000
RESERVE = 8 * MIB
SEGMENT = 256 * KIB
ARCHIVE = "archive"


def full_world(policy: str = "trim_oldest", **changes: Any) -> RetainingWorld:
    """Return a world with a large disk; `fill` makes it full."""
    options = {"retention_ms": 400 * DAY_MS, "checkpoint_log_bytes": SEGMENT, **changes}
    return RetainingWorld(
        FaultyDisk(Random(0), capacity_bytes=256 * MIB),
        disk_reserve_bytes=RESERVE,
        disk_full_policy=policy,
        segment_bytes=SEGMENT,
        **options,
    )


def send_segments(world: RetainingWorld, count: int, *, topic: str = "a") -> None:
    """Send messages of 20 KiB until the log has `count` more segments."""
    wanted = len(world.engine.log.segments) + count
    while len(world.engine.log.segments) < wanted:
        world.send(f"{topic} {len(world.engine.log.segments)}", topic=topic, size=20 * KIB)


def fill(world: RetainingWorld, *, free_bytes: int = RESERVE - MIB) -> None:
    """End all background work, then leave less free space than the reserve."""
    world.elapse(20 * SECOND_MS)
    world.leave_room(free_bytes)
    assert world.engine.room.is_full


def test_by_default_a_full_disk_loses_no_message() -> None:
    world = full_world("reject")
    send_segments(world, 6)
    fill(world)
    world.elapse(300 * SECOND_MS)
    assert world.first("a") == 0
    with pytest.raises(DiskFull):
        world.send("one too many")


def test_the_oldest_messages_die_one_segment_at_a_time_until_there_is_room() -> None:
    world = full_world()
    send_segments(world, 8)
    queue = world.engine.catalog.queue(world.topic("a"), QueueId(0))
    ends = [int(queue.offset_behind(one.end)) for one in world.engine.log.segments]
    fill(world, free_bytes=RESERVE - 2 * SEGMENT - SEGMENT // 2)
    lows, times_s = [0], [0]
    for second in range(60):
        world.elapse(SECOND_MS, step_ms=SECOND_MS)
        if world.first("a") != lows[-1]:
            lows.append(world.first("a"))
            times_s.append(second)
    # Three segments give the room back, and no message of the segment after them is lost.
    assert lows == [0, *ends[:3]]
    # Packing and the removal of the segment have time before the next one.
    assert all(after - before >= 9 for before, after in pairwise(times_s))
    assert not world.engine.room.is_full
    assert world.removed("a") == {TrimReason.DISK: ends[2]}
    world.send("later", topic="b")
    assert world.drain(topic="b") == ["later"]


def test_a_second_look_follows_before_messages_die() -> None:
    world = full_world()
    send_segments(world, 6)
    fill(world)
    world.elapse(9 * SECOND_MS, step_ms=SECOND_MS)
    assert world.first("a") == 0
    world.elapse(3 * SECOND_MS, step_ms=SECOND_MS)
    assert world.first("a") > 0


def test_topics_that_keep_messages_for_ever_lose_none() -> None:
    world = full_world()
    world.retain("kept", ms=-1)
    for n in range(6):
        world.send(f"kept {n}", topic="kept", size=40 * KIB)
        send_segments(world, 1)
    fill(world)
    world.elapse(300 * SECOND_MS)
    assert world.first("a") > 0
    assert world.first("kept") == 0
    assert world.removed("kept") == {}


def test_delayed_messages_are_not_trimmed() -> None:
    world = full_world()
    data, engine = blob("later", size=KIB), world.engine
    engine.timers.commands.schedule(
        engine.catalog.topics[world.topic("b")],
        QueueId(0),
        data,
        crc32(data),
        due_at_ms=world.now_ms + DAY_MS,
        now_ms=world.now_ms,
        firing_ms=world.now_ms,
    )
    world.commit()
    send_segments(world, 6)
    fill(world)
    world.elapse(300 * SECOND_MS)
    assert {topic_id for topic_id, _ in engine.trims.messages} == {world.topic("a")}
    world.leave_room(100 * MIB)
    world.elapse(DAY_MS, step_ms=DAY_MS // 24)
    assert world.drain(topic="b") == ["later"]


def test_packing_goes_first() -> None:
    """The dead messages of another topic give enough room."""
    world = full_world()
    for n in range(120):
        world.send(f"gone {n}", topic="gone", size=20 * KIB)
        if n % 20 == 0:
            world.send(f"a {n}", topic="a", size=KIB)
    fill(world)
    world.purge("gone")
    world.elapse(60 * SECOND_MS, step_ms=SECOND_MS)
    assert not world.engine.room.is_full
    assert world.first("a") == 0


def test_messages_die_only_while_nothing_may_free_space() -> None:
    world = full_world()
    send_segments(world, 6)
    fill(world)
    rules = world.engine.retention.rules
    asked = rules.may_free_space
    assert not asked(world.now_ms)
    rules.may_free_space = lambda _now_ms: True
    world.elapse(50 * SECOND_MS)
    assert world.first("a") == 0
    rules.may_free_space = asked
    world.elapse(30 * SECOND_MS)
    assert world.first("a") > 0


def test_messages_die_although_others_die_all_the_time() -> None:
    """Each death may free space, until a search has found none."""
    world = full_world()
    world.send(*["tick"] * 200, topic="b")
    send_segments(world, 6)
    fill(world)
    for low in range(1, 100):
        world.purge("b", low=low)
        world.elapse(3 * SECOND_MS, step_ms=SECOND_MS)
        if world.first("a"):
            break
    assert 60 < 3 * low < 200


def test_a_log_that_shrinks_saves_the_oldest_messages() -> None:
    """While other work frees space every 50 s, no live message dies."""
    world = full_world()
    send_segments(world, 8, topic="gone")
    send_segments(world, 2)
    gone = world.engine.catalog.queue(world.topic("gone"), QueueId(0))
    ends = [int(gone.offset_behind(one.end)) for one in world.engine.log.segments[:8]]
    fill(world)
    rules = world.engine.retention.rules
    rules.may_free_space = lambda _now_ms: True
    for low in ends[:6]:
        world.purge("gone", low=low)
        world.elapse(50 * SECOND_MS, step_ms=SECOND_MS)
        world.leave_room(RESERVE - MIB)
    assert TrimReason.DISK not in world.removed("gone")
    world.elapse(80 * SECOND_MS, step_ms=SECOND_MS)
    assert TrimReason.DISK in world.removed("gone")


def test_each_time_of_a_full_disk_counts_alone() -> None:
    world = full_world()
    send_segments(world, 6)
    world.engine.retention.rules.may_free_space = lambda _now_ms: True
    for _ in range(3):
        fill(world)
        world.elapse(40 * SECOND_MS, step_ms=SECOND_MS)
        world.leave_room(100 * MIB)
        world.elapse(20 * SECOND_MS, step_ms=SECOND_MS)
    assert world.first("a") == 0


def test_a_death_makes_the_rule_wait_for_packing() -> None:
    world = full_world()
    send_segments(world, 3)
    world.send("b", topic="b", size=KIB)
    assert world.engine.packing.next_ms() is None
    assert not world.engine.retention.rules.may_free_space(world.now_ms)
    world.purge("b")
    assert world.engine.retention.rules.may_free_space(world.now_ms)


def old_and_young() -> RetainingWorld:
    """Return a world with more than 1 MiB of old messages, and younger ones of another topic."""
    world = full_world()
    world.retain("old", ms=60 * SECOND_MS)
    send_segments(world, 6, topic="old")
    send_segments(world, 2, topic="a")
    return world


def test_a_rule_that_frees_space_goes_first() -> None:
    """The messages of a topic are too old in the same look, so no other messages die."""
    world, duration_ms = old_and_young(), 0
    while not world.first("old"):
        world.elapse(10 * SECOND_MS)
        duration_ms += 10 * SECOND_MS
    world = old_and_young()
    world.elapse(duration_ms - 10 * SECOND_MS)
    world.leave_room(RESERVE - MIB // 2)
    world.elapse(60 * SECOND_MS)
    assert not world.engine.room.is_full
    assert world.first("a") == 0
    assert TrimReason.DISK not in {*world.removed("old"), *world.removed("a")}


def test_the_two_newest_segments_stay_unless_the_oldest_is_one_of_them() -> None:
    world = full_world()
    world.retain("kept", ms=-1)
    send_segments(world, 3, topic="kept")
    send_segments(world, 1, topic="a")
    fill(world, free_bytes=RESERVE // 2)
    world.elapse(300 * SECOND_MS)
    assert world.first("a") == 0
    send_segments_on_full_disk(world)
    world.elapse(300 * SECOND_MS)
    assert world.first("a") > 0


def send_segments_on_full_disk(world: RetainingWorld) -> None:
    """Send messages while there is room, then fill the disk again."""
    world.leave_room(100 * MIB)
    send_segments(world, 2, topic="kept")
    fill(world, free_bytes=RESERVE // 2)


def test_messages_do_not_die_if_their_segment_keeps_most_of_its_bytes() -> None:
    world = full_world()
    world.retain("kept", ms=-1)
    for _ in range(2):
        world.send("a", topic="a", size=KIB)
        send_segments(world, 1, topic="kept")
    send_segments(world, 3, topic="kept")
    fill(world)
    world.elapse(300 * SECOND_MS)
    assert world.first("a") == 0


@pytest.mark.parametrize("free_bytes", [RESERVE // 4, RESERVE // 16])
def test_each_segment_returns_space_although_one_message_is_kept(free_bytes: int) -> None:
    world = full_world()
    world.retain("kept", ms=-1)
    world.send("kept", topic="kept")
    send_segments(world, 40)
    fill(world, free_bytes=free_bytes)
    before = world.engine.room.free_bytes
    world.elapse(60 * SECOND_MS)
    freed, lost = world.engine.room.free_bytes - before, world.first("a") * 20 * KIB
    assert freed > lost * 3 // 4 > 0
    world.elapse(600 * SECOND_MS)
    assert not world.engine.room.is_full
    queue = world.engine.catalog.queue(world.topic("a"), QueueId(0))
    assert queue.max_offset - queue.min_offset > 2 * SEGMENT // (20 * KIB)


def test_no_further_messages_die_if_the_space_of_the_last_ones_does_not_return() -> None:
    """A segment with a damaged record is not packed."""
    world = full_world()
    world.retain("kept", ms=-1)
    world.send("kept", topic="kept")
    send_segments(world, 8)
    queue = world.engine.catalog.queue(world.topic("a"), QueueId(0))
    first = world.engine.log.segments[0]
    end = queue.offset_behind(first.end)
    fill(world)
    world.disk.damage(first.name, 3 * SEGMENT // 4)
    world.elapse(600 * SECOND_MS)
    assert world.first("a") == end


def test_the_only_full_segment_may_go() -> None:
    world = full_world()
    send_segments(world, 2)
    fill(world)
    world.elapse(60 * SECOND_MS)
    assert world.first("a") > 0
    assert len(world.engine.log.segments) == 1


def test_groups_move_past_the_messages_that_they_lose() -> None:
    """The EXPIRE record precedes the TRIM record."""
    world = full_world()
    send_segments(world, 6)
    assert world.bodies(1, topic="a") == ["a 1"]
    fill(world)
    world.elapse(60 * SECOND_MS)
    first = world.first("a")
    progress = world.engine.state.progress[world.group(), world.topic("a"), QueueId(0)]
    assert progress.position == first > 1
    kinds = [
        RecordKind(one.header.kind)
        for one in world.engine.log.walk_between(0, world.engine.log.log_end)
        if isinstance(one, Record)
    ]
    assert kinds.index(RecordKind.EXPIRE) == kinds.index(RecordKind.TRIM) - 1


def purge_other(world: RetainingWorld) -> None:
    world.purge("b")


def leave_room(world: RetainingWorld) -> None:
    world.leave_room(RESERVE + MIB)


def keep_for_ever(world: RetainingWorld) -> None:
    world.retain("a", ms=-1)


@pytest.mark.parametrize("change", [purge_other, leave_room, keep_for_ever])
def test_a_change_during_the_look_prevents_the_trim(
    change: Callable[[RetainingWorld], None],
) -> None:
    world = full_world()
    send_segments(world, 6)
    world.send("b", topic="b")
    for n in range(300):
        world.topic(f"t{n}")  # The look has several slices.
    fill(world)
    world.elapse(9 * SECOND_MS, step_ms=SECOND_MS)
    world.monotonic_ms += 2 * SECOND_MS
    world.now_ms += 2 * SECOND_MS
    is_changed = False
    world.engine.retention.note(world.now_ms, world.monotonic_ms)
    for _ in world.engine.retention.rules.look(world.now_ms):
        if not is_changed:
            is_changed = True
            change(world)
    world.commit()
    assert is_changed
    assert world.first("a") == 0


def test_the_rule_waits_for_the_checkpoint_that_a_removal_needs() -> None:
    world = full_world(checkpoint_log_bytes=64 * MIB)
    send_segments(world, 3, topic="gone")
    send_segments(world, 3, topic="a")
    world.purge("gone")
    packing = world.engine.packing
    while packing.next_ms() is not None:
        for _ in packing.find_work(world.now_ms) or ():
            pass
    assert world.engine.retention.rules.may_free_space(world.now_ms)
    world.elapse(2 * SECOND_MS)
    assert not world.engine.retention.rules.may_free_space(world.now_ms)


def test_an_archive_does_not_keep_the_disk_full() -> None:
    world = full_world(archive_gate_group=ARCHIVE)
    world.retain("kept", ms=-1)
    send_segments(world, 1, topic="kept")
    send_segments(world, 6)
    group = world.group(ARCHIVE)
    world.engine.administration.update_pull_offset(
        group, world.topic("a"), QueueId(0), 1, world.now_ms
    )
    world.commit()
    fill(world)
    world.elapse(60 * SECOND_MS)
    assert world.first("kept") == 0
    assert world.first("a") > 1


def test_the_operator_learns_which_topics_lost_messages() -> None:
    world = full_world()
    world.send("b", topic="b", size=KIB)
    send_segments(world, 6)
    fill(world, free_bytes=RESERVE - SEGMENT - SEGMENT // 2)
    world.elapse(60 * SECOND_MS)
    trims = world.engine.trims
    key = world.topic("a"), TrimReason.DISK
    other = world.topic("b"), TrimReason.DISK
    first, second = world.engine.retention.rules.take_notices()
    assert first.topics == ["b", "a"]
    messages, size_bytes = trims.messages[key], trims.size_bytes[key]
    assert second == DiskTrim(
        ["a"],
        messages + trims.messages[other] - first.messages,
        size_bytes + trims.size_bytes[other] - first.size_bytes,
    )
    assert first.messages > trims.messages[other]
    assert first.size_bytes > second.size_bytes > 0
    assert world.engine.retention.rules.take_notices() == []
    assert trims.messages[other] == 1


def test_a_replica_follows_the_trim() -> None:
    world = full_world(is_followed=True)
    send_segments(world, 6)
    fill(world)
    world.elapse(60 * SECOND_MS)
    first = world.first("a")
    assert first > 0
    world.fail_over()
    assert world.first("a") == first
    world.restart(power_cut=True)
    assert world.first("a") == first
