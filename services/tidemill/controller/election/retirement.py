"""Retirement of replicas: an operator drains one, or a group gets fewer replicas.

A retired replica still follows, but no message waits for its ack. It is elected only if no other
replica is eligible. A replica retires in steps. Each step is a write:

    marked      no master adds it to its sync state set again (`ReplicationView.retired`)
    not master  the controller asks the master to hand over to a remaining replica
    out         it leaves the sync state set when enough members remain; it is not needed any longer
    forgotten   in a group that gets fewer replicas, when its pod is deleted

A controller removes a member only if the remaining members have all committed messages.
"""

from __future__ import annotations

from tidemill.common.replica_group import ReplicaId, ReplicaRun
from tidemill.controller.election.membership import ChangeRejection
from tidemill.controller.election.record import GroupRecord, Retirement, ids_of, with_sets


def retire(
    record: GroupRecord, replica_id: ReplicaId, why: Retirement
) -> GroupRecord | ChangeRejection:
    """Return the record with a replica retired, or the same record if it is retired already."""
    registered = record.find(replica_id)
    if registered is None:
        return ChangeRejection(f"replica {replica_id} has not registered")
    if registered.retired is not Retirement.NO:
        return record
    others = [id_ for id_ in staying(record) if id_ != replica_id]
    if len(others) < record.min_in_sync:
        return ChangeRejection(
            f"without replica {replica_id} the group has {len(others)} of the"
            f" {record.min_in_sync} replicas of min-in-sync; add a replica or lower min-in-sync"
        )
    in_sync = ids_of(record.sss) & frozenset(others)
    if len(in_sync) < record.min_in_sync:
        return ChangeRejection(
            f"{len(in_sync)} of the other replicas in sync, min-in-sync is {record.min_in_sync};"
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
    """Return the record in which a replica counts again, after its retirement for `why`.

    If it counts already, return the same record.
    """
    registered = record.find(replica_id)
    if registered is None:
        return ChangeRejection(f"replica {replica_id} has not registered")
    if registered.retired is Retirement.NO:
        return record
    if registered.retired is not why:
        return ChangeRejection(
            f"replica {replica_id} is not {why.value} but {registered.retired.value}; change the"
            " number of replicas instead"
        )
    if registered.feature_level < record.feature_level:
        return ChangeRejection(
            f"replica {replica_id} has feature level {registered.feature_level}; its group needs"
            f" {record.feature_level}. Start it with the version of the other replicas"
        )
    after = record.with_replica(replica_id, registered._replace(retired=Retirement.NO))
    return after._replace(version=record.version + 1)


def find_leaver(record: GroupRecord) -> ReplicaRun | None:
    """Return a retired member that may leave the sync state set now."""
    for member in sorted(record.sss):
        is_needed = len(record.sss) <= record.min_in_sync or member == record.master
        if is_retired(record, member.replica_id) and not is_needed:
            return member
    return None


def without(record: GroupRecord, member: ReplicaRun) -> GroupRecord:
    """Return the record without a member that the sync state set does not need."""
    assert member != record.master, "a master belongs to its set"
    assert len(record.sss) > record.min_in_sync, "enough members stay"
    return with_sets(record, record.sss - {member}, frozenset())


def is_retired(record: GroupRecord, replica_id: ReplicaId) -> bool:
    """Whether a replica is retired."""
    registered = record.find(replica_id)
    return registered is not None and registered.retired is not Retirement.NO


def is_out(record: GroupRecord, replica_id: ReplicaId) -> bool:
    """Whether the group does not need a replica: it is retired and in no set, or unknown."""
    if record.find(replica_id) is None:
        return True
    needed = ids_of(record.sss) | record.eligible | record.suspects
    needed |= {one.replica_id for one in record.kept_stores}
    return (
        is_retired(record, replica_id)
        and replica_id not in needed
        and (record.master is None or record.master.replica_id != replica_id)
    )


def with_number(record: GroupRecord, count: int) -> GroupRecord | ChangeRejection:
    """Return the record after one step towards `count` replicas; the same record at the end.

    The highest replica retires first. The next one retires after the record has forgotten it.
    """
    retiring = [id_ for id_, one in record.replicas if one.retired is Retirement.SURPLUS]
    back = next((id_ for id_ in retiring if id_ < count), None)
    if back is not None:
        return stay(record, back, Retirement.SURPLUS)
    surplus = [id_ for id_ in staying(record) if id_ >= count]
    if retiring or not surplus:
        return record
    return retire(record, max(surplus), Retirement.SURPLUS)


def forget(record: GroupRecord, replica_id: ReplicaId) -> GroupRecord | ChangeRejection:
    """Return the record without a replica; its pod was deleted."""
    if record.find(replica_id) is None:
        return record
    if not is_out(record, replica_id):
        return ChangeRejection(f"the group needs replica {replica_id}, or it is not retired")
    replicas = tuple((id_, one) for id_, one in record.replicas if id_ != replica_id)
    return record._replace(replicas=replicas, version=record.version + 1)


def staying(record: GroupRecord) -> list[ReplicaId]:
    """Return the replicas that are not retired."""
    return [id_ for id_, one in record.replicas if one.retired is Retirement.NO]
