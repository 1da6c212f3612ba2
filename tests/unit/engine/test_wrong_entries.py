"""A queue entry that changes after its block was verified: no message is skipped or dropped."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest

from tests.support.worlds.engine_world import GROUP, World
from tests.support.worlds.stored_history import (
    MESSAGES,
    START_MS,
    TOPICS,
    bodies,
    delivered,
    disk_of_history,
    expected,
    restarted,
)
from tidemill.broker.engine.layout.block_file import QUEUE_MAGIC
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.layout.queue_entry import SIZE
from tidemill.broker.engine.store.block_file import open_block_file
from tidemill.broker.engine.store.mappings import Mappings
from tidemill.common.errors import Repairing

# A byte of the entry's log offset and the bits to flip. The entry then points there.
FLIPS = {
    "before the log": (0, 128),
    "far behind the log": (0, 64),
    "behind the log": (4, 1),
    "another segment": (5, 1),
    "two segments away": (5, 2),
    "another record": (6, 8),
    "no begin of a record": (7, 1),
}


class EntryPosition(NamedTuple):
    """A live entry of a queue file."""

    file: str
    position: int  # in the file


def history() -> World:
    return restarted(disk_of_history().after_kill())


@cache
def live_entries() -> list[EntryPosition]:
    """Return the first, middle and last live entry of each block of the two topics."""
    world = history()
    found = []
    for name in world.disk.names("queues"):
        for row in open_block_file(Mappings(world.disk), name, QUEUE_MAGIC, {}).rows():
            key = TopicId(row.key_1), QueueId(row.key_2)
            begin = max(int(world.engine.catalog.queues[key].min_offset), row.first)
            live = range(begin, row.first + row.items)
            if world.engine.catalog.topics[key[0]].name in TOPICS and live:
                chosen = sorted({live[0], live[len(live) // 2], live[-1]})
                found += [
                    EntryPosition(name, row.position + (offset - row.first) * SIZE)
                    for offset in chosen
                ]
    assert len(found) > 10
    return found


def with_wrong_entry(entry: EntryPosition, byte: int, bits: int) -> World:
    """Return a world whose blocks are verified before the entry changes."""
    world = history()
    for queue in world.engine.catalog.queues.values():
        list(queue.walk(queue.min_offset))
    world.disk.damage(entry.file, entry.position + byte, bits=bits)
    return world


def read_all(world: World) -> dict[str, list[int]]:
    """Return the queue offsets that reads in order return. They repeat after a rebuild."""
    found: dict[str, list[int]] = {}
    for topic in TOPICS:
        queue = world.engine.catalog.queue(world.topic(topic), QueueId(0))
        at, found[topic] = int(queue.min_offset), []
        while at < queue.max_offset:
            reader = world.engine.inspection.read(queue, at, max_messages=1_000, max_bytes=1 << 30)
            try:
                while reader.step():
                    pass
            except Repairing:
                world.background()
                continue
            assert reader.next_offset > at, "the read ended before the end of the queue"
            found[topic] += [one.queue_offset for one in reader.take()]
            at = reader.next_offset
    return found


def offsets_by_time(world: World) -> list[tuple[int, ...]]:
    """Return the offsets of both topics at each stored time. Searches repeat after a rebuild."""
    found = []
    for time_ms in range(START_MS, START_MS + MESSAGES + 2):
        offsets: list[int] = []
        for topic in TOPICS:
            stored = world.engine.catalog.find_topic(topic)
            assert stored is not None
            search = world.engine.inspection.look_up_time(stored, time_ms)
            while not search.offsets:
                try:
                    search.step()
                except Repairing:
                    world.background()
                    search = world.engine.inspection.look_up_time(stored, time_ms)
            offsets += search.offsets
        found.append(tuple(offsets))
    return found


def retire_all(world: World) -> None:
    """Let retention drop the oldest segment, which may need a rebuild first."""
    begin = world.engine.log.min_offset
    while world.engine.log.min_offset == begin:
        world.retire()
        world.background()


@pytest.mark.parametrize("flip", FLIPS.values(), ids=FLIPS)
def test_a_consumer_receives_every_message_at_its_first_polls(flip: tuple[int, int]) -> None:
    for entry in live_entries():
        world = with_wrong_entry(entry, *flip)
        assert bodies(delivered(world)) == bodies(expected()), entry
        assert not world.engine.catalog.find_topic(f"%DLQ%{GROUP}"), "the messages are intact"


@pytest.mark.parametrize("flip", FLIPS.values(), ids=FLIPS)
def test_a_read_in_order_returns_every_message(flip: tuple[int, int]) -> None:
    messages = read_all(history())
    for entry in live_entries():
        assert read_all(with_wrong_entry(entry, *flip)) == messages, entry


@pytest.mark.parametrize("flip", FLIPS.values(), ids=FLIPS)
def test_retention_drops_the_same_messages(flip: tuple[int, int]) -> None:
    world = history()
    retire_all(world)
    messages = read_all(world)
    for entry in live_entries():
        world = with_wrong_entry(entry, *flip)
        retire_all(world)
        assert read_all(world) == messages, entry


@pytest.mark.parametrize("flip", FLIPS.values(), ids=FLIPS)
def test_a_search_by_time_finds_the_same_offsets(flip: tuple[int, int]) -> None:
    """Every message is stored at another time, so each search ends at another entry."""
    messages = offsets_by_time(history())
    assert len(set(messages)) > 50
    for entry in live_entries():
        assert offsets_by_time(with_wrong_entry(entry, *flip)) == messages, entry
