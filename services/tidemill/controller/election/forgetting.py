"""An operator takes away what is known of a broker group: whether its replicas are gone.

Those that come back register in a record that knows nothing, and nothing is decided about them
until an operator says who leads (`replacement.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tidemill.common.replica_group import ReplicaRun
from tidemill.controller.election.membership import ChangeRejection
from tidemill.controller.election.sessions import ElectionTiming, ReplicaSession

# A replica that is silent for less may only stand still, or be cut off: its group is there.
GONE_MS: Final = 30_000


def may_forget(
    sessions: Mapping[ReplicaRun, ReplicaSession], timing: ElectionTiming, *, now_ms: int
) -> ChangeRejection | None:
    """Return why not; None: all have ended, or are silent for long."""
    ages_ms = {
        member: now_ms - session.heard_at_ms
        for member, session in sessions.items()
        if not session.is_dead
    }
    last = min(ages_ms, key=ages_ms.__getitem__, default=None)
    if last is None or ages_ms[last] > GONE_MS:
        return None
    if ages_ms[last] <= timing.session_timeout_ms:
        return ChangeRejection(f"replica {last.replica_id} is there: stop it first")
    return ChangeRejection(
        f"replica {last.replica_id} is not heard of for {ages_ms[last] // 1_000} s: it may stand"
        f" still, and go on. Stop it, or wait until it is silent for {GONE_MS // 1_000} s"
    )
