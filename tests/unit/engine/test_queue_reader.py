"""Reading a queue without consuming it: committed messages, in order, in bounded slices."""

from __future__ import annotations

from random import Random
from zlib import crc32

import pytest

from tests.support.bodies import text_of
from tests.support.disk.counted_work import Meter
from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.seeds import seeds
from tests.support.worlds.engine_world import GROUP, TOPIC, World, blob
from tidemill.broker.engine.layout.message import Cause
from tidemill.broker.engine.layout.numbers import GroupId, LogOffset, QueueId, TopicId
from tidemill.broker.engine.metadata.pull_offsets import (
    FEW_OFFSETS,
    PULL_OFFSETS_MAX,
    RESERVED_OFFSETS,
    pull_offset_item,
)
from tidemill.broker.engine.queries.queue_reader import (
    ENDLESS,
    ENTRIES_A_STEP,
    MESSAGES_A_STEP,
    SCAN_ENTRIES_MAX,
    QueueMessage,
    QueueReader,
    describe,
    reason_of,
)
from tidemill.broker.engine.tally import SLICE_BYTES
from tidemill.broker.server.wire.filters import find_filter
from tidemill.common.errors import (
    BadRequest,
    GroupNotFound,
    IllegalOffset,
    Overloaded,
    TopicNotFound,
)
from tidemill.message import stored_message

SIZE = 2 << 20  # Of a large message.
DAY_MS = 86_400_000


def pull_of(
    world: World,
    from_offset: int = 0,
    *,
    topic: str = TOPIC,
    queue_id: int = 0,
    tags: tuple[str, ...] = (),
    max_messages: int = 10_000,
    max_bytes: int = 64 << 20,
    until_offset: int = ENDLESS,
    with_bodies: bool = True,
) -> QueueReader:
    found = world.engine.catalog.find_topic(topic)
    assert found is not None
    return world.engine.inspection.read(
        world.engine.catalog.queue(found.id, QueueId(queue_id)),
        from_offset,
        wanted=find_filter(tags, ""),
        max_messages=max_messages,
        max_bytes=max_bytes,
        until_offset=until_offset,
        with_bodies=with_bodies,
    )


def all_of(pull: QueueReader) -> list[QueueMessage]:
    found, has_more = [], True
    while has_more:
        has_more = pull.step()
        found += pull.take()
    return found


def bodies(found: list[QueueMessage]) -> list[str]:
    return [text_of(one.blob) for one in found]


def test_a_queue_is_pulled_in_its_order_and_nothing_is_consumed() -> None:
    world = World()
    world.send(*[f"m{n}" for n in range(5)])
    pull = pull_of(world, 1, max_messages=3)
    found = all_of(pull)
    assert bodies(found) == ["m1", "m2", "m3"]
    assert [(one.queue_offset, one.attempts, one.cause) for one in found] == [
        (1, 0, None),
        (2, 0, None),
        (3, 0, None),
    ]
    assert {one.stored_at_ms for one in found} == {world.now_ms}
    assert (pull.next_offset, pull.is_at_end) == (4, False)
    assert world.bodies() == [f"m{n}" for n in range(5)]


def test_uncommitted_messages_are_not_read() -> None:
    world = World()
    world.send("committed")
    data = blob("pending")
    engine, topic_id = world.engine, world.topic()
    engine.commands.send(topic_id, QueueId(0), data, crc32(data), now_ms=1, firing_ms=1)
    pull = pull_of(world)
    assert bodies(all_of(pull)) == ["committed"]
    assert (pull.next_offset, pull.is_at_end, pull.end_offset()) == (1, True, 1)
    engine.write(world.now_ms)
    assert all_of(pull_of(world, 1)) == [], "the pull returned a message that is not durable"
    world.commit()
    assert bodies(all_of(pull_of(world, 1))) == ["pending"]
    assert pull.end_offset() == 2


def test_a_pull_stops_at_its_end_offset() -> None:
    world = World()
    world.send(*[f"m{n}" for n in range(6)])
    pull = pull_of(world, 2, until_offset=4)
    assert bodies(all_of(pull)) == ["m2", "m3"]
    assert (pull.next_offset, pull.is_at_end) == (4, False)


def test_a_pull_without_bodies_has_the_rest() -> None:
    world = World()
    world.send("m0", size=100_000)
    [one] = all_of(pull_of(world, with_bodies=False))
    assert len(one.blob) < 200
    fields = stored_message.FIXED.unpack_from(one.blob)
    assert stored_message.StoredMessage._make(fields).body_size == 100_000


