"""Values for DNS, IP families, claims and jobs reach all objects that they are for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.test_chart_renders import matches
from tests.support.chart import (
    CHART,
    WORKLOADS,
    Object,
    find,
    need_helm,
    objects,
    pod_of,
    refusal,
    rendered_beside,
)
from tests.support.kubernetes_types import KubernetesTypes

OPENAPI = CHART.parents[1] / "docs" / "openapi.json"
BOUNDS = ("type", "enum", "minimum", "maximum", "minItems", "maxItems", "required")
HA = ("-f", CHART / "values-ha.yaml")
PIPELINE = (
    "--set",
    "pipeline.enabled=true,pipeline.existingClaim=archive,pipeline.userSecret=reader",
)


@pytest.fixture(autouse=True, scope="module")
def _helm() -> None:
    need_helm()


def assert_valid(found: list[Object]) -> None:
    """Check the objects of Kubernetes' own kinds against its types."""
    types = KubernetesTypes()
    wrong = [error for one in found if types.knows(one) for error in types.errors(one)]
    assert not wrong


def test_dns_settings_reach_every_pod() -> None:
    dns = {"nameservers": ["10.0.0.9"], "options": [{"name": "ndots", "value": "2"}]}
    hosts = [{"ip": "10.0.0.7", "hostnames": ["registry.internal"]}]
    found = objects(
        *HA,
        *PIPELINE,
        *("--set", "dnsPolicy=None"),
        *("--set-json", f"dnsConfig={json.dumps(dns)}"),
        *("--set-json", f"hostAliases={json.dumps(hosts)}"),
    )
    pods = [pod_of(one) for one in found if one["kind"] in WORKLOADS]
    assert len(pods) > 8
    for pod in pods:
        assert (pod["dnsPolicy"], pod["dnsConfig"], pod["hostAliases"]) == ("None", dns, hosts)
    assert_valid(found)


def test_ip_families_reach_every_service() -> None:
    found = objects(
        *HA,
        *("--set", "ipFamilyPolicy=PreferDualStack,ipFamilies={IPv6,IPv4}"),
        *("--set", "admin.scaler.enabled=true,monitoring.serviceMonitor.enabled=true"),
    )
    services = [one["spec"] for one in found if one["kind"] == "Service"]
    assert len(services) == 8
    for spec in services:
        assert spec["ipFamilyPolicy"] == "PreferDualStack"
        assert spec["ipFamilies"] == ["IPv6", "IPv4"]
    assert_valid(found)


def test_the_grpc_service_of_the_admin_process_has_the_access_of_the_rest_api() -> None:
    peers = '[{"podSelector":{"matchLabels":{"role":"operator"}}}]'
    closed = ("--set-json", f"networkPolicy.adminFrom={peers}")
    for is_served in (False, True):
        found = objects(*closed, "--set", f"admin.grpc.enabled={str(is_served).lower()}")
        settings = yaml.safe_load(
            find(found, "ConfigMap", "tidemill-admin")["data"]["tidemill.yaml"]
        )
        assert settings.get("admin_grpc_port") == (8082 if is_served else None)
        service = find(found, "Service", "tidemill-admin")["spec"]["ports"]
        container = pod_of(find(found, "Deployment", "tidemill-admin"))["containers"][0]
        policy = find(found, "NetworkPolicy", "tidemill-admin")["spec"]["ingress"][0]
        assert ("grpc" in {port["name"] for port in service}) is is_served
        assert ("grpc" in {port["name"] for port in container["ports"]}) is is_served
        assert ("grpc" in {port["port"] for port in policy["ports"]}) is is_served
        assert policy["from"][-1] == {"podSelector": {"matchLabels": {"role": "operator"}}}
        assert_valid(found)


def test_each_job_may_be_deleted_some_time_after_its_end() -> None:
    several = '[{"name":"broker-0"},{"name":"broker-1"}]'
    found = objects(
        *PIPELINE,
        *("--set-json", f"brokerGroups={several}"),
        *("--set", "jobs.ttlSecondsAfterFinished=3600"),
    )
    jobs = [one["spec"] for one in found if one["kind"] == "Job"]
    jobs += [one["spec"]["jobTemplate"]["spec"] for one in found if one["kind"] == "CronJob"]
    assert len(jobs) == 6
    assert {job["ttlSecondsAfterFinished"] for job in jobs} == {3600}
    assert_valid(found)


CLAIM = ("--set", "brokerGroups[0].name=broker-0,brokerGroups[0].persistence.existingClaim=mine")


