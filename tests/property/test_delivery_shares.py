"""The shares of consumer groups in the delivery table, in any order of calls.

Groups that never ack fill the table. A group with few deliveries is served all the same, and what
an operator releases, resets or deletes is free at once.
"""

from __future__ import annotations

import contextlib
from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.seeds import examples
from tests.support.worlds.engine_world import TOPIC, PoppedMessage, World
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.layout.numbers import GroupId
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.broker.engine.pop.delivery_limits import (
    FEW_PART,
    FEW_RESERVE_PART,
    KEPT_PART,
    POLLING_MS,
)
from tidemill.broker.engine.queries.in_flight import InFlightFilter
from tidemill.common.errors import InvalidReceiptHandle, Overloaded

HOUR_MS = 3_600_000
MOST = 96  # deliveries in flight
FEW = int(MOST * FEW_PART)
GROUPS = ("one", "two", "ordered")
GROUP = st.sampled_from(GROUPS)
MODEST = "modest"
QUEUES = 3
DURATIONS = st.sampled_from([1_000, HOUR_MS, 12 * HOUR_MS])


class SharesMachine(RuleBasedStateMachine):
    """Three groups that read one topic with many messages."""

    @initialize()
    def begin(self) -> None:
        self.world = World(
            deliveries_max=MOST,
            checkpoint_log_bytes=20_000,
            segment_bytes=64 << 10,
            is_followed=True,
        )
        self.polled_at_ms: dict[str, int] = {}
        self.popped: list[tuple[str, PoppedMessage]] = []
        self.acked: list[tuple[str, PoppedMessage]] = []
        self.released: list[PoppedMessage] = []
        self.world.topic(TOPIC, queues=QUEUES)
        self.create()
        self.send()

    @rule()
    def create(self) -> None:
        for name in GROUPS:
            self.world.group(name, is_ordered=name == "ordered", max_attempts=1_000)

    @rule()
    def send(self) -> None:
        for queue_id in range(QUEUES):
            self.world.send(*["m"] * 100, queue_id=queue_id)

    def _live(self, name: str) -> int:
        group = self.world.engine.catalog.find_group(name)
        return 0 if group is None else counts(self.world)[group.id][0]

    def _is_shared(self, name: str) -> bool:
        now_ms = self.world.now_ms
        return any(
            now_ms - at_ms < POLLING_MS
            for other, at_ms in self.polled_at_ms.items()
            if other != name
        )

    @rule(name=GROUP)
    def fill(self, name: str) -> None:
        self.pop(name, want=1, duration=12 * HOUR_MS, times=2 * MOST)

    @rule()
    def serve_the_modest(self) -> None:
        """Serve a group that acks at once, whatever the others hold."""
        self.world.run_due()
        self.polled_at_ms[MODEST] = self.world.now_ms
        self.world.ack(*self.world.pop(1, group=MODEST))

    @rule(name=GROUP, want=st.integers(1, 8), duration=DURATIONS, times=st.sampled_from([1, 2, 10]))
    def pop(self, name: str, want: int, duration: int, times: int) -> None:
        if self.world.engine.catalog.find_group(name) is None:
            return
        for _ in range(times):
            self.world.run_due()
            before, total = self._live(name), self.world.engine.state.live_count
            self.polled_at_ms[name] = self.world.now_ms
            share = (MOST + 1) // 2 if self._is_shared(name) else MOST
            try:
                popped = self.world.pop(want, group=name, invisible_ms=duration)
            except Overloaded:
                assert before >= FEW or total >= MOST + int(MOST * FEW_RESERVE_PART)
                assert before >= share or total >= MOST
                return
            after = self._live(name)
            assert after <= max(before, share, FEW)
            assert self.world.engine.state.live_count <= MOST * (1 + FEW_RESERVE_PART)
            self.popped += [(name, one) for one in popped]

    @rule(number=st.integers(0, 1 << 16), times=st.integers(1, 20))
    def ack(self, number: int, times: int) -> None:
        for _ in range(min(times, len(self.popped))):
            name, one = self.popped.pop(number % len(self.popped))
            if self.world.ack(one) == [AckResult.APPLIED]:
                self.acked.append((name, one))

    @rule(number=st.integers(0, 1 << 16), times=st.integers(1, 40), duration=DURATIONS)
    def change(self, number: int, times: int, duration: int) -> None:
        if not self.popped:
            return
        name, one = self.popped.pop(number % len(self.popped))
        with contextlib.suppress(InvalidReceiptHandle, Overloaded):
            for _ in range(times):
                changed = self.world.change(one, duration)
                self.released.append(one)
                one = changed
                self.world.run_due()
        self.popped.append((name, one))

    @rule(name=GROUP)
    def release_all(self, name: str) -> None:
        group = self.world.engine.catalog.find_group(name)
        if group is None:
            return
        wanted = InFlightFilter(frozenset([group.id]))
        page = self.world.engine.inspection.in_flight(wanted, after=None, max_messages=10_000)
        while page.step(self.world.now_ms):
            pass
        for found in page.take():
            self.world.engine.commands.release(found.delivery, self.world.now_ms)
            self.world.run_due()
        self.world.run_due()
        of_group = [one for other, one in self.popped if other == name]
        self.released += of_group
        self.popped = [(other, one) for other, one in self.popped if other != name]
        if name != "ordered":  # Its batches that have run out stay until the next pop.
            assert self._live(name) == 0

    @rule(name=GROUP)
    def reset(self, name: str) -> None:
        if self.world.engine.catalog.find_group(name) is None:
            return
        target = ResetTarget(earliest=True)
        self.world.engine.administration.reset_offset(name, TOPIC, target, self.world.now_ms)
        self._forget(name)
        assert self._live(name) == 0

    @rule(name=GROUP)
    def delete(self, name: str) -> None:
        group = self.world.engine.catalog.find_group(name)
        if group is None:
            return
        self.world.engine.administration.delete_group(name, self.world.now_ms)
        self._forget(name)
        assert group.id not in counts(self.world)

    def _forget(self, name: str) -> None:
        self.world.run_due()
        self.released += [one for other, one in self.popped + self.acked if other == name]
        self.popped = [(other, one) for other, one in self.popped if other != name]
        self.acked = [(other, one) for other, one in self.acked if other != name]

    @rule(duration=st.sampled_from([1, 2_000, POLLING_MS, 13 * HOUR_MS]))
    def advance(self, duration: int) -> None:
        self.world.advance(duration)

    @rule(power_cut=st.booleans(), with_checkpoint=st.booleans())
    def restart(self, power_cut: bool, with_checkpoint: bool) -> None:
        if with_checkpoint:
            self.world.checkpoint()
        self.world.restart(power_cut=power_cut)
        self.polled_at_ms.clear()

    @rule()
    def fail_over(self) -> None:
        self.world.fail_over()
        self.polled_at_ms.clear()

    @rule(number=st.integers(0, 1 << 16))
    def use_an_old_handle(self, number: int) -> None:
        """Replaced and released deliveries are rejected, whatever the table has dropped."""
        for old in self.released[number % 7 :: 7]:
            assert self.world.ack(old) == [AckResult.GONE]
        for _, acked in self.acked[number % 7 :: 7]:
            (result,) = self.world.ack(acked)
            assert result is not AckResult.APPLIED

    @invariant()
    def the_counts_are_right(self) -> None:
        if not hasattr(self, "world"):
            return
        for engine in (
            self.world.engine,
            self.world.follower.engine if self.world.follower else None,
        ):
            assert engine is not None
            found = Counter[bool]()
            state, table = engine.state, engine.state.table
            by_slots = Counter[tuple[int, bool]]()
            for slot in table.in_use(0, len(table.ids)).tolist():
                owner = state.owners[table.owners[slot]]
                by_slots[id(owner.slots), bool(table.live[slot])] += 1
                found[bool(table.live[slot])] += 1
            assert state.kept_count == found[False]
            assert state.live_count == found[True]
            for slots in {id(one.slots): one.slots for one in state.owners}.values():
                assert slots.live == by_slots[id(slots), True]
                assert slots.kept == by_slots[id(slots), False]
        self.world.run_due()
        assert self.world.engine.state.kept_count <= MOST * KEPT_PART


def counts(world: World) -> dict[GroupId, tuple[int, int]]:
    """Return the live and kept deliveries of each group, counted in the table."""
    state, table = world.engine.state, world.engine.state.table
    found: dict[GroupId, tuple[int, int]] = {}
    for slot in table.in_use(0, len(table.ids)).tolist():
        group_id = state.owners[table.owners[slot]].group_id
        live, kept = found.get(group_id, (0, 0))
        is_live = bool(table.live[slot])
        found[group_id] = live + is_live, kept + (not is_live)
    return found | {id_: (0, 0) for id_ in world.engine.catalog.groups if id_ not in found}


SharesMachine.TestCase.settings = settings(
    max_examples=examples(40),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestDeliveryShares = SharesMachine.TestCase
