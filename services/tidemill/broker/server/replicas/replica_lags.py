"""The lag of each replica, as its master measures it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from tidemill.broker.engine.replication.master import Master
    from tidemill.common.replica_group import ReplicaId, ReplicaRun


class ReplicaLag(NamedTuple):
    """The lag of one replica."""

    behind_bytes: int
    behind_ms: int  # since the replica was last seen to have the whole log


@final
class ReplicaLags:
    """The times at which each replica was seen to have the whole log."""

    def __init__(self) -> None:
        self._caught_up_ms: dict[ReplicaRun, int] = {}

    def measure(
        self, master: Master | None, log_end: int, now_ms: int
    ) -> dict[ReplicaId, ReplicaLag]:
        """Return the lag of each replica; empty if this replica is not the master."""
        if master is None:
            self._caught_up_ms.clear()
            return {}
        lags = {}
        # Ended runs are forgotten: an epoch may last for months, with many of them.
        peers = master.sync_state.peers
        self._caught_up_ms = {run: at for run, at in self._caught_up_ms.items() if run in peers}
        for run in peers:
            acked = master.sync_state.acked(run)
            if acked >= log_end:
                self._caught_up_ms[run] = now_ms
            behind_ms = now_ms - self._caught_up_ms.setdefault(run, now_ms)
            lags[run.replica_id] = ReplicaLag(max(log_end - acked, 0), behind_ms)
        return lags
