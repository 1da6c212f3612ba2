"""Detection of a failed master."""

from __future__ import annotations

from enum import Enum

from tidemill.controller.election.record import GroupRecord
from tidemill.controller.election.sessions import ElectionTiming, GroupObservation


class Failure(Enum):
    """The reason to elect another master; the value is for people."""

    DIED = "the master's process ended"
    RESTARTED = "the master's process restarted"
    SILENT = "no heartbeat from the master"
    STALLED = "the master's event loop stands still"


def find_failure(
    record: GroupRecord, observation: GroupObservation, timing: ElectionTiming
) -> Failure | None:
    """Return why the master counts as failed; None: it works, or there is no master."""
    master = record.master
    if master is None:
        return None
    if record.find_member(master.replica_id) != master:
        return Failure.RESTARTED
    session = observation.sessions.get(master)
    if session is None:
        return None  # `ReplicaSessions.note_record` will give it a first session.
    if session.is_dead:
        return Failure.DIED
    age_ms = observation.now_ms - session.heard_at_ms
    if age_ms > timing.session_timeout_ms:
        # If members still receive its frames, only this controller is cut off from it.
        return None if _is_heard_by_members(record, observation, timing) else Failure.SILENT
    if session.beat is not None and session.beat.page_age_ms + age_ms > timing.stall_limit_ms:
        return Failure.STALLED
    return None


def _is_heard_by_members(
    record: GroupRecord, observation: GroupObservation, timing: ElectionTiming
) -> bool:
    assert record.master is not None, "find_failure returns early without a master"
    for member in record.sss - {record.master}:
        beat = observation.find_live(member, timing)
        if beat is None:
            continue
        silence_ms = dict(beat.peer_silence_ms).get(record.master.replica_id)
        age_ms = observation.now_ms - observation.sessions[member].heard_at_ms
        if silence_ms is not None and silence_ms + age_ms <= timing.peer_silence_ms:
            return True
    return False
