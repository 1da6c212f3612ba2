"""The roll job replaces broker groups in turn. It waits while another group is unreachable."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import httpx
import pytest

from tests.support.worlds.memory_kubernetes import Answer, Json, KubernetesServer
from tidemill.common.kubernetes_access import open_client
from tidemill.common.rest_client import RestClient
from tidemill.release.patient_rest import PatientRestClient, WaitTimeout
from tidemill.release.rolling import roll

SETS = ["mill-a", "mill-b"]


class Cluster(KubernetesServer):
    """StatefulSets of one replica, with a controller and a kubelet that replace evicted pods."""

    def __init__(self, *, budget_rejections: int = 0) -> None:
        super().__init__()
        self.revisions = {f"{name}-0": "old" for name in SETS}
        self.unreachable: set[str] = set()
        self.broken: set[str] = set()  # pods that a bad template keeps from being ready
        self.starting = ""  # a broken pod that becomes ready when another pod is evicted
        self.evicted: list[str] = []
        self._budget_rejections = budget_rejections

    def answer(self, method: str, path: str, body: Json) -> Answer:
        name = path.rstrip("/").split("/")[7 if "apps" in path else 6]
        if "statefulsets" in path:
            status = {"updateRevision": "new", "observedGeneration": 3, "replicas": 1}
            metadata = {"name": name, "generation": 3}
            spec = {"replicas": 1, "selector": {}, "template": {}, "serviceName": "mill"}
            return Answer(HTTPStatus.OK, {"metadata": metadata, "spec": spec, "status": status})
        if path.endswith("/eviction"):
            assert body["metadata"] == {"name": name, "namespace": "ns"}
            if self._budget_rejections:
                self._budget_rejections -= 1
                return Answer(HTTPStatus.TOO_MANY_REQUESTS, {})
            assert name in self.broken or not self.unreachable, "one pod at a time"
            self.broken -= {name, self.starting}
            self.unreachable.discard(self.starting)
            self.evicted.append(name)
            self.unreachable.add(name)
            self.revisions[name] = ""
            # The API server answers with a Status, and not with the kind that was sent.
            return Answer(HTTPStatus.CREATED, {"kind": "Status", "status": "Success", "code": 201})
        revision = self.revisions[name]
        if not revision:
            # The next call finds the new pod, and the call after that finds it ready.
            self.revisions[name] = "new"
            return Answer(HTTPStatus.NOT_FOUND, {})
        is_ready = name not in self.broken
        if is_ready and revision == "new":
            self.unreachable.discard(name)
        conditions = [{"type": "Ready", "status": "True" if is_ready else "False"}]
        labels = {"controller-revision-hash": revision}
        return Answer(
            HTTPStatus.OK, {"metadata": {"labels": labels}, "status": {"conditions": conditions}}
        )

    def rest(self, _request: httpx.Request) -> httpx.Response:
        items: list[dict[str, Any]] = [
            {"name": name, "reachable": f"{name}-0" not in self.unreachable} for name in SETS
        ]
        return httpx.Response(200, json={"items": items})

    def roll(self, patience_s: float = 20.0) -> list[str]:
        reported: list[str] = []
        rest = PatientRestClient(
            RestClient(
                url="http://admin",
                user="helm",
                timeout_s=10.0,
                transport=httpx.MockTransport(self.rest),
            ),
            patience_s=patience_s,
        )
        with self.serving():
            roll(open_client(self.access()), "ns", SETS, rest, reported.append)
        return reported


def test_roll_replaces_pods_one_after_the_other() -> None:
    cluster = Cluster()
    assert cluster.roll() == ["replaced mill-a-0", "replaced mill-b-0"]
    assert cluster.evicted == ["mill-a-0", "mill-b-0"]


def test_roll_keeps_a_pod_of_the_current_revision() -> None:
    cluster = Cluster()
    cluster.revisions["mill-a-0"] = "new"
    assert cluster.roll() == ["replaced mill-b-0"]


def test_roll_waits_for_a_disruption_budget() -> None:
    cluster = Cluster(budget_rejections=1)
    assert len(cluster.roll()) == 2


def test_roll_replaces_no_pod_while_another_group_is_unreachable() -> None:
    cluster = Cluster()
    cluster.unreachable.add("mill-b-0")
    with pytest.raises(WaitTimeout, match="waiting for mill-b"):
        cluster.roll(patience_s=0)
    assert cluster.evicted == []


def test_roll_begins_with_pods_that_are_not_ready() -> None:
    """Their groups are unreachable because of the old template, so a rollback is the remedy."""
    cluster = Cluster()
    cluster.broken = {"mill-b-0"}
    cluster.unreachable = {"mill-b-0"}
    assert cluster.roll() == ["replaced mill-b-0, which was not ready", "replaced mill-a-0"]
    assert cluster.evicted == ["mill-b-0", "mill-a-0"]


def test_roll_takes_no_pod_that_has_become_ready_for_broken() -> None:
    cluster = Cluster()
    cluster.broken = {"mill-a-0", "mill-b-0"}  # both have just started
    cluster.unreachable = {"mill-a-0", "mill-b-0"}
    cluster.starting = "mill-b-0"
    assert cluster.roll() == ["replaced mill-a-0, which was not ready", "replaced mill-b-0"]
