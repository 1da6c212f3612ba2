"""Queue and index files lose the entries of dead messages (ADR 0070, R-9)."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.worlds.engine_world import World
from tests.support.worlds.packed_worlds import (
    delete_topic,
    derived_bytes,
    drop_dead_entries,
    finish,
    floors,
    move_floor,
    pack_all,
    small_world,
)
from tidemill.broker.engine.layout.block_file import ROW_SIZE
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.layout.trim import Trim, TrimmedQueue, TrimReason
from tidemill.broker.engine.store import message_index
from tidemill.broker.engine.store.block_file import EncodedBlock
from tidemill.broker.engine.store.message_index import PAIR_SIZE, MessageIndex
from tidemill.broker.engine.upkeep import checkpoint, dead_entries, packing

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


def test_blocks_of_an_earlier_version_stay_until_a_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 0.1.0 does not name the first message of an index block."""
    blocks = MessageIndex.blocks

    def blocks_of_0_1(index: MessageIndex, count: int) -> Iterator[EncodedBlock]:
        return (block._replace(first=0) for block in blocks(index, count))

    with monkeypatch.context() as patch:
        patch.setattr(MessageIndex, "blocks", blocks_of_0_1)
        world = world_with_dead_messages()
        world.checkpoint()
    move_floor(world, floors(world)[-1])
    pack_all(world)
    _, before = derived_bytes(world.engine)
    merges = world.engine.background._merges
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
    merges = world.engine.background._merges
    assert merges.is_due
    for steps in (merges.merge(), merges._drop_dead_entries()):
        for _ in range(200):
            for file in next(steps, []):
                file.sync()
    world.disk = world.disk.after_kill()
    world.open()
    assert world.drain(topic="stays", group="late") == texts
