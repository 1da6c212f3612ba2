"""The progress of consumer groups, as a scrape and GetActivity show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.numbers import GroupId, TopicId
    from tidemill.broker.engine.queries.inspection import QueueProgress

LAG_AGE_MS_MAX = 1_000  # a scrape computes the lag again unless it is younger


class TopicLag:
    """The progress of a group in all queues of a topic, or of its retry topic."""

    __slots__ = (
        "blocked_count",
        "in_flight_count",
        "locked_queue_count",
        "oldest_popped_at_ms",
        "oldest_ready_at_ms",
        "oldest_unacked_at_ms",
        "ready_count",
    )

    def __init__(self) -> None:
        self.ready_count = self.in_flight_count = 0  # blocked messages are ready, too
        self.blocked_count = self.locked_queue_count = 0
        # 0: no such message
        self.oldest_unacked_at_ms = self.oldest_ready_at_ms = self.oldest_popped_at_ms = 0

    def add(self, queue: QueueProgress) -> None:
        """Add one queue."""
        self.ready_count += queue.ready_count
        self.in_flight_count += queue.in_flight_count
        self.blocked_count += queue.blocked_count
        self.locked_queue_count += queue.is_locked
        self.oldest_unacked_at_ms = _earlier(self.oldest_unacked_at_ms, queue.oldest_unacked_at_ms)
        self.oldest_ready_at_ms = _earlier(self.oldest_ready_at_ms, queue.oldest_ready_at_ms)
        self.oldest_popped_at_ms = _earlier(self.oldest_popped_at_ms, queue.oldest_popped_at_ms)


def _earlier(one_ms: int, other_ms: int) -> int:
    """Return the earlier of two instants; 0 means no instant."""
    return min(one_ms, other_ms) if one_ms and other_ms else one_ms or other_ms


class Lag:
    """The progress of all consumer groups, as of the last pass of `LagReader`."""

    def __init__(self) -> None:
        # By group, topic, and whether the values are of the group's retry topic.
        self.of_topics: dict[tuple[GroupId, TopicId, bool], TopicLag] = {}
        # By group: the topics of the keys above. A group without topics has an empty list.
        self.topics_of_group: dict[GroupId, list[tuple[TopicId, bool]]] = {}
        # By group, topic and level, of PRIORITY topics, with the retries of the level.
        self.of_levels: dict[tuple[GroupId, TopicId, int], TopicLag] = {}
        self.in_flight_count = 0  # of all groups
        self.now_ms = 0
