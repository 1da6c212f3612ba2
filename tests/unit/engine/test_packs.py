"""Packs: the space of dead messages returns, and nothing else changes."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.disk.log_checker import check_log
from tests.support.seeds import seeds
from tests.support.worlds.engine_world import PoppedMessage, World
from tests.support.worlds.packed_worlds import (
    DAY_MS,
    delete_topic,
    drop_dead_entries,
    floors,
    forget_derived_files,
    move_floor,
    pack_all,
    pack_engine,
    small_world,
    two_topics,
    used,
)
from tidemill.broker.engine.events.event import Event, EventKind, EventQuery
from tidemill.broker.engine.layout import pack
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.broker.engine.store.segment import CorruptStore
from tidemill.broker.engine.upkeep import dead_entries, packing


def names(world: World) -> list[str]:
    return [name.removeprefix("log/") for name in world.disk.names("log")]


def test_a_pack_keeps_the_messages_of_other_topics_at_their_log_offsets() -> None:
    world = small_world()
    kept = two_topics(world)
    queue = world.engine.catalog.queue(world.topic("kept"), QueueId(0))
    before = [log_offset for log_offset, _, _ in queue.walk(0)]
    whole = used(world)
    world.purge("gone")
    assert pack_all(world) >= 4
    assert any(name.endswith(".pack") for name in names(world))
    assert used(world) < whole // 2
    assert [log_offset for log_offset, _, _ in queue.walk(0)] == before
    assert world.drain(topic="kept") == kept
    assert world.drain(topic="gone") == []


@pytest.mark.parametrize("power_cut", [False, True])
@pytest.mark.parametrize("folders", [(), ("queues", "index", "snapshots")])
def test_a_start_reads_packs(*, power_cut: bool, folders: tuple[str, ...]) -> None:
    world = small_world()
    kept = two_topics(world)
    world.purge("gone")
    assert pack_all(world)
    world.disk = world.disk.after_power_cut() if power_cut else world.disk.after_kill()
    for folder in folders:
        for name in world.disk.names(folder):
            world.disk.remove(name)
    if folders:
        world.disk.remove("checkpoint")
    world.open()
    assert world.drain(topic="kept") == kept
    assert world.drain(topic="gone") == []
    check_log(world.disk)


def test_a_replica_copies_the_log_from_packs() -> None:
    world = small_world(is_followed=True)
    kept = two_topics(world)
    world.purge("gone")
    assert pack_all(world)
    world.fail_over()
    # The new follower has copied packs. It has whole segments with stubs, and packs them too.
    assert world.follower is not None
    world.checkpoint()
    world.fail_over()
    world.checkpoint()
    assert pack_all(world)
    world.restart()
    assert world.drain(topic="kept") == kept
    assert world.drain(topic="gone") == []
    check_log(world.disk)


@pytest.mark.parametrize("power_cut", [False, True])
def test_a_stop_at_any_operation_of_a_pack_loses_nothing(*, power_cut: bool) -> None:
    """Each run stops one disk operation later than the one before, until the pack is complete."""
    step, is_done = 0, False
    while not is_done:
        world = small_world(FaultyDisk(Random(step)))
        kept = two_topics(world, count=45)
        world.purge("gone")
        world.disk.cut_at = len(world.disk.operations) + step
        try:
            assert pack_all(world)
            is_done = True
        except PowerCut:
            step += 1
        world.restart(power_cut=power_cut)
        assert not [name for name in names(world) if name.endswith(".packing")]
        assert world.drain(topic="kept") == kept
        assert world.drain(topic="gone") == []
        check_log(world.disk)
    assert step >= 8


def test_a_flipped_bit_is_found_or_has_no_effect() -> None:
    """In the header, the directory, a stub, a kept message, and the copy of the header."""
    for power_cut in (False, True):
        for part in range(40):
            world = small_world(FaultyDisk(Random(part)))
            kept = two_topics(world, count=45)
            world.purge("gone")
            assert pack_all(world)
            name = next(name for name in world.disk.names("log") if name.endswith(".pack"))
            data = world.disk.read(name) or b""
            header = pack.find_header(data)
            assert header is not None
            at = part * len(data) // 40 if part else 9
            if 1 <= part < 8:
                at = header.records_end + part - 1  # in the directory
            world.disk.damage(name, at)
            for folder in ("queues", "index", "snapshots"):
                for one in world.disk.names(folder) if part % 2 else ():
                    world.disk.remove(one)
            refusal = ""
            try:
                world.restart(power_cut=power_cut)
            except CorruptStore as error:
                refusal = str(error)
            if refusal:
                assert f"{name} is damaged" in refusal
                assert pack.HEADER_SIZE <= at < header.records_end
                continue
            found = world.drain(topic="kept")
            # A damaged message is dead-lettered without its body (ADR 0016).
            assert set(found) <= {*kept, ""}
            assert len(found) >= len(kept) - 1
            assert world.drain(topic="gone") == []


def test_a_log_that_lost_the_records_a_pack_relies_on_does_not_start() -> None:
    """Without the purge, the dead messages of the pack would be alive and have no content."""
    world = small_world()
    two_topics(world)
    end = world.engine.log.log_end
    world.purge("gone")
    assert pack_all(world)
    world.disk = world.disk.after_kill()
    world.disk.remove("checkpoint")
    last = world.engine.log.segments[-1]
    world.disk.zero(last.name, end - last.start, last.end - end)
    with pytest.raises(CorruptStore, match="is damaged"):
        world.open()


def test_a_strange_file_beside_a_pack_is_not_deleted() -> None:
    world = small_world()
    two_topics(world)
    world.purge("gone")
    assert pack_all(world)
    file = world.disk.open("log/old backup.log", create=True)
    file.resize(4_096)
    file.sync()
    world.disk.folder("log").sync()
    with pytest.raises(CorruptStore, match=r"old backup\.log is not a segment"):
        world.restart()
    assert "old backup.log" in names(world)


def test_a_disk_without_room_delays_a_pack_and_does_not_prevent_it() -> None:
    world = small_world(FaultyDisk(Random(0), capacity_bytes=16 << 20), disk_reserve_bytes=4 << 20)
    kept = two_topics(world)
    world.background()
    world.purge("gone")
    world.leave_room(12 << 10)
    for _ in range(5):
        world.advance(1_100)
        world.background()
    assert not [name for name in names(world) if name.endswith((".pack", ".packing"))]
    world.leave_room(8 << 20)
    for _ in range(5):
        world.advance(31_000)
        world.background()
    assert [name for name in names(world) if name.endswith(".pack")]
    assert world.drain(topic="kept") == kept


@pytest.mark.parametrize("free_bytes", [1 << 20, 100 << 10, 32 << 10])
def test_a_deletion_frees_space_if_the_disk_has_room_for_a_pack(free_bytes: int) -> None:
    """Free space below the reserve, below a quarter of it, and below 1/32."""
    world = small_world(FaultyDisk(Random(0), capacity_bytes=64 << 20), disk_reserve_bytes=4 << 20)
    kept = two_topics(world)
    world.background()
    whole = used(world)
    world.leave_room(free_bytes)
    delete_topic(world, "gone")
    for _ in range(3):
        world.advance(2_000)
        world.background()
    assert used(world) < whole // 2
    world.leave_room(8 << 20)
    assert world.drain(topic="kept") == kept


def test_a_pack_that_does_not_fit_the_disk_does_not_delay_a_smaller_one() -> None:
    """The stubs of small messages need more space than a live message in another segment."""
    world = small_world(FaultyDisk(Random(0), capacity_bytes=64 << 20), disk_reserve_bytes=4 << 20)
    segments = world.engine.log.segments
    world.send("first", topic="kept")
    while len(segments) < 3:
        world.send("small", topic="gone", size=300)
    world.send("second", topic="kept", size=1_000)
    while len(segments) < 6:
        world.send("large", topic="gone", size=4_000)
    world.checkpoint()
    world.background()
    before = [one.file_size for one in segments]
    world.leave_room(24 << 10)
    delete_topic(world, "gone")
    for _ in range(2):
        world.background(between=lambda: world.leave_room(24 << 10))
        world.advance(1_000)
    assert [one.pack is not None for one in segments] == [False, False, True, True, False, False]
    assert [one.file_size for one in segments[:2]] == before[:2]
    world.leave_room(1 << 20)
    world.background()
    world.advance(1_000)
    world.background()
    assert [one.pack is not None for one in segments] == [True] * 4 + [False] * 2


def test_a_disk_that_becomes_full_during_a_pack_costs_only_this_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = small_world(FaultyDisk(Random(0), capacity_bytes=64 << 20))
    kept = two_topics(world)
    world.background()
    world.purge("gone")
    world.leave_room(4 << 10)
    room = world.engine.room
    monkeypatch.setattr(type(room), "has_room_for_pack", lambda *_, **__: True)
    failures = 0
    for _ in range(90):
        world.advance(1_000)
        before = sum(".packing" in one for one in world.disk.operations)
        world.background()
        failures += sum(".packing" in one for one in world.disk.operations) > before
        assert not [name for name in names(world) if name.endswith(".packing")]
    assert 3 <= failures <= 4, "each segment pauses after an attempt"
    world.leave_room(1 << 20)
    world.advance(31_000)
    world.background()
    assert [name for name in names(world) if name.endswith(".pack")]
    assert world.drain(topic="kept") == kept


def test_the_topic_of_a_pack_may_be_deleted() -> None:
    world = small_world()
    kept = two_topics(world)
    world.pop(5, topic="gone")
    delete_topic(world, "gone")
    assert pack_all(world)
    world.advance(DAY_MS)
    world.restart()
    assert world.drain(topic="kept") == kept
    world.send("again", topic="gone")
    assert world.drain(topic="gone") == ["again"]
    check_log(world.disk)


def test_messages_in_flight_expire_without_a_copy_after_their_content_is_freed() -> None:
    world = small_world()
    world.group(max_attempts=5)
    two_topics(world)
    acked, *_ = world.pop(8, topic="gone", invisible_ms=30_000)
    world.purge("gone")
    assert pack_all(world)
    assert world.ack(acked) == [AckResult.APPLIED]
    world.advance(31_000)
    assert world.drain(topic="gone") == []
    assert world.engine.store.damaged_count == 0
    world.restart()
    world.advance(DAY_MS)
    assert world.drain(topic="gone") == []
    check_log(world.disk)


def test_the_background_packs_segments_with_most_of_their_messages_dead() -> None:
    world = small_world()
    kept = two_topics(world)
    world.background()
    assert not [name for name in names(world) if name.endswith(".pack")], "all messages are live"
    whole = used(world)
    world.purge("gone")
    for _ in range(60):
        world.advance(11_000)
        world.background()
    assert used(world) < whole // 2
    assert whole - used(world) >= world.engine.packing.copied_bytes, "R-10"
    assert world.drain(topic="kept") == kept


def test_a_pack_that_would_free_too_little_is_not_written() -> None:
    """Each small message leaves a stub of nearly its own size."""
    world = small_world()
    world.send("kept", topic="kept")
    while len(world.engine.log.segments) < 4:
        world.send(*["small"] * 50, topic="gone")
    world.checkpoint()
    world.background()
    for part in (2, 1):
        world.purge("gone", low=len(world.drain(topic="gone")) // part)
        world.advance(11_000)
        world.background()
    assert not [one for one in world.disk.operations if ".packing" in one]


def test_the_bytes_of_an_incomplete_pack_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the rate of copied bytes would not limit repeated attempts."""
    monkeypatch.setattr(packing, "SLICE_BYTES", 1_000)
    monkeypatch.setattr(packing, "RECORDS_A_SLICE", 4)
    world = small_world(FaultyDisk(Random(0), capacity_bytes=64 << 20))
    two_topics(world)
    world.purge("gone")
    world.leave_room(4_096)  # the first part of a pack fits
    monkeypatch.setattr(type(world.engine.room), "has_room_for_pack", lambda *_, **__: True)
    assert pack_all(world) == 0
    assert world.engine.packing.copied_bytes >= 4_000


