"""A replica has started: which run of it counts from now on, and what it may claim.

A registration is itself a compare-and-swap: it names the run in whose place it comes. One that is
late, or comes twice over two controllers, finds another run there and is fenced.

Another store under the same number is a new, empty replica, or a slip: the wrong folder, the wrong
number. So it does not take the place of a run that is heard, it waits for one that was heard a
moment ago, and what the store of before has is not forgotten while somebody may need it.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

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
from tidemill.controller.election.sessions import ElectionTiming, Sight


class Registration(NamedTuple):
    """What a replica says of itself when its process has started."""

    member: ReplicaRun
    instead_of: str  # the incarnation that the record named when this process asked; or none
    store_uuid: str
    address: str
    # Whether its log has all that any earlier run of it has acked (failover.md 3). A replica says
    # no until a registration that said no was accepted, however often it starts meanwhile.
    is_clean: bool
    feature_level: int = 0


class FencedRun(NamedTuple):
    """Another run of this replica has registered since: this one ends."""

    why: str


class RunPresence(Enum):
    """Whether the run that is registered is there, for who comes with another store."""

    HEARD = auto()
    # It may be starting again, or this controller has just begun to listen.
    WAS_HEARD = auto()
    GONE = auto()


def presence_of(
    record: GroupRecord, replica_id: ReplicaId, sight: Sight, timing: ElectionTiming
) -> RunPresence:
    """Return what is known of the registered run of a replica."""
    member = record.find_member(replica_id)
    session = None if member is None else sight.sessions.get(member)
    if session is None:
        return RunPresence.GONE
    age_ms = sight.now_ms - session.heard_at_ms
    if session.beat is not None and not session.is_dead and age_ms <= timing.session_timeout_ms:
        return RunPresence.HEARD
    return RunPresence.WAS_HEARD if age_ms <= timing.other_store_ms else RunPresence.GONE


def register(
    record: GroupRecord, registration: Registration, before: RunPresence = RunPresence.GONE
) -> GroupRecord | FencedRun | ChangeRejection:
    """Return the record with this run of the replica; the same where it is registered already.

    Refused: it should ask again. `before` is the presence of the run that is registered.
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
    """Return the record with this run registered; the sets and the version stay."""
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
    """Put the new run of a member in its old one's place: its log has what that one has acked."""
    sss = frozenset(member if one.replica_id == member.replica_id else one for one in record.sss)
    return record._replace(version=record.version + 1, sss=sss)


def _as_suspect(record: GroupRecord, member: ReplicaRun) -> GroupRecord:
    """Take a replica out of both sets, before it can be a candidate."""
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
    """Register a run with another store than the run that it comes in place of."""
    replica_id = registration.member.replica_id
    kept = record.find_kept_store(replica_id)
    # The store that was there before, and has come back, is what others wait for.
    back = kept if kept is not None and kept.store_uuid == registration.store_uuid else None
    if back is None and before is RunPresence.HEARD:
        return FencedRun(
            f"replica {replica_id} is running at {known.address} with another store: this one has"
            " another replica's number, or a folder that is not its own. Where the other one is"
            " to be replaced, stop it first"
        )
    if back is None and before is RunPresence.WAS_HEARD:
        return ChangeRejection(f"replica {replica_id} was there a moment ago, with another store")
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
    """Whether a replica is in one of the two sets of those that have everything."""
    return replica_id in record.eligible | ids_of(record.sss)


def _others(sss: frozenset[ReplicaRun], replica_id: ReplicaId) -> frozenset[ReplicaRun]:
    return frozenset(one for one in sss if one.replica_id != replica_id)
