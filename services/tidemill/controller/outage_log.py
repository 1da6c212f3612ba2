"""The last election of a group that this controller made, and how long its outage lasted.

No decision depends on it. People and metrics read the duration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from tidemill.controller.election.history import HANDED_OVER, Outage, kind_of
from tidemill.controller.election.record import GroupRecord, Transition
from tidemill.controller.election.sessions import Heartbeat, ReplicaSession

if TYPE_CHECKING:
    from tidemill.common.clock import Clock
    from tidemill.common.replica_group import ReplicaRun
    from tidemill.controller.metrics import ControllerMetrics


class _Election(NamedTuple):
    """An election of this controller."""

    transition: Transition
    elected_at_ms: int  # monotonic
    outage: Outage | None = None  # None: no commit of the new master yet


@final
class OutageLog:
    """The last election of one group at this controller."""

    def __init__(self, group: str, clock: Clock, metrics: ControllerMetrics) -> None:
        self._group = group
        self._clock = clock
        self._metrics = metrics
        self._last: _Election | None = None

    @property
    def outage(self) -> Outage | None:
        """The outage of the last election, when it is over."""
        return None if self._last is None else self._last.outage

    def note_election(self, record: GroupRecord, before: ReplicaSession | None) -> GroupRecord:
        """Return a record of a new epoch with the times of its election.

        `before` is the session of the previous master.
        """
        last, now_ms = record.history[-1], self._clock.monotonic_ms()
        if before is not None and last.reason != HANDED_OVER:
            last = last._replace(detected_ms=now_ms - before.heard_at_ms)
        last = last._replace(at_ms=self._clock.wall_ms())
        self._last = _Election(last, now_ms)
        return record._replace(history=(*record.history[:-1], last))

    def note_heartbeat(self, record: GroupRecord, run: ReplicaRun, beat: Heartbeat) -> None:
        """End the outage if `beat` reports the first commit of the new master."""
        election = self._last
        if election is None or election.outage is not None:
            return
        last = election.transition
        if beat.writable_epoch == last.epoch == record.epoch and record.master == run:
            away_ms = last.detected_ms + self._clock.monotonic_ms() - election.elected_at_ms
            self._last = election._replace(outage=Outage(last.epoch, away_ms))
            if last.source is not None:
                self._metrics.observe_failover(self._group, kind_of(last.reason), away_ms)
