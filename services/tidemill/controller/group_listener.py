"""The observer of a broker group at a controller."""

from __future__ import annotations

from typing import Protocol

from tidemill.common.replica_group import ReplicaId, ReplicationView


class GroupListener(Protocol):
    """The session of a replica, which receives the records of its group."""

    def send_view(self, view: ReplicationView) -> None:
        """Send a new record."""

    def hand_over(self, *, epoch: int, target: ReplicaId) -> None:
        """Ask the master to hand over. The group repeats this while the transfer is wanted."""

    def end_session(self) -> None:
        """End the session: the group no longer exists."""
