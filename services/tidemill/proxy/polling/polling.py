"""All polls of this proxy: a state machine without I/O. Time is a parameter.

Methods take events. `take_actions` returns the actions: notifications, and polls with a new `step`.
The shell carries out the step of a poll, reports the result, and takes the next step.

Invariant: while a poll waits for hints, each of its brokers has been asked, has hinted, will be
asked at a known time, or is down. At its end, a poll pops at every broker without a notification.
The module exceeds 500 lines because `Polling` is one state machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

from tidemill.common.errors import BrokerUnreachable, Overloaded
from tidemill.proxy.polling.counts import PollCounts
from tidemill.proxy.polling.mode import DWELL_MS, WINDOW_MS, WaitMode
from tidemill.proxy.polling.notifications import HintWatch, NotificationStart, NotificationStop
from tidemill.proxy.polling.pair import LevelFilters, PairKey, PairPoll, PairWatch, PollPair
from tidemill.proxy.polling.poll import Broker, Outcome, PollEnd, PopStep, ReceivePoll, outcome_of
from tidemill.proxy.polling.timers import DueTimes

if TYPE_CHECKING:
    from tidemill.common.errors import ServiceError
    from tidemill.proxy.polling.level_order import HintLevels

# A broker may stop the scan of a filter early; a pop that waits a little continues the scan.
UNSURE_POLL_MS: Final = 50
# An empty answer is false if a message was ready for this long before it.
FALSE_EMPTY_MS: Final = 200
# Longest time of a receive that does not wait; it leaves out brokers that it has not asked by then.
ASK_ONCE_MS: Final = 3_000


class PollWakeup(NamedTuple):
    """Action: a waiting poll has a new step."""

    poll: PairPoll


class PopCancellation(NamedTuple):
    """Action: cancel the pop of a poll, or do not start it.

    Messages that the pop still returns go back to the broker.
    """

    poll: PairPoll


Action: TypeAlias = (
    NotificationStart[PollPair] | NotificationStop[PollPair] | PollWakeup | PopCancellation
)


class LeftMessages(NamedTuple):
    """The ready messages of a PRIORITY topic that a pop has left at its broker."""

    ready_count: int
    levels: HintLevels | None  # None without messages

    def may_be_outside(self, step: PopStep) -> bool:
        """Whether the pop may have found nothing because it could take none of these messages."""
        if not self.ready_count or self.levels is None:
            return not self.ready_count
        highest = self.levels.highest
        # The lower messages may be above the pop, too, unless its bound is the highest level.
        has_lower = highest == step.level_below and self.levels.oldest_lower_at_ms
        is_above = highest >= step.level_below > 0 and not has_lower
        return highest < step.level_min or is_above


@final
class Polling:
    """All polls with their notifications.

    It is one class, because every event may change the state of polls, pairs and notifications.
    """

    def __init__(self, counts: PollCounts, *, random: Callable[[], float]) -> None:
        """Use `random` (uniform, 0 to 1) for back-off."""
        self.counts = counts
        self.pairs: dict[PairKey, PollPair] = {}
        self.modes: dict[tuple[str, str], WaitMode] = {}
        self.down: set[Broker] = set()
        self._level_filters = LevelFilters()
        self._random = random
        self._timers: DueTimes[PairPoll | PairWatch | PollPair | WaitMode] = DueTimes()
        self._actions: list[Action] = []
        self._numbers = 0
        self._is_released = False

    # ------------------------------------------------------------ for the shell

    def take_actions(self) -> list[Action]:
        """Return and clear the actions."""
        actions, self._actions = self._actions, []
        return actions

    def next_due_ms(self) -> int | None:
        """Return the time of the next call of `due`; None if there is none."""
        return self._timers.next_ms()

    def due(self, now_ms: int) -> None:
        """Process everything that is due."""
        while (item := self._timers.take_due(now_ms)) is not None:
            if isinstance(item, ReceivePoll):
                self._poll_due(item, now_ms)
            elif isinstance(item, HintWatch):
                self._update(item.pair, now_ms)
            elif isinstance(item, PollPair):
                self._linger_ended(item, now_ms)
            else:
                # No poll used this mode for a window and a dwell, so it equals a new one.
                del self.modes[item.key]

    # ------------------------------------------------------------ polls

    def begin(
        self,
        key: PairKey,
        brokers: Sequence[Broker],
        *,
        poll_ms: int,
        asks_all: bool,
        now_ms: int,
        once_ms: int = ASK_ONCE_MS,
        silent: frozenset[Broker] = frozenset(),
        target: object = None,
        may_park: bool = True,
        priority_factor: int | None = None,
        max_messages: int = 1,
    ) -> PairPoll:
        """Begin a poll at `brokers`; some may be down or `silent`.

        With a `poll_ms` of 0, the poll pops at every broker once, within `once_ms`. With
        `asks_all`, it does so before it waits. If no broker is reachable, it waits for one. Without
        `may_park`, it waits for hints, and never at a broker. With a `priority_factor`, hints order
        the brokers by levels, and no poll is parked. The number of such filters has a limit.
        """
        pair = self._pair(key, now_ms)
        if priority_factor is not None and (
            self._is_released or not self._level_filters.admit(key)
        ):
            priority_factor = None
        pair.set_factor(priority_factor)
        if pair.order is not None:
            may_park = False
            self.counts.inversions[key.topic, key.group] += 0  # The series begins at zero.
        pair.target, pair.silent = target, silent
        self._actions += pair.set_brokers(brokers, self.down)
        is_long = poll_ms > 0 and not self._is_released
        if is_long:
            self._choose_mode(pair.mode, len(brokers), now_ms)
        self._numbers += 1
        poll = ReceivePoll(
            pair,
            self._numbers,
            began_ms=now_ms,
            end_ms=now_ms + (poll_ms if is_long else min(once_ms, ASK_ONCE_MS)),
            is_long=is_long,
            is_direct=is_long and may_park and (pair.mode.is_direct or len(brokers) == 1),
            max_messages=max_messages,
        )
        self.counts.began(key.topic, key.group, poll.mode, is_long=is_long)
        pair.polls[poll] = None
        # A pop in flight ends by itself until then.
        self._timers.set(poll, poll.hard_end_ms)
        if is_long:
            self._timers.discard(pair.mode)
            pair.mode.began(now_ms)
            pair.until_ms = max(pair.until_ms, poll.end_ms)
            self._first_step(poll, asks_all=asks_all, now_ms=now_ms)
        else:
            self._ask_all(poll, now_ms)
        self._update(pair, now_ms)
        return poll

    def _first_step(self, poll: PairPoll, *, asks_all: bool, now_ms: int) -> None:
        pair = poll.pair
        if pair.hinted and not asks_all:
            self._follow(poll, now_ms)
        elif poll.is_direct and (broker := pair.broker_to_park_at(pair.rotated_brokers())):
            self._park(poll, broker, now_ms)
        elif not asks_all and pair.is_covered(now_ms):
            # A broker with a message would have reported it, so a pop would be empty.
            self._ask(poll, (), now_ms)
        elif asks_all:
            self._ask_all(poll, now_ms)
        else:
            self._ask(poll, pair.pops(poll.max_messages)[:1], now_ms)

    def _ask_all(self, poll: PairPoll, now_ms: int) -> None:
        """Pop at every reachable broker, or at the first one that becomes reachable."""
        pops = poll.pair.pops(poll.max_messages)
        # A poll that may not wait has popped at every broker already.
        poll.has_looked = not poll.is_long and bool(pops or self._is_released)
        self._ask(poll, pops, now_ms)
        if poll in poll.pair.waiting:
            poll.pair.without_broker[poll] = None

    def _ask(self, poll: PairPoll, pops: Sequence[PopStep], now_ms: int) -> None:
        if pops:
            poll.ask(pops)
            poll.pair.begin_pop(poll)
        else:
            poll.wait()
            self._next_step(poll, now_ms)

    def popped(
        self,
        poll: PairPoll,
        *,
        count: int,
        was_parked: bool,
        now_ms: int,
        levels: Mapping[int, int] = MappingProxyType({}),
        left: LeftMessages | None = None,
    ) -> bool:
        """Apply the result of the pop of a poll: its number of messages, in all and by level.

        `left` are the messages that the pop has left, if they are known. Return False if the poll
        has ended before. The messages then go back to the broker.
        """
        if poll.is_done:
            return False
        pair = poll.pair
        self._learn(poll, count, now_ms, left)
        if pair.is_inverted(poll, levels):
            self.counts.inversions[pair.key.topic, pair.key.group] += 1
        pair.end_pop(poll, levels)
        # If the broker drains, the poll continues at the other brokers.
        is_cut = poll.parked_at is not None and not poll.is_stopping and now_ms < poll.end_ms
        pair.unpark(poll)
        if count:
            poll.found(was_parked=was_parked)
            self._ended(poll, now_ms)
        elif poll.missed():
            poll.is_direct = poll.is_direct and not is_cut
            self._next_step(poll, now_ms)
        self._update(pair, now_ms)
        return bool(count)

    def _learn(self, poll: PairPoll, count: int, now_ms: int, left: LeftMessages | None) -> None:
        """Update the hints of the broker of a pop."""
        assert isinstance(poll.step, PopStep), "a pop was in flight"
        pair, is_hinted = poll.pair, poll.hinted_by is not None
        watch = pair.watches.get(poll.step.broker)
        is_told = bool(count) or not poll.is_stopping
        if watch is None or not is_told:
            return
        if is_hinted:
            self.counts.followed(pair.key, is_hit=bool(count))
        if left is not None and (count or left.may_be_outside(poll.step)):
            # Without a message, another consumer was faster. The hint was right.
            watch.left(left.ready_count, left.levels, now_ms)
        elif count:
            watch.hit(count - is_hinted)
        elif is_hinted and (left is not None or not poll.step.level_below):
            watch.missed(now_ms)
        else:
            # A fair pop does not take the highest levels, so the next notification has no delay.
            watch.hint_count = 0
        _note_hint(watch)

    def pop_failed(self, poll: PairPoll, error: ServiceError, now_ms: int) -> None:
        """Apply the failure of the pop of a poll."""
        if poll.is_done:
            return
        pair = poll.pair
        assert isinstance(poll.step, PopStep), "a pop was under way"
        pair.end_pop(poll, {})
        is_full = poll.parked_at is not None and isinstance(error, Overloaded)
        watch = pair.watches.get(poll.step.broker)
        # If the broker parks no more pops, it may still park a notification.
        if watch is not None and not is_full:
            watch.pop_failed(error, now_ms)
            _note_hint(watch)
        pair.unpark(poll)
        poll.is_direct = False
        if poll.missed(error):
            self._next_step(poll, now_ms)
        self._fail_all(pair, now_ms)
        self._update(pair, now_ms)

    def cancel(self, poll: PairPoll, now_ms: int) -> None:
        """End a poll whose caller cancelled it, unless it has ended."""
        if not poll.is_done:
            self._end(poll, PollEnd(Outcome.CANCELLED), now_ms)
            self._update(poll.pair, now_ms)

    def fail(self, poll: PairPoll, error: ServiceError, now_ms: int) -> None:
        """End a poll with an error of its caller, unless it has ended."""
        if not poll.is_done:
            self._end(poll, PollEnd(outcome_of(error), error), now_ms)
            self._update(poll.pair, now_ms)

    def end_empty(self, poll: PairPoll, now_ms: int) -> None:
        """Answer a poll empty, because its client ends. A pop in flight is given back."""
        if not poll.is_done:
            self._end(poll, PollEnd(Outcome.EMPTY), now_ms)
            self._update(poll.pair, now_ms)

    def release(self, now_ms: int) -> None:
        """Answer every waiting poll empty. Later polls do not wait."""
        self._is_released = True
        for pair in self.pairs.values():
            pair.set_factor(None)
            for poll in list(pair.polls):
                # The client gets the messages of a pop in flight.
                poll.has_looked = True
                if not poll.has_pop or poll.parked_at is not None:
                    self._end(poll, PollEnd(Outcome.EMPTY), now_ms)
            self._update(pair, now_ms)

    # ------------------------------------------------------------ notifications

    def notified(
        self,
        watch: PairWatch,
        number: int,
        count: int,
        now_ms: int,
        *,
        is_unsure: bool = False,
        levels: HintLevels | None = None,
    ) -> None:
        """Apply the answer of a notification: the number of ready messages, 0 at its end."""
        if not watch.answered(number, count, now_ms, is_unsure=is_unsure, levels=levels):
            return
        self.counts.notified(watch.pair.key, has_message=bool(count))
        _note_hint(watch)
        self._update(watch.pair, now_ms)

    def notification_failed(
        self, watch: PairWatch, number: int, error: ServiceError, now_ms: int
    ) -> None:
        """Apply the failure of a notification."""
        if not watch.failed(number, error, now_ms):
            return
        key = watch.pair.key
        self.counts.notification_failures[key.topic, key.group] += 1
        self._fail_all(watch.pair, now_ms)
        self._update(watch.pair, now_ms)

    def lost(self, broker: Broker, now_ms: int) -> None:
        """Note that a broker is unreachable: cancel its notifications."""
        self.down.add(broker)
        for pair in self.pairs.values():
            watch = pair.watches.get(broker)
            if watch is None:
                continue
            if stopped := watch.lost():
                self._actions.append(stopped)
            _note_hint(watch)
            for poll in pair.polls:
                poll.exclude(broker)
                if poll.has_pop and isinstance(poll.step, PopStep) and poll.step.broker == broker:
                    self._stop_pop(poll)
            self._update(pair, now_ms)

    def reconnected(self, broker: Broker, now_ms: int) -> None:
        """Note that a broker is reachable again: send its notifications at once."""
        self.down.discard(broker)
        for pair in self.pairs.values():
            if watch := pair.watches.get(broker):
                watch.reconnected()
                self._update(pair, now_ms)

    def brokers_changed(self, pair: PollPair, brokers: Sequence[Broker], now_ms: int) -> None:
        """Change the brokers that store messages of a pair."""
        self._actions += pair.set_brokers(brokers, self.down)
        self._update(pair, now_ms)

    def unpark(self, pair: PollPair, now_ms: int) -> None:
        """Let the polls of a pair wait for hints, because each pop needs permits from now on."""
        for poll in pair.polls:
            poll.is_direct = False
            if poll.parked_at is not None and not poll.is_stopping:
                self._stop_pop(poll)
        self._update(pair, now_ms)

    # ------------------------------------------------------------ next step of a poll

    def _next_step(self, poll: PairPoll, now_ms: int) -> None:
        """Choose the next step of a poll without a pop, or let it wait."""
        pair = poll.pair
        if pair.hinted and now_ms < poll.hard_end_ms:
            self._follow(poll, now_ms)
        elif poll.has_looked or now_ms >= poll.end_ms:
            self._last_look(poll, now_ms)
        elif (
            poll.is_direct
            and (broker := pair.broker_to_park_at(pair.rotated_brokers())) is not None
        ):
            self._park(poll, broker, now_ms)
        else:
            poll.is_direct = False
            if any(watch.number for watch in pair.watches.values()):
                self.counts.coalesced[pair.key.topic, pair.key.group] += 1
            self._timers.set(poll, poll.end_ms)
            pair.wait(poll)

    def _follow(self, poll: PairPoll, now_ms: int) -> None:
        """Send a poll to the broker of the next hint."""
        watch, choice = poll.pair.next_hinted(poll.max_messages)
        watch.take()
        _note_hint(watch)
        if poll.is_direct and now_ms < poll.end_ms:
            # No poll is parked at this broker, so the hint stays.
            self._park(poll, watch.broker, now_ms)
        else:
            poll_ms = UNSURE_POLL_MS if watch.is_unsure else 0
            poll.follow(watch.broker, poll_ms=poll_ms, choice=choice)
            poll.pair.begin_pop(poll)

    def _park(self, poll: PairPoll, broker: Broker, now_ms: int) -> None:
        poll.park(broker, now_ms)
        poll.pair.park(poll, broker)

    def _last_look(self, poll: PairPoll, now_ms: int) -> None:
        """Pop once more at every broker without a notification, then end."""
        pair = poll.pair
        if not poll.has_looked:
            poll.has_looked = True
            blind = [
                PopStep(watch.broker, 0)
                for watch in pair.watches.values()
                if not watch.is_down
                and watch.broker not in pair.silent
                and not watch.is_covered(now_ms)
            ]
            if blind and now_ms < poll.hard_end_ms:
                poll.ask(blind)
                return
        self._end(poll, self._empty_end(poll, now_ms), now_ms)

    def _empty_end(self, poll: PairPoll, now_ms: int) -> PollEnd:
        """Return the end of a poll without messages: empty, or an error if no broker answered."""
        pair = poll.pair
        watches = list(pair.watches.values())
        is_heard = poll.has_answer or any(
            not watch.is_down and not watch.is_failing(now_ms) for watch in watches
        )
        if not is_heard:
            errors = [watch.error for watch in watches if watch.error is not None]
            unreachable = BrokerUnreachable("all brokers of the topic are unreachable; retry later")
            return PollEnd(Outcome.FAILED, poll.error or next(iter(errors), unreachable))
        if any(now_ms - watch.hinted_at_ms > FALSE_EMPTY_MS for watch in pair.hinted):
            self.counts.false_empties[pair.key.topic, pair.key.group] += 1
        return PollEnd(Outcome.EMPTY)

    def _poll_due(self, poll: PairPoll, now_ms: int) -> None:
        if now_ms >= poll.hard_end_ms:
            self._end(poll, self._empty_end(poll, now_ms), now_ms)
        else:
            # The poll is over. Messages of a pop in flight go back to the broker.
            self._timers.set(poll, poll.hard_end_ms)
            if poll.pair.stop_waiting(poll):
                self._next_step(poll, now_ms)
                self._actions.append(PollWakeup(poll))
        self._update(poll.pair, now_ms)

    def _fail_all(self, pair: PollPair, now_ms: int) -> None:
        """End the waiting polls with an error if every broker rejects them."""
        watches = list(pair.watches.values())
        failing = [watch.error for watch in watches if watch.is_failing(now_ms)]
        if failing and all(watch.is_down or watch.is_failing(now_ms) for watch in watches):
            for poll in list(pair.waiting):
                self._end(poll, PollEnd(Outcome.FAILED, failing[-1]), now_ms)

    def _stop_pop(self, poll: PairPoll) -> None:
        poll.is_stopping = True
        self._actions.append(PopCancellation(poll))

    def _end(self, poll: PairPoll, end: PollEnd, now_ms: int) -> None:
        pair = poll.pair
        if poll.has_pop:
            pair.end_pop(poll, {})
            self._actions.append(PopCancellation(poll))
        elif pair.stop_waiting(poll):
            self._actions.append(PollWakeup(poll))
        pair.unpark(poll)
        poll.end(end)
        self._ended(poll, now_ms)

    def _ended(self, poll: PairPoll, now_ms: int) -> None:
        assert isinstance(poll.step, PollEnd), "the poll has ended"
        pair, mode = poll.pair, poll.pair.mode
        self._timers.discard(poll)
        del pair.polls[poll]
        if poll.is_long:
            mode.ended(now_ms)
            if not mode.waiting:
                self._timers.set(mode, now_ms + WINDOW_MS + DWELL_MS)
        self.counts.ended(
            pair.key.topic,
            pair.key.group,
            poll.mode,
            _called(poll.step),
            now_ms - poll.began_ms,
            is_long=poll.is_long,
        )

    # ------------------------------------------------------------ pairs

    def _pair(self, key: PairKey, now_ms: int) -> PollPair:
        pair = self.pairs.get(key)
        if pair is None:
            of_mode = key.topic, key.group
            mode = self.modes.get(of_mode)
            if mode is None:
                mode = self.modes[of_mode] = WaitMode(of_mode, now_ms)
                # Forgotten unless a poll waits in this mode.
                self._timers.set(mode, now_ms + WINDOW_MS + DWELL_MS)
            pair = self.pairs[key] = PollPair(key, mode, random=self._random)
        return pair

    def _choose_mode(self, mode: WaitMode, brokers: int, now_ms: int) -> None:
        if mode.choose(brokers, now_ms):
            self.counts.switches[mode.name] += 1

    def _update(self, pair: PollPair, now_ms: int) -> None:
        """Send polls to the brokers of hints, and send missing notifications."""
        if pair.without_broker and (pops := pair.pops(1)):
            self._ask_without_broker(pair, pops)
        self._serve(pair, now_ms)
        is_lingering = not pair.polls
        for watch in pair.watches.values():
            watch.is_wanted = pair.needs_notification(watch)
            if not watch.is_wanted:
                is_lingering = is_lingering or watch.number > 0
                continue
            if stopped := watch.stop_too_high():
                self._actions.append(stopped)
            if ask := watch.ask(pair.notified_until_ms(now_ms), now_ms):
                self._actions.append(ask)
            elif (due_ms := watch.due_ms()) is not None and due_ms > now_ms:
                # Otherwise all polls are ending and pop at every broker.
                self._timers.set(watch, due_ms)
        if not is_lingering:
            pair.linger_until_ms = 0
            self._timers.discard(pair)
        elif not pair.linger_until_ms:
            pair.linger_until_ms = now_ms + pair.linger_ms
            self._timers.set(pair, pair.linger_until_ms)

    def _ask_without_broker(self, pair: PollPair, pops: Sequence[PopStep]) -> None:
        """Pop for polls that found no reachable broker; a hint would wake only some of them."""
        for poll in list(pair.without_broker):
            pair.stop_waiting(poll)
            poll.has_looked = not poll.is_long
            poll.ask(pops)
            pair.begin_pop(poll)
            self._actions.append(PollWakeup(poll))

    def _serve(self, pair: PollPair, now_ms: int) -> None:
        while pair.hinted:
            poll = pair.oldest_waiting()
            if poll is None:
                for parked in pair.polls_to_move(len(pair.hinted)):
                    self._stop_pop(parked)
                return
            pair.stop_waiting(poll)
            self._follow(poll, now_ms)
            self._actions.append(PollWakeup(poll))

    def _linger_ended(self, pair: PollPair, now_ms: int) -> None:
        """Cancel notifications without polls after the linger time; forget pairs without polls."""
        pair.linger_until_ms = 0
        for watch in pair.watches.values():
            is_over = not watch.is_wanted or not pair.polls
            if is_over and (stopped := watch.stop()):
                self._actions.append(stopped)
        if pair.polls:
            self._update(pair, now_ms)
        else:
            for watch in pair.watches.values():
                self._timers.discard(watch)
            del self.pairs[pair.key]
            self._level_filters.discard(pair.key)


def _note_hint(watch: PairWatch) -> None:
    """Add a broker with unassigned hints to `hinted` of its pair, or remove it."""
    if watch.hint_count:
        watch.pair.hinted.setdefault(watch)
    else:
        watch.pair.hinted.pop(watch, None)


def _called(end: PollEnd) -> str:
    """Return the label of an end in metrics."""
    return (outcome_of(end.error) if end.error is not None else end.outcome).value
