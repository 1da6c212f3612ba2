"""Background work among commands: between two slices of it anything may happen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.quiet import has_pending
from tests.support.worlds.engine_world import GROUP, TOPIC, World
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.store.log_opening import LogOpening
from tidemill.broker.engine.store.mappings import Mappings

DAY_MS = 86_400_000
FIFO = "fifo"


def fill(world: World, mebibytes: int) -> None:
    for n in range(mebibytes * 8):
        world.send(f"filler{world.now_ms}-{n}", topic="filler", size=130_000)


def keep_only_the_log(world: World) -> None:
    lose(world, "queues", "index", "snapshots")


def lose(world: World, *folders: str) -> None:
    """Restart without some derived files."""
    disk = world.disk.after_kill()
    for folder in folders:
        for name in disk.names(folder):
            disk.remove(name)
    world.disk = disk
    world.open()


def interleave(world: World, steps: Iterable[list[File]], between: Callable[[], None]) -> None:
    """Run background work with a round after each slice."""
    for files in steps:
        for file in files:
            file.sync()
        if has_pending(world.engine):
            world.commit()
        between()


def once(command: Callable[[], None]) -> Callable[[], None]:
    """Make a round that does something the first time only."""
    commands = [command]
    return lambda: commands.pop()() if commands else None


def delete_topic(world: World, name: str) -> None:
    world.engine.administration.delete_topic(name, world.now_ms)
    world.commit()


def world_about_to_retire() -> World:
    world = World(retention_bytes=2 << 20)
    for n in range(5):
        world.topic(f"topic-{n}")
    fill(world, 4)
    world.checkpoint()
    return world


@pytest.mark.parametrize("restart", [World.restart, keep_only_the_log])
def test_a_topic_deleted_while_state_is_stated_again_stays_deleted(
    restart: Callable[[World], None],
) -> None:
    world = world_about_to_retire()
    steps = world.engine.retention.retire_oldest(world.now_ms)
    interleave(world, steps, once(lambda: delete_topic(world, "topic-4")))
    fill(world, 1)
    world.checkpoint()
    restart(world)
    assert world.engine.catalog.find_topic("topic-4") is None


def test_a_topic_changed_while_state_is_stated_again_stays_changed() -> None:
    world = world_about_to_retire()

    def change() -> None:
        world.engine.administration.put_topic(
            "topic-4", type_=TopicType.DELAY, queues=0, now_ms=world.now_ms
        )
        world.commit()

    interleave(world, world.engine.retention.retire_oldest(world.now_ms), once(change))
    keep_only_the_log(world)
    topic = world.engine.catalog.find_topic("topic-4")
    assert topic is not None
    assert topic.type is TopicType.DELAY


def test_configuration_from_a_snapshot_is_rewritten_before_retention_deletes_it() -> None:
    """A start from a snapshot does not know which record states a topic."""
    world = World(retention_bytes=2 << 20)
    world.topic("quiet")
    world.group("patient", max_attempts=5)
    fill(world, 2)
    world.checkpoint()
    world.restart()
    fill(world, 1)
    world.background()
    assert world.engine.log.min_offset > 0
    keep_only_the_log(world)
    assert world.engine.catalog.find_topic("quiet") is not None
    assert world.engine.catalog.find_group("patient") is not None


def test_an_emptied_queue_keeps_its_offsets_after_snapshots_are_lost() -> None:
    """Else new messages would get offsets that the group has behind it, and never be delivered."""
    world = World(retention_bytes=2 << 20)
    world.send("q0", "q1", topic="quiet")
    world.ack(*world.pop(2, topic="quiet"))
    for _ in range(2):
        fill(world, 3)
        world.background()
    world.checkpoint()
    lose(world, "snapshots")
    world.send("q2", topic="quiet")
    assert world.bodies(topic="quiet") == ["q2"]


def test_an_ack_between_two_slices_of_a_snapshot_counts_though_its_slot_is_used_again() -> None:
    """The ordered queue is in an earlier section, the later use of the slot in a later one."""
    world = World()
    world.group(FIFO, is_ordered=True)
    world.group()
    world.send("m0", "m1", "m2")
    ordered = world.pop(1, group=FIFO, invisible_ms=5_000)

    def settle_and_use_again() -> None:
        unfinished = world.disk.read("snapshots/unfinished") or b""
        if b'"pending": [[0, 1]]' in unfinished and world.ack(*ordered) == [AckResult.APPLIED]:
            again = world.pop(3)
            assert again[0].delivery.slot == ordered[0].delivery.slot

    interleave(world, world.engine.checkpoints.write(), settle_and_use_again)
    world.restart()
    world.advance(60_000)
    assert world.bodies(1, group=FIFO) == ["m1"]


def test_a_delivery_that_begins_and_ends_between_two_slices_is_settled_after_a_restart() -> None:
    world = World()
    world.group(FIFO, is_ordered=True)
    world.group()
    world.send("m0", "m1", "m2")
    world.ack(*world.pop(1, group=FIFO))
    commands = [1]

    def pop_settle_and_use_again() -> None:
        unfinished = world.disk.read("snapshots/unfinished") or b""
        if b'"pending": []' in unfinished and commands:
            commands.clear()
            (ordered,) = world.pop(1, group=FIFO, invisible_ms=5_000)
            world.ack(ordered)
            again = world.pop(3)
            assert again[0].delivery.slot == ordered.delivery.slot

    interleave(world, world.engine.checkpoints.write(), pop_settle_and_use_again)
    assert not commands
    world.restart()
    world.advance(60_000)
    assert world.bodies(1, group=FIFO) == ["m2"]


def test_changes_between_checkpoint_slices_survive_a_restart() -> None:
    """The catalog and the ends of the queues are written in slices, all as of one moment."""
    world = World(segment_bytes=8 << 20)
    put = world.engine.administration.put_topic
    for n in range(1_200):
        put(f"topic-{n}", type_=TopicType.NORMAL, queues=1, now_ms=world.now_ms)
    world.commit()
    rounds = 0

    def go_on() -> None:
        nonlocal rounds
        world.send(f"m{rounds}", topic=f"topic-{rounds}")
        delete_topic(world, f"topic-{1_199 - rounds}")
        world.topic(f"new-{rounds}")
        rounds += 1

    interleave(world, world.engine.checkpoints.write(), go_on)
    assert rounds > 12
    world.restart()
    assert world.report.snapshot
    catalog = world.engine.catalog
    for n in range(rounds):
        assert world.bodies(topic=f"topic-{n}", group=f"group-{n}") == [f"m{n}"]
        assert catalog.find_topic(f"topic-{1_199 - n}") is None
        assert catalog.find_topic(f"new-{n}") is not None
    assert len(catalog.topics) == 1_200


def test_queues_that_are_first_read_during_a_snapshot_do_not_end_it() -> None:
    world = World(deliveries_max=600)
    world.group(FIFO, is_ordered=True)
    world.topic("wide", queues=500)

    def pop() -> None:
        if world.disk.read("snapshots/unfinished") is not None:
            world.pop(1, group=FIFO, topic="wide")

    interleave(world, world.engine.checkpoints.write(), pop)
    world.restart()
    assert world.report.snapshot


def test_an_ordered_group_that_was_reset_is_in_order_though_it_is_stated_later() -> None:
    """A replay that begins behind the group's record meets the reset first."""
    world = World(retention_bytes=2 << 20)
    world.group(FIFO, is_ordered=True)
    world.topic()
    fill(world, 1)
    world.send("the first of the next segment", topic="filler", size=130_000)
    world.engine.administration.reset_offset(FIFO, TOPIC, ResetTarget(earliest=True), world.now_ms)
    world.commit()
    fill(world, 1)
    world.background()
    assert world.engine.log.min_offset == 1 << 20
    keep_only_the_log(world)
    world.send("m0", "m1")
    assert world.bodies(1, group=FIFO) == ["m0"]
    assert world.bodies(1, group=FIFO) == []


