"""Messages of a queue are read in order, in bounded slices, and nobody consumes them by it."""

from __future__ import annotations

from zlib import crc32

from tests.support.bodies import body_of
from tests.support.disk.counted_work import Meter
from tests.support.worlds.engine_world import World, blob
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.queries.inspection import READ_A_STEP, FoundMessage, QueueRead
from tidemill.broker.engine.tally import SLICE_BYTES

SIZE = 2 << 20  # of a large message


def read_of(
    world: World, from_offset: int = 0, *, max_messages: int = 1_000, max_bytes: int = 64 << 20
) -> QueueRead:
    topic = world.engine.catalog.topics[world.topic()]
    queue = world.engine.catalog.queues_of(topic)[0]
    return world.engine.inspection.read(
        queue, from_offset, max_messages=max_messages, max_bytes=max_bytes
    )


def all_of(read: QueueRead) -> list[FoundMessage]:
    found, has_more = [], True
    while has_more:
        has_more = read.step()
        found += read.take()
    return found


def test_a_queue_is_read_in_its_order_and_nothing_is_consumed() -> None:
    world = World()
    for n in range(5):
        world.send(f"m{n}")
    read = read_of(world, 1, max_messages=3)
    found = all_of(read)
    assert [body_of(one.blob) for one in found] == [b"m1", b"m2", b"m3"]
    assert [one.queue_offset for one in found] == [1, 2, 3]
    assert (read.next_offset, read.bounds()) == (4, (0, 5))
    assert world.bodies() == ["m0", "m1", "m2", "m3", "m4"]


def test_a_read_behind_the_end_finds_nothing_and_says_where_the_end_is() -> None:
    world = World()
    world.send("m0")
    read = read_of(world, 7)
    assert (all_of(read), read.next_offset) == ([], 1)


def test_a_read_ends_with_the_message_beyond_its_bytes_and_takes_one_large_one_a_slice() -> None:
    world = World(segment_bytes=64 << 20)
    topic_id = world.topic()
    for n in range(6):
        data = blob(f"m{n}", size=SIZE)
        world.engine.commands.send(topic_id, QueueId(0), data, crc32(data), now_ms=1, firing_ms=1)
    world.commit()
    meter = Meter(world.engine)
    read = read_of(world, max_bytes=3 * SIZE)
    found, has_more = [], True
    while has_more:
        has_more = read.step()
        assert meter.take().size_bytes <= SLICE_BYTES + SIZE + 4096
        found += read.take()
    assert (len(found), read.next_offset) == (3, 3)


def test_a_slice_reads_a_bounded_number_of_messages() -> None:
    world = World()
    for n in range(3 * READ_A_STEP):
        world.send(f"m{n}")
    meter = Meter(world.engine)
    read = read_of(world)
    while read.step():
        assert meter.take().items <= READ_A_STEP
    assert len(read.take()) == 3 * READ_A_STEP
