"""Replicas that are to count no more: an operator empties one, or a group gets fewer of them.

A replica that is retired goes on following, and is in no set once it has left: nobody waits for
it, and it is elected only where nobody else could be. It leaves by steps, each of them a write:

    marked      no master takes it into its set again (`ReplicationView.retired`)
    not master  the master is asked to hand over, to one that stays
    out         of the sync state set, when enough are left without it; then nothing needs it
    forgotten   of a group that gets fewer, when its pod is gone

What a controller takes out of a set was complete, and is not needed: those that are left have all
that is committed (failover.md, Lemma 2: a controller only removes).
"""

from __future__ import annotations

from tidemill.common.replica_group import ReplicaId, ReplicaRun
from tidemill.controller.election.membership import ChangeRejection
from tidemill.controller.election.record import GroupRecord, Retirement, ids_of, with_sets


def retire(
    record: GroupRecord, replica_id: ReplicaId, why: Retirement
) -> GroupRecord | ChangeRejection:
    """Return the record in which a replica is to leave; the same where it is already."""
    registered = record.find(replica_id)
    if registered is None:
        return ChangeRejection(f"no replica {replica_id} has registered")
    if registered.retired is not Retirement.NO:
        return record
    others = [id_ for id_ in staying(record) if id_ != replica_id]
    if len(others) < record.min_in_sync:
        return ChangeRejection(
            f"{len(others)} would be left without replica {replica_id}, and"
            f" {record.min_in_sync} must have a message before it is acknowledged"
        )
    in_sync = ids_of(record.sss) & frozenset(others)
    if len(in_sync) < record.min_in_sync:
        return ChangeRejection(
            f"only {len(in_sync)} of the others are in sync, and {record.min_in_sync} must be:"
            " wait until they have caught up"
        )
    after = record.with_replica(replica_id, registered._replace(retired=why))
    transfer = None if record.transfer == replica_id else record.transfer
    after = after._replace(version=record.version + 1, transfer=transfer)
    member = find_leaver(after)
    return after if member is None else without(after, member)._replace(version=after.version)


def stay(
    record: GroupRecord, replica_id: ReplicaId, why: Retirement
) -> GroupRecord | ChangeRejection:
    """Return the record in which a replica that was retired for `why` counts again.

    The same where it does.
    """
    registered = record.find(replica_id)
    if registered is None:
        return ChangeRejection(f"no replica {replica_id} has registered")
    if registered.retired is Retirement.NO:
        return record
    if registered.retired is not why:
        return ChangeRejection(
            f"replica {replica_id} is not {why.value} but {registered.retired.value}:"
            " how many replicas are wanted decides"
        )
    after = record.with_replica(replica_id, registered._replace(retired=Retirement.NO))
    return after._replace(version=record.version + 1)


def find_leaver(record: GroupRecord) -> ReplicaRun | None:
    """Return a retired member that may leave the sync state set now, if there is one."""
    for member in sorted(record.sss):
        is_needed = len(record.sss) <= record.min_in_sync or member == record.master
        if is_retired(record, member.replica_id) and not is_needed:
            return member
    return None


def without(record: GroupRecord, member: ReplicaRun) -> GroupRecord:
    """Return the record whose sync state set lacks a member that is not needed."""
    assert member != record.master, "a master belongs to its set"
    assert len(record.sss) > record.min_in_sync, "enough are left"
    return with_sets(record, record.sss - {member}, frozenset())


def is_retired(record: GroupRecord, replica_id: ReplicaId) -> bool:
    """Whether a replica is to count no more."""
    registered = record.find(replica_id)
    return registered is not None and registered.retired is not Retirement.NO


def is_out(record: GroupRecord, replica_id: ReplicaId) -> bool:
    """Whether nothing is lost with a replica: it is retired and in no set, or was never here."""
    if record.find(replica_id) is None:
        return True
    needed = ids_of(record.sss) | record.eligible | record.suspects
    needed |= {one.replica_id for one in record.kept_stores}
    return (
        is_retired(record, replica_id)
        and replica_id not in needed
        and (record.master is None or record.master.replica_id != replica_id)
    )


def with_number(record: GroupRecord, wanted: int) -> GroupRecord | ChangeRejection:
    """Return the next record on the way to a number of replicas; the same: nothing is to be done.

    The highest goes first, and alone: the next one is retired when it is forgotten.
    """
    leaving = [id_ for id_, one in record.replicas if one.retired is Retirement.SURPLUS]
    back = next((id_ for id_ in leaving if id_ < wanted), None)
    if back is not None:
        return stay(record, back, Retirement.SURPLUS)
    surplus = [id_ for id_ in staying(record) if id_ >= wanted]
    if leaving or not surplus:
        return record
    return retire(record, max(surplus), Retirement.SURPLUS)


def forget(record: GroupRecord, replica_id: ReplicaId) -> GroupRecord | ChangeRejection:
    """Return the record without a replica whose pod is gone for good."""
    if record.find(replica_id) is None:
        return record
    if not is_out(record, replica_id):
        return ChangeRejection(f"replica {replica_id} is needed, or not retired")
    kept = tuple((id_, one) for id_, one in record.replicas if id_ != replica_id)
    return record._replace(replicas=kept, version=record.version + 1)


def staying(record: GroupRecord) -> list[ReplicaId]:
    """Return the replicas that count, and are to."""
    return [id_ for id_, one in record.replicas if one.retired is Retirement.NO]
