"""A flipped bit in a derived file: the broker continues, and no message is missing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import product
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.seeds import each, seeds
from tests.support.worlds.engine_world import GROUP, World
from tests.support.worlds.stored_history import (
    SEGMENT,
    TOPICS,
    bodies,
    delivered,
    disk_of_history,
    drain,
    expected,
    restarted,
)
from tidemill.broker.engine.layout.block_file import INDEX_MAGIC, QUEUE_MAGIC, BlockFileDamaged
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.layout.queue_entry import ENTRY, SIZE
from tidemill.broker.engine.store.block_file import open_block_file
from tidemill.broker.engine.store.mappings import Mappings
from tidemill.broker.engine.upkeep import checkpoint
from tidemill.broker.engine.upkeep.retention_rules import LOOK_PERIOD_MS
from tidemill.common.errors import Repairing

SEEDS = 20
FOLDERS = ("queues", "index", "snapshots")


def derived_files() -> list[str]:
    disk = disk_of_history()
    return [*(name for folder in FOLDERS for name in disk.names(folder)), "checkpoint"]


def flip(disk: FaultyDisk, name: str, seed: int) -> None:
    random = Random(f"{name} {seed}")
    data = disk.read(name)
    assert data
    disk.damage(name, random.randrange(len(data)), bits=1 << random.randrange(8))


@pytest.mark.parametrize("name", derived_files())
def test_a_start_with_a_damaged_derived_file_finds_every_message(name: str) -> None:
    for seed in each(seeds("flipped bits", SEEDS)):
        disk = disk_of_history().after_kill()
        flip(disk, name, seed)
        assert delivered(restarted(disk)) == expected(), f"seed {seed}"


@pytest.mark.parametrize("name", derived_files())
def test_damage_in_a_running_broker_loses_no_message(name: str) -> None:
    """Some blocks were intact when the start verified them. Their later content is not trusted."""
    for seed in each(seeds("flipped bits", SEEDS)):
        world = restarted(disk_of_history().after_kill())
        flip(world.disk, name, seed)
        found = bodies(delivered(world))
        assert found == bodies(expected()), f"seed {seed}"
        assert not world.engine.catalog.find_topic(f"%DLQ%{GROUP}"), "no other file is damaged"
        before = [drain(world, "later", topic) for topic in TOPICS]
        world.restart()
        after = [drain(world, "after the restart", topic) for topic in TOPICS]
        assert [sorted(one) for one in after] == [sorted(one) for one in before], f"seed {seed}"


WRONG_BITS = [  # of a queue entry: a byte of it, and a bit of that byte
    *((byte, 64) for byte in range(3, 8)),  # its log offset becomes larger or smaller
    *((byte, 1) for byte in range(8, 11)),  # its size
]


@pytest.mark.parametrize(("byte", "bit"), WRONG_BITS)
def test_no_message_is_dropped_because_of_a_wrong_entry(byte: int, bit: int) -> None:
    """Background work runs before any consumer meets the entry."""
    for name in disk_of_history().names("queues"):
        rows = list(open_block_file(Mappings(disk_of_history()), name, QUEUE_MAGIC, {}).rows())
        for row, is_first in product(rows, (True, False)):
            world = restarted(disk_of_history().after_kill())
            begins = {key: queue.min_offset for key, queue in world.engine.catalog.queues.items()}
            begin = begins[TopicId(row.key_1), QueueId(row.key_2)]
            number = max(begin - row.first, 0) if is_first else row.items - 1
            world.disk.damage(name, row.position + number * SIZE + byte, bits=bit)
            for _ in range(3):
                world.advance(LOOK_PERIOD_MS)
                world.background()
            found = world.engine.catalog.queues.items()
            assert {key: queue.min_offset for key, queue in found} == begins, f"{name} {number}"
            assert bodies(delivered(world)) == bodies(expected()), f"{name} {number}"


# ---------------------------------------------------------------- met by a start

SMALL_BLOCKS = 4  # entries


@cache
def disk_of_many_blocks() -> FaultyDisk:
    """Return a disk: the oldest queue file has blocks before and after the log's minimum."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "QUEUE_BLOCK_ENTRIES_MAX", SMALL_BLOCKS)
        world = World(FaultyDisk(Random(0)), segment_bytes=SEGMENT)
        world.group()
        for n in range(100):
            world.send(f"m{n}", topic=TOPICS[n % 2], size=1_800)
        world.checkpoint()
        for n in range(100, 130):
            world.send(f"m{n}", topic=TOPICS[n % 2], size=1_800)
        taken = world.pop(32, topic="orders", invisible_ms=60_000)
        world.ack(*taken[:20])
        world.checkpoint()
        world.retire()
    return world.disk


