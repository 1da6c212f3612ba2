"""Pages that become unreadable while the broker runs: only the records on them are damaged.

Each scenario has a process of its own, because touching such a page of a mapping kills the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from zlib import crc32

import pytest

from tests.support.disk.faulty_disk import BLOCK, FaultyDisk
from tests.support.processes.own_process import in_own_process
from tests.support.worlds.engine_world import GROUP, World, blob
from tests.support.worlds.timer_world import DAY_MS, HOUR_MS, SECOND_MS, TIMERS, TimerWorld
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.store.mappings import PAGE_BYTES, Mappings

OLDEST = "log/00000000000000000000.log"
PAGE = 3
COUNT = 30
SIZE = 1_000
SEGMENT = 64 << 10


def world_of_an_earlier_life() -> World:
    """Make a world without records to replay, and spoil a page of its oldest segment."""
    world = World(FaultyDisk(Random(0)), segment_bytes=SEGMENT)
    world.group()
    for n in range(COUNT):
        data = blob(f"m{n}", keys=(f"k{n}",), size=SIZE)
        world.engine.commands.send(
            TopicId(world.topic()),
            QueueId(0),
            data,
            crc32(data),
            now_ms=world.now_ms,
            firing_ms=world.now_ms,
        )
    world.commit()
    world.checkpoint()
    world.restart()
    # The start has read the bytes around the log end, and they stay readable.
    world.engine.mappings.forget(OLDEST)
    world.disk.spoil(OLDEST, PAGE)
    return world


def on_the_page(world: World) -> list[int]:
    """Return the queue offsets of the messages that are on the page, in part or whole."""
    queue = world.engine.catalog.queue(world.topic(), QueueId(0))
    begin, end = PAGE * BLOCK, (PAGE + 1) * BLOCK
    return [n for n in range(COUNT) if queue.entry(n)[0] < end and sum(queue.entry(n)[:2]) > begin]


def messages_are_dead_letters() -> None:
    world = world_of_an_earlier_life()
    lost = on_the_page(world)
    assert 3 < len(lost) < 8
    popped = world.pop(COUNT)
    assert [one.offset for one in popped] == [n for n in range(COUNT) if n not in lost]
    world.run_due()
    dead = world.pop(COUNT, group="undertaker", topic=f"%DLQ%{GROUP}")
    assert [one.body for one in dead] == [""] * len(lost)
    world.ack(*popped)
    world.restart()
    assert world.pop(COUNT) == [], "the next process continues"


def a_look_up_finds_the_others() -> None:
    world = world_of_an_earlier_life()
    topic = world.engine.catalog.find_topic("orders")
    assert topic is not None
    lost = on_the_page(world)
    for n in range(COUNT):
        assert len(world.find(topic, key=f"k{n}")) == (n not in lost)


def a_repaired_queue_file_says_where_the_others_are() -> None:
    world = world_of_an_earlier_life()
    lost = on_the_page(world)
    (name, *_) = world.disk.names("queues")
    world.disk.spoil(name, 0)
    world.engine.mappings.forget(name)
    assert world.pop(COUNT) == []
    world.background()
    popped = [one.offset for one in world.pop(COUNT)]
    assert set(popped) == set(range(COUNT)) - set(lost)


def timers_are_copied_past_it() -> None:
    timer = replace(TIMERS, flush_log_bytes=10 << 20, evacuation_lead_ms=0)
    world = UncheckedWorld(
        FaultyDisk(Random(0)),
        timer=timer,
        segment_bytes=32 << 10,
        retention_ms=DAY_MS,
        checkpoint_log_bytes=8_000,
    )
    for n in range(COUNT):
        world.schedule(f"t{n}", delay_ms=5 * DAY_MS, size=400)
    while len(world.engine.log.segments) < 4:
        world.send("filler", size=8_000, topic="other")
    world.sleep(12 * SECOND_MS)
    world.background()
    world.checkpoint()
    world.restart()
    world.disk.spoil(OLDEST, 1)
    assert OLDEST not in world.engine.mappings
    for _ in range(2):
        world.now_ms += DAY_MS + HOUR_MS
        for _ in range(4):
            world.sleep(2 * SECOND_MS)
            world.checkpoint()
            world.background()
    assert world.engine.log.min_offset > 0
    world.advance(5 * DAY_MS)
    world.group()
    found = world.drain()
    assert COUNT - 9 < len(found) < COUNT - 3
    dead = world.drain(topic="%DLQ%TIMER")
    assert dead == [""] * (COUNT - len(found))


def chains_are_made_again() -> None:
    world = UncheckedWorld(FaultyDisk(Random(0)), timer=TIMERS)
    world.group()
    for n in range(COUNT * 10):
        world.schedule(f"t{n}", delay_ms=HOUR_MS + n * SECOND_MS, size=10)
    world.sleep(12 * SECOND_MS)
    world.background()
    world.checkpoint()
    world.restart()
    (name, *_) = world.disk.names("timer/timerlog")
    world.disk.spoil(name, 1)
    world.engine.mappings.forget(name)
    for _ in range(8):
        world.advance(HOUR_MS // 4)
        world.background()
    assert len(world.drain()) == COUNT * 10


class UncheckedWorld(TimerWorld):
    """A world whose log has lost records. It is not checked against a model."""

    def judge(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    "scenario",
    [
        messages_are_dead_letters,
        a_look_up_finds_the_others,
        a_repaired_queue_file_says_where_the_others_are,
        timers_are_copied_past_it,
        chains_are_made_again,
    ],
)
def test_an_unreadable_page_damages_only_the_messages_on_it(scenario: Callable[[], None]) -> None:
    in_own_process(scenario)


def test_the_neighbours_of_a_bad_page_are_read_and_every_page_once() -> None:
    disk = FaultyDisk(Random(0))
    name, count = "log/file", 40
    disk.open(name, create=True).write_at(0, [b"x" * (count * PAGE_BYTES - 1)])
    disk.spoil(name, 20)
    mappings = Mappings(disk)
    whole = mappings.salvage(name, 0, count * PAGE_BYTES)
    assert len(whole) == count * PAGE_BYTES - 1
    assert [page for page in range(count) if not whole[page * PAGE_BYTES]] == [20]
    disk.unreadable.add(name)
    assert len(mappings.readable(name, 21 * PAGE_BYTES, 19 * PAGE_BYTES)) == len(whole)
    mappings.forget(name)
    assert not any(mappings.salvage(name, 0, PAGE_BYTES))
