"""Brokers, links and clients around the polls of a proxy, on virtual time and in random order.

A message between the proxy and a broker takes up to `LATENCY_MS`. A step of a poll runs up to
`TURN_MS` later. Faults happen at any moment. `World.step` performs the next event and checks the
invariants.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tidemill.common.errors import Overloaded
from tidemill.proxy.filters import EVERY_MESSAGE, WantedMessages
from tidemill.proxy.polling.counts import PollCounts
from tidemill.proxy.polling.level_order import FACTOR_MAX, HintLevels
from tidemill.proxy.polling.notifications import NotificationStart, NotificationStop
from tidemill.proxy.polling.pair import PairKey, PairPoll, PairWatch, PollPair
from tidemill.proxy.polling.poll import LAST_LOOK_MS, Outcome, PollEnd, PopStep
from tidemill.proxy.polling.polling import (
    FALSE_EMPTY_MS,
    LeftMessages,
    Polling,
    PollWakeup,
    PopCancellation,
)
from tidemill.proxy.polling.timers import TICK_MS

KEY = PairKey("orders", "billing", EVERY_MESSAGE)
FILTERED_KEY = KEY._replace(wanted=WantedMessages(("paid",)))
LEVEL_MAX = 7
LATENCY_MS = 8  # one way, at most: four looks and their answers have room in LAST_LOOK_MS
TURN_MS = 1  # at most, until a woken poll continues
GIVE_BACK_MS = 1_000
BATCH = 4
# A message is known to the proxy after so long: an answer, and before it the notification and the
# answer that it replaces.
KNOWN_MS = 3 * (LATENCY_MS + TURN_MS + 1)
STEPS_MAX = 50_000  # ten times the steps of a story
REFUSED_MS = 300  # after a rejected pop; meanwhile a poll may miss ready messages


@dataclass(eq=False)
class Broker:
    """A broker group: ready messages, and waiting pops and notifications."""

    name: str
    ready: dict[int, int] = field(default_factory=dict)  # message -> time when it became ready
    pops: list[PopInFlight] = field(default_factory=list)
    # The lowest level that each of them waits for.
    notifications: dict[tuple[PairWatch, int], int] = field(default_factory=dict)
    is_up: bool = True
    up_at_ms: int = -10_000
    stream: int = 0
    refused_at_ms: int = -10_000
    refuses: str = ""  # "notifications", "pops"
    is_unread: bool = False  # the group has never popped here
    last_arrival_ms: int = 0  # of its answers at the proxy
    popped_at_ms: int = 0  # arrival of the last answer of a pop


@dataclass(eq=False)
class PopInFlight:
    """One pop in flight."""

    poll: PairPoll
    broker: Broker
    until_ms: int
    stream: int
    level_min: int
    level_below: int  # 0: no bound
    sent_ms: int
    is_over: bool = False  # its poll has abandoned it


@dataclass(eq=False)
class Client:
    """One receive."""

    poll: PairPoll
    popping: PopInFlight | None = None
    answer: PollEnd | None = None
    messages: list[int] = field(default_factory=list)
    popped_ms: int = 0  # when its last pop was sent
    is_running: bool = False


class World:
    """The proxy's polls with their brokers, clients and clock."""

    def __init__(
        self,
        seed: int,
        *,
        brokers: int,
        factor: int | None = None,
        refusal_ratio: float = 0.02,
        is_fifo: bool = False,
        is_filtered: bool = False,
        unread: int = 0,
    ) -> None:
        """Messages have levels if there is a priority factor.

        The answers of a broker arrive in their order if `is_fifo`. Brokers refuse a part of the
        notifications. If polls are filtered, pops do not answer what they leave. At the first
        `unread` brokers the group has never popped.
        """
        self.key = KEY if not is_filtered else FILTERED_KEY
        self.factor = factor
        self.level_of: dict[int, int] = {}  # by message
        self.refusal_ratio, self.is_fifo = refusal_ratio, is_fifo
        self.known_since_ms = 0  # begin of the pair
        self.random = Random(seed)
        self.now_ms = 1_000_000
        self.counts = PollCounts()
        self.polling = Polling(self.counts, random=self.random.random)
        self.brokers = {f"broker-{n}": Broker(f"broker-{n}") for n in range(brokers)}
        for broker in list(self.brokers.values())[:unread]:
            broker.is_unread = True
        self.members = list(self.brokers)
        self.clients: list[Client] = []
        self.of_poll: dict[PairPoll, Client] = {}
        self.taken_by_others: set[int] = set()
        self.answered: set[int] = set()
        self.hidden: set[int] = set()
        self.sent = 0
        self.pops = self.asks = 0
        self._events: list[tuple[int, float, int, Callable[[], object]]] = []
        self._sequence = itertools.count()

    # ------------------------------------------------------------ time

    def at(self, delay_ms: int, what: Callable[[], object]) -> None:
        """Schedule an event. Events of the same millisecond happen in random order."""
        entry = (self.now_ms + delay_ms, self.random.random(), next(self._sequence), what)
        heapq.heappush(self._events, entry)

    def step(self) -> bool:
        """Perform the next event; return False if there is none."""
        due_ms = self.polling.next_due_ms()
        if self._events and (due_ms is None or self._events[0][0] <= due_ms):
            at_ms, _, _, what = heapq.heappop(self._events)
            self.now_ms = max(self.now_ms, at_ms)
            what()
        elif due_ms is not None:
            self.now_ms = max(self.now_ms, due_ms)
            self.polling.due(self.now_ms)
        else:
            return False
        self.carry_out()
        self.check()
        return True

    def latency(self) -> int:
        return self.random.randrange(LATENCY_MS + 1)

    def answer_latency(self, broker: Broker) -> int:
        """Return the time until the next answer of a broker arrives."""
        delay_ms = self.latency()
        if self.is_fifo:
            delay_ms = max(delay_ms, broker.last_arrival_ms - self.now_ms)
            # Events of one millisecond happen in random order.
            broker.last_arrival_ms = self.now_ms + delay_ms + 1
        return delay_ms

    # ------------------------------------------------------------ levels

    def by_level(self, broker: Broker, level_min: int = 0, level_below: int = 0) -> list[int]:
        """Return the ready messages between two levels, the highest level first."""
        levels = range(level_min, level_below or LEVEL_MAX + 1)
        found = [one for one in broker.ready if self.level_of.get(one, 0) in levels]
        return sorted(found, key=lambda one: (-self.level_of.get(one, 0), one))

    def levels(self, broker: Broker) -> HintLevels | None:
        messages = self.by_level(broker)
        if self.factor is None or not messages:
            return None
        highest = self.level_of[messages[0]]
        lower = [broker.ready[one] for one in messages if self.level_of[one] < highest]
        return HintLevels(highest, min(broker.ready.values()), min(lower, default=0))

    # ------------------------------------------------------------ events outside the proxy

    def receive(self, poll_ms: int, *, asks_all: bool = False) -> Client:
        if self.key not in self.polling.pairs:
            self.known_since_ms = self.now_ms
        poll = self.polling.begin(
            self.key,
            list(self.members),
            poll_ms=poll_ms,
            asks_all=asks_all,
            now_ms=self.now_ms,
            priority_factor=self.factor if len(self.members) > 1 else None,
            max_messages=BATCH,
        )
        client = self.of_poll[poll] = Client(poll)
        self.clients.append(client)
        self.carry_out()
        self.run(client)
        return client

    def leave(self, client: Client) -> None:
        """Cancel the client's receive, as if its connection broke."""
        if client.answer is None:
            if client.popping is not None:
                self.abandon(client)
            self.polling.cancel(client.poll, self.now_ms)
            client.answer = PollEnd(Outcome.CANCELLED)
            self.carry_out()

    def send(self, name: str, *, count: int = 1, level: int = 0) -> None:
        broker = self.brokers[name]
        for _ in range(count):
            self.sent += 1
            self.level_of[self.sent] = level
            broker.ready[self.sent] = self.now_ms
        self.serve(broker)

    def take_elsewhere(self, name: str) -> None:
        """Let the consumer of another proxy take a message."""
        broker = self.brokers[name]
        if broker.ready:
            message = self.by_level(broker)[0]
            del broker.ready[message]
            self.taken_by_others.add(message)

    def lose(self, name: str) -> None:
        broker = self.brokers[name]
        if broker.is_up:
            broker.is_up = False
            broker.stream += 1
            broker.pops.clear()
            broker.notifications.clear()
            self.polling.lost(name, self.now_ms)

    def come_back(self, name: str) -> None:
        broker = self.brokers[name]
        if not broker.is_up:
            broker.is_up, broker.up_at_ms = True, self.now_ms
            self.polling.reconnected(name, self.now_ms)

    def withhold(self, name: str) -> None:
        """Remove a broker from the members, before the first event."""
        self.members.remove(name)

    def join(self, name: str) -> None:
        if name not in self.members:
            self.members.append(name)
            # From now on polls must find its messages.
            self.brokers[name].up_at_ms = self.now_ms
            for pair in self.polling.pairs.values():
                self.polling.brokers_changed(pair, list(self.members), self.now_ms)

    def drain(self, name: str) -> None:
        """Answer all waiting pops and notifications early and without messages."""
        broker = self.brokers[name]
        for popping in broker.pops:
            self.reply(popping, [], was_parked=True)
        broker.pops.clear()
        for watch, number in broker.notifications:
            self.hint(broker, watch, number)
        broker.notifications.clear()

    # ------------------------------------------------------------ the shell

    def carry_out(self) -> None:
        while actions := self.polling.take_actions():
            for action in actions:
                match action:
                    case NotificationStart():
                        self.ask(action)
                    case NotificationStop():
                        self.stop_asking(action)
                    case PollWakeup():
                        self.wake(self.of_poll[action.poll])
                    case PopCancellation():
                        self.stop_pop(self.of_poll[action.poll])

    def ask(self, action: NotificationStart[PollPair]) -> None:
        self.asks += 1
        broker, watch, number = self.brokers[action.watch.broker], action.watch, action.number
        assert broker.is_up, "a broker that is down is asked nothing"
        stream, until_ms = broker.stream, self.now_ms + action.poll_ms
        level_min = action.level_min
        if self.random.random() < self.refusal_ratio:
            self.polling.notification_failed(watch, number, Overloaded("full"), self.now_ms)
            return

        def arrive() -> None:
            if stream != broker.stream:
                return
            if broker.refuses == "notifications":
                error = Overloaded("full")
                self.at(
                    self.answer_latency(broker),
                    lambda: self.polling.notification_failed(watch, number, error, self.now_ms),
                )
            elif self.by_level(broker, level_min) or broker.is_unread:
                self.hint(broker, watch, number, level_min)
            else:
                broker.notifications[watch, number] = level_min
                self.at(max(until_ms - self.now_ms, 0), end)

        def end() -> None:
            is_waiting = broker.notifications.pop((watch, number), None) is not None
            if stream == broker.stream and is_waiting:
                self.hint(broker, watch, number)

        self.at(self.latency(), arrive)

    def hint(
        self, broker: Broker, watch: PairWatch, number: int, level_min: int | None = None
    ) -> None:
        """Answer a notification: with the messages from `level_min` on, or empty."""
        stream = broker.stream
        count = 0 if level_min is None else len(self.by_level(broker, level_min))
        levels = self.levels(broker) if count else None
        if broker.is_unread and level_min is not None:
            count, levels = 1, HintLevels(LEVEL_MAX, 0, 0)

        def arrive() -> None:
            if stream == broker.stream:
                self.polling.notified(watch, number, count, self.now_ms, levels=levels)

        self.at(self.answer_latency(broker), arrive)

    def stop_asking(self, action: NotificationStop[PollPair]) -> None:
        broker = self.brokers[action.watch.broker]
        entry = action.watch, action.number
        self.at(self.latency(), lambda: broker.notifications.pop(entry, None))

    def wake(self, client: Client) -> None:
        self.at(self.random.randrange(TURN_MS + 1), lambda: self.run(client))

    def stop_pop(self, client: Client) -> None:
        if client.popping is not None:
            self.abandon(client)
            self.at(self.random.randrange(TURN_MS + 1), lambda: self.popped(client, [], False))

    def abandon(self, client: Client) -> None:
        """Cancel a pop. Messages that it still brings go back."""
        popping = client.popping
        assert popping is not None
        popping.is_over, client.popping = True, None
        broker = popping.broker

        def arrive() -> None:
            if popping in broker.pops:
                broker.pops.remove(popping)

        self.at(self.latency(), arrive)

    def run(self, client: Client) -> None:
        """Perform the poll's next step, if it has one."""
        step = client.poll.step
        if client.answer is not None or client.popping is not None or step is None:
            return
        if isinstance(step, PollEnd):
            self.answer(client, step, [])
        else:
            self.pop(client, step)

    def pop(self, client: Client, step: PopStep) -> None:
        assert client.popping is None, "one pop under way"
        if client.poll.is_stopping:
            self.popped(client, [], False)
            return
        self.pops += 1
        broker = self.brokers[step.broker]
        popping = PopInFlight(
            client.poll,
            broker,
            self.now_ms + step.poll_ms,
            broker.stream,
            step.level_min,
            step.level_below,
            self.now_ms,
        )
        client.popping, client.popped_ms = popping, self.now_ms

        def arrive() -> None:
            if not broker.is_up or popping.stream != broker.stream or popping.is_over:
                if not broker.is_up and not popping.is_over:
                    # The link keeps the pop until the proxy cancels it.
                    return
                if popping.stream != broker.stream and not popping.is_over:
                    self.fail(client, popping)
                return
            if broker.refuses == "pops":
                broker.refused_at_ms = self.now_ms
                self.at(self.latency(), lambda: self.fail(client, popping))
                return
            broker.is_unread = False
            broker.pops.append(popping)
            self.serve(broker)
            if popping in broker.pops:
                if popping.until_ms <= self.now_ms:
                    broker.pops.remove(popping)
                    self.reply(popping, [], was_parked=False)
                else:
                    self.at(popping.until_ms - self.now_ms, end)

        def end() -> None:
            if popping in broker.pops:
                broker.pops.remove(popping)
                self.reply(popping, [], was_parked=True)

        self.at(self.latency(), arrive)

    def fail(self, client: Client, popping: PopInFlight) -> None:
        if client.popping is popping:
            client.popping = None
            popping.broker.refused_at_ms = self.now_ms
            self.polling.pop_failed(client.poll, Overloaded("full"), self.now_ms)
            self.carry_out()
            self.run(client)

    def serve(self, broker: Broker) -> None:
        """Give ready messages to waiting pops, then report the remaining ones as hints."""
        for popping in list(broker.pops):
            if not self.by_level(broker, popping.level_min, popping.level_below):
                continue
            broker.pops.remove(popping)
            messages = self.by_level(broker, 0, popping.level_below)[:BATCH]
            for message in messages:
                del broker.ready[message]
                self.hidden.add(message)
            self.reply(popping, messages, was_parked=False)
        for (watch, number), level_min in list(broker.notifications.items()):
            if self.by_level(broker, level_min):
                del broker.notifications[watch, number]
                self.hint(broker, watch, number, level_min)

    def reply(self, popping: PopInFlight, messages: list[int], *, was_parked: bool) -> None:
        broker, stream = popping.broker, popping.broker.stream
        left = None
        if self.factor is not None and self.key == KEY:
            left = LeftMessages(len(broker.ready), self.levels(broker))

        def arrive() -> None:
            client = self.of_poll[popping.poll]
            if stream != broker.stream or popping.is_over:
                self.give_back(broker, messages)
            else:
                client.popping, broker.popped_at_ms = None, self.now_ms
                self.popped(client, messages, was_parked, broker, left)

        self.at(self.answer_latency(broker), arrive)

    def popped(
        self,
        client: Client,
        messages: list[int],
        was_parked: bool,
        broker: Broker | None = None,
        left: LeftMessages | None = None,
    ) -> None:
        if client.answer is not None:
            assert not messages, "its pop was abandoned"
            return
        is_taken = self.polling.popped(
            client.poll,
            count=len(messages),
            was_parked=was_parked,
            now_ms=self.now_ms,
            levels=Counter(self.level_of[one] for one in messages),
            left=left,
        )
        self.carry_out()
        if is_taken:
            assert isinstance(client.poll.step, PollEnd)
            self.answer(client, client.poll.step, messages)
        else:
            if messages:
                assert broker is not None
                self.give_back(broker, messages)
            self.run(client)

    def give_back(self, broker: Broker, messages: list[int]) -> None:
        def come_back() -> None:
            for message in messages:
                self.hidden.discard(message)
                broker.ready[message] = self.now_ms
            self.serve(broker)

        if messages:
            self.at(GIVE_BACK_MS, come_back)

    # ------------------------------------------------------------ invariants

    def answer(self, client: Client, end: PollEnd, messages: list[int]) -> None:
        assert client.answer is None, "a poll is answered once"
        client.answer, client.messages = end, messages
        if messages and self.factor == FACTOR_MAX and self.is_fifo:
            self.check_order(client)
        for message in messages:
            assert message in self.hidden, "an answered message was popped, and is answered once"
            self.hidden.discard(message)
            self.answered.add(message)
        late_ms = self.now_ms - client.poll.hard_end_ms
        assert late_ms <= TICK_MS + TURN_MS, f"held {late_ms} ms longer than a poll"
        if end.outcome is Outcome.EMPTY and client.poll.is_long:
            self.check_empty()

    def check_empty(self) -> None:
        for broker in self.brokers.values():
            is_there = broker.is_up and broker.name in self.members
            if not is_there or self.now_ms - broker.up_at_ms < FALSE_EMPTY_MS + LAST_LOOK_MS:
                continue
            if self.now_ms - broker.refused_at_ms < REFUSED_MS:
                continue
            waiting = [
                m for m, at_ms in broker.ready.items() if self.now_ms - at_ms > FALSE_EMPTY_MS
            ]
            assert not waiting, f"empty, and {broker.name} has had {waiting} for long"

    def check_order(self, client: Client) -> None:
        """Check that no broker had a higher message that the proxy could know of."""
        known_until_ms = client.popped_ms - KNOWN_MS
        if self.known_since_ms > known_until_ms:
            return
        highest = max(self.level_of[one] for one in client.messages)
        busy = {one.popping.broker.name for one in self.clients if one.popping is not None}
        for broker in self.brokers.values():
            if broker.name in busy or broker.popped_at_ms >= client.popped_ms:
                continue  # When this pop was sent, another one was about to get these messages.
            for message in self.by_level(broker, highest + 1):
                age_ms = client.popped_ms - broker.ready[message]
                assert broker.ready[message] > known_until_ms, (
                    f"{broker.name} had level {self.level_of[message]} for {age_ms} ms before a"
                    f" pop that got {highest}"
                )

    def check(self) -> None:
        """Check that each waiting poll has a source of hints."""
        for pair in self.polling.pairs.values():
            for watch in pair.watches.values():
                if pair.waiting and not watch.is_down:
                    is_told = watch.number or watch.hint_count or watch.due_ms() is not None
                    assert is_told, f"{watch.broker} has no source of hints"
                assert not watch.hint_count or not pair.waiting, "a hint remains without a poll"
        for client in self.clients[-50:]:
            if client.popping is None and client.answer is None:
                assert not isinstance(client.poll.step, PopStep) or self._events, (
                    "a step is carried out"
                )

    def finish(self) -> None:
        """Run until no event remains, and check that no state remains."""
        for broker in self.brokers.values():
            self.join(broker.name)
            broker.refuses = ""
            self.come_back(broker.name)
        steps = 0
        while self.step():
            steps += 1
            assert steps < STEPS_MAX, "it comes to rest"
        assert all(client.answer is not None for client in self.clients), "every poll is answered"
        assert not self.polling.pairs, "nothing is kept of polls that are over"
        assert not self.polling.modes
        assert not any(broker.pops or broker.notifications for broker in self.brokers.values())
        left = {message for broker in self.brokers.values() for message in broker.ready}
        every = self.answered | self.taken_by_others | left | self.hidden
        assert every == set(range(1, self.sent + 1)), "a popped message is answered or goes back"
        assert not self.hidden, "a popped message is answered or goes back"
