"""Pops of a PRIORITY topic beside a naive model: for each level, lists of its ready messages.

The model fills the slots of each answer one by one, and checks P-1 to P-6:

- A strict slot has a message of the highest ready level, a fair slot the oldest one below (P-1).
- An answer of two or more messages begins with the highest level if the factor is 50 or more (P-2).
- Strict slots that pass a lower level do not exceed the bound of the factor (P-3, P-4).
- A message keeps its level through retries, restarts and failovers (P-5).
- An answer has as many messages as are ready, up to its limit (P-6).
"""

from __future__ import annotations

from collections import Counter, deque
from random import Random

import pytest

from tests.support.bodies import text_of
from tests.support.seeds import seeds
from tests.support.worlds.engine_world import GROUP, TOPIC, PoppedMessage, World
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.metadata.catalog import TopicType

STEPS = 80
STEP_KINDS = (
    *("send", "send", "pop", "pop", "pop", "ack", "nack"),
    *("wait", "factor", "switch", "grow", "alternate"),
)
FACTORS = (0, 10, 34, 50, 75, 90, 99, 100)


class ModelQueue:
    """The ready messages of one queue of a level: (age, body), the oldest first.

    The age is the log offset of the message: the position at which the engine stored it.
    """

    def __init__(self, level: int) -> None:
        self.level = level
        self.end = 0  # the queue offset of the next message
        self.messages: list[tuple[int, str]] = []
        self.left: deque[str] = deque()  # of the current answer

    @property
    def head_age(self) -> int:
        return self.messages[0][0]

    def note_new(self, world: World, topic_id: TopicId) -> list[str]:
        """Add the messages that the engine has stored in this queue, and return their bodies."""
        queue = world.engine.catalog.queues.get((topic_id, QueueId(self.level)))
        end = self.end if queue is None else queue.max_offset
        bodies = []
        for offset in range(self.end, end):
            assert queue is not None
            log_offset = queue.entry(offset)[0]
            bodies.append(text_of(world.engine.store.record(log_offset).tail))
            self.messages.append((log_offset, bodies[-1]))
        self.end = end
        return bodies

    def take(self) -> None:
        """Remove the next message of the answer, which must be the next one of this queue."""
        body = self.left.popleft()
        assert self.messages.pop(0)[1] == body, f"{body} is not the next of its queue"


