"""Timers beside a model of a few lines, in any order of calls that Hypothesis generates.

The model of a timer is its state and its due time. Kills, power cuts, half-done background work,
missing files, jumps of the clock and outages may come at any point. They do not change the model.
Only the lateness of a message may grow, up to a limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.timer_log_fold import CANCELLED, DELIVERED, DROPPED, PENDING
from tests.support.seeds import examples
from tests.support.worlds.engine_world import SMALL
from tests.support.worlds.timer_world import (
    DAY_MS,
    HOUR_MS,
    SECOND_MS,
    TIMERS,
    TimerWorld,
    check_engine,
    open_timers,
    timer_files,
    without_timer_files,
)
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.layout.message import TimerReason
from tidemill.broker.engine.layout.numbers import TimerId
from tidemill.broker.engine.timer.status import TimerState
from tidemill.common.errors import Conflict, MessageNotFound

TOPICS = ("orders", "payments")
TOPIC = st.sampled_from(TOPICS)
RING_MS = (TIMERS.wheel_slots - 60) * SECOND_MS
DELAYS = st.sampled_from(
    [
        *(1, 20, 999, 1_000, 1_001, 4_999, 12_345, 60_000, HOUR_MS),
        *(RING_MS - 1_000, RING_MS, RING_MS + 1_000, 2 * RING_MS),
        *(3 * DAY_MS, 21 * DAY_MS, 399 * DAY_MS),
    ]
)
STATES = {
    PENDING: TimerState.PENDING,
    DELIVERED: TimerState.DELIVERED,
    CANCELLED: TimerState.CANCELLED,
    DROPPED: TimerState.DROPPED,
}
# The last timers of a second with more timers than are loaded at once come after that second.
LATE_MS = 2 * SECOND_MS
# After the clock has stood or jumped, the ring moves by one revolution per second.
CATCH_UP_MS = 40 * SECOND_MS
PLACE = st.integers(0, 1 << 30)


@dataclass
class ModelTimer:
    """One timer of the model."""

    text: str
    topic: str
    topic_id: int
    due_at_ms: int
    state: str = PENDING


class TimerModel(RuleBasedStateMachine):
    """Two topics, small files, retention of three days."""

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        self.world = TimerWorld(
            FaultyDisk(Random(seed)),
            segment_bytes=64 << 10,
            retention_ms=3 * DAY_MS,
            checkpoint_log_bytes=30_000,
            is_followed=True,
        )
        self.known: dict[int, ModelTimer] = {}
        self.at_once: list[str] = []  # due already when they were sent
        self.taken = 0  # deliveries that were checked
        self.late_until_ms = 0
        self.count = 0

    # ------------------------------------------------------------ commands

    @rule(topic=TOPIC, delay_ms=DELAYS, size=st.sampled_from([0, 0, 3_000]), relative=st.booleans())
    def schedule(self, topic: str, delay_ms: int, size: int, relative: bool) -> None:
        self.count += 1
        text, due_at_ms = f"m{self.count}", self.world.now_ms + delay_ms
        scheduled = (
            self.world.schedule(text, delay_ms=delay_ms, topic=topic, size=size)
            if relative
            else self.world.schedule(text, due_at_ms=due_at_ms, topic=topic, size=size)
        )
        assert scheduled.due_at_ms == due_at_ms
        assert scheduled.queue_offset not in self.known, "an id is used once"
        self.known[scheduled.queue_offset] = ModelTimer(
            text, topic, self.world.topic(topic), due_at_ms
        )

    @rule(topic=TOPIC, delay_ms=DELAYS, count=st.integers(50, 300))
    def schedule_many_for_one_second(self, topic: str, delay_ms: int, count: int) -> None:
        second_ms = (self.world.now_ms + delay_ms) // 1000 * 1000 + 1000
        for n in range(count):
            self.count += 1
            text, due_at_ms = f"m{self.count}", second_ms + n * 617 % 1000
            scheduled = self.world.schedule(text, due_at_ms=due_at_ms, topic=topic, commit=False)
            self.known[scheduled.queue_offset] = ModelTimer(
                text, topic, self.world.topic(topic), due_at_ms
            )
        self.world.commit()

    @rule(topic=TOPIC, ago_ms=st.sampled_from([0, 1, DAY_MS]))
    def schedule_for_the_past(self, topic: str, ago_ms: int) -> None:
        self.count += 1
        scheduled = self.world.schedule(
            f"m{self.count}", due_at_ms=self.world.now_ms - ago_ms, topic=topic
        )
        assert scheduled.due_at_ms == 0, "it was stored at once"

    def choose(self, place: int) -> int:
        """Choose a timer, preferring late ones, or an unused id if there is none."""
        return len(self.known) - 1 - place % (len(self.known) or 1) if self.known else 77

    @rule(place=PLACE)
    def cancel(self, place: int) -> None:
        timer_id = self.choose(place)
        known = self.known.get(timer_id)
        if known is None or known.state in (DELIVERED, DROPPED):
            with pytest.raises(MessageNotFound):
                self.world.cancel(timer_id)
            return
        assert self.world.cancel(timer_id).state == TimerState.CANCELLED
        known.state = CANCELLED

    @rule(place=PLACE, delay_ms=DELAYS | st.just(0) | st.just(-DAY_MS), is_sure=st.booleans())
    def reschedule(self, place: int, delay_ms: int, is_sure: bool) -> None:
        timer_id = self.choose(place)
        known = self.known.get(timer_id)
        due_at_ms = self.world.now_ms + delay_ms
        if known is None or known.state != PENDING:
            with pytest.raises(MessageNotFound):
                self.world.reschedule(timer_id, due_at_ms)
            return
        with pytest.raises(Conflict):
            self.world.reschedule(timer_id, due_at_ms, expected_due_at_ms=known.due_at_ms + 1)
        options = {"expected_due_at_ms": known.due_at_ms} if is_sure else {}
        status = self.world.reschedule(timer_id, due_at_ms, **options)
        known.due_at_ms = max(due_at_ms, self.world.now_ms)
        assert status.due_at_ms == known.due_at_ms

    @rule(place=PLACE)
    def fire(self, place: int) -> None:
        timer_id = self.choose(place)
        known = self.known.get(timer_id)
        if known is None or known.state != PENDING:
            with pytest.raises(MessageNotFound):
                self.world.fire(timer_id)
            return
        self.world.fire(timer_id)
        known.due_at_ms = self.world.now_ms
        self.world.run_due()

    @rule(topic=TOPIC)
    def delete_topic(self, topic: str) -> None:
        self.world.topic(topic)
        self.world.engine.administration.delete_topic(topic, self.world.now_ms)
        self.world.commit()

    # ------------------------------------------------------------ time

    @rule(duration_ms=st.sampled_from([1, 20, 999, 7_000, 60_000]))
    def sleep(self, duration_ms: int) -> None:
        self.world.sleep(duration_ms)

    @rule(duration_ms=st.sampled_from([20 * 60_000, 2 * HOUR_MS, 2 * DAY_MS]))
    def advance(self, duration_ms: int) -> None:
        self.world.advance(duration_ms)

    @rule(duration_ms=st.sampled_from([30 * 60_000, HOUR_MS, 20 * HOUR_MS]))
    def stand_still(self, duration_ms: int) -> None:
        """Stop the process and continue later, like a paused virtual machine."""
        self.world.now_ms += duration_ms
        self.late_until_ms = self.world.now_ms + CATCH_UP_MS

    # ------------------------------------------------------------ restarts

    @rule(
        power_cut=st.booleans(),
        outage_ms=st.sampled_from([0, 0, 1_000, 30 * 60_000, 2 * HOUR_MS, 30 * DAY_MS]),
    )
    def restart(self, power_cut: bool, outage_ms: int) -> None:
        self.world.now_ms += outage_ms
        self.world.restart(power_cut=power_cut)
        if outage_ms:
            self.late_until_ms = self.world.now_ms + CATCH_UP_MS

    @rule()
    def fail_over(self) -> None:
        """Fail over to the follower, which has its own timer files of the same log."""
        self.world.fail_over()
        self.late_until_ms = max(self.late_until_ms, self.world.now_ms + LATE_MS)

    @rule(place=PLACE, what=st.sampled_from(["all", "wheel", "timerlog", "checkpoint"]))
    def restart_without_timer_files(self, place: int, what: str) -> None:
        disk = self.world.disk.after_kill()
        names = timer_files(disk)
        if what != "all":
            names = [name for name in names if what in name]
        if names:
            without_timer_files(disk, *names)
        self.world.disk = disk
        self.world.open()
        self.late_until_ms = max(self.late_until_ms, self.world.now_ms + LATE_MS)

    @rule()
    def checkpoint(self) -> None:
        self.world.background()
        self.world.checkpoint()

    @rule()
    def work_in_background(self) -> None:
        self.world.background()

    @rule(steps=st.integers(1, 12))
    def work_in_background_a_little(self, steps: int) -> None:
        self.world.background(steps)

    @rule()
    def rebuild_from_the_log_alone(self) -> None:
        """Check T-7: two engines with the same log have the same pending timers."""
        world = self.world
        twin = TimerWorld(
            without_timer_files(world.disk.after_kill()),
            now_ms=world.now_ms,
            config=_config_of(world),
        )
        world.engine.timers.index.link_gathered()
        assert list(open_timers(twin.engine)) == list(open_timers(world.engine))
        check_engine(twin.engine, world.timers)

    # ------------------------------------------------------------ invariants

    @invariant()
    def the_model_agrees(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.run_due()
        for one in world.delivered[self.taken :]:
            known = self.known[one.timer_id]
            assert known.state == PENDING, f"{one} was {known.state}"
            assert (one.text, one.due_at_ms) == (known.text, known.due_at_ms)
            is_gone = known.topic_id not in world.engine.catalog.topics
            known.state = DROPPED if one.reason == TimerReason.TOPIC_DELETED else DELIVERED
            if known.state == DELIVERED:
                assert one.topic == known.topic
            else:
                assert is_gone
        self.taken = len(world.delivered)
        if world.now_ms >= self.late_until_ms:
            limit_ms = world.now_ms - LATE_MS
            late = [
                (n, one)
                for n, one in self.known.items()
                if one.state == PENDING and one.due_at_ms < limit_ms
            ]
            assert not late, f"not delivered at {world.now_ms}: {late[:3]}"
        fold = world.timers
        waiting = {n: one.due_at_ms for n, one in self.known.items() if one.state == PENDING}
        assert {n: one.due_at_ms for n, one in fold.open.items()} == waiting
        check_engine(world.engine, fold)

    def teardown(self) -> None:
        """Check at the end that each timer is delivered or dropped unless it was cancelled."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for timer_id, known in list(self.known.items())[-50:]:
            if known.state == PENDING and known.due_at_ms > world.now_ms + DAY_MS:
                world.reschedule(timer_id, world.now_ms + HOUR_MS)
                known.due_at_ms = world.now_ms + HOUR_MS
        world.sleep(CATCH_UP_MS)
        world.advance(2 * DAY_MS)
        world.sleep(2 * LATE_MS)
        world.background()
        self.the_model_agrees()
        waiting = [known for known in self.known.values() if known.state == PENDING]
        assert all(known.due_at_ms > world.now_ms for known in waiting)
        states = {n: STATES[one.state] for n, one in self.known.items()}
        indexed = {n: TimerState(world.engine.timers.index.get(TimerId(n)).state) for n in states}
        # A table file is deleted when all its timers are final. A rebuild does not restore
        # entries that retention has removed.
        unused = {n for n in indexed if indexed[n] in (TimerState.UNUSED, TimerState.FORGOTTEN)}
        assert all(indexed[n] == states[n] for n in indexed if n not in unused)
        assert all(states[n] != TimerState.PENDING for n in unused)


def _config_of(world: TimerWorld) -> EngineConfig:
    config = world.config
    return replace(SMALL, segment_bytes=config.segment_bytes, retention_ms=config.retention_ms)


TimerModel.TestCase.settings = settings(
    max_examples=examples(40),
    stateful_step_count=30,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestTimerModel = TimerModel.TestCase


def test_timers_in_a_new_page_are_counted_by_a_running_audit() -> None:
    model = TimerModel()
    model.begin(seed=0)
    steps: list[Callable[[], object]] = [
        partial(model.schedule_many_for_one_second, count=288, delay_ms=1, topic="orders"),
        partial(model.stand_still, duration_ms=20 * HOUR_MS),
        model.checkpoint,
        partial(model.advance, duration_ms=48 * HOUR_MS),
        partial(model.work_in_background_a_little, steps=5),
        partial(model.reschedule, delay_ms=1, is_sure=False, place=0),
        partial(model.reschedule, delay_ms=0, is_sure=False, place=0),
        partial(model.schedule_many_for_one_second, count=245, delay_ms=1, topic="orders"),
        model.checkpoint,
    ]
    for step in steps:
        model.the_model_agrees()
        step()
    model.the_model_agrees()
    model.teardown()