def packed_at_once(world: World) -> int:
    """Run the background work without letting time pass; return the number of new packs."""
    before = world.engine.packing.packed_count
    world.background()
    return world.engine.packing.packed_count - before


def two_due_packs() -> World:
    world = small_world(
        FaultyDisk(Random(0), capacity_bytes=64 << 20),
        pack_rate_bytes=1_000,
        disk_reserve_bytes=1 << 20,
        event_retention_ms=DAY_MS,
    )
    two_topics(world, count=150)
    world.background()
    world.purge("gone")
    world.now_ms += packing.LOOK_PERIOD_MS
    return world


def test_the_next_pack_waits_as_long_as_the_rate_demands() -> None:
    world = two_due_packs()
    assert packed_at_once(world) == 1
    wait_ms = world.engine.packing.copied_bytes  # at 1,000 bytes per second
    world.now_ms += wait_ms - 1
    assert packed_at_once(world) == 0
    world.now_ms += 1
    assert packed_at_once(world) == 1


def test_nothing_limits_the_rate_of_packs_on_a_full_disk() -> None:
    world = two_due_packs()
    assert packed_at_once(world) == 1
    packing_ = world.engine.packing
    assert packing_.take_pace_s() == packing_.copied_bytes / 1_000
    world.leave_room(100 << 10)
    assert world.engine.room.is_full
    world.now_ms += packing.LOOK_PERIOD_MS
    assert packed_at_once(world) >= 2, "no pack waits for the one before it"
    assert packing_.take_pace_s() == 0


