"""Polls at several brokers: a row for each state and event; watches, modes and timers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tidemill.common.errors import BrokerUnreachable, Overloaded, ServiceError
from tidemill.proxy.filters import EVERY_MESSAGE
from tidemill.proxy.polling.counts import PollCounts
from tidemill.proxy.polling.mode import DWELL_MS, WINDOW_MS, WaitMode, threshold
from tidemill.proxy.polling.notifications import (
    ANSWER_MS,
    FAILURE_MAX_MS,
    FAILURE_MS,
    MISS_MAX_MS,
    MISS_MS,
    NotificationStart,
    NotificationStop,
)
from tidemill.proxy.polling.pair import (
    LINGER_MS,
    PARKED_A_BROKER_MAX,
    PairKey,
    PairPoll,
    PairWatch,
    PollPair,
)
from tidemill.proxy.polling.poll import LAST_LOOK_MS, Outcome, PollEnd, PollState, PopStep
from tidemill.proxy.polling.polling import (
    ASK_ONCE_MS,
    UNSURE_POLL_MS,
    Polling,
    PollWakeup,
    PopCancellation,
)
from tidemill.proxy.polling.timers import TICK_MS, DueTimes

KEY = PairKey("orders", "billing", EVERY_MESSAGE)
POLL_MS = 20_000
ERROR = Overloaded("full")


class World:
    """The polls of a proxy at brokers a, b and c, at a time that a test moves."""

    def __init__(self, brokers: str = "abc", *, random: float = 1.0) -> None:
        self.now_ms = 1_000_000
        self.names = list(brokers)
        self.counts = PollCounts()
        self.polling = Polling(self.counts, random=lambda: random)
        self.asked: dict[str, NotificationStart[PollPair]] = {}  # in flight
        self.woken: list[PairPoll] = []
        self.stopped: list[PairPoll] = []

    def begin(
        self, *, poll_ms: int = POLL_MS, asks_all: bool = False, silent: str = ""
    ) -> PairPoll:
        poll = self.polling.begin(
            KEY,
            self.names,
            poll_ms=poll_ms,
            asks_all=asks_all,
            now_ms=self.now_ms,
            silent=frozenset(silent),
        )
        self.look()
        return poll

    def waiting(self, *, poll_ms: int = POLL_MS) -> PairPoll:
        """Begin a poll whose first pop finds nothing."""
        poll = self.begin(poll_ms=poll_ms)
        if poll.step is not None:
            self.popped(poll)
        assert poll.state is PollState.WAITING
        return poll

    def popped(self, poll: PairPoll, count: int = 0, *, was_parked: bool = False) -> bool:
        is_taken = self.polling.popped(poll, count=count, was_parked=was_parked, now_ms=self.now_ms)
        self.look()
        return is_taken

    def failed(self, poll: PairPoll, error: ServiceError = ERROR) -> None:
        self.polling.pop_failed(poll, error, self.now_ms)
        self.look()

    def hint(self, broker: str, count: int = 1, *, is_unsure: bool = False) -> None:
        ask = self.asked.pop(broker)
        self.polling.notified(ask.watch, ask.number, count, self.now_ms, is_unsure=is_unsure)
        self.look()

    def refuse(self, broker: str) -> None:
        ask = self.asked.pop(broker)
        self.polling.notification_failed(ask.watch, ask.number, ERROR, self.now_ms)
        self.look()

    def at(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.polling.due(now_ms)
        self.look()

    def after(self, duration_ms: int) -> None:
        self.at(self.now_ms + duration_ms)

    def look(self) -> None:
        for action in self.polling.take_actions():
            match action:
                case NotificationStart(watch):
                    assert watch.broker not in self.asked, "one in flight per broker"
                    self.asked[watch.broker] = action
                case NotificationStop(watch, number):
                    assert self.asked.pop(watch.broker).number == number
                case PollWakeup(poll):
                    self.woken.append(poll)
                case PopCancellation(poll):
                    self.stopped.append(poll)

    def watch(self, broker: str) -> PairWatch:
        return self.polling.pairs[KEY].watches[broker]

    def make_direct(self) -> None:
        """Park new polls from now on."""
        self.polling.cancel(self.begin(), self.now_ms)
        self.look()
        self.stopped.clear()
        [mode] = self.polling.modes.values()
        mode.is_direct, mode._changed_at_ms = True, self.now_ms


def end_of(poll: PairPoll) -> Outcome:
    assert isinstance(poll.step, PollEnd)
    return poll.step.outcome


# ------------------------------------------------------------ the table of states and events


def in_first_pop(world: World) -> PairPoll:
    return world.begin()


def in_waiting(world: World) -> PairPoll:
    return world.waiting()


def in_consuming(world: World) -> PairPoll:
    poll = world.waiting()
    world.hint("b")
    return poll


STATES: dict[PollState, Callable[[World], PairPoll]] = {
    PollState.FIRST_POP: in_first_pop,
    PollState.WAITING: in_waiting,
    PollState.CONSUMING: in_consuming,
}
EVENTS: dict[str, Callable[[World, PairPoll], object]] = {
    "found": lambda world, poll: world.popped(poll, 3),
    "nothing": lambda world, poll: world.popped(poll),
    "pop failed": lambda world, poll: world.failed(poll),
    "hint": lambda world, poll: world.hint("a") if "a" in world.asked else None,
    "hard end": lambda world, poll: world.at(poll.hard_end_ms),
    "cancelled": lambda world, poll: world.polling.cancel(poll, world.now_ms),
    "released": lambda world, poll: world.polling.release(world.now_ms),
}
TABLE = [
    (PollState.FIRST_POP, "found", PollState.DONE, Outcome.FOUND_AT_FIRST),
    (PollState.FIRST_POP, "nothing", PollState.WAITING, None),
    (PollState.FIRST_POP, "pop failed", PollState.WAITING, None),
    (PollState.FIRST_POP, "hard end", PollState.DONE, Outcome.EMPTY),
    (PollState.FIRST_POP, "cancelled", PollState.DONE, Outcome.CANCELLED),
    (PollState.FIRST_POP, "released", PollState.FIRST_POP, None),
    (PollState.WAITING, "hint", PollState.CONSUMING, None),
    (PollState.WAITING, "hard end", PollState.DONE, Outcome.EMPTY),
    (PollState.WAITING, "cancelled", PollState.DONE, Outcome.CANCELLED),
    (PollState.WAITING, "released", PollState.DONE, Outcome.EMPTY),
    (PollState.CONSUMING, "found", PollState.DONE, Outcome.FOUND),
    (PollState.CONSUMING, "nothing", PollState.WAITING, None),
    (PollState.CONSUMING, "pop failed", PollState.WAITING, None),
    (PollState.CONSUMING, "hint", PollState.CONSUMING, None),
    (PollState.CONSUMING, "hard end", PollState.DONE, Outcome.EMPTY),
    (PollState.CONSUMING, "cancelled", PollState.DONE, Outcome.CANCELLED),
    (PollState.CONSUMING, "released", PollState.CONSUMING, None),
]


@pytest.mark.parametrize(("state", "event", "to", "outcome"), TABLE)
def test_each_event_leads_from_state_to_state(
    state: PollState, event: str, to: PollState, outcome: Outcome | None
) -> None:
    world = World()
    poll = STATES[state](world)
    assert poll.state is state
    EVENTS[event](world, poll)
    assert poll.state is to
    assert isinstance(poll.step, PollEnd) == (to is PollState.DONE)
    if outcome is not None:
        assert end_of(poll) is outcome


@pytest.mark.parametrize("state", [PollState.FIRST_POP, PollState.CONSUMING])
def test_messages_popped_after_the_end_go_back(state: PollState) -> None:
    world = World()
    poll = STATES[state](world)
    world.at(poll.hard_end_ms)
    assert world.stopped == [poll]
    assert not world.popped(poll, 3), "the poll has ended"
    assert end_of(poll) is Outcome.EMPTY


# ------------------------------------------------------------ hints


def test_only_the_first_waiting_poll_notifies_every_broker() -> None:
    world = World()
    world.waiting()
    assert {name: ask.poll_ms for name, ask in world.asked.items()} == dict.fromkeys("abc", POLL_MS)
    asked = dict(world.asked)
    world.after(10)
    world.waiting()
    assert world.asked == asked
    assert world.counts.coalesced["orders", "billing"] == 1


def test_a_covered_poll_sends_no_first_pop() -> None:
    world = World()
    world.waiting()
    world.after(ANSWER_MS - 1)
    assert isinstance(world.begin().step, PopStep), "an answer may be in flight"
    world.after(1)
    poll = world.begin()
    assert (poll.state, poll.step) == (PollState.WAITING, None)
    assert isinstance(world.begin(asks_all=True).step, PopStep)
    assert isinstance(world.begin(poll_ms=0).step, PopStep)


def test_an_expired_notification_is_repeated_for_longer_polls() -> None:
    world = World()
    world.waiting()
    world.after(5_000)
    world.waiting()
    world.now_ms += POLL_MS - 5_000
    world.hint("a", 0)
    assert world.asked["a"].poll_ms == 5_000


@pytest.mark.parametrize(("count", "woken"), [(1, 1), (2, 2), (9, 3)])
def test_a_hint_wakes_one_poll_per_message_the_oldest_first(count: int, woken: int) -> None:
    world = World()
    polls = [world.waiting() for _ in range(3)]
    world.hint("b", count)
    assert world.woken == polls[:woken]
    assert [poll.step for poll in polls[:woken]] == [PopStep("b", 0)] * woken


def test_remaining_hints_are_for_the_next_poll() -> None:
    world = World()
    poll = world.waiting()
    world.hint("b")
    world.hint("c")
    assert poll.step == PopStep("b", 0)
    world.popped(poll)
    assert poll.step == PopStep("c", 0), "a lost race falls through to the next broker"
    world.popped(poll, 1)
    assert end_of(poll) is Outcome.FOUND
    second = world.waiting()
    world.hint("a", 5)
    world.popped(second, 1)
    third = world.begin()
    assert third.step == PopStep("a", 0)


def test_a_pop_of_all_hinted_messages_leaves_no_hint() -> None:
    world = World()
    poll = world.waiting()
    world.hint("b", 4)
    world.popped(poll, 4)
    assert not world.polling.pairs[KEY].hinted


def test_each_wrong_hint_doubles_the_delay_of_the_next_one() -> None:
    world = World()
    poll = world.waiting()
    delays = []
    for _ in range(7):
        world.hint("b")
        world.popped(poll)
        assert "b" not in world.asked
        due_ms = world.watch("b").due_ms()
        assert due_ms is not None
        delays.append(due_ms - world.now_ms)
        world.at(due_ms + TICK_MS)
        assert "b" in world.asked
    assert delays == [MISS_MS, 2 * MISS_MS, 4 * MISS_MS, 8 * MISS_MS, *[MISS_MAX_MS] * 3]


def test_a_hint_used_by_another_poll_is_not_wrong() -> None:
    world = World()
    first, second, third = (world.waiting() for _ in range(3))
    world.hint("b", 2)
    world.popped(first, 2)
    world.popped(second)
    assert "b" in world.asked, "asked again at once"
    assert world.watch("b").not_before_ms == 0
    assert third.step is None


def test_an_empty_pop_ends_the_hints_of_its_broker() -> None:
    world = World("ab")
    poll = world.waiting()
    world.hint("a", 9)
    world.popped(poll, 1)
    assert world.watch("a").hint_count == 8
    second = world.begin(asks_all=True)
    while second.step != PopStep("a", 0):
        world.popped(second)
    world.popped(second)
    assert not world.watch("a").hint_count
    if second.step is not None:
        world.popped(second)
    assert set(world.asked) == {"a", "b"}


def test_polls_that_end_without_a_hint_leave_no_state() -> None:
    world = World()
    world.waiting()
    for _ in range(1_000):
        world.polling.cancel(world.waiting(), world.now_ms)
        world.look()
    assert len(world.polling.pairs[KEY]._by_age) < 100


def test_an_unsure_hint_causes_a_waiting_pop_and_an_immediate_notification() -> None:
    world = World()
    poll = world.waiting()
    world.hint("b", is_unsure=True)
    assert poll.step == PopStep("b", UNSURE_POLL_MS)
    world.popped(poll, was_parked=True)
    assert "b" in world.asked


def test_failed_notifications_back_off() -> None:
    world = World()
    world.waiting()
    delays = []
    for _ in range(6):
        world.refuse("b")
        due_ms = world.watch("b").due_ms()
        assert due_ms is not None
        delays.append(due_ms - world.now_ms)
        world.at(due_ms + TICK_MS)
    assert delays == [FAILURE_MS << n for n in range(4)] + [FAILURE_MAX_MS] * 2


def test_a_notification_that_ends_early_is_not_repeated_at_once() -> None:
    world = World()
    world.waiting()
    world.hint("b", 0)
    assert "b" not in world.asked
    world.after(FAILURE_MS + TICK_MS)
    assert "b" in world.asked


def test_the_answer_of_a_cancelled_notification_is_ignored() -> None:
    world = World()
    poll = world.waiting()
    ask = world.asked["b"]
    world.polling.cancel(poll, world.now_ms)
    world.look()
    assert set(world.asked) == set("abc"), "notifications outlive their poll by the linger time"
    world.after(LINGER_MS + TICK_MS)
    assert not world.asked
    assert not world.polling.pairs
    world.polling.notified(ask.watch, ask.number, 5, world.now_ms)
    assert not world.polling.take_actions()


def test_the_next_poll_reuses_parked_notifications() -> None:
    world = World()
    poll = world.waiting()
    asked = dict(world.asked)
    world.hint("b")
    del asked["b"]
    world.popped(poll, 1)
    world.after(LINGER_MS - TICK_MS)
    world.waiting()
    world.after(LINGER_MS + TICK_MS)
    assert asked.items() <= world.asked.items()


# ------------------------------------------------------------ the end


def test_the_last_pops_go_to_brokers_without_a_notification() -> None:
    world = World()
    poll = world.waiting()
    world.now_ms = poll.end_ms - 100
    world.refuse("b")
    world.at(poll.end_ms)
    assert poll.step == PopStep("b", 0)
    assert world.woken == [poll]
    world.popped(poll)
    assert end_of(poll) is Outcome.EMPTY


def test_the_last_pops_go_to_brokers_with_a_recent_notification() -> None:
    world = World()
    poll = world.waiting()
    world.now_ms = poll.end_ms - ANSWER_MS // 2
    second = world.waiting()
    world.hint("c", 0)
    assert "c" in world.asked
    world.at(poll.end_ms)
    assert poll.step == PopStep("c", 0)
    assert second.step is None


def test_a_covered_poll_ends_without_last_pops() -> None:
    world = World()
    poll = world.waiting()
    world.at(poll.end_ms)
    assert end_of(poll) is Outcome.EMPTY
    assert not world.counts.false_empties["orders", "billing"]


def test_an_empty_end_with_an_old_hint_counts_as_false() -> None:
    world = World()
    poll = world.waiting()
    world.hint("b")
    world.now_ms = poll.end_ms - 300
    world.hint("c")
    world.at(poll.end_ms)
    world.at(poll.hard_end_ms)
    assert end_of(poll) is Outcome.EMPTY
    assert world.counts.false_empties["orders", "billing"] == 1


def test_a_poll_without_a_reachable_broker_fails() -> None:
    world = World()
    for name in "abc":
        world.polling.lost(name, world.now_ms)
    poll = world.begin()
    assert (poll.state, world.asked) == (PollState.WAITING, {})
    world.at(poll.end_ms)
    assert isinstance(poll.step, PollEnd)
    assert isinstance(poll.step.error, BrokerUnreachable)


def test_a_poll_fails_if_every_broker_rejects_it() -> None:
    world = World()
    poll = world.waiting()
    world.refuse("a")
    world.refuse("b")
    assert poll.step is None
    world.refuse("c")
    assert poll.step == PollEnd(Outcome.FAILED, ERROR)


def test_a_broker_that_parks_again_does_not_count_as_failing() -> None:
    world = World()
    poll = world.waiting()
    for name in "ab":
        world.refuse(name)
    world.after(FAILURE_MS + TICK_MS)
    world.after(2_000)
    world.refuse("c")
    assert poll.step is None


# ------------------------------------------------------------ asking once, and asking all


def test_a_poll_without_a_wait_pops_at_every_broker_once() -> None:
    world = World()
    poll = world.begin(poll_ms=0)
    asked = []
    while isinstance(poll.step, PopStep):
        asked.append(poll.step.broker)
        assert poll.step.poll_ms == 0
        world.popped(poll)
    assert sorted(asked) == ["a", "b", "c"]
    assert end_of(poll) is Outcome.EMPTY
    assert not world.asked


def test_only_a_first_pop_without_a_wait_is_a_first_hit() -> None:
    world = World()
    poll = world.begin(poll_ms=0)
    world.popped(poll)
    world.popped(poll, 1)
    assert end_of(poll) is Outcome.FOUND
    poll = world.begin(poll_ms=0)
    world.failed(poll)
    world.popped(poll, 1)
    assert end_of(poll) is Outcome.FOUND
    world.make_direct()
    poll = world.begin()
    world.popped(poll, 1, was_parked=True)
    assert end_of(poll) is Outcome.FOUND
    poll = world.begin()
    world.popped(poll, 1)
    assert end_of(poll) is Outcome.FOUND_AT_FIRST


def test_a_poll_without_a_wait_fails_only_if_no_broker_answers() -> None:
    world = World()
    poll = world.begin(poll_ms=0)
    world.failed(poll)
    world.popped(poll)
    world.failed(poll)
    assert end_of(poll) is Outcome.EMPTY
    poll = world.begin(poll_ms=0)
    for _ in range(3):
        world.failed(poll)
    assert poll.step == PollEnd(Outcome.FAILED, ERROR)


def test_a_poll_without_a_wait_ends_soon() -> None:
    world = World()
    poll = world.begin(poll_ms=0)
    world.after(ASK_ONCE_MS + TICK_MS)
    world.at(poll.hard_end_ms + TICK_MS)
    assert poll.is_done


def test_a_repeated_attempt_pops_at_all_brokers_before_it_waits() -> None:
    world = World()
    poll = world.begin(asks_all=True)
    for _ in range(2):
        world.popped(poll)
        assert isinstance(poll.step, PopStep)
        assert not world.asked
    world.popped(poll)
    assert (poll.step, set(world.asked)) == (None, set("abc"))


# ------------------------------------------------------------ brokers that come and go


def test_polls_begin_at_the_brokers_in_rotation() -> None:
    world = World()
    firsts = [world.begin().step for _ in range(6)]
    assert sorted(str(step) for step in firsts) == sorted(str(PopStep(n, 0)) for n in "aabbcc")


def test_a_broker_is_asked_as_soon_as_it_reconnects() -> None:
    world = World()
    poll = world.waiting()
    world.polling.lost("b", world.now_ms)
    world.look()
    assert set(world.asked) == {"a", "c"}
    world.polling.reconnected("b", world.now_ms)
    world.look()
    assert set(world.asked) == set("abc")
    assert poll.step is None


def test_a_poll_continues_if_the_broker_of_its_pop_is_lost() -> None:
    world = World()
    poll = world.begin()
    assert isinstance(poll.step, PopStep)
    world.polling.lost(poll.step.broker, world.now_ms)
    world.look()
    assert world.stopped == [poll]
    world.popped(poll)
    assert poll.state is PollState.WAITING
    assert len(world.asked) == 2


def test_a_lost_broker_gets_no_pop() -> None:
    world = World()
    poll = world.begin(poll_ms=0)
    assert isinstance(poll.step, PopStep)
    lost = min(set("abc") - {poll.step.broker})
    world.polling.lost(lost, world.now_ms)
    world.look()
    world.popped(poll)
    assert isinstance(poll.step, PopStep)
    assert poll.step.broker != lost
    world.popped(poll)
    assert end_of(poll) is Outcome.EMPTY


def test_a_failing_broker_is_asked_as_soon_as_it_reconnects() -> None:
    world = World()
    world.waiting()
    world.refuse("b")
    world.polling.lost("b", world.now_ms)
    world.polling.reconnected("b", world.now_ms)
    world.look()
    assert "b" in world.asked


def test_a_poll_fails_after_all_its_brokers_are_lost() -> None:
    world = World()
    poll = world.begin()
    for name in "abc":
        world.polling.lost(name, world.now_ms)
    world.popped(poll)
    world.at(poll.end_ms)
    assert end_of(poll) is Outcome.FAILED


def test_a_pop_in_flight_at_a_release_is_the_last() -> None:
    world = World()
    poll, other = world.begin(), world.begin()
    world.polling.release(world.now_ms)
    world.popped(poll)
    assert end_of(poll) is Outcome.EMPTY
    assert world.popped(other, 1)
    assert not world.begin().is_long


def test_a_silent_broker_is_not_asked_first() -> None:
    world = World()
    for _ in range(4):
        poll = world.begin(silent="ac")
        assert poll.step == PopStep("b", 0)


def test_a_broker_that_gets_the_topic_later_is_asked_too() -> None:
    world = World("a")
    poll = world.begin()
    assert poll.step == PopStep("a", POLL_MS), "a poll at one broker is parked there"
    world.polling.brokers_changed(poll.pair, ["a", "b"], world.now_ms)
    world.look()
    assert set(world.asked) == {"b"}
    world.hint("b")
    assert world.stopped == [poll]
    world.popped(poll)
    assert poll.step == PopStep("b", POLL_MS)


# ------------------------------------------------------------ many polls


def test_many_polls_are_parked_at_the_least_covered_broker() -> None:
    world = World()
    world.make_direct()
    polls = [world.begin() for _ in range(3)]
    assert {poll.step for poll in polls} == {PopStep(name, POLL_MS) for name in "abc"}
    world.after(LINGER_MS + TICK_MS)
    assert not world.asked
    assert world.begin().parked_at is not None


def test_a_hint_moves_a_parked_poll_to_an_uncovered_broker() -> None:
    world = World()
    world.make_direct()
    first, second = world.begin(), world.begin()
    [uncovered] = set("abc") - {first.parked_at, second.parked_at}
    world.after(LINGER_MS + TICK_MS)
    assert set(world.asked) == {uncovered}
    world.hint(uncovered)
    assert world.stopped == [first]
    world.popped(first)
    assert first.step == PopStep(uncovered, first.end_ms - world.now_ms)


def test_a_moved_poll_returns_messages_of_its_parked_pop() -> None:
    world = World()
    world.make_direct()
    first, second = world.begin(), world.begin()
    [uncovered] = set("abc") - {first.parked_at, second.parked_at}
    world.hint(uncovered)
    assert world.popped(first, 1)
    assert end_of(first) is Outcome.FOUND_AT_FIRST
    assert world.stopped == [first, second], "the second poll moves"


def test_a_moved_poll_without_messages_is_parked_again() -> None:
    world = World()
    world.make_direct()
    first, second = world.begin(), world.begin()
    [uncovered] = set("abc") - {first.parked_at, second.parked_at}
    world.hint(uncovered)
    third = world.begin()
    assert third.step == PopStep(uncovered, POLL_MS)
    world.popped(first)
    assert first.parked_at is not None


def test_a_parked_poll_moves_if_another_one_covers_its_broker() -> None:
    world = World()
    world.make_direct()
    world.polling.lost("c", world.now_ms)
    alone, _, gone, _ = [world.begin() for _ in range(4)]
    assert gone.parked_at == alone.parked_at
    world.polling.cancel(gone, world.now_ms)
    world.look()
    world.stopped.clear()
    world.polling.reconnected("c", world.now_ms)
    world.look()
    world.hint("c")
    [moved] = world.stopped
    assert moved is not alone


def test_an_early_answer_of_a_parked_pop_does_not_affect_other_polls() -> None:
    world = World()
    world.make_direct()
    poll = world.begin()
    world.after(1_000)
    world.popped(poll, was_parked=True)
    assert poll.state is PollState.WAITING
    assert set(world.asked) == set("abc")


def test_parked_polls_per_broker_are_limited() -> None:
    world = World("ab")
    world.make_direct()
    for _ in range(2 * PARKED_A_BROKER_MAX):
        assert world.begin().parked_at is not None
    poll = world.begin()
    assert poll.step is not None
    assert poll.parked_at is None


def test_a_poll_beyond_the_parked_limit_waits_for_hints() -> None:
    world = World()
    world.make_direct()
    poll = world.begin()
    world.failed(poll)
    assert poll.state is PollState.WAITING
    assert set(world.asked) == set("abc")


# ------------------------------------------------------------ the switch


def test_the_mode_averages_the_waiting_polls() -> None:
    mode = WaitMode(("orders", "billing"), 0)
    for _ in range(10):
        mode.began(0)
    assert mode.concurrency(WINDOW_MS // 2) == pytest.approx(5, rel=0.15)
    assert mode.concurrency(WINDOW_MS) == pytest.approx(10, rel=0.1)
    for _ in range(10):
        mode.ended(WINDOW_MS)
    assert mode.concurrency(2 * WINDOW_MS) == 0
    assert mode.rate(WINDOW_MS + 1) == 0


@pytest.mark.parametrize(("brokers", "limit"), [(2, 9.2), (3, 13.8), (8, 36.8)])
def test_the_threshold_leaves_a_broker_uncovered_one_percent_of_the_time(
    brokers: int, limit: float
) -> None:
    assert threshold(brokers) == pytest.approx(limit, abs=0.1)


def test_the_mode_has_hysteresis_and_a_dwell_time() -> None:
    mode, now_ms = WaitMode(("orders", "billing"), 0), 0
    waiting = 0

    def settle(count: int) -> bool:
        """Let `count` polls wait until the mode may change, then choose it."""
        nonlocal waiting, now_ms
        while waiting < count:
            mode.began(now_ms)
            waiting += 1
        while waiting > count:
            mode.ended(now_ms)
            waiting -= 1
        now_ms += WINDOW_MS + DWELL_MS
        return mode.choose(3, now_ms)

    assert (settle(13), mode.name) == (False, "notify")
    assert (settle(15), mode.name) == (True, "direct")
    assert (settle(11), mode.name) == (False, "direct")
    assert (settle(9), mode.name) == (True, "notify")
    assert (settle(11), mode.name) == (False, "notify")
    assert settle(100)
    for _ in range(waiting):
        mode.ended(now_ms)
    assert not mode.choose(3, now_ms + DWELL_MS - 1), "a mode lasts"


def test_an_unused_mode_is_removed() -> None:
    world = World()
    world.polling.cancel(world.begin(), world.now_ms)
    world.after(WINDOW_MS + DWELL_MS - TICK_MS)
    assert world.polling.modes
    world.after(2 * TICK_MS)
    assert not world.polling.modes


def test_a_mode_stays_while_a_poll_waits() -> None:
    world = World()
    world.polling.cancel(world.begin(), world.now_ms)
    world.after(1_000)
    poll = world.begin(poll_ms=10 * POLL_MS)
    world.after(WINDOW_MS + DWELL_MS)
    assert list(world.polling.modes.values()) == [poll.pair.mode]


# ------------------------------------------------------------ timers


def test_timers_come_in_order_and_not_before_their_time() -> None:
    timers: DueTimes[str] = DueTimes()
    for name, at_ms in (("late", 31), ("early", 11), ("gone", 12), ("moved", 12)):
        timers.set(name, at_ms)
    timers.discard("gone")
    timers.discard("gone")
    timers.set("moved", 50)
    assert timers.next_ms() == 15
    assert timers.take_due(14) is None
    assert [timers.take_due(40) for _ in range(3)] == ["early", "late", None]
    assert (timers.next_ms(), len(timers)) == (50, 1)


def test_the_hard_end_is_half_of_the_deadline_reserve() -> None:
    assert LAST_LOOK_MS == 100
