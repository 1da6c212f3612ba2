"""A damaged message of an earlier process: only this message is dead-lettered."""

from __future__ import annotations

from random import Random
from zlib import crc32

import pytest

from tests.support.bodies import body_of
from tests.support.disk.faulty_disk import FaultyDisk, FaultyFile
from tests.support.disk.log_checker import check_log
from tests.support.disk.offline_world import finish
from tests.support.seeds import seeds
from tests.support.worlds.engine_world import GROUP, TOPIC, PoppedMessage, World, blob
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.layout.record import HEADER_SIZE
from tidemill.broker.engine.pop.redelivery import DamagedNotice
from tidemill.broker.offline.check import check
from tidemill.broker.offline.log_scan import REMAINS_BYTES_MAX
from tidemill.message import stored_message

SEEDS = 20
SEGMENT = 64 << 10
FIFO = "fifo"
DAY_MS = 86_400_000
DEAD = f"%DLQ%{GROUP}"
HEAD = HEADER_SIZE + 16  # bytes of an original's head


def world_of(count: int = 6, *, restarts: bool = True, is_ordered: bool = False) -> World:
    """Make a world with messages m0 to m5 of 200 bytes each, written by an earlier process."""
    world = World(FaultyDisk(Random(0)), segment_bytes=SEGMENT)
    world.group(is_ordered=is_ordered)
    world.topic("filler")
    for n in range(count):
        data = blob(f"m{n}", tag="t", keys=("k",), size=200)
        world.engine.commands.send(
            TopicId(world.topic()),
            QueueId(0),
            data,
            crc32(data),
            now_ms=world.now_ms,
            firing_ms=world.now_ms,
        )
    world.commit()
    if restarts:
        restart_from_checkpoint(world)
    return world


def restart_from_checkpoint(world: World) -> None:
    """Restart without records to replay: the whole log is from an earlier process."""
    world.checkpoint()
    world.restart()
    assert world.engine.store.verified_from > 0


def damage(world: World, offset: int, position: int, *, topic: str = TOPIC, bits: int = 1) -> None:
    """Flip bits of a byte in the record of a message; a negative position counts from its end."""
    queue = world.engine.catalog.queue(world.topic(topic), QueueId(0))
    log_offset, size, _ = queue.entry(offset)
    at = log_offset + (position if position >= 0 else size + position)
    start = world.engine.log.segment_start(log_offset)
    world.disk.damage(f"log/{start:020d}.log", at - start, bits=bits)


def dead_letters(world: World, topic: str = DEAD) -> list[PoppedMessage]:
    """Run the next round, and return the dead letters."""
    world.run_due()
    return world.pop(group="undertaker", topic=topic)


@pytest.mark.parametrize("seed", seeds("damaged messages", SEEDS))
def test_a_damaged_message_is_dead_lettered_and_the_others_arrive(seed: int) -> None:
    random = Random(seed)
    world = world_of(30)
    damaged = sorted(random.sample(range(30), 4))
    for n in damaged:
        damage(world, n, random.randrange(HEAD + 120, HEAD + 260), bits=1 << random.randrange(8))
    popped = world.pop(32)
    assert [one.offset for one in popped] == [n for n in range(30) if n not in damaged]
    assert world.engine.next_due_ms(world.now_ms, firing_ms=world.now_ms) == world.now_ms
    dead = dead_letters(world)
    assert [(one.body, one.origin) for one in dead] == [("", TOPIC)] * 4
    counts = world.engine.state.counts
    assert counts["damaged", world.group(), world.topic()] == 4
    assert counts["dead_lettered", world.group(), world.topic()] == 4
    world.ack(*popped)
    world.background()
    world.advance(DAY_MS)
    assert world.pop() == [], "neither the acked nor the damaged message comes back"
    check_log(world.disk)
    restart_from_checkpoint(world)
    assert world.pop() == []


