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

from tidemill.release.kubernetes_errors import is_disruption_budget
from tidemill.release.patient_kubernetes import PatientCalls
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

    Calls of the Kubernetes API are repeated during an outage. Raises WaitTimeout, RestRejection,
    ApiException.
    """
    pods = _Pods(client, namespace, PatientCalls(rest.pause, report))
    outdated = dict(_find_outdated(pods, stateful_sets, rest))
    broken = []
    for name, revision in outdated.items():
        if not is_ready(pods.find(name)):
            broken.append(name)
            rest.wait_until(partial(_why_not_evicted, pods, name, revision))
    for name in broken:
        rest.wait_until(partial(_why_not_ready, pods, name, outdated[name]))
        report(f"replaced {name}, which was not ready")
    for name, revision in outdated.items():
        if name not in broken:
            rest.wait_until(partial(_why_not_reachable, rest))
            rest.wait_until(partial(_why_not_evicted, pods, name, revision))
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

    def __init__(self, client: ApiClient, namespace: str, calls: PatientCalls) -> None:
        self._apps, self._core = AppsV1Api(client), CoreV1Api(client)
        self._namespace = namespace
        self._calls = calls

    def read_stateful_set(self, name: str) -> V1StatefulSet:
        read = self._apps.read_namespaced_stateful_set
        return self._calls.make(lambda: read(name, self._namespace, _request_timeout=TIMEOUT_S))

    def find(self, name: str) -> V1Pod | None:
        read = self._core.read_namespaced_pod
        return self._calls.find(lambda: read(name, self._namespace, _request_timeout=TIMEOUT_S))

    def evict(self, name: str, revision: str) -> None:
        """Evict a pod unless it has the revision, or was deleted. Raises ApiException."""
        evict = self._core.create_namespaced_pod_eviction
        eviction = V1Eviction(metadata=V1ObjectMeta(name=name, namespace=self._namespace))

        def evict_outdated() -> None:
            # An eviction without an answer may have been carried out. A repeated one would end the
            # new pod.
            pod = self.find(name)
            if pod is not None and _revision(pod) != revision:
                evict(name, self._namespace, eviction, _request_timeout=TIMEOUT_S)

        self._calls.find(evict_outdated)


# Each of these returns what is missing, or "".


def _why_not_reachable(rest: PatientRestClient) -> str:
    items = rest.list_items("/broker-groups", "name", "reachable")
    missing = [one["name"] for one in items if not one["reachable"] or "reason" in one]
    return f"waiting for {', '.join(missing)}" if missing else ""


def _why_not_observed(pods: _Pods, name: str) -> str:
    stateful_set = pods.read_stateful_set(name)
    assert stateful_set.metadata is not None, "each stored object has metadata"
    observed = (stateful_set.status and stateful_set.status.observed_generation) or 0
    is_observed = observed >= (stateful_set.metadata.generation or 0)
    return "" if is_observed else f"Kubernetes has not processed the StatefulSet {name} yet"


def _why_not_evicted(pods: _Pods, name: str, revision: str) -> str:
    try:
        pods.evict(name, revision)
    except ApiException as error:
        if is_disruption_budget(error):
            return f"a disruption budget keeps {name}"
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
