"""The derivation of a damaged pack directory: in slices, by the background, without a loss.

Until its end no record of the pack is found. Readers then wait: no message is skipped,
dead-lettered or reported as missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.quiet import has_pending
from tests.support.worlds.engine_group import Group
from tests.support.worlds.engine_world import World, derive_directories
from tests.support.worlds.packed_worlds import (
    DAY_MS,
    drop_dead_entries,
    floors,
    move_floor,
    pack_all,
    small_world,
)
from tests.unit.engine.test_packs_in_groups import group_of, pack_node, purge
from tests.unit.engine.test_packs_in_groups import move_floor as move_floor_of
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.events.event import EventQuery
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId
from tidemill.broker.engine.layout.pack import EXTENT
from tidemill.broker.engine.layout.record import MAGIC_BYTES
from tidemill.broker.engine.store import pack as packs
from tidemill.broker.engine.store.damaged_ranges import AGAIN_MS, MendOutcome
from tidemill.broker.engine.store.segment import CorruptStore, Segment
from tidemill.broker.engine.upkeep import dead_entries
from tidemill.common.errors import Repairing

NO_END = 1 << 62
KEPT = [f"kept {n}" for n in range(60)]


def packed(disk: FaultyDisk | None = None, *, before_floor: bool = True) -> World:
    """Return a world with packs of a purged topic and of a live one."""
    world = small_world(disk, files_merged=100, event_retention_ms=60_000, segment_bytes=32 << 10)
    for n, text in enumerate(KEPT):
        world.send(text, topic="kept", size=500 + n)
        world.send(*[f"gone {n} {m}" for m in range(3)], topic="gone", size=900)
    world.checkpoint()
    world.purge("gone")
    world.checkpoint()
    if before_floor:
        move_floor(world, floors(world)[-1])
    assert pack_all(world) > 2
    return world


def directories(engine: Engine) -> list[tuple[str, int, int]]:
    """Return name, begin and end of each directory in the file of its pack."""
    return [
        (one.name, one.pack.header.records_end, EXTENT.size * one.pack.header.extent_count)
        for one in engine.log.segments
        if one.pack is not None
    ]


def flip(world: World, part: int, *, which: int = 0) -> None:
    """Flip a bit in one of 16 parts of a directory that was read before."""
    name, begin, size = directories(world.engine)[which]
    world.disk.damage(name, begin + part * (size - 1) // 15, bits=1 << part % 8)


def background_slices(world: World, count: int) -> Iterator[None]:
    for _ in range(count):
        files = world.engine.background.step(
            world.now_ms, firing_ms=world.now_ms, monotonic_ms=world.monotonic_ms
        )
        for file in files or []:
            file.sync()
        if has_pending(world.engine):
            world.commit()
        yield


def received(world: World, group: str = "g") -> list[str]:
    """Pop and ack until nothing is available, with background work in between."""
    bodies: list[str] = []
    for _ in range(20):
        while more := world.pop(topic="kept", group=group):
            bodies += [one.body for one in more]
            world.ack(*more)
        if not world.engine.rebuilds.has_directory:
            return bodies
        world.background()
        world.run_due()
    raise AssertionError("directories are derived again and again")


@pytest.mark.parametrize("part", range(16))
@pytest.mark.parametrize("before_floor", [False, True])
def test_no_message_is_skipped_or_dead_lettered(part: int, before_floor: bool) -> None:
    world = packed(before_floor=before_floor)
    world.engine.administration.put_group("g", max_attempts=1, now_ms=world.now_ms)
    world.pop(2, topic="kept", group="other")
    for which in range(len(directories(world.engine))):
        flip(world, part, which=which)
    assert sorted(received(world)) == sorted(KEPT)
    assert world.bodies(topic="%DLQ%g") == []
    assert not world.engine.rebuilds.has_directory


@pytest.mark.parametrize("power_cut", [False, True])
@pytest.mark.parametrize("slices", [0, 1, 3])
def test_a_crash_during_the_derivation_loses_nothing(power_cut: bool, slices: int) -> None:
    world = packed()
    for which in range(len(directories(world.engine))):
        flip(world, 3, which=which)
    for part in (9, 5):
        first = world.pop(topic="kept", group="g")
        for _ in background_slices(world, slices):
            pass
        world.restart(power_cut=power_cut)
        flip(world, part)
    world.now_ms += 30_001
    bodies = [one.body for one in first] + received(world)
    assert set(bodies) == set(KEPT)


def small_messages(count: int) -> tuple[World, Segment]:
    """Return a world with a pack of small messages. Every second one is live."""
    world = World(
        retention_ms=400 * DAY_MS,
        segment_bytes=2 << 20,
        checkpoint_log_bytes=2 << 20,
        event_retention_ms=60_000,
    )
    for n in range(count // 100):
        for m in range(50):
            world.send(f"{n}-{m}", topic="kept")
            world.send("g" * 400, topic="gone")
    world.checkpoint()
    world.purge("gone")
    world.checkpoint()
    move_floor(world, floors(world)[-1])
    assert pack_all(world)
    segment = world.engine.log.segments[0]
    assert segment.pack is not None
    assert segment.pack.header.extent_count > 20 * packs.HEADS_A_SLICE
    return world, segment


@pytest.mark.parametrize("is_body_of_magic", [False, True])
def test_a_slice_reads_a_bounded_number_of_heads(
    is_body_of_magic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, segment = small_messages(10_000)
    assert segment.pack is not None
    header = segment.pack.header
    flip(world, 7)
    if is_body_of_magic:
        # Records are lost, and bytes like the begins of heads are there.
        at, size = header.records_end // 2, 64 << 10
        file = world.disk.open(segment.name)
        file.write_at(at, [MAGIC_BYTES * (size // 4)])
        file.sync()
        file.close()
        world.engine.mappings.forget(segment.name)
    heads = 0
    head_at = packs._head_at

    def counted(*arguments: object) -> object:
        nonlocal heads
        heads += 1
        return head_at(*arguments)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr(packs, "_head_at", counted)
    find_damage(world)
    assert heads == 0, "a look-up only checks the directory"
    turns: list[int] = []
    while world.engine.rebuilds.has_directory:
        heads = 0
        turns.extend(heads for _ in background_slices(world, 1))
    assert max(turns) <= packs.HEADS_A_SLICE + 2
    assert sum(turns) > header.extent_count // 2
    assert segment.pack.is_derived
    if not is_body_of_magic:
        for offset in live_offsets(world, segment):
            world.engine.log.verify(LogOffset(offset))


def find_damage(world: World) -> None:
    """Read all live messages of packs."""
    for segment in world.engine.log.segments:
        if segment.pack is not None:
            for offset in live_offsets(world, segment):
                with suppress(CorruptStore):
                    world.engine.log.read(LogOffset(offset))


def live_offsets(world: World, segment: Segment) -> list[int]:
    topic = world.engine.catalog.find_topic("kept")
    assert topic is not None
    queue = world.engine.catalog.queues[topic.id, QueueId(0)]
    offsets = [int(queue.entry(n)[0]) for n in range(queue.min_offset, queue.max_offset)]
    return [one for one in offsets if segment.start <= one < segment.end]


@pytest.mark.parametrize("part", range(0, 16, 3))
def test_events_are_read_after_the_derivation(part: int) -> None:
    world = packed(before_floor=False)
    before = events_of(world)
    flip(world, part, which=1)
    world.engine.log.reader._window = type(world.engine.log.reader._window)(None, [0], [0])
    try:
        found = events_of(world)
    except Repairing:
        assert derive_directories(world.engine) == 1
        found = events_of(world)
    assert found == before


def events_of(world: World) -> list[object]:
    lookup = world.engine.events.lookup
    lookup._messages.clear()
    reader = world.engine.events.read(
        EventQuery(), from_position=0, log_bytes_max=NO_END, events_max=NO_END
    )
    found: list[object] = []
    while reader.step():
        found += reader.take()
    assert reader.damaged_bytes == 0
    return [*found, *reader.take()]


def test_a_rewrite_of_derived_files_waits_for_the_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dead_entries, "FREED_BYTES_MIN", 1)
    world = packed()
    for which in range(len(directories(world.engine))):
        flip(world, 6, which=which)
    drop_dead_entries(world.engine)
    waits = [world.engine.rebuilds.has_directory]
    world.background()
    waits.append(world.engine.rebuilds.has_directory)
    assert waits == [True, False]
    drop_dead_entries(world.engine)
    find_damage(world)
    derive_directories(world.engine)
    topic = world.engine.catalog.find_topic("kept")
    assert topic is not None
    assert all(world.find(topic, message_id=f"id-{text}") for text in KEPT)


def replicas() -> tuple[Group, list[int]]:
    group = group_of(2)
    group.send(*[f"m{n}" for n in range(80)], size=1_000)
    group.settle()
    purge(group, 40)
    move_floor_of(group)
    for node in group.nodes:
        assert pack_node(group, node)
    queue = next(iter(group.nodes[0].engine.catalog.queues.values()))
    offsets = [int(queue.entry(n)[0]) for n in range(40, 80)]
    log = group.nodes[0].engine.log
    return group, [one for one in offsets if log.segment_of(LogOffset(one)).pack is not None]


@pytest.mark.parametrize("part", range(0, 16, 3))
def test_a_replica_derives_directories_and_serves_the_records_then(part: int) -> None:
    group, offsets = replicas()
    assert offsets
    replica, master = group.nodes[1], group.nodes[0]
    for name, begin, size in directories(replica.engine):
        replica.disk.damage(name, begin + part * (size - 1) // 15, bits=1 << part % 8)
    for offset in offsets:
        at = master.engine.log.segment_of(LogOffset(offset))
        position = master.engine.log.reader.position(at, offset)
        master.disk.damage(at.name, position + 70)
        master.engine.log.damage.request(LogOffset(offset))
    assert MendOutcome.SILENT in group.mend(0)
    for _ in range(1_000):
        if replica.engine.background.step(group.now_ms, firing_ms=group.now_ms) is None:
            break
    assert not replica.engine.rebuilds.has_directory
    group.now_ms += AGAIN_MS
    assert set(group.mend(0)) <= {MendOutcome.MENDED}
    assert master.engine.log.damage.given_up_count == 0
    for offset in offsets:
        master.engine.log.verify(LogOffset(offset))


def test_a_full_disk_does_not_stop_the_derivation() -> None:
    world = packed(FaultyDisk(Random(0), capacity_bytes=1 << 30))
    flip(world, 8)
    find_damage(world)
    waits = [world.engine.rebuilds.has_directory]
    world.leave_room(0)
    world.background()
    waits.append(world.engine.rebuilds.has_directory)
    assert waits == [True, False]