def test_a_damaged_message_keeps_its_id_tag_and_position() -> None:
    world = world_of()
    damage(world, 2, -1)
    world.pop()
    world.run_due()
    topic = world.engine.catalog.find_topic(TOPIC)
    assert topic is not None
    found = world.find(topic, message_id="id-m2")
    assert [(one.stored_topic, one.reason, one.origin_topic) for one in found] == [
        (DEAD, "damaged", TOPIC)
    ]
    left = found[0].blob
    assert (stored_message.message_id_of(left), stored_message.tag_of(left)) == ("id-m2", "t")
    assert body_of(left) == b""
    notices = world.engine.consumption.redelivery.take_damaged_notices()
    assert [notice[:4] for notice in notices] == [(TOPIC, GROUP, 0, 2)]
    assert isinstance(notices[0], DamagedNotice)
    assert world.engine.consumption.redelivery.take_damaged_notices() == []


@pytest.mark.parametrize("position", range(HEAD + 64))
def test_any_byte_of_head_and_fields_may_be_damaged(position: int) -> None:
    for bits in (1, 128):
        world = world_of()
        damage(world, 2, position, bits=bits)
        popped = world.pop()
        assert [one.body for one in popped] == ["m0", "m1", "m3", "m4", "m5"]
        (dead,) = dead_letters(world)
        assert (dead.body, dead.origin) == ("", TOPIC)
        check_log(world.disk)


@pytest.mark.parametrize("position", [*range(HEAD + 64), -1])
def test_a_copy_on_a_retry_topic_may_be_damaged_anywhere(position: int) -> None:
    world = world_of(restarts=False)
    world.pop(3, invisible_ms=1_000)
    world.advance(1_001)
    restart_from_checkpoint(world)
    damage(world, 1, position, topic=f"%RETRY%{GROUP}+{TOPIC}", bits=128)
    popped = world.pop(invisible_ms=1_000)
    assert sorted(one.body for one in popped) == ["m0", "m2", "m3", "m4", "m5"]
    assert {one.attempt for one in popped} == {1, 2}
    (dead,) = dead_letters(world)
    assert (dead.body, dead.origin) == ("", TOPIC)


@pytest.mark.parametrize("position", [0, 8, 20, 40, 60, HEAD + 5, -1])
def test_a_message_that_is_damaged_in_flight_is_dead_lettered_at_its_deadline(
    position: int,
) -> None:
    world = world_of(restarts=False)
    world.pop(4, invisible_ms=60_000)
    restart_from_checkpoint(world)
    damage(world, 1, position)
    world.advance(60_001)
    assert [one.body for one in dead_letters(world)] == [""]
    assert sorted(world.bodies()) == ["m0", "m2", "m3", "m4", "m5"]


@pytest.mark.parametrize("position", [0, 8, 20, 40, HEAD + 5, -1])
def test_a_client_may_dead_letter_a_message_that_was_damaged_in_flight(position: int) -> None:
    world = world_of()
    popped = world.pop(2)
    damage(world, 0, position)
    world.engine.commands.dead_letter(popped[0].delivery, world.now_ms)
    world.commit()
    assert [one.body for one in dead_letters(world)] == [""]


def test_a_body_that_is_damaged_by_its_own_process_is_not_copied_with_a_wrong_checksum() -> None:
    world = world_of(restarts=False)
    world.pop(2, invisible_ms=1_000)
    damage(world, 0, -1)
    world.advance(1_001)
    assert [one.body for one in dead_letters(world)] == [""]
    assert "m1" in world.bodies()


def test_an_ordered_queue_continues_after_a_damaged_message() -> None:
    world = world_of(is_ordered=True)
    for n in (0, 2, 3):
        damage(world, n, -1)
    assert world.pop(1) == []
    world.run_due()
    assert world.bodies(2) == ["m1"]
    world.advance(60_000)
    assert world.bodies(2) == ["m1"], "the damaged neighbour is settled"
    again = world.pop(3)
    assert again == []
    world.advance(60_000)
    popped = world.pop(32)
    assert [one.body for one in popped] == ["m1", "m4", "m5"]
    world.ack(*popped)
    assert len(dead_letters(world)) == 3
    assert world.pop() == []