def test_below_feature_level_2_nothing_is_packed() -> None:
    world = small_world(feature_level=1)
    two_topics(world)
    delete_topic(world, "gone")
    for _ in range(20):
        world.advance(11_000)
        world.background()
    assert not [name for name in names(world) if name.endswith(".pack")]


def test_a_pack_is_packed_again_when_more_messages_are_dead() -> None:
    world = small_world()
    two_topics(world, kept_size=15_000)
    world.purge("gone")
    assert pack_all(world)
    small = used(world)
    first = world.engine.log.segments[0]
    assert first.pack is not None
    stubs = first.pack.header.stub_bytes
    delete_topic(world, "kept")
    assert pack_all(world)
    assert used(world) < small
    first = world.engine.log.segments[0]
    assert first.pack is not None
    assert first.pack.header.stub_bytes > stubs
    world.restart()
    check_log(world.disk)


def test_the_read_ahead_of_a_pack_stays_in_its_file() -> None:
    world = small_world()
    two_topics(world)
    world.purge("gone")
    assert pack_all(world)
    log = world.engine.log
    for begin in range(0, log.log_end, 777):
        log.advise(LogOffset(begin), 20_000)  # The disk checks the range.
    assert {name for name, _, _ in world.disk.advised} == {one.name for one in log.segments}


