"""Positions for readers of events: only true begins of records, never bytes inside a body."""

from __future__ import annotations

from zlib import crc32

import pytest

from tests.support.worlds.engine_world import World, blob
from tests.unit.engine.test_events import read, small
from tidemill.broker.engine.events import record_starts
from tidemill.broker.engine.layout import message, record
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.store.segment import Record


def place_of(world: World, position: int) -> int:
    search = world.engine.events.record_starts.search(position)
    while search.step():
        pass
    return search.found


def is_place(world: World, position: int) -> bool:
    return place_of(world, position) == position


def records(world: World) -> list[tuple[int, int]]:
    """Return the begin and the end of each record."""
    log = world.engine.log
    found = log.walk_between(log.min_offset, log.committed_offset)
    heads = [one.header for one in found if isinstance(one, Record)]
    return [(one.log_offset, one.log_offset + one.size) for one in heads]


def forged(topic_id: int, at: int) -> bytes:
    """Return bytes that form a valid record of the log at `at`."""
    inner, body = blob("x", message_id="FORGED"), message.PLACE.pack(topic_id, 0, 0, 0)
    head_size = record.HEADER_SIZE + len(body)
    covered = record.COVERED.pack(
        head_size + len(inner), crc32(inner), 1, 2, 0, 1, 1, at, 0, head_size
    )
    prefix = record.PREFIX.pack(record.MAGIC, crc32(covered + body))
    return prefix + covered + body + inner


def test_every_record_begin_is_a_position_and_nothing_inside_a_record_is() -> None:
    world = small()
    for n in range(4):
        world.send(*[f"{n}-{m}" for m in range(40)], size=200)
    assert len(world.engine.log.segments) > 1
    for _ in range(2):
        for start, end in records(world):
            assert is_place(world, start)
            assert place_of(world, start + 4) == end
        assert is_place(world, world.engine.log.committed_offset)
        for segment in world.engine.log.segments:
            assert is_place(world, segment.start)
        world.restart()


def test_a_body_that_looks_like_a_record_is_not_a_position() -> None:
    world = World()
    topic_id = world.topic()
    carried = forged(topic_id, 0)
    around = len(blob("z" * len(carried), message_id="carrier")) - len(carried)
    begin = int(world.engine.log.log_end)
    at = begin + record.HEADER_SIZE + message.PLACE_SIZE + around
    data = blob("z" * len(carried), message_id="carrier")[:around] + forged(topic_id, at)
    world.engine.commands.send(
        topic_id, QueueId(0), data, crc32(data), now_ms=world.now_ms, firing_ms=world.now_ms
    )
    world.commit()
    assert [one.message_id for one in read(world, begin=at)] == ["FORGED"], (
        "the check would accept it"
    )
    assert place_of(world, at) == world.engine.log.committed_offset
    assert is_place(world, begin)


def test_a_returned_position_is_not_searched_again() -> None:
    world = World()
    world.send(*[str(n) for n in range(4 * record_starts.RECORDS_A_STEP)])
    last = records(world)[-1][0]
    search = world.engine.events.record_starts.search(last)
    assert search.step(), "it takes more than a slice"
    world.engine.events.record_starts.note(last)
    search = world.engine.events.record_starts.search(last)
    assert not search.step()
    assert search.found == last
    for n in range(record_starts.KNOWN_MAX):
        world.engine.events.record_starts.note(n)
    assert world.engine.events.record_starts.search(last).step(), "no more than this number is kept"


def slices(world: World, position: int) -> int:
    """Return the number of slices until a position is found."""
    search, count = world.engine.events.record_starts.search(position), 1
    while search.step():
        count += 1
    assert search.found >= position
    return count


def test_a_walk_leaves_marks_for_later_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each position would cost a walk from the begin of its segment."""
    monkeypatch.setattr(record_starts, "MARK_BYTES", 1 << 14)
    monkeypatch.setattr(record_starts, "RECORDS_A_STEP", 8)
    world = World()
    world.send(*[str(n) for n in range(1000)], size=500)
    found = records(world)
    last, end = found[-1]
    assert slices(world, last + 4) > 100
    for start, behind in found[::50]:
        assert slices(world, start + 4) <= (1 << 14) // (behind - start) // 8 + 1
        assert place_of(world, start + 4) == behind
        assert is_place(world, start)
    assert place_of(world, last + 4) == end


def test_marks_are_bounded_and_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_starts, "MARK_BYTES", 1 << 12)
    monkeypatch.setattr(record_starts, "MARKS_MAX", 4)
    monkeypatch.setattr(record_starts, "RECORDS_A_STEP", 8)
    world = World()
    world.send(*[str(n) for n in range(200)], size=500)
    found = records(world)
    far = slices(world, found[-1][0] + 4)
    assert slices(world, found[-2][0] + 4) < far
    # Marks of the first half are dropped, and its positions are found all the same.
    for start, behind in found:
        assert place_of(world, start + 4) == behind
