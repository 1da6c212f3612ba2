"""Values about the replicas of a broker group that brokers, controllers and proxies exchange.

A `ReplicaRun` is one run of one replica. Acks, mastership and membership of the sync state set
belong to the run that earned them, not to the next run of that replica. A `ReplicationView` is the
part of a group record that the data path needs. The record itself, and the code that changes it, is
in `controller/election`.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

from tidemill.common.feature_level import FIRST_LEVEL

ReplicaId = NewType("ReplicaId", int)  # ordinal in the broker group, from 0


class ReplicaRun(NamedTuple):
    """One run of one replica."""

    replica_id: ReplicaId
    incarnation: str  # 32 hexadecimal digits that each process generates


class ReplicationView(NamedTuple):
    """A group record as replicas and proxies see it.

    The view with the higher version is newer; its epoch is never lower.
    """

    epoch: int
    version: int
    master: ReplicaRun | None
    # The sync state set: the master and the replicas that must ack before a message is committed.
    sss: frozenset[ReplicaRun]
    # Replicas with all committed messages, while the sync state set is below the minimum.
    eligible: frozenset[ReplicaId]
    min_in_sync: int  # K: with fewer members no message is committed
    # The epoch of the last election that may have lost messages; 0 if there was none.
    unclean_since: int = 0
    # Host and port of each registered replica.
    addresses: tuple[tuple[ReplicaId, str], ...] = ()
    # Replicas that an operator retired; no master takes them into its set again.
    retired: frozenset[ReplicaId] = frozenset()
    feature_level: int = FIRST_LEVEL  # of the records that the master may write (ADR 0065)
    group: str = ""  # `name_in_cluster` of the broker group; empty if unknown

    def address_of(self, replica_id: ReplicaId) -> str:
        """Return the address of a replica; empty if unknown."""
        return dict(self.addresses).get(replica_id, "")


def name_in_cluster(cluster: str, group: str) -> str:
    """Return a name that is unique among the broker groups of all clusters."""
    return f"{cluster}/{group}"


class Proposal(NamedTuple):
    """A sync state set that a master proposes, with the version that it has seen.

    A proposal of the current members is also valid. It increments the version and thereby
    invalidates every proposal against the old version.
    """

    epoch: int
    version: int
    master: ReplicaRun
    sss: frozenset[ReplicaRun]
