"""The states of a timer, and the events that lead from one state to the next.

                              ┌── DELIVER ──> DELIVERED
    UNUSED ── SCHEDULE ──> PENDING ── CANCEL ──> CANCELLED
       │                      └── DROP ──> DROPPED
       └── FORGET ──> FORGOTTEN

    SCHEDULE and RESCHEDULE leave a pending timer pending: a newer copy of its message, or another
    due time. A final event also follows UNUSED: in a replay the schedule may be in a segment that
    retention has removed.

All states but UNUSED and PENDING are final. An event without an entry here changes nothing, so that
a replay may apply a record twice.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from tidemill.broker.engine.timer.status import TimerState


class TimerEvent(IntEnum):
    """An event in the life of a timer, each but FORGET from a record of the log."""

    SCHEDULE = 1  # its message, or a newer copy of it
    RESCHEDULE = 2  # another due time, and another message if a dedup key is sent again
    CANCEL = 3
    DELIVER = 4
    DROP = 5  # to the dead-letter topic
    FORGET = 6  # the log has no record of it


TRANSITIONS: Final[dict[TimerEvent, dict[int, TimerState]]] = {
    TimerEvent.SCHEDULE: {
        TimerState.UNUSED: TimerState.PENDING,
        TimerState.PENDING: TimerState.PENDING,
    },
    TimerEvent.RESCHEDULE: {TimerState.PENDING: TimerState.PENDING},
    TimerEvent.CANCEL: {
        TimerState.UNUSED: TimerState.CANCELLED,
        TimerState.PENDING: TimerState.CANCELLED,
    },
    TimerEvent.DELIVER: {
        TimerState.UNUSED: TimerState.DELIVERED,
        TimerState.PENDING: TimerState.DELIVERED,
    },
    TimerEvent.DROP: {
        TimerState.UNUSED: TimerState.DROPPED,
        TimerState.PENDING: TimerState.DROPPED,
    },
    TimerEvent.FORGET: {TimerState.UNUSED: TimerState.FORGOTTEN},
}
# By the state before the event. A table entry stores its state as an int.
ON_SCHEDULE: Final = TRANSITIONS[TimerEvent.SCHEDULE]
ON_RESCHEDULE: Final = TRANSITIONS[TimerEvent.RESCHEDULE]
ON_CANCEL: Final = TRANSITIONS[TimerEvent.CANCEL]
ON_DELIVER: Final = TRANSITIONS[TimerEvent.DELIVER]
ON_DROP: Final = TRANSITIONS[TimerEvent.DROP]
ON_FORGET: Final = TRANSITIONS[TimerEvent.FORGET]
