"""Combinations of two engine features on one object, each of which failed once."""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

import pytest

from tests.support.disk.quiet import has_pending
from tests.support.worlds.engine_world import TOPIC, World, blob
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.store.consume_queue import ConsumeQueue

DAY_MS = 86_400_000
YEAR_MS = 365 * DAY_MS


def fill_segment(world: World, topic: str = TOPIC) -> None:
    """Send until the log goes on in another segment."""
    start = world.engine.log.segments[-1].start
    while world.engine.log.segments[-1].start == start:
        world.send("filler", topic=topic, size=100_000)


def queue_of(world: World, topic: str = TOPIC) -> ConsumeQueue:
    return world.engine.catalog.queue(TopicId(world.topic(topic)), QueueId(0))


def test_a_search_for_needed_segments_restarts_for_the_next_segment() -> None:
    """It was half done when the oldest one went for its age: the rest told of that one alone."""
    world = World(retention_ms=DAY_MS, checkpoint_log_bytes=64 << 10)
    for name in ("wide-a", "wide-b"):
        world.topic(name, queues=1000)
    world.topic("doomed")
    world.topic(TOPIC)
    fill_segment(world, "doomed")
    world.send("paid-0", "paid-1", "paid-2")
    world.background()
    world.now_ms += DAY_MS - 2_000
    fill_segment(world)
    world.background()
    world.engine.administration.delete_topic("doomed", world.now_ms)
    world.commit()
    world.engine.background.step(world.now_ms, firing_ms=world.now_ms)
    world.now_ms += 3_000
    for _ in range(20):  # Each ends with a look at some of the queues.
        world.background()
    assert world.engine.log.min_offset > 0, "the first has served its time"
    assert queue_of(world).min_offset == 0, "the second has not"


def test_a_segment_that_fills_while_another_goes_is_known_by_its_age() -> None:
    world = World(retention_ms=DAY_MS, checkpoint_log_bytes=64 << 10)
    fill_segment(world)
    world.background()
    world.now_ms += DAY_MS + 1_000
    while world.engine.log.min_offset == 0:
        for file in world.engine.background.step(world.now_ms, firing_ms=world.now_ms) or []:
            file.sync()
        if has_pending(world.engine):
            world.commit()
    fill_segment(world)
    world.background()
    (_, second) = world.engine.log.segments[:2]
    for _ in range(3):
        world.now_ms += DAY_MS
        world.background()
    assert world.engine.log.min_offset >= second.start


def test_a_repaired_queue_file_goes_with_its_segment() -> None:
    world = World(retention_bytes=4 << 20, retention_ms=YEAR_MS, checkpoint_log_bytes=256 << 10)
    for n in range(150):
        world.send(f"m{n}", size=20_000)
        world.background()
    queue = queue_of(world)
    file = queue._files[0]
    file._verified[:] = bytes(len(file._verified))
    world.disk.damage(file.name, file.row(0).position)
    with pytest.raises(BlockFileDamaged):
        queue.entry(queue.min_offset)
    world.background()
    assert world.engine.rebuilds.counts["queues"] == 1
    while world.engine.log.min_offset < file.to_offset:
        world.send("more", size=20_000)
        world.background()
    assert file.name not in world.disk.names("queues")
    count = len(world.disk.names("queues"))
    world.restart()
    assert len(world.disk.names("queues")) == count
    assert world.report.snapshot


def test_held_deliveries_continue_after_retention_deletes_the_damaged_file() -> None:
    world = World()
    world.group()
    world.send("m0", "m1")
    world.checkpoint()
    world.pop(2, invisible_ms=1_000)
    queue = queue_of(world)
    file = queue._files[0]
    file._verified[:] = bytes(len(file._verified))
    original = world.disk.read(file.name) or b""
    world.disk.damage(file.name, file.row(0).position)
    world.advance(1_001)
    assert world.engine.consumption.reviver._awaiting_mend, "it waits for the repair"
    # As if retention had been faster: the file is gone from the folder when its repair begins.
    folder = world.engine.checkpoints.queues_folder
    known, folder._names = folder._names, {}
    list(world.engine.rebuilds.rebuild())
    folder._names = known
    assert not world.engine.consumption.reviver._awaiting_mend
    world.disk.open(file.name).write_at(0, [original])
    world.run_due()
    assert sorted(world.bodies()) == ["m0", "m1"]


def test_a_message_that_fits_into_no_segment_any_more_ends_no_life() -> None:
    world = World(segment_bytes=2 << 20)
    world.group(max_attempts=1)
    world.send("big", size=1_500_000)
    world.pop(1, invisible_ms=1_000)
    world.config = replace(world.config, segment_bytes=1 << 20)
    world.restart()
    world.advance(1_100)
    assert world.bodies() == []
    assert world.bodies(group="auditor", topic="%DLQ%billing") == [""]


def test_an_ordered_redelivery_keeps_to_the_filter_whatever_was_out_together() -> None:
    world = World()
    world.group("ord", is_ordered=True)
    for n in range(4):
        world.send(f"a{n}", tag="a")
    world.send("b0", tag="b")
    assert world.bodies(4, group="ord", invisible_ms=1_000) == ["a0", "a1", "a2", "a3"]
    world.advance(1_100)
    assert world.bodies(1, group="ord", invisible_ms=1_000, tags=("a",)) == ["a0"]
    world.advance(1_100)
    (popped,) = world.pop(group="ord", invisible_ms=1_000, tags=("b",))
    assert popped.body == "b0"
    world.ack(popped)
    world.advance(1_100)
    assert world.bodies(group="ord") == []


def test_a_look_up_brings_the_newest_first_also_out_of_files() -> None:
    world = World()
    topic_id = TopicId(world.topic())
    for n in range(55):
        data = blob(f"m{n}", keys=("k",))
        world.engine.commands.send(
            topic_id, QueueId(0), data, crc32(data), now_ms=world.now_ms, firing_ms=world.now_ms
        )
        if n == 49:
            world.commit()
            world.checkpoint()
    world.commit()
    topic = world.engine.catalog.find_topic(TOPIC)
    assert topic is not None
    assert [found.queue_offset for found in world.find(topic, key="k")] == list(range(54, 22, -1))