def test_a_repeated_attempt_gets_the_readable_messages() -> None:
    world = world_of(is_ordered=True)
    damage(world, 1, -1)
    assert world.bodies(3, attempt_id="a") == ["m0", "m2"]
    assert world.bodies(3, attempt_id="a") == ["m0", "m2"]
    assert len(dead_letters(world)) == 1


@pytest.mark.parametrize("position", range(HEAD, HEAD + 90))
def test_a_filter_does_not_skip_a_damaged_message(position: int) -> None:
    world = world_of()
    damage(world, 1, position)
    assert world.bodies(tags=("t",)) == ["m0", "m2", "m3", "m4", "m5"]
    assert len(dead_letters(world)) == 1


def test_a_damaged_dead_letter_stays_in_its_topic() -> None:
    world = world_of()
    popped = world.pop(2)
    world.engine.commands.dead_letter(popped[0].delivery, world.now_ms)
    world.commit()
    restart_from_checkpoint(world)
    damage(world, 0, -1, topic=DEAD)
    assert world.pop(group="undertaker", topic=DEAD) == []
    world.run_due()
    assert world.engine.catalog.find_topic("%DLQ%undertaker") is None
    assert world.pop(group="undertaker", topic=DEAD) == []


def test_a_damaged_message_that_is_met_twice_is_settled_once() -> None:
    world = world_of()
    damage(world, 0, -1)
    group, topic = world.group(), world.topic()
    batches = world.engine.commands.pop(
        group,
        topic,
        max_messages=2,
        invisible_duration_ms=60_000,
        attempt_id="",
        now_ms=world.now_ms,
    )
    world.commit()
    for _ in range(2):
        part, _ = world.engine.consumption.damaged.readable_part(batches[0])
        assert list(part.queue_offsets) == [1]
    assert len(dead_letters(world)) == 1


def test_a_reset_before_the_next_round_leaves_nothing_to_settle() -> None:
    world = world_of()
    damage(world, 0, -1)
    assert len(world.pop()) == 5
    target = ResetTarget(latest=True)
    world.engine.administration.reset_offset(GROUP, TOPIC, target, world.now_ms)
    world.commit()
    assert dead_letters(world) == []


def test_queries_skip_a_damaged_message() -> None:
    world = world_of()
    for position in (0, 20, 46):
        damage(world, 2, position)
    topic, group = world.engine.catalog.find_topic(TOPIC), world.engine.catalog.find_group(GROUP)
    assert topic is not None
    assert group is not None
    assert world.find(topic, message_id="id-m2") == []
    assert len(world.find(topic, key="k")) == 5
    world.pop(2)
    (progress,) = world.engine.inspection.group_progress(group)
    assert progress.ready_count == 4
    search = world.engine.inspection.look_up_time(topic, world.now_ms)
    assert not search.step()
    assert search.offsets == [0]


@pytest.mark.parametrize("count", [1, 30])
def test_a_damaged_size_causes_no_large_read(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(FaultyDisk(Random(0)), segment_bytes=16 << 20)
    world.group()
    world.send(*[f"m{n}" for n in range(count)], size=1_000)
    world.checkpoint()
    world.restart()
    at, _, _ = world.engine.catalog.queue(world.topic(), QueueId(0)).entry(count // 2)
    world.disk.damage("log/00000000000000000000.log", at + 9, bits=0x80)  # 8 MiB more
    sizes: list[int] = []
    read_at = FaultyFile.read_at

    def counted(file: FaultyFile, offset: int, size: int) -> bytes:
        sizes.append(size)
        return read_at(file, offset, size)

    monkeypatch.setattr(FaultyFile, "read_at", counted)
    assert len(world.drain()) == count - 1
    assert sum(sizes) < 2 << 20
    sizes.clear()
    report = finish(check(world.disk))
    assert [one.log_offset for one in report.findings] == [at]
    assert "impossible size" not in report.findings[0].detail
    assert max(sizes) <= REMAINS_BYTES_MAX
