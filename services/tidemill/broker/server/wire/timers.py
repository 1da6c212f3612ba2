"""Timers as messages of BrokerAdmin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.timer.status import TimerStatus


def timer_message(status: TimerStatus, *, was_cancelled: bool = False) -> pb.Timer:
    """Return a timer as a message."""
    return pb.Timer(
        timer_id=status.timer_id,
        state=pb.TIMER_STATE_QUARANTINED
        if status.is_quarantined
        else pb.TimerState.ValueType(status.state.value),
        topic=status.topic,
        queue_id=status.queue_id,
        due_at_ms=status.due_at_ms,
        scheduled_at_ms=status.scheduled_at_ms,
        size=status.size,
        head=status.head,
        was_cancelled=was_cancelled,
    )
