"""The share of low levels across several broker groups: the proxy's polling beside real engines.

Some broker groups have the highest level, and some have lower levels. No level ever runs empty.

- The share of low messages is exact: of 100 messages, 100 - factor.
- The oldest low message of all broker groups is delivered within a bound.
- Broker groups with the highest level take turns.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from tests.support.seeds import seeds
from tests.support.worlds.engine_world import GROUP, TOPIC, World
from tidemill.broker.engine.message_filter import EVERY_MESSAGE
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.proxy.filters import EVERY_MESSAGE as WITHOUT_FILTER
from tidemill.proxy.polling.counts import PollCounts
from tidemill.proxy.polling.level_order import HintLevels
from tidemill.proxy.polling.notifications import NotificationStart, NotificationStop
from tidemill.proxy.polling.pair import PairKey, PairWatch
from tidemill.proxy.polling.poll import PopStep
from tidemill.proxy.polling.polling import LeftMessages, Polling

KEY = PairKey(TOPIC, GROUP, WITHOUT_FILTER)
HIGHEST = 7
STOCK = 64  # ready messages of each level of a broker group, at least
MESSAGES = 1_500
BATCHES = (1, 2, 8, 32)


class Broker:
    """A broker group with some levels that never run empty."""

    def __init__(self, levels: tuple[int, ...], factor: int) -> None:
        self.levels = levels
        self.world = World()
        self.world.engine.administration.put_topic(
            TOPIC, type_=TopicType.PRIORITY, queues=8, now_ms=self.world.now_ms
        )
        self.ids = self.world.group(GROUP, priority_factor=factor), self.world.topic()
        self.world.pop(1)  # Without a first pop, the proxy expects messages of any level.
        self.ready_bodies: dict[str, None] = {}  # The oldest first.
        self.ready: Counter[int] = Counter()

    def refill(self, now_ms: int) -> None:
        self.world.now_ms = now_ms
        for level in sorted(self.levels):
            missing = STOCK - self.ready[level]
            bodies = [f"{level}-{now_ms:09}-{number}" for number in range(missing)]
            self.world.send(*bodies, queue_id=level)
            self.ready[level] += max(missing, 0)
            self.ready_bodies.update(dict.fromkeys(bodies))

    def hint(self, level_min: int) -> tuple[int, HintLevels | None]:
        """Return the number and the levels of the ready messages."""
        ready = self.world.engine.consumption.ready_count(
            *self.ids, wanted=EVERY_MESSAGE, now_ms=self.world.now_ms, level_min=level_min
        )
        return ready.ready_count, None if ready.levels is None else HintLevels(*ready.levels)

    def pop(self, step: PopStep, want: int) -> list[str]:
        popped = self.world.pop(
            want,
            level_min=step.level_min,
            priority_factor=step.factor,
            level_below=step.level_below,
        )
        self.world.ack(*popped)
        bodies = [one.body for one in popped]
        for body in bodies:
            del self.ready_bodies[body]
            self.ready[level_of(body)] -= 1
        return bodies


class Trial:
    """One proxy and its broker groups."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.factor = self.random.choice((50, 80, 90, 95))
        self.want = self.random.choice(BATCHES)
        self.brokers = {
            f"broker-{number}": Broker(levels, self.factor)
            for number, levels in enumerate(self.some_layout())
        }
        self.polling = Polling(PollCounts(), random=self.random.random)
        self.parked: dict[PairWatch, tuple[int, int]] = {}  # The number and the lowest level.
        self.now_ms = 1_000_000
        self.refill()

    def refill(self) -> None:
        """Refill each broker group in a millisecond of its own."""
        for broker in self.brokers.values():
            self.now_ms += 1
            broker.refill(self.now_ms)

    def some_layout(self) -> list[tuple[int, ...]]:
        """Return the levels of each broker group: some have the highest one, some lower ones."""
        choices = ((HIGHEST,), (HIGHEST, 0), (HIGHEST, 3, 0), (0,), (3, 0), (6, 2))
        count = self.random.choice((2, 3))
        while True:
            layout: list[tuple[int, ...]] = [self.random.choice(choices) for _ in range(count)]
            levels = {level for one in layout for level in one}
            if HIGHEST in levels and len(levels) > 1:
                return layout

    def receive(self) -> tuple[str, list[str]]:
        """Receive messages; return them and their broker group."""
        self.refill()
        self.answer_parked()
        poll = self.polling.begin(
            KEY,
            list(self.brokers),
            poll_ms=self.random.choice((0, 20_000)),
            asks_all=False,
            now_ms=self.now_ms,
            priority_factor=self.factor,
            max_messages=self.want,
        )
        self.carry_out()
        while isinstance(step := poll.step, PopStep):
            broker = self.brokers[step.broker]
            bodies = broker.pop(step, self.want)
            self.polling.popped(
                poll,
                count=len(bodies),
                was_parked=False,
                now_ms=self.now_ms,
                levels=Counter(map(level_of, bodies)),
                left=LeftMessages(*broker.hint(0)),
            )
            self.carry_out()
            if bodies:
                return step.broker, bodies
        raise AssertionError("a receive ended empty beside ready messages")

    def carry_out(self) -> None:
        while actions := self.polling.take_actions():
            for action in actions:
                if isinstance(action, NotificationStart):
                    self.parked[action.watch] = action.number, action.level_min
                    self.answer_parked()
                elif isinstance(action, NotificationStop):
                    del self.parked[action.watch]

    def answer_parked(self) -> None:
        """Answer the notifications that have news."""
        for watch, (number, level_min) in list(self.parked.items()):
            count, levels = self.brokers[watch.broker].hint(level_min)
            if count:
                del self.parked[watch]
                self.polling.notified(watch, number, count, self.now_ms, levels=levels)

    def oldest_low(self) -> str:
        """Return the oldest ready message below the highest level."""
        first_of_brokers = [
            next((body for body in broker.ready_bodies if level_of(body) < HIGHEST), None)
            for broker in self.brokers.values()
        ]
        return min((body for body in first_of_brokers if body), key=sent_ms_of)

    def share_slack(self) -> int:
        """Return the largest deviation of the share: the credits of all accounts."""
        of_brokers = (2 * self.factor + 100) * len(self.brokers)
        return of_brokers + self.factor + 100 * self.want


