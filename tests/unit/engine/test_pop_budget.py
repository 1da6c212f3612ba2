"""The size limits of one pop: messages, bytes, and always one message."""

from __future__ import annotations

import pytest

from tests.support.worlds.engine_world import GROUP, World
from tidemill.broker.engine.pop import budget
from tidemill.broker.engine.pop.budget import PopBudget

FIFO = "fifo"
HALF = 60_000  # for the pops of these tests
TEXTS = [f"m{n}" for n in range(6)]


@pytest.fixture(autouse=True)
def small_pops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "POP_BYTES_MAX", 2 * HALF + 1_000)


@pytest.mark.parametrize("tags", [(), ("red",)])
@pytest.mark.parametrize("group", [GROUP, FIFO])
def test_a_pop_is_bounded_in_bytes(group: str, tags: tuple[str, ...]) -> None:
    world = World()
    world.group(FIFO, is_ordered=True)
    world.send(*TEXTS, tag="red", size=HALF)
    for first in (0, 2, 4):
        popped = world.pop(32, group=group, tags=tags)
        assert [one.body for one in popped] == TEXTS[first : first + 2]
        world.ack(*popped)
    assert world.bodies(32, group=group, tags=tags) == []


@pytest.mark.parametrize("group", [GROUP, FIFO])
def test_a_message_larger_than_the_limit_is_delivered_alone(group: str) -> None:
    world = World()
    world.group(FIFO, is_ordered=True)
    world.send("large", size=3 * HALF)
    world.send("small")
    for text in ("large", "small"):
        popped = world.pop(32, group=group)
        assert [one.body for one in popped] == [text]
        world.ack(*popped)


def test_all_queues_of_a_pop_share_its_byte_limit() -> None:
    world = World()
    world.topic(queues=4)
    for queue_id in range(4):
        world.send(f"q{queue_id}", queue_id=queue_id, size=HALF)
    counts = [len(world.bodies(32)) for _ in range(3)]
    assert counts == [2, 2, 0]


def test_a_pop_continues_with_messages_of_another_queue_that_fit() -> None:
    world = World()
    world.topic(queues=2)
    for queue_id in range(2):
        world.send(f"large{queue_id}", queue_id=queue_id, size=HALF + 1_000)
        world.send(f"small{queue_id}", queue_id=queue_id)
    first = world.bodies(32)
    assert [text[:5] for text in first] == ["large", "small"]
    assert len(world.drain()) == 2


def test_retries_are_bounded_in_bytes() -> None:
    world = World()
    world.send(*TEXTS[:4], size=HALF)
    assert len(world.drain(invisible_ms=1_000)) == 4
    world.advance(2_000)
    assert [len(world.bodies(32)) for _ in range(3)] == [2, 2, 0]


def test_redeliveries_of_an_ordered_group_are_bounded_in_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.group(FIFO, is_ordered=True)
    world.send(*TEXTS[:4])
    assert len(world.pop(32, group=FIFO, invisible_ms=1_000)) == 4
    world.advance(2_000)
    world.send(*TEXTS[4:])
    monkeypatch.setattr(budget, "POP_BYTES_MAX", 500)
    seen: list[str] = []
    while popped := world.pop(32, group=FIFO):
        assert len(popped) < 4
        seen += [one.body for one in popped]
        world.ack(*popped)
    assert seen == TEXTS


def test_a_repeated_attempt_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.group(FIFO, is_ordered=True)
    world.send(*TEXTS[:4])
    assert len(world.pop(32, group=FIFO, attempt_id="a")) == 4
    monkeypatch.setattr(budget, "POP_BYTES_MAX", 1)
    assert world.bodies(32, group=FIFO, attempt_id="a") == TEXTS[:1]


def test_exhausted_messages_do_not_count_against_the_byte_limit() -> None:
    world = World()
    world.send(*TEXTS[:2], size=HALF)
    assert len(world.pop(32, invisible_ms=1_000)) == 2
    world.advance(2_000)
    world.engine.administration.put_group(GROUP, max_attempts=1, now_ms=world.now_ms)
    world.send(*TEXTS[2:4], size=HALF)
    bodies = [text for _ in range(8) for text in world.bodies(32)]
    assert bodies == TEXTS[2:4]


def test_take_first_takes_the_messages_that_fit() -> None:
    half = budget.POP_BYTES_MAX // 2
    many = PopBudget(32, taken_bytes=0, is_untouched=True)
    assert many.take_first([budget.POP_BYTES_MAX + 1, 1]) == 1
    full = PopBudget(32, taken_bytes=half, is_untouched=False)
    assert full.take_first([half, 1]) == 1
    none = PopBudget(32, taken_bytes=half, is_untouched=False)
    assert none.take_first([half + 1]) == 0
    few = PopBudget(2, taken_bytes=0, is_untouched=True)
    assert few.take_first([1, 1, 1]) == 2
    assert few.messages_left == 0
    assert few.taken_bytes == 2
