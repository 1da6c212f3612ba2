"""Larger volumes for the brokers of a live release (ADR 0063)."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from kubernetes.client import (
    ApiClient,
    ApiException,
    AppsV1Api,
    CoreV1Api,
    V1ConfigMap,
    V1DeleteOptions,
    V1ObjectMeta,
    V1PersistentVolumeClaim,
    V1Pod,
    V1Preconditions,
    V1StatefulSet,
)
from kubernetes.utils.quantity import parse_quantity

from tidemill.release.invalid_input import InvalidInput
from tidemill.release.kubernetes_errors import message_of
from tidemill.release.patient_kubernetes import PatientCalls
from tidemill.release.patient_rest import PatientRestClient
from tidemill.release.rolling import is_ready

TIMEOUT_S: Final = 10.0  # of one call; the API server answers in milliseconds
SAVED: Final = (
    "stateful-set"  # key of the ConfigMap that keeps a StatefulSet during its replacement
)
# A StatefulSet names its claims by the claim template and the pod.
CLAIM: Final = "data"
# The parts of a stored object that a new object must not have.
STORED_METADATA: Final = (
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "generation",
    "managedFields",
)
# The answers of quotas, limit ranges, policies and rights.
RULES: Final = frozenset({HTTPStatus.FORBIDDEN, HTTPStatus.UNPROCESSABLE_ENTITY})
VOLUMES: Final = "volumes"  # key of the ConfigMap with the state of the release; see `volumes_in`
# Words of Kubernetes for a claim that cannot grow because of its class or state. Other refusals (a
# quota, a limit range, a policy, missing rights) would meet a new volume, too. The status does not
# tell them apart: policies and Kubernetes answer with 403 and with 422.
NOT_EXPANDABLE: Final = ("can be resized", "can be expanded", "for bound claims")
# What a quota counts, in the words of its refusal: "requested: a=1,b=2, used: ..., limited: ...".
QUOTA: Final = re.compile(r"requested: (\S+), used: (\S+), limited: (\S+)")

Json = dict[str, Any]


class GrowthRefused(Exception):
    """The volumes cannot grow; the message says why, and the remedy."""


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
    cluster = _Cluster(client, namespace, PatientCalls(pause, report))
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
    cluster = _Cluster(client, namespace, PatientCalls(rest.pause, report))

    def wait_until(find_obstacle: Callable[[], str]) -> None:
        rest.wait_until(find_obstacle, report)

    for one in plan:
        while claims := _small_claims(cluster, one):
            claim = claims[-1]
            ordinal = int(claim.rpartition("-")[2])
            wait_until(partial(_why_not_whole, rest, cluster, one))
            wait_until(partial(_why_still_master, rest, one.group, ordinal))
            # During the wait the job of the previous upgrade may have replaced it, or the
            # controllers may have removed its replica.
            stateful_set = _find_set(cluster, one)
            if stateful_set is None or claim not in _small_claims(cluster, one):
                continue
            cluster.try_claim(stateful_set, claim, one.size)
            report(f"replica {ordinal} of {one.group} gets a new volume and copies the log")
            pod = f"{one.stateful_set}-{ordinal}"
            former = cluster.replace_claim(claim, pod)
            wait_until(partial(_why_not_replaced, cluster, claim, one.size))
            # A new pod is ready when it is in sync. The record alone may still show the former run.
            wait_until(partial(_why_not_ready, cluster, pod, former))
            wait_until(partial(_why_not_whole, rest, cluster, one))
            report(f"replica {ordinal} of {one.group} is in sync")


class _Cluster:
    """StatefulSets, claims, pods and saved copies of one namespace."""

    def __init__(self, client: ApiClient, namespace: str, calls: PatientCalls) -> None:
        self._client = client
        self._calls = calls
        self._apps, self._core = AppsV1Api(client), CoreV1Api(client)
        self._namespace = namespace

    def find_set(self, name: str) -> Json | None:
        found: V1StatefulSet | None = self._calls.find(
            partial(
                self._apps.read_namespaced_stateful_set,
                name,
                namespace=self._namespace,
                _request_timeout=TIMEOUT_S,
            )
        )
        if found is None:
            return None
        plain: Json = self._client.sanitize_for_serialization(found)
        return plain

    def find_claim(self, name: str) -> V1PersistentVolumeClaim | None:
        read = self._core.read_namespaced_persistent_volume_claim
        found: V1PersistentVolumeClaim | None = self._calls.find(
            partial(read, name, namespace=self._namespace, _request_timeout=TIMEOUT_S)
        )
        return found

    def expand(self, claim: str, size: str, *, is_trial: bool = False) -> str:
        """Request a larger volume; return why the volume cannot grow, or "".

        Raises GrowthRefused if a rule forbids it that would refuse a new volume, too. Raises
        ApiException.
        """
        patch = {"spec": {"resources": {"requests": {"storage": size}}}}
        try:
            self._calls.make(
                partial(
                    self._core.patch_namespaced_persistent_volume_claim,
                    claim,
                    namespace=self._namespace,
                    _request_timeout=TIMEOUT_S,
                    body=patch,
                    dry_run="All" if is_trial else None,
                )
            )
        except ApiException as error:
            why = message_of(error)
            if any(one in why for one in NOT_EXPANDABLE):
                return why
            if error.status not in RULES:
                raise
            raise GrowthRefused(
                f"the volume of {claim} cannot grow to {size}: {why}. Kubernetes would refuse a new"
                " volume of this size, too. Change the quota, limit range, policy or right that it"
                " names, and repeat the upgrade"
            ) from error
        return ""

    def try_claim(self, stateful_set: Json, claim: str, size: str) -> None:
        """Let the API server check the claim that the StatefulSet would create; create nothing.

        The trial has another name, because the present claim still exists. Raises GrowthRefused,
        ApiException.
        """
        [template] = _with_size(stateful_set, size)["spec"]["volumeClaimTemplates"]
        metadata = template.get("metadata", {})
        selector = stateful_set["spec"]["selector"].get("matchLabels", {})
        labels = metadata.get("labels", {}) | selector
        name = f"{claim}-trial"
        body = {
            "metadata": {"annotations": {}} | metadata | {"name": name, "labels": labels},
            "spec": template["spec"],
        }
        present = self.find_claim(claim)
        try:
            self._calls.make(
                partial(
                    self._core.create_namespaced_persistent_volume_claim,
                    body=body,  # type: ignore[arg-type]  # the client takes plain objects, too
                    namespace=self._namespace,
                    _request_timeout=TIMEOUT_S,
                    dry_run="All",
                )
            )
        except ApiException as error:
            why = message_of(error)
            if error.status not in RULES:
                raise
            if present is not None and _is_room_after_deletion(why, _size_of(present)):
                return
            raise GrowthRefused(
                f"{claim} keeps its volume, because Kubernetes would refuse the new one: {why}."
                " Change the quota, limit range, policy or right that it names, and repeat the"
                " upgrade"
            ) from error

    def save(self, name: str, stateful_set: Json) -> None:
        """Keep the copy that is created next, for the case that this job ends before."""
        body = V1ConfigMap(
            metadata=V1ObjectMeta(name=_saved(name)), data={SAVED: json.dumps(stateful_set)}
        )
        try:
            self._calls.make(
                partial(
                    self._core.create_namespaced_config_map,
                    body=body,
                    namespace=self._namespace,
                    _request_timeout=TIMEOUT_S,
                )
            )
        except ApiException as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            # From a job that was killed. The StatefulSet may have changed since.
            self._calls.make(
                partial(
                    self._core.replace_namespaced_config_map,
                    _saved(name),
                    body=body,
                    namespace=self._namespace,
                    _request_timeout=TIMEOUT_S,
                )
            )

    def find_saved(self, name: str) -> Json | None:
        found = self._calls.find(
            partial(
                self._core.read_namespaced_config_map,
                _saved(name),
                namespace=self._namespace,
                _request_timeout=TIMEOUT_S,
            )
        )
        if found is None:
            return None
        saved: Json = json.loads((found.data or {})[SAVED])
        return saved

    def forget_saved(self, name: str) -> None:
        self._calls.find(
            partial(
                self._core.delete_namespaced_config_map,
                _saved(name),
                namespace=self._namespace,
                _request_timeout=TIMEOUT_S,
            )
        )

    def note_size(self, installed: str, group: str, size: str) -> None:
        """Set the size of a group's volumes in the state of the release."""
        read = self._core.read_namespaced_config_map
        found = self._calls.find(
            partial(read, installed, namespace=self._namespace, _request_timeout=TIMEOUT_S)
        )
        volumes = [
            f"{group}={size}/{one.partition('/')[2]}" if one.startswith(f"{group}=") else one
            for one in ((found and found.data) or {}).get(VOLUMES, "").split()
        ]
        if volumes:
            patch = {"data": {VOLUMES: " ".join(volumes)}}
            self._calls.make(
                partial(
                    self._core.patch_namespaced_config_map,
                    installed,
                    namespace=self._namespace,
                    body=patch,
                    _request_timeout=TIMEOUT_S,
                )
            )

    def delete_without_pods(self, stateful_set: Json) -> bool:
        """Delete a StatefulSet; return whether it has not changed since it was read."""
        metadata = stateful_set["metadata"]
        as_read = V1Preconditions(uid=metadata["uid"], resource_version=metadata["resourceVersion"])
        try:
            self._calls.find(
                partial(
                    self._apps.delete_namespaced_stateful_set,
                    metadata["name"],
                    body=V1DeleteOptions(propagation_policy="Orphan", preconditions=as_read),
                    namespace=self._namespace,
                    _request_timeout=TIMEOUT_S,
                )
            )
        except ApiException as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            return False
        return True

    def create_set(self, stateful_set: Json) -> None:
        """Create a StatefulSet. Raises ApiException."""
        try:
            self._calls.make(
                partial(
                    self._apps.create_namespaced_stateful_set,
                    body=stateful_set,  # type: ignore[arg-type]  # the client takes plain objects, too
                    namespace=self._namespace,
                    _request_timeout=TIMEOUT_S,
                )
            )
        except ApiException as error:
            # A creation without an answer may have been carried out.
            is_own = error.status == HTTPStatus.CONFLICT and self._is_created(stateful_set)
            if not is_own:
                raise

    def _is_created(self, stateful_set: Json) -> bool:
        stands = self.find_set(stateful_set["metadata"]["name"])
        size = _template_of(stateful_set)["spec"]["resources"]["requests"]["storage"]
        return stands is not None and not _has_small_template(stands, size)

    def find_pod(self, name: str) -> V1Pod | None:
        read = self._core.read_namespaced_pod
        found: V1Pod | None = self._calls.find(
            partial(read, name, namespace=self._namespace, _request_timeout=TIMEOUT_S)
        )
        return found

    def replace_claim(self, claim: str, pod: str) -> str:
        """Delete a claim and its pod, which the StatefulSet creates again; return the pod's id."""
        former, present = self.find_pod(pod), self.find_claim(claim)
        if present is not None:
            delete_claim = self._core.delete_namespaced_persistent_volume_claim
            self._delete(delete_claim, claim, present.metadata)
        if former is not None:
            self._delete(self._core.delete_namespaced_pod, pod, former.metadata)
        return _uid(former)

    def _delete(self, delete: Callable[..., Any], name: str, found: V1ObjectMeta | None) -> None:
        """Delete an object, but not another one of its name, which a repeated call may meet."""
        options = V1DeleteOptions(preconditions=V1Preconditions(uid=found.uid if found else None))
        try:
            self._calls.find(
                partial(
                    delete,
                    name,
                    namespace=self._namespace,
                    body=options,
                    _request_timeout=TIMEOUT_S,
                )
            )
        except ApiException as error:
            if error.status != HTTPStatus.CONFLICT:
                raise