@cache
def expected_of_many_blocks() -> dict[str, list[str]]:
    return delivered(World(disk_of_many_blocks().after_kill(), segment_bytes=SEGMENT))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("number", range(25))
def test_a_start_leaves_a_damaged_block_to_the_rebuild(number: int, count: int) -> None:
    disk = disk_of_many_blocks().after_kill()
    name = disk.names("queues")[0]
    rows = list(open_block_file(Mappings(disk), name, QUEUE_MAGIC, {}).rows())
    for row in rows[number : number + count]:
        disk.damage(name, row.position + 7)
    world = World(disk, segment_bytes=SEGMENT)
    assert world.report.replayed_records < 40, "the start rebuilds nothing"
    met = world.engine.store.damaged_files
    assert world.report.damaged_file == (name if met else "")
    intact = World(disk_of_many_blocks().after_kill(), segment_bytes=SEGMENT)
    for key, queue in world.engine.catalog.queues.items():
        begin = intact.engine.catalog.queues[key].min_offset
        for hidden in range(queue.min_offset, begin):
            with pytest.raises(BlockFileDamaged):
                queue.entry(hidden)
    assert delivered(world) == expected_of_many_blocks()
    assert not world.engine.catalog.find_topic(f"%DLQ%{GROUP}"), "removed messages are not damage"
    low = world.engine.log.min_offset
    for queue in world.engine.catalog.queues.values():
        if queue.min_offset < queue.max_offset:
            assert queue.entry(queue.min_offset)[0] >= low
    world.restart()
    assert not world.engine.store.damaged_files


def test_a_rebuild_cuts_one_queue_per_slice_and_shows_no_removed_message() -> None:
    disk = disk_of_many_blocks().after_kill()
    name = disk.names("queues")[0]
    for row in open_block_file(Mappings(disk), name, QUEUE_MAGIC, {}).rows():
        disk.damage(name, row.position + 7)
    world = World(disk, segment_bytes=SEGMENT)
    low, queues = world.engine.log.min_offset, world.engine.catalog.queues
    begins = {key: queue.min_offset for key, queue in queues.items()}
    cut_count = 0
    for files in world.engine.background._rebuilds.rebuild():
        for file in files:
            file.sync()
        cut = [key for key, queue in queues.items() if queue.min_offset != begins[key]]
        assert len(cut) <= 1
        cut_count += len(cut)
        begins = {key: queue.min_offset for key, queue in queues.items()}
        for queue in queues.values():
            with suppress(BlockFileDamaged):
                assert (
                    queue.min_offset == queue.max_offset or queue.entry(queue.min_offset)[0] >= low
                )
    assert cut_count > 1
    assert delivered(world) == expected_of_many_blocks()


@pytest.mark.parametrize("name", derived_files()[:-1])
@pytest.mark.parametrize("position", range(16, 32, 3))
def test_a_header_with_another_range_than_the_name_is_rejected(name: str, position: int) -> None:
    disk = disk_of_history().after_kill()
    disk.damage(name, position, bits=64)
    assert delivered(restarted(disk)) == expected()


# ---------------------------------------------------------------- met while the broker runs

FIFO = "fifo"


def world_of_one_file(*, is_ordered: bool = False, retries: bool = False) -> World:
    """Make a world with one queue file, still unread; group FIFO has deliveries in flight."""
    world = World(FaultyDisk(Random(0)), segment_bytes=SEGMENT)
    world.group(FIFO, is_ordered=is_ordered, max_attempts=3)
    world.send("m0", "m1", "m2", "m3", tag="t")
    world.send("other", topic="returns")
    if retries:
        world.pop(2, group=FIFO, invisible_ms=1_000)
        world.advance(1_001)
    world.pop(4 if retries else 2, group=FIFO, invisible_ms=60_000)
    world.checkpoint()
    return world


