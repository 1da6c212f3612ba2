"""The states, queries and results of timers."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from tidemill.broker.engine.layout.numbers import QueueId, QueueOffset, TimerId, TopicId

SCHEDULE_QUEUE = QueueId(0)  # schedules: the id of a timer is its queue offset here
COPY_QUEUE = QueueId(1)  # evacuated messages
REMAINS_QUEUE = QueueId(2)  # the intact properties of damaged messages
REPLACED_QUEUE = QueueId(3)  # messages that replace those of pending timers with a dedup key


class TimerState(IntEnum):
    """The state of a timer. All states but UNUSED and PENDING are final."""

    UNUSED = 0  # no timer has the id
    PENDING = 1
    DELIVERED = 2
    CANCELLED = 3
    DROPPED = 4
    FORGOTTEN = 5  # final, but the log no longer has the outcome


class ScheduleResult(NamedTuple):
    """The result of sending a delayed message."""

    queue_offset: QueueOffset  # the timer id, or the queue offset if it was stored at once
    due_at_ms: int  # 0: stored at once


class TimerStatus(NamedTuple):
    """One timer, for operators."""

    timer_id: TimerId
    state: TimerState
    is_quarantined: bool
    topic_id: TopicId
    topic: str  # "" if the topic was deleted
    queue_id: QueueId
    due_at_ms: int
    scheduled_at_ms: int
    size: int  # bytes of the stored message
    head: bytes  # the stored message without user properties and body, b"" if it is unreadable


class DueRange(NamedTuple):
    """The due times from `from_ms` on and before `until_ms`."""

    from_ms: int = 0
    until_ms: int = 0  # 0: no limit

    def has(self, due_at_ms: int) -> bool:
        """Whether a due time is in the range."""
        return due_at_ms >= self.from_ms and (not self.until_ms or due_at_ms < self.until_ms)

    def find_pending(self, rows: np.ndarray) -> np.ndarray:
        """Return which rows of the state table are pending timers with a due time in the range."""
        due = rows["due"].astype(np.int64)
        is_match: np.ndarray = (rows["state"] == TimerState.PENDING) & (due >= self.from_ms)
        return is_match & (due < self.until_ms) if self.until_ms else is_match


class TimerQuery(NamedTuple):
    """The conditions of a search for pending timers, in order of due time."""

    page_size: int
    topic_id: TopicId | None = None  # None: all topics
    due: DueRange = DueRange()
    key: str = ""
    after: tuple[int, int] = (-1, -1)  # (due_at_ms, timer_id) of the last one of the previous page
