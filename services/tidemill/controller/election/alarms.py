"""What people are told of a group that needs them: why, and what would help.

Sentences alone: nothing is decided by them.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.elect import Candidate
from tidemill.controller.election.record import GroupRecord, Retirement, ids_of
from tidemill.controller.election.retirement import staying


def of_nobody_complete(record: GroupRecord, live: list[Candidate]) -> str:
    """Say who could be master and is not there, where nobody who is there may be."""
    there = ids_of(frozenset(one.member for one in live))
    complete = ids_of(record.sss) | record.eligible
    if complete:
        is_one = len(complete) == 1
        return (
            f"{of_replicas(complete)} {'has' if is_one else 'have'} all that is confirmed, and"
            f" {'it is not' if is_one else 'none of them is'} heard of: start"
            f" {'it' if is_one else 'one of them'} again, with its own store"
        )
    kept = [one.replica_id for one in record.kept_stores]
    if kept:
        return (
            f"{of_replicas(kept)} came with another store, and what the one of before has is"
            " needed: start it with the folder or volume that it had"
        )
    missing = record.suspects - there
    if missing:
        return (
            f"all replicas may have lost something, and the longest log of them goes on when"
            f" {of_replicas(missing)} can be compared as well: start what is missing"
        )
    return "no replica has all that was confirmed"


def of_too_few(record: GroupRecord, live: list[Candidate]) -> str:
    """Say who is missing where the sync state set is too small."""
    there = ids_of(frozenset(one.member for one in live))
    members = ids_of(record.sss)
    others = [id_ for id_, _ in record.replicas if id_ not in members]
    silent = [id_ for id_ in others if id_ not in there]
    # A retired one has all of it, and no master takes it into its set: that is no catching up.
    behind = [id_ for id_ in others if id_ in there and id_ in staying(record)]
    drained = drained_of(record, live)
    known = {id_ for id_, _ in record.replicas}
    unknown = [n for n in map(ReplicaId, range(record.min_in_sync)) if n not in known]
    count = f"{len(record.sss)} of the {record.min_in_sync} replicas that must have a message"
    told = [f"nothing is acknowledged: {count} are in sync"]
    if behind:
        told.append(f"{of_replicas(behind)} {_verb(behind)} catching up")
    if drained:
        told.append(f"{of_replicas(drained)} {_verb(drained)} drained, and could count again")
    missing = silent + unknown
    if missing:
        which = "it, or an empty one" if len(missing) == 1 else "them, or empty ones"
        told.append(f"{of_replicas(missing)} {_verb(missing)} not heard of: start {which} in place")
    return "; ".join(told)


def drained_of(record: GroupRecord, live: list[Candidate]) -> list[ReplicaId]:
    """Return who is there, and counts for nothing until an operator takes that back."""
    ids = ((one.member.replica_id, record.find(one.member.replica_id)) for one in live)
    members = ids_of(record.sss)
    return sorted(
        id_
        for id_, registered in ids
        if id_ not in members
        and registered is not None
        and registered.retired is Retirement.DRAINED
    )


def of_fewer(group: str, record: GroupRecord, drained: Iterable[ReplicaId] = ()) -> str:
    """Say how a group goes on with those that it has: first with one that was drained."""
    undo = "".join(
        f". `tidemill cluster drain {group}-{one} --undo` lets it count again at once"
        for one in drained
    )
    fewer = max(len(record.sss), 1)
    return (
        f"{undo}. Where nobody can be started, `tidemill cluster min-in-sync {group} {fewer}`"
        f" goes on with {fewer}; on Kubernetes minInSync of its values does"
    )


def of_rollback(record: GroupRecord, epoch_seen: int) -> str:
    """Say what it means that replicas are ahead of the record."""
    return (
        f"replicas have seen epoch {epoch_seen} and the record has {record.epoch}: the"
        " controllers' store was lost, or restored from a backup. Nothing is decided before the"
        " newest one is there, or a replica is named"
    )


def of_last_resort(group: str, survivor: ReplicaId | None) -> str:
    """Say how a group goes on without those that have everything."""
    if survivor is None:
        return ""
    return (
        f". Where nothing else helps, replica {survivor} has the longest log of those that are"
        f" heard: `tidemill cluster replace {group} --with {survivor} --reason ...`; what it lacks"
        " is lost"
    )


def of_replicas(ids: Iterable[ReplicaId]) -> str:
    """Return replicas as a sentence names them."""
    sorted_ids = [str(one) for one in sorted(ids)]
    if len(sorted_ids) == 1:
        return f"replica {sorted_ids[0]}"
    return f"replicas {', '.join(sorted_ids[:-1])} and {sorted_ids[-1]}"


def _verb(ids: list[ReplicaId]) -> str:
    return "is" if len(ids) == 1 else "are"
