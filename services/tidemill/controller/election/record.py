"""The group record: the only shared state about the replicas of a group.

Invariants:

- `epoch` grows by one with each election, `version` by one with each write (F-1, F-2).
- Each member of `sss` and each replica of `eligible` has all committed messages (F-4).
- `eligible`, `suspects` and `kept_stores` are empty when `sss` has `min_in_sync` members (F-13).
- A replica after an unclean restart, or with a new store, is in neither set until it has caught
  up (F-12).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tidemill.common.feature_level import FIRST_LEVEL
from tidemill.common.replica_group import ReplicaId, ReplicaRun, ReplicationView

HISTORY_MAX = 16  # kept transitions; the object stays below 32 KiB


class Retirement(Enum):
    """The reason why a replica no longer counts (`retirement.py`)."""

    NO = ""
    DRAINED = "drained"  # an operator drains it, and may undo that
    SURPLUS = "surplus"  # its group gets fewer replicas


class RegisteredRun(NamedTuple):
    """The latest run of a replica that has registered."""

    store_uuid: str
    incarnation: str
    address: str
    is_unclean: bool  # its log may lack acknowledged records, until it has caught up
    retired: Retirement = Retirement.NO
    feature_level: int = FIRST_LEVEL  # of its program


class KeptStore(NamedTuple):
    """A store that another one has replaced, while the group may need its messages.

    Either the replica was started on a wrong folder, or its volume is lost. Nobody can tell which
    before the store comes back.
    """

    replica_id: ReplicaId
    store_uuid: str
    is_unclean: bool  # the store of a suspect; otherwise it has all committed messages


class CutTail(NamedTuple):
    """The end of a log that a replica cut, because the master of `epoch` did not have it.

    No message of it was acknowledged, except in `confirmed_bytes`. Those are lost. Only an unclean
    election can cause this.
    """

    replica_id: ReplicaId
    epoch: int
    offset: int  # of the first byte that was cut
    size_bytes: int
    records: int
    confirmed_bytes: int = 0


class Transition(NamedTuple):
    """One election, for people and for the controller that looks for its own write."""

    epoch: int
    source: ReplicaId | None
    target: ReplicaId
    reason: str
    at_ms: int  # wall time of the controller, for people; never compared
    # Time from the failure to its detection. For a transfer: how long the master took no sends.
    detected_ms: int
    write_id: str = ""
    away_ms: int | None = None  # how long the group took no sends; None: unknown
    cuts: tuple[CutTail, ...] = ()


class GroupRecord(NamedTuple):
    """A broker group's record."""

    min_in_sync: int
    epoch: int = 0
    version: int = 0
    master: ReplicaRun | None = None
    sss: frozenset[ReplicaRun] = frozenset()
    eligible: frozenset[ReplicaId] = frozenset()
    # Members after an unclean restart: the last resort if no complete replica remains.
    suspects: frozenset[ReplicaId] = frozenset()
    kept_stores: tuple[KeptStore, ...] = ()  # at most one per replica, by id
    replicas: tuple[tuple[ReplicaId, RegisteredRun], ...] = ()  # by id
    transfer: ReplicaId | None = None  # the next master, if an operator asked for one
    unclean_since: int = 0
    # Records of this level may be in the log. It never falls (feature_levels.py).
    feature_level: int = FIRST_LEVEL
    write_id: str = ""
    history: tuple[Transition, ...] = ()  # oldest first

    def find(self, replica_id: ReplicaId) -> RegisteredRun | None:
        """Return the registration of a replica."""
        return next((one for id_, one in self.replicas if id_ == replica_id), None)

    def find_member(self, replica_id: ReplicaId) -> ReplicaRun | None:
        """Return the registered run of a replica."""
        registered = self.find(replica_id)
        return None if registered is None else ReplicaRun(replica_id, registered.incarnation)

    def find_kept_store(self, replica_id: ReplicaId) -> KeptStore | None:
        """Return the store that the replica's present one replaced, if the group needs it."""
        return next((one for one in self.kept_stores if one.replica_id == replica_id), None)

    def with_replica(self, replica_id: ReplicaId, registered: RegisteredRun) -> GroupRecord:
        """Return the record with another registration and the same version."""
        replicas = {**dict(self.replicas), replica_id: registered}
        return self._replace(replicas=tuple(sorted(replicas.items())))


def view_of(record: GroupRecord) -> ReplicationView:
    """Return the part of a record that replicas and proxies see."""
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
        feature_level=record.feature_level,
    )


def ids_of(members: frozenset[ReplicaRun]) -> frozenset[ReplicaId]:
    """Return the replicas of some runs."""
    return frozenset(member.replica_id for member in members)


def with_sets(
    record: GroupRecord, sss: frozenset[ReplicaRun], also_eligible: frozenset[ReplicaId]
) -> GroupRecord:
    """Return the next record with a sync state set, and the eligible and suspect replicas.

    Invariant: with a full set, committed messages may be in its members alone. With a smaller set
    no message is committed, so replicas outside the set can keep all committed messages.
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