def test_a_pull_ends_before_the_message_that_does_not_fit_and_gives_a_large_one_alone() -> None:
    world = World(segment_bytes=64 << 20)
    topic_id = world.topic()
    for n in range(6):
        data = blob(f"m{n}", size=SIZE)
        world.engine.commands.send(topic_id, QueueId(0), data, crc32(data), now_ms=1, firing_ms=1)
    world.commit()
    meter = Meter(world.engine)
    pull = pull_of(world, max_bytes=3 * SIZE)
    found, has_more = [], True
    while has_more:
        has_more = pull.step()
        assert meter.take().size_bytes <= SLICE_BYTES + SIZE + 4096
        found += pull.take()
    assert (len(found), pull.next_offset) == (2, 2)
    assert bodies(all_of(pull_of(world, 2, max_bytes=1))) == ["m2"]


def test_a_slice_copies_a_bounded_number_of_messages() -> None:
    world = World()
    world.send(*[f"m{n}" for n in range(3 * MESSAGES_A_STEP)])
    meter = Meter(world.engine)
    pull = pull_of(world)
    while pull.step():
        assert meter.take().items <= MESSAGES_A_STEP
    assert len(pull.take()) == 3 * MESSAGES_A_STEP


def test_a_filter_stops_after_a_bounded_number_of_entries() -> None:
    world = World(segment_bytes=16 << 20, checkpoint_log_bytes=64 << 20)
    topic_id, data = world.topic(), blob("m", tag="no")
    for _ in range(SCAN_ENTRIES_MAX + 10):
        world.engine.commands.send(topic_id, QueueId(0), data, crc32(data), now_ms=1, firing_ms=1)
    world.commit()
    world.send("wanted", tag="yes")
    meter = Meter(world.engine)
    pull = pull_of(world, tags=("yes",))
    while pull.step():
        assert meter.take().items <= ENTRIES_A_STEP
    assert (pull.take(), pull.next_offset, pull.is_at_end) == ([], SCAN_ENTRIES_MAX, False)
    assert bodies(all_of(pull_of(world, SCAN_ENTRIES_MAX, tags=("yes", "other")))) == ["wanted"]


def test_a_damaged_message_is_passed_over() -> None:
    world = World()
    world.send("m0", "m1", "m2", size=1_000)
    at = all_of(pull_of(world))[1].log_offset
    world.checkpoint()
    world.restart()  # After a start, the engine verifies each record at its first read.
    world.disk.open(world.disk.names("log")[0]).write_at(at + 600, [b"?"])
    pull = pull_of(world)
    assert bodies(all_of(pull)) == ["m0", "m2"]
    assert pull.next_offset == 3


def test_expiry_during_a_pull_ends_it_with_the_first_offset() -> None:
    world = World(FaultyDisk(Random(0)), retention_ms=DAY_MS)
    for n in range(24):
        world.send(f"m{n}", size=130_000)
    pull = pull_of(world)
    pull.step()
    taken = bodies(pull.take())
    assert taken[0] == "m0"
    stopped_at = pull.next_offset
    world.now_ms += 2 * DAY_MS
    world.engine.room.measure()
    world.send("late")
    world.background()
    assert pull.min_offset > stopped_at
    assert not pull.step()
    assert (pull.take(), pull.next_offset, pull.is_at_end) == ([], stopped_at, False)
    assert bodies(all_of(pull_of(world, pull.min_offset)))[-1] == "late"


def test_a_dead_letter_has_its_origin_and_reason() -> None:
    world = World()
    world.group()
    world.send("m0", "m1")
    _, second = world.pop()
    world.engine.commands.dead_letter(second.delivery, world.now_ms)
    world.commit()
    [dead] = all_of(pull_of(world, topic=f"%DLQ%{GROUP}"))
    assert isinstance(dead.cause, Cause)
    cause = dead.cause
    assert (cause.origin, cause.root_queue_id, cause.root_offset) == (TOPIC, 0, 1)
    assert reason_of(cause) == "forwarded_by_client"


class History:
    """The expected content of each queue: text and tag of each message, by offset."""

    def __init__(self) -> None:
        self.queues: dict[tuple[str, int], list[tuple[str, str]]] = {}
        self.pulled: dict[tuple[str, str, int], int] = {}

    def expect(
        self, key: tuple[str, int], begin: int, tags: tuple[str, ...], count: int
    ) -> tuple[list[str], int]:
        """Return the expected texts of a pull and its expected next offset."""
        messages, at = self.queues.get(key, []), begin
        found: list[str] = []
        while at < len(messages) and len(found) < count:
            text, tag = messages[at]
            if not tags or tag in tags:
                found.append(text)
            at += 1
        return found, at


TOPICS, GROUPS, TAGS = ("orders", "bills"), ("billing", "shipping"), ("a", "b", "c")
OPERATIONS = 250


