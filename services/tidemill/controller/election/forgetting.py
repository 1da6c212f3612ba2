"""The check before an operator removes the record of a broker group: no replica may be live.

A replica that comes back registers in a new record. Controllers decide nothing about it until an
operator names a master (`replacement.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tidemill.common.replica_group import ReplicaRun
from tidemill.controller.election.membership import ChangeRejection
from tidemill.controller.election.sessions import ElectionTiming, ReplicaSession

# A replica with a shorter silence may only stand still, or be cut off.
SILENCE_MS: Final = 30_000


def may_forget(
    sessions: Mapping[ReplicaRun, ReplicaSession], timing: ElectionTiming, *, now_ms: int
) -> ChangeRejection | None:
    """Return the reason against it; None: all replicas have ended, or are silent long enough."""
    ages_ms = {
        member: now_ms - session.heard_at_ms
        for member, session in sessions.items()
        if not session.is_dead
    }
    last = min(ages_ms, key=ages_ms.__getitem__, default=None)
    if last is None or ages_ms[last] > SILENCE_MS:
        return None
    if ages_ms[last] <= timing.session_timeout_ms:
        return ChangeRejection(f"replica {last.replica_id} is live; stop it first")
    return ChangeRejection(
        f"replica {last.replica_id} has been silent for {ages_ms[last] // 1_000} s and may come"
        f" back; stop it, or wait until it has been silent for {SILENCE_MS // 1_000} s"
    )
