"""What a cluster reports about its queues and logs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from tidemill_pipeline.offsets import QueueEnds, SourceQueue


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLog:
    """Where the log of a broker group begins and ends, or why it could not be asked."""

    broker: str
    log_id: str
    log_min: int
    log_end: int
    error: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """Where everything ends: queues of the topics that were asked for, and logs."""

    queues: dict[SourceQueue, QueueEnds]
    logs: dict[str, BrokerLog]
    # Consumer groups by broker group, where they were asked for.
    groups: dict[str, frozenset[str]] = field(default_factory=dict)

    @property
    def unreachable(self) -> set[str]:
        """Return the broker groups that gave no answer."""
        return {log.broker for log in self.logs.values() if log.error}

    def has_lost(self, queue: SourceQueue) -> bool:
        """Say whether a queue, which was asked for, is not there any more."""
        log = self.logs.get(queue.broker)
        if log is None:
            return self.has_removed(queue.broker)
        return not log.error and queue not in self.queues

    def has_removed(self, broker: str) -> bool:
        """Say whether a broker group was removed from the cluster.

        One that never told its name is known by its address: with it away, nobody can say.
        """
        return broker not in self.logs and bool(self.logs) and not self.unreachable


@final
@dataclass(slots=True)
class OmittedItems:
    """What listings have left out."""

    missing: set[str] = field(default_factory=set)  # names that are not there any more
    damaged_count: int = 0  # timers of which nobody can say anything
