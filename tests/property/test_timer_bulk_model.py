"""Operations on timers against a naive list, through kills, power cuts, failovers and snapshots.

The model knows each timer: its topic, tag, key, due time and state. Each operation changes the list
at once; the engine changes it in slices, between which the world is disturbed. The promises:

    B-1  an operation changes each timer that matches exactly once
    B-2  it changes no other timer, and none that was stored after its begin
    B-3  done, failed and skipped items are all items that matched at the begin
    B-4  a cancelled operation has changed a prefix of the timers that match, in the order of ids
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from tests.support.disk.faulty_disk import PowerCut
from tests.support.seeds import seeds
from tests.support.worlds.timer_bulk_world import CANCEL, FIRE, RESCHEDULE, TimerBulkWorld
from tests.support.worlds.timer_world import DAY_MS, HOUR_MS, MINUTE_MS
from tidemill.broker.engine.layout.operation import Operation, OperationKind
from tidemill.broker.engine.timer.due_change import TimerChange
from tidemill.broker.engine.timer.status import TimerState

STEPS = 40
CHUNKS = 4
TOPICS, TAGS, KEYS = ("orders", "payments"), ("", "red"), ("", "k1", "k2")


@dataclass
class KnownTimer:
    """A timer."""

    id: int
    topic: str
    tag: str
    key: str
    due_at_ms: int
    state: TimerState = TimerState.PENDING

    def matches(self, topic: str, tag: str, key: str, from_ms: int, to_ms: int) -> bool:
        return (
            self.state is TimerState.PENDING
            and topic in ("", self.topic)
            and tag in ("", self.tag)
            and key in ("", self.key)
            and self.due_at_ms >= from_ms
            and (not to_ms or self.due_at_ms < to_ms)
        )


class Model:
    """A world, and what its clients and its operator know."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.world = TimerBulkWorld(
            segment_bytes=64 << 10, checkpoint_log_bytes=32 << 10, is_followed=True
        )
        self.timers: list[KnownTimer] = []
        self.number = 0

    def step(self) -> None:
        random = self.random
        match random.choices(("send", "operation", "disturb"), weights=(6, 3, 1))[0]:
            case "send":
                for _ in range(random.choice((1, 8, 30))):
                    self.send()
            case "operation":
                self.operate()
            case _:
                self.disturb()
        self.check()

    def send(self) -> None:
        random, world = self.random, self.world
        topic, tag, key = random.choice(TOPICS), random.choice(TAGS), random.choice(KEYS)
        # Far away: only operations change the timers of this test.
        due_at_ms = world.now_ms + random.choice((10 * HOUR_MS, DAY_MS, 390 * DAY_MS))
        self.number += 1
        keys = (key,) if key else ()
        text = f"m{self.number}"
        timer_id = world.delay(text, due_at_ms, topic=topic, tag=tag, keys=keys)
        assert timer_id == len(self.timers)
        self.timers.append(KnownTimer(timer_id, topic, tag, key, due_at_ms))

    def operate(self) -> None:
        """Begin an operation, disturb it, and compare its end with the list."""
        random, world = self.random, self.world
        kind = random.choice((CANCEL, RESCHEDULE, RESCHEDULE, FIRE))
        tag, key = random.choice(TAGS), random.choice(KEYS)
        topic = random.choice(TOPICS if not key else ("", *TOPICS))
        from_ms = random.choice((0, 0, world.now_ms + 15 * HOUR_MS))
        to_ms = random.choice((0, 0, world.now_ms + 20 * HOUR_MS))
        shift_ms = random.choice((HOUR_MS, -MINUTE_MS, 20 * DAY_MS))
        spread_ms = random.choice((0, 5_000))
        due_at_ms = random.choice((None, None, world.now_ms + 12 * HOUR_MS))
        if due_at_ms is not None:
            shift_ms = 0
        matching = [one for one in self.timers if one.matches(topic, tag, key, from_ms, to_ms)]
        operation = world.begin_timers(
            kind,
            due_at_ms=due_at_ms,
            shift_ms=shift_ms,
            spread_ms=spread_ms,
            topic=topic,
            tag=tag,
            key=key,
            from_ms=from_ms,
            to_ms=to_ms,
        )
        assert operation.total == len(matching)
        change = TimerChange(kind, due_at_ms, shift_ms, spread_ms)
        is_cancelled = random.random() < 0.2
        ended = self.run(operation, is_cancelled=is_cancelled)
        done = matching if not is_cancelled else matching[: ended.done + ended.failed]
        failed = sum(not self.apply(change, one) for one in done)
        assert (ended.done, ended.failed) == (len(done) - failed, failed), "B-1, B-3, B-4"
        if kind is FIRE:
            world.sleep(1_000)

    def apply(self, change: TimerChange, one: KnownTimer) -> bool:
        """Change the list. Return whether the timer can be changed."""
        if change.kind == OperationKind.CANCEL_TIMERS:
            one.state = TimerState.CANCELLED
        elif change.kind == OperationKind.FIRE_TIMERS:
            one.state = TimerState.DELIVERED
        else:
            # The times of the slices differ, and the new due times are not near them.
            due_at_ms = change.due_of(one.id, one.due_at_ms, firing_ms=self.world.now_ms)
            if due_at_ms - self.world.now_ms > self.world.config.timer.max_delay_ms:
                return False
            one.due_at_ms = due_at_ms
        return True

    def run(self, operation: Operation, *, is_cancelled: bool) -> Operation:
        """Run an operation in slices with disturbances and new timers between them."""
        world, random = self.world, self.random
        for _ in range(1_000):
            found = world.engine.operations.find(operation.id)
            if not found.is_running:
                return found
            world.now_ms += 5
            for _ in world.engine.operations.due_slices(
                world.now_ms, firing_ms=world.now_ms, monotonic_ms=world.now_ms
            ):
                pass
            world.commit()
            if is_cancelled and random.random() < 0.5:
                world.engine.operations.cancel(operation.id, world.now_ms)
                world.commit()
            if random.random() < 0.2:
                self.disturb()
            if random.random() < 0.1:
                self.send()
        raise AssertionError("the operation does not end")

    def disturb(self) -> None:
        world = self.world
        match self.random.choice(("kill", "power cut", "failover", "snapshot", "files")):
            case "kill":
                world.restart()
            case "power cut":
                world.restart(power_cut=True)
            case "failover":
                world.fail_over()
            case "snapshot":
                world.checkpoint()
                world.restart()
            case _:
                world.background()
                world.restart(power_cut=True)

    def check(self) -> None:
        """B-1, B-2: each timer is as in the list."""
        world = self.world
        world.check()
        for one in self.timers:
            assert world.state(one.id) == one.state, one
            if one.state is TimerState.PENDING:
                assert world.due(one.id) == one.due_at_ms, one


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_operations_change_each_timer_once(chunk: int) -> None:
    for seed in seeds("timer-bulk", 80)[chunk::CHUNKS]:
        model = Model(Random(seed))
        for _ in range(STEPS):
            model.step()


@pytest.mark.parametrize("kind", [CANCEL, RESCHEDULE, FIRE])
def test_a_power_cut_at_any_write_repeats_no_item(kind: OperationKind) -> None:
    """The disk loses power at each operation of a run, and the next start continues."""
    for cut_at in range(2, 40, 3):
        world = TimerBulkWorld(is_followed=False)
        base_ms = world.now_ms + DAY_MS
        for n in range(40):
            world.delay(f"m{n}", base_ms)
        one = world.begin_timers(kind, shift_ms=HOUR_MS)
        world.disk.cut_at = len(world.disk.operations) + cut_at
        try:
            for _ in range(20):
                world.now_ms += 5
                world.run_due()
        except PowerCut:
            pass
        world.restart(power_cut=True)
        ended = world.run_operation(one)
        assert (ended.done, ended.failed) == (40, 0)
        if kind is RESCHEDULE:
            assert {world.due(n) for n in range(40)} == {base_ms + HOUR_MS}
        elif kind is CANCEL:
            assert {world.state(n) for n in range(40)} == {TimerState.CANCELLED}
        else:
            world.sleep(1_000)
            assert sorted(world.texts()) == sorted(f"m{n}" for n in range(40))
        world.check()