@pytest.mark.parametrize("restarts", [False, True])
def test_voided_deliveries_stay_void_after_retention_deletes_the_reset(restarts: bool) -> None:
    world = World(retention_bytes=2 << 20)
    world.send("m0", "m1", "m2")
    void = world.pop(2, invisible_ms=DAY_MS)
    world.engine.administration.reset_offset(GROUP, TOPIC, ResetTarget(latest=True), world.now_ms)
    world.commit()
    fill(world, 2)
    world.send("n0", "n1")
    world.pop(1, invisible_ms=DAY_MS)
    if restarts:
        world.restart()
    fill(world, 1)
    world.background()
    assert world.engine.log.min_offset > 0
    keep_only_the_log(world)
    assert world.ack(void[0]) == [AckResult.GONE]


@pytest.mark.parametrize("records", [8, 30, 100])
def test_the_log_may_roll_at_any_slice_of_preparing_and_dropping(records: int) -> None:
    disk = FaultyDisk(Random(records))
    log = CommitLog(disk, Mappings(disk), segment_bytes=4096)
    offsets: list[int] = []

    def append() -> None:
        offsets.extend(log.append(RecordKind.STATE, b"b" * 100, 0) for _ in range(records))
        log.write()
        log_offset, files = log.begin_sync()
        for file in files:
            file.sync()
        log.note_synced(log_offset)

    append()
    for steps in (log.prepare(slice_bytes=1024), log.prepare(slice_bytes=4096), log.drop_oldest()):
        if len(log.segments) == 1:
            append()
        for files in steps:
            for file in files:
                file.sync()
            append()
    disk = disk.after_power_cut()
    again = CommitLog(disk, Mappings(disk), segment_bytes=4096)
    opening = LogOpening(again, disk, Mappings(disk))
    opening.find_segments(durable_offset=0)
    found = [one.log_offset for one in opening.scan(again.min_offset)]
    assert found == [offset for offset in offsets if offset >= log.min_offset]


def test_a_segment_whose_name_is_not_durable_yet_is_not_written_to() -> None:
    """A power cut could take the name back, and all that was synced into the segment with it."""
    for seed in range(20):
        disk = FaultyDisk(Random(seed))
        log = CommitLog(disk, Mappings(disk), segment_bytes=4096)
        offsets = [log.append(RecordKind.STATE, b"b" * 100, 0) for _ in range(20)]
        log.write()
        log_offset, files = log.begin_sync()
        for file in files:
            file.sync()
        log.note_synced(log_offset)
        for _ in log.prepare(slice_bytes=4096):
            if log._next.is_ready:  # Renamed, and its folder not synced.
                offsets += [log.append(RecordKind.STATE, b"b" * 100, 0) for _ in range(20)]
                log.write()
                log_offset, files = log.begin_sync()
                for file in files:
                    file.sync()
                log.note_synced(log_offset)
                break
        disk = disk.after_power_cut()
        again = CommitLog(disk, Mappings(disk), segment_bytes=4096)
        opening = LogOpening(again, disk, Mappings(disk))
        opening.find_segments(durable_offset=0)
        assert [one.log_offset for one in opening.scan(LogOffset(0))] == offsets
