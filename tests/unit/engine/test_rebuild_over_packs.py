"""Damaged derived files over packs: rebuilds and starts keep every live message."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import NamedTuple, TypeAlias
from zlib import crc32

import pytest

from tests.support.bodies import text_of
from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.seeds import seeds
from tests.support.worlds.engine_group import Node
from tests.support.worlds.engine_world import World, blob
from tests.support.worlds.packed_worlds import (
    DAY_MS,
    delete_topic,
    floors,
    move_floor,
    pack_all,
    small_world,
)
from tests.unit.engine.test_packs_in_groups import (
    checkpoint,
    group_of,
    master_of,
    pack_node,
    purge,
    send_gone,
    step_background,
)
from tests.unit.engine.test_packs_in_groups import move_floor as move_floor_in_group
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.layout.queue_entry import ENTRY, SIZE
from tidemill.broker.engine.store.message_index import PAIR_SIZE
from tidemill.broker.engine.time_search import TimeSearch
from tidemill.broker.offline.check import check
from tidemill.broker.server.replicas.mending import served

TOPICS = ("a", "b", "c")


class LiveMessage(NamedTuple):
    """A message of a queue, as its readers find it."""

    queue_offset: int
    entry: tuple[int, int, int]
    text: str


class SeenTopic(NamedTuple):
    """A topic with one queue, as its readers find it."""

    end: int
    live: list[LiveMessage]
    found_by_id: list[bool]
    found_by_time: list[int]


Observed: TypeAlias = dict[str, SeenTopic]


def queue_of(engine: Engine, topic: str) -> tuple[int, list[LiveMessage]]:
    """Return the end of the only queue of a topic, and its live messages."""
    found = engine.catalog.find_topic(topic)
    if found is None:
        return 0, []
    queue = engine.catalog.queue(found.id, QueueId(0))
    live = [
        LiveMessage(n, entry, text_of(engine.store.record(entry[0]).tail))
        for n, entry in enumerate(queue.walk(queue.min_offset), int(queue.min_offset))
    ]
    return queue.max_offset, live


def found_by_time(engine: Engine, topic: str, times: range) -> list[int]:
    found = engine.catalog.find_topic(topic)
    if found is None:
        return []
    offsets: list[int] = []
    for time_ms in times:
        queue = engine.catalog.queue(found.id, QueueId(0))
        search = TimeSearch(engine.store, [queue], time_ms, falls=engine.catalog.clock_falls)
        while search.step():
            pass
        offsets += search.offsets
    return offsets


def found_by_id(world: World, topic: str, texts: list[str]) -> list[bool]:
    """Return whether the index has each message. The copy of its timer may be freed any time."""
    found = world.engine.catalog.find_topic(topic)
    return [] if found is None else [bool(world.find(found, message_id=f"id-{t}")) for t in texts]


def observe(world: World) -> Observed:
    """Return everything that readers of the topics see."""
    seen: Observed = {}
    for topic in TOPICS:
        end, live = queue_of(world.engine, topic)
        times = range(1_000_000, world.now_ms + 2_000, 5_000)
        ids = found_by_id(world, topic, [one.text for one in live])
        seen[topic] = SeenTopic(end, live, ids, found_by_time(world.engine, topic, times))
    return seen


def check_order(engine: Engine) -> None:
    """Check that the entries of each block, dead ones included, have the order of the log."""
    for file in engine.store.queue_files:
        for number, row in enumerate(file.rows()):
            entries = ENTRY.iter_unpack(file.check_block(number, row.items * SIZE))
            offsets = [log_offset for log_offset, _, _ in entries]
            assert offsets == sorted(offsets), (file.name, number)


def texts_of(seen: Observed, topic: str) -> list[str]:
    return [one.text for one in seen[topic].live]


def read_all(world: World, seen: Observed) -> None:
    """Read all messages, keys and blocks."""
    for topic in TOPICS:
        if texts := texts_of(seen, topic):
            world.drain(topic=topic, group="first")
            found_by_id(world, topic, texts)
    note_damage(world.engine)


def note_damage(engine: Engine) -> None:
    """Verify every block of the queue and index files: the damaged files are noted."""
    store = engine.store
    for files, size in ((store.queue_files, SIZE), (store.index.files, PAIR_SIZE)):
        for file in files:
            for number, row in enumerate(file.rows()):
                with suppress(BlockFileDamaged):
                    file.check_block(number, row.items * size)


def is_sound(world: World) -> bool:
    """Return whether `store check` has no finding."""
    steps = check(world.disk, world.config.timer)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return not end.value.findings


def check_deliveries(world: World, seen: Observed) -> None:
    for topic in TOPICS:
        if texts := texts_of(seen, topic):
            assert world.drain(topic=topic, group="second") == texts


def schedule(world: World, text: str, topic: str, size: int, delay_ms: int) -> None:
    world.topic(topic)
    found = world.engine.catalog.find_topic(topic)
    assert found is not None
    data = blob(text, size=size)
    world.engine.timers.commands.schedule(
        found,
        QueueId(0),
        data,
        crc32(data),
        due_at_ms=world.now_ms + delay_ms,
        now_ms=world.now_ms,
        firing_ms=world.now_ms,
    )
    world.commit()


def packed_history(random: Random) -> World:
    """Send, purge, delete, move the state floor and pack; small derived files end anywhere."""
    world = small_world(checkpoint_log_bytes=random.choice([20, 50, 64]) << 10)
    for n in range(random.choice([60, 120])):
        topic = random.choice(TOPICS)
        if random.random() < 0.4:
            world.advance(1_000)
        size = random.choice([200, 1_000, 4_000])
        if random.random() < 0.2:
            schedule(world, f"{topic}{n}", topic, size, random.choice([1_000, 5_000, DAY_MS]))
        else:
            world.send(f"{topic}{n}", topic=topic, size=size)
        if random.random() < 0.1:
            world.checkpoint()
    world.checkpoint()
    for _ in range(random.choice([1, 2])):
        for topic in TOPICS:
            end = queue_of(world.engine, topic)[0]
            if end and random.random() < 0.7:
                world.purge(topic, low=random.randrange(1, end + 1))
        if random.random() < 0.3 and world.engine.catalog.find_topic("c"):
            delete_topic(world, "c")
        world.checkpoint()
        if floors(world):
            move_floor(world, random.choice(floors(world)))
        pack_all(world)
        if random.random() < 0.5:
            world.background()
    world.checkpoint()
    return world


def damage_blocks(engine: Engine, disk: FaultyDisk, name: str, random: Random) -> None:
    """Flip a bit in some blocks of a queue or index file, at least in one."""
    files = [*engine.store.queue_files, *engine.store.index.files]
    rows = [row for file in files if file.name == name for row in file.rows() if row.items]
    for row in random.sample(rows, random.randint(min(1, len(rows)), len(rows))):
        disk.damage(name, row.position + random.randrange(row.items * 16))


@pytest.mark.parametrize("seed", seeds("rebuilds over packs", 12))
def test_a_rebuild_over_gaps_finds_every_live_message(seed: int) -> None:
    """Each queue and index file in turn is damaged: a reader notes it, and it is written again."""
    random = Random(seed)
    world = packed_history(random)
    before, disk, engine = observe(world), world.disk, world.engine
    for name in [*disk.names("queues"), *disk.names("index")]:
        world.disk = disk.after_kill()
        damage_blocks(engine, world.disk, name, random)
        world.open()
        read_all(world, before)
        world.background()
        assert observe(world) == before, name
        check_order(world.engine)
        check_deliveries(world, before)
        assert world.engine.store.damaged_count == 0
        assert is_sound(world)


@pytest.mark.parametrize("seed", seeds("starts over packs", 12))
def test_a_start_over_gaps_without_a_derived_file_finds_every_live_message(seed: int) -> None:
    """Each file but those of the log is damaged in turn, or lost."""
    random = Random(seed)
    world = packed_history(random)
    before, disk = observe(world), world.disk
    folders = ("queues", "index", "snapshots", "timer", ".")
    for name in [name for folder in folders for name in disk.names(folder)]:
        world.disk = disk.after_kill()
        if not (size := len(world.disk.read(name) or b"")) or random.random() < 0.3:
            world.disk.remove(name)
        else:
            for _ in range(4):
                world.disk.damage(name, random.randrange(min(size, random.choice([64, size]))))
        world.open()
        read_all(world, before)
        world.background()
        assert observe(world) == before, name
        check_deliveries(world, before)


@pytest.mark.parametrize("seed", seeds("rebuilds over packs in groups", 8))
def test_replicas_mend_and_rebuild_over_gaps_of_each_other(seed: int) -> None:
    """Each replica has packs of its own, and asks from a log offset inside a gap of another one."""
    random = Random(seed)
    group = group_of()
    group.set_members(0, 1, 2)
    sent = 0
    for _ in range(random.randrange(10, 25)):
        for _ in range(random.randrange(4)):
            send_gone(group)
        count = random.randrange(1, 4)
        group.send(*[f"m{sent + n}" for n in range(count)], size=random.choice([100, 1_000]))
        sent += count
        group.settle()
        if random.random() < 0.3:
            checkpoint(group, random.choice(group.nodes))
    low = random.randrange(1, sent)
    purge(group, low)
    for _ in range(30):
        send_gone(group)
    master_of(group).engine.administration.delete_topic("gone", group.now_ms)
    master_of(group).engine.write(group.now_ms)
    group.settle()
    move_floor_in_group(group, random.randrange(100))
    for node in group.nodes:
        checkpoint(group, node)
        if random.random() < 0.7:
            pack_node(group, node)
    expected = [f"m{n}" for n in range(low, sent)]
    for node in group.nodes:
        log, other = node.engine.log, random.choice(group.nodes)
        before = logs_of(node)
        begins = [one.log_offset for one in other.engine.log.walk_between(0, log.log_end)]
        for begin in [*begins, *random.sample(range(log.min_offset, log.log_end), 60)]:
            log.damage.request(begin, begin + random.choice([1, 3_000]))
            served(other.log, begin, begin + random.choice([1, 3_000]))  # It never raises.
        group.mend(node.number)
        assert logs_of(node) == before, "nothing was damaged"
        assert node.bodies() == expected
    hurt = random.choice(group.nodes)
    engine = hurt.engine
    names = [*hurt.disk.names("queues"), *hurt.disk.names("index")]
    group.kill(hurt.number)
    for name in names:
        damage_blocks(engine, hurt.disk, name, random)
    disk = hurt.disk
    group.restart(hurt.number)
    group.settle(3_000)
    assert hurt.disk is disk, "its log is whole, so it was not emptied"
    note_damage(hurt.engine)
    assert hurt.engine.store.damaged_files
    step_background(group, hurt)
    group.elect(hurt.number, 0, 1, 2)
    group.settle(1_000)
    for _ in range(10):
        step_background(group, hurt)
        group.mend(hurt.number)
    assert not hurt.engine.store.damaged_files
    assert hurt.engine.log.damage.given_up_count == 0, "the log has no damage"
    check_order(hurt.engine)
    assert hurt.bodies() == expected


def logs_of(node: Node) -> list[bytes | None]:
    """Return the files of the log."""
    return [node.disk.read(name) for name in node.disk.names("log")]
