"""The roll job replaces broker groups in turn. It waits while another group is unreachable."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httpx
import pytest
from kubernetes.client import ApiException

from tests.support.worlds.memory_kubernetes import Answer, Json, KubernetesServer
from tidemill.common.kubernetes_access import open_client
from tidemill.common.rest_client import RestClient
from tidemill.release.kubernetes_errors import explain_failure
from tidemill.release.patient_rest import PatientRestClient, WaitTimeout
from tidemill.release.rolling import roll

SETS = ["mill-a", "mill-b"]
# The answer of an API server to an eviction that a disruption budget forbids.
BUDGET = {
    "message": "Cannot evict pod as it would violate the pod's disruption budget.",
    "details": {"causes": [{"reason": "DisruptionBudget", "message": "the budget needs 1 pod"}]},
}
CALLS = 12  # of a roll of two pods that nothing disturbs
OUTAGES = [
    Answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"message": "etcdserver: leader changed"}),
    Answer(HTTPStatus.TOO_MANY_REQUESTS, {"message": "Too many requests, please try again later."}),
    Answer(HTTPStatus.SERVICE_UNAVAILABLE, {}),
    None,
]


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
        self.budget = BUDGET
        self.failures: dict[int, Answer | None] = {}  # by number of the call; None: no answer
        self.is_failing_late = False  # calls fail after they were carried out
        self._calls = 0

    def answer(self, method: str, path: str, body: Json) -> Answer | None:
        self._calls += 1
        if self._calls not in self.failures:
            return self._answer(method, path, body)
        if self.is_failing_late:
            self._answer(method, path, body)
        return self.failures[self._calls]

    def _answer(self, method: str, path: str, body: Json) -> Answer:
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
                return Answer(HTTPStatus.TOO_MANY_REQUESTS, self.budget)
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

    def roll(
        self, patience_s: float = 20.0, report: Callable[[str], None] | None = None
    ) -> list[str]:
        reported: list[str] = []
        rest = PatientRestClient(
            RestClient(
                url="http://admin",
                user="helm",
                timeout_s=10.0,
                transport=httpx.MockTransport(self.rest),
            ),
            patience_s=patience_s,
            pause_s=0.02,
        )
        with self.serving():
            roll(open_client(self.access()), "ns", SETS, rest, report or reported.append)
        return reported


def test_roll_replaces_pods_one_after_the_other() -> None:
    cluster = Cluster()
    assert cluster.roll() == ["replaced mill-a-0", "replaced mill-b-0"]
    assert cluster.evicted == ["mill-a-0", "mill-b-0"]


def test_roll_keeps_a_pod_of_the_current_revision() -> None:
    cluster = Cluster()
    cluster.revisions["mill-a-0"] = "new"
    assert cluster.roll() == ["replaced mill-b-0"]


@pytest.mark.parametrize("part", ["message", "details"])
def test_roll_waits_for_a_disruption_budget(part: str) -> None:
    cluster = Cluster(budget_rejections=1)
    cluster.budget = {part: BUDGET[part]}
    assert len(cluster.roll()) == 2
    cluster = Cluster(budget_rejections=1)
    with pytest.raises(WaitTimeout, match="a disruption budget keeps mill-a-0"):
        cluster.roll(patience_s=0)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("failure", OUTAGES)
def test_roll_goes_on_after_an_outage_of_the_api_server(
    failure: Answer | None, *, is_late: bool
) -> None:
    """Each call of a roll fails once. A call may have been carried out before it fails."""
    for number in range(1, CALLS + 1):
        cluster = Cluster()
        cluster.failures = {number: failure}
        cluster.is_failing_late = is_late
        reported = cluster.roll()
        assert reported[-1] == "replaced mill-b-0"
        assert cluster.evicted == ["mill-a-0", "mill-b-0"], "each pod ends once"
        [waiting] = [line for line in reported if line.startswith("waiting: the Kubernetes API")]
        assert "\n" not in waiting


def test_roll_reports_an_outage_once_and_gives_up_with_its_reason() -> None:
    cluster = Cluster()
    cluster.failures = dict.fromkeys(range(2, 1_000), OUTAGES[0])
    reported: list[str] = []
    with pytest.raises(WaitTimeout, match="500 Internal Server Error: etcdserver: leader changed"):
        cluster.roll(patience_s=1.5, report=reported.append)
    assert len(reported) == 1


@pytest.mark.parametrize("status", [401, 403, 404, 409, 422])
def test_roll_ends_at_once_if_the_api_server_rejects_a_call(status: int) -> None:
    cluster = Cluster()
    cluster.failures = {1: Answer(HTTPStatus(status), {"message": "because"})}
    with pytest.raises(ApiException, match=str(status)) as caught:
        cluster.roll()
    why = explain_failure(caught.value)
    assert f"refused a call: {status} " in why
    assert ": because. " in why, "the remedy follows"


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
