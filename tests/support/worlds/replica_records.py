"""Group records for tests."""

from __future__ import annotations

from tidemill.common.replica_group import ReplicaId, ReplicaRun
from tidemill.controller.election.record import GroupRecord, RegisteredRun, Transition


def member_of(replica_id: int, run: int = 0) -> ReplicaRun:
    """Return a run of a replica."""
    return ReplicaRun(ReplicaId(replica_id), f"{replica_id:016x}{run:016x}")


def record_of_three(*, epoch: int = 3, version: int = 7) -> GroupRecord:
    """Return the record of a group of three replicas, all in sync, whose master is replica 0."""
    members = [member_of(n) for n in range(3)]
    return GroupRecord(
        min_in_sync=2,
        epoch=epoch,
        version=version,
        master=members[0],
        sss=frozenset(members),
        replicas=tuple(
            (
                one.replica_id,
                RegisteredRun(
                    f"store-{one.replica_id}", one.incarnation, f"10.0.0.{n}:10911", False
                ),
            )
            for n, one in enumerate(members)
        ),
        history=(Transition(epoch, None, ReplicaId(0), "founded", 1_700_000_000_000, 0, "w"),),
    )