def test_a_dead_letter_shows_the_number_of_its_deliveries() -> None:
    world = World()
    world.group(max_attempts=2)
    world.send("poison")
    for _ in range(2):
        [message] = world.pop(1, invisible_ms=1_000)
        last = message.attempt
        world.advance(1_001)
        world.background()
    [dead] = all_of(pull_of(world, topic=f"%DLQ%{GROUP}"))
    found = describe(world.engine.catalog, dead)
    assert found is not None
    assert (last, found.delivery_attempt) == (2, 2)


@pytest.mark.parametrize("seed", seeds("pulls", 12))
def test_pulls_and_pull_offsets_match_a_plain_list(seed: int) -> None:
    """Include restarts, power cuts, snapshots, retention, a take-over and deletions."""
    random = Random(seed)
    world = World(FaultyDisk(Random(seed)), is_followed=True, retention_ms=DAY_MS)
    history = History()
    for group in GROUPS:
        world.group(group)
    for topic in TOPICS:
        world.topic(topic, queues=2)
    operations = [send, send, send, pull, pull, pull, mark, mark, let_age, end_life, delete]
    for _ in range(OPERATIONS):
        random.choice(operations)(world, history, random)
        compare_offsets(world, history)


def send(world: World, history: History, random: Random) -> None:
    topic, queue_id = random.choice(TOPICS), random.randrange(2)
    tag = random.choice(("", *TAGS))
    texts = [f"{random.getrandbits(40)}" for _ in range(random.randrange(1, 9))]
    world.send(*texts, topic=topic, queue_id=queue_id, tag=tag, size=random.choice((0, 20_000)))
    history.queues.setdefault((topic, queue_id), []).extend((text, tag) for text in texts)


def pull(world: World, history: History, random: Random) -> None:
    topic, queue_id = random.choice(TOPICS), random.randrange(2)
    sent = len(history.queues.get((topic, queue_id), []))
    tags = tuple(random.sample(TAGS, random.randrange(3)))
    began = pull_of(world, topic=topic, queue_id=queue_id)
    assert began.end_offset() == sent
    begin, count = random.randint(0, sent), random.randint(1, 40)
    got = pull_of(world, begin, topic=topic, queue_id=queue_id, tags=tags, max_messages=count)
    found = all_of(got)
    if begin < began.min_offset:
        assert (found, got.next_offset) == ([], begin)
        return
    texts, next_offset = history.expect((topic, queue_id), begin, tags, count)
    assert (bodies(found), got.next_offset) == (texts, next_offset)
    for one in found:
        assert history.queues[topic, queue_id][one.queue_offset][0] == bodies([one])[0]


def mark(world: World, history: History, random: Random) -> None:
    group, topic, queue_id = random.choice(GROUPS), random.choice(TOPICS), random.randrange(2)
    offset = random.randint(0, len(history.queues.get((topic, queue_id), [])))
    ids = world.group(group), world.topic(topic), QueueId(queue_id)
    world.engine.administration.update_pull_offset(*ids, offset, world.now_ms)
    world.commit()
    history.pulled[group, topic, queue_id] = offset


def let_age(world: World, _history: History, random: Random) -> None:
    world.now_ms += random.randrange(2 * DAY_MS)
    world.engine.room.measure()
    world.background()


def end_life(world: World, _history: History, random: Random) -> None:
    match random.randrange(4):
        case 0:
            world.restart()
        case 1:
            world.restart(power_cut=True)
        case 2:
            world.checkpoint()
            world.restart()
        case _:
            world.fail_over()


def delete(world: World, history: History, random: Random) -> None:
    if random.random() < 0.7:
        return
    if random.random() < 0.5:
        group = random.choice(GROUPS)
        world.engine.administration.delete_group(group, world.now_ms)
        world.commit()
        world.group(group)
        gone = [key for key in history.pulled if key[0] == group]
    else:
        topic = random.choice(TOPICS)
        world.engine.administration.delete_topic(topic, world.now_ms)
        world.commit()
        world.topic(topic, queues=2)
        gone = [key for key in history.pulled if key[1] == topic]
        for queue_id in range(2):
            history.queues.pop((topic, queue_id), None)
    for key in gone:
        del history.pulled[key]


def compare_offsets(world: World, history: History) -> None:
    catalog = world.engine.catalog
    found = {
        (catalog.groups[group_id].name, catalog.topics[topic_id].name, int(queue_id)): offset
        for (group_id, topic_id, queue_id), offset in catalog.pull_offsets.all.items()
    }
    assert found == history.pulled
    keys = {key for key in catalog.stated_at if key.startswith("pull ")}
    assert len(keys) == len(found), "the engine must keep one item per pull offset"


