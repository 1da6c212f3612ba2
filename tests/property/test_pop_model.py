"""The engine beside a model of a few lines, in any order of calls that Hypothesis generates.

The model of a group that is not ordered has one entry per message: ready, in flight under one
handle until a deadline, acked, or dead. Kills, power cuts, checkpoints and retirement may come at
any point. They do not change the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from tests.support.disk.log_checker import judge
from tests.support.seeds import examples
from tests.support.worlds.engine_world import GROUP, SMALL, TOPIC, PoppedMessage, World
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_RENEWS
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.broker.engine.pop.delivery_table import UNPROVEN
from tidemill.broker.engine.pop.renewals import (
    HELD_MAX_MS,
    SILENT_GRACE_MS,
    SILENT_MS,
    START_GRACE_MS,
)
from tidemill.broker.engine.pop.state import RENEWED_HANDLE_MS
from tidemill.common.errors import InvalidReceiptHandle

MAX_ATTEMPTS = 3
QUEUES = 2
CLIENTS = st.sampled_from(["", "client-1", "client-2"])  # the client "" does not renew
DURATIONS = st.sampled_from([1_000, 5_000, 70_000, 200_000])


@dataclass
class ModelMessage:
    """One message of the model."""

    attempt: int = 0
    state: str = "ready"
    until: int = 0
    handle: tuple[int, int, int] = (0, 0, 0)
    client: str = ""  # the client that holds it with renewal
    unproven: str = (
        ""  # the client that held it with renewal, until a start without a confirmed handover
    )
    popped_at: int = 0


def key_of(popped: PoppedMessage) -> tuple[int, int, int]:
    return popped.delivery.slot, popped.delivery.delivery_id, popped.delivery.message_index


class PopModel(RuleBasedStateMachine):
    """One topic with two queues, one group."""

    handles = Bundle("handles")

    @initialize()
    def begin(self) -> None:
        self.world = World(config=SMALL, checkpoint_log_bytes=20_000, is_followed=True)
        self.world.topic(TOPIC, queues=QUEUES)
        self.world.group(max_attempts=MAX_ATTEMPTS)
        self.known: dict[str, ModelMessage] = {}
        self.acked_under: dict[tuple[int, int, int], bool] = {}
        self.heard: dict[str, int] = {}  # the last sign of life of each client
        self.ended: set[int] = set()  # deliveries that were given back because their client ended
        self.forwarded: set[tuple[int, int, int]] = set()  # by their clients to the dead letters
        self.popped_by: dict[int, str] = {}  # deliveries to clients that renew
        self.has_popped = False

    @rule(count=st.integers(1, 40), queue_id=st.integers(0, QUEUES - 1), size=st.integers(1, 3000))
    def send(self, count: int, queue_id: int, size: int) -> None:
        texts = [f"m{len(self.known) + n}" for n in range(count)]
        self.world.send(*texts, queue_id=queue_id, size=size)
        self.known.update({text: ModelMessage() for text in texts})

    @rule(target=handles, want=st.integers(1, 32), duration=DURATIONS, client=CLIENTS)
    def pop(self, want: int, duration: int, client: str) -> object:
        if client:
            self.live_on(client)
            duration = min(duration, RENEWED_HANDLE_MS)  # Proxies pop with at most this duration.
        popped = self.world.pop(want, invisible_ms=duration, client_id=client, renews=bool(client))
        self.has_popped = True
        ready = [known for known in self.known.values() if known.state == "ready"]
        assert len(popped) <= want
        assert bool(popped) == bool(ready), "a pop is empty exactly when nothing is ready"
        assert len({one.body for one in popped}) == len(popped)
        for one in popped:
            known = self.known[one.body]
            assert known.state == "ready", f"{one.body} is {known.state}"
            known.attempt += 1
            assert one.attempt == known.attempt
            known.state, known.handle = "in flight", key_of(one)
            known.until = self.world.now_ms + duration
            known.client, known.unproven, known.popped_at = client, "", self.world.now_ms
            if client:
                self.popped_by[one.delivery.delivery_id] = client
        return multiple(*popped)

    @rule(client=CLIENTS.filter(bool))
    def live_on(self, client: str) -> None:
        self.world.alive(client)
        self.heard[client] = self.world.now_ms

    @rule(client=CLIENTS.filter(bool))
    def end(self, client: str) -> None:
        for known in self.known.values():
            if known.state != "in flight" or client not in (known.client, known.unproven):
                continue
            renews = self.world.engine.state.table.flags[known.handle[0]] & FLAG_RENEWS
            if known.client and not renews:
                silent_ms = self.world.now_ms - self.heard.get(client, 0)
                assert silent_ms >= SILENT_MS, "it was given back before, at most a second ahead"
                continue
            known.until = self.world.now_ms
            self.ended.add(known.handle[1])
        self.world.end(client)
        self.heard.pop(client, None)
        self.expire()

    @rule(one=handles)
    def hand_over(self, one: PoppedMessage) -> None:
        """Confirm a handover, maybe again, maybe late."""
        delivery = one.delivery.slot, one.delivery.delivery_id
        if delivery[1] not in self.popped_by:
            return
        self.world.engine.consumption.renewals.confirm_handovers(
            [delivery], now_ms=self.world.now_ms
        )
        self.world.commit()
        for known in self.known.values():
            is_out = known.state == "in flight" and known.handle[:2] == delivery
            if is_out and delivery[1] not in self.ended:
                known.client, known.unproven = self.popped_by[delivery[1]], ""

    @rule(one=handles)
    def ack(self, one: PoppedMessage) -> None:
        known = self.known[one.body]
        is_live = known.state == "in flight" and known.handle == key_of(one)
        was_acked = self.acked_under.get(key_of(one), False)
        (result,) = self.world.ack(one)
        if is_live:
            assert result is AckResult.APPLIED
            known.state = "acked"
            self.acked_under[key_of(one)] = True
        elif key_of(one) in self.forwarded:
            assert result is not AckResult.APPLIED
        elif was_acked and one.delivery.visible_at_ms > self.world.now_ms:
            # A start that read no record does not know whether its clock was set back.
            catalog = self.world.engine.catalog
            is_unknown = one.delivery.delivery_id < catalog.brought_back_before
            assert result is (AckResult.GONE if is_unknown else AckResult.ALREADY)
        elif not was_acked:
            # An ack that is answered OK settles the message, whatever ended the delivery.
            assert result is AckResult.GONE

    @rule(target=handles, one=consumes(handles), duration=DURATIONS | st.just(0))
    def change(self, one: PoppedMessage, duration: int) -> object:
        known = self.known[one.body]
        is_live = known.state == "in flight" and known.handle == key_of(one)
        try:
            changed = self.world.change(one, duration)
        except InvalidReceiptHandle:
            assert not is_live
            return multiple(one)
        assert is_live
        known.until = self.world.now_ms + duration
        known.handle, known.client, known.unproven = key_of(changed), "", ""
        self.expire()
        return multiple(one, changed)

    @rule(one=handles)
    def forward_to_dead_letters(self, one: PoppedMessage) -> None:
        known = self.known[one.body]
        is_live = known.state == "in flight" and known.handle == key_of(one)
        try:
            self.world.engine.commands.dead_letter(one.delivery, self.world.now_ms)
            self.world.commit()
        except InvalidReceiptHandle:
            assert not is_live
            return
        assert is_live
        known.state = "dead"
        self.forwarded.add(key_of(one))

    @rule(duration=st.sampled_from([1, 999, 4_000, 66_000, 130_000, 3_600_000]))
    def advance(self, duration: int) -> None:
        self.world.advance(duration)
        self.expire()

    def expire(self) -> None:
        self.world.run_due()
        for known in self.known.values():
            if known.client and known.state == "in flight" and known.handle[1] not in self.ended:
                known.until = self.deadline_of(known)
            if known.state == "in flight" and known.until <= self.world.now_ms:
                known.state = "dead" if known.attempt >= MAX_ATTEMPTS else "ready"

    def deadline_of(self, known: ModelMessage) -> int:
        """Return the deadline of a renewed delivery. The engine decides it, within limits."""
        (slot, delivery_id, index), now_ms = known.handle, self.world.now_ms
        table = self.world.engine.state.table
        is_out = table.ids[slot] == delivery_id and table.live[slot] >> index & 1
        until = table.visible_at_ms[slot] if is_out else 0
        is_heard = now_ms - self.heard.get(known.client, 0) < SILENT_MS
        if is_heard and now_ms - known.popped_at < HELD_MAX_MS:
            assert until > now_ms, "its client is alive"
        assert until <= max(known.popped_at + HELD_MAX_MS, now_ms + SILENT_GRACE_MS)
        return until

    def everybody_counts_as_heard(self) -> None:
        """Apply a start: it knows no signs of life, and only handovers of extended deliveries."""
        heard, self.heard = self.heard, dict.fromkeys(self.heard, self.world.now_ms)
        table = self.world.engine.state.table
        for known in self.known.values():
            slot, delivery_id, _ = known.handle
            if known.state != "in flight" or delivery_id in self.ended:
                continue
            if known.client:
                assert table.ids[slot] == delivery_id
                if not table.flags[slot] & FLAG_RENEWS:
                    known.until = table.visible_at_ms[slot]
                    assert known.until <= self.world.now_ms + START_GRACE_MS
                    if table.handover[slot] == UNPROVEN:
                        known.unproven = known.client
                    else:
                        is_silent = self.world.now_ms - heard.get(known.client, 0) >= SILENT_MS
                        assert is_silent, "it was given back before"
                    known.client = ""
            elif known.unproven:
                assert table.handover[slot] == UNPROVEN

    @rule(power_cut=st.booleans())
    def restart(self, power_cut: bool) -> None:
        self.world.restart(power_cut=power_cut)
        self.everybody_counts_as_heard()

    @rule()
    def fail_over(self) -> None:
        self.world.fail_over()
        self.everybody_counts_as_heard()

    @rule()
    def restart_without_derived_files(self) -> None:
        disk = self.world.disk.after_kill()
        for folder in ("queues", "index", "snapshots"):
            for name in disk.names(folder):
                disk.remove(name)
        self.world.disk = disk
        self.world.open()
        self.everybody_counts_as_heard()

    @rule()
    def checkpoint(self) -> None:
        self.world.checkpoint()

    @rule()
    def work_in_background(self) -> None:
        self.world.background()

    @rule(to=st.sampled_from(["earliest", "latest"]))
    def reset(self, to: str) -> None:
        target = ResetTarget(earliest=to == "earliest", latest=to == "latest")
        self.world.engine.administration.reset_offset(GROUP, TOPIC, target, self.world.now_ms)
        self.world.commit()
        self.acked_under.clear()
        self.forwarded.clear()
        for known in self.known.values():
            known.state = "ready" if to == "earliest" else "skipped"
            known.attempt = 0
            known.handle = (0, 0, 0)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "world"):
            return
        group = self.world.engine.catalog.find_group(GROUP)
        assert group is not None
        progress = self.world.engine.inspection.group_progress(group)
        in_flight = sum(1 for known in self.known.values() if known.state == "in flight")
        assert sum(one.in_flight_count for one in progress) == in_flight
        if self.has_popped:
            # The lag counts the messages that pops will deliver, also after pops without a message.
            ready = sum(1 for known in self.known.values() if known.state == "ready")
            assert sum(one.ready_count for one in progress) == ready
        for one in progress:
            assert one.pop_offset >= one.consumer_offset

    def teardown(self) -> None:
        """Check at the end that each message is acked, dead, or delivered now."""
        if not hasattr(self, "world"):
            return
        judge(self.world)
        for _ in range(MAX_ATTEMPTS + 1):
            self.advance(300_000)
            while popped := self.world.pop(32):
                for one in popped:
                    assert self.known[one.body].state == "ready"
                    self.known[one.body].state = "acked"
                self.world.ack(*popped)
        assert not [text for text, known in self.known.items() if known.state == "ready"]
        judge(self.world)


PopModel.TestCase.settings = settings(
    max_examples=examples(60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestPopModel = PopModel.TestCase


def begun() -> PopModel:
    """Return a model: one message, held by a client that renews."""
    model = PopModel()
    model.begin()
    model.send(count=1, queue_id=0, size=1)
    model.pop(want=1, duration=1_000, client="client-1")
    return model


def test_a_client_may_end_right_after_a_start() -> None:
    model = begun()
    model.fail_over()
    model.end("client-1")
    model.counts_agree()
    assert model.known["m0"].state == "ready"
    model.teardown()


@pytest.mark.parametrize("interruption", ["", "restart", "fail_over", "checkpoint"])
def test_an_ack_after_the_end_of_a_client_is_applied_or_rejected(interruption: str) -> None:
    model = PopModel()
    model.begin()
    model.send(count=3, queue_id=0, size=1)
    model.live_on("client-1")
    duration = RENEWED_HANDLE_MS
    popped = model.world.pop(3, invisible_ms=duration, client_id="client-1", renews=True)
    assert model.world.ack(popped[0]) == [AckResult.APPLIED]
    model.world.end("client-1")
    model.world.run_due()
    if interruption == "restart":
        model.world.restart(power_cut=True)
    elif interruption:
        getattr(model.world, interruption)()
    assert model.world.ack(*popped) == [AckResult.ALREADY, AckResult.GONE, AckResult.GONE]
    again = model.world.pop(3)
    assert [one.body for one in again] == ["m1", "m2"]
    model.world.ack(*again)
    model.world.advance(duration)
    assert model.world.engine.state.table.used_count == 0, "the handles have ended"
    assert model.world.ack(popped[1]) == [AckResult.GONE]


def test_a_snapshot_keeps_the_suspended_renewals_of_a_start() -> None:
    model = begun()
    model.restart(power_cut=False)
    model.checkpoint()
    model.restart(power_cut=False)
    model.end("client-1")
    model.counts_agree()
    assert model.known["m0"].state == "ready"
    model.teardown()


def test_silence_does_not_delay_a_due_message() -> None:
    model = begun()
    model.fail_over()
    model.advance(1)
    model.advance(130_000)
    model.counts_agree()
    assert model.known["m0"].state == "ready"
    model.teardown()


def test_a_client_that_ends_while_silent_has_given_back_before() -> None:
    model = begun()
    model.advance(1)
    model.advance(130_000)
    model.end("client-1")
    model.counts_agree()
    model.advance(999)
    model.advance(1)
    assert model.known["m0"].state == "ready"
    model.teardown()


def test_messages_of_a_silent_client_were_given_back_before_a_start() -> None:
    model = begun()
    model.advance(1)
    model.advance(130_000)
    model.fail_over()
    model.counts_agree()
    model.teardown()


def test_a_start_ignores_void_deliveries() -> None:
    model = begun()
    model.reset("earliest")
    model.fail_over()
    model.fail_over()
    model.counts_agree()
    model.teardown()
