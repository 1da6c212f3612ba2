"""The order of brokers by the levels of their ready messages."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tidemill.proxy.polling.level_order import NO_LEVEL, HintLevels, LevelOrder


@dataclass(eq=False)
class Broker:
    """A broker with a hint."""

    levels: HintLevels | None


def ordered(factor: int) -> LevelOrder:
    order = LevelOrder()
    order.factor = factor
    return order


def test_the_highest_level_comes_first_and_equal_ones_take_turns() -> None:
    low, high, other = (Broker(HintLevels(level, 10, 0)) for level in (0, 7, 7))
    order = ordered(100)
    chosen = [order.choose([low, high, other]) for _ in range(4)]
    assert [broker for broker, _ in chosen] == [other, high, other, high]
    assert {level for _, level in chosen} == {7}


def test_a_broker_with_unknown_levels_has_level_0() -> None:
    unknown, low = Broker(None), Broker(HintLevels(1, 10, 0))
    assert ordered(100).choose([unknown, low]) == (low, 0)
    assert ordered(100).choose([unknown]) == (unknown, NO_LEVEL)


@pytest.mark.parametrize(("factor", "fair"), [(100, 0), (90, 100), (75, 250), (50, 500), (0, 1000)])
def test_fair_choices_take_the_oldest_lower_message(factor: int, fair: int) -> None:
    """Of the broker with the highest level, only its lower levels count."""
    high = Broker(HintLevels(7, 1, 30))
    old, older = Broker(HintLevels(3, 20, 0)), Broker(HintLevels(2, 10, 0))
    oldest = older if factor else high
    order = ordered(factor)
    chosen = [order.choose([high, old, older]) for _ in range(1_000)]
    assert chosen.count((oldest, NO_LEVEL)) == fair
    assert chosen.count((high, 3)) == 1_000 - fair


@pytest.mark.parametrize(
    ("factor", "other"), [(90, None), (0, None), (0, HintLevels(7, 0, 0))], ids=str
)
def test_messages_of_unknown_age_get_their_turn(factor: int, other: HintLevels | None) -> None:
    """A broker of an older version, and one where the group has never popped."""
    known, unknown = Broker(HintLevels(3, 100, 50)), Broker(other)
    order = ordered(factor)
    assert any(order.choose([known, unknown])[0] is unknown for _ in range(100))


def test_without_a_lower_message_no_choice_is_fair() -> None:
    order = ordered(50)
    brokers = [Broker(HintLevels(4, 5, 0)), Broker(HintLevels(4, 6, 0))]
    assert all(order.choose(brokers)[1] == 4 for _ in range(50))
