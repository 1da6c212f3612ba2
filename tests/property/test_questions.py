"""All read-only questions at all moments: after retention, deletions, resets and failovers.

Hypothesis orders the changes. After each of them, every question is asked, also about messages,
topics and groups that are gone.
"""

from __future__ import annotations

import contextlib
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.seeds import examples
from tests.support.worlds.engine_world import PoppedMessage
from tests.support.worlds.questions import ask_everything
from tests.support.worlds.timer_world import UnjudgedWorld
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.common.errors import ServiceError

TOPIC = "topic"
GROUPS = ("plain", "ordered")
QUEUES = 2
GROUP = st.sampled_from(GROUPS)


class QuestionMachine(RuleBasedStateMachine):
    """One topic, a plain and an ordered group, and a small log that loses its first segments."""

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        self.world = UnjudgedWorld(
            FaultyDisk(Random(seed)),
            segment_bytes=16 << 10,
            retention_bytes=40_000,
            checkpoint_log_bytes=8_000,
            is_followed=True,
        )
        self.count = 0
        self.out: list[PoppedMessage] = []
        self.create()

    @rule()
    def create(self) -> None:
        self.world.topic(TOPIC, queues=QUEUES)
        for name in GROUPS:
            self.world.group(name, is_ordered=name == "ordered", max_attempts=3)
        self.world.commit()

    @rule(count=st.integers(1, 12), queue_id=st.integers(0, QUEUES - 1), size=st.integers(0, 3_000))
    def send(self, count: int, queue_id: int, size: int) -> None:
        if self.world.engine.catalog.find_topic(TOPIC) is None:
            return
        texts = [f"m{self.count + n}" for n in range(count)]
        self.count += count
        with contextlib.suppress(ServiceError):
            self.world.send(*texts, queue_id=queue_id, size=size)

    @rule(delay_ms=st.sampled_from([10_000, 4_000_000]))
    def schedule(self, delay_ms: int) -> None:
        if self.world.engine.catalog.find_topic(TOPIC) is not None:
            self.count += 1
            with contextlib.suppress(ServiceError):
                self.world.schedule(f"m{self.count}", delay_ms=delay_ms, size=500)

    @rule(name=GROUP, want=st.integers(1, 8), client=st.sampled_from(["", "client-1"]))
    def pop(self, name: str, want: int, client: str) -> None:
        catalog = self.world.engine.catalog
        if catalog.find_topic(TOPIC) is None or catalog.find_group(name) is None:
            return
        with contextlib.suppress(ServiceError):
            self.out += self.world.pop(
                want, group=name, invisible_ms=60_000, client_id=client, renews=bool(client)
            )

    @rule(number=st.integers(0, 1 << 16), way=st.sampled_from(["ack", "change", "dead letter"]))
    def settle(self, number: int, way: str) -> None:
        if not self.out:
            return
        one = self.out.pop(number % len(self.out))
        try:
            if way == "ack":
                self.world.ack(one)
            elif way == "change":
                self.world.change(one, 5_000)
            else:
                self.world.engine.commands.dead_letter(one.delivery, self.world.now_ms)
                self.world.commit()
        except ServiceError:
            return

    @rule()
    def end_of_a_client(self) -> None:
        self.world.end("client-1")

    @rule(name=GROUP, to=st.sampled_from(["earliest", "latest"]))
    def reset(self, name: str, to: str) -> None:
        target = ResetTarget(earliest=to == "earliest", latest=to == "latest")
        try:
            self.world.engine.administration.reset_offset(name, TOPIC, target, self.world.now_ms)
        except ServiceError:
            return
        self.world.commit()

    @rule(number=st.integers(0, 100))
    def note_pull_offset(self, number: int) -> None:
        engine = self.world.engine
        topic, group = engine.catalog.find_topic(TOPIC), engine.catalog.find_group("plain")
        if topic is None or group is None:
            return
        with contextlib.suppress(ServiceError):
            engine.administration.update_pull_offset(
                group.id, topic.id, QueueId(0), number, self.world.now_ms
            )
        self.world.commit()

    @rule()
    def delete_the_topic(self) -> None:
        try:
            self.world.engine.administration.delete_topic(TOPIC, self.world.now_ms)
        except ServiceError:
            return
        self.world.commit()

    @rule(name=GROUP)
    def delete_a_group(self, name: str) -> None:
        try:
            self.world.engine.administration.delete_group(name, self.world.now_ms)
        except ServiceError:
            return
        self.world.commit()

    @rule(queue_id=st.integers(0, QUEUES - 1))
    def fill(self, queue_id: int) -> None:
        """Send more than retention keeps. It then removes what was sent before."""
        for _ in range(4):
            self.send(count=12, queue_id=queue_id, size=3_000)
        self.world.checkpoint()
        self.world.background()

    @rule()
    def work_in_background(self) -> None:
        self.world.background()

    @rule(duration=st.sampled_from([1, 6_000, 66_000, 10_000_000]))
    def advance(self, duration: int) -> None:
        self.world.advance(duration)

    @rule(power_cut=st.booleans())
    def restart(self, power_cut: bool) -> None:
        self.world.restart(power_cut=power_cut)

    @rule()
    def fail_over(self) -> None:
        self.world.fail_over()

    @invariant()
    def every_question_is_answered(self) -> None:
        if hasattr(self, "world"):
            ask_everything(self.world.engine, self.world.now_ms)


QuestionMachine.TestCase.settings = settings(
    max_examples=examples(60),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestQuestions = QuestionMachine.TestCase
