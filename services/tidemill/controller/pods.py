"""What to do next about the pods of a broker group: more, fewer, or others. Pure.

Kubernetes ends and makes the pods of a StatefulSet; how many there are and which of them may be
replaced stands in its `replicas` and `partition`, which the leading controller alone changes (ADR
0046). One step at a time, each of them decided anew by the record and the pods as they are then.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.membership import ChangeRejection
from tidemill.controller.election.record import GroupRecord, Retirement, ids_of
from tidemill.controller.election.retirement import is_out, is_retired, retire


class StatefulSetPods(NamedTuple):
    """The pods of one StatefulSet, as its status says."""

    replicas: int  # how many there shall be
    partition: int  # those from this number on are made as the template says
    ready: int
    updated: int  # as the template says
    is_seen: bool  # whether Kubernetes has looked at the last change of it
    is_changing: bool  # whether the template has changed since all pods were made


class PodResize(NamedTuple):
    """Let there be so many, and replace none."""

    replicas: int
    partition: int


class PodReplacement(NamedTuple):
    """Let the pods from this number on be replaced: one more than before."""

    partition: int


class MasterMove(NamedTuple):
    """Ask for a transfer: the master's pod is the next to be replaced."""

    target: ReplicaId


class PodWait(NamedTuple):
    """Do nothing now; `why` is for people, and empty when all is as it should be."""

    why: str = ""


PodStep: TypeAlias = PodResize | PodReplacement | MasterMove | PodWait


def next_step(pods: StatefulSetPods, *, wanted: int, record: GroupRecord | None) -> PodStep:
    """Return what to do next; `record` is None before the group is founded."""
    if pods.replicas < wanted:
        # While a changed template is on its way, its partition says how far it has come.
        partition = pods.partition if pods.is_changing else wanted
        return PodResize(wanted, min(partition, wanted))
    last = ReplicaId(pods.replicas - 1)
    if pods.replicas > wanted and record is not None and is_out(record, last):
        return PodResize(last, min(pods.partition, last))
    if pods.is_changing and pods.is_seen:
        return _replace(pods, record)
    if not pods.is_changing and pods.partition != pods.replicas:
        # At rest: the next template that comes changes no pod before it is let.
        return PodResize(pods.replicas, pods.replicas)
    if pods.replicas > wanted:
        return PodWait(f"replica {last} is not taken away: {_why_not_out(record, last)}")
    return PodWait()


def _replace(pods: StatefulSetPods, record: GroupRecord | None) -> PodStep:
    partition = min(pods.partition, pods.replicas)
    if partition == 0:
        return PodWait("the last pod is being replaced")
    if pods.updated < pods.replicas - partition:
        return PodWait(f"pod {partition} is being replaced")
    following = ReplicaId(partition - 1)
    if record is None or record.master is None:
        return PodReplacement(following)
    in_sync = ids_of(record.sss)
    is_short = len(in_sync) < record.min_in_sync  # Nothing is confirmed: nothing gets worse.
    if following in in_sync and not is_short and (why := _why_not_well(pods, record)):
        return PodWait(why)
    if record.master.replica_id != following:
        return PodReplacement(following)
    stays = sorted(one for one in in_sync - {following} if not is_retired(record, one))
    if not stays or is_short:
        return PodReplacement(following)
    # One that is replaced already is not asked to hand over again.
    return MasterMove(next((one for one in stays if one >= partition), stays[0]))


def _why_not_well(pods: StatefulSetPods, record: GroupRecord) -> str:
    """Return why no pod may go now; empty: all of them are there, and all are in sync."""
    if pods.ready < pods.replicas:
        return f"{pods.ready} of {pods.replicas} pods are ready"
    in_sync = ids_of(record.sss)
    behind = [
        id_
        for id_ in map(ReplicaId, range(pods.replicas))
        if id_ not in in_sync and not is_retired(record, id_)
    ]
    return f"replica {behind[0]} is not in sync" if behind else ""


def _why_not_out(record: GroupRecord | None, replica_id: ReplicaId) -> str:
    if record is None:
        return "nobody has founded the group"
    if not is_retired(record, replica_id):
        after = retire(record, replica_id, Retirement.SURPLUS)
        return (
            after.why
            if isinstance(after, ChangeRejection)
            else "it leaves the sync state set first"
        )
    return "it is the master, or needed until others have caught up"