def damage_blocks(world: World, folder: str, magic: int) -> str:
    """Flip a bit in every block of the only file of a folder; return its name."""
    (name,) = world.disk.names(folder)
    for row in open_block_file(Mappings(world.disk), name, magic, {}).rows():
        if (
            magic == INDEX_MAGIC
            or world.engine.catalog.topics[TopicId(row.key_1)].name != "returns"
        ):
            world.disk.damage(name, row.position + 5)
    return name


def damage_queues(world: World) -> str:
    return damage_blocks(world, "queues", QUEUE_MAGIC)


@pytest.mark.parametrize(("folder", "magic"), [("queues", QUEUE_MAGIC), ("index", INDEX_MAGIC)])
def test_a_rebuilt_file_has_the_same_bytes(folder: str, magic: int) -> None:
    world = world_of_one_file()
    (name,) = world.disk.names(folder)
    before = world.disk.read(name)
    damage_blocks(world, folder, magic)
    world.bodies(group="late")
    topic = world.engine.catalog.find_topic(TOPICS[0])
    assert topic is not None
    world.find(topic, message_id="id-m0")
    assert world.disk.read(name) != before
    world.background()
    assert world.disk.read(name) == before
    assert world.engine.rebuilds.counts == {"queues": 0, "index": 0} | {folder: 1}
    assert world.engine.rebuilds.take_notices() == [name]
    assert world.engine.rebuilds.take_notices() == []


def test_a_message_is_found_after_its_index_is_rebuilt() -> None:
    world = world_of_one_file()
    damage_blocks(world, "index", INDEX_MAGIC)
    topic = world.engine.catalog.find_topic(TOPICS[0])
    assert topic is not None
    assert world.find(topic, message_id="id-m2") == []
    world.background()
    (found,) = world.find(topic, message_id="id-m2")
    assert found.queue_offset == 2


@pytest.mark.parametrize("tags", [(), ("t",)])
def test_a_pop_of_a_damaged_queue_is_empty_until_the_rebuild(tags: tuple[str, ...]) -> None:
    world = world_of_one_file()
    damage_queues(world)
    assert world.bodies(group="late", tags=tags) == []
    assert world.bodies(group="late", topic="returns") == ["other"]
    world.engine.take_ready()
    assert world.engine.background.is_due(world.now_ms)
    world.background()
    assert not world.engine.background.is_due(world.now_ms)
    topic_ids, _ = world.engine.take_ready()
    assert world.topic() in topic_ids
    assert world.bodies(group="late", tags=tags) == ["m0", "m1", "m2", "m3"]


def test_an_ordered_queue_waits_for_its_rebuild_and_keeps_its_order() -> None:
    world = world_of_one_file(is_ordered=True)
    damage_queues(world)
    world.advance(60_001)
    assert world.bodies(group=FIFO) == []
    world.background()
    assert world.bodies(group=FIFO) == ["m0", "m1", "m2", "m3"]


def test_a_repeated_attempt_on_a_damaged_queue_is_answered_after_the_rebuild() -> None:
    world = World(FaultyDisk(Random(0)), segment_bytes=SEGMENT)
    world.group(FIFO, is_ordered=True)
    world.send("m0", "m1")
    world.pop(group=FIFO, attempt_id="a")
    world.checkpoint()
    damage_queues(world)
    assert world.bodies(group=FIFO, attempt_id="a") == []
    world.background()
    assert world.bodies(group=FIFO, attempt_id="a") == ["m0", "m1"]


@pytest.mark.parametrize("retries", [False, True])
def test_due_messages_of_a_damaged_queue_are_revived_after_the_rebuild(retries: bool) -> None:
    world = world_of_one_file(retries=retries)
    damage_queues(world)
    world.advance(60_001)
    now_ms = world.now_ms
    world.engine.take_ready()
    assert world.engine.next_due_ms(now_ms, firing_ms=now_ms) is None, "no message is tried again"
    world.background()
    world.run_due()
    again = {one.body: one.attempt for one in world.pop(group=FIFO)}
    assert again == {"m0": 2 + retries, "m1": 2 + retries, "m2": 1 + retries, "m3": 1 + retries}


