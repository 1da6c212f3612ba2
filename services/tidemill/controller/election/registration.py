"""Registration of a run that has started.

A registration is a compare-and-swap: it names the run that it replaces. A late or duplicate
registration finds another run in the record and is fenced.

Another store under the same number is a new, empty replica or a mistake, such as a wrong folder or
number. So it does not replace a live run, and it waits if a run was live a moment ago. The record
keeps the previous store while the group may need its messages.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from tidemill.common.feature_level import FIRST_LEVEL
from tidemill.common.replica_group import ReplicaId, ReplicaRun
from tidemill.controller.election.membership import ChangeRejection
from tidemill.controller.election.record import (
    GroupRecord,
    KeptStore,
    RegisteredRun,
    Retirement,
    ids_of,
    with_sets,
)
from tidemill.controller.election.sessions import ElectionTiming, GroupObservation


class Registration(NamedTuple):
    """The request of a replica whose process has started."""

    member: ReplicaRun
    instead_of: str  # the incarnation in the record when this process attached; may be empty
    store_uuid: str
    address: str
    # True: its log has all records that earlier runs of it acked. After an unclean restart it stays
    # False until a registration with False is accepted.
    is_clean: bool
    feature_level: int = FIRST_LEVEL  # of its program


class FencedRun(NamedTuple):
    """The answer to a run that another run of its replica has replaced: it must end."""

    why: str


class RunPresence(Enum):
    """The state of the registered run, for a replica with another store."""

    HEARD = auto()
    # It may be restarting, or this controller has just started.
    HEARD_LATELY = auto()
    SILENT = auto()


def presence_of(
    record: GroupRecord,
    replica_id: ReplicaId,
    observation: GroupObservation,
    timing: ElectionTiming,
) -> RunPresence:
    """Return the state of the registered run of a replica."""
    member = record.find_member(replica_id)
    session = None if member is None else observation.sessions.get(member)
    if session is None:
        return RunPresence.SILENT
    age_ms = observation.now_ms - session.heard_at_ms
    if session.beat is not None and not session.is_dead and age_ms <= timing.session_timeout_ms:
        return RunPresence.HEARD
    return RunPresence.HEARD_LATELY if age_ms <= timing.other_store_ms else RunPresence.SILENT


def register(
    record: GroupRecord, registration: Registration, before: RunPresence = RunPresence.SILENT
) -> GroupRecord | FencedRun | ChangeRejection:
    """Return the record with this run, or the same record if this run is registered already.

    After a ChangeRejection the replica asks again. `before` is the state of the registered run.
    """
    member = registration.member
    known = record.find(member.replica_id)
    if known is not None and known.incarnation == member.incarnation:
        if known.address == registration.address:
            return record
        moved = known._replace(address=registration.address)
        return record.with_replica(member.replica_id, moved)._replace(version=record.version + 1)
    if (known.incarnation if known is not None else "") != registration.instead_of:
        return FencedRun(f"another run of replica {member.replica_id} has registered")
    if known is not None and known.store_uuid != registration.store_uuid:
        return _with_other_store(record, registration, known, before)
    is_clean = registration.is_clean and (known is None or not known.is_unclean)
    after = _with_run(record, registration, known, is_clean=is_clean)
    return _in_place(after, member) if registration.is_clean else _as_suspect(after, member)


def _with_run(
    record: GroupRecord, registration: Registration, known: RegisteredRun | None, *, is_clean: bool
) -> GroupRecord:
    """Return the record with this run registered, and the same sets and version."""
    registered = RegisteredRun(
        store_uuid=registration.store_uuid,
        incarnation=registration.member.incarnation,
        address=registration.address,
        is_unclean=not is_clean,
        retired=Retirement.NO if known is None else known.retired,
        feature_level=registration.feature_level,
    )
    return record.with_replica(registration.member.replica_id, registered)


def _in_place(record: GroupRecord, member: ReplicaRun) -> GroupRecord:
    """Replace the old run of a member in the set: the log of the new run has all its acks."""
    sss = frozenset(member if one.replica_id == member.replica_id else one for one in record.sss)
    return record._replace(version=record.version + 1, sss=sss)


def _as_suspect(record: GroupRecord, member: ReplicaRun) -> GroupRecord:
    """Take a replica out of both sets, so that it is not a candidate."""
    replica_id = member.replica_id
    alone = frozenset({replica_id})
    suspects = record.suspects | alone if _is_needed(record, replica_id) else record.suspects
    return with_sets(
        record._replace(eligible=record.eligible - alone, suspects=suspects),
        _others(record.sss, replica_id),
        frozenset(),
    )


def _with_other_store(
    record: GroupRecord, registration: Registration, known: RegisteredRun, before: RunPresence
) -> GroupRecord | FencedRun | ChangeRejection:
    """Register a run with another store than the registered run."""
    replica_id = registration.member.replica_id
    kept_store = record.find_kept_store(replica_id)
    # A kept store that has come back is the one that the group needs.
    back = (
        kept_store
        if kept_store is not None and kept_store.store_uuid == registration.store_uuid
        else None
    )
    if back is None and before is RunPresence.HEARD:
        return FencedRun(
            f"replica {replica_id} is running at {known.address} with another store; this process"
            " has a wrong replica number or folder. To replace the other one, stop it first"
        )
    if back is None and before is RunPresence.HEARD_LATELY:
        return ChangeRejection(
            f"replica {replica_id} was live a moment ago, with another store; the registration is"
            " repeated"
        )
    has_all = back is not None and not back.is_unclean and registration.is_clean
    alone, none = frozenset({replica_id}), frozenset[ReplicaId]()
    stores = {one.replica_id: one for one in record.kept_stores if one != back}
    is_suspect = replica_id in record.suspects
    if is_suspect or _is_needed(record, replica_id):
        stores[replica_id] = KeptStore(replica_id, known.store_uuid, is_suspect)
    after = _with_run(record, registration, known, is_clean=has_all)._replace(
        eligible=(record.eligible - alone) | (alone if has_all else none),
        suspects=(record.suspects - alone) | (alone if back and not has_all else none),
        kept_stores=tuple(stores[id_] for id_ in sorted(stores)),
    )
    return with_sets(after, _others(record.sss, replica_id), none)


def _is_needed(record: GroupRecord, replica_id: ReplicaId) -> bool:
    """Return whether a replica is in one of the two sets of complete replicas."""
    return replica_id in record.eligible | ids_of(record.sss)


def _others(sss: frozenset[ReplicaRun], replica_id: ReplicaId) -> frozenset[ReplicaRun]:
    return frozenset(one for one in sss if one.replica_id != replica_id)
