"""An ordered group beside its model: one batch at a time per queue, in order.

The model of a queue has its messages, their attempts and acks, and the live batch. A batch blocks
its queue until each of its messages is acked or expired. Then the lowest unsettled message comes
first. An acked message is never delivered again.

An attempt counts for each message that its client changed, and for the first message of the batch
that the client did not settle. It does not count for the messages behind that one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.disk.log_checker import judge
from tests.support.seeds import examples
from tests.support.worlds.engine_world import GROUP, SMALL, TOPIC, PoppedMessage, World
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.broker.engine.pop.state import RENEWED_HANDLE_MS
from tidemill.common.errors import Conflict, InvalidReceiptHandle

MAX_ATTEMPTS = 3
CLIENT = "client-1"


@dataclass
class QueueModel:
    """One queue of the ordered group."""

    sent: list[str] = field(default_factory=list)
    attempts: dict[str, int] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    batch: dict[str, tuple[PoppedMessage, int]] = field(
        default_factory=dict
    )  # body -> handle, until
    unpassed: list[str] = field(default_factory=list)  # of the batch, without direct acks
    changed: set[str] = field(default_factory=set)  # changed by the client and not delivered since
    attempt_id: str = ""

    def is_blocked(self, now_ms: int) -> bool:
        return any(until > now_ms for _, until in self.batch.values())

    def begin_batch(self, batch: dict[str, tuple[PoppedMessage, int]], attempt_id: str) -> None:
        self.batch, self.attempt_id = batch, attempt_id
        self.unpassed = list(batch)
        self.changed.difference_update(batch)

    def settle(self, text: str) -> None:
        """Settle a message of the batch at the request of its client."""
        del self.batch[text]
        self.settled.add(text)
        if text not in self.changed:
            self.unpassed.remove(text)

    def failed(self) -> set[str]:
        """Return the messages of the batch that count an attempt when the batch expires."""
        return self.changed | {*self.unpassed[:1]} & self.batch.keys()

    def expected(self) -> list[str]:
        """Return the messages that may be delivered next, in order."""
        return [text for text in self.sent if text not in self.settled]


class OrderedModel(RuleBasedStateMachine):
    """One topic with one queue: other queues behave the same."""

    @initialize()
    def begin(self) -> None:
        self.world = World(config=SMALL, checkpoint_log_bytes=20_000, is_followed=True)
        self.world.topic(TOPIC, queues=1)
        self.world.group(is_ordered=True, max_attempts=MAX_ATTEMPTS)
        self.model = QueueModel()
        self.attempt_number = 0
        self.ran_out: list[PoppedMessage] = []  # without an ack: replaced, or dead-lettered
        self.first_answers: dict[str, PoppedMessage] = {}  # of repeated attempts of the batch
        self.has_popped = False

    @rule(count=st.integers(1, 40), size=st.integers(1, 2000))
    def send(self, count: int, size: int) -> None:
        texts = [f"m{len(self.model.sent) + n}" for n in range(count)]
        self.world.send(*texts, size=size)
        self.model.sent += texts

    @rule(
        want=st.integers(1, 32),
        duration=st.sampled_from([1_000, 5_000, 100_000]),
        repeats=st.booleans(),
    )
    def pop(self, want: int, duration: int, repeats: bool, client: str = "") -> None:
        model, now_ms = self.model, self.world.now_ms
        if not repeats or not model.attempt_id:
            self.attempt_number += 1
            attempt_id = f"attempt-{self.attempt_number}"
        else:
            attempt_id = model.attempt_id
        is_repeat = attempt_id == model.attempt_id
        popped = self.world.pop(
            want,
            invisible_ms=duration,
            attempt_id=attempt_id,
            client_id=client,
            renews=bool(client),
        )
        self.has_popped = True
        bodies = [one.body for one in popped]
        if model.is_blocked(now_ms):
            if is_repeat:
                for one in popped:
                    assert one.attempt == model.attempts[one.body]
                    assert one.body in model.batch
            else:
                assert bodies == [], "a queue with a live batch delivered another"
            return
        self.settle_exhausted()
        expected = model.expected()[:want]
        assert bodies == expected
        if not popped:
            return
        failed = model.changed if is_repeat else model.failed()
        for one in popped:
            model.attempts[one.body] = model.attempts.get(one.body, 1) + (one.body in failed)
            assert one.attempt == model.attempts[one.body]
        for text in list(model.batch):
            self.run_out(text)
        model.begin_batch({one.body: (one, now_ms + duration) for one in popped}, attempt_id)

    def settle_exhausted(self) -> None:
        """Expect messages that have failed and have no attempt left in the dead-letter topic."""
        failed = self.model.failed()
        for text, (_, until) in list(self.model.batch.items()):
            is_last = text in failed and self.model.attempts[text] >= MAX_ATTEMPTS
            if until <= self.world.now_ms and is_last:
                self.model.settled.add(text)
                self.run_out(text)

    def run_out(self, text: str) -> None:
        """Remove a message of the batch that ran out, and remember all its handles."""
        one, _ = self.model.batch.pop(text)
        self.ran_out += [one, *filter(None, [self.first_answers.pop(text, None)])]

    @rule(want=st.integers(1, 32))
    def pop_for_a_client_that_ends(self, want: int) -> None:
        """Pop for a push consumer that ends while it holds the batch."""
        if self.model.is_blocked(self.world.now_ms):
            return
        self.world.alive(CLIENT)
        self.pop(want=want, duration=RENEWED_HANDLE_MS, repeats=False, client=CLIENT)
        self.end_the_client()

    @rule(want=st.integers(1, 32), restarts=st.booleans())
    def pop_for_a_client_that_repeats_its_attempt_and_ends(self, want: int, restarts: bool) -> None:
        """Repeat the attempt of a push consumer after its deadline was extended.

        A start extends it to give proxies time. The client then holds the handles of both answers.
        """
        model = self.model
        if model.is_blocked(self.world.now_ms):
            return
        self.world.alive(CLIENT)
        self.pop(want=want, duration=RENEWED_HANDLE_MS, repeats=False, client=CLIENT)
        if restarts:
            self.world.restart()
        else:
            self.world.advance(RENEWED_HANDLE_MS)
        self.world.alive(CLIENT)
        again = self.world.pop(
            want,
            invisible_ms=RENEWED_HANDLE_MS,
            attempt_id=model.attempt_id,
            client_id=CLIENT,
            renews=True,
        )
        assert [one.body for one in again] == list(model.batch)
        self.first_answers = {text: one for text, (one, _) in model.batch.items()}
        model.batch = {one.body: (one, self.world.now_ms) for one in again}
        if restarts:
            self.world.advance(RENEWED_HANDLE_MS)
        self.end_the_client()

    def end_the_client(self) -> None:
        self.world.end(CLIENT)
        self.world.run_due()
        now_ms = self.world.now_ms
        self.model.batch = {text: (one, now_ms) for text, (one, _) in self.model.batch.items()}
        self.settle_exhausted()

    @rule()
    def ack_deliveries_that_ran_out(self) -> None:
        """An ack that is answered OK settles the message, whatever ended the delivery."""
        self.world.run_due()
        self.settle_exhausted()
        assert set(self.world.ack(*self.ran_out)) <= {AckResult.GONE}

    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        if not self.model.batch:
            return
        text = data.draw(st.sampled_from(sorted(self.model.batch)))
        self.world.run_due()
        self.settle_exhausted()
        if text not in self.model.batch:
            return
        one, _ = self.model.batch[text]
        assert self.world.ack(one) == [AckResult.APPLIED]
        self.model.settle(text)

    @rule(data=st.data(), duration=st.sampled_from([0, 2_000, 50_000]))
    def change(self, data: st.DataObject, duration: int) -> None:
        if not self.model.batch:
            return
        text = data.draw(st.sampled_from(sorted(self.model.batch)))
        self.world.run_due()
        self.settle_exhausted()
        if text not in self.model.batch:
            return
        one, _ = self.model.batch[text]
        changed = self.world.change(one, duration)
        self.model.batch[text] = changed, self.world.now_ms + duration
        self.model.changed.add(text)
        assert self.world.ack(one) == [AckResult.GONE]
        self.world.run_due()
        self.settle_exhausted()

    @rule()
    def release(self) -> None:
        """Release the batch as an operator: it counts as expired."""
        self.world.run_due()
        self.settle_exhausted()
        try:
            self.world.release_lock()
        except Conflict:
            assert not self.model.is_blocked(self.world.now_ms)
            return
        assert self.model.is_blocked(self.world.now_ms)
        self.world.run_due()
        model = self.model
        model.batch = {text: (one, self.world.now_ms) for text, (one, _) in model.batch.items()}
        self.settle_exhausted()

    @rule(data=st.data())
    def forward_to_dead_letters(self, data: st.DataObject) -> None:
        if not self.model.batch:
            return
        text = data.draw(st.sampled_from(sorted(self.model.batch)))
        one, _ = self.model.batch[text]
        try:
            self.world.engine.commands.dead_letter(one.delivery, self.world.now_ms)
            self.world.commit()
        except InvalidReceiptHandle:
            self.settle_exhausted()
            assert text in self.model.settled
            return
        self.model.settle(text)

    @rule(duration=st.sampled_from([1, 1_000, 6_000, 120_000]))
    def advance(self, duration: int) -> None:
        self.world.advance(duration)
        self.settle_exhausted()

    @rule(power_cut=st.booleans())
    def restart(self, power_cut: bool) -> None:
        self.world.restart(power_cut=power_cut)

    @rule()
    def fail_over(self) -> None:
        self.world.fail_over()

    @rule()
    def restart_without_derived_files(self) -> None:
        disk = self.world.disk.after_kill()
        for folder in ("queues", "index", "snapshots"):
            for name in disk.names(folder):
                disk.remove(name)
        self.world.disk = disk
        self.world.open()

    @rule()
    def checkpoint(self) -> None:
        self.world.checkpoint()

    @invariant()
    def the_lag_is_what_the_group_will_be_given(self) -> None:
        if not hasattr(self, "world") or not self.has_popped:
            return
        self.world.run_due()
        self.settle_exhausted()
        held = sum(until > self.world.now_ms for _, until in self.model.batch.values())
        group = self.world.engine.catalog.find_group(GROUP)
        assert group is not None
        (progress,) = self.world.engine.inspection.group_progress(group)
        assert progress.in_flight_count == held
        assert progress.ready_count == len(self.model.expected()) - held

    def teardown(self) -> None:
        """Check at the end that everything was settled, in order."""
        if not hasattr(self, "world"):
            return
        judge(self.world)
        for _ in range(200):
            self.world.advance(200_000)
            self.settle_exhausted()
            popped = self.world.pop(32)
            assert [one.body for one in popped] == self.model.expected()[:32]
            if not popped:
                break
            self.world.ack(*popped)
            self.model.settled.update(one.body for one in popped)
            self.model.begin_batch({}, "")
        assert not self.model.expected()
        assert self.world.drain(group="auditor", topic=TOPIC) == self.model.sent
        judge(self.world)


OrderedModel.TestCase.settings = settings(
    max_examples=examples(60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestOrderedModel = OrderedModel.TestCase
