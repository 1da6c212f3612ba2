"""Edge cases of pop, ack, change-invisible and dead letters. Each was a bug once."""

from __future__ import annotations

import pytest

from tests.support.worlds.engine_world import GROUP, TOPIC, World, blob
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.layout.message import HEAD_BYTES_MAX, PLACE_SIZE
from tidemill.broker.engine.layout.record import HEADER_SIZE
from tidemill.broker.engine.pop import message_selection
from tidemill.broker.engine.queries.inspection import QueueProgress
from tidemill.common.errors import MessageBodyTooLarge, Overloaded

DAY_MS = 86_400_000
FIFO = "fifo"


def expire_all(world: World) -> None:
    """Let retention remove everything that is in the log now."""
    for n in range(32):
        world.send(f"filler{world.now_ms}-{n}", topic="filler", size=130_000)
    world.background()


def progress_of(world: World, name: str) -> list[QueueProgress]:
    group = world.engine.catalog.find_group(name)
    assert group is not None
    return world.engine.inspection.group_progress(group)


def test_a_retry_topic_with_only_expired_messages_does_not_stop_pops() -> None:
    world = World(retention_bytes=2 << 20)
    world.send("m0", "m1")
    world.pop(2, invisible_ms=1_000)
    world.advance(2_000)
    expire_all(world)
    for n in range(7):
        world.send(f"n{n}")
        assert world.bodies(1) == [f"n{n}"]


def test_a_repeated_attempt_continues_after_its_expired_messages() -> None:
    world = World(retention_bytes=2 << 20)
    world.group(FIFO, is_ordered=True)
    world.send("m0", "m1")
    world.pop(2, group=FIFO, invisible_ms=DAY_MS, attempt_id="a")
    expire_all(world)
    world.send("m2")
    assert world.bodies(2, group=FIFO, attempt_id="a") == ["m2"]
    assert [one.in_flight_count for one in progress_of(world, FIFO)] == [1]


def test_an_expired_message_is_settled_without_a_dead_letter() -> None:
    world = World(retention_bytes=2 << 20)
    world.send("m0")
    world.pop(1, invisible_ms=1_000)
    world.advance(2_000)
    (retried,) = world.pop(1, invisible_ms=DAY_MS)
    expire_all(world)
    world.engine.commands.dead_letter(retried.delivery, world.now_ms)
    world.commit()
    assert sum(one.in_flight_count for one in progress_of(world, GROUP)) == 0


@pytest.mark.parametrize(("suspends", "attempt"), [((1, 1), 1), ((1, 0), 2), ((0, 1), 1)])
def test_the_newest_change_decides_if_an_ordered_delivery_counts(
    suspends: tuple[bool, ...], attempt: int
) -> None:
    world = World()
    world.group(FIFO, is_ordered=True)
    world.send("m0")
    (popped,) = world.pop(1, group=FIFO)
    for suspend in suspends:
        popped = world.change(popped, 10_000, suspend=bool(suspend))
    world.restart()
    world.advance(20_000)
    assert [one.attempt for one in world.pop(1, group=FIFO)] == [attempt]


def test_expired_ordered_deliveries_leave_the_table_after_a_reset_or_deletion() -> None:
    world = World()
    world.group(FIFO, is_ordered=True)
    for n in range(3):
        world.send(f"m{n}")
        world.pop(1, group=FIFO, invisible_ms=1_000)
        world.advance(2_000)
        world.engine.administration.reset_offset(
            FIFO, TOPIC, ResetTarget(earliest=True), world.now_ms
        )
        world.commit()
    world.pop(1, group=FIFO, invisible_ms=1_000)
    world.advance(2_000)
    world.engine.administration.delete_group(FIFO, world.now_ms)
    world.run_due()
    assert world.engine.state.table.used_count == 0


def test_invariant_21_a_consumer_offset_is_the_same_after_a_restart() -> None:
    world = World()
    world.send(*[f"m{n}" for n in range(8)])
    first, second = world.pop(4), world.pop(4)
    world.change(first[0], 90_000)
    world.ack(*first[1:])
    for acked in ([], second):
        world.ack(*acked)
        before = progress_of(world, GROUP)
        world.restart()
        assert progress_of(world, GROUP) == before
    assert before[0].consumer_offset == 8, "a change-invisible makes a delivery of its own"


def test_a_consumer_offset_of_an_ordered_group_is_its_lowest_unsettled_message() -> None:
    world = World()
    world.group(FIFO, is_ordered=True)
    world.send(*[f"m{n}" for n in range(8)])
    world.pop(4, group=FIFO, invisible_ms=1_000)
    world.advance(2_000)
    (m0,) = world.pop(1, group=FIFO, invisible_ms=1_000)
    assert progress_of(world, FIFO)[0].consumer_offset == 0
    world.ack(m0)
    before = progress_of(world, FIFO)
    assert before[0].consumer_offset == 1
    world.restart()
    assert progress_of(world, FIFO) == before


