"""A copy of a store whose broker runs: it starts, and has all that was answered before it began."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.faulty_disk import FaultyDisk
from tests.support.offline_world import BusySource, Life, finish
from tidemill.broker.offline.check import check
from tidemill.broker.offline.copy import copy

SEEDS = 150
SLICE_BYTES = 4096  # so that much happens between the slices of one segment


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_copy_of_a_live_store_has_all_that_was_answered_before(seed: int) -> None:
    life = Life(seed)
    life.live(life.random.choice((5, 60, 300)))
    life.hide()
    acts = life.random.choice((0, 0.2, 0.5, 1, 2))  # behind each read, on average
    target = FaultyDisk(Random(seed))
    source = BusySource(life.world.disk, lambda: life.live_about(acts))
    report = finish(copy(source, target, slice_bytes=SLICE_BYTES))
    assert not report.damaged
    target = target.after_power_cut()
    assert finish(check(target, life.world.config.timer)).findings == []
    if seed % 2:
        for folder in ("queues", "index", "snapshots"):
            for name in target.names(folder):
                target.remove(name)  # The log alone says it all.
    life.judge(target)
