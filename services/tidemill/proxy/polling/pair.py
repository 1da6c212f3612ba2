"""The polls of one consumer group on one topic with one filter, and their brokers."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias, final

from tidemill.proxy.filters import EVERY_MESSAGE, WantedMessages
from tidemill.proxy.polling.level_order import FACTOR_MAX, NO_LEVEL, LevelChoice, LevelOrder
from tidemill.proxy.polling.mode import WaitMode
from tidemill.proxy.polling.notifications import HintWatch, NotificationAction
from tidemill.proxy.polling.poll import Broker, PollState, PopStep, ReceivePoll

# Time that notifications stay parked after the last poll. A consumer usually polls again after it
# has processed its messages.
LINGER_MS: Final = 1_000
# The same for pairs that order brokers by levels, so that the next poll knows the levels.
LEVEL_LINGER_MS: Final = 10_000
# Filters of one topic and consumer group that order brokers by levels. Each arriving message of the
# topic costs every broker one count per filter. Pairs with further filters poll as for other types.
LEVEL_FILTERS_MAX: Final = 4
# Polls of a pair that are parked at one broker; the others wait for hints. More would not help, and
# a broker parks at most 1,024 polls of all proxies.
PARKED_A_BROKER_MAX: Final = 16
_STALE_MIN: Final = 64  # entries of ended polls before they are swept


PairPoll: TypeAlias = "ReceivePoll[PollPair]"
PairWatch: TypeAlias = "HintWatch[PollPair]"


class PairKey(NamedTuple):
    """The topic, consumer group and filter of a pair."""

    topic: str
    group: str
    wanted: WantedMessages


@final
class LevelFilters:
    """The filters with which consumer groups order brokers by levels."""

    def __init__(self) -> None:
        self._of_group: dict[tuple[str, str], set[PairKey]] = {}  # by topic and consumer group

    def admit(self, key: PairKey) -> bool:
        """Whether a pair may order brokers by levels, until `discard`. A pair without filter may.

        At most LEVEL_FILTERS_MAX filters of a topic and consumer group are admitted.
        """
        if key.wanted == EVERY_MESSAGE:
            return True
        admitted = self._of_group.setdefault((key.topic, key.group), set())
        if key not in admitted and len(admitted) < LEVEL_FILTERS_MAX:
            admitted.add(key)
        return key in admitted

    def discard(self, key: PairKey) -> None:
        """Make room for another filter."""
        admitted = self._of_group.get((key.topic, key.group), set())
        admitted.discard(key)
        if not admitted:
            self._of_group.pop((key.topic, key.group), None)


@final
class PollPair:
    """The polls that wait for the same messages.

    If a poll waits for hints, every broker has a notification. If all polls are parked, only
    brokers without a parked poll have one.
    """

    def __init__(self, key: PairKey, mode: WaitMode, *, random: Callable[[], float]) -> None:
        self.key = key
        self.mode = mode
        # Set for a PRIORITY topic at several brokers.
        self.order: LevelOrder | None = None
        self.target: object = None  # consumer group and topic for the shell
        self.watches: dict[Broker, PairWatch] = {}
        self.silent: frozenset[Broker] = frozenset()  # of these, as the last poll found them
        self.hinted: dict[PairWatch, None] = {}  # with unassigned hints, the oldest first
        self.parked: dict[PairPoll, None] = {}  # the oldest first
        self.polls: dict[PairPoll, None] = {}  # that have not ended
        self.waiting: dict[PairPoll, None] = {}  # of these, for a hint
        # Waiting polls that found no reachable broker when they began.
        self.without_broker: dict[PairPoll, None] = {}
        self.until_ms = 0  # end of the last poll
        self.linger_until_ms = 0
        self._random = random
        self._turn = 0
        self._covering: dict[Broker, int] = {}  # how many polls are parked there
        # Waiting polls and some ended ones; a poll may appear twice.
        self._by_age: list[tuple[int, PairPoll]] = []

    # ------------------------------------------------------------ brokers

    def set_brokers(
        self, brokers: Sequence[Broker], down: set[Broker]
    ) -> list[NotificationAction[PollPair]]:
        """Set the brokers that store messages of the pair."""
        actions: list[NotificationAction[PollPair]] = []
        if len(brokers) != len(self.watches) or any(name not in self.watches for name in brokers):
            for name in [name for name in self.watches if name not in brokers]:
                removed = self.watches.pop(name)
                self.hinted.pop(removed, None)
                if stopped := removed.stop():
                    actions.append(stopped)
            for name in brokers:
                if name not in self.watches:
                    added = self.watches[name] = HintWatch(self, name, random=self._random)
                    added.is_down = name in down
        return actions

    def rotated_brokers(self) -> list[Broker]:
        """Return the reachable brokers in rotated order, those with known high levels first.

        A silent broker gets no pop, unless all are silent.
        """
        up = [name for name, watch in self.watches.items() if not watch.is_down]
        names = [name for name in up if name not in self.silent] or up
        self._turn += 1
        first = self._turn % len(names) if names else 0
        rotated = names[first:] + names[:first]
        if self.order is not None:
            rotated.sort(key=lambda name: -self.watches[name].known_level)
        return rotated

    def is_covered(self, now_ms: int) -> bool:
        """Whether every reachable broker would have reported a ready message."""
        return all(watch.is_down or watch.is_covered(now_ms) for watch in self.watches.values())

    def needs_notification(self, watch: PairWatch) -> bool:
        """Whether this broker could have news that no poll will hear."""
        if self.waiting or self.order is not None:
            return True
        return bool(self.parked) and not self._covering.get(watch.broker)

    # ------------------------------------------------------------ levels of a PRIORITY topic

    def set_factor(self, factor: int | None) -> None:
        """Order the brokers by levels with a factor, or not at all."""
        if factor is None:
            self.order = None
            for watch in self.watches.values():
                watch.levels = None
        else:
            self.order = self.order or LevelOrder()
            self.order.factor = factor

    @property
    def linger_ms(self) -> int:
        """How long notifications stay parked after the last poll."""
        return LINGER_MS if self.order is None else LEVEL_LINGER_MS

    def notified_until_ms(self, now_ms: int) -> int:
        """Return the end of the next notification."""
        return self.until_ms if self.order is None else max(self.until_ms, now_ms + LEVEL_LINGER_MS)

    def pops(self, max_messages: int) -> list[PopStep]:
        """Return a pop that does not wait at each reachable broker, in the order of the brokers.

        With levels, a pop finds nothing below the level that the next broker is known to have.
        """
        names = self.rotated_brokers()
        if self.order is None:
            return [PopStep(name, 0) for name in names]
        levels = [0] * len(names)
        if not self._is_filtered:
            levels = [*(self.watches[name].known_level for name in names[1:]), 0]
        pops = [PopStep(name, 0, level) for name, level in zip(names, levels, strict=False)]
        if self.hinted:
            watch, choice = self.next_hinted(max_messages)
            assert choice is not None, "the pair orders brokers by levels"
            level_min = max(choice.other_level, 0)
            has_factor = choice.factor is not None
            first = PopStep(watch.broker, 0, level_min, choice if has_factor else None)
            # A fair pop takes no message of the highest level, which this broker may have.
            again = [PopStep(watch.broker, 0)] if first.level_below else []
            pops = [first, *(pop for pop in pops if pop.broker != first.broker), *again]
        return pops

    def next_hinted(self, max_messages: int) -> tuple[PairWatch, LevelChoice | None]:
        """Return the next broker with a hint, and how to pop there.

        Without levels it is the broker of the oldest hint.
        """
        if self.order is None:
            return next(iter(self.hinted)), None
        watch, choice = self.order.choose(self.hinted, max_messages)
        return watch, choice._replace(other_level=NO_LEVEL) if self._is_filtered else choice

    def begin_pop(self, poll: PairPoll) -> None:
        """Note that the pop of a poll begins."""
        step = poll.step
        if self.order is not None and isinstance(step, PopStep) and step.choice is not None:
            self.order.begin(step.choice)

    def is_inverted(self, poll: PairPoll, levels: Mapping[int, int]) -> bool:
        """Whether a strict pop found only messages below the level that another broker had."""
        step = poll.step
        assert isinstance(step, PopStep), "a pop was in flight"
        if self.order is None or not levels or max(levels) >= poll.other_level:
            return False
        return FACTOR_MAX in {step.factor, self.order.factor}

    def end_pop(self, poll: PairPoll, levels: Mapping[int, int]) -> None:
        """Note that the pop of a poll has ended with messages of these levels."""
        step = poll.step
        if self.order is not None and isinstance(step, PopStep) and step.choice is not None:
            self.order.end(step.choice, levels)

    @property
    def _is_filtered(self) -> bool:
        """Whether brokers do not answer what a pop has left: then no pop is conditional."""
        return self.key.wanted != EVERY_MESSAGE

    # ------------------------------------------------------------ polls that wait for hints

    def wait(self, poll: PairPoll) -> None:
        """Let `poll` wait for a hint."""
        assert poll.state is PollState.WAITING, "a waiting poll has no pop in flight"
        self.waiting[poll] = None
        heapq.heappush(self._by_age, (poll.number, poll))
        if len(self._by_age) > max(2 * len(self.waiting), _STALE_MIN):
            self._by_age = sorted((one.number, one) for one in self.waiting)

    def stop_waiting(self, poll: PairPoll) -> bool:
        """Remove a waiting poll. Return whether it was waiting."""
        if poll not in self.waiting:
            return False
        del self.waiting[poll]
        self.without_broker.pop(poll, None)
        return True

    def oldest_waiting(self) -> PairPoll | None:
        """Return the oldest poll that waits for a hint."""
        by_age = self._by_age
        while by_age and by_age[0][1] not in self.waiting:
            heapq.heappop(by_age)
        return by_age[0][1] if by_age else None

    # ------------------------------------------------------------ parked polls

    def park(self, poll: PairPoll, broker: Broker) -> None:
        """Note that `poll` is parked at `broker`."""
        self.parked[poll] = None
        self._covering[broker] = self._covering.get(broker, 0) + 1

    def unpark(self, poll: PairPoll) -> None:
        """Note that `poll` is no longer parked."""
        broker = poll.parked_at
        if broker is None or poll not in self.parked:
            return
        del self.parked[poll]
        self._covering[broker] -= 1
        if not self._covering[broker]:
            del self._covering[broker]

    def broker_to_park_at(self, brokers: Sequence[Broker]) -> Broker | None:
        """Return the best broker for another parked poll; None if enough are parked."""
        covering = self._covering
        best = min(brokers, key=lambda name: covering.get(name, 0), default=None)
        if best is None or covering.get(best, 0) >= PARKED_A_BROKER_MAX:
            return None
        return best

    def polls_to_move(self, count: int) -> list[PairPoll]:
        """Return up to `count` parked polls that may follow a hint, because other polls stay."""
        moving = [poll for poll in self.parked if poll.is_stopping]
        if len(moving) >= count or not self.parked:
            return []
        for poll in self.parked:
            if not poll.is_stopping and self._covering.get(poll.parked_at or "", 0) > 1:
                return [poll]
        return [poll for poll in self.parked if not poll.is_stopping][:1]