def _saved(name: str) -> str:
    return f"{name}-saved"


def _find_set(cluster: _Cluster, one: GroupVolumes) -> Json | None:
    """Return the StatefulSet, or the copy that a job which was killed did not create."""
    return cluster.find_set(one.stateful_set) or cluster.find_saved(one.stateful_set)


def _template_of(stateful_set: Json) -> Json:
    template: Json
    [template] = stateful_set["spec"]["volumeClaimTemplates"]
    return template


def _with_size(stateful_set: Json, size: str) -> Json:
    changed = copy.deepcopy(stateful_set)
    changed.pop("status", None)
    for key in STORED_METADATA:
        changed["metadata"].pop(key, None)
    template = _template_of(changed)
    template.pop("status", None)
    template["spec"]["resources"]["requests"]["storage"] = size
    return changed


def _replace_set(
    cluster: _Cluster,
    one: GroupVolumes,
    installed: str,
    pause: Callable[[str], None],
    report: Callable[[str], None],
) -> None:
    """Replace a StatefulSet by a copy with the new size; go on where a killed job stopped."""
    name = one.stateful_set
    while (stands := cluster.find_set(name)) is not None and _has_small_template(stands, one.size):
        if "deletionTimestamp" in stands["metadata"]:
            pause(f"the StatefulSet {name} is being deleted")
            continue
        cluster.save(name, _with_size(stands, one.size))
        cluster.note_size(installed, one.group, one.size)
        if not cluster.delete_without_pods(stands):
            pause(f"the StatefulSet {name} has just changed")
    saved = cluster.find_saved(name)
    if stands is None and saved is not None:
        cluster.create_set(_with_size(saved, one.size))
        report(f"the StatefulSet {name} has the new size")
    if saved is not None:
        cluster.forget_saved(name)


