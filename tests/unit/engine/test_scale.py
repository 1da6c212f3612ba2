"""Bounds of the slices of the engine's owner, counted as work and not as time.

A bound that holds for a thousand groups or twenty thousand topics also holds on a slow machine and
under load. The figures are amounts of work, and equal in every run.
"""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import pytest

import tidemill.broker
from tests.support.bodies import body_of, text_of
from tests.support.disk.counted_work import Meter, SliceWork, WalkedDict, each_turn
from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.quiet import has_pending
from tests.support.worlds.engine_world import GROUP, TOPIC, World, blob
from tidemill.broker.engine import queue_trims
from tidemill.broker.engine.layout import ack, timer_record
from tidemill.broker.engine.layout.numbers import GroupId, LogOffset, QueueId, TimerId, TopicId
from tidemill.broker.engine.layout.pop_checkpoint import MESSAGES_MAX
from tidemill.broker.engine.layout.snapshot import SLOTS_A_SLICE
from tidemill.broker.engine.metadata.catalog import QUEUES_MAX, TopicType
from tidemill.broker.engine.metadata.topic_retention import RetentionChange
from tidemill.broker.engine.pop.acks import ENTRIES_A_RECORD
from tidemill.broker.engine.pop.deliveries import AckResult, Delivery
from tidemill.broker.engine.pop.first_pops import QUEUES_A_SLICE
from tidemill.broker.engine.pop.message_selection import SCAN_ENTRIES_MAX
from tidemill.broker.engine.pop.ordered import OrderedPop
from tidemill.broker.engine.pop.renewals import GIVEN_BACK_A_TURN, SILENT_GRACE_MS, SILENT_MS
from tidemill.broker.engine.pop.revive import DUE_SLOTS_A_TURN, REVIVE_MESSAGES_A_TURN
from tidemill.broker.engine.pop.stated_rows import DELIVERIES_A_STATE_RECORD
from tidemill.broker.engine.queries.queue_reader import CANDIDATES_A_STEP, FOUND_BYTES_MAX
from tidemill.broker.engine.queue_entries import read_entries
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.store.mappings import FILES_MAX, Mappings
from tidemill.broker.engine.store.message_index import BLOCKS_A_SLICE
from tidemill.broker.engine.store.round_slices import SLICE_BUFFERS, in_slices
from tidemill.broker.engine.store.segment import Segment
from tidemill.broker.engine.tally import SLICE_BYTES
from tidemill.broker.engine.timer import census as census_
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.timer.deliver import AGED_A_TURN, DELIVERIES_A_SLICE, TOPICS_TAKEN_MAX
from tidemill.broker.engine.timer.evacuation import MOVES_A_SLICE
from tidemill.broker.engine.timer.load import SLOTS_A_SCAN
from tidemill.broker.engine.timer.table import PAGE_ENTRIES, TimerTable
from tidemill.broker.engine.timer.timer_log import TAIL_PIECE_BYTES, TimerLog
from tidemill.broker.engine.timer.wheel import TimerWheel
from tidemill.broker.engine.upkeep import packing, retention_rules
from tidemill.broker.engine.upkeep.checkpoint import ENDS_A_SECTION, PROGRESS_A_SECTION
from tidemill.broker.engine.upkeep.live_bytes import LiveBytes
from tidemill.broker.engine.upkeep.retention import QUEUES_CUT_A_SLICE
from tidemill.broker.engine.upkeep.retention_rules import QUEUES_A_SLICE as RULES_QUEUES_A_SLICE
from tidemill.message.client_key import ClientKey
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX
from tidemill.message.stored_message import TYPE_DELAY

GROUPS = 1_000
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
MESSAGE_BYTES_MAX = (4 << 20) + 4096  # the largest message, with its record header


def quiet_world(*, segment_bytes: int = 16 << 20) -> World:
    """Open a world without automatic checkpoints."""
    return World(
        checkpoint_log_bytes=1 << 40, checkpoint_records=1 << 40, segment_bytes=segment_bytes
    )


def groups_of(world: World, count: int, **options: object) -> list[GroupId]:
    put = world.engine.administration.put_group
    ids = [put(f"group-{n}", now_ms=world.now_ms, **options).id for n in range(count)]  # type: ignore[arg-type]  # as World.group
    world.commit()
    return ids


def pop_all(world: World, group_ids: list[GroupId], want: int = 32) -> None:
    """Let each group take messages without acks; all of them are due at the same time."""
    topic_id = world.topic()
    for group_id in group_ids:
        assert world.engine.commands.pop(
            group_id,
            topic_id,
            max_messages=want,
            invisible_duration_ms=5_000,
            attempt_id="",
            now_ms=world.now_ms,
        )
    world.commit()


def fail_all(world: World, group_ids: list[GroupId], want: int = 32) -> None:
    """Let each ordered group fail with each of its messages, and take them again.

    Afterwards each message is at its second attempt.
    """
    topic_id, commands = world.topic(), world.engine.commands
    for group_id in group_ids:
        (batch,) = commands.pop(
            group_id,
            topic_id,
            max_messages=want,
            invisible_duration_ms=5_000,
            attempt_id="",
            now_ms=world.now_ms,
        )
        for index in batch.indexes:
            delivery = Delivery(
                group_id, topic_id, batch.slot, batch.delivery_id, index, batch.visible_at_ms
            )
            commands.change_invisible(
                delivery, invisible_duration_ms=0, suspend=False, now_ms=world.now_ms
            )
    world.commit()
    pop_all(world, group_ids, want)


