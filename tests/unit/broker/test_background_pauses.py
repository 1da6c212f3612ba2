"""The pauses of background work: beside syncs of the log, and for a limited rate."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.support.clocks import ManualClock
from tests.support.worlds.engine_world import World
from tests.support.worlds.round_world import GatedSyncs
from tidemill.broker.server.round.background_work import (
    BREAK_MS_MAX,
    MADE_UP_S_MAX,
    BackgroundWork,
    RatePauses,
)
from tidemill.broker.server.round.long_polling import LongPolling
from tidemill.broker.server.round.turn import Turn

PACE_S = 0.1


class Slices:
    """Background work over an engine, and the clock of its turns."""

    def __init__(self) -> None:
        self.world = World()
        self.clock = ManualClock(self.world.now_ms)
        self.work = BackgroundWork(self.world.engine, GatedSyncs())

    @property
    def turn(self) -> Turn:
        return Turn(self.world.engine, LongPolling(parked_max=1), self.clock)


def test_a_slice_waits_for_a_sync_of_the_log_for_two_milliseconds() -> None:
    slices = Slices()
    slices.work.step(slices.turn)
    waits = []
    for _ in range(BREAK_MS_MAX + 2):
        waits.append(slices.work.may_wait(slices.turn))
        slices.clock.advance(1)
    assert waits == [True] * BREAK_MS_MAX + [False] * 2
    slices.work.step(slices.turn)
    assert slices.work.may_wait(slices.turn), "the next slice waits again"


def test_a_requested_checkpoint_waits_for_no_sync_of_the_log() -> None:
    slices = Slices()
    slices.work.step(slices.turn)
    slices.world.send("a")
    slices.world.engine.checkpoints.request()
    assert slices.world.engine.checkpoints.is_requested
    assert not slices.work.may_wait(slices.turn)


def test_slices_keep_the_allowed_rate_although_each_takes_time() -> None:
    pauses, now_s = RatePauses(), 0.0
    for _ in range(100):
        now_s += PACE_S / 2  # the slice and its sync
        now_s += pauses.next_s(now_s, PACE_S)
    assert now_s == pytest.approx(100 * PACE_S, abs=PACE_S)


@pytest.mark.parametrize("delay_s", [0.2, 10.0])
def test_slices_make_up_for_a_part_of_a_delay(delay_s: float) -> None:
    pauses, now_s = RatePauses(), 0.0
    now_s += pauses.next_s(now_s, PACE_S)
    now_s = begin_s = now_s + delay_s
    for _ in range(100):
        pause_s = pauses.next_s(now_s, PACE_S)
        assert pause_s >= PACE_S / 4, "sends have some time between two slices"
        now_s += pause_s
    made_up_s = min(delay_s, MADE_UP_S_MAX)
    assert now_s - begin_s == pytest.approx(100 * PACE_S - made_up_s, abs=PACE_S / 2)


@pytest.mark.parametrize("job", ["requested checkpoint", "due checkpoint"])
def test_a_checkpoint_does_not_wait_for_the_rate_of_packs(job: str) -> None:
    world = World(checkpoint_log_bytes=64 << 10)
    background, packing = world.engine.background, cast("Any", world.engine.packing)
    packing._pace_s = PACE_S
    assert background.take_pace_s(world.now_ms) == PACE_S
    assert background.take_pace_s(world.now_ms) == 0, "it counts once"
    packing._pace_s = PACE_S
    if job == "due checkpoint":
        world.send(*["x"] * 10, size=10_000)
        assert world.engine.checkpoints.is_due
        assert not world.engine.checkpoints.is_requested
    else:
        world.send("x")
        world.engine.checkpoints.request()
    assert background.take_pace_s(world.now_ms) == 0
