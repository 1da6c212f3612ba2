"""Groups that start at the latest message: their begins at broker groups."""

from __future__ import annotations

from zlib import crc32

from tests.support.disk.log_checker import records_of
from tests.support.worlds.engine_world import World, blob
from tests.unit.engine.test_broker_groups import following, founded, note_begun, send_configuration
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.store.consume_queue import ConsumeQueue

HOUR_MS = 3_600_000
QUEUES = 256


def latest(home: World) -> None:
    home.engine.administration.put_group("latest", start_from_latest=True, now_ms=home.now_ms)
    home.commit()


def exchange(follower: World, home: World) -> None:
    send_configuration(follower, home)
    for group in follower.engine.following.take_unreported_beginnings():
        note_begun(home, group)


def test_deleted_topics_do_not_count_for_the_limit_of_a_group() -> None:
    home, follower = founded(), following()
    latest(home)
    for n in range(130):
        home.topic(f"day{n}")
        home.pop(1, group="latest", topic=f"day{n}")
        home.engine.administration.delete_topic(f"day{n}", home.now_ms)
        home.commit()
    home.topic("orders")
    exchange(follower, home)
    home.pop(1, group="latest", topic="orders")
    for world in (home, follower):
        world.advance(60_000)
    exchange(follower, home)
    follower.send("since", topic="orders")
    follower.advance(60_000)
    assert [one.body for one in follower.pop(9, group="latest", topic="orders")] == ["since"]


def test_a_begin_does_not_apply_to_the_next_topic_with_the_same_id() -> None:
    home, follower = founded(), following()
    latest(home)
    backup = home.disk.after_power_cut()
    home.topic("old")
    send_configuration(follower, home)
    home.pop(1, group="latest", topic="old")
    send_configuration(follower, home)
    follower.advance(HOUR_MS)
    restored = World(backup, config=home.config, now_ms=home.now_ms + HOUR_MS)
    restored.topic("new")
    number = restored.engine.catalog.topic_ids["new"]
    assert number == home.engine.catalog.topic_ids["old"]
    exchange(follower, restored)
    for world in (restored, follower):
        group = world.engine.catalog.find_group("latest")
        assert group is not None
        assert group.begun == ()
        world.send("before", topic="new")
        world.advance(HOUR_MS)
        assert not world.pop(9, group="latest", topic="new")


def test_the_first_pop_of_a_group_that_began_elsewhere_searches_in_slices() -> None:
    home, follower = founded(), following()
    put_topic = home.engine.administration.put_topic
    put_topic("wide", type_=TopicType.NORMAL, queues=QUEUES, now_ms=home.now_ms)
    latest(home)
    send_configuration(follower, home)
    fill(follower, "before")
    follower.advance(HOUR_MS)
    home.now_ms = follower.now_ms
    home.pop(1, group="latest", topic="wide")
    send_configuration(follower, home)
    fill(follower, "since")

    catalog = follower.engine.catalog
    group_id, topic_id = catalog.group_ids["latest"], catalog.topic_ids["wide"]
    read = EntryReadCounter()
    with read:
        slices = 0
        while follower.engine.consumption.prepare_pop(group_id, topic_id):
            assert read.count < 512, "a slice takes sixteen queues"
            read.count = 0
            slices += 1
    assert slices >= QUEUES // 16 - 1
    with read:
        popped = follower.pop(32, group="latest", topic="wide")
    assert read.count < 2 * QUEUES
    assert {one.body for one in popped} == {"since"}


class EntryReadCounter:
    """Counts the queue entries that are read in the block."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count, entry = 0, ConsumeQueue.entry
        self._entry = entry

        def counted(queue: ConsumeQueue, offset: int) -> tuple[LogOffset, int, int]:
            self.count += 1
            return entry(queue, offset)

        ConsumeQueue.entry = counted  # type: ignore[method-assign,assignment]

    def __exit__(self, *_: object) -> None:
        ConsumeQueue.entry = self._entry  # type: ignore[method-assign]


def fill(world: World, text: str) -> None:
    topic_id = world.engine.catalog.topic_ids["wide"]
    for round_ in range(8):
        world.now_ms += 1_000 * (round_ + 1)
        for number in range(QUEUES):
            data = blob(text)
            world.engine.commands.send(
                topic_id,
                QueueId(number),
                data,
                crc32(data),
                now_ms=world.now_ms,
                firing_ms=world.now_ms,
            )
        world.commit()


def test_a_power_cut_leaves_no_progress_without_a_begin() -> None:
    """After such a cut the member would skip the messages since the begin."""
    home = founded()
    latest(home)
    home.topic("orders")
    begin = home.engine.log.log_end
    home.pop(1, group="latest", topic="orders")
    disk = home.disk.after_power_cut()
    ends = [header.log_offset + header.size for header, *_ in records_of(disk, begin)]
    assert len(ends) >= 2
    for cut in ends:
        partly = disk.after_kill()
        partly.zero("log/00000000000000000000.log", cut, 1 << 20)
        partly.remove("checkpoint")
        again = World(partly, config=home.config, now_ms=home.now_ms)
        group = again.engine.catalog.find_group("latest")
        topic_id = again.engine.catalog.topic_ids["orders"]
        assert group is not None
        has_progress = (group.id, topic_id, 0) in again.engine.state.progress
        assert not has_progress or group.begun
