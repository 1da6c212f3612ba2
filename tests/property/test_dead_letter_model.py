"""Settled dead letters against a naive list, through kills, power cuts, failovers, floors, packs.

The model knows each dead letter: its message, its state, and its number of replays. The promises:

    DL-1  a dead letter is replayed at most once
    DL-2  no other consumer group gets a replayed message
    DL-3  a message has one dead letter for each number of replays
    DL-4  a replayed message that is acked does not come back
    DL-5  the states survive a restart, a failover and a replay from the state floor
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.disk.log_checker import judge
from tests.support.seeds import seed_base, seeds
from tests.support.worlds.engine_world import TOPIC, PoppedMessage
from tests.support.worlds.letter_world import DEAD, LetterWorld
from tests.support.worlds.packed_worlds import floors, forget_derived_files, move_floor, pack_all
from tidemill.broker.engine.dead_letter.letters import LetterOutcome
from tidemill.broker.engine.layout.operation import OperationKind

STEPS = 150
SECOND_MS = 1_000
CHUNKS = 4
OTHER = "another"


@dataclass
class Letter:
    """A dead letter."""

    text: str
    replays: int
    state: str = "OPEN"


class Model:
    """A world, and what its operator and its clients know."""

    def __init__(self, random: Random, *, is_ordered: bool) -> None:
        self.random = random
        self.world = LetterWorld(
            segment_bytes=64 << 10, checkpoint_log_bytes=32 << 10, is_followed=True
        )
        self.world.topic(TOPIC)
        self.world.group(is_ordered=is_ordered, max_attempts=2)
        self.world.group(OTHER)
        self.letters: list[Letter] = []
        self.low = 0  # a purge has removed the dead letters before it
        self.replays: dict[str, int] = {}  # of each message
        self.sent: list[str] = []
        self.read: list[str] = []  # by the other group
        self.acked: set[str] = set()
        self.held: list[PoppedMessage] = []
        # Messages that the group does not hold and that are not dead: new or replayed.
        self.ready: set[str] = set()

    def step(self, number: int) -> None:
        random, world = self.random, self.world
        match random.choices(
            (
                "send",
                "pop",
                "end",
                "replay",
                "discard",
                "bulk",
                "other",
                "filler",
                "purge",
                "restart",
            ),
            weights=(14, 20, 24, 14, 8, 2, 8, 8, 1, 8),
        )[0]:
            case "send":
                self.sent.append(f"m{number}")
                self.ready.add(f"m{number}")
                world.send(f"m{number}")
            case "pop":
                popped = world.pop(random.choice((1, 3)), invisible_ms=3_600 * SECOND_MS)
                for one in popped:
                    assert one.body in self.ready, "DL-1, DL-4: only ready messages are delivered"
                    assert one.attempt == 1
                    self.ready.discard(one.body)
                self.held += popped
            case "end":
                self.end()
            case "replay":
                self.settle("REPLAYED")
            case "discard":
                self.settle("DISCARDED")
            case "bulk":
                self.settle_all()
            case "other":
                popped = world.pop(4, group=OTHER)
                world.ack(*popped)
                self.read += [one.body for one in popped]
                assert self.read == self.sent[: len(self.read)], "DL-2"
            case "filler":
                world.send(*(f"f{n}" for n in range(8)), topic="filler", size=2_000)
            case "purge":
                world.purge(DEAD)
                self.low = len(self.letters)
            case "restart":
                self.disturb()
        self.check()

    def end(self) -> None:
        """Ack the first message that the group holds, or let it die."""
        if not self.held:
            return
        one = self.held.pop(0)
        if self.random.random() < 0.3:
            self.world.ack(one)
            self.acked.add(one.body)
            return
        self.world.fail(one)
        self.letters.append(Letter(one.body, self.replays.get(one.body, 0)))

    def settle(self, state: str) -> None:
        offsets = [self.random.randrange(len(self.letters) + 2) for _ in range(3)]
        expected = []
        for offset in offsets:
            if offset >= len(self.letters):
                expected.append(LetterOutcome.NOT_FOUND)
            elif offset < self.low:
                expected.append(LetterOutcome.EXPIRED)
            elif (letter := self.letters[offset]).state == "OPEN":
                expected.append(LetterOutcome(state))
                letter.state = state
                if state == "REPLAYED":
                    self.replays[letter.text] = letter.replays + 1
                    self.ready.add(letter.text)
            elif letter.state == "REPLAYED":
                expected.append(LetterOutcome.ALREADY_REPLAYED)
            else:
                expected.append(LetterOutcome.DISCARDED)
        if state == "REPLAYED":
            assert self.world.replay(*offsets) == expected
        else:
            assert self.world.discard(*offsets) == expected

    def settle_all(self) -> None:
        """Run an operation on all open dead letters, and disturb it."""
        if not self.letters:
            return
        kind = self.random.choice((OperationKind.REPLAY, OperationKind.DISCARD))
        state = "REPLAYED" if kind is OperationKind.REPLAY else "DISCARDED"
        id_ = self.world.begin_operation(kind, rate_per_s=self.random.choice((20, 10_000))).id
        count = 0
        for letter in self.letters[self.low :]:
            if letter.state == "OPEN":
                count, letter.state = count + 1, state
                if state == "REPLAYED":
                    self.replays[letter.text] = letter.replays + 1
                    self.ready.add(letter.text)
        for _ in range(500):
            operation = self.world.engine.operations.find(id_)
            if not operation.is_running:
                assert operation.done == operation.total == count
                return
            self.world.now_ms += 100
            self.world.run_due()
            self.world.commit()
            if self.random.random() < 0.2:
                self.disturb()
        raise AssertionError("the operation does not end")

    def disturb(self) -> None:
        world = self.world
        match self.random.randrange(5):
            case 0:
                world.restart()
            case 1:
                world.restart(power_cut=True)
            case 2:
                world.checkpoint()
                world.restart(power_cut=True)
            case 3:
                world.fail_over()
            case 4:
                world.purge("filler")
                world.checkpoint()
                if found := floors(world):
                    move_floor(world, found[-1])
                    pack_all(world)
                    forget_derived_files(world)
                    world.open()

    def check(self) -> None:
        letters = self.letters[self.low :]
        if letters:
            assert self.world.states() == [one.state for one in letters], "DL-5"
        died = [(one.text, one.replays) for one in self.letters]
        assert len(died) == len(set(died)), "DL-3"


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("seed", seeds("dead letters", 6))
def test_dead_letters_keep_their_states(seed: int, is_ordered: bool) -> None:
    model = Model(Random(seed), is_ordered=is_ordered)
    model.world.send("filler", topic="filler")
    for number in range(STEPS):
        model.step(number)
    for offset, letter in enumerate(model.letters[model.low :], model.low):
        assert model.world.letter(offset).cause.replays == letter.replays
    while popped := model.world.pop(8, group=OTHER):
        model.read += [one.body for one in popped]
        model.world.ack(*popped)
    assert model.read == model.sent, "DL-2"


def run_scenario(world: LetterWorld, replied: dict[int, LetterOutcome]) -> None:
    """Replay and discard dead letters between checkpoints, and note the replies."""
    world.topic(TOPIC)
    world.dead(*(f"m{n}" for n in range(12)), size=2_000)
    for first in (0, 4, 8):
        for offset in (first, first + 1):
            (outcome,) = world.replay(offset)
            replied[offset] = outcome
        (outcome,) = world.discard(first + 2)
        replied[first + 2] = outcome
        if first != 8:
            world.checkpoint()


def small(disk: FaultyDisk) -> LetterWorld:
    return LetterWorld(disk, segment_bytes=64 << 10, checkpoint_log_bytes=16 << 10)


def operations() -> int:
    disk = FaultyDisk(Random(1))
    run_scenario(small(disk), {})
    return len(disk.operations)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_power_cut_at_any_disk_operation_keeps_what_was_answered(chunk: int) -> None:
    count = operations()
    assert count > 50
    for cut_at in range(chunk, count, CHUNKS):
        disk, replied = FaultyDisk(Random(f"{seed_base()} {cut_at}")), dict[int, LetterOutcome]()
        disk.cut_at = cut_at
        with pytest.raises(PowerCut):
            run_scenario(small(disk), replied)
        world = small(disk.after_power_cut())
        if world.engine.catalog.find_topic(DEAD) is None:
            assert not replied
            continue
        states = dict(enumerate(world.states()))
        for offset, outcome in replied.items():
            assert states[offset] == outcome, f"power cut at operation {cut_at}"
        bodies = world.bodies()
        replayed = [f"m{offset}" for offset, state in states.items() if state == "REPLAYED"]
        dead = [f"m{offset}" for offset in states]
        assert [text for text in bodies if text in dead] == replayed, f"cut at {cut_at}"
        judge(world)
