"""A planned hand-over: sends wait until the target has the whole log, then it is elected.

Safety does not depend on it, because the target is a member of the sync state set. Sends wait so
that each of them gets a reply.
"""

from __future__ import annotations

from typing import final

from tidemill.broker.engine.replication.config import ReplicationConfig
from tidemill.common.replica_group import ReplicaRun


@final
class Transfer:
    """One attempt to hand over to `target`."""

    def __init__(self, target: ReplicaRun, config: ReplicationConfig, now_ms: int) -> None:
        self.target = target
        self.is_requested = False
        self.began_at_ms = now_ms
        self._ends_at_ms = now_ms + config.transfer_timeout_ms

    def has_failed(self, now_ms: int) -> bool:
        """Return whether the transfer took too long. The master then accepts sends again."""
        return now_ms >= self._ends_at_ms

    def is_ready(self, *, acked: int, log_end: int) -> bool:
        """Return whether the target has the whole log and no election was requested yet."""
        return not self.is_requested and acked == log_end
