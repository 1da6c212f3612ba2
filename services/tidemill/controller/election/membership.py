"""A master proposes a sync state set: what must be true before it is written (failover.md 11)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from tidemill.common.replica_group import Proposal, ReplicaRun
from tidemill.controller.election.record import GroupRecord, Retirement, ids_of, with_sets


class ChangeRejection(NamedTuple):
    """A request does not hold against this record. Nothing is written."""

    why: str


def with_min_in_sync(
    record: GroupRecord, wanted: int, *, is_led: bool
) -> GroupRecord | ChangeRejection:
    """Return the record with another minimum; the same where it has that.

    With a set that is large enough for it, nobody else counts as having everything any more: so its
    master must be there to go on.
    """
    staying = [id_ for id_, one in record.replicas if one.retired is Retirement.NO]
    if wanted == record.min_in_sync:
        return record
    if not 1 <= wanted <= len(staying):
        return ChangeRejection(f"it may be 1 to {len(staying)}: as many replicas count")
    if not is_led:
        return ChangeRejection("the group has no master that is heard")
    return with_sets(record._replace(min_in_sync=wanted), record.sss, frozenset())


def change_sync_state_set(
    record: GroupRecord, proposal: Proposal, live: AbstractSet[ReplicaRun]
) -> GroupRecord | ChangeRejection:
    """Return the record with the proposed set.

    Whoever joins must be `live`, and is clean by joining: its master has seen this run of it catch
    up. Who leaves a set that becomes too small has all that is committed, and is eligible.
    """
    if (record.epoch, record.master) != (proposal.epoch, proposal.master):
        return ChangeRejection(f"epoch {record.epoch} has another master")
    if record.version != proposal.version:
        return ChangeRejection(
            f"it was made against version {proposal.version}, not {record.version}"
        )
    if proposal.master not in proposal.sss:
        return ChangeRejection("a master belongs to its set")
    after = record
    for member in sorted(proposal.sss - record.sss):
        registered = record.find(member.replica_id)
        if registered is None or registered.incarnation != member.incarnation:
            return ChangeRejection(f"replica {member.replica_id} has registered as another run")
        if registered.retired is not Retirement.NO or member not in live:
            return ChangeRejection(f"replica {member.replica_id} is retired, or not heard of")
        after = after.with_replica(member.replica_id, registered._replace(is_unclean=False))
    if len(ids_of(proposal.sss)) != len(proposal.sss):
        return ChangeRejection("two runs of one replica")
    return with_sets(after, proposal.sss, ids_of(record.sss - proposal.sss))