def _has_small_template(stateful_set: Json, size: str) -> bool:
    has = _template_of(stateful_set)["spec"]["resources"]["requests"]["storage"]
    return bool(parse_quantity(has) < parse_quantity(size))


def _ordinals(stateful_set: Json | None) -> range:
    return range(stateful_set["spec"].get("replicas", 1) if stateful_set else 0)


def _small_claims(cluster: _Cluster, one: GroupVolumes) -> list[str]:
    """Return the claims of the present replicas that are smaller than wanted, by ordinal."""
    names = [f"{CLAIM}-{one.stateful_set}-{n}" for n in _ordinals(_find_set(cluster, one))]
    found = {name: claim for name in names if (claim := cluster.find_claim(name)) is not None}
    return [name for name, claim in found.items() if _is_small(claim, one.size)]


def _is_small(claim: V1PersistentVolumeClaim, size: str) -> bool:
    return bool(parse_quantity(_size_of(claim)) < parse_quantity(size))


def _size_of(claim: V1PersistentVolumeClaim) -> str:
    assert claim.spec is not None, "each claim has a spec"
    requests = (claim.spec.resources and claim.spec.resources.requests) or {}
    return str(requests["storage"])


def _is_room_after_deletion(why: str, size: str) -> bool:
    """Return whether a quota rejects a claim only until a claim of `size` is deleted."""
    found = QUOTA.search(why)
    if found is None:
        return False
    requested, used, limited = (
        dict(one.split("=", 1) for one in part.split(",")) for part in found.groups()
    )
    return all(
        parse_quantity(used[name]) + parse_quantity(wanted) - _share_in_quota(name, size)
        <= parse_quantity(limited[name])
        for name, wanted in requested.items()
    )