def turns_until_nothing_is_due(world: World) -> list[SliceWork]:
    world.now_ms += 5_001
    return list(each_turn(world.engine, world.now_ms, world.commit))


def assert_bounded(turns: list[SliceWork]) -> None:
    assert max(turn.items for turn in turns) <= DUE_SLOTS_A_TURN + REVIVE_MESSAGES_A_TURN
    # A copy, and for the first one of a group its retry topic.
    assert max(turn.records for turn in turns) <= 2 * REVIVE_MESSAGES_A_TURN


def test_a_turn_of_revive_is_bounded_at_a_thousand_groups() -> None:
    world = quiet_world()
    world.send(*[f"m{n}" for n in range(32)])
    pop_all(world, groups_of(world, GROUPS))
    turns = turns_until_nothing_is_due(world)
    assert_bounded(turns)
    assert sum(turn.records for turn in turns) == GROUPS * (32 + 1)


def test_a_turn_that_dead_letters_for_a_thousand_ordered_groups_is_bounded() -> None:
    world = quiet_world()
    world.send(*[f"m{n}" for n in range(32)])
    group_ids = groups_of(world, GROUPS, is_ordered=True, max_attempts=2)
    fail_all(world, group_ids)
    groups_of(world, GROUPS, is_ordered=True, max_attempts=1)
    turns = turns_until_nothing_is_due(world)
    assert_bounded(turns)
    last = world.engine.catalog.find_topic(f"{DEAD_LETTER_TOPIC_PREFIX}group-{GROUPS - 1}")
    assert last is not None
    assert world.engine.catalog.queues_of(last)[0].max_offset == 32


def test_large_messages_that_are_due_together_are_copied_one_per_turn() -> None:
    world = quiet_world(segment_bytes=64 << 20)
    for n in range(64):
        world.send(f"m{n}", size=4 << 20)
    pop_all(world, [world.group()] * 64, want=1)
    turns = turns_until_nothing_is_due(world)
    assert max(turn.size_bytes for turn in turns) <= SLICE_BYTES + MESSAGE_BYTES_MAX
    assert max(turn.records for turn in turns) <= 2


def test_one_delivery_of_large_messages_is_revived_over_several_turns() -> None:
    world = quiet_world(segment_bytes=64 << 20)
    world.send(*[f"m{n}" for n in range(8)], size=1 << 20)
    pop_all(world, [world.group()], want=8)
    turns = turns_until_nothing_is_due(world)
    assert max(turn.size_bytes for turn in turns) <= SLICE_BYTES + (1 << 20) + 4096
    assert len(world.drain(group=GROUP)) == 8


def test_a_pop_that_dead_letters_large_messages_leaves_the_others_for_the_next_turn() -> None:
    """The attempts were lowered after the batch ran out, so revive does not handle it."""
    world = quiet_world(segment_bytes=64 << 20)
    world.group(is_ordered=True, max_attempts=3)
    world.send(*[f"m{n}" for n in range(8)], "last", size=(1 << 20) - 4_096)
    fail_all(world, [world.group()], want=8)
    turns_until_nothing_is_due(world)
    world.engine.administration.put_group(GROUP, max_attempts=1, now_ms=world.now_ms)
    world.commit()
    world.engine.take_ready()
    before = world.engine.tally.size_bytes
    assert world.pop(1) == []
    assert world.engine.tally.size_bytes - before <= SLICE_BYTES + (1 << 20) + 4096
    _, keys = world.engine.take_ready()
    assert keys == {(world.group(), world.topic())}
    pops = 0
    while not (found := world.bodies(1)):
        pops += 1
        assert pops < 8
    assert found == ["last"]