def test_a_reader_of_events_misses_none_over_packs() -> None:
    """Its positions stay; only the size and the checksum of freed bodies are gone."""
    world = small_world()
    two_topics(world)
    for one in world.pop(3, topic="gone"):
        world.ack(one)
    world.purge("gone")
    before = events_of(world)
    assert pack_all(world)
    after = events_of(world)
    assert [one._replace(body_size=0, body_crc32=0) for one in before] == [
        one._replace(body_size=0, body_crc32=0) for one in after
    ]
    assert [one for one in after if one.kind is EventKind.STORED and one.body_size == 0]
    middle = before[len(before) // 2].position
    assert [one.position for one in events_of(world, middle)] == [
        one.position for one in before if one.position >= middle
    ]


def events_of(world: World, begin: int = 0) -> list[Event]:
    reader = world.engine.events.read(
        EventQuery(), from_position=begin, log_bytes_max=1 << 40, events_max=1 << 30
    )
    while reader.step():
        pass
    return reader.take()


@pytest.mark.parametrize("seed", seeds("packs", 60))
def test_packs_change_no_state_in_any_order_of_events(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second engine has other packs and derived files, and the worlds compare both."""
    monkeypatch.setattr(dead_entries, "FREED_BYTES_MIN", 1)
    random = Random(seed)
    world = small_world(FaultyDisk(random), is_followed=random.random() < 0.7, files_merged=2)
    topics = [f"t{n}" for n in range(3)]
    groups = {"plain": False, "ordered": True}
    for name, is_ordered in groups.items():
        world.group(name, is_ordered=is_ordered, max_attempts=16)
    sent, low = dict.fromkeys(topics, 0), dict.fromkeys(topics, 0)

    def send() -> None:
        topic = random.choice(topics)
        for _ in range(random.randrange(1, 8)):
            world.send(f"{topic} {sent[topic]}", topic=topic, size=random.choice([0, 2_000, 6_000]))
            sent[topic] += 1

    def purge() -> None:
        topic = random.choice(topics)
        wanted = random.randrange(sent[topic] + 1)
        world.purge(topic, low=wanted, with_retries=False)
        low[topic] = max(low[topic], wanted)

    def disturb() -> None:
        if random.random() < 0.2:
            random.choice([purge, send])()

    def pack_some() -> None:
        world.checkpoint()
        if random.random() < 0.7:
            pack_all(world, between=disturb)
        if random.random() < 0.5:
            drop_dead_entries(world.engine, between=disturb)
        if world.follower is not None and random.random() < 0.7:
            follower = world.follower.engine
            for files in follower.checkpoints.write():
                for file in files:
                    file.sync()
            pack_engine(follower)
            if random.random() < 0.5:
                drop_dead_entries(follower)

    def check(popped: PoppedMessage) -> None:
        topic, number = popped.body.split()
        assert popped.attempt > 1 or int(number) >= low[topic], (popped, low)

    out: list[PoppedMessage] = []
    for _ in range(120):
        match random.randrange(12):
            case 0 | 1 | 2 | 3:
                send()
            case 4 | 5:
                popped = world.pop(
                    random.randrange(1, 9),
                    topic=random.choice(topics),
                    group=random.choice(list(groups)),
                    invisible_ms=10_000,
                )
                for one in popped:
                    check(one)
                out += popped
            case 6 if out:
                world.ack(out.pop(random.randrange(len(out))))
            case 7:
                world.advance(random.choice([1_000, 11_000]))
            case 8:
                purge()
            case 9:
                pack_some()
            case 10 if random.random() < 0.5:
                if world.follower is not None and random.random() < 0.5:
                    world.fail_over()
                elif random.random() < 0.4:
                    forget_derived_files(world)
                    world.open()
                else:
                    world.restart(power_cut=random.random() < 0.5)
            case 11 if random.random() < 0.5:
                world.checkpoint()
                if ends := floors(world):
                    move_floor(world, random.choice(ends))
    world.restart()
    for name in groups:
        for topic in topics:
            seen = set()
            world.advance(11_000)
            while popped := world.pop(32, group=f"{name} new", topic=topic):
                seen |= {one.body for one in popped}
                world.ack(*popped)
            assert seen == {f"{topic} {n}" for n in range(low[topic], sent[topic])}
    if world.engine.log.state_floor == world.engine.log.min_offset:
        check_log(world.disk)
