"""A purge: the messages before the low of a queue are dead, for everyone and for good."""

from __future__ import annotations

from random import Random
from zlib import crc32

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.log_checker import check_log
from tests.support.seeds import seeds
from tests.support.worlds.engine_world import TOPIC, PoppedMessage, World, blob
from tidemill.broker.engine.configuration.purge import PurgedQueue
from tidemill.broker.engine.layout import trim
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.layout.record import RecordKind, UnknownRecord
from tidemill.broker.engine.layout.trim import Trim, TrimmedQueue, TrimReason
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.common.errors import Conflict

DAY_MS = 86_400_000


def lose_caches(world: World) -> None:
    """Restart with nothing but the log."""
    disk = world.disk.after_kill()
    for folder in ("queues", "index", "snapshots"):
        for name in disk.names(folder):
            disk.remove(name)
    if "checkpoint" in disk.names(""):
        disk.remove("checkpoint")
    world.disk = disk
    world.open()


def test_purged_messages_are_not_delivered_and_later_ones_are() -> None:
    world = World()
    world.group()
    world.send("a", "b", "c")
    assert world.purge() == 3
    assert world.drain() == []
    world.send("d")
    assert world.drain() == ["d"]
    assert world.drain(group="begins later") == ["d"]


def test_a_search_finds_no_purged_message() -> None:
    world = World()
    topic_id = world.topic()
    topic = world.engine.catalog.topics[topic_id]
    for n in range(2):
        data = blob(f"m{n}", message_id=f"id-{n}", keys=("key",))
        world.engine.commands.send(
            topic_id, QueueId(0), data, crc32(data), now_ms=world.now_ms, firing_ms=world.now_ms
        )
    world.commit()
    assert len(world.find(topic, key="key")) == 2
    world.purge(low=1)
    assert [one.queue_offset for one in world.find(topic, key="key")] == [1]
    assert world.find(topic, message_id="id-0") == []
    assert len(world.find(topic, message_id="id-1")) == 1


def test_a_purge_before_an_offset_keeps_the_later_messages() -> None:
    world = World()
    world.send("a", "b", "c", "d")
    assert world.purge(low=2) == 2
    assert world.purge(low=1) == 0
    assert world.drain() == ["c", "d"]


def test_acks_of_messages_in_flight_succeed_and_nothing_comes_back() -> None:
    world = World()
    world.group(max_attempts=5)
    world.send("a", "b", "c")
    acked, forgotten = world.pop(2, invisible_ms=30_000)
    world.purge()
    assert world.ack(acked) == [AckResult.APPLIED]
    world.advance(31_000)
    assert world.drain() == []
    assert world.ack(forgotten) != [AckResult.APPLIED]
    world.advance(DAY_MS)
    assert world.drain() == []
    check_log(world.disk)


def test_an_ordered_group_goes_on_at_the_low() -> None:
    world = World()
    world.group("ordered", is_ordered=True)
    world.send("a", "b", "c", "d")
    [first] = world.pop(1, group="ordered", attempt_id="1")
    world.purge(low=3)
    assert world.bodies(group="ordered", attempt_id="2") == ["d"]
    assert world.ack(first) == [AckResult.ALREADY], "its client gets OK"
    check_log(world.disk)


@pytest.mark.parametrize(("with_retries", "left"), [(False, ["a", "b"]), (True, [])])
def test_retries_stay_unless_they_are_included(*, with_retries: bool, left: list[str]) -> None:
    world = World()
    world.group(max_attempts=5)
    world.send("a", "b")
    for popped in world.pop(2, invisible_ms=10_000):
        world.change(popped, 10_000)
    world.advance(11_000)
    assert any(one.retry_of is not None for one in world.engine.catalog.topics.values())
    world.purge(with_retries=with_retries)
    assert sorted(world.drain()) == left


@pytest.mark.parametrize("power_cut", [False, True])
@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_a_purge_survives_a_restart(*, power_cut: bool, with_checkpoint: bool) -> None:
    world = World()
    world.group()
    world.send("a", "b", "c", "d")
    world.checkpoint()
    world.purge(low=3)
    if with_checkpoint:
        world.checkpoint()
    world.restart(power_cut=power_cut)
    assert world.drain() == ["d"]
    assert world.drain(group="other") == ["d"]
    lose_caches(world)
    assert world.drain(group="a third") == ["d"]


def test_a_purge_states_what_groups_lose_before_the_queue_begins_later() -> None:
    """The audit of the pipeline and the metrics count these messages as expired."""
    world = World()
    world.send("a", "b", "c")
    world.pop(1)
    world.group("never read")
    world.purge()
    found = check_log(world.disk)
    assert (found.kinds[RecordKind.EXPIRE], found.kinds[RecordKind.TRIM]) == (1, 1)
    [(key, count)] = [
        (key, n) for key, n in world.engine.state.counts.items() if key[0] == "expired"
    ]
    assert (count, key[2]) == (2, world.topic())


