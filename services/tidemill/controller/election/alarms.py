"""The texts of alarms: the reason and the remedy. No decision depends on them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tidemill.common.replica_group import ReplicaId, ReplicaRun
from tidemill.controller.election.elect import Candidate
from tidemill.controller.election.record import GroupRecord, Retirement, ids_of
from tidemill.controller.election.retirement import staying
from tidemill.controller.election.rollback import SeenRecord


def of_nobody_complete(record: GroupRecord, live: list[Candidate]) -> str:
    """Return the alarm for a group without an eligible live replica."""
    live_ids = ids_of(frozenset(one.member for one in live))
    complete = ids_of(record.sss) | record.eligible
    if complete:
        is_one = len(complete) == 1
        return (
            f"only {of_replicas(complete)} {'has' if is_one else 'have'} all confirmed messages,"
            f" and the controllers do not hear {'it' if is_one else 'them'}; if"
            f" {'it is' if is_one else 'they are'} down, start {'it' if is_one else 'one of them'}"
            " again with its own store"
        )
    kept_ids = [one.replica_id for one in record.kept_stores]
    if kept_ids:
        return (
            f"{of_replicas(kept_ids)} started with another store, and the group needs the previous"
            " one; start it with its previous folder or volume"
        )
    missing = record.suspects - live_ids
    if missing:
        return (
            f"all replicas restarted uncleanly, and {of_replicas(missing)} {_verb(missing)} missing"
            " in the comparison of their logs; start all replicas"
        )
    return "no replica has all confirmed messages"


def of_too_few(record: GroupRecord, live: list[Candidate]) -> str:
    """Return the alarm for a sync state set that is too small."""
    live_ids = ids_of(frozenset(one.member for one in live))
    members = ids_of(record.sss)
    others = [id_ for id_, _ in record.replicas if id_ not in members]
    silent = [id_ for id_ in others if id_ not in live_ids]
    # A retired replica has caught up, but no master takes it into its set.
    behind = [id_ for id_ in others if id_ in live_ids and id_ in staying(record)]
    drained = drained_of(record, live)
    known = {id_ for id_, _ in record.replicas}
    unknown = [n for n in map(ReplicaId, range(record.min_in_sync)) if n not in known]
    in_sync = f"{len(record.sss)} replica{'' if len(record.sss) == 1 else 's'} in sync"
    parts = [f"no message is acknowledged: {in_sync}, min-in-sync is {record.min_in_sync}"]
    if behind:
        parts.append(f"{of_replicas(behind)} {_verb(behind)} catching up")
    if drained:
        parts.append(f"{of_replicas(drained)} {_verb(drained)} drained")
    missing = silent + unknown
    if missing:
        is_one = len(missing) == 1
        down = "is down or hangs; restart it" if is_one else "are down or hang; restart them"
        old = "with an empty data directory if the old one is lost"
        parts.append(f"{of_replicas(missing)} {down}, {old}")
    return "; ".join(parts)


def drained_of(record: GroupRecord, live: list[Candidate]) -> list[ReplicaId]:
    """Return live replicas that do not count until an operator undoes their drain."""
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
    """Return the commands to continue with the live replicas of a group."""
    undo = "".join(
        f". To let replica {one} count again: `tidemill replica undrain {group}-{one}`"
        for one in drained
    )
    fewer = max(len(record.sss), 1)
    return (
        f"{undo}. To continue with fewer replicas: `tidemill broker-group set {group} --min-in-sync"
        f" {fewer}`, or on Kubernetes minInSync {fewer} in the values"
    )


def of_full_master(record: GroupRecord, with_room: Collection[ReplicaRun]) -> str:
    """Return the alarm for a master whose disk is full, while too few others can take over."""
    assert record.master is not None, "each epoch has a master"
    count = f"{len(with_room)} other replica{'' if len(with_room) == 1 else 's'} in sync"
    return (
        f"no message is accepted: the disk of the master, replica {record.master.replica_id}, is"
        f" full, and {count} {'has' if len(with_room) == 1 else 'have'} room (min-in-sync is"
        f" {record.min_in_sync}); enlarge the volumes, shorten the retention, or delete topics"
    )


def of_rollback(record: GroupRecord, seen: SeenRecord) -> str:
    """Return the alarm for replicas that are ahead of the record."""
    ahead = (
        f"epoch {seen.epoch} and the record has epoch {record.epoch}"
        if seen.epoch > record.epoch
        else f"version {seen.version} of the record, which has version {record.version}"
    )
    return (
        f"replicas have seen {ahead}: the store of the controllers was lost or restored from a"
        " backup; restore its newest state, or name a master"
    )


def of_not_compared(missing: Collection[ReplicaId], *, is_in_epoch: bool) -> str:
    """Return why an alarm names no master.

    A record that is outdated `is_in_epoch` registers no replica.
    """
    is_one = len(missing) == 1
    restarted = (
        f" (if {'it has' if is_one else 'they have'} restarted since, only the newest record"
        f" registers {'it' if is_one else 'them'})"
        if is_in_epoch
        else ""
    )
    return (
        f". This alarm names no replica, because {of_replicas(missing)} {_verb(missing)} missing in"
        f" the comparison of the logs and may have the longest; start"
        f" {'it' if is_one else 'them'}{restarted}. If {'it is' if is_one else 'they are'} lost,"
        " choose another one with `tidemill broker-group transfer --unclean`"
    )


def of_last_resort(group: str, survivor: ReplicaId | None) -> str:
    """Return the command to continue without the complete replicas of a group."""
    if survivor is None:
        return ""
    return (
        f". Last resort: `tidemill broker-group transfer {group} --unclean --to {survivor} --reason"
        f" ...` makes replica {survivor} master, which has the longest log of the live replicas;"
        " messages that it lacks are lost"
    )


def of_replicas(ids: Iterable[ReplicaId]) -> str:
    """Return replicas in words, such as `replicas 0, 1 and 2`."""
    sorted_ids = [str(one) for one in sorted(ids)]
    if len(sorted_ids) == 1:
        return f"replica {sorted_ids[0]}"
    return f"replicas {', '.join(sorted_ids[:-1])} and {sorted_ids[-1]}"


def _verb(ids: Collection[ReplicaId]) -> str:
    return "is" if len(ids) == 1 else "are"
