"""Another master: who may be, who is preferred, and the sets that its epoch begins with.

failover.md 12. What is safe is in `with_master`; whom to prefer among those who are is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from tidemill.common.replica_group import ReplicaId, ReplicaRun
from tidemill.controller.election.history import FOUNDED
from tidemill.controller.election.record import (
    HISTORY_MAX,
    GroupRecord,
    Transition,
    ids_of,
    with_sets,
)
from tidemill.controller.election.sessions import Heartbeat


class Candidate(NamedTuple):
    """A run that is live, and what it has said last."""

    member: ReplicaRun
    beat: Heartbeat


def may_be_master(record: GroupRecord, member: ReplicaRun) -> bool:
    """Whether a run holds all that is committed, as far as the record says."""
    registered = record.find(member.replica_id)
    return member in record.sss or (
        member.replica_id in record.eligible
        and registered is not None
        and registered.incarnation == member.incarnation
        and not registered.is_unclean
    )


def with_master(
    record: GroupRecord, master: ReplicaRun, live: AbstractSet[ReplicaRun], *, reason: str = ""
) -> GroupRecord:
    """Return the record of the next epoch, whose master is `master`.

    Live members go with it: each holds all that is committed. Who does not stays eligible while the
    new set is too small.
    """
    assert may_be_master(record, master), f"{master} may lack what is committed"
    sss = frozenset({master}) | (record.sss & live)
    return _begin(record, master, sss, also_eligible=ids_of(record.sss), reason=reason)


def with_founder(record: GroupRecord, founder: ReplicaRun, *, log_epoch: int) -> GroupRecord:
    """Return the first epoch, above those of the founder's log: it may be older than its group."""
    assert record.epoch == 0, "a group is founded once"
    first = record._replace(epoch=log_epoch)
    return _begin(first, founder, frozenset({founder}), also_eligible=frozenset(), reason=FOUNDED)


def with_survivor(record: GroupRecord, survivor: ReplicaRun, *, reason: str) -> GroupRecord:
    """Return an epoch whose master may lack what was committed: from here on the record says so.

    The last resort: of suspects, or of a replica that an operator has named.
    """
    cleared = record._replace(
        eligible=frozenset(), suspects=frozenset(), kept_stores=(), unclean_since=record.epoch + 1
    )
    sss = frozenset({survivor})
    after = _begin(cleared, survivor, sss, also_eligible=frozenset(), reason=reason)
    registered = record.find(survivor.replica_id)
    assert registered is not None, "who is elected has registered"
    return after.with_replica(survivor.replica_id, registered._replace(is_unclean=False))


def _begin(
    record: GroupRecord,
    master: ReplicaRun,
    sss: frozenset[ReplicaRun],
    *,
    also_eligible: frozenset[ReplicaId],
    reason: str,
) -> GroupRecord:
    source = None if record.master is None else record.master.replica_id
    epoch = record.epoch + 1
    entry = Transition(epoch, source, master.replica_id, reason, at_ms=0, detected_ms=0)
    return with_sets(record, sss, also_eligible)._replace(
        epoch=epoch, master=master, transfer=None, history=(*record.history, entry)[-HISTORY_MAX:]
    )


def best_of(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the candidate with the longest log of the latest epoch, then the lowest replica id."""
    return max(candidates, key=_merit, default=None)


def _merit(candidate: Candidate) -> tuple[int, int, int]:
    beat = candidate.beat
    return (beat.log_epoch, beat.log_end, -candidate.member.replica_id)
