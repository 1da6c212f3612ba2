"""The count of ready messages beside the pop that follows.

The model is the pop itself: the count is never 0 when a pop finds a message. The count may be too
high only if it is unsure, or with a filter, a retry or an ordered queue. Otherwise it is exact.
Counting does not change the log or the results of pops.
"""

from __future__ import annotations

import contextlib
from random import Random

import pytest

from tests.support.seeds import seeds
from tests.support.worlds.engine_world import GROUP, TOPIC, PoppedMessage, World
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.message_filter import EVERY_MESSAGE
from tidemill.broker.engine.pop.readiness import READY_COUNT_MAX, ReadyMessages
from tidemill.broker.server.wire.filters import find_filter
from tidemill.common.errors import InvalidReceiptHandle

STEPS = 60
QUEUES = 3
TAGS = ("red", "green", "blue")


class Trial:
    """One group on one topic, and its deliveries in flight."""

    def __init__(self, seed: int, *, is_ordered: bool) -> None:
        self.random = Random(seed)
        self.is_ordered = is_ordered
        self.world = World(checkpoint_log_bytes=20_000)
        self.topic_id = self.world.topic(TOPIC, queues=QUEUES)
        options = {"start_from_latest": self.random.random() < 0.5}
        self.group_id = self.world.group(GROUP, is_ordered=is_ordered, max_attempts=3, **options)
        self.out: list[PoppedMessage] = []
        self.sent = 0

    def step(self) -> None:
        kind = self.random.choice(
            ("send", "send", "pop", "pop", "ack", "wait", "give back", "restart")
        )
        match kind:
            case "send":
                self.send()
            case "pop":
                self.pop()
            case "ack" if self.out:
                self.ack()
            case "give back" if self.out:
                self.give_back()
            case "wait":
                self.world.now_ms += self.random.choice((10, 1_000, 31_000))
            case "restart" if self.random.random() < 0.2:
                self.world.restart()

    def send(self) -> None:
        queue_id, tag = self.random.randrange(QUEUES), self.random.choice(TAGS)
        texts = [f"m{self.sent + n}" for n in range(self.random.randrange(1, 50))]
        self.sent += len(texts)
        properties = {"colour": tag, "number": str(len(texts))}
        self.world.send(*texts, queue_id=queue_id, tag=tag, properties=properties)

    def ack(self) -> None:
        one = self.out.pop(self.random.randrange(len(self.out)))
        # In the round of the count: acked messages must not block an ordered queue.
        self.world.engine.commands.ack(one.delivery, self.world.now_ms)

    def give_back(self) -> None:
        one = self.out.pop(self.random.randrange(len(self.out)))
        if one.delivery.visible_at_ms > self.world.now_ms:
            self.world.run_due()
            # Dead-lettered, or voided by a later batch of its queue.
            with contextlib.suppress(InvalidReceiptHandle):
                self.world.change(one, self.random.choice((0, 1_000)))

    def count_ready(self, tags: tuple[str, ...], sql: str) -> ReadyMessages:
        engine = self.world.engine
        engine.consumption.acks.record(self.world.now_ms)
        before = fingerprint(engine)
        ready = engine.consumption.ready_count(
            self.group_id, self.topic_id, wanted=find_filter(tags, sql), now_ms=self.world.now_ms
        )
        assert fingerprint(engine) == before, "counting changes nothing"
        return ready

    def pop(self) -> None:
        tags: tuple[str, ...] = self.random.choice(((), (), ("red",), ("green", "blue")))
        sql = self.random.choice(("", "colour = 'red'", "number > 20 AND colour <> 'blue'"))
        self.world.run_due()
        ready = self.count_ready(tags, sql)
        again = self.count_ready(tags, sql)
        # A repeated count with an SQL filter continues after the messages of the first one.
        is_more = ready.is_unsure or again.ready_count >= ready.ready_count
        assert again == ready or (sql and is_more), "a repeated count is the same"
        want = self.random.choice((1, 7, 32))
        popped = self.world.pop(want, tags=tags, sql=sql)
        self.out += popped
        if popped:
            assert ready.ready_count, "a pop found more than the count"
        if not tags and not sql and not self.is_ordered and not ready.is_unsure:
            assert len(popped) == 0 if not ready.ready_count else len(popped) > 0
            if ready.ready_count < READY_COUNT_MAX:
                assert len(popped) == min(want, ready.ready_count)


