"""What a cluster reports about its queues and logs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from tidemill_pipeline.offsets import QueueEnds, SourceQueue


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLog:
    """Begin and end of the log of a broker group, or the error of the request."""

    broker: str
    log_id: str
    log_min: int
    log_end: int
    error: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """Begin and end of the requested queues, and of all logs."""

    queues: dict[SourceQueue, QueueEnds]
    logs: dict[str, BrokerLog]
    # Consumer groups by broker group, if requested.
    groups: dict[str, frozenset[str]] = field(default_factory=dict)

    @property
    def topics(self) -> set[str]:
        """Return the topics of the requested queues."""
        return {queue.topic for queue in self.queues}

    @property
    def deduplicated_topics(self) -> set[str]:
        """Return the topics that know the dedup keys of the property `dedup-key`."""
        return {queue.topic for queue, ends in self.queues.items() if ends.dedup_window_ms}

    @property
    def unreachable(self) -> set[str]:
        """Return the broker groups that did not answer."""
        return {log.broker for log in self.logs.values() if log.error}

    def has_lost(self, queue: SourceQueue) -> bool:
        """Return whether a requested queue no longer exists."""
        log = self.logs.get(queue.broker)
        if log is None:
            return self.has_removed(queue.broker)
        return not log.error and queue not in self.queues

    def has_removed(self, broker: str) -> bool:
        """Return whether a broker group was removed from the cluster.

        A broker group that never answered has no name here, only an address. While one is
        unreachable, the answer is therefore false.
        """
        return broker not in self.logs and bool(self.logs) and not self.unreachable


@final
@dataclass(slots=True)
class OmittedItems:
    """Items that listings omitted."""

    missing: set[str] = field(default_factory=set)  # names that no longer exist
    damaged_count: int = 0  # timers with damaged entries
