"""Replays of replaced messages: the timer has the due time of the newest record (ADR 0087)."""

from __future__ import annotations

import pytest

from tests.support.worlds.dedup_world import DedupWorld
from tidemill.broker.engine.layout.numbers import TimerId
from tidemill.broker.engine.metadata.dedup_policy import DedupMode
from tidemill.broker.engine.store.segment import Record
from tidemill.broker.engine.timer.index import TimerIndex

HOUR_MS = 3_600_000


def _replace_after_reschedule(world: DedupWorld) -> TimerId:
    """Replace a message for its first due time, after a reschedule to a later one."""
    world.turn_on(mode=DedupMode.REPLACE, max_wait_ms=24 * HOUR_MS)
    due_at_ms = world.now_ms + HOUR_MS
    timer_id = TimerId(world.store("a", key="k", due_at_ms=due_at_ms).queue_offset)
    world.checkpoint()
    world.engine.timers.commands.reschedule(
        timer_id, due_at_ms=due_at_ms + HOUR_MS, now_ms=world.now_ms, firing_ms=world.now_ms
    )
    world.commit()
    world.store("b", key="k", due_at_ms=due_at_ms)
    return timer_id


def _index(world: DedupWorld) -> TimerIndex:
    index = world.engine.timers.index
    index.link_gathered()
    return index


@pytest.mark.parametrize("is_copied", [False, True])
def test_records_that_are_applied_twice_change_nothing(is_copied: bool) -> None:
    """Also if the message was copied to the end of the log since."""
    world = DedupWorld(segment_bytes=64 << 10)
    begin = world.engine.log.log_end
    timer_id = _replace_after_reschedule(world)
    if is_copied:
        while len(world.engine.log.segments) < 3:
            world.send("filler", topic="filler", size=2_000)
        evacuation = world.engine.timers.evacuation
        copied = _index(world).get(timer_id).log_offset
        evacuation._is_due = lambda _now_ms: True
        world.advance(2_000)
        assert _index(world).get(timer_id).log_offset > copied
    index, fold = _index(world), world.engine.fold
    before = index.get(timer_id)
    fold.catalog_from = world.engine.log.log_end
    for found in list(world.engine.log.walk_between(begin, world.engine.log.log_end)):
        assert isinstance(found, Record)
        fold.apply(found)
    assert _index(world).get(timer_id) == before
    world.advance(before.due_at_ms - world.now_ms)
    assert world.drain() == ["b"]
