"""Queue and index files lose the entries of dead messages (ADR 0070, R-9)."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.seeds import seeds
from tests.support.worlds.engine_world import World, blob, derive_directories
from tests.support.worlds.packed_worlds import (
    delete_topic,
    derived_bytes,
    drop_dead_entries,
    finish,
    floors,
    forget_recent,
    move_floor,
    pack_all,
    small_world,
    two_topics,
)
from tidemill.broker.engine.layout.block_file import ROW_SIZE
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId
from tidemill.broker.engine.layout.pack import EXTENT
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.layout.trim import Trim, TrimmedQueue, TrimReason
from tidemill.broker.engine.store import message_index
from tidemill.broker.engine.store.block_file import EncodedBlock
from tidemill.broker.engine.store.message_index import PAIR_SIZE, MessageIndex
from tidemill.broker.engine.store.segment import RecordFreed
from tidemill.broker.engine.upkeep import checkpoint, dead_entries, packing
from tidemill.common.errors import BrokerTimeout, Repairing

KEPT = ["kept first", "kept last"]
DEAD_COUNT = 600


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (packing, dead_entries):
        monkeypatch.setattr(module, "FREED_BYTES_MIN", 1)
    for module in (message_index, checkpoint):
        monkeypatch.setattr(module, "BLOCK_PAIRS_MAX", 16)


def world_with_dead_messages(disk: FaultyDisk | None = None, *, count: int = DEAD_COUNT) -> World:
    """A live message, `count` dead ones of a purged topic, and another live message."""
    world = small_world(disk, files_merged=4, event_retention_ms=60_000)
    world.send(KEPT[0], topic="kept")
    for n in range(count):
        world.send(f"gone {n}", topic="gone", size=1_000)
        if n % 50 == 0:
            world.checkpoint()
    world.send(KEPT[1], topic="kept")
    world.checkpoint()
    world.purge("gone")
    return world


def free_all(world: World) -> None:
    """Move the floor as far as possible, pack, and rewrite the derived files."""
    world.checkpoint()
    for floor in floors(world)[-1:]:
        move_floor(world, floor)
    pack_all(world)
    drop_dead_entries(world.engine)


def check_kept(world: World) -> None:
    late = f"late {len(world.engine.catalog.groups)}"
    assert world.drain(topic="kept", group=late) == KEPT
    assert world.drain(topic="gone", group=late) == []
    topic = world.engine.catalog.find_topic("kept")
    assert topic is not None
    for n, text in enumerate(KEPT):
        (found,) = world.find(topic, message_id=f"id-{text}")
        assert found.queue_offset == n
    assert not world.engine.store.damaged_files


def test_behind_one_live_message_derived_files_need_no_more_than_the_log() -> None:
    world = world_with_dead_messages()
    before = derived_bytes(world.engine)
    assert min(before) > DEAD_COUNT * PAIR_SIZE
    free_all(world)
    queues, index = derived_bytes(world.engine)
    assert queues < 30 * ROW_SIZE, "only the newest files, and two entries"
    # The last two segments are never packed, and their messages keep their pairs.
    kept = sum(one.size for one in world.engine.log.segments[-2:]) // 1_000
    assert index < kept * (PAIR_SIZE + ROW_SIZE) + 30 * ROW_SIZE
    check_kept(world)
    world.restart()
    check_kept(world)


def test_the_background_rewrites_files_after_a_deletion() -> None:
    world = world_with_dead_messages()
    delete_topic(world, "gone")
    before = derived_bytes(world.engine)
    forget_recent(world.engine)
    for _ in range(10):
        world.advance(31_000)
        world.background()
    queues, index = derived_bytes(world.engine)
    assert queues < before[0] // 10
    assert index < before[1] // 3
    assert world.engine.background.next_ms() is None, "nothing is left to do"
    assert world.drain(topic="kept", group="late") == KEPT


def test_the_pairs_of_stubs_stay_until_a_gap_replaces_them() -> None:
    world = world_with_dead_messages()
    _, before = derived_bytes(world.engine)
    assert pack_all(world)
    drop_dead_entries(world.engine)
    _, index = derived_bytes(world.engine)
    assert index > before // 2, "a look-up says that a message was freed"
    free_all(world)
    _, index = derived_bytes(world.engine)
    assert index < before // 2


@pytest.mark.parametrize("unknown", [range(4), range(1, 2)])
def test_blocks_of_an_earlier_version_stay_until_a_merge(
    unknown: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 0.1.0 does not name the first message of an index block."""
    blocks = MessageIndex.blocks

    def blocks_of_0_1(index: MessageIndex, count: int) -> Iterator[EncodedBlock]:
        for number, block in enumerate(blocks(index, count)):
            yield block._replace(first=0) if number in unknown else block

    with monkeypatch.context() as patch:
        patch.setattr(MessageIndex, "blocks", blocks_of_0_1)
        world = world_with_dead_messages()
        world.checkpoint()
    move_floor(world, floors(world)[-1])
    pack_all(world)
    _, before = derived_bytes(world.engine)
    merges = world.engine.merges
    forget_recent(world.engine)
    finish(merges._drop_dead_entries())
    _, index = derived_bytes(world.engine)
    assert index == before
    check_kept(world)
    finish(merges._merge_index(world.engine.store.index.files))
    _, index = derived_bytes(world.engine)
    assert index < before // 3
    check_kept(world)


