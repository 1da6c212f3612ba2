"""A planned hand-over (failover.md 13.4): sends wait until the target has all, then it is elected.

Nothing here is needed for safety: the target is a member of the sync state set. Sends wait so that
none of them is left without an answer.
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
        """Whether it took too long: sends are taken again."""
        return now_ms >= self._ends_at_ms

    def is_ready(self, *, acked: int, log_end: int) -> bool:
        """Whether the target has all and nobody was asked yet; then it is time to."""
        return not self.is_requested and acked == log_end
