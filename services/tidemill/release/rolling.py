"""The pods of broker groups, replaced one after the other.

Kubernetes replaces the pods of one StatefulSet in turn, and those of several all at once: then
there would be no broker group to take messages. So the StatefulSets of several groups wait until
their pods are deleted (OnDelete), which this asks for as an eviction: budgets may delay that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus

import httpx

from tidemill.release.kubernetes_api import checked
from tidemill.release.rest import Json, Rest


def roll(
    api: httpx.Client,
    namespace: str,
    stateful_sets: Sequence[str],
    rest: Rest,
    say: Callable[[str], None],
) -> None:
    """Replace what is not as its StatefulSet says; raises Unreachable when time is over."""
    for name in stateful_sets:
        path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}"
        rest.wait_until(partial(_not_seen, api, path))
        wanted = _get(api, path)
        revision = wanted["status"]["updateRevision"]
        for ordinal in range(wanted["spec"]["replicas"]):
            pod = f"/api/v1/namespaces/{namespace}/pods/{name}-{ordinal}"
            if _revision(_find(api, pod)) == revision:
                continue
            rest.wait_until(partial(_away, rest))
            rest.wait_until(partial(_not_evicted, api, pod))
            rest.wait_until(partial(_not_ready, api, pod, revision))
            say(f"replaced {name}-{ordinal}")
    rest.wait_until(partial(_away, rest))


def _away(rest: Rest) -> str:
    """Return which broker groups cannot be reached: no other goes before they are back."""
    items = rest.call("GET", "/broker-groups")["items"]
    away = [one["name"] for one in items if not one["reachable"] or "reason" in one]
    return f"waiting for {', '.join(away)}" if away else ""


def _not_seen(api: httpx.Client, path: str) -> str:
    """Return which StatefulSet its controller has not looked at since it was changed."""
    found = _get(api, path)
    is_seen = found["status"].get("observedGeneration", 0) >= found["metadata"]["generation"]
    return "" if is_seen else f"{found['metadata']['name']} was not looked at yet"


def _not_evicted(api: httpx.Client, pod: str) -> str:
    name = pod.rpartition("/")[2]
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": pod.split("/")[4]},
    }
    response = api.post(f"{pod}/eviction", json=eviction)
    if response.status_code == HTTPStatus.TOO_MANY_REQUESTS:
        return f"a disruption budget keeps {name}"
    if response.status_code != HTTPStatus.NOT_FOUND:
        checked(response)
    return ""


def _not_ready(api: httpx.Client, path: str, revision: str) -> str:
    name = path.rpartition("/")[2]
    pod = _find(api, path)
    if pod is None or _revision(pod) != revision:
        return f"{name} was not replaced yet"
    conditions = pod["status"].get("conditions", [])
    is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return "" if is_ready else f"{name} is not ready"


def _revision(pod: Json) -> str:
    found: str = pod["metadata"]["labels"].get("controller-revision-hash", "") if pod else ""
    return found


def _get(api: httpx.Client, path: str) -> Json:
    return checked(api.get(path)).json()


def _find(api: httpx.Client, path: str) -> Json:
    response = api.get(path)
    return None if response.status_code == HTTPStatus.NOT_FOUND else checked(response).json()