def test_a_rewrite_ends_and_is_not_repeated() -> None:
    world = world_with_dead_messages()
    free_all(world)
    names = world.disk.names("queues"), world.disk.names("index")
    operations = len(world.disk.operations)
    drop_dead_entries(world.engine)
    assert (world.disk.names("queues"), world.disk.names("index")) == names
    assert len(world.disk.operations) == operations


def test_entries_that_are_not_counted_as_dead_stay() -> None:
    """The live bytes subtract a dead message by its entry."""
    world = world_with_dead_messages()
    live_bytes = world.engine.live_bytes
    world.send("gone again", topic="gone", size=1_000)
    world.checkpoint()
    for _ in live_bytes.count():
        pass
    topic_id = world.topic("gone")
    counted = live_bytes._queues[topic_id][QueueId(0)]
    world.purge("gone")
    drop_dead_entries(world.engine)
    for _ in live_bytes.count():
        pass
    assert live_bytes._queues[topic_id][QueueId(0)] is counted, "the count began again"
    assert live_bytes.bytes_of_topic(topic_id) == 0


@pytest.mark.parametrize("power_cut", [False, True])
def test_a_stop_at_any_operation_of_a_rewrite_loses_nothing(*, power_cut: bool) -> None:
    """Each run stops one disk operation later than the one before, until all are rewritten."""
    step, is_done = 0, False
    while not is_done:
        world = world_with_dead_messages(FaultyDisk(Random(step)), count=200)
        world.checkpoint()
        for floor in floors(world)[-1:]:
            move_floor(world, floor)
        pack_all(world)
        world.disk.cut_at = len(world.disk.operations) + step
        try:
            drop_dead_entries(world.engine)
            is_done = True
        except PowerCut:
            step += 1
        world.restart(power_cut=power_cut)
        check_kept(world)
        drop_dead_entries(world.engine)
        check_kept(world)
    assert step >= 20


@pytest.mark.parametrize("folder", ["queues", "index", "snapshots"])
def test_a_start_without_derived_files_finds_the_same_messages(folder: str) -> None:
    world = world_with_dead_messages()
    free_all(world)
    world.disk = world.disk.after_kill()
    for name in world.disk.names(folder):
        world.disk.remove(name)
    world.open()
    check_kept(world)
    world.send("gone again", topic="gone")
    assert world.drain(topic="gone", group="later") == ["gone again"]


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_record_that_is_not_durable_kills_no_entry(*, is_deleted: bool) -> None:
    """The process ends during a merge, before the record of the deletion is durable."""
    world = small_world(files_merged=4)
    texts = [f"stays {n}" for n in range(100)]
    for n, text in enumerate(texts):
        world.send(text, topic="stays")
        if n % 20 == 0:
            world.checkpoint()
    world.checkpoint()
    if is_deleted:
        world.engine.administration.delete_topic("stays", world.now_ms)
    else:
        queue = world.engine.catalog.queues[world.topic("stays"), QueueId(0)]
        world.engine.fold.append(
            Trim([TrimmedQueue(queue.topic_id, QueueId(0), TrimReason.PURGE, queue.max_offset)]),
            world.now_ms,
        )
    merges = world.engine.merges
    assert merges.is_due
    for steps in (merges.merge(), merges._drop_dead_entries()):
        for _ in range(200):
            for file in next(steps, []):
                file.sync()
    world.disk = world.disk.after_kill()
    world.open()
    assert world.drain(topic="stays", group="late") == texts


