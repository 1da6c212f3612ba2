"""Operations on timers whose messages are replaced by a send with the same dedup key."""

from __future__ import annotations

import pytest

from tests.support.worlds.dedup_world import DedupWorld
from tests.support.worlds.timer_bulk_world import CANCEL, TimerBulkWorld
from tests.support.worlds.timer_world import HOUR_MS, SECOND_MS
from tidemill.broker.engine.metadata.dedup_policy import DedupMode
from tidemill.broker.engine.timer.due_change import TimerChange
from tidemill.broker.engine.timer.status import TimerState


class ReplacingWorld(DedupWorld, TimerBulkWorld):  # type: ignore[misc]  # two named `state`
    """A world with dedup keys and operations on timers."""


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_message_that_was_replaced_after_the_count_stays(
    *, is_first: bool, is_begun: bool
) -> None:
    world = ReplacingWorld()
    world.topic()
    world.turn_on(mode=DedupMode.REPLACE, max_wait_ms=24 * HOUR_MS, window_ms=24 * HOUR_MS)
    due_ms = world.now_ms + HOUR_MS
    for n in range(3):
        world.store(f"wrong{n}", key=f"user{n}", due_at_ms=due_ms)
    if not is_first:
        world.store("still wrong", key="user2", due_at_ms=due_ms)
    world.now_ms += SECOND_MS
    as_of_ms = world.now_ms
    if is_begun:
        one = world.begin_timers(CANCEL)
    world.now_ms += SECOND_MS
    world.store("right", key="user1", due_at_ms=due_ms)
    if not is_begun:
        count = world.count_timers(TimerChange(CANCEL), as_of_ms=as_of_ms)
        assert (count.count, count.sample) == (2, [0, 2])
        one = world.begin_timers(CANCEL, as_of_ms=as_of_ms)
    assert world.run_operation(one).done == 2
    assert [TimerBulkWorld.state(world, n) for n in range(3)] == [
        TimerState.CANCELLED,
        TimerState.PENDING,
        TimerState.CANCELLED,
    ]