QUEUES = 64


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_pop_with_a_filter_that_matches_nothing_searches_a_bounded_part(is_ordered: bool) -> None:
    """The following polls search further, up to the only match."""
    world = quiet_world()
    group_id = world.group(is_ordered=is_ordered)
    topic_id = world.topic(queues=QUEUES)
    of_each = 2 * SCAN_ENTRIES_MAX // QUEUES
    for queue_id in range(QUEUES):
        world.send(*(["m"] * of_each), tag="dull", queue_id=queue_id)
    world.send("wanted", tag="bright", queue_id=QUEUES // 2)
    meter = Meter(world.engine)
    for _ in range(10):
        world.engine.take_ready()
        meter.take()
        found = world.bodies(tags=("bright",))
        assert meter.take().items <= SCAN_ENTRIES_MAX
        if found:
            assert found == ["wanted"]
            return
        # Wake the waiting polls.
        assert (group_id, topic_id) in world.engine.state.ready
    raise AssertionError("the polls never got there")


def each_slice(
    world: World, steps: Iterator[list[File]], after: Callable[[], None] = lambda: None
) -> Iterator[SliceWork]:
    """Yield the work of each slice of background work."""
    meter = Meter(world.engine)
    for files in steps:
        yield meter.take()
        for file in files:
            file.sync()
        after()
        meter.take()


def test_the_acks_of_a_busy_round_are_recorded_before_its_end() -> None:
    """Without a bound, one write settled all of a round's 4,096 acks at once."""
    world = quiet_world()
    world.send(*["m"] * 4_096)
    popped = [one for _ in range(4_096) for one in world.pop(1)]
    assert len({one.delivery.slot for one in popped}) == 4_096
    meter = Meter(world.engine)
    for one in popped:
        assert world.engine.commands.ack(one.delivery, world.now_ms) is AckResult.APPLIED
        spent = meter.take()
        assert spent.records <= 1
        assert spent.log_bytes <= (ENTRIES_A_RECORD + 8) * ack.SIZE
    world.engine.commands.ack(popped[0].delivery, world.now_ms)
    world.engine.write(world.now_ms)
    assert meter.take().records <= 1
    assert world.engine.log.record_count >= 4_096 // ENTRIES_A_RECORD
    world.commit()
    assert world.engine.state.table.used_count == 0


def topics_of(world: World, count: int) -> None:
    put = world.engine.administration.put_topic
    for n in range(count):
        put(f"topic-{n}", type_=TopicType.NORMAL, queues=1, now_ms=world.now_ms)
    world.commit()


def ordered_queues(world: World, count: int) -> None:
    """Let an ordered group hold a message of each of many queues."""
    world.group(is_ordered=True)
    data = blob("m")
    for first in range(0, count, QUEUES_MAX):
        name = f"wide-{first}"
        topic_id = world.topic(name, queues=min(QUEUES_MAX, count - first))
        for queue in world.engine.catalog.queues_of(world.engine.catalog.topics[topic_id]):
            now_ms = world.now_ms
            world.engine.commands.send(
                topic_id, queue.queue_id, data, crc32(data), now_ms=now_ms, firing_ms=now_ms
            )
        world.commit()
        while world.pop(group=GROUP, topic=name):
            pass


def test_a_checkpoint_of_twenty_thousand_topics_encodes_a_bounded_part_at_once() -> None:
    world = quiet_world()
    topics_of(world, 20_000)
    slices = list(each_slice(world, world.engine.checkpoints.write()))
    assert max(one.items for one in slices) <= ENDS_A_SECTION + 1
    assert max(one.size_bytes for one in slices) <= SLICE_BYTES
    world.restart()
    assert world.report.snapshot
    assert world.report.replayed_records == 0
    # The broker itself, the feature level, and what a start records that read no record.
    assert world.engine.catalog.item_count == 20_000 + 3


def test_a_checkpoint_of_many_ordered_queues_needs_few_quiet_moments() -> None:
    """Each quiet moment lets a busy broker wait for a sync. One per queue took half a minute."""
    world = quiet_world()
    ordered_queues(world, 10_000)
    topic_id, data, moments = world.topic("busy"), blob("m"), []

    def go_on() -> None:
        """Begin a round after each slice, and commit it if background work waits for that."""
        if world.engine.background.needs_quiet:
            moments.append(1)
            world.engine.commit(world.now_ms)
        else:
            world.engine.commands.send(
                topic_id, QueueId(0), data, crc32(data), now_ms=1, firing_ms=1
            )

    slices = list(each_slice(world, world.engine.checkpoints.write(), go_on))
    assert len(moments) <= -(-10_001 // PROGRESS_A_SECTION) + 10
    assert max(one.items for one in slices) <= ENDS_A_SECTION + 1
    assert max(one.size_bytes for one in slices) <= SLICE_BYTES
    world.commit()
    world.restart()
    assert world.report.snapshot
    progresses = world.engine.state.progress.values()
    assert sum(one.in_flight for one in progresses if one.ordered) == 10_000


def tracked() -> int:
    """Count the objects that a full garbage collection visits."""
    gc.collect()
    return len(gc.get_objects())


def test_a_checkpoint_of_many_queues_keeps_no_object_per_queue_for_the_collector() -> None:
    """The collector visits all objects that a job keeps over its slices: 30 ms at 65,000 tuples."""
    world = quiet_world()
    count, data = 5_000, blob("m")
    topics_of(world, count)
    for topic_id in world.engine.catalog.open_queues:
        world.engine.commands.send(topic_id, QueueId(0), data, crc32(data), now_ms=1, firing_ms=1)
    world.commit()
    engine = world.engine
    queues = deque(engine.catalog.queues.values())
    before = tracked()
    steps = engine.checkpoints._find_extents(queues, engine.log.committed_offset)
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            extents = ended.value
            break
    assert len(extents.ends) == extents.block_count == count
    assert tracked() - before < count // 10


@pytest.mark.parametrize("what", ["topic", "group"])
def test_a_deletion_visits_only_deleted_topics(what: str) -> None:
    """A topic with a thousand groups has a thousand retry topics. Each cost a walk of its own."""
    world = quiet_world()
    world.send("m")
    pop_all(world, groups_of(world, 80))  # Their retry topics are deleted in one slice.
    turns_until_nothing_is_due(world)
    catalog, state = world.engine.catalog, world.engine.state
    assert len(catalog.retry_topic_ids) == 80
    queues = catalog.queues = WalkedDict(catalog.queues)
    progress = state.progress = state.index.by_key = WalkedDict(state.progress)
    subscriptions = state.subscriptions = WalkedDict(state.subscriptions)
    retry_topic_ids = catalog.retry_topic_ids = WalkedDict(catalog.retry_topic_ids)
    if what == "topic":
        world.engine.administration.delete_topic(TOPIC, world.now_ms)
        left = 0
    else:
        world.engine.administration.delete_group("group-7", world.now_ms)
        left = 79
    assert len(retry_topic_ids) == left
    assert len(progress) == 2 * left
    assert queues.walks == progress.walks == subscriptions.walks == 0
    assert retry_topic_ids.walks == 0


TIMER_TOPICS = 4_096


@pytest.mark.parametrize("late_ms", [0, 5_000])
def test_a_turn_of_delayed_messages_is_bounded_at_four_thousand_topics(late_ms: int) -> None:
    world = quiet_world()
    put = world.engine.administration.put_topic
    data = blob("m", kind=TYPE_DELAY)
    for n in range(TIMER_TOPICS):
        topic = put(f"topic-{n}", type_=TopicType.DELAY, queues=1, now_ms=world.now_ms)
        world.engine.commands.send(
            topic.id,
            QueueId(0),
            data,
            crc32(data),
            now_ms=world.now_ms,
            firing_ms=world.now_ms,
            delay_ms=5_000,
        )
    world.commit()
    world.now_ms += late_ms
    turns = turns_until_nothing_is_due(world)
    aged_max = AGED_A_TURN * (DELIVERIES_A_SLICE + 1)
    assert max(turn.items for turn in turns) <= TOPICS_TAKEN_MAX + DELIVERIES_A_SLICE + aged_max
    assert max(turn.records for turn in turns) <= DELIVERIES_A_SLICE + 1
    assert world.engine.catalog.queues_of(topic)[0].max_offset == 1
    assert world.engine.timers.index.pending_count == 0


def test_no_search_imports_masked_arrays() -> None:
    """`np.isin`, and `np.unique` with one result, import `numpy.ma`, which blocks for 50 ms."""
    found = []
    for path in sorted(Path(tidemill.broker.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"np.isin", "np.unique"}:
                options = {keyword.arg for keyword in node.keywords}
                if not options & {"return_index", "return_inverse", "return_counts"}:
                    found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_searches_import_nothing() -> None:
    """An import reads and compiles for 50 ms."""
    script = (
        "import sys, numpy as np, tidemill.broker.engine.engine\n"
        "known = set(sys.modules)\n"
        "np.unique(np.arange(3), return_index=True), np.unique(np.arange(3), return_counts=True)\n"
        "np.unique(np.arange(3), return_inverse=True)\n"
        "np.lexsort((np.arange(3),)), np.searchsorted(np.arange(3), 1)\n"
        "assert set(sys.modules) == known, set(sys.modules) - known\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_flush_of_the_timer_log_does_not_move_the_remaining_records() -> None:
    """With a single buffer it did: 10 ms for a hundred thousand timers."""
    disk = FaultyDisk(Random(0))
    log = TimerLog(disk, Mappings(disk), file_bytes=5 * TAIL_PIECE_BYTES // 2)

    def record_of(n: int) -> bytes:
        return timer_record.encode(
            timer_record.NO_POSITION,
            timer_record.SCHEDULE,
            1,
            2,
            LogOffset(n),
            64,
            TopicId(1),
            TimerId(n),
            2_000,
        )

    count, next_id = 20 * TAIL_PIECE_BYTES // timer_record.SIZE, 0
    for some in (1, 7, count // 2, 3, count // 2):
        log.append(b"".join(map(record_of, range(next_id, next_id + some))))
        next_id += some
    pieces = [id(piece) for piece in log._tail]
    assert max(map(len, log._tail)) <= TAIL_PIECE_BYTES
    for _ in log.write():
        left = [id(piece) for piece in log._tail]
        assert left == pieces[len(pieces) - len(left) :]
        # Read from a piece and from a file alike.
        found = [log.read(n * timer_record.SIZE).timer_id for n in range(0, next_id, 97)]
        assert found == list(range(0, next_id, 97))
    assert not log.has_unwritten
    assert log.append(record_of(next_id)) == next_id * timer_record.SIZE
    assert log.read(next_id * timer_record.SIZE).timer_id == next_id


def test_a_young_collection_visits_a_bounded_number_of_objects() -> None:
    """A thousand queues of a first pop are three thousand permanent objects."""
    script = (
        "import gc\n"
        "from tidemill.common.lifecycle import tune_garbage_collector\n"
        "tune_garbage_collector()\n"
        "seen = []\n"
        "def note(phase, info):\n"
        "    if phase == 'start':\n"
        "        young = range(info['generation'] + 1)\n"
        "        seen.append(sum(len(gc.get_objects(generation=n)) for n in young))\n"
        "gc.callbacks.append(note)\n"
        "kept = [[] for _ in range(500_000)]\n"
        "assert len(seen) > 10 and max(seen) < 7_500, seen\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_folders_of_derived_files_are_listed_once() -> None:
    """A folder of a large store has thousands of files, and a listing takes time for each."""
    world = World(disk=ListingDisk(Random(0)), retention_bytes=2 << 20)
    disk = world.disk
    assert isinstance(disk, ListingDisk)
    for _ in range(5):
        world.send(*[f"m{n}" for n in range(16)], size=130_000)
        world.background()
    assert world.engine.log.min_offset > 0
    for folder in ("queues", "index", "snapshots"):
        assert disk.listings[folder] == 1
    assert world.engine.checkpoints.queues_folder.names == set(FaultyDisk.names(disk, "queues"))
    assert world.engine.checkpoints.index_folder.names == set(FaultyDisk.names(disk, "index"))
    world.restart()
    assert len(world.drain()) > 0


def world_with_many_index_files() -> World:
    """Fill more index files than one slice of a look-up visits, with a key in some."""
    world = quiet_world()
    topic_id = world.topic()
    for n in range(BLOCKS_A_SLICE + 20):
        keys = ("wanted",) if n % 50 == 0 else ()
        data = blob(f"m{n}", keys=keys)
        now_ms = world.now_ms
        world.engine.commands.send(
            topic_id, QueueId(0), data, crc32(data), now_ms=now_ms, firing_ms=now_ms
        )
        world.commit()
        world.checkpoint()
    return world


def test_a_look_up_by_key_bisects_a_bounded_number_of_blocks_at_once() -> None:
    world = world_with_many_index_files()
    topic = world.engine.catalog.topics[world.topic()]
    meter = Meter(world.engine)
    search = world.engine.inspection.search(topic, key="wanted")
    step_count = 1
    while search.step():
        step_count += 1
        spent = meter.take()
        assert spent.items <= BLOCKS_A_SLICE + CANDIDATES_A_STEP
        # Between two slices a checkpoint may write the tail to a file. No match is returned twice.
        if step_count == 2:
            world.send("later")
            world.checkpoint()
    assert step_count > 2
    assert [body_of(one.blob) for one in search.take()] == [b"m100", b"m50", b"m0"]


def test_a_look_up_verifies_only_blocks_with_a_match() -> None:
    world = world_with_many_index_files()
    topic = world.engine.catalog.topics[world.topic()]
    assert world.find(topic, key="nobody has it") == []
    files = world.engine.store.index.files
    assert not any(any(file._verified) for file in files)
    assert len(world.find(topic, key="wanted")) == 3
    assert sum(map(bool, chain.from_iterable(file._verified for file in files))) == 3


def test_large_messages_with_one_key_are_read_one_per_slice() -> None:
    world = quiet_world(segment_bytes=64 << 20)
    topic_id = world.topic()
    for n in range(4):
        data = blob(f"m{n}", keys=("wanted",), size=2 << 20)
        world.engine.commands.send(topic_id, QueueId(0), data, crc32(data), now_ms=1, firing_ms=1)
    world.commit()
    topic = world.engine.catalog.topics[topic_id]
    meter = Meter(world.engine)
    search = world.engine.inspection.search(topic, key="wanted")
    while search.step():
        assert meter.take().size_bytes <= SLICE_BYTES + (2 << 20) + 4096
    assert len(search.take()) == 4


def test_a_look_up_ends_at_a_limit_of_bytes() -> None:
    """256 messages of 4 MiB would be a reply of a gigabyte."""
    world = quiet_world(segment_bytes=64 << 20)
    topic_id = world.topic()
    for n in range(12):
        data = blob(f"m{n}", keys=("wanted",), size=2 << 20)
        world.engine.commands.send(topic_id, QueueId(0), data, crc32(data), now_ms=1, firing_ms=1)
        world.commit()
    search = world.engine.inspection.search(world.engine.catalog.topics[topic_id], key="wanted")
    found, most, has_more = [], 0, True
    while has_more:
        has_more = search.step()
        page = search.take()
        most = max(most, sum(len(one.blob) for one in page))
        found += [text_of(one.blob) for one in page]
        assert not search.take(), "returned messages are not kept"
    assert most <= SLICE_BYTES + (2 << 20) + 4096
    assert found == [f"m{n}" for n in range(11, 11 - FOUND_BYTES_MAX // (2 << 20), -1)]


def test_a_segment_is_deleted_in_bounded_slices() -> None:
    world = World(retention_bytes=2 << 20)
    topics_of(world, 3_000)
    for n in range(40):
        world.send(f"filler-{n}", size=130_000)
    world.checkpoint()

    def commit() -> None:
        if has_pending(world.engine):
            world.commit()

    slices = list(each_slice(world, world.engine.retention.retire_oldest(world.now_ms), commit))
    assert max(one.records for one in slices) == 1
    assert max(one.log_bytes for one in slices) <= SLICE_BYTES
    assert len(slices) <= 3_000 + 3_000 // QUEUES_CUT_A_SLICE + 40
    world.disk = world.disk.after_kill()
    for folder in ("queues", "index", "snapshots"):
        for name in world.disk.names(folder):
            world.disk.remove(name)
    world.open()
    assert len(world.engine.catalog.topics) == 3_001


CHECKPOINTS = 10_000


@pytest.mark.heavy
def test_ten_thousand_checkpoints_leave_few_files_and_few_runs() -> None:
    """Each writes a queue file and an index file: the numbers of ADR 0015, counted."""
    log_bytes = 512
    world = World(
        checkpoint_log_bytes=log_bytes,
        checkpoint_records=1 << 40,
        segment_bytes=16 << 20,
        files_merged=16,
    )
    topic_id, data = world.topic(), blob("m", size=400)
    engine, merges = world.engine, world.engine.merges
    for _ in range(CHECKPOINTS):
        engine.commands.send(topic_id, QueueId(0), data, crc32(data), now_ms=1, firing_ms=1)
        engine.commit(world.now_ms)
        world.checkpoint()
        while merges.is_due:
            for files in merges.merge():
                for file in files:
                    file.sync()
    assert engine.log.log_end >= CHECKPOINTS * log_bytes
    files_max = engine.log.log_end // (16**2 * log_bytes // 2) + 2 * 16
    for folder in ("queues", "index"):
        assert len(world.disk.names(folder)) <= files_max
    (queue,) = engine.catalog.queues_of(engine.catalog.topics[topic_id])
    assert len(queue._firsts) <= files_max
    assert len(engine.mappings) <= FILES_MAX
    assert world.disk.open_files <= 8
    world.restart()
    assert world.report.replayed_records < 20
    assert queue.max_offset == CHECKPOINTS
    assert world.disk.open_files <= 8


IN_FLIGHT = 1_000_000


@pytest.mark.heavy
def test_no_slice_grows_with_a_million_deliveries_in_flight() -> None:
    world = World(
        checkpoint_log_bytes=1 << 40,
        checkpoint_records=1 << 40,
        segment_bytes=16 << 20,
        deliveries_max=2 * IN_FLIGHT,
    )
    groups, topic_id = groups_of(world, 16), world.topic()
    data = blob("m")
    engine, now_ms = world.engine, world.now_ms
    for n in range(IN_FLIGHT // len(groups)):
        engine.commands.send(
            topic_id, QueueId(0), data, crc32(data), now_ms=now_ms, firing_ms=now_ms
        )
        for group_id in groups:
            assert engine.commands.pop(
                group_id,
                topic_id,
                max_messages=1,
                invisible_duration_ms=5_000,
                attempt_id="",
                now_ms=now_ms,
            )
        if n % 256 == 0:
            engine.commit(now_ms)
    world.commit()
    assert engine.state.table.used_count == IN_FLIGHT
    slices = list(each_slice(world, engine.checkpoints.write()))
    assert max(one.size_bytes for one in slices) <= 2 * SLICE_BYTES
    slices = list(each_slice(world, engine.retention.retire_oldest(now_ms), world.commit))
    assert max(one.records for one in slices) <= SLOTS_A_SLICE // DELIVERIES_A_STATE_RECORD
    assert max(one.log_bytes for one in slices) <= SLICE_BYTES
    world.now_ms += 5_001
    assert_bounded(list(islice(each_turn(engine, world.now_ms, world.commit), 1_000)))


def test_a_round_is_written_in_bounded_slices() -> None:
    """Large by its bytes, or by its number of records."""
    pieces = list(in_slices([b"x"] * (3 * SLICE_BUFFERS + 1)))
    wanted = [SLICE_BUFFERS] * 3 + [1]
    assert [(len(piece), size) for piece, size in pieces] == [(size, size) for size in wanted]
    world = quiet_world(segment_bytes=16 << 20)
    topic_id, writes = world.topic(), []
    engine = world.engine
    contents = [blob(f"m{n}", size=(3 << 20) + n) for n in range(4)]
    contents += [blob(f"m{n}") for n in range(4, 2 * SLICE_BUFFERS)]
    contents += [blob("last", size=9 << 20)]  # It begins the next segment.
    for data in contents:
        engine.commands.send(topic_id, QueueId(0), data, crc32(data), now_ms=1, firing_ms=1)
    written = engine.log.written_bytes
    for _ in engine.write_slices(world.now_ms):
        writes.append(engine.log.written_bytes - written)
        written = engine.log.written_bytes
        # A sync may begin at any time. It makes no part of an unfinished round durable.
        log_offset, files = engine.log.begin_sync()
        for file in files:
            file.sync()
        engine.log.note_synced(log_offset)
        assert engine.log.committed_offset < engine.log.log_end
    writes.append(engine.log.written_bytes - written)
    assert max(writes) <= SLICE_BYTES
    assert len(writes) > 12 + 9
    world.commit()
    world.disk = world.disk.after_power_cut()
    world.open()
    (queue,) = world.engine.catalog.queues_of(world.engine.catalog.topics[topic_id])
    assert queue.max_offset == len(contents)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_first_pop_of_a_wide_topic_is_prepared_in_slices(is_new: bool) -> None:
    """A thousand queues are a thousand objects; a group that begins late misses no message."""
    world = quiet_world()
    topic_id = world.topic("wide", queues=QUEUES_MAX if is_new else 300)
    world.engine.administration.put_group("late", start_from_latest=True, now_ms=world.now_ms)
    group_id = world.group("late")
    world.send("before", topic="wide", queue_id=7)
    if not is_new:
        assert world.bodies(group="late", topic="wide") == []
        put = world.engine.administration.put_topic
        put("wide", type_=None, queues=QUEUES_MAX, now_ms=world.now_ms)
    slices, has_more = [], True
    meter = Meter(world.engine)
    while has_more:
        has_more = world.engine.consumption.prepare_pop(group_id, topic_id)
        slices.append(meter.take())
    assert max(one.items for one in slices) <= QUEUES_A_SLICE
    assert sum(one.items for one in slices) == (QUEUES_MAX - 1 if is_new else QUEUES_MAX - 300)
    assert not any(one.records for one in slices), "no message is taken"
    assert world.bodies(group="late", topic="wide") == []
    assert not world.engine.consumption.prepare_pop(group_id, topic_id)
    world.send("behind", topic="wide", queue_id=900)
    assert world.bodies(group="late", topic="wide") == ["behind"]


def test_an_ordered_pop_skips_blocked_queues_cheaply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a thousand queues with a batch in flight cost as much as one with messages."""
    world = quiet_world()
    ordered_queues(world, QUEUES_MAX)
    looked, real = [], OrderedPop.pop

    def pop(*arguments: Any, **options: Any) -> Any:
        looked.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(OrderedPop, "pop", pop)
    assert world.pop(group=GROUP, topic="wide-0") == []
    assert looked == []
    world.send("next", topic="wide-0", queue_id=5)
    assert world.pop(group=GROUP, topic="wide-0") == [], "its queue is blocked"
    assert looked == []
    world.now_ms += DAY_MS
    assert world.pop(1, group=GROUP, topic="wide-0")
    assert len(looked) == 1


def test_an_ordered_pop_dead_letters_a_bounded_part_of_all_its_queues() -> None:
    """The attempts were lowered when all had run out. Each queue had its own allowance."""
    world = quiet_world()
    ordered_queues(world, 200)
    world.now_ms += DAY_MS
    turns = list(each_turn(world.engine, world.now_ms, world.commit))
    assert_bounded(turns)
    world.engine.administration.put_group(GROUP, max_attempts=1, now_ms=world.now_ms)
    world.commit()
    meter = Meter(world.engine)
    assert world.pop(group=GROUP, topic="wide-0") == []
    assert meter.take().items <= MESSAGES_MAX + 1


def timers_beyond(count: int, *, delay_ms: int, size: int = 64) -> World:
    """Schedule this many timers in segments that are older than the retention."""
    world = World(
        checkpoint_log_bytes=1 << 40,
        checkpoint_records=1 << 40,
        segment_bytes=4 << 20,
        retention_ms=60_000,
        # A ring that takes several searches, and as much evacuation as fits into a slice.
        timer=TimerConfig(wheel_slots=1 << 18, evacuation_rate_bytes=1 << 30),
    )
    topic_id, data = world.topic(), blob("m", kind=TYPE_DELAY, size=size)
    for n in range(count):
        world.engine.commands.send(
            topic_id,
            QueueId(0),
            data,
            crc32(data),
            now_ms=world.now_ms,
            firing_ms=world.now_ms,
            delay_ms=delay_ms + 1_000 * n,
        )
        if n % 256 == 0:
            world.commit()
    world.commit()
    return world


@pytest.mark.parametrize(("count", "size"), [(20_000, 64), (12, 900_000)])
def test_evacuation_moves_a_bounded_number_of_timers_and_bytes_at_once(
    count: int, size: int
) -> None:
    world = timers_beyond(count, delay_ms=DAY_MS, size=size)
    engine = world.engine
    engine.timers.index.link_gathered()
    assert len(engine.log.segments) > 1
    world.checkpoint()
    world.now_ms += HOUR_MS
    evacuation, meter, spent = engine.timers.evacuation, Meter(engine), []
    for _ in range(2_000):
        world.now_ms += 1_000
        engine.timers.evacuation.step(world.now_ms)
        spent.append(meter.take())
        world.commit()
        meter.take()
    assert evacuation.evacuated.total() >= min(count // 4, 1_000)
    assert max(one.items for one in spent) <= MOVES_A_SLICE
    assert max(one.records for one in spent) <= MOVES_A_SLICE
    assert max(one.size_bytes for one in spent) <= SLICE_BYTES + size + 4096
    assert sum(one.size_bytes for one in spent) > size * evacuation.evacuated.total()


def test_evacuation_searches_a_bounded_part_of_the_table_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = timers_beyond(20_000, delay_ms=DAY_MS)
    engine = world.engine
    engine.timers.index.link_gathered()
    world.checkpoint()
    # As if the wheel's entry of a timer were damaged: only the table knows the timer.
    engine.timers.index.counts.pins[engine.log.segments[0].start] += 1
    world.now_ms += HOUR_MS
    looks, rows = 0, TimerTable.rows

    def counted(table: TimerTable, number: int) -> object:
        nonlocal looks
        looks += 1
        return rows(table, number)

    monkeypatch.setattr(TimerTable, "rows", counted)
    of_each = []
    for _ in range(3_000):
        world.now_ms += 1_000
        before = looks
        engine.timers.evacuation.step(world.now_ms)
        of_each.append(looks - before)
        world.commit()
    assert sum(of_each) >= 20_000 // PAGE_ENTRIES
    assert max(of_each) <= 9


@pytest.mark.parametrize("is_backlog", [False, True])
def test_the_wheel_is_searched_in_bounded_slices(is_backlog: bool) -> None:
    """After a downtime of days each second may have timers, and most seconds have none."""
    world = timers_beyond(10, delay_ms=5_000)
    engine = world.engine
    asked: list[int] = []
    real = TimerWheel.filled

    def filled(wheel: TimerWheel, first_s: int, end_s: int) -> list[int]:
        asked.append(end_s - first_s)
        return real(wheel, first_s, end_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TimerWheel, "filled", filled)
        world.now_ms += 5 * DAY_MS
        if is_backlog:
            world.restart()
            engine = world.engine
        asked.clear()
        turns = 0
        for _ in each_turn(engine, world.now_ms, world.commit):
            assert len(asked) <= 1, "one search per slice"
            assert sum(asked) <= SLOTS_A_SCAN
            turns += bool(asked)
            asked.clear()
    assert turns >= (1 << 18) // SLOTS_A_SCAN - 1, "nearly a whole ring"
    assert engine.timers.index.pending_count == 0


def test_the_census_counts_a_page_or_a_part_of_the_wheel_at_once() -> None:
    world = timers_beyond(5 * PAGE_ENTRIES, delay_ms=60_000)
    engine = world.engine
    engine.timers.index.link_gathered()
    census = engine.timers.census
    slices = [one.items for one in each_slice(world, census.take(world.now_ms))]
    assert max(slices) <= max(PAGE_ENTRIES, census_.SLOTS_A_SLICE)
    assert slices[:5] == [PAGE_ENTRIES] * 5
    assert sum(census.due_within) == 5 * PAGE_ENTRIES
    assert census.slots_used == 5 * PAGE_ENTRIES


class ListingDisk(FaultyDisk):
    """A disk that counts the listings of a folder since the start."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.listings: Counter[str] = Counter()

    def names(self, folder: str) -> list[str]:
        self.listings[folder] += 1
        return super().names(folder)


def test_deliveries_of_silent_clients_are_given_back_in_bounded_slices() -> None:
    """Two thousand clients hold two messages each, and fall silent at the same time."""
    world, count = quiet_world(), 4_000
    world.group()
    for n in range(0, count, 100):
        world.send(*[f"m{n + k}" for k in range(100)])
    for n in range(count):
        batches = world.engine.commands.pop(
            world.engine.catalog.group_ids[GROUP],
            world.engine.catalog.topic_ids[TOPIC],
            max_messages=1,
            invisible_duration_ms=600_000,
            attempt_id="",
            now_ms=world.now_ms,
            client=ClientKey(f"client-{n // 2}"),
            renews=True,
        )
        assert batches
    world.commit()
    world.run_due()
    world.now_ms += SILENT_MS
    turns = list(each_turn(world.engine, world.now_ms, world.commit))
    given_back = world.engine.state.counts[
        "given_back_silent", world.engine.catalog.group_ids[GROUP], world.topic()
    ]
    assert given_back == count
    assert max(turn.items for turn in turns) <= GIVEN_BACK_A_TURN
    assert max(turn.records for turn in turns) <= GIVEN_BACK_A_TURN
    world.now_ms += SILENT_GRACE_MS
    turns = list(each_turn(world.engine, world.now_ms, world.commit))
    assert_bounded(turns)
    assert sum(turn.records for turn in turns) == count + 1


def test_simultaneous_renewals_are_recorded_in_bounded_slices() -> None:
    world, count = quiet_world(), 4_000
    world.group()
    world.send(*[f"m{n}" for n in range(count)])
    group_id, topic_id = world.group(), world.topic()
    for n in range(count):
        world.engine.commands.pop(
            group_id,
            topic_id,
            max_messages=1,
            invisible_duration_ms=60_000,
            attempt_id="",
            now_ms=world.now_ms,
            client=ClientKey(f"client-{n % 10}"),
            renews=True,
        )
    world.commit()
    world.run_due()
    world.now_ms += 60_000
    turns = list(each_turn(world.engine, world.now_ms, world.commit))
    assert world.engine.state.counts["extended", group_id, topic_id] == count
    assert max(turn.items for turn in turns) <= DUE_SLOTS_A_TURN
    assert max(turn.records for turn in turns) <= 10, "one of each client"


class LookedUpDict(dict[Any, Any]):
    """A dictionary that counts look-ups."""

    looks = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.looks += 1
        return super().get(key, default)


def slices_of_rules(world: World, count: Callable[[], int]) -> list[int]:
    """Let the rules of retention look at all queues; return what `count` counts in each slice."""
    engine = world.engine
    world.checkpoint()
    engine.retention.note(world.now_ms, world.now_ms)
    for _ in engine.live_bytes.count():
        pass
    of_each, seen = [], count()
    for _ in engine.retention.rules.look(world.now_ms):
        of_each.append(count() - seen)
        if has_pending(engine):
            world.commit()
        seen = count()
    return of_each


def test_the_limit_of_the_broker_looks_at_a_bounded_number_of_queues_at_once() -> None:
    """Most queues are empty. Their look-ups count, too."""
    world = World(segment_bytes=64 << 10, retention_bytes=64 << 10)
    for n in range(300):
        world.topic(f"t{n}", queues=32)
        world.send("m", topic=f"t{n}", size=500)
    queues = world.engine.catalog.queues = LookedUpDict(world.engine.catalog.queues)
    of_each = slices_of_rules(world, lambda: queues.looks)
    assert sum(world.engine.trims.messages.values()) > 100
    assert sum(of_each) > 300 * 32
    assert max(of_each) <= 3 * RULES_QUEUES_A_SLICE, "a few look-ups per visited queue"


def test_the_limit_of_a_wide_topic_reads_a_bounded_number_of_queues_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, reads = World(), 0
    topic_id, administration = world.topic("wide", queues=QUEUES_MAX), world.engine.administration
    administration.put_topic(
        "wide", type_=None, queues=0, retention=RetentionChange(bytes=1 << 20), now_ms=world.now_ms
    )
    data = blob("m", size=400)
    for n in range(4 * QUEUES_MAX):
        world.engine.commands.send(
            topic_id,
            QueueId(n % QUEUES_MAX),
            data,
            crc32(data),
            now_ms=world.now_ms,
            firing_ms=world.now_ms,
        )
    world.commit()

    def counted(*arguments: Any) -> Any:
        nonlocal reads
        reads += 1
        return read_entries(*arguments)

    for module in (retention_rules, queue_trims):
        monkeypatch.setattr(module, "read_entries", counted)
    of_each = slices_of_rules(world, lambda: reads)
    assert sum(world.engine.trims.messages.values()) > QUEUES_MAX
    assert sum(of_each) >= 2 * QUEUES_MAX
    assert max(of_each) <= 160


def test_a_choice_of_a_pack_looks_at_a_bounded_number_of_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A log of 1 TiB has 8,192 segments. Here each has more dead bytes than the one before."""
    engine = World().engine
    size, count = engine.config.segment_bytes, 8_192
    engine.log.segments[:] = [Segment(n * size, size) for n in range(count)]
    engine.log.committed_offset = LogOffset(count * size)
    engine.live_bytes.counted_to = count * size
    looks, turns = Counter[int](), [0]

    def live_bytes_in(_: LiveBytes, start: int) -> int:
        looks[turns[0]] += 1
        return size - start // count

    monkeypatch.setattr(LiveBytes, "live_bytes_in", live_bytes_in)
    chosen: list[Segment] = []

    def pack_chosen(segment: Segment, *_: object, **__: object) -> Iterator[list[File]]:
        chosen.append(segment)
        yield from ()

    monkeypatch.setattr(engine.packing, "_pack_chosen", pack_chosen)
    for _ in engine.packing._pack_next(1_000_000, is_full=False):
        turns[0] += 1
    assert [one.start for one in chosen] == [(count - 1 - packing.SEGMENTS_KEPT) * size]
    assert sum(looks.values()) >= count - packing.SEGMENTS_KEPT
    assert max(looks.values()) <= 2 * packing.SEGMENTS_A_SLICE