def test_an_ordered_message_without_attempts_is_dead_lettered_after_the_rebuild() -> None:
    world = world_of_one_file(is_ordered=True)
    world.engine.administration.put_group(FIFO, max_attempts=1, now_ms=world.now_ms)
    damage_queues(world)
    world.advance(60_001)
    world.background()
    assert world.bodies(group=FIFO) == ["m1", "m2", "m3"]
    assert world.bodies(topic=f"%DLQ%{FIFO}") == ["m0"]


def test_a_caller_that_needs_a_damaged_entry_is_asked_to_retry() -> None:
    world = World(FaultyDisk(Random(0)), segment_bytes=SEGMENT)
    world.send("m0", "m1")
    popped = world.pop(1)
    world.checkpoint()
    damage_queues(world)
    engine = world.engine
    topic = engine.catalog.find_topic(TOPICS[0])
    assert topic is not None
    commands: list[Callable[[], object]] = [
        lambda: engine.commands.dead_letter(popped[0].delivery, world.now_ms),
        engine.inspection.look_up_time(topic, world.now_ms + 1).step,
    ]
    group = engine.catalog.find_group(GROUP)
    assert group is not None
    for command in commands:
        with pytest.raises(Repairing):
            command()
        (progress,) = engine.inspection.group_progress(group)
        assert (progress.ready_count, progress.oldest_ready_at_ms) == (1, 0)
    world.background()
    for command in commands:
        command()
    world.commit()
    assert world.bodies(topic=f"%DLQ%{GROUP}") == ["m0"]


def test_retention_waits_for_the_rebuild_of_a_queue_file() -> None:
    world = World(FaultyDisk(Random(0)), segment_bytes=SEGMENT, retention_bytes=2 * SEGMENT)
    for n in range(100):
        world.send(f"m{n}", size=1_800)
    world.checkpoint()
    damage_queues(world)
    world.background()
    assert world.engine.log.min_offset > 0
    assert sum(world.engine.rebuilds.counts.values()) == 1
    world.restart()
    assert world.bodies(1) != []


def test_messages_lost_in_log_and_queue_file_are_not_skipped_silently() -> None:
    """The heads of two records are damaged, and so is the block with their positions."""
    world = world_of_one_file()
    (name,) = world.disk.names("queues")
    block = open_block_file(Mappings(world.disk), name, QUEUE_MAGIC, {}).block(0, 4 * SIZE)
    entries = list(ENTRY.iter_unpack(block))
    (segment,) = world.disk.names("log")
    for log_offset, _, _ in entries[1:3]:
        world.disk.damage(segment, log_offset + 20)
    damage_queues(world)
    # The messages are unread.
    world.engine.commands.pop(
        world.group("late"),
        world.topic(),
        max_messages=4,
        invisible_duration_ms=1,
        attempt_id="",
        now_ms=world.now_ms,
    )
    world.background()
    found = world.engine.catalog.queue(world.topic(), QueueId(0)).entries(0, 4)
    assert [found[0], found[3]] == [entries[0], entries[3]]
    between = entries[1][0], entries[2][0] + entries[2][1] - entries[1][0], 0
    assert found[1:3] == [between] * 2


@pytest.mark.parametrize("byte", range(1, 8))
def test_a_segment_with_a_live_message_stays_if_its_entry_points_behind_it(byte: int) -> None:
    world = World(FaultyDisk(Random(0)), segment_bytes=SEGMENT)
    for n in range(100):
        world.send(f"m{n}", size=1_800)
        if n in (10, 99):
            world.checkpoint()
    assert world.engine.catalog.queue(world.topic(), QueueId(0)).entry(0)[0] < SEGMENT
    name = world.disk.names("queues")[0]
    (row,) = open_block_file(Mappings(world.disk), name, QUEUE_MAGIC, {}).rows()
    world.disk.damage(name, row.position + byte, bits=64)
    for _ in range(3):
        world.advance(LOOK_PERIOD_MS)
        world.background()
    assert world.engine.log.min_offset == 0
    found: list[str] = []
    while more := world.bodies(32):
        found += more
    assert sorted(found) == sorted(f"m{n}" for n in range(100))
