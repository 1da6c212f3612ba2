"""Growing stores: files are merged and few are open, and every message is found."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tests.support.disk.counted_work import Meter
from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.worlds.engine_world import World
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId
from tidemill.broker.engine.store import message_index
from tidemill.broker.engine.store.block_file import BlockFile
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.store.mappings import FILES_MAX, Mappings
from tidemill.broker.engine.upkeep.merge import RUNS_A_SLICE

TOPICS = ("orders", "returns", "letters")
FOLDERS = ("queues", "index")


def growing_world(disk: FaultyDisk | None = None, **changes: object) -> World:
    """Open a world that needs a checkpoint per 4 KiB of log; only the test writes one."""
    options = {"checkpoint_log_bytes": 4 << 10, "checkpoint_records": 1 << 40, **changes}
    return World(disk or FaultyDisk(Random(0)), **options)  # type: ignore[arg-type]  # as World


def grow(world: World, checkpoints: int, *, between: Callable[[], None] = lambda: None) -> None:
    """Send a message to each topic before each checkpoint, and run the due merges."""
    for _ in range(checkpoints):
        for topic in TOPICS:
            world.send(f"{topic}-{len(sent(world, topic))}", topic=topic, size=1_300)
        world.checkpoint()
        merge(world)
        between()


def sent(world: World, topic: str) -> list[str]:
    """Return all messages that were sent to a topic."""
    if world.engine.catalog.find_topic(topic) is None:
        return []
    return [f"{topic}-{n}" for n in range(queue_of(world, topic).max_offset)]


def queue_of(world: World, topic: str) -> ConsumeQueue:
    found = world.engine.catalog.find_topic(topic)
    assert found is not None
    return world.engine.catalog.queues_of(found)[0]


def merge(world: World) -> None:
    while world.engine.merges.is_due:
        for files in world.engine.merges.merge():
            sync(files)


def sync(files: list[File]) -> None:
    for file in files:
        file.sync()


def assert_all_there(world: World, *, group: str = "late") -> None:
    for topic in TOPICS:
        assert world.drain(group=group, topic=topic) == sent(world, topic)


def assert_all_found(world: World) -> None:
    for topic in TOPICS:
        found = world.engine.catalog.find_topic(topic)
        assert found is not None
        for text in sent(world, topic):
            (one,) = world.find(found, message_id=f"id-{text}")
            assert one.queue_offset == int(text.rpartition("-")[2])


def sizes(world: World, folder: str) -> list[int]:
    """Return for each file how many checkpoints of the log it covers."""
    ranges = [name.rpartition("/")[2].split("-") for name in world.disk.names(folder)]
    return [(int(end) - int(begin)) // (4 << 10) for begin, end in ranges]


# ---------------------------------------------------------------- merging


def test_the_number_of_files_grows_with_the_logarithm_of_the_log() -> None:
    world = growing_world()
    grow(world, 60)
    for folder in FOLDERS:
        assert len(sizes(world, folder)) <= 60 // 9 + 2 * 3, sizes(world, folder)
    queues = world.engine.catalog.queues.values()
    assert max(len(queue._firsts) for queue in queues) == len(sizes(world, "queues"))
    assert_all_there(world)
    assert_all_found(world)
    world.restart(power_cut=True)
    assert world.report.damaged_file == ""
    assert world.report.replayed_records < 20
    assert_all_there(world, group="later")
    assert_all_found(world)


def test_large_files_are_not_merged_and_both_kinds_end_at_the_same_offsets() -> None:
    world = growing_world()
    grow(world, 40)
    large = [size for size in sizes(world, "queues") if size >= 9 // 2]
    assert large
    before = world.disk.names("queues")[: len(large) - 1]
    grow(world, 20)
    assert world.disk.names("queues")[: len(before)] == before
    names = [[n.partition("/")[2] for n in world.disk.names(folder)] for folder in FOLDERS]
    assert names[0] == names[1]


@pytest.mark.parametrize("fails", [False, True])
def test_a_power_cut_at_any_operation_of_a_merge_loses_nothing(fails: bool) -> None:
    at = 0
    while True:
        world = growing_world(FaultyDisk(Random(at)), files_merged=1 << 20)
        grow(world, 3)
        world = growing_world(world.disk.after_kill(), files_merged=3)
        assert world.engine.merges.is_due
        world.disk.cut_at = len(world.disk.operations) + at
        try:
            merge(world)
        except PowerCut:
            is_over = False
        else:
            is_over = True
        disk = world.disk.after_power_cut() if fails else world.disk.after_kill()
        world = growing_world(disk, files_merged=3)
        assert world.report.replayed_records < 20, "the files are used, whichever exist"
        assert_all_there(world)
        assert_all_found(world)
        merge(world)
        assert [len(sizes(world, folder)) for folder in FOLDERS] == [1, 1]
        assert_all_there(world, group="later")
        if is_over:
            break
        at += 1
    assert at > 10


def test_a_merge_waits_for_the_rebuild_of_a_damaged_file() -> None:
    """A replica rebuilds nothing before it is the master. Its merge would fail again and again."""
    world = growing_world(files_merged=1 << 20)
    grow(world, 3)
    world = growing_world(world.disk.after_kill(), files_merged=3)
    file = world.engine.store.queue_files[1]
    world.disk.damage(file.name, file.row(0).position)
    merges = world.engine.merges
    assert merges.is_due
    for _ in range(2):  # The second time of the index files only.
        for files in merges.merge():
            sync(files)
    assert world.engine.store.damaged_files
    assert not world.engine.merges.is_due
    world.background()
    grow(world, 1)
    world.background()
    assert len(sizes(world, "queues")) < 4
    assert_all_there(world)


def test_rounds_and_deletions_between_the_slices_of_a_merge_are_seen() -> None:
    world = growing_world(files_merged=1 << 20)
    world.send("gone", topic="short-lived")
    grow(world, 3)
    world = growing_world(world.disk.after_kill(), files_merged=3)
    steps = world.engine.merges.merge()
    for n, files in enumerate(steps):
        sync(files)
        world.send(f"orders-{len(sent(world, 'orders'))}", topic="orders")
        assert world.bodies(1, topic="orders", group=f"group-{n}") == ["orders-0"]
        if n == 5:
            world.engine.administration.delete_topic("short-lived", world.now_ms)
            world.commit()
    assert_all_there(world)
    world.restart()
    assert_all_there(world, group="after")
    assert world.engine.catalog.find_topic("short-lived") is None


def test_retention_deletes_a_merged_file_with_the_last_segment_that_it_covers() -> None:
    world = growing_world(segment_bytes=16 << 10)
    grow(world, 60, between=lambda: world.retire() if len(world.engine.log.segments) > 3 else None)
    low = world.engine.log.min_offset
    assert low > 0
    for folder in FOLDERS:
        ends = [int(name.rpartition("-")[2]) for name in world.disk.names(folder)]
        assert min(ends) > low
    for topic in TOPICS:
        queue = queue_of(world, topic)
        expected = sent(world, topic)[queue.min_offset :]
        assert world.drain(group="late", topic=topic) == expected
        assert queue.entry(queue.min_offset)[0] >= low
    world.restart()
    for topic in TOPICS:
        queue = queue_of(world, topic)
        assert world.drain(group="again", topic=topic) == sent(world, topic)[queue.min_offset :]


def test_a_look_up_during_a_merge_misses_nothing_and_repeats_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_index, "BLOCKS_A_SLICE", 1)
    world = growing_world(checkpoint_log_bytes=1 << 20)
    for checkpoint in range(12):
        world.send("same", "same", "same", topic="orders", size=1_000)
        world.checkpoint()
        if checkpoint == 9:
            merge(world)
    assert [file.row_count for file in world.engine.store.index.files] == [10, 1, 1]
    world.send("same", topic="orders")
    hash_ = world.engine.store.index.hashes[0]
    everything = [one for found in world.engine.store.index.find(hash_) for one in found]
    assert len(everything) == 12 * 3 + 1
    for slices_before in range(15):
        merging = growing_world(world.disk.after_kill(), checkpoint_log_bytes=1 << 20)
        slices = merging.engine.store.index.find(hash_)
        found: list[LogOffset] = []
        for n, part in enumerate(slices):
            found += part
            if n == slices_before:
                merge(merging)
                merging.send("same", topic="orders")
                merging.checkpoint()
        assert found == everything


# ---------------------------------------------------------------- damage in merged files


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_damaged_merged_file_is_rebuilt_from_its_range_of_the_log(folder: str) -> None:
    for seed in range(20):
        world = growing_world()
        grow(world, 12)
        name = world.disk.names(folder)[0]
        world.restart()
        store = world.engine.store
        files = store.queue_files if folder == "queues" else store.index.files
        row = files[0].row(Random(seed).randrange(files[0].row_count))
        world.disk.damage(name, row.position + Random(seed).randrange(16))
        meet_damage(files[0], 20 if folder == "queues" else 16)
        walked = count_walked(world.engine.log)
        world.background()
        assert world.engine.rebuilds.counts[folder] == 1
        if folder == "index":
            assert sum(walked) < (files[0].to_offset - files[0].from_offset) // 2
        assert_all_there(world)
        assert_all_found(world)


def meet_damage(file: BlockFile, item_size: int) -> None:
    """Read all of a file, so that its damage is noted."""
    blocks = [(number, row.items * item_size) for number, row in enumerate(file.rows())]
    with pytest.raises(BlockFileDamaged):
        [file.check_block(*block) for block in blocks]


def count_walked(log: CommitLog) -> list[int]:
    """Record the size of each range of the log that is walked from now on."""
    walked: list[int] = []
    walk = log.walk_between

    def counting(begin: int, end: int):  # type: ignore[no-untyped-def]  # as walk_between
        walked.append(end - begin)
        return walk(begin, end)

    log.walk_between = counting  # type: ignore[method-assign]  # of this test's log alone
    return walked


# ---------------------------------------------------------------- descriptors and mappings


def test_a_store_of_many_segments_has_few_files_open_and_few_mapped() -> None:
    world = growing_world(segment_bytes=16 << 10, checkpoint_log_bytes=1 << 40)
    segments = 2 * FILES_MAX
    while len(world.engine.log.segments) < segments:
        world.send("filler", size=12_000, topic="orders")
    world.checkpoint()
    offsets = [entry[0] for entry in queue_of(world, "orders").walk(0)]
    topic_id = queue_of(world, "orders").topic_id
    for _ in range(2):
        for queue_offset, log_offset in enumerate(offsets):
            world.engine.store.message(log_offset, topic_id, QueueId(0), queue_offset)
        assert len(world.engine.mappings) <= FILES_MAX
        # The active segment, the next one, and folders.
        assert world.disk.open_files <= 8
        world.restart()
    assert len(world.drain(group="late", topic="orders")) == len(offsets)


def test_a_view_outlives_its_mapping() -> None:
    disk = FaultyDisk(Random(0))
    for name in ("log/a", "log/b"):
        file = disk.open(name, create=True)
        file.write_at(0, [name.encode()])
        file.close()
    mappings = Mappings(disk, files_max=1)
    lent = mappings["log/a"]
    assert bytes(mappings["log/b"]) == b"log/b"
    assert list(mappings) == ["log/b"]
    assert bytes(lent) == b"log/a"
    assert bytes(mappings["log/a"]) == b"log/a"
    mappings.forget("log/a")
    assert list(mappings) == []


def test_slices_of_a_merge_are_bounded() -> None:
    world = growing_world(files_merged=1 << 20, checkpoint_log_bytes=1 << 30)
    for _ in range(4):
        for n in range(1500):
            world.send(f"x{n}", topic=f"topic-{n}")
        world.checkpoint()
    world = growing_world(world.disk.after_kill(), files_merged=3, checkpoint_log_bytes=1 << 30)
    meter = Meter(world.engine)
    for files in world.engine.merges.merge():
        sync(files)
        spent = meter.take()
        assert spent.items <= 2 * RUNS_A_SLICE
        assert spent.size_bytes <= 1 << 20
    assert len(world.disk.names("queues")) == 1


def test_a_look_up_finds_everything_while_an_index_file_is_rebuilt() -> None:
    """Removed records are not indexed again, so all later blocks have other positions."""
    world = growing_world(segment_bytes=16 << 10)
    world.send("orders-0", topic="orders", size=1_300)  # A block of another size than all others.
    world.checkpoint()
    grow(world, 20)
    file = world.engine.store.index.files[0]
    assert file.row_count > 8
    world.retire()
    world.retire()
    assert file.from_offset < world.engine.log.min_offset < file.to_offset
    kept = {
        topic: [text for text in sent(world, topic) if finds(world, topic, text)]
        for topic in TOPICS
    }
    assert sum(map(len, kept.values())) > 30
    position = file.row(0).position
    world.disk.damage(file.name, position)
    world.engine.store.damaged_files[file.name] = file
    for files in world.engine.background._rebuilds.rebuild():
        for topic, texts in kept.items():
            assert all(finds(world, topic, text) for text in texts)
        sync(files)
    repaired = world.engine.store.index.files[0]
    assert repaired is not file
    last = repaired.row(repaired.row_count - 1)
    assert last.position != file.row(file.row_count - 1).position


def finds(world: World, topic: str, text: str) -> bool:
    found = world.engine.catalog.find_topic(topic)
    assert found is not None
    return bool(world.find(found, message_id=f"id-{text}"))
