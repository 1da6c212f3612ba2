"""Hints with levels: no loop without a pause, and no pop that misses a ready message."""

from __future__ import annotations

import pytest

from tidemill.proxy.filters import EVERY_MESSAGE, WantedMessages
from tidemill.proxy.polling.counts import PollCounts
from tidemill.proxy.polling.level_order import HintLevels
from tidemill.proxy.polling.notifications import NotificationStart
from tidemill.proxy.polling.pair import (
    LEVEL_FILTERS_MAX,
    LEVEL_LINGER_MS,
    PairKey,
    PairPoll,
    PairWatch,
)
from tidemill.proxy.polling.poll import Outcome, PollEnd, PopStep
from tidemill.proxy.polling.polling import LeftMessages, Polling

NOW_MS = 1_000_000
EVERY = PairKey("orders", "billing", EVERY_MESSAGE)
FILTERED = EVERY._replace(wanted=WantedMessages(("paid",)))


class Asked:
    """The polls of a proxy at two brokers, at one moment."""

    def __init__(self, key: PairKey = EVERY) -> None:
        self.polling = Polling(PollCounts(), random=lambda: 0.5)
        self.key = key

    def begin(self, poll_ms: int, *, factor: int = 100) -> PairPoll:
        return self.polling.begin(
            self.key,
            ["a", "b"],
            poll_ms=poll_ms,
            asks_all=False,
            now_ms=NOW_MS,
            priority_factor=factor,
        )

    def watches(self) -> dict[str, PairWatch]:
        return self.polling.pairs[self.key].watches

    def hint(self, name: str, levels: HintLevels | None, count: int = 1) -> None:
        """Answer the notification in flight, if there is one."""
        watch = self.watches()[name]
        if watch.number:
            self.polling.notified(watch, watch.number, count, NOW_MS, levels=levels)

    def notifications(self, name: str) -> list[int]:
        """Return the levels that new notifications to a broker wait for."""
        actions = self.polling.take_actions()
        starts = [one for one in actions if isinstance(one, NotificationStart)]
        return [one.level_min for one in starts if one.watch.broker == name]

    def inversions(self) -> int:
        return self.polling.counts.inversions["orders", "billing"]

    def finds(self, poll: PairPoll, levels: dict[int, int]) -> None:
        count = sum(levels.values())
        self.polling.popped(poll, count=count, was_parked=False, now_ms=NOW_MS, levels=levels)

    def finds_nothing(self, poll: PairPoll, left: LeftMessages | None) -> None:
        self.polling.popped(poll, count=0, was_parked=False, now_ms=NOW_MS, left=left)


def test_a_broker_that_does_not_wait_for_a_level_is_asked_again_after_a_pause() -> None:
    """An older broker ignores the level and answers at once."""
    asked = Asked()
    asked.begin(20_000)
    assert asked.notifications("a") == [0]
    asked.hint("a", HintLevels(3, 1, 0))
    assert asked.notifications("a") == [4]
    asked.hint("a", HintLevels(3, 1, 0))
    assert asked.notifications("a") == []
    assert asked.watches()["a"].not_before_ms > NOW_MS


def test_a_pop_that_finds_none_of_the_counted_messages_is_repeated_after_a_pause() -> None:
    """The file of the queue is damaged, so the broker counts messages and cannot read them."""
    asked = Asked()
    asked.polling.cancel(asked.begin(20_000), NOW_MS)
    asked.hint("a", None)
    asked.hint("b", None)
    poll = asked.begin(20_000)
    pops = 0
    while isinstance(poll.step, PopStep):
        asked.finds_nothing(poll, LeftMessages(5, None))
        asked.hint("a", None)
        asked.hint("b", None)
        pops += 1
        assert pops < 10


def test_a_pop_with_a_filter_takes_every_level() -> None:
    """The answer does not name what is left, so a receive that does not wait asks once."""
    asked = Asked(FILTERED)
    asked.polling.cancel(asked.begin(20_000), NOW_MS)
    asked.hint("a", HintLevels(5, 1, 0))
    asked.hint("b", HintLevels(3, 1, 0))
    poll = asked.begin(0)
    seen = []
    while isinstance(step := poll.step, PopStep):
        seen.append(step)
        asked.finds_nothing(poll, None)
    assert seen == [PopStep("a", 0, 0), PopStep("b", 0, 0)]
    assert isinstance(step, PollEnd)
    assert step.outcome is Outcome.EMPTY


def test_a_pop_without_a_filter_takes_nothing_below_the_level_of_another_broker() -> None:
    asked = Asked()
    asked.polling.cancel(asked.begin(20_000), NOW_MS)
    asked.hint("a", HintLevels(5, 1, 0))
    asked.hint("b", HintLevels(3, 1, 0))
    poll = asked.begin(20_000)
    assert poll.step == PopStep("a", 0, 3)
    asked.finds_nothing(poll, LeftMessages(4, HintLevels(2, 1, 0)))
    assert poll.step == PopStep("b", 0, 2)
    asked.finds_nothing(poll, LeftMessages(0, None))
    assert poll.step == PopStep("a", 0, 0)


def test_many_filters_of_one_consumer_group_leave_few_notifications_at_brokers() -> None:
    """Each arriving message of the topic costs the broker one count per parked notification."""
    asked = Asked()
    parked: set[PairWatch] = set()
    for number in range(100):
        asked.key = EVERY._replace(wanted=WantedMessages((f"tag-{number}",)))
        poll = asked.begin(0)
        while isinstance(poll.step, PopStep):
            asked.finds_nothing(poll, None)
        for action in asked.polling.take_actions():
            if isinstance(action, NotificationStart):
                parked.add(action.watch)
    assert len(parked) == 2 * LEVEL_FILTERS_MAX
    asked.key = EVERY
    asked.begin(0)
    assert asked.notifications("a") == [0], "a pair without a filter knows the levels"