def test_replaced_deliveries_do_not_fill_the_table() -> None:
    world = World(deliveries_max=80)
    world.send("m0")
    (popped,) = world.pop(1)
    for _ in range(159):
        popped = world.change(popped, DAY_MS // 2)
    with pytest.raises(Overloaded, match="full of replaced deliveries"):
        world.change(popped, DAY_MS // 2)
    assert world.engine.state.table.used_count == 160
    world.run_due()
    assert world.engine.state.table.used_count == 1
    popped = world.change(popped, DAY_MS // 2)
    assert world.ack(popped) == [1], "the last handle is valid"


def test_an_exhausted_batch_does_not_hide_later_messages() -> None:
    world = World()
    world.send(*[f"m{n}" for n in range(33)])
    assert len(world.drain(invisible_ms=1_000)) == 33
    world.advance(2_000)
    world.engine.administration.put_group(GROUP, max_attempts=1, now_ms=world.now_ms)
    world.engine.take_ready()
    assert world.pop(32) == []
    assert world.engine.next_due_ms(world.now_ms, firing_ms=world.now_ms) == world.now_ms, (
        "the next turn reads the other messages"
    )
    assert world.pop(32) == []
    assert len(world.drain(group="auditor", topic=f"%DLQ%{GROUP}")) == 33


def test_dead_letters_wake_waiting_polls() -> None:
    world = World()
    for text in ("m0", "m1"):
        world.send(text)
        (popped,) = world.pop(1)
        world.engine.take_ready()
        world.engine.commands.dead_letter(popped.delivery, world.now_ms)
        world.commit()
        topic_ids, _ = world.engine.take_ready()
        topic = world.engine.catalog.find_topic(f"%DLQ%{GROUP}")
        assert topic is not None
        assert topic.id in topic_ids


def test_a_message_is_rejected_if_its_retry_copy_exceeds_a_segment() -> None:
    world = World(segment_bytes=64 << 10)
    with pytest.raises(MessageBodyTooLarge, match="fit into a segment"):
        world.send("m0", size=(64 << 10) - 200)
    room = (64 << 10) - HEADER_SIZE - HEAD_BYTES_MAX - len(blob("m0")) + 2
    world.send("m0", size=room)
    world.group()
    assert world.bodies(invisible_ms=1_000) == ["m0"]
    world.advance(1_001)
    assert world.bodies() == ["m0"]


def test_a_message_too_large_for_a_copy_is_dead_lettered_as_its_properties() -> None:
    world = World(segment_bytes=64 << 10)
    world.engine.commands._blob_bytes_max = 64 << 10
    world.group()
    world.send("m0", size=(64 << 10) - HEADER_SIZE - PLACE_SIZE - 8 - len(blob("m0")))
    assert world.bodies(invisible_ms=1_000) == ["m0"]
    world.advance(1_001)
    world.restart()
    assert world.bodies() == []
    assert world.bodies(group="auditor", topic=f"%DLQ%{GROUP}") == [""]


def test_an_ordered_redelivery_obeys_the_filter_of_the_poll() -> None:
    world = World()
    world.group("fifo", is_ordered=True)
    world.send("red0", tag="red")
    world.send("blue0", tag="blue")
    world.send("red1", tag="red")
    assert world.bodies(group="fifo", invisible_ms=1_000) == ["red0", "blue0", "red1"]
    world.advance(1_001)
    popped = world.pop(group="fifo", tags=("red",))
    assert [one.body for one in popped] == ["red0", "red1"]
    assert [one.attempt for one in popped] == [2, 1]
    world.ack(*popped)
    world.restart()
    world.advance(60_000)
    assert world.bodies(group="fifo") == []


def test_cold_messages_are_read_ahead_before_pops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each of them would block the owner during a disk read."""
    monkeypatch.setattr(message_selection, "WARM_BYTES", 16 << 10)
    world = World(segment_bytes=64 << 10)
    for n in range(200):
        world.send(f"m{n}", size=1_000)
    topic = world.engine.catalog.find_topic(TOPIC)
    assert topic is not None
    (queue,) = world.engine.catalog.queues_of(topic)

    def asked() -> set[int]:
        """Return the queue offsets of messages that the kernel was asked to read completely."""
        stretches = [
            (int(name[4:-4]) + at, int(name[4:-4]) + at + size)
            for name, at, size in world.disk.advised
        ]
        return {
            n
            for n, (at, size, _) in enumerate(queue.entries(0, 200))
            if any(begin <= at and at + size <= end for begin, end in stretches)
        }

    for popped in range(8, 161, 8):
        assert len(world.pop(8)) == 8
        assert asked() >= set(range(min(popped + 16, 160)))
    assert len(world.disk.advised) < 16, "many at once"
    world.pop(32)
    calls = len(world.disk.advised)
    assert len(world.pop(8)) == 8
    assert len(world.disk.advised) == calls, "recent messages are in the kernel's cache"
    world.engine.administration.reset_offset(GROUP, TOPIC, ResetTarget(offset=20), world.now_ms)
    world.commit()
    world.disk.advised.clear()
    world.pop(8)
    assert asked() >= set(range(20, 28))


def test_a_pop_that_finds_no_message_records_nothing() -> None:
    """No CK is needed, because nothing is hidden. A filter moves the position in memory only."""
    world = World()
    world.send("m0", tag="red")
    assert world.bodies() == ["m0"], "the consumer group has begun with the topic"
    log_end = world.engine.log.log_end
    assert world.pop(1) == []
    assert world.engine.log.log_end == log_end, "an empty queue"
    world.send("m1", tag="blue")
    log_end = world.engine.log.log_end
    assert world.pop(1, tags=("red",)) == []
    assert world.engine.log.log_end == log_end, "no message matches the filter"
    world.restart()
    assert world.bodies(tags=("blue",)) == ["m1"]
