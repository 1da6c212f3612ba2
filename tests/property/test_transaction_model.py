"""Transactions against a model, through kills, power cuts, failovers, checkpoints and packs.

The model has the state of each half message that got an answer. The engine must agree after each
step, deliver each committed message exactly once, and lose no open one.
"""

from __future__ import annotations

from random import Random

import pytest

from tests.support.seeds import seeds
from tests.support.worlds.packed_worlds import floors, forget_derived_files, move_floor, pack_all
from tests.support.worlds.transaction_world import TransactionWorld
from tidemill.broker.engine.layout.numbers import HalfId
from tidemill.broker.engine.layout.transaction import TransactionState
from tidemill.broker.engine.metadata.transaction_policy import PolicyChange
from tidemill.broker.engine.transaction.config import TransactionConfig
from tidemill.common.errors import InvalidTransactionId, TransactionNotFound
from tidemill.message.resource_names import HALF_DEAD_LETTER_TOPIC

HALF = TransactionState.HALF
STEPS = 250
MEMORY_MS = 3_000  # of results; short, so that the state floor moves
POLICY = PolicyChange(first_check_ms=2_000, period_ms=3_000, attempts=2)


class Model:
    """A world, and the expected state of each half message."""

    def __init__(self, random: Random) -> None:
        self.random = random
        # Timers hold the state floor until their files are written, which is another test.
        self.has_delays = random.random() < 0.3
        self.world = TransactionWorld(
            segment_bytes=64 << 10,
            checkpoint_log_bytes=32 << 10,
            is_followed=True,
            transaction=TransactionConfig(outcome_memory_ms=MEMORY_MS, expired_memory_ms=MEMORY_MS),
        )
        self.world.set_policy(POLICY)
        self.states: dict[HalfId, TransactionState] = {}
        self.texts: dict[HalfId, str] = {}
        self.checks: dict[HalfId, int] = {}
        self.ended_at_ms: dict[HalfId, int] = {}
        self.committed: list[str] = []

    def step(self, number: int) -> None:
        world, random = self.world, self.random
        open_ids = [one for one, state in self.states.items() if state is HALF]
        match random.choices(
            ("half", "commit", "roll back", "time", "check", "recover", "filler", "restart"),
            weights=(30, 20, 10, 12, 20, 5, 10, 14),
        )[0]:
            case "half":
                is_delayed = self.has_delays and random.random() < 0.25
                due_at_ms = world.now_ms + 5_000 if is_delayed else 0
                text = f"m{number}"
                half_id = world.half(
                    text,
                    due_at_ms=due_at_ms,
                    first_check_ms=random.choice((None, 600_000)),
                    size=random.choice((0, 2_000)),
                )
                self.states[half_id], self.texts[half_id], self.checks[half_id] = HALF, text, 0
            case "commit" if open_ids:
                self.decide(random.choice(open_ids[-4:]), TransactionState.COMMITTED)
            case "roll back" if open_ids:
                self.decide(random.choice(open_ids[-4:]), TransactionState.ROLLED_BACK)
            case "time":
                world.advance(random.choice((100, 1_000, 4_000)))
            case "check":
                for half_id, text in world.write_checks().items():
                    assert self.states[half_id] is HALF
                    assert text == self.texts[half_id]
                    self.checks[half_id] += 1
            case "recover":
                expired = [
                    one
                    for one, state in self.states.items()
                    if state is TransactionState.EXPIRED and world.state(one) is state
                ]
                if expired:
                    old_id = random.choice(expired)
                    new_id = world.recover(old_id)
                    self.end(old_id, TransactionState.RECOVERED)
                    self.states[new_id], self.texts[new_id] = HALF, self.texts[old_id]
                    self.checks[new_id] = 0
            case "filler":
                world.send(*(f"f{n}" for n in range(8)), topic="filler", size=2_000)
            case "restart":
                self.disturb()
        self.note_expired()

    def decide(self, half_id: HalfId, state: TransactionState) -> None:
        commits = state is TransactionState.COMMITTED
        (self.world.commit_half if commits else self.world.roll_back)(half_id)
        self.end(half_id, state)
        if commits:
            self.committed.append(self.texts[half_id])

    def end(self, half_id: HalfId, state: TransactionState) -> None:
        self.states[half_id], self.ended_at_ms[half_id] = state, self.world.now_ms

    def disturb(self) -> None:
        world = self.world
        kinds = ("kill", "power cut", "fail over", "lost files", "floor", "floor", "floor")
        match self.random.choice(kinds):
            case "kill":
                world.restart()
            case "lost files":
                forget_derived_files(world)
                world.open()
            case "power cut":
                world.restart(power_cut=True)
            case "fail over":
                world.fail_over()
            case "floor":
                self.move_floor()

    def move_floor(self) -> None:
        """Move the state floor as far as timers and results allow, and pack the log."""
        world = self.world
        world.checkpoint()
        oldest = world.engine.transaction_table.oldest_result(world.now_ms)
        allowed = 0
        for segment in world.engine.log.segments[:-1]:
            is_needed = oldest is not None and oldest < segment.end
            if is_needed or not world.engine.timers.may_drop(segment):
                break
            allowed = segment.end
        if known := [one for one in floors(world) if one <= allowed]:
            world.purge("filler")
            move_floor(world, self.random.choice(known))
            pack_all(world)

    def note_expired(self) -> None:
        """A half message expires one period after its last check, and never before it."""
        for half_id, state in self.states.items():
            if state is HALF and self.world.state(half_id) is TransactionState.EXPIRED:
                assert self.checks[half_id] == POLICY.attempts
                self.end(half_id, TransactionState.EXPIRED)

    def compare(self) -> None:
        for half_id, state in self.states.items():
            is_old = self.world.now_ms - self.ended_at_ms.get(half_id, 1 << 60) >= MEMORY_MS
            found = self.world.state(half_id)
            assert found is state or (found is None and is_old), half_id
            if state is HALF:
                status = self.world.engine.transactions.status(half_id)
                assert status.checks == self.checks[half_id]
        open_count = sum(state is HALF for state in self.states.values())
        assert self.world.engine.transaction_table.open_count == open_count


@pytest.mark.parametrize("seed", seeds("transaction model", 40))
def test_transactions_agree_with_the_model(seed: int) -> None:
    """X-1 to X-4 and X-7."""
    model = Model(Random(seed))
    for number in range(STEPS):
        model.step(number)
        if number % 10 == 0:
            model.compare()
    model.compare()
    world = model.world
    world.advance(10_000)  # Each scheduled message is due.
    model.note_expired()
    assert sorted(world.drain()) == sorted(model.committed)
    dead = world.drain(topic=HALF_DEAD_LETTER_TOPIC)
    ended = {TransactionState.EXPIRED, TransactionState.RECOVERED}
    expected = [model.texts[one] for one, state in model.states.items() if state in ended]
    assert sorted(dead) == sorted(expected)
    for half_id, state in model.states.items():
        if state is TransactionState.ROLLED_BACK:
            with pytest.raises((InvalidTransactionId, TransactionNotFound)):
                world.commit_half(half_id)
