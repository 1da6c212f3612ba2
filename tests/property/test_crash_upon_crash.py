"""Crash after crash of one store: kills, power cuts and failed syncs, in any order.

A random disk operation ends a scenario of `test_power_cut` or `test_timer_power_cut`. Each further
run starts, serves clients, writes its files, and is ended again. A power cut ends the last one,
because only that removes unsynced bytes of earlier runs. Afterwards the same promises hold as after
one power cut.

The seed of a failure repeats all its runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Generic, TypeVar

import pytest

from tests.property import test_power_cut as store
from tests.property import test_timer_power_cut as timers
from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.seeds import each, seed_chunks
from tests.support.worlds.engine_world import SMALL, World
from tests.support.worlds.timer_world import SECOND_MS, START_MS, TimerWorld
from tidemill.broker.engine.store.disk import DiskFailed

LIVES_MAX = 5
SEEDS = 1_020
CHUNKS = 8  # the seeds are divided among this many tests
ENDS = ("kill", "kill", "power cut", "failed sync")
SHORT = 60  # operations of a run that ends early
W = TypeVar("W", bound=World)


class Lives(Generic[W]):
    """The successive runs of one store."""

    def __init__(self, random: Random, *, now_ms: int) -> None:
        self.random = random
        self.disk = FaultyDisk(random)
        self.world: W | None = None  # the last world that has started
        self.story: list[str] = []
        self._now_ms = now_ms

    @property
    def now_ms(self) -> int:
        return self._now_ms if self.world is None else self.world.now_ms

    def live(self, begin: Callable[[], W], go_on: Callable[[W], None], operations: int) -> None:
        """Run the store until something ends it; leave the disk for the next run."""
        disk, end = self.disk, self.random.choice(ENDS)
        at = self.random.randint(0, operations)
        if end == "failed sync":
            disk.sync_fails_at = at
        else:
            disk.cut_at = at
        try:
            self.world = begin()
            go_on(self.world)
        except (PowerCut, DiskFailed):
            pass
        operation = disk.operations[-1] if disk.operations else "nothing"
        self.story.append(f"{end} at {len(disk.operations)} ({operation})")
        self.disk = disk.after_power_cut() if end == "power cut" else disk.after_kill()


def lead_store(lives: Lives[World], answered: store.ClientReplies) -> World:
    """Run a store several times; return it after the last power cut."""
    random = lives.random
    whole = max(store.OPERATIONS.values())
    open_world = random.choice(list(store.OPERATIONS))
    lives.live(
        lambda: open_world(lives.disk),
        lambda world: store.run_scenario(world, answered),
        random.choice((SHORT, whole)),
    )
    for number in range(1, random.randint(2, LIVES_MAX)):
        lives.live(
            lambda: World(lives.disk, config=SMALL, now_ms=lives.now_ms),
            partial(serve, answered=answered, name=f"life{number}"),
            SHORT,
        )
    return World(lives.disk.after_power_cut(), config=SMALL, now_ms=lives.now_ms)


def serve(world: World, answered: store.ClientReplies, name: str) -> None:
    """Send, pop and ack, as the scenario does, and write a checkpoint."""
    for n in range(3):
        store.send(world, answered, f"{name}-{n}", size=40_000 * (n % 2))
        popped = world.pop(4, invisible_ms=5_000)
        answered.hidden.update({one.body: one.delivery.visible_at_ms for one in popped})
        acked = {one.body for one in popped[:2]}
        answered.acking.update(acked)
        world.ack(*popped[:2])
        answered.acked.update(acked)
        answered.acking.difference_update(acked)
    world.checkpoint()


@pytest.mark.parametrize("chunk", seed_chunks("crashes", SEEDS, chunks=CHUNKS))
def test_repeated_crashes_lose_no_answered_message(chunk: list[int]) -> None:
    for seed in each(chunk):
        lives: Lives[World] = Lives(Random(seed), now_ms=1_000_000)
        answered = store.ClientReplies()
        try:
            store.check(lead_store(lives, answered), answered)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {'; '.join(lives.story)}: {error}") from error


def lead_timers(lives: Lives[TimerWorld], replies: timers.TimerReplies) -> TimerWorld:
    """Run timers several times; return them after the last power cut."""
    random = lives.random
    whole = max(map(len, timers.OPERATIONS.values()))
    open_world = random.choice(list(timers.OPERATIONS))
    lives.live(
        lambda: open_world(lives.disk),
        lambda world: timers.run_scenario(world, replies),
        random.choice((SHORT, whole)),
    )
    for number in range(1, random.randint(2, LIVES_MAX)):
        lives.live(
            lambda: open_timers(lives),
            partial(serve_timers, replies=replies, number=number),
            3 * SHORT,
        )
    lives.disk = lives.disk.after_power_cut()
    return open_timers(lives)


def open_timers(lives: Lives[TimerWorld]) -> TimerWorld:
    return TimerWorld(
        lives.disk,
        config=timers.CONFIG,
        timer=timers.CONFIG.timer,
        now_ms=lives.now_ms,
        before=lives.world,
    )


def serve_timers(world: TimerWorld, replies: timers.TimerReplies, number: int) -> None:
    """Cancel some timers, let others fire, and write all files."""
    world.sleep(2 * SECOND_MS)
    ids = sorted(world.timers.open)
    for timer_id in ids[number :: max(len(ids) // 3, 1)]:
        timers.cancel(world, replies, timer_id)
    world.background()
    world.sleep(SECOND_MS)
    world.background()


@pytest.mark.parametrize("chunk", seed_chunks("crashes of timers", SEEDS, chunks=CHUNKS))
def test_repeated_crashes_lose_or_double_no_timer(chunk: list[int]) -> None:
    for seed in each(chunk):
        lives: Lives[TimerWorld] = Lives(Random(seed), now_ms=START_MS)
        replies = timers.TimerReplies()
        try:
            timers.check(lead_timers(lives, replies), replies, with_twin=seed % 5 == 0)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {'; '.join(lives.story)}: {error}") from error
