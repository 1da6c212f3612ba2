"""Dedup keys against a naive dictionary, through kills, power cuts, failovers, floors and packs.

The model knows each key that got an answer: the first message, when it was taken, and what keeps
it. The engine must store each free key (D-4), store no known key twice (D-1), and answer each
repeat with the first message (D-3). Each debounced key fires once, in time, with its last body
(D-6).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from tests.support.seeds import seeds
from tests.support.worlds.dedup_world import DedupWorld
from tests.support.worlds.engine_world import TOPIC
from tests.support.worlds.packed_worlds import floors, forget_derived_files, move_floor, pack_all
from tidemill.broker.engine.dedup.deduplication import RepeatedSend
from tidemill.broker.engine.dedup.first_messages import FirstMessage
from tidemill.broker.engine.layout.numbers import HalfId
from tidemill.broker.engine.metadata.dedup_policy import DedupMode
from tidemill.broker.engine.transaction.config import TransactionConfig

STEPS = 250
WINDOW_MS = 5_000
MAX_WAIT_MS = 4_000
MEMORY_MS = 3_000  # of results of transactions; short, so that the state floor moves
DEBOUNCE = "debounce"
KEYS = [f"k{n}" for n in range(12)]


@dataclass
class Known:
    """A key with its first message."""

    text: str
    taken_at_ms: int
    timer_id: int | None = None
    due_at_ms: int = 0
    half_id: int | None = None

    @property
    def is_pinned(self) -> bool:
        return self.timer_id is not None or self.half_id is not None


class Model:
    """A world, and the known keys of each topic."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.world = DedupWorld(
            segment_bytes=64 << 10,
            checkpoint_log_bytes=32 << 10,
            is_followed=True,
            transaction=TransactionConfig(outcome_memory_ms=MEMORY_MS, expired_memory_ms=MEMORY_MS),
        )
        self.world.turn_on(window_ms=WINDOW_MS)
        self.world.turn_on(
            topic=DEBOUNCE, window_ms=WINDOW_MS, mode=DedupMode.REPLACE, max_wait_ms=MAX_WAIT_MS
        )
        self.keys: dict[str, dict[str, Known]] = {TOPIC: {}, DEBOUNCE: {}}
        self.delivered: dict[str, list[str]] = {TOPIC: [], DEBOUNCE: []}

    @property
    def now_ms(self) -> int:
        return self.world.now_ms

    def find(self, topic: str, key: str) -> Known | None:
        """Return a key that is not free; forget one whose window is over."""
        known = self.keys[topic].get(key)
        if known is None or known.is_pinned or self.now_ms < known.taken_at_ms + WINDOW_MS:
            return known
        del self.keys[topic][key]
        return None

    def step(self, number: int) -> None:
        random = self.random
        self.fire()
        match random.choices(
            ("send", "debounce", "half", "end half", "cancel", "time", "filler", "restart"),
            weights=(30, 25, 8, 8, 6, 15, 10, 12),
        )[0]:
            case "send":
                due_at_ms = (
                    self.now_ms + random.randrange(1, 9_000) if random.random() < 0.3 else None
                )
                self.send(TOPIC, f"m{number}", due_at_ms=due_at_ms)
            case "debounce":
                due_at_ms = (
                    self.now_ms + random.randrange(1, 6_000) if random.random() < 0.8 else None
                )
                self.debounce(f"m{number}", due_at_ms=due_at_ms)
            case "half":
                self.send(TOPIC, f"m{number}", is_half=True)
            case "end half":
                self.end_half()
            case "cancel":
                self.cancel()
            case "time":
                self.world.advance(random.choice((1, 100, 1_000, 2_500)))
            case "filler":
                self.world.send(*(f"f{n}" for n in range(8)), topic="filler", size=2_000)
            case "restart":
                self.disturb()

    def choose_due(self, delay_max_ms: int, part: float) -> int | None:
        """Return the due time of a part of the messages."""
        is_delayed = self.random.random() < part
        return self.now_ms + self.random.randrange(1, delay_max_ms) if is_delayed else None

    def send(
        self, topic: str, text: str, *, due_at_ms: int | None = None, is_half: bool = False
    ) -> None:
        key = self.random.choice(KEYS)
        known = self.find(topic, key)
        repeated: FirstMessage | None = None
        try:
            sent = self.world.store(
                text, key=key, topic=topic, due_at_ms=due_at_ms, is_half=is_half
            )
        except RepeatedSend as repeat:
            repeated = repeat.first
        if repeated is not None:
            assert known is not None, f"D-4: {key} is free"
            # Retention may have freed the first message, unless a timer or a half message has it.
            allowed = {f"id-{known.text}"} | (set() if known.is_pinned else {f"id-{text}"})
            assert repeated.message_id in allowed, "D-3"
            return
        assert known is None, f"D-1: {key} is known"
        self.keys[topic][key] = new = Known(text, self.now_ms)
        if is_half:
            new.half_id = sent.half_id
        elif sent.due_at_ms:
            new.timer_id, new.due_at_ms = sent.queue_offset, sent.due_at_ms
        else:
            self.delivered[topic].append(text)

    def debounce(self, text: str, *, due_at_ms: int | None) -> None:
        key = self.random.choice(KEYS)
        known = self.find(DEBOUNCE, key)
        if known is None or known.timer_id is None:
            self.send_debounced(key, known, text, due_at_ms)
            return
        sent = self.world.store(text, key=key, topic=DEBOUNCE, due_at_ms=due_at_ms)
        assert sent.queue_offset == known.timer_id, "D-7"
        wanted = self.now_ms if due_at_ms is None else due_at_ms
        latest = known.taken_at_ms + MAX_WAIT_MS
        assert sent.due_at_ms == max(min(wanted, latest), self.now_ms), "D-6"
        known.text, known.due_at_ms = text, sent.due_at_ms

    def send_debounced(
        self, key: str, known: Known | None, text: str, due_at_ms: int | None
    ) -> None:
        try:
            sent = self.world.store(text, key=key, topic=DEBOUNCE, due_at_ms=due_at_ms)
        except RepeatedSend:
            assert known is not None, f"D-4: {key} is free"
            return
        assert known is None, f"D-1: {key} is known"
        self.keys[DEBOUNCE][key] = new = Known(text, self.now_ms)
        if sent.due_at_ms:
            new.timer_id, new.due_at_ms = sent.queue_offset, sent.due_at_ms
        else:
            self.delivered[DEBOUNCE].append(text)

    def fire(self) -> None:
        """The timers that are due have fired, since all due work was done."""
        self.world.run_due()
        for topic, keys in self.keys.items():
            for key, known in list(keys.items()):
                if known.timer_id is not None and known.due_at_ms <= self.now_ms:
                    self.delivered[topic].append(known.text)
                    known.timer_id = None
                    if topic == DEBOUNCE:
                        del keys[key]

    def cancel(self) -> None:
        for topic, keys in self.keys.items():
            for key, known in list(keys.items()):
                if known.timer_id is not None:
                    self.world.cancel(known.timer_id)
                    del self.keys[topic][key]
                    return

    def end_half(self) -> None:
        for key, known in list(self.keys[TOPIC].items()):
            if known.half_id is not None:
                if self.random.random() < 0.5:
                    self.world.commit_half(HalfId(known.half_id))
                    self.delivered[TOPIC].append(known.text)
                    known.half_id = None
                else:
                    self.world.roll_back(HalfId(known.half_id))
                    del self.keys[TOPIC][key]
                return

    def disturb(self) -> None:
        world = self.world
        kinds = ("kill", "power cut", "fail over", "lost files", "floor", "floor")
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

    def compare(self) -> None:
        self.world.note_round()
        for topic, keys in self.keys.items():
            expected = [key for key in KEYS if self.find(topic, key) is not None]
            rows = self.world.rows(topic=topic)
            assert len(rows) == len(expected), (topic, expected)
            pins = sum(one.is_pinned for one in keys.values())
            assert sum(row.pin != 0 for row in rows) == pins


@pytest.mark.parametrize("seed", seeds("dedup model", 40))
def test_dedup_keys_agree_with_the_model(seed: int) -> None:
    """D-1 to D-4, D-6 and D-7."""
    model = Model(Random(seed))
    for number in range(STEPS):
        model.step(number)
        if number % 10 == 0:
            model.fire()
            model.compare()
    model.world.advance(10_000)
    model.fire()
    model.compare()
    for topic, delivered in model.delivered.items():
        assert sorted(model.world.drain(topic=topic)) == sorted(delivered)
