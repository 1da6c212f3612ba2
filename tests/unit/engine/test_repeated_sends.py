"""A repeated send finds the stored message, and no other message."""

from __future__ import annotations

from zlib import crc32

import pytest

from tests.support.worlds.engine_world import World, blob
from tests.support.worlds.packed_worlds import SEGMENT, floors, move_floor, pack_all, small_world
from tidemill.broker.engine import message_store
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.message_store import RECENT_MS, RECENT_STEP_MS
from tidemill.common.errors import BrokerTimeout

DAY_MS = 86_400_000


def opened(*, segment_bytes: int = 1 << 20) -> tuple[World, TopicId]:
    world = World(segment_bytes=segment_bytes)
    topic = world.engine.administration.put_topic("t", type_=None, queues=2, now_ms=world.now_ms)
    return world, topic.id


def found(world: World, topic_id: TopicId, queue_id: int, data: bytes) -> int | None:
    return world.engine.store.find_sent(topic_id, QueueId(queue_id), data)


def append(world: World, topic_id: TopicId, queue_id: int, data: bytes) -> None:
    world.engine.commands.send(
        topic_id, QueueId(queue_id), data, crc32(data), now_ms=world.now_ms, firing_ms=world.now_ms
    )


def test_a_message_is_found_by_all_of_its_bytes_in_its_queue() -> None:
    world, topic_id = opened()
    sent, other = blob("m1", keys=("a",)), blob("m1", keys=("b",))
    assert found(world, topic_id, 0, sent) is None
    append(world, topic_id, 0, blob("m0"))
    append(world, topic_id, 0, sent)
    # Also before it is written, and before it is durable.
    assert found(world, topic_id, 0, sent) == 1
    world.commit()
    assert found(world, topic_id, 0, sent) == 1
    assert found(world, topic_id, 1, sent) is None
    assert found(world, topic_id, 0, other) is None


def test_a_message_is_found_after_a_restart_and_after_checkpoints() -> None:
    world, topic_id = opened()
    sent = blob("m1")
    append(world, topic_id, 0, sent)
    world.commit()
    world.checkpoint()
    assert found(world, topic_id, 0, sent) == 0
    world.restart(power_cut=True)
    assert found(world, topic_id, 0, sent) == 0


def test_an_old_message_is_not_found() -> None:
    world, topic_id = opened()
    sent = blob("m1")
    world.engine.store.note_time(0)
    append(world, topic_id, 0, sent)
    for n in range(RECENT_MS // 1_000):
        world.engine.store.note_time(1_000 * n)
        assert found(world, topic_id, 0, sent) == 0
    world.engine.store.note_time(RECENT_MS + RECENT_STEP_MS)
    assert found(world, topic_id, 0, sent) is None


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("step_ms", [-DAY_MS, 4 * DAY_MS])
def test_a_message_is_found_although_the_clock_was_moved(
    step_ms: int, *, is_restarted: bool
) -> None:
    world, topic_id = opened(segment_bytes=64 << 10)
    sent = blob("m1")
    world.engine.store.note_time(0)
    append(world, topic_id, 0, sent)
    for n in range(20):
        append(world, topic_id, 0, blob(f"x{n}", size=8_000))
        world.commit()
    world.now_ms += step_ms
    if is_restarted:
        world.restart(power_cut=True)
        world.engine.store.note_time(0)
    for n in range(20):
        append(world, topic_id, 0, blob(f"y{n}", size=8_000))
        world.commit()
    world.engine.store.note_time(RECENT_MS // 2)
    assert found(world, topic_id, 0, sent) == 0


def test_the_recent_messages_at_a_start_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_store, "RECENT_BYTES", 64 << 10)
    world, topic_id = opened(segment_bytes=64 << 10)
    sent = blob("m1")
    append(world, topic_id, 0, sent)
    world.now_ms += 2 * RECENT_MS
    for n in range(40):
        append(world, topic_id, 0, blob(f"x{n}", size=8_000))
        world.commit()
    world.restart()
    world.engine.store.note_time(0)
    assert found(world, topic_id, 0, sent) is None
    assert found(world, topic_id, 0, blob("x39", size=8_000)) == 40


def freeing_world(data: bytes) -> tuple[World, TopicId]:
    """Return a world in which a just sent message is dead, and later segments follow."""
    world = small_world()
    topic_id = world.topic("t")
    world.engine.store.note_time(0)
    world.send("unread", topic="other")
    append(world, topic_id, 0, data)
    world.commit()
    world.engine.store.note_time(RECENT_STEP_MS)
    while len(world.engine.log.segments) < 5:
        world.send("filler", topic="t", size=4_000)
    world.checkpoint()
    world.purge("t")
    return world, topic_id


def test_a_message_is_found_by_its_stub() -> None:
    """A stub has no body, but the id, the keys and the times of the message."""
    sent, other = blob("m1", keys=("a",), size=2_000), blob("m1", keys=("b",), size=2_000)
    world, topic_id = freeing_world(sent)
    assert pack_all(world)
    assert found(world, topic_id, 0, sent) == 0
    assert found(world, topic_id, 1, sent) is None
    assert found(world, topic_id, 0, other) is None
    assert found(world, topic_id, 0, blob("m2")) is None
    world.restart()
    assert found(world, topic_id, 0, sent) == 0


def test_a_repeated_send_of_a_message_in_a_gap_has_an_unknown_result() -> None:
    """Its queue offset is unknown, and it must not be stored again."""
    sent = blob("m1", size=2_000)
    world, topic_id = freeing_world(sent)
    world.checkpoint()
    move_floor(world, floors(world)[0])
    assert pack_all(world)
    with pytest.raises(BrokerTimeout):
        found(world, topic_id, 0, sent)
    assert found(world, topic_id, 0, blob("m2")) is None


def test_a_repeated_send_is_unknown_while_recent_messages_are_dropped() -> None:
    sent = blob("m1", size=2_000)
    world, topic_id = freeing_world(sent)
    world.purge("other")
    world.background()
    assert world.engine.log.min_offset >= SEGMENT
    with pytest.raises(BrokerTimeout):
        found(world, topic_id, 0, sent)
    for n in range(2, 16):
        world.engine.store.note_time(RECENT_STEP_MS * n)
    assert found(world, topic_id, 0, sent) is None
