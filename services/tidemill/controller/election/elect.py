"""The next master: eligibility, preference, and the first sets of its epoch.

Safety depends on `with_master` alone. Preference among eligible replicas does not affect it.
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
    """A live run with its last heartbeat."""

    member: ReplicaRun
    beat: Heartbeat


def may_be_master(record: GroupRecord, member: ReplicaRun) -> bool:
    """Return whether a run has all committed messages, according to the record."""
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
    """Return the record of the next epoch, with `master`.

    Live members stay in the set: each has all committed messages. Other members stay eligible while
    the new set is too small.
    """
    assert may_be_master(record, master), f"{master} may lack committed messages"
    sss = frozenset({master}) | (record.sss & live)
    return _begin(record, master, sss, also_eligible=ids_of(record.sss), reason=reason)


def with_founder(record: GroupRecord, founder: ReplicaRun, *, log_epoch: int) -> GroupRecord:
    """Return the first epoch, above the epochs in the founder's log, which may be older."""
    assert record.epoch == 0, "a group is founded once"
    first = record._replace(epoch=log_epoch)
    return _begin(first, founder, frozenset({founder}), also_eligible=frozenset(), reason=FOUNDED)


def with_survivor(record: GroupRecord, survivor: ReplicaRun, *, reason: str) -> GroupRecord:
    """Return the next epoch, with a master that may lack committed messages.

    `unclean_since` records this.

    The last resort, for suspects and for a replica that an operator names.
    """
    cleared = record._replace(
        eligible=frozenset(), suspects=frozenset(), kept_stores=(), unclean_since=record.epoch + 1
    )
    sss = frozenset({survivor})
    after = _begin(cleared, survivor, sss, also_eligible=frozenset(), reason=reason)
    registered = record.find(survivor.replica_id)
    assert registered is not None, "a master has registered"
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
    """Return the candidate with the longest log of the latest epoch; ties: the lowest id."""
    return max(candidates, key=_merit, default=None)


def _merit(candidate: Candidate) -> tuple[int, int, int]:
    beat = candidate.beat
    return (beat.log_epoch, beat.log_end, -candidate.member.replica_id)