def test_a_group_of_one_replica_uses_an_existing_claim() -> None:
    broker = find(objects(*CLAIM), "StatefulSet", "tidemill-broker-0")
    assert "volumeClaimTemplates" not in broker["spec"]
    assert "persistentVolumeClaimRetentionPolicy" not in broker["spec"]
    [data] = [one for one in pod_of(broker)["volumes"] if one["name"] == "data"]
    assert data["persistentVolumeClaim"] == {"claimName": "mine"}
    [container] = pod_of(broker)["containers"]
    assert "ephemeral-storage" in container["resources"]["limits"]


def test_uninstalling_keeps_an_existing_claim() -> None:
    found = objects(*CLAIM, "--set", "broker.persistence.whenDeleted=Delete")
    kept = find(found, "ConfigMap", "tidemill-claims-stay")
    assert "claims of the brokers stay" in kept["data"]["claims"]


def test_an_existing_claim_serves_one_replica_only() -> None:
    one = "brokerGroups[0].name=a,brokerGroups[0].persistence.existingClaim=mine"
    assert "each of its 3 replicas needs its own" in refusal(one, "brokerGroups[0].replicas=3")
    assert "has no effect unless" in refusal(one, "broker.persistence.enabled=false")
    found = refusal(
        "broker.persistence.existingClaim=mine", "brokerGroups[0].name=a", "brokerGroups[1].name=b"
    )
    assert "two groups have the claim mine" in found


@pytest.mark.parametrize("has_changed", [True, False])
def test_a_running_group_keeps_its_kind_of_volume(tmp_path: Path, has_changed: bool) -> None:
    done = rendered_beside(objects() if has_changed else objects(*CLAIM), tmp_path, *CLAIM)
    if has_changed:
        assert "the kind of volume of broker-0 changes" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "tidemill-grow" not in done.stdout


def test_a_running_group_keeps_its_claim(tmp_path: Path) -> None:
    """With another claim, the broker would start with another store."""
    other = [part.replace("mine", "other") for part in CLAIM]
    done = rendered_beside(objects(*CLAIM), tmp_path, *other)
    assert 'persistence.existingClaim of broker-0 changes from "mine" to "other"' in done.stderr


@pytest.mark.parametrize("direction", ["Ingress", "Egress"])
def test_a_network_policy_covers_the_pipeline(direction: str) -> None:
    found = objects(*PIPELINE, "--set", "networkPolicy.egress.enabled=true")
    labels = find(found, "CronJob", "tidemill-pipeline")["spec"]["jobTemplate"]["spec"]["template"]
    policies = [one["spec"] for one in found if one["kind"] == "NetworkPolicy"]
    selectors = [one["podSelector"] for one in policies if direction in one["policyTypes"]]
    assert any(matches(one, labels["metadata"]["labels"]) for one in selectors)


def test_keys_of_tokens_come_from_the_api_server_or_from_a_url() -> None:
    """A server of the Internet gets no token of the pod."""
    on = "security.oidc.enabled=true,networkPolicy.egress.enabled=true"
    for keys, is_asked in (("", True), ("https://issuer.example/keys", False)):
        found = objects("--set", f"{on},security.oidc.keys={keys}")
        for name in ("tidemill-proxy", "tidemill-admin"):
            volumes = pod_of(find(found, "Deployment", name))["volumes"]
            assert ("issuer" in {volume["name"] for volume in volumes}) is is_asked
            [text] = find(found, "ConfigMap", name)["data"].values()
            settings = yaml.safe_load(text)
            assert settings["oidc_keys"].endswith("/openid/v1/jwks" if is_asked else "/keys")
            assert ("oidc_token_file" in settings) is is_asked
            assert settings["oidc_audience"] == "tidemill"
        policies = {one["metadata"]["name"] for one in found if one["kind"] == "NetworkPolicy"}
        assert ("tidemill-issuer" in policies) is is_asked
    assert "security.oidc.enabled has no effect" in refusal(
        "security.oidc.enabled=true", "security.mode=off"
    )


def test_a_change_of_the_claim_is_recorded_for_a_rollback() -> None:
    [check] = pod_of(find(objects(*CLAIM), "Job", "tidemill-check"))["containers"]
    assert "--volumes=broker-0=none/mine" in check["args"]
    recorded = yaml.safe_load(
        find(objects(*CLAIM), "ConfigMap", "tidemill-claims-stay")["data"]["volumes"]
    )
    assert recorded == "broker-0=none/mine"


