"""Larger volumes for the brokers of a live release (ADR 0063)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kubernetes.client import ApiClient, V1PersistentVolumeClaim
from kubernetes.utils.quantity import parse_quantity

from tidemill.release.invalid_input import InvalidInput
from tidemill.release.patient_kubernetes import PatientCalls
from tidemill.release.patient_rest import PatientRestClient
from tidemill.release.rolling import is_ready
from tidemill.release.volume_calls import (
    CLAIM,
    GrowthRefused,
    Json,
    VolumeCalls,
    has_small_template,
    size_of,
    uid_of,
    with_size,
)


class GroupVolumes(NamedTuple):
    """The wanted size of the volumes of a broker group."""

    group: str
    stateful_set: str
    size: str  # a Kubernetes quantity

    @classmethod
    def parse(cls, text: str) -> list[GroupVolumes]:
        """Parse the plan of the chart, a JSON list. Raises InvalidInput."""
        try:
            plan = [cls(one["group"], one["statefulSet"], one["size"]) for one in json.loads(text)]
            for _, _, size in plan:
                if parse_quantity(size) <= 0:
                    raise ValueError(f"the size {size} is not above 0")
        except KeyError as error:
            raise InvalidInput(f"--plan lacks {error} in one of its broker groups") from error
        except (ValueError, TypeError) as error:
            raise InvalidInput(f"--plan is not a list of broker groups as JSON: {error}") from error
        return plan


def grow(
    client: ApiClient,
    namespace: str,
    plan: Sequence[GroupVolumes],
    installed: str,
    pause: Callable[[str], None],
    report: Callable[[str], None],
) -> None:
    """Expand claims, and replace StatefulSets by copies with the new size; no pod ends.

    A job that was killed is repeated. Before it deletes a StatefulSet, the ConfigMap `installed`
    has the new size. So jobs of earlier revisions reject a rollback, which would create the
    StatefulSet with one replica, or set a size that Kubernetes refuses. Calls of the Kubernetes API
    are repeated during an outage. `pause` waits before the next look, and gives up at a deadline.
    Raises GrowthRefused, ApiException, and the error of `pause`.
    """
    cluster = VolumeCalls(client, namespace, PatientCalls(pause, report))
    found = {one: stateful_set for one in plan if (stateful_set := _find_set(cluster, one))}
    for one, stateful_set in found.items():
        claims = _small_claims(cluster, one)
        is_alone = stateful_set["spec"].get("replicas", 1) < 2
        for claim in claims:
            if (why := cluster.expand(claim, one.size, is_trial=True)) and is_alone:
                raise GrowthRefused(
                    f"the volume of {claim} cannot be expanded ({why}), and it has the only copy of"
                    f" the messages of {one.group}. First upgrade with brokerGroups[].replicas: 3"
                    " and the present size: volumes of several replicas can be replaced in turn. Or"
                    " restore a backup into a new release (docs/kubernetes/backup-and-restore.md)"
                )
    for one in found:
        for claim in _small_claims(cluster, one):
            if why := cluster.expand(claim, one.size):
                report(f"{claim} is replaced after the upgrade, because it cannot grow: {why}")
            else:
                report(f"{claim} grows to {one.size}")
        _replace_set(cluster, one, installed, pause, report)


def replace_volumes(
    client: ApiClient,
    namespace: str,
    plan: Sequence[GroupVolumes],
    rest: PatientRestClient,
    report: Callable[[str], None],
) -> None:
    """Replace claims that could not grow, one replica after the other.

    Before each deletion, the API server checks the new claim. A claim that it would refuse stays.
    Raises GrowthRefused, WaitTimeout, RestRejection, ApiException.
    """
    cluster = VolumeCalls(client, namespace, PatientCalls(rest.pause, report))

    def wait_until(find_obstacle: Callable[[], str]) -> None:
        rest.wait_until(find_obstacle, report)

    for one in plan:
        while claims := _small_claims(cluster, one):
            claim = claims[-1]
            ordinal = int(claim.rpartition("-")[2])
            wait_until(partial(_why_not_whole, rest, cluster, one))
            wait_until(partial(_why_still_master, rest, cluster, one, ordinal))
            # During the wait the job of the previous upgrade may have replaced it, or the
            # controllers may have removed its replica.
            stateful_set = _find_set(cluster, one)
            if stateful_set is None or claim not in _small_claims(cluster, one):
                continue
            cluster.try_claim(stateful_set, claim, one.size)
            report(f"replica {ordinal} of {one.group} gets a new volume and copies the log")
            former = cluster.replace_claim(claim, f"{one.stateful_set}-{ordinal}")
            wait_until(partial(_why_not_copied, cluster, one, ordinal, former))
            if _is_removed(cluster, one, ordinal):
                report(f"replica {ordinal} of {one.group} was removed meanwhile")
                continue
            wait_until(partial(_why_not_whole, rest, cluster, one))
            report(f"replica {ordinal} of {one.group} is in sync")


def _find_set(cluster: VolumeCalls, one: GroupVolumes) -> Json | None:
    """Return the StatefulSet, or the copy that a job which was killed did not create."""
    return cluster.find_set(one.stateful_set) or cluster.find_saved(one.stateful_set)


def _replace_set(
    cluster: VolumeCalls,
    one: GroupVolumes,
    installed: str,
    pause: Callable[[str], None],
    report: Callable[[str], None],
) -> None:
    """Replace a StatefulSet by a copy with the new size; go on where a killed job stopped."""
    name = one.stateful_set
    while (stands := cluster.find_set(name)) is not None and has_small_template(stands, one.size):
        if "deletionTimestamp" in stands["metadata"]:
            pause(f"the StatefulSet {name} is being deleted")
            continue
        cluster.save(name, with_size(stands, one.size))
        cluster.note_size(installed, one.group, one.size)
        if not cluster.delete_without_pods(stands):
            pause(f"the StatefulSet {name} has just changed")
    saved = cluster.find_saved(name)
    if stands is None and saved is not None:
        cluster.create_set(with_size(saved, one.size))
        report(f"the StatefulSet {name} has the new size")
    if saved is not None:
        cluster.forget_saved(name)


def _ordinals(stateful_set: Json | None) -> range:
    return range(stateful_set["spec"].get("replicas", 1) if stateful_set else 0)


def _small_claims(cluster: VolumeCalls, one: GroupVolumes) -> list[str]:
    """Return the claims of the present replicas that are smaller than wanted, by ordinal."""
    names = [f"{CLAIM}-{one.stateful_set}-{n}" for n in _ordinals(_find_set(cluster, one))]
    found = {name: claim for name in names if (claim := cluster.find_claim(name)) is not None}
    return [name for name, claim in found.items() if _is_small(claim, one.size)]


def _is_removed(cluster: VolumeCalls, one: GroupVolumes, ordinal: int) -> bool:
    """Return whether the group has fewer replicas by now."""
    stateful_set = _find_set(cluster, one)
    return stateful_set is not None and ordinal not in _ordinals(stateful_set)


def _is_small(claim: V1PersistentVolumeClaim, size: str) -> bool:
    return bool(parse_quantity(size_of(claim)) < parse_quantity(size))


def _replicas(rest: PatientRestClient, group: str) -> Json:
    """Return the state of the replicas of a broker group."""
    found = rest.call("GET", "/replicas", group)
    replicas = found.get("replicas") if isinstance(found, dict) else None
    if not isinstance(replicas, list) or not all(
        isinstance(one, dict) and one.keys() >= {"replica", "role"} for one in replicas
    ):
        raise rest.foreign_answer(f"/replicas/{group}")
    answer: Json = found
    return answer


# Each of these returns what is missing, or "".


def _why_not_copied(cluster: VolumeCalls, one: GroupVolumes, ordinal: int, former: str) -> str:
    if _is_removed(cluster, one, ordinal):
        return ""
    name = f"{one.stateful_set}-{ordinal}"
    claim = cluster.find_claim(f"{CLAIM}-{name}")
    if claim is None or _is_small(claim, one.size):
        return f"{CLAIM}-{name} was not created again yet"
    # A new pod is ready when it is in sync. The record alone may still show the former run.
    pod = cluster.find_pod(name)
    if pod is None or uid_of(pod) == former:
        return f"{name} was not replaced yet"
    return "" if is_ready(pod) else f"{name} is not ready"


def _why_not_whole(rest: PatientRestClient, cluster: VolumeCalls, one: GroupVolumes) -> str:
    stateful_set = _find_set(cluster, one)
    status = (stateful_set or {}).get("status", {})
    if status.get("updateRevision") != status.get("currentRevision"):
        return f"the controllers are replacing the pods of {one.group}"
    # The record of the controllers may still show a replica after its pod has ended.
    for ordinal in _ordinals(stateful_set):
        pod = f"{one.stateful_set}-{ordinal}"
        if not is_ready(cluster.find_pod(pod)):
            return f"the pod {pod} is not ready"
    found = _replicas(rest, one.group)
    if found.get("master") is None:
        return f"{one.group} has no master"
    for replica in found["replicas"]:
        number = replica["replica"]
        if replica.get("retired") == "drained":
            undo = f"tidemill replica undrain {one.group}-{number}"
            return f"replica {number} of {one.group} is drained; end that: {undo}"
        if replica["role"] not in {"master", "in-sync"}:
            return f"replica {number} of {one.group} is not in sync"
    return ""


def _why_still_master(
    rest: PatientRestClient, cluster: VolumeCalls, one: GroupVolumes, ordinal: int
) -> str:
    group = one.group
    if len(_ordinals(_find_set(cluster, one))) == 1:
        raise GrowthRefused(
            f"the volume of replica {ordinal} has the only copy of the messages of {group}, because"
            " the group has one replica by now. Set spec.replicas of its BrokerGroup to the number"
            " in the values again, and repeat the upgrade: volumes of several replicas are replaced"
            " in turn"
        )
    found = _replicas(rest, group)
    if found.get("master") != ordinal:
        return ""
    if found.get("transfer") is None:
        others = [one["replica"] for one in found["replicas"] if one["replica"] != ordinal]
        # The highest replica has a new volume already, so it does not have to hand over again.
        rest.call("POST", f"/replicas/{group}:transfer", body={"target": max(others)})
    return f"replica {ordinal} of {group} hands over"
