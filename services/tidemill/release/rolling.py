"""Replacement of the pods of broker groups, one pod after the other.

Kubernetes replaces the pods of one StatefulSet in turn, but those of several StatefulSets at the
same time: then no broker group takes messages. So the StatefulSets of several groups wait until
their pods are deleted (OnDelete). This job evicts the pods, so that disruption budgets apply.

Pods that are not ready are replaced first, whatever the state of the other broker groups: the new
template may be their remedy. So a rollback ends the effect of a bad image or setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http import HTTPStatus
from typing import Final

from kubernetes.client import (
    ApiClient,
    ApiException,
    AppsV1Api,
    CoreV1Api,
    V1Eviction,
    V1ObjectMeta,
    V1Pod,
    V1StatefulSet,
)

from tidemill.release.patient_rest import PatientRestClient

REVISION_LABEL: Final = "controller-revision-hash"
TIMEOUT_S: Final = 10.0  # of one call; the API server answers in milliseconds


def roll(
    client: ApiClient,
    namespace: str,
    stateful_sets: Sequence[str],
    rest: PatientRestClient,
    report: Callable[[str], None],
) -> None:
    """Replace each pod that differs from the template of its StatefulSet.

    Raises WaitTimeout, RestRejection, ApiException.
    """
    pods = _Pods(client, namespace)
    outdated = dict(_find_outdated(pods, stateful_sets, rest))
    broken = []
    for name in outdated:
        if not is_ready(pods.find(name)):
            broken.append(name)
            rest.wait_until(partial(_why_not_evicted, pods, name))
    for name in broken:
        rest.wait_until(partial(_why_not_ready, pods, name, outdated[name]))
        report(f"replaced {name}, which was not ready")
    for name, revision in outdated.items():
        if name not in broken:
            rest.wait_until(partial(_why_not_reachable, rest))
            rest.wait_until(partial(_why_not_evicted, pods, name))
            rest.wait_until(partial(_why_not_ready, pods, name, revision))
            report(f"replaced {name}")
    rest.wait_until(partial(_why_not_reachable, rest))


def _find_outdated(
    pods: _Pods, stateful_sets: Sequence[str], rest: PatientRestClient
) -> Iterator[tuple[str, str]]:
    """Yield each pod that differs from its template, with the revision that it should have."""
    for name in stateful_sets:
        rest.wait_until(partial(_why_not_observed, pods, name))
        stateful_set = pods.read_stateful_set(name)
        assert stateful_set.spec is not None, "each StatefulSet has a spec"
        assert stateful_set.status is not None, "it was observed"
        revision = stateful_set.status.update_revision or ""
        for ordinal in range(stateful_set.spec.replicas or 0):
            pod = f"{name}-{ordinal}"
            if _revision(pods.find(pod)) != revision:
                yield pod, revision


class _Pods:
    """Pods and StatefulSets of one namespace."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._apps, self._core = AppsV1Api(client), CoreV1Api(client)
        self._namespace = namespace

    def read_stateful_set(self, name: str) -> V1StatefulSet:
        return self._apps.read_namespaced_stateful_set(
            name, self._namespace, _request_timeout=TIMEOUT_S
        )

    def find(self, name: str) -> V1Pod | None:
        try:
            return self._core.read_namespaced_pod(name, self._namespace, _request_timeout=TIMEOUT_S)
        except ApiException as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    def evict(self, name: str) -> None:
        eviction = V1Eviction(metadata=V1ObjectMeta(name=name, namespace=self._namespace))
        self._core.create_namespaced_pod_eviction(
            name, self._namespace, eviction, _request_timeout=TIMEOUT_S
        )


# Each of these returns what is missing, or "".


def _why_not_reachable(rest: PatientRestClient) -> str:
    items = rest.call("GET", "/broker-groups")["items"]
    missing = [one["name"] for one in items if not one["reachable"] or "reason" in one]
    return f"waiting for {', '.join(missing)}" if missing else ""


def _why_not_observed(pods: _Pods, name: str) -> str:
    stateful_set = pods.read_stateful_set(name)
    assert stateful_set.metadata is not None, "each stored object has metadata"
    observed = (stateful_set.status and stateful_set.status.observed_generation) or 0
    is_observed = observed >= (stateful_set.metadata.generation or 0)
    return "" if is_observed else f"Kubernetes has not processed the StatefulSet {name} yet"


def _why_not_evicted(pods: _Pods, name: str) -> str:
    try:
        pods.evict(name)
    except ApiException as error:
        if error.status == HTTPStatus.TOO_MANY_REQUESTS:
            return f"a disruption budget keeps {name}"
        if error.status != HTTPStatus.NOT_FOUND:
            raise
    return ""


def _why_not_ready(pods: _Pods, name: str, revision: str) -> str:
    pod = pods.find(name)
    if pod is None or _revision(pod) != revision:
        return f"{name} was not replaced yet"
    return "" if is_ready(pod) else f"{name} is not ready"


def is_ready(pod: V1Pod | None) -> bool:
    """Return whether a pod exists and is ready."""
    conditions = (pod and pod.status and pod.status.conditions) or []
    return any(one.type == "Ready" and one.status == "True" for one in conditions)


def _revision(pod: V1Pod | None) -> str:
    labels = (pod and pod.metadata and pod.metadata.labels) or {}
    return labels.get(REVISION_LABEL, "")
