"""Calls to Kubernetes about the volumes of brokers: StatefulSets, claims, pods and saved copies."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from http import HTTPStatus
from typing import Any, Final

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

from tidemill.release.kubernetes_errors import message_of
from tidemill.release.patient_kubernetes import PatientCalls

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


class VolumeCalls:
    """StatefulSets, claims, pods and saved copies of one namespace."""

    def __init__(self, client: ApiClient, namespace: str, calls: PatientCalls) -> None:
        self._client = client
        self._calls = calls
        self._apps, self._core = AppsV1Api(client), CoreV1Api(client)
        self._namespace = namespace

    def find_set(self, name: str) -> Json | None:
        """Return a StatefulSet as JSON; None if there is none."""
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
        """Return a claim; None if there is none."""
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
        [template] = with_size(stateful_set, size)["spec"]["volumeClaimTemplates"]
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
            if present is not None and _is_room_after_deletion(why, size_of(present)):
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
        """Return the saved copy of a StatefulSet; None if there is none."""
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
        """Delete the saved copy of a StatefulSet."""
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
        size = template_of(stateful_set)["spec"]["resources"]["requests"]["storage"]
        return stands is not None and not has_small_template(stands, size)

    def find_pod(self, name: str) -> V1Pod | None:
        """Return a pod; None if there is none."""
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
        return uid_of(former)

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


def template_of(stateful_set: Json) -> Json:
    """Return the only claim template of a StatefulSet."""
    template: Json
    [template] = stateful_set["spec"]["volumeClaimTemplates"]
    return template


def with_size(stateful_set: Json, size: str) -> Json:
    """Return a copy of a StatefulSet to create, with another size of its volumes."""
    changed = copy.deepcopy(stateful_set)
    changed.pop("status", None)
    for key in STORED_METADATA:
        changed["metadata"].pop(key, None)
    template = template_of(changed)
    template.pop("status", None)
    template["spec"]["resources"]["requests"]["storage"] = size
    return changed


def size_of(claim: V1PersistentVolumeClaim) -> str:
    """Return the requested size of a claim."""
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


def uid_of(pod: V1Pod | None) -> str:
    """Return the uid of a pod; "" without a pod."""
    return (pod and pod.metadata and pod.metadata.uid) or ""


def has_small_template(stateful_set: Json, size: str) -> bool:
    """Return whether the claim template of a StatefulSet has less than a size."""
    has = template_of(stateful_set)["spec"]["resources"]["requests"]["storage"]
    return bool(parse_quantity(has) < parse_quantity(size))
