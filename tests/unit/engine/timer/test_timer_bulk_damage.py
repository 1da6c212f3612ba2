"""Operations on timers by key or tag, while files or messages are damaged."""

from __future__ import annotations

import pytest

from tests.support.worlds.timer_bulk_world import CANCEL, TimerBulkWorld
from tests.support.worlds.timer_world import HOUR_MS
from tidemill.broker.engine.layout.operation import OperationState
from tidemill.broker.engine.timer.due_change import TimerChange
from tidemill.broker.engine.timer.status import TimerState
from tidemill.common.errors import Repairing


def world_with_index(count: int) -> tuple[TimerBulkWorld, str]:
    """Return a world with timers of one key, and the name of the file that indexes them."""
    world = TimerBulkWorld(checkpoint_log_bytes=16 << 10)
    for n in range(count):
        world.delay(f"m{n}", world.now_ms + HOUR_MS, keys=("k",))
    world.background()
    world.checkpoint()
    world.background()
    (name,) = world.disk.names("index")
    return world, name


def test_an_operation_by_key_waits_for_a_damaged_index() -> None:
    world, name = world_with_index(60)
    one = world.begin_timers(CANCEL, key="k")
    world.restart()
    file = world.disk.open(name)
    size = file.size()
    file.close()
    for at in range(0, size, 512):
        world.disk.damage(name, at)
    with pytest.raises(Repairing):
        world.count_timers(TimerChange(CANCEL), key="k")
    world.now_ms += 10
    world.run_due()
    found = world.engine.operations.find(one.id)
    assert (found.state, found.done) == (OperationState.RUNNING, 0)
    world.background()
    world.now_ms += 1_000
    ended = world.run_operation(one)
    assert (ended.state, ended.done, ended.failed) == (OperationState.DONE, 60, 0)
    assert {world.state(n) for n in range(60)} == {TimerState.CANCELLED}
