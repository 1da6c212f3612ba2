"""The transitions of a timer: the index follows the table for every pair of event and state."""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.worlds.engine_world import TOPIC
from tests.support.worlds.timer_world import HOUR_MS, TimerWorld
from tidemill.broker.engine.layout.message import TimerCause, TimerReason, TimerTarget
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, TimerId, TopicId
from tidemill.broker.engine.layout.timer_control import TimerControl, TimerOperation
from tidemill.broker.engine.layout.timer_entry import TimerEntry
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.status import SCHEDULE_QUEUE, TimerState
from tidemill.broker.engine.timer.transitions import TRANSITIONS, TimerEvent

TIMER = TimerId(0)
NO_ENTRY = TimerEntry(LogOffset(0), 0, 0, TopicId(0), TimerState.UNUSED)


def enter(index: TimerIndex, state: TimerState) -> TimerEntry:
    """Move the pending timer to `state`, and return its entry from before."""
    index.link_gathered()
    entry = index.get(TIMER)
    if state != TimerState.PENDING:
        index.count(TIMER, entry, -1)
    is_unused = state == TimerState.UNUSED
    index.table.put(TIMER, NO_ENTRY if is_unused else entry._replace(state=state))
    return entry


def apply(index: TimerIndex, event: TimerEvent, entry: TimerEntry, now_ms: int) -> None:
    due_at_ms = entry.due_at_ms
    match event:
        case TimerEvent.SCHEDULE:
            target = TimerTarget(TIMER, due_at_ms, entry.topic_id, QueueId(0), TOPIC)
            index.apply_schedule(
                target, entry.log_offset, entry.size, now_ms, queue_id=SCHEDULE_QUEUE
            )
        case TimerEvent.RESCHEDULE:
            operation = TimerOperation.RESCHEDULE
            index.apply_control(TimerControl(operation, TIMER, due_at_ms, due_at_ms + 1), now_ms)
        case TimerEvent.CANCEL:
            index.apply_control(TimerControl(TimerOperation.CANCEL, TIMER, due_at_ms, 0), now_ms)
        case TimerEvent.DELIVER:
            index.apply_outcome(TimerCause(TIMER, due_at_ms, TimerReason.DELIVERED, ""))
        case TimerEvent.DROP:
            index.apply_outcome(TimerCause(TIMER, due_at_ms, TimerReason.EXPIRED, TOPIC))
        case TimerEvent.FORGET:
            index.table.fill_gaps(known_ids=1, files_kept=1)


@pytest.mark.parametrize(("event", "state"), list(product(TimerEvent, TimerState)))
def test_the_index_follows_the_table(event: TimerEvent, state: TimerState) -> None:
    world = TimerWorld()
    world.schedule("m", delay_ms=HOUR_MS)
    index = world.engine.timers.index
    entry = enter(index, state)
    apply(index, event, entry, world.now_ms)
    following = TRANSITIONS[event].get(state, state)
    assert index.get(TIMER).state == following
    assert index.pending_count == (following == TimerState.PENDING)


@pytest.mark.parametrize("event", TimerEvent)
def test_an_event_applied_twice_changes_a_timer_once(event: TimerEvent) -> None:
    """A replay may apply a record that the files contain already."""
    for state in TimerState:
        once = TRANSITIONS[event].get(state, state)
        assert TRANSITIONS[event].get(once, once) == once


def test_a_final_state_has_no_transition() -> None:
    final = set(TimerState) - {TimerState.UNUSED, TimerState.PENDING}
    for following in TRANSITIONS.values():
        assert not final & following.keys()