def test_a_pull_reads_whichever_record_a_false_entry_names_for_damage() -> None:
    world = World()
    world.send("m0", "m1")
    found = world.engine.catalog.find_topic(TOPIC)
    assert found is not None
    queue = world.engine.catalog.queue(found.id, QueueId(0))
    first = queue.entry(0)
    queue.tail[20:40] = queue.tail[0:20]
    assert queue.entry(1) == first
    pull = pull_of(world)
    assert bodies(all_of(pull)) == ["m0"]
    assert (pull.next_offset, LogOffset(first[0])) == (2, first[0])


def test_the_segments_that_retention_leaves_hold_pull_offsets() -> None:
    world = World(FaultyDisk(Random(0)), retention_ms=DAY_MS)
    ids = world.group(), world.topic()
    world.send("m0", "m1", "m2")
    for offset in (1, 2):
        world.engine.administration.update_pull_offset(*ids, QueueId(0), offset, world.now_ms)
    world.commit()
    for n in range(16):
        world.send(f"filler-{n}", topic="filler", size=130_000)
    world.now_ms += 2 * DAY_MS
    world.engine.room.measure()
    world.send("late", topic="filler")
    world.background()
    assert world.engine.log.min_offset > 0
    disk = world.disk.after_kill()
    for folder in ("queues", "index", "snapshots"):
        for name in disk.names(folder):
            disk.remove(name)
    disk.remove("checkpoint")
    world.disk = disk
    world.open()
    assert world.engine.catalog.pull_offsets.all == {(*ids, 0): 2}


def test_an_unchanged_pull_offset_writes_no_record() -> None:
    world = World()
    ids = world.group(), world.topic(queues=2)
    world.send("m0")
    update = world.engine.administration.update_pull_offset
    update(*ids, QueueId(0), 1, world.now_ms)
    end = world.engine.log.log_end
    update(*ids, QueueId(0), 1, world.now_ms)
    assert world.engine.log.log_end == end
    with pytest.raises(IllegalOffset, match="ends at 1"):
        update(*ids, QueueId(0), 2, world.now_ms)
    with pytest.raises(BadRequest, match="2 queues"):
        update(*ids, QueueId(2), 0, world.now_ms)
    with pytest.raises(GroupNotFound):
        update(GroupId(99), ids[1], QueueId(0), 0, world.now_ms)
    with pytest.raises(TopicNotFound):
        update(ids[0], TopicId(99), QueueId(0), 0, world.now_ms)


def have_pulled(world: World, group_id: GroupId, *, count: int) -> None:
    """Give a consumer group `count` more pull offsets, of topics that do not exist."""
    offsets = world.engine.catalog.pull_offsets
    first = 1 + max((key[1] for key in offsets.of_group(group_id)), default=1_000)
    for number in range(first, first + count):
        offsets.apply(pull_offset_item((group_id, TopicId(number), QueueId(0)), 0))


def test_one_group_cannot_have_all_pull_offsets_that_a_broker_keeps() -> None:
    world = World()
    greedy, modest, topic_id = world.group("greedy"), world.group("modest"), world.topic(queues=2)
    update = world.engine.administration.update_pull_offset
    have_pulled(world, greedy, count=PULL_OFFSETS_MAX - RESERVED_OFFSETS)
    with pytest.raises(Overloaded, match=r"greedy has the most: 16000"):
        update(greedy, topic_id, QueueId(0), 0, world.now_ms)
    update(modest, topic_id, QueueId(0), 0, world.now_ms)
    have_pulled(world, modest, count=FEW_OFFSETS - 1)
    with pytest.raises(Overloaded):
        update(modest, topic_id, QueueId(1), 0, world.now_ms)
    update(modest, topic_id, QueueId(0), 0, world.now_ms)


def test_the_limit_of_pull_offsets_names_the_largest_group() -> None:
    world = World()
    first, second, topic_id = world.group("first"), world.group("second"), world.topic(queues=2)
    world.send("m0")
    administration = world.engine.administration
    administration.update_pull_offset(second, topic_id, QueueId(0), 0, world.now_ms)
    have_pulled(world, first, count=12_000)
    have_pulled(world, second, count=PULL_OFFSETS_MAX - 12_001)

    def refused() -> str:
        late = world.group("late")
        with pytest.raises(Overloaded) as raised:
            administration.update_pull_offset(late, topic_id, QueueId(1), 0, world.now_ms)
        return raised.value.message

    assert "first has the most: 12000" in refused()
    # At the limit, the engine still updates existing pull offsets.
    administration.update_pull_offset(second, topic_id, QueueId(0), 1, world.now_ms)
    administration.delete_group("first", world.now_ms)
    have_pulled(world, second, count=12_000)
    assert "second has the most: 20000" in refused()
    administration.delete_group("second", world.now_ms)
    administration.update_pull_offset(world.group("late"), topic_id, QueueId(1), 0, world.now_ms)
