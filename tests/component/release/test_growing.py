"""Volumes grow: claims are expanded or replaced in turn, and StatefulSets are copied."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.chart import find, need_helm, objects, rendered_beside
from tests.support.worlds.memory_kubernetes import Answer, Json, KubernetesServer
from tidemill.common.kubernetes_access import open_client
from tidemill.common.rest_client import RestClient
from tidemill.release.growing import GroupVolumes, grow, replace_volumes
from tidemill.release.patient_rest import PatientRestClient, WaitTimeout
from tidemill.release.volume_calls import GrowthRefused

NAME = "mill-broker-0"
INSTALLED = "mill-claims-stay"
PLAN = [GroupVolumes("broker-0", NAME, "20Gi")]
NOT_FOUND = Answer(HTTPStatus.NOT_FOUND, {"message": "not found"})
# The words of Kubernetes about a storage class that cannot expand volumes.
NOT_EXPANDABLE = (
    f'persistentvolumeclaims "data-{NAME}-0" is forbidden: only dynamically provisioned pvc can be'
    " resized and the storageclass that provisions the pvc must support resize"
)


def stateful_set(replicas: int) -> Json:
    size = {"resources": {"requests": {"storage": "10Gi"}}}
    return {
        "metadata": {
            "name": NAME,
            "uid": "first",
            "resourceVersion": "1",
            "generation": 7,
            "labels": {"a": "b"},
        },
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"group": "broker-0"}},
            "serviceName": "mill",
            "template": {"metadata": {"annotations": {"x": "y"}}},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": replicas}},
            "volumeClaimTemplates": [
                {"metadata": {"name": "data", "labels": {"team": "shop"}}, "spec": size}
            ],
        },
        "status": {"replicas": replicas},
    }


class Cluster(KubernetesServer):
    """A broker group with its claims and pods, with the controllers that create them again."""

    def __init__(self, replicas: int, *, expands: bool) -> None:
        super().__init__()
        self.sets: dict[str, Json] = {NAME: stateful_set(replicas)}
        self.claims = {f"data-{NAME}-{n}": "10Gi" for n in range(replicas)}
        self.pods = {f"{NAME}-{n}": f"uid-{n}" for n in range(replicas)}
        self.saved: dict[str, Json] = {}
        # State of the release. Its jobs check a rollback with it.
        self.volumes = "broker-0=10Gi/default/ReadWriteOnce broker-1=10Gi/fast/ReadWriteOnce"
        self.expands = expands
        self.refusal = NOT_EXPANDABLE
        self.refusal_status = HTTPStatus.FORBIDDEN
        self.refusal_of_new = ""  # the reason why the API server creates no claim
        self.tried: list[Json] = []  # claims of which the API server checked the creation
        self.calls: list[tuple[str, str]] = []  # verb and path of each call, with the query
        self.master = 0
        self.behind = 0  # looks until a replica with a new volume is in sync
        self.replaced: list[int] = []
        self.changes_left: int | None = None  # changes before the server fails; None: it works
        # Whether the failing change is carried out without an answer, and the server works again.
        self.is_failing_late = False
        self.rescaled_to: int | None = None  # by the controllers, before the next deletion
        self.replicas_known = 3  # by the controllers
        self.roles: dict[int, Json] = {}  # other than in sync, by replica
        self.sets_missing = 0  # looks at the StatefulSet that do not find it
        self.unready: set[str] = set()  # pods that are not ready whatever their replica does

    def answer(self, method: str, path: str, body: Json) -> Answer | None:
        if method != "GET" and self.changes_left is not None:
            if self.changes_left == 0 and self.is_failing_late:
                self.changes_left = None
                self._carry_out(method, path, body)
                return None
            if self.changes_left == 0:
                return Answer(HTTPStatus.INTERNAL_SERVER_ERROR, {})
            self.changes_left -= 1
        return self._carry_out(method, path, body)

    def _carry_out(self, method: str, path: str, body: Json) -> Answer:
        kind, _, name = path.split("/namespaces/ns/")[1].partition("/")
        match kind:
            case "statefulsets":
                return self._answer_set(method, name, body)
            case "persistentvolumeclaims":
                return self._answer_claim(method, name, body)
            case "pods":
                return self._answer_pod(method, name, body)
            case "configmaps":
                return self._answer_saved(method, name, body)
        raise AssertionError(path)

    def _answer_set(self, method: str, name: str, body: Json) -> Answer:
        if method == "POST":
            assert "uid" not in body["metadata"], "a new object has no id"
            if body["metadata"]["name"] in self.sets:
                return Answer(HTTPStatus.CONFLICT, {"message": "it exists"})
            assert "status" not in body
            body["metadata"] |= {"uid": "second", "resourceVersion": "3"}
            self.sets[body["metadata"]["name"]] = body
            return Answer(HTTPStatus.CREATED, body)
        if name not in self.sets:
            return NOT_FOUND
        if self.sets_missing:
            self.sets_missing -= 1
            return NOT_FOUND
        if method == "DELETE":
            assert body["propagationPolicy"] == "Orphan", "the pods would end"
            assert NAME in "".join(self.saved), "the copy is saved first"
            # A rollback would create a StatefulSet of one replica.
            assert "broker-0=10Gi" not in self.volumes, "a rollback is refused first"
            if self.rescaled_to is not None:
                self.sets[name]["spec"]["replicas"] = self.rescaled_to
                self.sets[name]["metadata"]["resourceVersion"] = "2"
                self.rescaled_to = None
            known = body.get("preconditions", {}).get("resourceVersion")
            if known not in {None, self.sets[name]["metadata"]["resourceVersion"]}:
                return Answer(HTTPStatus.CONFLICT, {"message": "it has changed"})
            del self.sets[name]
            return Answer(HTTPStatus.OK, {})
        return Answer(HTTPStatus.OK, self.sets[name])

    def _answer_claim(self, method: str, name: str, body: Json) -> Answer:
        if method == "POST":
            self.tried.append(body)
            if self.refusal_of_new:
                return Answer(self.refusal_status, {"message": self.refusal_of_new})
            return Answer(HTTPStatus.CREATED, body)
        if method == "DELETE":
            if body.get("preconditions", {}).get("uid") != f"{name}-{self.claims[name]}":
                return Answer(HTTPStatus.CONFLICT, {"message": "it is another claim"})
            self.claims[name] = ""
            return Answer(HTTPStatus.OK, {})
        if method == "PATCH":
            if not self.expands:
                return Answer(self.refusal_status, {"message": self.refusal})
            self.claims[name] = body["spec"]["resources"]["requests"]["storage"]
        if not self.claims[name]:
            return NOT_FOUND
        size = {"resources": {"requests": {"storage": self.claims[name]}}}
        metadata = {"name": name, "uid": f"{name}-{self.claims[name]}"}
        return Answer(HTTPStatus.OK, {"metadata": metadata, "spec": size})

    def _answer_pod(self, method: str, name: str, body: Json) -> Answer:
        if method == "DELETE":
            ordinal = int(name[-1])
            if body.get("preconditions", {}).get("uid") != self.pods[name]:
                return Answer(HTTPStatus.CONFLICT, {"message": "it is another pod"})
            assert self.behind == 0, "one replica at a time"
            assert self.master != ordinal, "the master hands over first"
            self.replaced.append(ordinal)
            self.pods[name] += "-new"
            [template] = self.sets[NAME]["spec"]["volumeClaimTemplates"]
            self.claims[f"data-{name}"] = template["spec"]["resources"]["requests"]["storage"]
            self.behind = 3
            return Answer(HTTPStatus.OK, {})
        if name not in self.pods:
            return NOT_FOUND
        is_ready = self.behind == 0 or not self.pods[name].endswith("-new")
        is_ready = is_ready and name not in self.unready
        self.behind = max(0, self.behind - 1)
        ready = {"type": "Ready", "status": "True" if is_ready else "False"}
        metadata = {"name": name, "uid": self.pods[name]}
        return Answer(HTTPStatus.OK, {"metadata": metadata, "status": {"conditions": [ready]}})

    def _answer_saved(self, method: str, name: str, body: Json) -> Answer:
        if name == INSTALLED:
            if method == "PATCH":
                self.volumes = body["data"]["volumes"]
            return Answer(HTTPStatus.OK, {"data": {"volumes": self.volumes}})
        if method == "POST":
            if body["metadata"]["name"] in self.saved:
                return Answer(HTTPStatus.CONFLICT, {"message": "it exists"})
            self.saved[body["metadata"]["name"]] = body
            return Answer(HTTPStatus.CREATED, body)
        if name not in self.saved:
            return NOT_FOUND
        if method == "PUT":
            self.saved[name] = body
            return Answer(HTTPStatus.OK, body)
        if method == "DELETE":
            del self.saved[name]
            return Answer(HTTPStatus.OK, {})
        return Answer(HTTPStatus.OK, self.saved[name])

    def rest(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            self.master = json.loads(request.content)["target"]
        replicas = [
            {"replica": n, "role": "in-sync"} | self.roles.get(n, {})
            for n in range(self.replicas_known)
        ]
        if self.behind > 0:
            newest = self.replaced[-1] if self.replaced else 2
            replicas[newest]["role"] = "learner"
        in_sync = sum(one["role"] == "in-sync" for one in replicas)
        return httpx.Response(
            200, json={"master": self.master, "inSync": in_sync, "replicas": replicas}
        )

    def run(
        self,
        call: Any,
        patience_s: float = 20.0,
        plan: list[GroupVolumes] = PLAN,
        report: Callable[[str], None] | None = None,
    ) -> list[str]:
        reported: list[str] = []
        report = report or reported.append
        client = RestClient(
            url="http://admin",
            user="helm",
            timeout_s=10.0,
            transport=httpx.MockTransport(self.rest),
        )
        rest = PatientRestClient(client, patience_s=patience_s, pause_s=0.02)
        api = open_client(self.access())
        rest_client: Any = api.rest_client
        send = rest_client.request

        def record(method: str, url: str, **more: Any) -> Any:
            self.calls.append((method, url.partition("/namespaces/ns/")[2]))
            return send(method, url, **more)

        rest_client.request = record  # the server does not see queries
        if call is grow:
            grow(api, "ns", plan, INSTALLED, rest.pause, report)
        else:
            replace_volumes(api, "ns", plan, rest, report)
        return reported

    def shrink(self, count: int, *, keeps_claims: bool) -> None:
        """Remove the highest replicas, as the controllers do."""
        self.sets[NAME]["spec"]["replicas"] = self.replicas_known = count
        for ordinal in range(count, len(self.pods)):
            del self.pods[f"{NAME}-{ordinal}"]
            if not keeps_claims:
                self.claims[f"data-{NAME}-{ordinal}"] = ""
        self.behind = 0

    def size_of_template(self) -> str:
        [template] = self.sets[NAME]["spec"]["volumeClaimTemplates"]
        return str(template["spec"]["resources"]["requests"]["storage"])


@pytest.mark.parametrize("replicas", [1, 3])
def test_claims_expand_and_the_stateful_set_keeps_its_replicas(replicas: int) -> None:
    cluster = Cluster(replicas, expands=True)
    with cluster.serving():
        cluster.run(grow)
        assert set(cluster.claims.values()) == {"20Gi"}
        assert cluster.size_of_template() == "20Gi"
        created = cluster.sets[NAME]
        assert created["spec"]["replicas"] == replicas
        assert created["spec"]["updateStrategy"]["rollingUpdate"]["partition"] == replicas
        assert created["metadata"]["labels"] == {"a": "b"}
        assert cluster.saved == {}
        assert cluster.volumes == (
            "broker-0=20Gi/default/ReadWriteOnce broker-1=10Gi/fast/ReadWriteOnce"
        )
        assert cluster.run(grow) == [], "nothing is left to do"
        assert cluster.run(replace_volumes) == []
    assert cluster.replaced == []


def test_the_only_copy_of_messages_is_never_replaced() -> None:
    cluster = Cluster(1, expands=False)
    with cluster.serving(), pytest.raises(GrowthRefused, match="must support resize"):
        cluster.run(grow)
    assert cluster.sets == {NAME: stateful_set(1)}
    assert cluster.claims == {f"data-{NAME}-0": "10Gi"}


def test_volumes_that_cannot_grow_are_replaced_in_turn() -> None:
    cluster = Cluster(3, expands=False)
    cluster.master = 2
    with cluster.serving():
        cluster.run(grow)
        assert set(cluster.claims.values()) == {"10Gi"}
        assert cluster.size_of_template() == "20Gi"
        cluster.run(replace_volumes)
    assert cluster.replaced == [2, 1, 0]
    assert set(cluster.claims.values()) == {"20Gi"}


def test_a_volume_waits_until_all_replicas_are_in_sync() -> None:
    cluster = Cluster(3, expands=False)
    with cluster.serving():
        cluster.run(grow)
        cluster.behind = 1_000
        with pytest.raises(WaitTimeout, match="replica 2 of broker-0 is not in sync"):
            cluster.run(replace_volumes, patience_s=0)
    assert cluster.replaced == []


def test_a_drained_replica_is_named_in_the_log_with_the_command_that_ends_the_wait() -> None:
    cluster = Cluster(3, expands=False)
    cluster.roles[1] = {"role": "retired", "retired": "drained"}
    reported: list[str] = []
    with cluster.serving():
        cluster.run(grow)
        with pytest.raises(WaitTimeout):
            cluster.run(replace_volumes, patience_s=2.0, report=reported.append)
    why = "replica 1 of broker-0 is drained; end that: tidemill replica undrain broker-0-1"
    assert reported == [f"waiting: {why}"], "it is reported once, and at once"
    assert cluster.replaced == []


@pytest.mark.parametrize("state", ["missing", "not ready"])
def test_no_volume_is_replaced_while_the_pod_of_another_replica_is_not_ready(state: str) -> None:
    """The record of the controllers may still show a replica after its pod has ended."""
    cluster = Cluster(3, expands=False)
    with cluster.serving():
        cluster.run(grow)
        cluster.claims[f"data-{NAME}-2"] = ""
        if state == "missing":
            del cluster.pods[f"{NAME}-2"]
        else:
            cluster.unready.add(f"{NAME}-2")
        with pytest.raises(WaitTimeout, match=f"the pod {NAME}-2 is not ready"):
            cluster.run(replace_volumes, patience_s=0)
    assert cluster.replaced == []


def test_no_volume_is_replaced_while_the_upgrade_replaces_the_pods() -> None:
    """Both at once would end two of three replicas."""
    cluster = Cluster(3, expands=False)
    with cluster.serving():
        cluster.run(grow)
        status = {"replicas": 3, "currentRevision": "one", "updateRevision": "two"}
        cluster.sets[NAME]["status"] = status
        with pytest.raises(WaitTimeout, match="the controllers are replacing the pods of broker-0"):
            cluster.run(replace_volumes, patience_s=0)
        assert cluster.replaced == []
        status["currentRevision"] = "two"
        cluster.run(replace_volumes)
    assert cluster.replaced == [2, 1, 0]


def test_a_volume_that_another_job_has_replaced_meanwhile_is_not_replaced_again() -> None:
    """An upgrade starts its job before Helm has deleted the job of the previous upgrade."""
    cluster = Cluster(3, expands=False)

    def replace_while_it_waits(line: str) -> None:
        if line.startswith("waiting"):
            cluster.roles.clear()
            cluster.claims |= {f"data-{NAME}-{n}": "20Gi" for n in (1, 2)}

    cluster.roles[1] = {"role": "learner"}
    with cluster.serving():
        cluster.run(grow)
        cluster.run(replace_volumes, report=replace_while_it_waits)
    assert cluster.replaced == [0]


@pytest.mark.parametrize("keeps_claims", [True, False])
def test_a_replica_that_is_removed_during_its_copy_does_not_stop_the_job(
    *, keeps_claims: bool
) -> None:
    cluster = Cluster(3, expands=False)
    reported: list[str] = []

    def shrink_during_the_copy(line: str) -> None:
        reported.append(line)
        if line == f"waiting: {NAME}-2 is not ready":
            cluster.shrink(2, keeps_claims=keeps_claims)

    with cluster.serving():
        cluster.run(grow)
        cluster.run(replace_volumes, report=shrink_during_the_copy)
    assert "replica 2 of broker-0 was removed meanwhile" in reported
    assert cluster.replaced == [2, 1, 0]
    assert [cluster.claims[f"data-{NAME}-{n}"] for n in range(2)] == ["20Gi", "20Gi"]


def test_the_volume_of_the_only_replica_that_is_left_is_not_replaced() -> None:
    cluster = Cluster(3, expands=False)

    def shrink_during_the_copy(line: str) -> None:
        if line == f"waiting: {NAME}-2 is not ready":
            cluster.shrink(1, keeps_claims=True)

    with cluster.serving():
        cluster.run(grow)
        with pytest.raises(GrowthRefused, match="has the only copy of the messages of broker-0"):
            cluster.run(replace_volumes, report=shrink_during_the_copy)
    assert cluster.replaced == [2]
    assert cluster.claims[f"data-{NAME}-0"] == "10Gi"


@pytest.mark.parametrize("size", ["20Gi", "30Gi"])
@pytest.mark.parametrize("changes", range(8))
def test_a_job_that_was_killed_at_any_step_is_repeated(changes: int, size: str) -> None:
    cluster = Cluster(3, expands=True)
    cluster.changes_left = changes
    with cluster.serving():
        with pytest.raises(WaitTimeout, match="500"):
            cluster.run(grow, patience_s=0)
        cluster.changes_left = None
        cluster.run(grow, plan=[PLAN[0]._replace(size=size)])
    assert cluster.sets[NAME]["spec"]["replicas"] == 3
    assert cluster.size_of_template() == size
    assert set(cluster.claims.values()) == {size}
    assert cluster.saved == {}


@pytest.mark.parametrize("changes", range(8))
def test_a_change_without_an_answer_is_repeated_without_harm(changes: int) -> None:
    cluster = Cluster(3, expands=True)
    cluster.changes_left, cluster.is_failing_late = changes, True
    with cluster.serving():
        reported = cluster.run(grow)
    assert [line for line in reported if line.startswith("waiting: the Kubernetes API server")]
    assert cluster.size_of_template() == "20Gi"
    assert set(cluster.claims.values()) == {"20Gi"}
    assert cluster.saved == {}


@pytest.mark.parametrize("changes", range(3))
def test_a_deletion_without_an_answer_ends_no_new_pod(changes: int) -> None:
    """The changes are the dry run, the deletion of the claim, and that of the pod."""
    cluster = Cluster(3, expands=False)
    with cluster.serving():
        cluster.run(grow)
        cluster.changes_left, cluster.is_failing_late = changes, True
        cluster.run(replace_volumes)
    assert cluster.replaced == [2, 1, 0]
    assert set(cluster.claims.values()) == {"20Gi"}


def test_a_stateful_set_that_the_controllers_change_meanwhile_keeps_the_change() -> None:
    cluster = Cluster(1, expands=True)
    cluster.rescaled_to = 3
    with cluster.serving():
        cluster.run(grow)
    assert cluster.sets[NAME]["spec"]["replicas"] == 3


def test_a_size_in_another_unit_is_no_change() -> None:
    cluster = Cluster(1, expands=True)
    with cluster.serving():
        assert cluster.run(grow, plan=[PLAN[0]._replace(size="10240Mi")]) == []
    assert cluster.sets == {NAME: stateful_set(1)}


POLICY = (
    f'persistentvolumeclaims "data-{NAME}-0" is forbidden: ValidatingAdmissionPolicy "sizes" denied'
    " request: a claim has at most 15Gi"
)


@pytest.mark.parametrize("status", [HTTPStatus.FORBIDDEN, HTTPStatus.UNPROCESSABLE_ENTITY])
@pytest.mark.parametrize(
    "refusal",
    [
        "exceeded quota: messages, requested: requests.storage=10Gi",
        "maximum storage usage per PersistentVolumeClaim is 10Gi, but request is 20Gi",
        POLICY,
        'User "system:serviceaccount:ns:mill-grow-setup" cannot patch resource',
    ],
)
def test_no_volume_is_replaced_because_of_a_rule_that_refuses_a_new_one_too(
    refusal: str, status: HTTPStatus
) -> None:
    cluster = Cluster(3, expands=False)
    cluster.refusal, cluster.refusal_status = refusal, status
    with cluster.serving(), pytest.raises(GrowthRefused, match=re.escape(refusal)):
        cluster.run(grow)
    assert cluster.sets == {NAME: stateful_set(3)}


def test_a_policy_that_refuses_the_only_volume_of_a_broker_group_is_named() -> None:
    cluster = Cluster(1, expands=False)
    cluster.refusal, cluster.refusal_status = POLICY, HTTPStatus.UNPROCESSABLE_ENTITY
    with cluster.serving(), pytest.raises(GrowthRefused, match=r"at most 15Gi.*Change the quota"):
        cluster.run(grow)


@pytest.mark.parametrize("status", [HTTPStatus.FORBIDDEN, HTTPStatus.UNPROCESSABLE_ENTITY])
@pytest.mark.parametrize(
    "refusal",
    [
        NOT_EXPANDABLE,
        "only bound persistent volume claims can be expanded",
        "spec is immutable after creation except resources.requests for bound claims",
    ],
)
def test_a_volume_that_kubernetes_cannot_expand_is_replaced_whatever_the_status(
    refusal: str, status: HTTPStatus
) -> None:
    cluster = Cluster(3, expands=False)
    cluster.refusal, cluster.refusal_status = refusal, status
    with cluster.serving():
        assert "is replaced after the upgrade" in cluster.run(grow)[0]


def test_no_volume_is_deleted_if_the_new_claim_would_be_refused() -> None:
    cluster = Cluster(3, expands=False)
    with cluster.serving():
        cluster.run(grow)
        cluster.refusal_of_new, cluster.refusal_status = POLICY, HTTPStatus.UNPROCESSABLE_ENTITY
        with pytest.raises(GrowthRefused, match=f"data-{NAME}-2 keeps its volume.*at most 15Gi"):
            cluster.run(replace_volumes)
    assert set(cluster.claims.values()) == {"10Gi"}
    assert cluster.replaced == []


def test_the_trial_of_a_claim_has_the_spec_and_the_labels_of_the_new_one() -> None:
    cluster = Cluster(3, expands=False)
    with cluster.serving():
        cluster.run(grow)
        cluster.run(replace_volumes)
    assert [one["metadata"]["name"] for one in cluster.tried] == [
        f"data-{NAME}-{n}-trial" for n in (2, 1, 0)
    ]
    created = [path for verb, path in cluster.calls if verb == "POST" and "claims" in path]
    assert created == ["persistentvolumeclaims?dryRun=All"] * 3, "nothing is created"
    for one in cluster.tried:
        assert one["metadata"]["labels"] == {"team": "shop", "group": "broker-0"}
        assert one["spec"]["resources"]["requests"]["storage"] == "20Gi"


@pytest.mark.parametrize(
    ("limits", "is_replaced"),
    [
        ("persistentvolumeclaims=3,requests.storage=50Gi", True),
        ("persistentvolumeclaims=2,requests.storage=50Gi", False),
        ("persistentvolumeclaims=3,requests.storage=49Gi", False),
    ],
)
def test_a_quota_counts_the_new_claim_without_the_old_one(limits: str, is_replaced: bool) -> None:
    """The old claim still exists during the trial. Its deletion makes room."""
    cluster = Cluster(3, expands=False)
    with cluster.serving():
        cluster.run(grow)
        cluster.refusal_of_new = (
            f'persistentvolumeclaims "data-{NAME}-2-trial" is forbidden: exceeded quota: messages,'
            " requested: persistentvolumeclaims=1,requests.storage=20Gi,"
            f" used: persistentvolumeclaims=3,requests.storage=40Gi, limited: {limits}"
        )
        if is_replaced:
            cluster.run(replace_volumes)
        else:
            with pytest.raises(GrowthRefused, match="exceeded quota"):
                cluster.run(replace_volumes)
    assert bool(cluster.replaced) == is_replaced


def test_the_volume_of_a_replica_that_an_upgrade_removes_is_not_replaced() -> None:
    """An upgrade to fewer replicas with larger volumes: the controllers remove pods meanwhile."""
    cluster = Cluster(4, expands=False)

    def scale_while_it_waits(line: str) -> None:
        if line.startswith("waiting"):
            cluster.roles.clear()
            cluster.pods.pop(f"{NAME}-3", None)
            cluster.sets[NAME]["spec"]["replicas"] = 3

    cluster.roles[1] = {"role": "learner"}
    with cluster.serving():
        cluster.run(grow)
        cluster.run(replace_volumes, report=scale_while_it_waits)
    assert cluster.replaced == [2, 1, 0]
    assert cluster.claims[f"data-{NAME}-3"] == "10Gi"


VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def rights_in(role: Json) -> set[tuple[str, str, str]]:
    """Return resource, name and verb of each right; creations have no name."""
    return {
        (resource, name, verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
        for verb in rule["verbs"]
    }


def test_each_job_has_only_the_rights_that_it_uses(tmp_path: Path) -> None:
    """Volumes that expand, others, and the copy of a killed job need all rights together."""
    need_helm()
    replicas = 'brokerGroups=[{"name":"broker-0","replicas":3}]'
    larger = ("--set", "broker.persistence.size=20Gi", "--set-json", replicas)
    standing = objects("--set-json", replicas)
    find(standing, "StatefulSet", "tidemill-broker-0")["spec"]["replicas"] = 3
    done = rendered_beside(standing, tmp_path, *larger)
    rendered = [one for one in yaml.safe_load_all(done.stdout) if one]
    for call, role in ((grow, "tidemill-grow-setup"), (replace_volumes, "tidemill-grow")):
        used: set[tuple[str, str, str]] = set()
        for expands in (True, False) if call is grow else (False,):
            cluster = Cluster(3, expands=expands)
            with cluster.serving():
                if call is grow:
                    cluster.saved[f"{NAME}-saved"] = {"data": {}}  # from a job that was killed
                else:
                    cluster.run(grow)
                    cluster.calls.clear()
                    # The StatefulSet is missing for a moment.
                    saved = {"data": {"stateful-set": json.dumps(cluster.sets[NAME])}}
                    cluster.saved[f"{NAME}-saved"] = saved
                    cluster.sets_missing = 1
                cluster.run(call)
            for method, path in cluster.calls:
                resource, _, name = path.partition("?")[0].partition("/")
                used.add((resource, name.replace("mill-", "tidemill-"), VERBS[method]))
        assert used == rights_in(find(rendered, "Role", role))
