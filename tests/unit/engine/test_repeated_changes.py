"""Requests about a delivery that arrive twice: the second one gets the answer of the first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.worlds.engine_world import GROUP, PoppedMessage, World
from tidemill.broker.engine.pop import repeated_requests
from tidemill.broker.engine.pop.deliveries import AckResult, Delivery
from tidemill.common.errors import InvalidReceiptHandle

INVISIBLE_MS = 30_000
SOON_MS = 1_000

Break = Callable[[World], None]


def lose_link(_world: World) -> None:
    """The engine does not notice a lost link."""


def cut_power(world: World) -> None:
    world.restart(power_cut=True)


BREAKS: dict[str, Break] = {
    "link": lose_link,
    "process": World.restart,
    "power": cut_power,
    "master": World.fail_over,
}


def change_again(world: World, popped: PoppedMessage, invisible_ms: int) -> Delivery:
    delivery = world.engine.commands.change_invisible_again(
        popped.delivery, invisible_duration_ms=invisible_ms, suspend=False, now_ms=world.now_ms
    )
    world.commit()
    return delivery


def dead_letter_again(world: World, popped: PoppedMessage) -> None:
    world.engine.commands.dead_letter_again(popped.delivery, world.now_ms)
    world.commit()


def dead_letters(world: World) -> int:
    topic = world.engine.catalog.find_topic(f"%DLQ%{GROUP}")
    if topic is None:
        return 0
    return sum(queue.max_offset for queue in world.engine.catalog.queues_of(topic))


def popped_of(world: World, count: int = 3, *, ordered: bool = False) -> list[PoppedMessage]:
    world.topic()
    world.group(is_ordered=ordered)
    world.send(*(f"m{n}" for n in range(count)))
    return world.pop(count, invisible_ms=INVISIBLE_MS)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("broken", BREAKS)
def test_a_repeated_change_returns_the_delivery_of_the_first(broken: str, ordered: bool) -> None:
    world = World(is_followed=broken == "master")
    popped = popped_of(world, ordered=ordered)
    first = world.change(popped[1], INVISIBLE_MS)
    BREAKS[broken](world)
    assert change_again(world, popped[1], INVISIBLE_MS) == first.delivery
    assert world.ack(first) == [AckResult.APPLIED]
    assert change_again(world, popped[2], INVISIBLE_MS) != popped[2].delivery, "it came once"


def test_a_repeated_change_never_returns_a_delivery_of_another_change() -> None:
    world = World()
    popped = popped_of(world)
    first = world.change(popped[1], INVISIBLE_MS)
    second = world.change(first, INVISIBLE_MS)
    with pytest.raises(InvalidReceiptHandle):
        change_again(world, popped[1], INVISIBLE_MS)
    assert change_again(world, first, INVISIBLE_MS) == second.delivery
    assert world.ack(second) == [AckResult.APPLIED]
    with pytest.raises(InvalidReceiptHandle):
        change_again(world, first, INVISIBLE_MS)


def test_a_repeated_change_whose_message_was_redelivered_is_rejected() -> None:
    world = World()
    popped = popped_of(world)
    world.change(popped[1], SOON_MS)
    world.advance(SOON_MS + 1)
    world.run_due()
    [again] = world.pop(1, invisible_ms=INVISIBLE_MS)
    assert again.body == popped[1].body
    with pytest.raises(InvalidReceiptHandle):
        change_again(world, popped[1], INVISIBLE_MS)
    assert world.ack(again) == [AckResult.APPLIED]


def test_the_search_for_a_replacement_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_requests, "SEARCHED_MAX", 2)
    world = World()
    popped = popped_of(world, 4)
    changed = [world.change(one, INVISIBLE_MS) for one in popped]
    assert change_again(world, popped[3], INVISIBLE_MS) == changed[3].delivery
    with pytest.raises(InvalidReceiptHandle):
        change_again(world, popped[0], INVISIBLE_MS)


def test_a_long_search_for_a_replacement_uses_up_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_requests, "VISITS_PER_ITEM", 2)
    world = World()
    popped = popped_of(world, 10)
    changed = [world.change(one, INVISIBLE_MS) for one in popped]
    before = world.engine.tally.items
    assert change_again(world, popped[0], INVISIBLE_MS) == changed[0].delivery
    assert world.engine.tally.items - before == 9 // 2


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("broken", BREAKS)
def test_a_repeated_dead_letter_is_stored_once(broken: str, count: int) -> None:
    world = World(is_followed=broken == "master")
    popped = popped_of(world, count)
    dead_letter_again(world, popped[0])
    BREAKS[broken](world)
    dead_letter_again(world, popped[0])
    assert dead_letters(world) == 1


def test_a_repeated_dead_letter_of_an_ended_delivery_is_rejected() -> None:
    world = World()
    popped = popped_of(world)
    replaced = world.change(popped[0], INVISIBLE_MS)
    with pytest.raises(InvalidReceiptHandle):
        dead_letter_again(world, popped[0])
    world.advance(INVISIBLE_MS + 1)
    world.run_due()
    for one in (replaced, popped[1]):
        with pytest.raises(InvalidReceiptHandle):
            dead_letter_again(world, one)
    assert dead_letters(world) == 0
