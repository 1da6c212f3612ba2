"""The next step for the pods of a broker group: add, remove or replace pods. Pure.

Kubernetes creates and deletes the pods of a StatefulSet. Its `replicas` and `partition` give their
number and the pods that may be replaced. Only the leading controller changes these (ADR 0046). Each
step is decided from the record and the pods at that time.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.membership import ChangeRejection
from tidemill.controller.election.record import GroupRecord, Retirement, ids_of
from tidemill.controller.election.retirement import is_out, is_retired, retire


class StatefulSetPods(NamedTuple):
    """The pods of one StatefulSet, from its spec and status."""

    replicas: int  # the wanted number of pods
    partition: int  # pods from this number on follow the template
    ready: int
    updated: int  # pods that follow the template
    is_seen: bool  # Kubernetes has processed the last change of the StatefulSet
    is_changing: bool  # some pods do not follow the template yet
    # The template has changed. In a rollback it has not, and a pod that ends looks as if it did not
    # follow the template.
    is_update: bool = True
    ending: frozenset[ReplicaId] = frozenset()  # their pods end or are missing


class PodResize(NamedTuple):
    """A change of the number of pods that replaces none."""

    replicas: int
    partition: int


class PodReplacement(NamedTuple):
    """The replacement of one more pod: of all pods from `partition` on."""

    partition: int


class MasterMove(NamedTuple):
    """A transfer to `target`, because the master's pod is replaced next."""

    target: ReplicaId


class PodWait(NamedTuple):
    """No step now; `why` is for people, and empty if the pods need no change."""

    why: str = ""


PodStep: TypeAlias = PodResize | PodReplacement | MasterMove | PodWait


def next_step(pods: StatefulSetPods, *, spec_replicas: int, record: GroupRecord | None) -> PodStep:
    """Return the next step; `record` is None before the group is founded."""
    if record is None and not pods.is_seen:
        return PodWait()
    if record is None and pods.is_changing:
        # One replica becomes several: its pod founds the group, and then the others join.
        return _replace(pods, record)
    if pods.replicas < spec_replicas:
        # During a change of the template, the partition is its progress.
        partition = pods.partition if pods.is_changing else spec_replicas
        return PodResize(spec_replicas, min(partition, spec_replicas))
    last = ReplicaId(pods.replicas - 1)
    if pods.replicas > spec_replicas and record is not None and is_out(record, last):
        return PodResize(last, min(pods.partition, last))
    if pods.is_changing and pods.is_seen:
        return _replace(pods, record)
    if not pods.is_changing and pods.partition != pods.replicas:
        # Protect all pods from the next change of the template.
        return PodResize(pods.replicas, pods.replicas)
    if pods.replicas > spec_replicas:
        return PodWait(f"replica {last} cannot be removed yet: {_why_not_out(record, last)}")
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
    is_short = len(in_sync) < record.min_in_sync  # No message is confirmed: nothing gets worse.
    if following in in_sync and not is_short and (why := _why_not_well(pods, record)):
        return PodWait(why)
    if record.master.replica_id != following:
        return PodReplacement(following)
    others = sorted(one for one in in_sync - {following} if not is_retired(record, one))
    # In a rollback no master moves: the target may be a pod that ends. A master hands over when
    # Kubernetes ends its pod.
    if not others or is_short or not pods.is_update:
        return PodReplacement(following)
    staying = [one for one in others if one not in pods.ending]
    if not staying:
        return PodWait(f"pod {others[0]} ends, so the master stays until another pod is ready")
    # A pod that is already replaced does not have to hand over again.
    return MasterMove(next((one for one in staying if one >= partition), staying[0]))


def _why_not_well(pods: StatefulSetPods, record: GroupRecord) -> str:
    """Return why no pod may be replaced now; empty: all are ready and in sync."""
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
        return "the group is not founded"
    if not is_retired(record, replica_id):
        after = retire(record, replica_id, Retirement.SURPLUS)
        return (
            after.why
            if isinstance(after, ChangeRejection)
            else "it leaves the sync state set first"
        )
    return "it is the master, or needed until others have caught up"