def level_of(body: str) -> int:
    return int(body.split("-", maxsplit=1)[0])


def sent_ms_of(body: str) -> int:
    return int(body.split("-")[1])


@pytest.mark.parametrize("seed", seeds("priority shares", 24))
def test_low_levels_get_the_share_of_the_factor_across_broker_groups(seed: int) -> None:
    trial = Trial(seed)
    counts: Counter[bool] = Counter()
    highs_of: Counter[str] = Counter()
    oldest, delivered_since = "", 0
    is_busy = trial.factor / (100 - trial.factor)  # high messages per low message
    patience = is_busy * trial.want + 3 * len(trial.brokers) * (is_busy + 2 + trial.want)
    trial.receive()  # The proxy knows no levels before.
    while counts.total() < MESSAGES:
        if not oldest:
            oldest, delivered_since = trial.oldest_low(), 0
        name, bodies = trial.receive()
        highs = sum(level_of(body) == HIGHEST for body in bodies)
        highs_of[name] += highs
        counts[True] += highs
        counts[False] += len(bodies) - highs
        delivered_since += len(bodies)
        if not any(oldest in broker.ready_bodies for broker in trial.brokers.values()):
            oldest = ""
        assert delivered_since <= patience, "the oldest low message waits too long"
        deviation = counts[True] * (100 - trial.factor) - counts[False] * trial.factor
        assert abs(deviation) <= trial.share_slack(), f"{counts[False]} low of {counts.total()}"
    turns = [highs_of[name] for name, one in trial.brokers.items() if HIGHEST in one.levels]
    assert max(turns) <= 3 * min(turns), "broker groups with the highest level take turns"
