"""The group record: the only thing about replicas that is shared and changed (failover.md 4).

Invariants (failover.md Part VII):

- `epoch` grows by one with each election, `version` by one with each write (F-1, F-2).
- Each member of `sss` and each replica of `eligible` holds all that is committed (F-4).
- `eligible`, `suspects` and `kept_stores` are empty when `sss` has `min_in_sync` members (F-13).
- What restarted uncleanly, or has a new store, is in neither set until it has caught up (F-12).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tidemill.common.replica_group import ReplicaId, ReplicaRun, ReplicationView

HISTORY_MAX = 16  # transitions that are kept: the object stays below 32 KiB


class Retirement(Enum):
    """Why a replica is to count no more (`retirement.py`)."""

    NO = ""
    DRAINED = "drained"  # an operator empties it, and may take that back
    SURPLUS = "surplus"  # its group is to have fewer


class RegisteredRun(NamedTuple):
    """The latest run of a replica that has registered."""

    store_uuid: str
    incarnation: str
    address: str
    is_unclean: bool  # what its log has lost nobody knows, until it has caught up
    retired: Retirement = Retirement.NO
    feature_level: int = 0


class KeptStore(NamedTuple):
    """A store in whose place another one has come, while others may need what it has.

    Somebody has started a replica upon the wrong folder, or its volume is gone: which of the two
    nobody can tell before it comes back.
    """

    replica_id: ReplicaId
    store_uuid: str
    is_unclean: bool  # it was a suspect's; else it has all that is committed


class CutTail(NamedTuple):
    """What a replica cut from its log, which the master of `epoch` did not have.

    None of it was acknowledged to anybody, but for `confirmed_bytes`, which only an unclean
    election leaves: that is lost.
    """

    replica_id: ReplicaId
    epoch: int
    offset: int  # from where on
    size_bytes: int
    records: int
    confirmed_bytes: int = 0


class Transition(NamedTuple):
    """One election, for people and for who looks for its own write."""

    epoch: int
    source: ReplicaId | None
    target: ReplicaId
    reason: str
    at_ms: int  # wall time of the controller: to be read, never compared
    # From the failure, as far as it is known, to its detection; of a transfer, for how long the
    # master had taken no sends.
    detected_ms: int
    write_id: str = ""
    away_ms: int | None = None  # for how long there was nobody to send to; None: not known
    cuts: tuple[CutTail, ...] = ()


class GroupRecord(NamedTuple):
    """A broker group's record."""

    min_in_sync: int
    epoch: int = 0
    version: int = 0
    master: ReplicaRun | None = None
    sss: frozenset[ReplicaRun] = frozenset()
    eligible: frozenset[ReplicaId] = frozenset()
    # Members that restarted uncleanly: the last resort when nobody else is left.
    suspects: frozenset[ReplicaId] = frozenset()
    kept_stores: tuple[KeptStore, ...] = ()  # at most one of a replica, by its id
    replicas: tuple[tuple[ReplicaId, RegisteredRun], ...] = ()  # by id
    transfer: ReplicaId | None = None  # an operator wants it to be master
    unclean_since: int = 0
    write_id: str = ""
    history: tuple[Transition, ...] = ()  # oldest first

    def find(self, replica_id: ReplicaId) -> RegisteredRun | None:
        """Return what is registered of a replica."""
        return next((one for id_, one in self.replicas if id_ == replica_id), None)

    def find_member(self, replica_id: ReplicaId) -> ReplicaRun | None:
        """Return the run of a replica that is registered."""
        registered = self.find(replica_id)
        return None if registered is None else ReplicaRun(replica_id, registered.incarnation)

    def find_kept_store(self, replica_id: ReplicaId) -> KeptStore | None:
        """Return the store in whose place the replica's present one has come, if it is needed."""
        return next((one for one in self.kept_stores if one.replica_id == replica_id), None)

    def with_replica(self, replica_id: ReplicaId, registered: RegisteredRun) -> GroupRecord:
        """Return the record with another registration; the version stays."""
        replicas = {**dict(self.replicas), replica_id: registered}
        return self._replace(replicas=tuple(sorted(replicas.items())))


def view_of(record: GroupRecord) -> ReplicationView:
    """Return what replicas and proxies see of a record."""
    return ReplicationView(
        epoch=record.epoch,
        version=record.version,
        master=record.master,
        sss=record.sss,
        eligible=record.eligible,
        min_in_sync=record.min_in_sync,
        unclean_since=record.unclean_since,
        addresses=tuple((id_, one.address) for id_, one in record.replicas),
        retired=frozenset(id_ for id_, one in record.replicas if one.retired is not Retirement.NO),
    )


def ids_of(members: frozenset[ReplicaRun]) -> frozenset[ReplicaId]:
    """Return the replicas whose runs these are."""
    return frozenset(member.replica_id for member in members)


def with_sets(
    record: GroupRecord, sss: frozenset[ReplicaRun], also_eligible: frozenset[ReplicaId]
) -> GroupRecord:
    """Return the next record with a sync state set, and who is eligible and suspect beside it.

    Invariant: while the set has the minimum, what is committed is in its members and maybe nowhere
    else; only with less than that does nothing more get committed, and others keep all of it.
    """
    is_full = len(sss) >= record.min_in_sync
    ids, none = ids_of(sss), frozenset[ReplicaId]()
    return record._replace(
        version=record.version + 1,
        sss=sss,
        eligible=none if is_full else (record.eligible | also_eligible) - ids,
        suspects=none if is_full else record.suspects - ids,
        kept_stores=() if is_full else record.kept_stores,
    )