def test_a_follower_trims_as_its_master() -> None:
    world = World(is_followed=True)
    world.group()
    world.send("a", "b", "c", "d")
    world.pop(1)
    world.purge(low=3)
    world.send("e")
    world.fail_over()
    assert world.drain(group="other") == ["d", "e"]


def test_a_purge_lets_the_oldest_segments_go() -> None:
    world = World(FaultyDisk(Random(0)), retention_ms=400 * DAY_MS)
    world.group()
    for n in range(24):
        world.send(f"m{n}", size=130_000)
    before = world.engine.log.min_offset
    world.purge()
    world.background()
    assert world.engine.log.min_offset > before
    world.restart()
    world.send("later")
    assert world.drain() == ["later"]


def test_a_purge_needs_its_level() -> None:
    world = World(feature_level=1)
    world.send("a")
    with pytest.raises(Conflict, match="has feature level 1, and a purge needs 2"):
        world.purge()
    assert world.drain() == ["a"]


def test_a_count_adds_the_sizes_of_the_records() -> None:
    world = World()
    world.send(*[f"m{n}" for n in range(40)])
    world.checkpoint()
    world.send("in memory")
    topic = world.engine.catalog.find_topic(TOPIC)
    assert topic is not None
    queue = world.engine.catalog.queue(topic.id, QueueId(0))
    sizes = [size for _, size, _ in queue.walk(0)]
    [found] = world.engine.purge.topics_of(topic, with_retries=False)
    assert found == topic
    counting = world.engine.purge.count([PurgedQueue(topic.id, QueueId(0), 39)])
    while counting.step():
        pass
    assert (counting.messages, counting.size_bytes) == (39, sum(sizes[:39]))


def test_the_body_of_a_record_is_read_as_it_was_written() -> None:
    written = Trim(
        [
            TrimmedQueue(TopicId(7), QueueId(3), TrimReason.PURGE, 1 << 40),
            TrimmedQueue(TopicId(2**32 - 1), QueueId(1023), TrimReason.PURGE, 1),
        ]
    )
    encoded = trim.encode(written)
    assert trim.decode(encoded) == written
    assert encoded[:15] == bytes.fromhex("00000007 0003 04 0000010000000000")
    with pytest.raises(UnknownRecord, match="TRIM record"):
        trim.decode(encoded[:6] + b"\x09" + encoded[7:])


@pytest.mark.parametrize("seed", seeds("purge", 40))
def test_no_purged_message_returns_in_any_order_of_events(seed: int) -> None:
    """Purges among sends, pops, acks, retries, checkpoints, merges, restarts and failovers."""
    random = Random(seed)
    world = World(FaultyDisk(random), is_followed=random.random() < 0.5, files_merged=2)
    groups = {"plain": False, "ordered": True}
    for name, is_ordered in groups.items():
        world.group(name, is_ordered=is_ordered, max_attempts=16)
    sent = low = low_of_retries = 0

    def purge() -> None:
        nonlocal low, low_of_retries
        if random.random() < 0.5:
            world.purge(with_retries=True)
            low = low_of_retries = sent
        else:
            wanted = random.randrange(sent + 1)
            world.purge(low=wanted)
            low = max(low, wanted)

    def send() -> None:
        nonlocal sent
        for _ in range(random.randrange(1, 6)):
            world.send(f"{sent}", size=random.choice([0, 0, 3_000]))
            sent += 1

    def disturb() -> None:
        """Purge or send between two slices of background work."""
        if random.random() < 0.2:
            random.choice([purge, send])()

    def check(popped: PoppedMessage) -> int:
        """Check that a message is not purged. Retries of purged messages may be included or not."""
        number, is_retry = int(popped.body), popped.attempt > 1
        assert number >= (low_of_retries if is_retry else low), (popped, low, low_of_retries)
        return number

    out: list[tuple[str, object]] = []
    seen: dict[str, set[int]] = {name: set() for name in groups}
    for _ in range(120):
        match random.randrange(10):
            case 0 | 1 | 2:
                send()
            case 3 | 4:
                name = random.choice(list(groups))
                popped = world.pop(random.randrange(1, 9), group=name, invisible_ms=10_000)
                seen[name] |= {check(one) for one in popped}
                out += [(name, one) for one in popped]
            case 5 if out:
                world.ack(out.pop(random.randrange(len(out)))[1])  # type: ignore[arg-type]  # a popped message
            case 6:
                world.advance(random.choice([1_000, 11_000]))
            case 7:
                purge()
            case 8:
                world.checkpoint(disturb)
                world.background(between=disturb)
            case 9 if random.random() < 0.4:
                if world.follower is not None and random.random() < 0.5:
                    world.fail_over()
                else:
                    world.restart(power_cut=random.random() < 0.5)
    world.restart()
    for name in groups:
        world.advance(11_000)
        while popped := world.pop(32, group=name, invisible_ms=10_000):
            seen[name] |= {check(one) for one in popped}
            world.ack(*popped)
        assert seen[name] >= set(range(low, sent)), f"{name} lacks messages"
    check_log(world.disk)
