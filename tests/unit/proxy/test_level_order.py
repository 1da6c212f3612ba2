"""The order of brokers by the levels of their ready messages."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tidemill.proxy.polling.level_order import (
    FACTOR_MAX,
    FAIR,
    NO_LEVEL,
    HintLevels,
    LevelChoice,
    LevelOrder,
)


@dataclass(eq=False)
class Broker:
    """A broker with a hint."""

    levels: HintLevels | None
    hint_count: int = 1


def ordered(factor: int) -> LevelOrder:
    order = LevelOrder()
    order.factor = factor
    return order


def test_the_highest_level_comes_first_and_equal_ones_take_turns() -> None:
    low, high, other = (Broker(HintLevels(level, 10, 0)) for level in (0, 7, 7))
    order = ordered(100)
    chosen = [order.choose([low, high, other], 1) for _ in range(4)]
    assert [broker for broker, _ in chosen] == [other, high, other, high]
    assert {choice.other_level for _, choice in chosen} == {7}


def test_a_broker_with_unknown_levels_has_level_0() -> None:
    unknown, low = Broker(None), Broker(HintLevels(1, 10, 0))
    assert ordered(100).choose([unknown, low], 1) == (low, LevelChoice(None, 1, 0, 0))
    assert ordered(100).choose([unknown], 1) == (unknown, LevelChoice(None, 0, NO_LEVEL, 0))


def pop(order: LevelOrder, brokers: list[Broker], size: int = 1) -> tuple[Broker, LevelChoice]:
    """Choose a broker, and pop one level there."""
    broker, choice = order.choose(brokers, size)
    order.begin(choice)
    highest = 0 if broker.levels is None else broker.levels.highest
    order.end(choice, {0 if choice.factor == FAIR else highest: size})
    return broker, choice


@pytest.mark.parametrize("size", [1, 10])
@pytest.mark.parametrize(("factor", "fair"), [(100, 0), (90, 100), (75, 250), (50, 500)])
def test_fair_choices_take_the_oldest_lower_message(factor: int, fair: int, size: int) -> None:
    """Of the broker with the highest level, only its lower levels count."""
    high = Broker(HintLevels(7, 1, 30), size)
    old, older = Broker(HintLevels(3, 20, 0), size), Broker(HintLevels(2, 10, 0), size)
    order = ordered(factor)
    chosen = [pop(order, [high, old, older], size) for _ in range(1_000)]
    fairs = [broker for broker, choice in chosen if choice.factor == FAIR]
    assert set(fairs) <= {older}
    assert abs(len(fairs) - fair) <= 1
    assert {broker for broker, choice in chosen if choice.factor != FAIR} == {high}


def test_factor_0_takes_the_oldest_message_of_all_levels() -> None:
    high, low = Broker(HintLevels(7, 10, 0)), Broker(HintLevels(0, 1, 0))
    assert pop(ordered(0), [high, low]) == (low, LevelChoice(None, 7, NO_LEVEL, 0))


def test_a_broker_with_the_oldest_lower_message_applies_the_factor_itself() -> None:
    """The proxy does not count its messages again."""
    both, low = Broker(HintLevels(7, 10, 1)), Broker(HintLevels(0, 2, 0))
    order = ordered(90)
    for _ in range(100):
        assert pop(order, [both, low]) == (both, LevelChoice(None, 7, 0, 0))


def test_one_fair_pop_at_a_time_spends_the_credit() -> None:
    high, low = Broker(HintLevels(7, 10, 0)), Broker(HintLevels(0, 1, 0))
    order = ordered(50)
    pop(order, [high, low])
    _, fair = order.choose([high, low], 1)
    order.begin(fair)
    assert fair.factor == FAIR
    assert order.choose([high, low], 1)[1].factor == FACTOR_MAX
    order.end(fair, {})  # It was cancelled, or it found nothing.
    assert order.choose([high, low], 1)[1].factor == FAIR


@pytest.mark.parametrize(
    ("factor", "other"), [(90, None), (0, None), (0, HintLevels(7, 0, 0))], ids=str
)
def test_messages_of_unknown_age_get_their_turn(factor: int, other: HintLevels | None) -> None:
    """A broker of an older version, and one where the group has never popped."""
    known, unknown = Broker(HintLevels(3, 100, 50)), Broker(other)
    order = ordered(factor)
    assert any(pop(order, [known, unknown])[0] is unknown for _ in range(100))


def test_without_a_lower_message_no_choice_is_fair() -> None:
    order = ordered(50)
    brokers = [Broker(HintLevels(4, 5, 0)), Broker(HintLevels(4, 6, 0))]
    assert all(order.choose(brokers, 1)[1] == LevelChoice(None, 4, 4, 0) for _ in range(50))
