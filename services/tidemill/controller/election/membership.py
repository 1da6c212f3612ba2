"""Checks of a sync state set that a master proposes."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from tidemill.common.replica_group import Proposal, ReplicaRun
from tidemill.controller.election.record import GroupRecord, Retirement, ids_of, with_sets


class ChangeRejection(NamedTuple):
    """The reason why a request does not fit the record. Nothing is written."""

    why: str


def with_min_in_sync(
    record: GroupRecord, minimum: int, *, is_led: bool
) -> GroupRecord | ChangeRejection:
    """Return the record with another minimum, or the same record if it has that minimum.

    The group must have a live master: if the set is large enough for the new minimum, no replica
    outside the set stays eligible.
    """
    staying = [id_ for id_, one in record.replicas if one.retired is Retirement.NO]
    if minimum == record.min_in_sync:
        return record
    if not 1 <= minimum <= len(staying):
        return ChangeRejection(
            f"min-in-sync {minimum} is outside 1 to {len(staying)}, the number of replicas that"
            " are not retired"
        )
    if not is_led:
        return ChangeRejection("the group has no live master; retry when it has one")
    return with_sets(record._replace(min_in_sync=minimum), record.sss, frozenset())


def change_sync_state_set(
    record: GroupRecord, proposal: Proposal, live: AbstractSet[ReplicaRun]
) -> GroupRecord | ChangeRejection:
    """Return the record with the proposed set.

    A run that joins must be `live`. It becomes clean, because the master has seen this run catch
    up. A replica that leaves a set which becomes too small has all committed messages, so it is
    eligible.
    """
    if (record.epoch, record.master) != (proposal.epoch, proposal.master):
        return ChangeRejection(f"epoch {record.epoch} has another master")
    if record.version != proposal.version:
        return ChangeRejection(
            f"the proposal is for version {proposal.version}, the record has {record.version}"
        )
    if proposal.master not in proposal.sss:
        return ChangeRejection("the proposed set lacks its master")
    after = record
    for member in sorted(proposal.sss - record.sss):
        registered = record.find(member.replica_id)
        if registered is None or registered.incarnation != member.incarnation:
            return ChangeRejection(f"replica {member.replica_id} has registered another run")
        if registered.retired is not Retirement.NO or member not in live:
            return ChangeRejection(f"replica {member.replica_id} is retired or not live")
        if registered.feature_level < record.feature_level:
            return ChangeRejection(
                f"replica {member.replica_id} has feature level {registered.feature_level}; the"
                f" group needs {record.feature_level}"
            )
        after = after.with_replica(member.replica_id, registered._replace(is_unclean=False))
    if len(ids_of(proposal.sss)) != len(proposal.sss):
        return ChangeRejection("the proposed set has two runs of one replica")
    return with_sets(after, proposal.sss, ids_of(record.sss - proposal.sss))
