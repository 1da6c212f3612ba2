"""Operations on timers by key or tag, while files or messages are damaged."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.worlds.timer_bulk_world import CANCEL, TimerBulkWorld
from tests.support.worlds.timer_world import HOUR_MS
from tidemill.broker.engine.layout.numbers import TimerId
from tidemill.broker.engine.layout.operation import ItemFailure, Operation, OperationState
from tidemill.broker.engine.timer.bulk_changes import TimerOutcome
from tidemill.broker.engine.timer.due_change import TimerChange
from tidemill.broker.engine.timer.status import TimerQuery, TimerState
from tidemill.common.errors import Repairing

GONE = TimerState.CANCELLED


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
    assert len(world.search(TimerQuery(100, key="k"))) < 60, "a look-up skips damage"
    world.now_ms += 10
    world.run_due()
    found = world.engine.operations.find(one.id)
    assert (found.state, found.done) == (OperationState.RUNNING, 0)
    world.background()
    world.now_ms += 1_000
    ended = world.run_operation(one)
    assert (ended.state, ended.done, ended.failed) == (OperationState.DONE, 60, 0)
    assert {world.state(n) for n in range(60)} == {TimerState.CANCELLED}


def world_with_damage(
    wanted: dict[str, Any], *, in_head: bool = False
) -> tuple[TimerBulkWorld, Operation]:
    """Return a world in which the message of the second of three timers is damaged.

    An operation on the three timers runs.
    """
    world = TimerBulkWorld()
    for n in range(3):
        world.delay(f"m{n}", world.now_ms + HOUR_MS, tag="red", keys=("k",))
    world.background()
    world.checkpoint()
    world.restart()
    one = world.begin_timers(CANCEL, **wanted)
    entry = world.engine.timers.index.get(TimerId(1))
    at = entry.log_offset + (10 if in_head else entry.size - 2)
    world.disk.damage("log/00000000000000000000.log", at)
    return world, one


@pytest.mark.parametrize("in_head", [False, True])
@pytest.mark.parametrize(
    "wanted", [{"tag": "red"}, {"key": "k"}, {"key": "k", "tag": "red", "topic": ""}]
)
def test_a_timer_with_a_damaged_message_is_a_failed_item(
    wanted: dict[str, Any], *, in_head: bool
) -> None:
    world, one = world_with_damage(wanted, in_head=in_head)
    count = world.count_timers(TimerChange(CANCEL), **wanted)
    assert (count.count, count.damaged_count) == (3, 1)
    ended = world.run_operation(one)
    assert (ended.state, ended.done, ended.failed) == (OperationState.DONE, 2, 1)
    assert ended.failures == [ItemFailure(1, TimerOutcome.DAMAGED)]
    assert [world.state(n) for n in range(3)] == [GONE, TimerState.PENDING, GONE]


@pytest.mark.parametrize("wanted", [{"tag": "red"}, {"key": "k"}])
def test_an_operation_waits_while_a_replica_may_mend_a_message(wanted: dict[str, Any]) -> None:
    world, one = world_with_damage(wanted)
    world.engine.log.damage.has_replicas = True
    for _ in range(3):
        world.now_ms += 1_000
        world.run_due()
    assert world.engine.operations.find(one.id).is_running
    assert world.state(1) is TimerState.PENDING
    assert world.engine.log.damage.has_requests