def field_bounds(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Return the bounds of a value and of its fields, without null and with all references."""
    if "$ref" in schema:
        target = document
        for key in schema["$ref"].removeprefix("#/").split("/"):
            target = target[key]
        return field_bounds(target, document)
    if "anyOf" in schema:
        (kind,) = (one for one in schema["anyOf"] if one != {"type": "null"})
        return field_bounds(kind, document)
    found: dict[str, Any] = {key: schema[key] for key in BOUNDS if key in schema}
    if "enum" in found:
        found.pop("type", None)
    if "items" in schema:
        found["items"] = field_bounds(schema["items"], document)
    for name, field in schema.get("properties", {}).items():
        found[f".{name}"] = field_bounds(field, document)
    return found


@pytest.mark.parametrize(
    ("value", "body"), [("topics", "TopicSettings"), ("groups", "ConsumerGroupSettings")]
)
def test_a_topic_and_a_group_have_the_fields_of_the_rest_api(value: str, body: str) -> None:
    """The provision job sends them as they are. `force` is only for a single request."""
    api = json.loads(OPENAPI.read_text("utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    expected = field_bounds(api["components"]["schemas"][body], api)
    expected.pop(".force", None)
    found = field_bounds(schema["properties"][value]["items"], schema)
    assert found.pop("required") == ["name"]
    del found[".name"]
    assert found == expected


def test_the_provision_job_gets_all_fields_of_a_topic() -> None:
    topic = {"name": "later", "messageType": "DELAY", "queues": 4, "deliverySpreadMs": 5000}
    found = objects("--set-json", f"topics={json.dumps([topic])}")
    wanted = find(found, "ConfigMap", "tidemill-provision")["data"]["wanted.json"]
    assert json.loads(wanted)["topics"] == [topic]


def scraped_containers(found: list[Object]) -> list[Object]:
    processes = ("broker", "proxy", "admin", "controller")
    containers = [
        container
        for one in found
        if one["kind"] in {"StatefulSet", "Deployment"}
        for container in pod_of(one)["containers"]
        if container["name"] in processes
    ]
    assert {container["name"] for container in containers} == set(processes)
    return containers


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_a_token_of_metrics_reaches_each_process_and_the_monitors(kind: str) -> None:
    monitor = kind[0].lower() + kind[1:]
    options = ("--set", f"monitoring.auth.enabled=true,monitoring.{monitor}.enabled=true")
    found = objects(*HA, *options)
    for container in scraped_containers(found):
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert mounts["metrics-token"] == "/etc/tidemill-metrics"
    secrets = {
        volume["secret"]["secretName"]
        for one in found
        if one["kind"] in {"StatefulSet", "Deployment"}
        for volume in pod_of(one)["volumes"]
        if volume["name"] == "metrics-token"
    }
    assert secrets == {"tidemill-metrics-token"}
    texts = [
        text
        for one in found
        if one["kind"] == "ConfigMap"
        for name, text in one.get("data", {}).items()
        if name == "tidemill.yaml"
    ]
    assert len(texts) >= 4
    for text in texts:
        assert yaml.safe_load(text)["metrics_token_file"] == "/etc/tidemill-metrics/token"
    spec = find(found, kind, "tidemill")["spec"]
    [endpoint] = spec["podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"]
    credentials = {"name": "tidemill-metrics-token", "key": "token"}
    assert endpoint["authorization"] == {"type": "Bearer", "credentials": credentials}
    # The certificate job may write this Secret, and makes the token.
    roles = [one for one in found if one["kind"] == "Role" and "certificates" in str(one)]
    assert roles
    assert all("tidemill-metrics-token" in str(role["rules"]) for role in roles)
    assert_valid(found)


def test_metrics_need_no_token_by_default() -> None:
    found = objects("--set", "monitoring.serviceMonitor.enabled=true")
    assert "metrics-token" not in str(found)
    assert "metrics_token_file" not in str(found)
    [endpoint] = find(found, "ServiceMonitor", "tidemill")["spec"]["endpoints"]
    assert "authorization" not in endpoint


def test_an_own_secret_has_the_token_of_metrics() -> None:
    auth = "monitoring.auth.enabled=true,monitoring.auth.existingSecret=mine"
    found = objects(
        *HA, "--set", f"{auth},monitoring.auth.key=word,monitoring.podMonitor.enabled=true"
    )
    assert "tidemill-metrics-token" not in str(found)
    [endpoint] = find(found, "PodMonitor", "tidemill")["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "mine", "key": "word"}
    for one in found:
        if one["kind"] in {"StatefulSet", "Deployment"}:
            [volume] = [v for v in pod_of(one)["volumes"] if v["name"] == "metrics-token"]
            assert volume["secret"]["secretName"] == "mine"
            assert volume["secret"]["items"] == [{"key": "word", "path": "token"}]
