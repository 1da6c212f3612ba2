"""A power cut at every disk operation of a scenario: no answered message is lost or comes back.

The scenario rolls segments, writes checkpoints, retires segments, pops, acks, replaces deliveries,
revives, dead-letters, resets and deletes. It runs once per operation with a cut there. The seed
decides if the disk keeps, tears or loses unsynced bytes. After the recovery the promises to clients
are checked.

A second run has overlapping rounds: several are written, syncs begin and end between them, and
clients get replies for the committed ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

import pytest

from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.disk.log_checker import judge
from tests.support.seeds import seed_base
from tests.support.worlds.engine_world import GROUP, SMALL, TOPIC, World
from tests.support.worlds.overlapping import OverlappingWorld
from tidemill.broker.engine.layout.numbers import QueueId, TopicId

CHUNKS = 8  # the runs are divided among this many tests
FIFO_GROUP = "ordered"
SCHEDULE = 1  # seed of the syncs among overlapping rounds
OVERLAPS_MIN = 60  # at least this many rounds are written during another one's sync: most of them
OpenWorld: TypeAlias = Callable[[FaultyDisk], World]


@dataclass
class ClientReplies:
    """The replies that the clients got."""

    sent: list[str] = field(default_factory=list)
    acked: set[str] = field(default_factory=set)
    ordered_acked: set[str] = field(default_factory=set)
    hidden: dict[str, int] = field(default_factory=dict)  # body: end of its invisible duration
    # Requests without a reply: either outcome is right.
    sending: set[str] = field(default_factory=set)
    acking: set[str] = field(default_factory=set)
    ordered_unknown: set[str] = field(default_factory=set)
    expired: set[str] = field(default_factory=set)

    @property
    def unknown(self) -> set[str]:
        """Return the messages that may exist or not."""
        return self.sending | self.acking


def run_scenario(world: World, answered: ClientReplies) -> None:
    world.group(max_attempts=3)
    world.group(FIFO_GROUP, is_ordered=True)
    for step in range(7):
        texts = [f"m{step}-{n}" for n in range(12)]
        for text in texts:
            send(world, answered, text, size=40_000 if step % 2 else 200)
        popped = world.pop(8, invisible_ms=5_000)
        world.react(answered.hidden.update, {p.body: p.delivery.visible_at_ms for p in popped})
        acked = {one.body for one in popped[:4]}
        answered.acking.update(acked)
        world.ack(*popped[:4])
        world.react(answered.acked.update, acked)
        world.react(answered.acking.difference_update, acked)
        if len(popped) > 4:
            changed = world.change(popped[4], 60_000)
            world.react(answered.hidden.update, {changed.body: changed.delivery.visible_at_ms})
        ordered = world.pop(3, group=FIFO_GROUP, invisible_ms=4_000)
        for one in ordered[:2]:
            answered.ordered_unknown.add(one.body)
            world.ack(one)
            world.react(answered.ordered_acked.add, one.body)
            world.react(answered.ordered_unknown.discard, one.body)
        if step in (2, 4, 5):
            write_checkpoint(world, answered, step)
        if step == 5 and len(world.engine.log.segments) > 1:
            retire(world, answered)
        world.now_ms += 2_500
        world.run_due()


def send(world: World, answered: ClientReplies, text: str, size: int = 0) -> None:
    answered.sending.add(text)
    world.send(text, size=size)
    world.react(answered.sent.append, text)
    world.react(answered.sending.discard, text)


def write_checkpoint(world: World, answered: ClientReplies, step: int) -> None:
    """Write a checkpoint during sends."""
    texts = (f"c{step}-{n}" for n in itertools.count())
    world.checkpoint(lambda: send(world, answered, next(texts)))


def retire(world: World, answered: ClientReplies) -> None:
    """Retire the oldest segment. From here on its messages may be missing."""
    world.settle()
    queue = world.engine.catalog.queue(TopicId(world.topic(TOPIC)), QueueId(0))
    end = world.engine.log.segments[0].end
    gone = [offset for offset in range(queue.max_offset) if queue.entry(offset)[0] < end]
    answered.expired.update(answered.sent[: len(gone)])
    world.retire()


def check(world: World, answered: ClientReplies) -> None:
    """Compare the recovered engine with the replies to the clients."""
    is_whole = world.engine.log.min_offset == 0
    if is_whole:
        judge(world)
    early = {text for text, until in answered.hidden.items() if until > world.now_ms}
    seen = world.drain()
    assert not (set(seen) & (early - answered.acked)), "a live delivery was delivered again"
    got = set(seen)
    for _ in range(40):
        world.advance(30_000)
        got.update(world.drain(invisible_ms=10_000))
    dead = set(world.drain(group="auditor", topic=f"%DLQ%{GROUP}"))
    assert not (got & answered.acked), "an acked message came back"
    lost = set(answered.sent) - answered.acked - answered.unknown - answered.expired - got - dead
    assert not lost, f"lost: {sorted(lost)}"
    surplus = got - set(answered.sent) - answered.unknown
    assert not surplus, f"from nowhere: {surplus}"
    check_ordered(world, answered)
    if is_whole:
        judge(world)


def check_ordered(world: World, answered: ClientReplies) -> None:
    order: list[str] = []
    for _ in range(200):
        popped = world.pop(7, group=FIFO_GROUP, invisible_ms=1_000)
        order += [one.body for one in popped]
        world.ack(*popped)
        if not popped:
            world.now_ms += 4_000
            if not world.pop(1, group=FIFO_GROUP, invisible_ms=1_000):
                break
            world.now_ms += 1_001
    assert not (set(order) & answered.ordered_acked), (
        "an acked message of an ordered group came back"
    )
    places = {text: place for place, text in enumerate(answered.sent)}
    known = [places[text] for text in order if text in places]
    assert known == sorted(set(known)), "an ordered group got messages out of order"
    lost = set(answered.sent) - answered.expired - answered.ordered_acked - set(order)
    assert not lost - answered.ordered_unknown, f"an ordered group lost {sorted(lost)}"


def cut_during_recovery(disk: FaultyDisk, *, now_ms: int, seed: int) -> FaultyDisk:
    """Cut the power again while the engine starts and serves a few calls."""
    disk.cut_at = Random(seed).randint(0, 12)
    try:
        world = World(disk, config=SMALL, now_ms=now_ms)
        world.send("x", topic="other", size=100)
        world.send("y", topic="other", size=90_000)
    except PowerCut:
        return disk.after_power_cut()
    return world.disk.after_power_cut()


def count_operations(open_world: OpenWorld) -> int:
    disk = FaultyDisk(Random(1))
    answered = ClientReplies()
    world = open_world(disk)
    run_scenario(world, answered)
    recovered = World(disk.after_power_cut(), config=SMALL, now_ms=world.now_ms)
    check(recovered, answered)
    return len(disk.operations)


def one_by_one(disk: FaultyDisk) -> World:
    return World(disk, config=SMALL)


def overlapping(disk: FaultyDisk) -> OverlappingWorld:
    return OverlappingWorld(disk, config=SMALL, schedule=Random(SCHEDULE))


OPERATIONS: dict[OpenWorld, int] = {
    open_world: count_operations(open_world) for open_world in (one_by_one, overlapping)
}


def test_rounds_of_the_scenario_overlap() -> None:
    world = overlapping(FaultyDisk(Random(1)))
    run_scenario(world, ClientReplies())
    assert world.overlaps > OVERLAPS_MIN


@pytest.mark.parametrize("open_world", OPERATIONS)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_power_cut_at_any_disk_operation_loses_no_answered_message(
    open_world: OpenWorld, chunk: int
) -> None:
    for cut_at in range(chunk, OPERATIONS[open_world], CHUNKS):
        disk = FaultyDisk(Random(f"{seed_base()} {cut_at}"))
        disk.cut_at = cut_at
        answered = ClientReplies()
        world: World | None = None
        now_ms = 1_000_000
        try:
            world = open_world(disk)
            run_scenario(world, answered)
        except PowerCut:
            pass
        if world is not None:
            now_ms = world.now_ms
        disk = cut_during_recovery(disk.after_power_cut(), now_ms=now_ms, seed=cut_at)
        recovered = World(disk, config=SMALL, now_ms=now_ms)
        try:
            check(recovered, answered)
        except AssertionError as error:
            raise AssertionError(
                f"power cut at operation {cut_at} ({disk.operations[-1]}): {error}"
            ) from error
