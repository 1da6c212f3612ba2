"""The state floor: old records go although messages between them are live."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.disk.quiet import has_pending
from tests.support.worlds.engine_world import World
from tests.support.worlds.packed_worlds import (
    SEGMENT,
    floors,
    forget_derived_files,
    move_floor,
    pack_all,
    small_world,
    used,
)
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.events.event import EventQuery
from tidemill.broker.engine.metadata.topic_retention import RetentionChange
from tidemill.broker.engine.pop.deliveries import AckResult

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
PACK_BYTES = 4_096 + 1_000  # the header of a pack, and a small message with gaps around it


def slow_world(segments: int = 12, **changes: object) -> tuple[World, list[str]]:
    """Make a world with one message to keep in each segment, between messages that are acked."""
    world = World(segment_bytes=SEGMENT, checkpoint_log_bytes=SEGMENT, **changes)  # type: ignore[arg-type]  # checked by World
    world.engine.administration.put_topic(
        "kept", type_=None, queues=1, retention=RetentionChange(ms=-1), now_ms=world.now_ms
    )
    world.commit()
    kept: list[str] = []
    while len(world.engine.log.segments) < segments:
        before = len(world.engine.log.segments)
        kept.append(f"kept {before}")
        world.send(kept[-1], topic="kept")
        while len(world.engine.log.segments) == before:
            world.send("gone", topic="gone", size=300)
            world.ack(*world.pop(32, topic="gone"))
    world.checkpoint()
    return world, kept


def age(world: World, duration_ms: int) -> None:
    for _ in range(duration_ms // HOUR_MS):
        world.advance(HOUR_MS)
        world.background()


def test_a_slow_consumer_holds_its_messages_and_nothing_else() -> None:
    world, kept = slow_world(retention_ms=DAY_MS)
    whole = used(world)
    age(world, 4 * DAY_MS)
    log = world.engine.log
    assert log.min_offset == 0, "the first message is unread"
    assert log.state_floor >= log.segments[-3].start
    assert used(world) <= len(kept) * PACK_BYTES + 4 * SEGMENT < whole // 2
    forget_derived_files(world)
    world.open()
    assert world.drain(topic="kept") == kept
    assert world.drain(topic="gone") == []


def test_events_are_kept_as_long_as_the_setting_says() -> None:
    """Also if all messages before them are dead."""
    world, _ = slow_world(retention_ms=DAY_MS, event_retention_ms=10 * DAY_MS)
    world.purge("kept")
    age(world, 5 * DAY_MS)
    assert world.engine.log.state_floor == 0
    read = world.engine.events.read(
        EventQuery(), from_position=0, log_bytes_max=1 << 40, events_max=1 << 30
    )
    while read.step():
        pass
    assert read.gone_from == 0
    age(world, 6 * DAY_MS)
    assert world.engine.log.min_offset > 0


def test_a_reader_of_events_begins_at_the_state_floor() -> None:
    world, _ = slow_world(retention_ms=400 * DAY_MS)
    floor = floors(world)[3]
    move_floor(world, floor)
    world.purge("gone")
    assert pack_all(world)
    read = world.engine.events.read(
        EventQuery(), from_position=1, log_bytes_max=1 << 40, events_max=1 << 30
    )
    while read.step():
        pass
    assert read.gone_from == 1
    assert min(one.position for one in read.take()) >= floor


@pytest.mark.parametrize("power_cut", [False, True])
def test_a_stop_at_any_operation_of_a_floor_and_its_packs_loses_nothing(*, power_cut: bool) -> None:
    """A delivery in flight stays in flight, and an acked one stays acked."""
    step, is_done = 0, False
    while not is_done:
        world = small_world(FaultyDisk(Random(step)))
        for n in range(40):
            world.send(f"kept {n}", topic="kept")
            world.send(f"gone {n}", topic="gone", size=4_000)
        first, second = world.pop(2, topic="kept", invisible_ms=DAY_MS)
        world.ack(first)
        world.purge("gone")
        world.checkpoint()
        world.disk.cut_at = len(world.disk.operations) + step
        try:
            move_floor(world, floors(world)[-1])
            assert pack_all(world)
            is_done = True
        except PowerCut:
            step += 1
        if step % 2:
            world.restart(power_cut=power_cut)
        else:
            world.disk = world.disk.after_power_cut() if power_cut else world.disk.after_kill()
            forget_derived_files(world)
            world.open()
        assert world.drain(topic="gone") == []
        assert world.drain(topic="kept") == [f"kept {n}" for n in range(2, 40)]
        assert world.ack(first) != [AckResult.APPLIED]
        assert world.ack(second) == [AckResult.APPLIED]
    assert step >= 10


def test_a_fifo_group_gets_the_messages_behind_its_last_batch_again() -> None:
    """They are pending although the newest delivery does not name them."""
    world = small_world()
    world.group("fifo", is_ordered=True, max_attempts=16)
    world.send(*[f"m{n}" for n in range(6)], topic="kept")
    assert len(world.pop(6, group="fifo", topic="kept", invisible_ms=10_000)) == 6
    while len(world.engine.log.segments) < 4:
        world.send("gone", topic="gone", size=4_000)
    world.advance(11_000)
    [batch] = world.pop(1, group="fifo", topic="kept", invisible_ms=10_000)
    world.purge("gone")
    world.checkpoint()
    move_floor(world, floors(world)[0])
    assert pack_all(world)
    forget_derived_files(world)
    world.open()
    world.ack(batch)
    again = world.pop(6, group="fifo", topic="kept", invisible_ms=10_000)
    assert [one.body for one in again] == [f"m{n}" for n in range(1, 6)]


def test_a_topic_that_only_later_records_than_the_snapshot_create_keeps_its_messages() -> None:
    """The queue files reach further than the snapshot, as when the disk had no room for a newer."""
    world = small_world()
    world.send("a", topic="first")
    world.checkpoint()
    texts = [f"m{n}" for n in range(50)]
    for text in texts:
        world.send(text, topic="second", size=2_000)
    known = world.disk.names("snapshots")
    world.checkpoint()
    world.disk = world.disk.after_kill()
    for name in world.disk.names("snapshots"):
        if name not in known:
            world.disk.remove(name)
    world.open()
    assert world.drain(topic="second") == texts


def fifo_world() -> World:
    world = small_world()
    world.group("fifo", is_ordered=True)
    world.send("a", "b", topic="orders")
    return world


def fill(world: World, count: int) -> None:
    for _ in range(count):
        world.send("filler", topic="gone", size=4_000)


def test_an_ack_while_the_floor_moves_is_not_lost() -> None:
    """After the statement of deliveries, and before that of progress or behind it."""
    for moment in range(40):
        world = fifo_world()
        popped = world.pop(2, group="fifo", topic="orders", invisible_ms=HOUR_MS)
        fill(world, 60)
        world.checkpoint()
        steps = world.engine.retention.move_floor(floors(world)[0], world.now_ms)
        for n, files in enumerate(steps):
            for file in files:
                file.sync()
            if n == moment:
                world.ack(*popped)
            if has_pending(world.engine):
                world.commit()
        if n < moment:
            break
        world.purge("gone")
        assert pack_all(world)
        forget_derived_files(world)
        world.open()
        assert world.bodies(group="fifo", topic="orders") == []
    assert moment > 4


def test_a_batch_between_two_floors_is_settled_for_good() -> None:
    """The first floor states the progress behind the second one, and the batch is not stated."""
    world = fifo_world()
    world.ack(*world.pop(1, group="fifo", topic="orders", invisible_ms=HOUR_MS))
    reset = ResetTarget(earliest=True, latest=False)
    world.engine.administration.reset_offset("fifo", "orders", reset, world.now_ms)
    world.commit()
    fill(world, 20)
    popped = world.pop(2, group="fifo", topic="orders", invisible_ms=HOUR_MS)
    fill(world, 60)
    world.checkpoint()
    first, second = floors(world)[:2]
    assert first <= popped[0].delivery.delivery_id < second
    move_floor(world, first)
    world.ack(*popped)
    fill(world, 10)
    world.checkpoint()
    move_floor(world, second)
    world.purge("gone")
    assert pack_all(world)
    forget_derived_files(world)
    world.open()
    assert world.bodies(group="fifo", topic="orders") == []