def test_a_filter_gets_the_place_of_a_filter_that_no_poll_has_used_lately() -> None:
    asked = Asked()
    for number in range(LEVEL_FILTERS_MAX + 1):
        asked.key = EVERY._replace(wanted=WantedMessages((f"tag-{number}",)))
        asked.polling.cancel(asked.begin(0), NOW_MS)
    assert asked.polling.pairs[asked.key].order is None
    asked.polling.due(NOW_MS + LEVEL_LINGER_MS + 1_000)
    assert not asked.polling.pairs
    asked.begin(0)
    assert asked.polling.pairs[asked.key].order is not None


def test_a_fair_slot_of_a_broker_is_no_inversion() -> None:
    asked = Asked()
    asked.polling.cancel(asked.begin(20_000), NOW_MS)
    asked.hint("a", HintLevels(7, 2, 1))
    asked.hint("b", HintLevels(6, 3, 0))
    poll = asked.begin(20_000, factor=90)
    assert poll.step == PopStep("a", 0, 6)
    asked.finds(poll, {0: 1})
    assert asked.inversions() == 0


def test_a_strict_pop_below_the_level_of_another_broker_is_an_inversion() -> None:
    asked = Asked()
    asked.polling.cancel(asked.begin(20_000), NOW_MS)
    asked.hint("a", HintLevels(7, 2, 0))
    asked.hint("b", HintLevels(6, 1, 0))
    poll = asked.begin(20_000, factor=90)
    assert isinstance(poll.step, PopStep)
    assert (poll.step.broker, poll.step.factor) == ("a", 100)
    asked.finds(poll, {5: 1})
    assert asked.inversions() == 1


def test_a_fair_pop_that_finds_only_high_messages_is_repeated_for_all_levels() -> None:
    """Another consumer has taken the low messages."""
    asked = Asked()
    asked.polling.cancel(asked.begin(20_000), NOW_MS)
    asked.hint("a", HintLevels(7, 2, 0))
    asked.hint("b", HintLevels(6, 1, 0))
    asked.finds(asked.begin(20_000, factor=50), {7: 1})
    asked.hint("a", HintLevels(7, 2, 0))
    poll = asked.begin(20_000, factor=50)
    assert isinstance(poll.step, PopStep)
    assert (poll.step.broker, poll.step.factor, poll.step.level_below) == ("b", 0, 7)
    asked.finds_nothing(poll, LeftMessages(1, HintLevels(7, 3, 0)))
    assert isinstance(poll.step, PopStep)
    assert poll.step.level_below == 0


def begin_fair_pop(asked: Asked, poll_ms: int, *, count: int = 1) -> PairPoll:
    """Begin a poll with a fair pop at `b`, which has `count` messages of level 6."""
    asked.polling.cancel(asked.begin(20_000), NOW_MS)
    asked.hint("a", HintLevels(7, 2, 0))
    asked.hint("b", HintLevels(6, 1, 0), count)
    asked.finds(asked.begin(20_000, factor=50), {7: 1})
    asked.hint("a", HintLevels(7, 2, 0))
    poll = asked.begin(poll_ms, factor=50)
    assert isinstance(poll.step, PopStep)
    assert (poll.step.broker, poll.step.level_below) == ("b", 7)
    return poll


def test_a_fair_pop_below_two_higher_levels_keeps_the_hint_of_its_broker() -> None:
    """Another consumer has taken level 6. Levels 9 and 8 have arrived."""
    asked = Asked()
    poll = begin_fair_pop(asked, 20_000)
    asked.finds_nothing(poll, LeftMessages(3, HintLevels(9, 3, 4)))
    assert asked.watches()["b"].known_level == 9


def test_a_fair_pop_that_misses_a_lower_message_counts_as_a_miss() -> None:
    """The broker counts a message below level 7 and cannot read it."""
    asked = Asked()
    asked.finds_nothing(begin_fair_pop(asked, 20_000), LeftMessages(2, HintLevels(7, 3, 4)))
    assert asked.watches()["b"].not_before_ms > NOW_MS


def test_a_fair_pop_with_a_filter_that_finds_nothing_asks_its_broker_again_at_once() -> None:
    """The broker may have higher levels, and its answer does not name them."""
    asked = Asked(FILTERED)
    poll = begin_fair_pop(asked, 20_000, count=9)
    asked.polling.take_actions()
    asked.finds_nothing(poll, None)
    assert asked.notifications("b") == [0]


def test_a_short_poll_with_a_filter_repeats_a_fair_pop_for_all_levels() -> None:
    asked = Asked(FILTERED)
    poll = begin_fair_pop(asked, 0)
    asked.finds_nothing(poll, None)
    asked.finds_nothing(poll, None)
    assert poll.step == PopStep("b", 0)


@pytest.mark.parametrize("key", [EVERY, FILTERED])
def test_fair_pops_of_a_poll_that_find_nothing_come_to_an_end(key: PairKey) -> None:
    """Other consumers are always faster, or the broker counts messages that it cannot read."""
    asked = Asked(key)
    poll = begin_fair_pop(asked, 20_000, count=9)
    left = None if key is FILTERED else LeftMessages(3, HintLevels(9, 3, 4))
    pops = 0
    while isinstance(poll.step, PopStep):
        asked.finds_nothing(poll, left)
        asked.hint("a", HintLevels(7, 2, 0))
        asked.hint("b", HintLevels(6, 1, 0), 9)
        pops += 1
        assert pops < 10
    assert all(watch.not_before_ms > NOW_MS for watch in asked.watches().values())