def run_background(world: World, looks: int = 8) -> None:
    forget_recent(world.engine)
    for _ in range(looks):
        world.advance(11_000)
        world.background()


@pytest.mark.parametrize("delay", ["restart", "full disk", "damage"])
def test_a_search_without_success_is_repeated(delay: str) -> None:
    """No message dies afterwards."""
    world = small_world(files_merged=100, event_retention_ms=60_000, disk_reserve_bytes=8 << 20)
    world.send(KEPT[0], topic="kept")
    for n in range(DEAD_COUNT):
        world.send(f"gone {n}", topic="gone", size=1_000)
        if n % 50 == 0:
            world.checkpoint()
    world.send(KEPT[1], topic="kept")
    delete_topic(world, "gone")
    world.checkpoint()
    move_floor(world, floors(world)[-1])
    pack_all(world)
    world.checkpoint()
    before = derived_bytes(world.engine)
    if delay == "restart":
        world.restart()
    elif delay == "full disk":
        world.leave_room(1 << 20)  # below a quarter of the reserve
        run_background(world)
        assert derived_bytes(world.engine) == before
        world.leave_room(1 << 30)
    else:
        store = world.engine.store
        for files in (store.queue_files, store.index.files):
            # As a reader notes it; the background finds its bytes intact.
            store.damaged_files[files[3].name] = files[3]
        world.advance(11_000)
        steps = world.engine.merges.find_dead_entries(world.now_ms)
        assert steps is not None
        finish(steps)
    run_background(world)
    queues, index = derived_bytes(world.engine)
    assert queues < before[0] // 5
    assert index < before[1] // 2
    assert world.drain(topic="kept", group="late") == KEPT


def test_the_pairs_of_recent_messages_go_when_they_are_not_recent_any_longer() -> None:
    world = world_with_dead_messages()
    world.engine.store.note_time(0)
    world.checkpoint()
    move_floor(world, floors(world)[-1])
    pack_all(world)
    _, before = derived_bytes(world.engine)
    world.background()
    assert derived_bytes(world.engine)[1] > before // 2
    run_background(world)
    assert derived_bytes(world.engine)[1] < before // 2