class Trial:
    """One group on one PRIORITY topic, and its deliveries in flight."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world = World(is_followed=True, checkpoint_log_bytes=20_000)
        self.queues = self.random.choice((1, 2, 3, 8))
        self.factor = self.random.choice(FACTORS)
        self.put_topic()
        self.world.group(GROUP, priority_factor=self.factor, max_attempts=1_000)
        self.first = [ModelQueue(level) for level in range(32)]  # not delivered before
        self.retries = [ModelQueue(level) for level in range(32)]
        self.in_flight: list[PoppedMessage] = []
        self.sent = 0
        self.credit = 0
        self.passed_in_row = 0  # strict slots since the last fair one that passed a lower level

    def put_topic(self) -> None:
        self.world.engine.administration.put_topic(
            TOPIC, type_=TopicType.PRIORITY, queues=self.queues, now_ms=self.world.now_ms
        )
        self.world.commit()

    def step(self) -> None:
        match self.random.choice(STEP_KINDS):
            case "send":
                self.send()
            case "pop":
                self.pop(self.random.choice((1, 1, 2, 3, 8, 32)))
            case "ack":
                self.world.ack(*self.some_in_flight())
            case "nack":
                self.nack()
            case "wait":
                self.wait(self.random.choice((1, 100, 5_000)))
            case "factor" if self.random.random() < 0.3:
                self.set_factor()
            case "switch" if self.random.random() < 0.3:
                self.switch()
            case "alternate" if self.random.random() < 0.2:
                self.alternate()
            case "grow" if self.queues < 32 and self.random.random() < 0.1:
                self.queues += 1
                self.put_topic()

    def send(self) -> None:
        level = self.random.randrange(self.queues)
        for _ in range(self.random.randrange(1, 12)):
            body = f"{level}-{self.sent}"
            self.sent += 1
            self.world.send(body, queue_id=level)
        self.first[level].note_new(self.world, self.world.topic())

    def alternate(self) -> None:
        """Empty all levels by each pop, again and again. Then pop from two full levels."""
        while self.ready_count:
            self.pop(32)
        for count in (*[1] * 25, 5):
            for level in (self.queues - 1, 0):
                self.world.send(*(f"{level}-{self.sent + n}" for n in range(count)), queue_id=level)
                self.sent += count
                self.first[level].note_new(self.world, self.world.topic())
            self.pop(2)

    def some_in_flight(self) -> list[PoppedMessage]:
        count = self.random.randrange(1 + len(self.in_flight))
        self.random.shuffle(self.in_flight)
        some, self.in_flight = self.in_flight[:count], self.in_flight[count:]
        return some

    def nack(self) -> None:
        for one in self.some_in_flight():
            self.in_flight.append(self.world.change(one, self.random.choice((10, 1_000, 9_000))))

    def wait(self, duration_ms: int) -> None:
        self.world.advance(duration_ms)
        self.revive()

    def revive(self) -> None:
        """Make messages ready after the end of their invisible duration."""
        ended = [one for one in self.in_flight if one.delivery.visible_at_ms <= self.world.now_ms]
        for one in ended:
            self.in_flight.remove(one)
        topic = self.world.engine.catalog.find_topic(f"%RETRY%{GROUP}+{TOPIC}")
        copies = [] if topic is None else [q.note_new(self.world, topic.id) for q in self.retries]
        expected = [one.body for one in ended]
        assert sorted(body for level in copies for body in level) == sorted(expected)
        for level, bodies in enumerate(copies):
            assert {level_of(body) for body in bodies} <= {level}, "P-5"

    def set_factor(self) -> None:
        self.factor = self.random.choice(FACTORS)
        self.world.engine.administration.put_group(
            GROUP, priority_factor=self.factor, now_ms=self.world.now_ms
        )
        self.world.commit()
        self.passed_in_row = 0

    def switch(self) -> None:
        """Restart the engine, or continue with the follower. The credit is lost."""
        if self.random.random() < 0.5:
            self.world.fail_over()
        else:
            self.world.restart(power_cut=self.random.random() < 0.5)
        self.credit = self.passed_in_row = 0

    def pop(self, want: int) -> None:
        ready = self.ready_count
        invisible_ms = self.random.choice((1_000, 30_000))
        popped = self.world.pop(want, invisible_ms=invisible_ms)
        bodies = [one.body for one in popped]
        assert len(bodies) == min(want, ready), "P-6"
        found = [level_of(body) for body in bodies]
        assert found == sorted(found, reverse=True), "an answer is sorted by level"
        if self.factor >= 50 and min(want, ready) >= 2:
            assert found[0] == max(queue.level for queue in self.ready_queues), "P-2"
        self.check_slots(bodies, want)
        self.in_flight += popped

    def check_slots(self, bodies: list[str], want: int) -> None:
        """Assign the messages of an answer to slots."""
        factor = self.factor
        self.credit = min(self.credit, 2 * factor + 100)
        for queue in self.ready_queues:
            known = {body for _, body in queue.messages}
            queue.left = deque(body for body in bodies if body in known)
        for slot in range(len(bodies)):
            ready = self.ready_queues
            highest = max(queue.level for queue in ready)
            lower = [queue for queue in ready if queue.level < highest]
            is_forced = slot == 0 and want > 1 and self.credit < 2 * factor
            if lower and factor < 100 and self.credit >= factor and not is_forced:
                candidates = lower if factor else ready
                oldest = min(queue.head_age for queue in candidates)
                [fair] = [one for one in candidates if one.head_age == oldest]
                assert fair.left, f"a fair slot is not the oldest message; bodies {bodies}"
                fair.take()
                self.credit -= factor
                self.passed_in_row = 0
                continue
            strict = [one for one in ready if one.level == highest and one.left]
            assert strict, f"P-1: a strict slot is not of level {highest}; bodies {bodies}"
            strict[0].take()
            if lower and factor < 100:
                self.credit += 100 - factor
                self.passed_in_row += 1
                assert self.passed_in_row <= -(-100 // (100 - factor)), "P-3"
            else:
                self.passed_in_row = 0
                self.credit = min(self.credit, max(2 * factor - 1, 0))
        assert not any(queue.left for queue in (*self.first, *self.retries))

    @property
    def ready_queues(self) -> list[ModelQueue]:
        return [queue for queue in (*self.first, *self.retries) if queue.messages]

    @property
    def ready_count(self) -> int:
        return sum(len(queue.messages) for queue in self.ready_queues)


def level_of(body: str) -> int:
    return int(body.split("-", maxsplit=1)[0])


@pytest.mark.parametrize("seed", seeds("priorities", 40))
def test_every_answer_follows_the_model(seed: int) -> None:
    trial = Trial(seed)
    for _ in range(STEPS):
        trial.step()
    # At the end everything is delivered, each message in its level, and nothing else.
    trial.wait(60_000)
    while trial.ready_count:
        trial.pop(32)
        trial.world.ack(*trial.in_flight)
        trial.in_flight.clear()
    assert not trial.world.pop()


def test_the_shares_of_the_factors_are_those_of_the_documentation() -> None:
    """Of 1,000 messages, one in ten is of a low level with factor 90, every second with 50."""
    for factor, expected in ((90, 100), (75, 250), (50, 500), (100, 0)):
        trial = Trial(0)
        trial.queues, trial.factor = 8, factor
        trial.put_topic()
        trial.world.engine.administration.put_group(
            GROUP, priority_factor=factor, now_ms=trial.world.now_ms
        )
        trial.world.send(*(f"0-{n}" for n in range(1_100)), queue_id=0)
        trial.world.send(*(f"7-{n}" for n in range(1_100)), queue_id=7)
        counts: Counter[int] = Counter()
        for _ in range(50):
            popped = trial.world.pop(20)
            trial.world.ack(*popped)
            counts.update(level_of(one.body) for one in popped)
        assert abs(counts[0] - expected) <= 1
