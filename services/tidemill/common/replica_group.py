"""What brokers, controllers and proxies say to each other of the replicas of a broker group.

A *member* is one run of one replica: acks, mastership and membership belong to the incarnation that
earned them, and never to the replica that comes after it. A *view* is what of a group record the
data path needs; the record itself, and who changes it, is the controller's (`controller/election`).
"""

from __future__ import annotations

from typing import NamedTuple, NewType

ReplicaId = NewType("ReplicaId", int)  # ordinal in the broker group, from 0


class ReplicaRun(NamedTuple):
    """One run of one replica."""

    replica_id: ReplicaId
    incarnation: str  # 32 hexadecimal digits, made anew by each process


class ReplicationView(NamedTuple):
    """A group record as replicas and proxies see it.

    Of two views of a group the one with the higher version is newer; its epoch is never lower.
    """

    epoch: int
    version: int
    master: ReplicaRun | None
    # The sync state set: the master, and who must ack before anything is committed.
    sss: frozenset[ReplicaRun]
    # Who holds all that is committed while the sync state set has less than the minimum.
    eligible: frozenset[ReplicaId]
    min_in_sync: int  # K: with fewer members nothing is committed
    # The epoch of the last election that may have lost something; 0: there was none.
    unclean_since: int = 0
    # Host and port of each replica that has registered.
    addresses: tuple[tuple[ReplicaId, str], ...] = ()
    # Who is to count no more: no master takes it into its set again.
    retired: frozenset[ReplicaId] = frozenset()
    group: str = ""  # `name_in_cluster` of its group; empty: who made this does not say

    def address_of(self, replica_id: ReplicaId) -> str:
        """Return where a replica listens; empty: nobody knows."""
        return dict(self.addresses).get(replica_id, "")


def name_in_cluster(cluster: str, group: str) -> str:
    """Return what tells a broker group from those of the same name in other clusters."""
    return f"{cluster}/{group}"


class Proposal(NamedTuple):
    """The sync state set that a master wants, against the version that it knows.

    The same members as before are a proposal too: it moves the version, and so ends every other
    one that was made against the old version.
    """

    epoch: int
    version: int
    master: ReplicaRun
    sss: frozenset[ReplicaRun]