def test_a_due_search_does_not_keep_an_idle_broker_awake() -> None:
    """The disk has room for no checkpoint, so the background has no job."""
    world = small_world(files_merged=100, disk_reserve_bytes=64 << 20)
    for n in range(300):
        world.send(f"gone {n}", topic="gone", size=1_000)
    world.leave_room(world.config.disk_reserve_bytes // 32 + 3_000)
    world.purge("gone")
    for _ in range(20):
        world.advance(1_000)
        world.background()
        next_ms = world.engine.background.next_ms()
        assert next_ms is None or next_ms > world.now_ms


def test_half_dead_files_do_not_keep_the_dead_ones_behind_them() -> None:
    world = small_world(
        files_merged=4,
        disk_reserve_bytes=64 << 10,
        segment_bytes=1 << 20,
        checkpoint_log_bytes=64 << 10,
    )
    for kept, gone in [(300, 340)] * 2 + [(0, 420)] * 6:
        for topic, count in (("kept", kept), ("gone", gone)):
            for n in range(count):
                world.send(f"{topic} {n}", topic=topic)
        world.checkpoint()
    delete_topic(world, "gone")
    finish(world.engine.merges._drop_dead_entries())
    kept_id = world.topic("kept")
    rows = [row for file in world.engine.store.queue_files for row in file.rows()]
    assert sum(row.key_1 != kept_id for row in rows) <= 2, "those in the half dead files"


def test_a_message_in_a_recent_gap_is_still_found_by_a_repeated_send() -> None:
    """The result of the send is unknown then, and the message is not stored again."""
    world = small_world(files_merged=4)
    world.engine.store.note_time(0)
    world.send("unread", topic="other")
    data = blob("sent twice", size=2_000)
    world.send("sent twice", topic="gone", size=2_000)
    for n in range(60):
        world.send(f"gone {n}", topic="gone", size=4_000)
        if n % 10 == 0:
            world.checkpoint()
    world.purge("gone")
    world.checkpoint()
    move_floor(world, floors(world)[-1])
    pack_all(world)
    for _ in range(2):
        with pytest.raises(BrokerTimeout):
            world.engine.store.find_sent(world.topic("gone"), QueueId(0), data)
        finish(world.engine.merges._merge_index(world.engine.store.index.files))
        finish(world.engine.merges._drop_dead_entries())


@pytest.mark.parametrize("seed", seeds("dead-entries", 20))
def test_the_index_loses_exactly_the_pairs_of_gaps(seed: int) -> None:
    """Live messages and stubs keep their pairs, wherever a block or a gap begins."""
    random = Random(seed)
    world = small_world(files_merged=4, event_retention_ms=60_000)
    for n in range(random.randrange(200, 600)):
        topic = random.choice(("kept", "gone", "gone", "gone"))
        world.send(f"{topic} {n}", topic=topic, size=random.choice((0, 900, 4_000)))
        if random.random() < 0.05:
            world.checkpoint()
    world.checkpoint()
    pairs = sorted(pairs_of(world))
    offsets = np.array([offset for offset, _ in pairs], np.int64)
    for _ in range(2):
        queue = world.engine.catalog.queues[world.topic("gone"), QueueId(0)]
        world.purge("gone", low=random.randrange(queue.min_offset, queue.max_offset + 1))
        world.checkpoint()
        if ends := floors(world):
            move_floor(world, random.choice(ends))
        pack_all(world)
        forget_recent(world.engine)
        gaps = dead_entries._Gaps(world.engine.store)
        is_freed = np.array([not is_stored(world, offset) for offset, _ in pairs])
        assert gaps.contain(offsets).tolist() == is_freed.tolist()
        for _ in range(50):
            begin, end = sorted(random.sample(range(len(pairs)), 2))
            is_covered = gaps.cover(int(offsets[begin]), int(offsets[end]))
            assert not is_covered or is_freed[begin:end].all()
        drop_dead_entries(world.engine)
        if len(world.engine.store.index.files) == 1:
            continue  # It waits for a neighbour.
        finish(world.engine.merges._merge_index(world.engine.store.index.files))
        expected = [pair for pair, freed in zip(pairs, is_freed, strict=True) if not freed]
        assert sorted(pairs_of(world)) == expected
        for first, block in index_blocks(world):
            assert first == offsets_of(block).min()


def pairs_of(world: World) -> list[tuple[int, int]]:
    """Return the log offsets and the hashes of all pairs in index files."""
    found: list[tuple[int, int]] = []
    for _, block in index_blocks(world):
        hashes = np.frombuffer(block, ">u8", len(block) // PAIR_SIZE).tolist()
        found += zip(offsets_of(block).tolist(), hashes, strict=True)
    return found


def index_blocks(world: World) -> Iterator[tuple[int, bytes]]:
    """Yield each block of the index files, with the first log offset in the directory."""
    for file in world.engine.store.index.files:
        for number, row in enumerate(file.rows()):
            yield row.first, bytes(file.block(number, row.items * PAIR_SIZE))


def offsets_of(block: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(block, ">i8", offset=len(block) // 2)


def is_stored(world: World, log_offset: int) -> bool:
    """Return whether a message, or its stub, begins at a log offset."""
    try:
        found = world.engine.log.record_at(LogOffset(log_offset))
    except RecordFreed:
        return False
    return found.header.kind == RecordKind.MESSAGE and found.log_offset == log_offset


@pytest.mark.parametrize("which", range(8))
def test_a_flipped_bit_in_the_directory_of_a_pack_costs_no_index_pair(which: int) -> None:
    """The directory was checked when it was first read; a rewrite would drop pairs for ever."""
    world = small_world(files_merged=100, event_retention_ms=60_000)
    for n in range(300):
        world.send(f"gone {n}", topic="gone", size=1_000)
        if n % 50 == 0:
            world.send(f"kept {n}", topic="kept", size=500)
            world.checkpoint()
    world.purge("gone")
    world.checkpoint()
    move_floor(world, floors(world)[-1])
    pack_all(world)
    world.restart()
    topic = world.engine.catalog.find_topic("kept")
    assert topic is not None

    def missing() -> list[int]:
        return [n for n in range(0, 300, 50) if not world.find(topic, message_id=f"id-kept {n}")]

    assert missing() == []
    rows = [
        (one.name, one.pack.header.records_end + EXTENT.size * number + 5)
        for one in world.engine.log.segments
        if one.pack is not None
        for number in range(one.pack.header.extent_count)
    ]
    world.disk.damage(*rows[which * len(rows) // 8], bits=1 << which)
    drop_dead_entries(world.engine)
    assert derive_directories(world.engine) == 1
    drop_dead_entries(world.engine)
    world.restart()
    with pytest.raises(Repairing):
        missing()
    assert derive_directories(world.engine) == 1
    assert missing() == []


@pytest.mark.parametrize("part", [64, 16])
def test_a_search_waits_for_the_room_that_its_rewrite_needs(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then nothing is searched again, unless more messages have died."""
    reserve = 32 << 20
    world = World(
        FaultyDisk(Random(0), capacity_bytes=256 << 20),
        segment_bytes=64 << 10,
        checkpoint_log_bytes=64 << 10,
        disk_reserve_bytes=reserve,
        retention_ms=400 * 86_400_000,
        event_retention_ms=60_000,
        files_merged=100,
    )
    world.send("kept", topic="kept")
    for n in range(300):
        world.send(f"gone {n}", topic="gone", size=1_000)
        if n % 50 == 0:
            world.checkpoint()
    world.checkpoint()
    searches: list[int] = []
    find = dead_entries.DeadEntries.find_sparse_queues

    def counted(entries: dead_entries.DeadEntries, size: int) -> Any:
        searches.append(size)
        return find(entries, size)

    monkeypatch.setattr(dead_entries.DeadEntries, "find_sparse_queues", counted)
    world.leave_room(reserve // part)
    world.purge("gone")
    for _ in range(600):
        world.advance(1_000)
        world.background()
        world.leave_room(reserve // part)
    assert len(searches) < 10
    before = derived_bytes(world.engine)
    world.leave_room(100 << 20)
    for _ in range(40):
        world.advance(1_000)
        world.background()
    assert derived_bytes(world.engine)[0] < before[0]


def test_a_merge_leaves_the_whole_reserve_after_a_rewrite_of_dead_entries() -> None:
    reserve = 32 << 20
    world = small_world(
        FaultyDisk(Random(0), capacity_bytes=256 << 20), files_merged=2, disk_reserve_bytes=reserve
    )
    for n in range(40):
        world.send(f"gone {n}", topic="gone", size=4_000)
        world.checkpoint()
    merges = world.engine.merges
    dues = [merges.is_due]
    world.leave_room(reserve // 2)
    finish(merges._drop_dead_entries())
    dues.append(merges.is_due)
    world.leave_room(reserve + (1 << 20))
    dues.append(merges.is_due)
    assert dues == [True, False, True]


def test_a_new_pack_lets_a_search_for_dead_entries_follow() -> None:
    """The pairs of its gaps are dead, although no message has died since the last search."""
    world = small_world(files_merged=100, event_retention_ms=60_000)
    two_topics(world)
    world.purge("gone")
    world.checkpoint()
    move_floor(world, floors(world)[-1])
    merges = world.engine.merges
    steps = merges.find_dead_entries(world.now_ms)
    assert steps is not None
    finish(steps)
    assert merges.next_ms() is None
    assert pack_all(world)
    assert merges.next_ms() is not None


def test_a_rewrite_of_dead_entries_may_use_a_part_of_the_reserve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dead_entries, "FREED_BYTES_MIN", 1)
    reserve = 32 << 20
    disk = FaultyDisk(Random(0), capacity_bytes=256 << 20)
    world = small_world(disk, files_merged=100, disk_reserve_bytes=reserve)
    for _ in range(5):
        two_topics(world, count=40)
    world.purge("gone")
    world.checkpoint()
    forget_recent(world.engine)
    before = derived_bytes(world.engine)
    world.leave_room(reserve // 2)
    finish(world.engine.live_bytes.look(0))
    finish(world.engine.merges._drop_dead_entries())
    assert derived_bytes(world.engine)[0] < before[0]