def _share_in_quota(name: str, size: str) -> Decimal:
    """Return what a claim of `size` uses of one resource of a quota."""
    return Decimal(parse_quantity(size)) if name.endswith("requests.storage") else Decimal(1)


def _uid(pod: V1Pod | None) -> str:
    return (pod and pod.metadata and pod.metadata.uid) or ""


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


def _why_not_ready(cluster: _Cluster, name: str, former: str) -> str:
    pod = cluster.find_pod(name)
    if pod is None or _uid(pod) == former:
        return f"{name} was not replaced yet"
    return "" if is_ready(pod) else f"{name} is not ready"


def _why_not_whole(rest: PatientRestClient, cluster: _Cluster, one: GroupVolumes) -> str:
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
            undo = f"tidemill cluster drain {one.group}-{number} --undo"
            return f"replica {number} of {one.group} is drained; end that: {undo}"
        if replica["role"] not in {"master", "in-sync"}:
            return f"replica {number} of {one.group} is not in sync"
    return ""


def _why_still_master(rest: PatientRestClient, group: str, ordinal: int) -> str:
    found = _replicas(rest, group)
    if found.get("master") != ordinal:
        return ""
    if found.get("transfer") is None:
        others = [one["replica"] for one in found["replicas"] if one["replica"] != ordinal]
        # The highest replica has a new volume already, so it does not have to hand over again.
        rest.call("POST", f"/replicas/{group}:transfer", body={"target": max(others)})
    return f"replica {ordinal} of {group} hands over"


def _why_not_replaced(cluster: _Cluster, claim: str, size: str) -> str:
    found = cluster.find_claim(claim)
    if found is None or _is_small(found, size):
        return f"{claim} was not created again yet"
    return ""