def fingerprint(engine: Engine) -> object:
    return engine.log.log_end, [
        (row, progress.in_flight, sorted(engine.state.deliveries_of(progress)))
        for progress in engine.state.progress.values()
        for row in (progress.as_row(),)
    ]


@pytest.mark.parametrize("is_ordered", [False, True], ids=["any order", "ordered"])
@pytest.mark.parametrize("seed", seeds("readiness", 30))
def test_a_count_includes_all_messages_that_a_pop_finds(seed: int, is_ordered: bool) -> None:
    trial = Trial(seed, is_ordered=is_ordered)
    for _ in range(STEPS):
        trial.step()


def test_the_count_of_a_group_without_a_pop_is_unsure() -> None:
    world = World()
    topic_id, group_id = world.topic(), world.group(start_from_latest=True)
    before = world.engine.log.log_end
    count_ready = world.engine.consumption.ready_count
    ready = count_ready(group_id, topic_id, wanted=EVERY_MESSAGE, now_ms=world.now_ms)
    assert (ready.ready_count > 0, ready.is_unsure, world.engine.log.log_end) == (
        True,
        True,
        before,
    )
    assert world.pop() == []
    assert (
        count_ready(group_id, topic_id, wanted=EVERY_MESSAGE, now_ms=world.now_ms).ready_count == 0
    )
    world.send("a")
    assert (
        count_ready(group_id, topic_id, wanted=EVERY_MESSAGE, now_ms=world.now_ms).ready_count == 1
    )
    assert world.bodies() == ["a"]


def test_a_filtered_count_is_bounded_and_skips_scanned_entries() -> None:
    world = World()
    topic_id, group_id = world.topic(), world.group()
    wanted = find_filter(["red"], "")
    assert world.pop(tags=("red",)) == []
    world.send(*map(str, range(6_000)), tag="blue")
    engine = world.engine

    def count_ready() -> tuple[ReadyMessages, int]:
        before = engine.tally.items
        ready = engine.consumption.ready_count(
            group_id, topic_id, wanted=wanted, now_ms=world.now_ms
        )
        return ready, engine.tally.items - before

    first, looked = count_ready()
    assert (first.is_unsure, looked) == (True, 4_096)
    assert count_ready() == (ReadyMessages(0), 6_000 - 4_096)
    assert count_ready() == (ReadyMessages(0), 0)
    world.send("a", tag="red")
    assert count_ready() == (ReadyMessages(1), 1)
    while not (found := world.bodies(tags=("red",))):
        pass
    assert found == ["a"]


def test_an_ack_in_the_round_of_a_count_blocks_no_ordered_queue() -> None:
    world = World()
    topic_id, group_id = world.topic(), world.group(is_ordered=True)
    world.send("a", "b")
    [one] = world.pop(1)
    count_ready = world.engine.consumption.ready_count

    assert count_ready(
        group_id, topic_id, wanted=EVERY_MESSAGE, now_ms=world.now_ms
    ) == ReadyMessages(0)
    world.engine.commands.ack(one.delivery, world.now_ms)
    assert count_ready(
        group_id, topic_id, wanted=EVERY_MESSAGE, now_ms=world.now_ms
    ) == ReadyMessages(1)


def test_a_pending_message_of_an_ordered_queue_is_ready_at_its_deadline() -> None:
    world = World()
    topic_id, group_id = world.topic(), world.group(is_ordered=True)
    world.send("a")
    world.pop(1, invisible_ms=1_000)
    world.now_ms += 1_001
    world.run_due()
    for wanted in (EVERY_MESSAGE, find_filter(["red"], "")):
        ready = world.engine.consumption.ready_count(
            group_id, topic_id, wanted=wanted, now_ms=world.now_ms
        )
        assert ready == ReadyMessages(1)


def test_a_count_after_a_reset_scans_again() -> None:
    world = World()
    topic_id, group_id = world.topic(), world.group()
    world.send("a", tag="red")
    assert world.bodies() == ["a"]
    world.send("b", tag="blue")
    count_ready, wanted = world.engine.consumption.ready_count, find_filter(["red"], "")
    assert count_ready(group_id, topic_id, wanted=wanted, now_ms=world.now_ms) == ReadyMessages(0)
    earliest = ResetTarget(earliest=True)
    world.engine.administration.reset_offset(GROUP, TOPIC, earliest, world.now_ms)
    assert count_ready(group_id, topic_id, wanted=wanted, now_ms=world.now_ms) == ReadyMessages(1)
