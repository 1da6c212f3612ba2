"""What the engine says of timers, and what it is asked."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from tidemill.broker.engine.layout.numbers import QueueId, QueueOffset, TimerId, TopicId
from tidemill.message.resource_names import HIDDEN_TOPIC_PREFIX

TIMER_TOPIC = f"{HIDDEN_TOPIC_PREFIX}TIMER"  # hidden: delayed messages wait here
SCHEDULE_QUEUE = QueueId(0)  # of the hidden topic: a timer's id is its queue offset
COPY_QUEUE = QueueId(1)  # evacuated messages
REMAINS_QUEUE = QueueId(2)  # what is left of those that could not be copied


class TimerState(IntEnum):
    """Where a timer is in its life; all but PENDING are final."""

    UNUSED = 0  # the id was never given out
    PENDING = 1
    DELIVERED = 2
    CANCELLED = 3
    DROPPED = 4
    FORGOTTEN = 5  # final, and how is not known any more


class ScheduleResult(NamedTuple):
    """What became of a delayed message that was sent."""

    queue_offset: QueueOffset  # the timer id, or the queue offset of a message that was due already
    due_at_ms: int  # 0: stored at once


class TimerStatus(NamedTuple):
    """One timer, for inspection."""

    timer_id: TimerId
    state: TimerState
    is_quarantined: bool
    topic_id: TopicId
    topic: str  # "" when the topic is gone
    queue_id: QueueId
    due_at_ms: int
    scheduled_at_ms: int
    size: int  # bytes of the stored message
    head: bytes  # the stored message without user properties and body; b"" when it is gone


class TimerQuery(NamedTuple):
    """Which pending timers are wanted; those due first come first."""

    page_size: int
    topic_id: TopicId | None = None  # of one topic alone
    due_from_ms: int = 0
    due_to_ms: int = 0  # exclusive; 0: no limit
    key: str = ""
    after: tuple[int, int] = (-1, -1)  # (due_at_ms, timer_id) of the last one of the page before
