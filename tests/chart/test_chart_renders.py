"""The chart renders the expected objects, of types that the Kubernetes API accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.render import GOLDEN, PROFILES, profile
from tests.support.chart import (
    CHART,
    NAMESPACE,
    WORKLOADS,
    find,
    need_helm,
    objects,
    pod_of,
    rendered,
)
from tests.support.kubernetes_types import FOREIGN_FILE, KubernetesTypes
from tidemill.broker.settings import BrokerSettings
from tidemill.common.known_settings import KNOWN_KEYS
from tidemill.common.settings import ProcessSettings
from tidemill.controller.settings import ControllerSettings
from tidemill.proxy.settings import ProxySettings
from tidemill.security.job_users import Job

CLUSTER_WIDE = {"PriorityClass", "ClusterRole", "ClusterRoleBinding"}
# The verbs `create`, `list` and `watch` cannot be limited by name.
UNNAMED = (
    (["secrets"], ["create"]),
    (["leases"], ["create"]),
    (["brokergroups"], ["get", "list", "watch"]),
)
MIB = 1 << 20

Object = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def _helm() -> None:
    need_helm()


@pytest.fixture(scope="module", params=PROFILES)
def found(request: pytest.FixtureRequest) -> list[Object]:
    """The rendered objects of a profile."""
    text = profile(request.param)
    return [one for one in yaml.safe_load_all(text) if one is not None]


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_renders_as_its_golden_file(name: str) -> None:
    golden = GOLDEN / f"{name}.yaml"
    assert profile(name) == golden.read_text("utf-8"), "look at the difference: make charts"


def test_every_object_matches_the_api_types(found: list[Object]) -> None:
    ours = KubernetesTypes.of_definition(CHART / "crds" / "brokergroups.yaml")
    known = KubernetesTypes(), KubernetesTypes(FOREIGN_FILE), ours
    wrong = []
    for one in found:
        of_its_kind = [types for types in known if types.knows(one)]
        wrong += of_its_kind[0].errors(one) if of_its_kind else [f"{one['kind']} is not known"]
    assert not wrong, "\n".join(wrong)


def test_no_two_objects_have_one_name(found: list[Object]) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert len(names) == len(set(names))


def test_all_of_it_has_the_usual_labels_and_a_namespace(found: list[Object]) -> None:
    for one in found:
        if one["metadata"]["name"].endswith("-more"):
            continue  # The user's own.
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "tidemill"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        if one["kind"] not in CLUSTER_WIDE:
            assert one["metadata"]["namespace"] == NAMESPACE


def test_selectors_meet_the_labels_of_their_pods(found: list[Object]) -> None:
    templates = [
        one["spec"]["template"]["metadata"]["labels"]
        for one in found
        if one["kind"] in {"StatefulSet", "Deployment"}
    ]
    for one in found:
        selector = (
            one["spec"].get("selector", {}) if one["kind"] != "ConfigMap" and "spec" in one else {}
        )
        wanted = selector.get("matchLabels", selector if one["kind"] == "Service" else {})
        if wanted:
            assert any(wanted.items() <= labels.items() for labels in templates), one["metadata"]


def test_pods_run_with_the_least_privileges(found: list[Object]) -> None:
    for one in [each for each in found if each["kind"] in WORKLOADS]:
        pod = pod_of(one)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        # Only pods that write Secrets or records or replace pods have a token for the API.
        name = one["metadata"]["name"]
        is_writer = name.endswith(("certificates", "certificates-setup", "roll"))
        assert pod["automountServiceAccountToken"] is (is_writer or "-controller-" in name)
        assert pod["enableServiceLinks"] is False
        own = [each for each in pod["containers"] if each["name"] != "beside"]
        for container in own:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"]


def test_roles_grant_access_to_named_objects_only(found: list[Object]) -> None:
    for role in [one for one in found if one["kind"] == "Role"]:
        for rule in role["rules"]:
            if (rule["resources"], rule["verbs"]) not in UNNAMED:
                assert rule["resourceNames"]
    assert not [one for one in found if one["kind"].startswith("ClusterRole")]


def test_every_variable_of_ours_is_a_setting(found: list[Object]) -> None:
    """A process refuses to start with an unknown variable."""
    others = {"admin", "admin_token_file", "admin_ca_file", "admin_plain_token"}
    others |= {"user", "secret_file"}  # of the command line
    for one in [each for each in found if each["kind"] in WORKLOADS]:
        for container in pod_of(one)["containers"]:
            for variable in container.get("env", []):
                if variable["name"].startswith("TIDEMILL_"):
                    name = variable["name"].removeprefix("TIDEMILL_").lower()
                    assert name in KNOWN_KEYS | others


def test_every_process_takes_its_file(found: list[Object], tmp_path: Path) -> None:
    """The settings of the processes read the ConfigMaps."""
    models: dict[str, type[ProcessSettings]] = {
        "broker": BrokerSettings,
        "proxy": ProxySettings,
        "controller": ControllerSettings,
    }
    seen = 0
    for one in [each for each in found if each["kind"] == "ConfigMap"]:
        component = (
            one["metadata"]["labels"].get("app.kubernetes.io/component")
            if "labels" in one["metadata"]
            else None
        )
        if "tidemill.yaml" in one.get("data", {}) and component in models:
            file = tmp_path / f"{seen}.yaml"
            file.write_text(one["data"]["tidemill.yaml"], "utf-8")
            # The pod gives each of several replicas its number and its address.
            is_replica = component == "broker" and "controllers" in yaml.safe_load(file.read_text())
            address = "--replica-address=broker-0-0.brokers:10911"
            more = ["--replica-id=0", address] if is_replica else []
            settings = models[component].load([f"--config={file}", *more])
            assert settings.log_format == "json"
            seen += 1
    assert seen >= 2


def test_a_stop_has_the_time_that_draining_may_take() -> None:
    found = objects("-f", PROFILES["everything"][0])
    broker = pod_of(find(found, "StatefulSet", "mill-fast"))
    assert broker["terminationGracePeriodSeconds"] == 13 + 20
    assert pod_of(find(found, "Deployment", "mill-proxy"))["terminationGracePeriodSeconds"] == 99
    proxy = pod_of(find(objects(), "Deployment", "tidemill-proxy"))
    assert proxy["terminationGracePeriodSeconds"] == 3 + 5 + 7


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("512Mi", 256 * MIB), ("1Gi", 512 * MIB), ("1G", 500_000_000), ("536870912", 256 * MIB)],
)
def test_a_proxy_holds_half_its_memory_for_clients(limit: str, expected: int) -> None:
    # As in a values file: Helm reads a number there as a float.
    text = limit if limit.isdigit() else f'"{limit}"'
    found = objects("--set-json", f"proxy.resources.limits.memory={text}")
    settings = yaml.safe_load(find(found, "ConfigMap", "tidemill-proxy")["data"]["tidemill.yaml"])
    assert settings["memory_bytes_max"] == expected


def test_the_default_release_asks_for_little() -> None:
    asked = [
        container["resources"]["requests"]
        for one in objects()
        if one["kind"] in {"StatefulSet", "Deployment"}
        for container in pod_of(one)["containers"]
    ]
    assert sum(int(each["memory"].removesuffix("Mi")) for each in asked) <= 1024
    assert sum(int(each["cpu"].removesuffix("m")) for each in asked) <= 500


def test_settings_of_a_broker_group_override_the_common_ones() -> None:
    found = objects("-f", PROFILES["everything"][0])
    fast, plain = (
        find(found, "StatefulSet", "mill-fast"),
        find(found, "StatefulSet", "mill-broker-0"),
    )
    settings = yaml.safe_load(find(found, "ConfigMap", "mill-fast")["data"]["tidemill.yaml"])
    assert settings["retention_bytes"] == 549755813888
    assert settings["retention_ms"] == 3600000
    [claim] = fast["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "ssd"
    assert "storageClassName" not in plain["spec"]["volumeClaimTemplates"][0]["spec"]


def test_names_stay_when_replication_comes() -> None:
    """ADR 0035: objects with data have the same names as with several replicas."""
    found = objects()
    broker = find(found, "StatefulSet", "tidemill-broker-0")
    assert broker["spec"]["serviceName"] == "tidemill-broker-0"
    assert broker["spec"]["podManagementPolicy"] == "Parallel"
    assert broker["spec"]["persistentVolumeClaimRetentionPolicy"] == {
        "whenDeleted": "Retain",
        "whenScaled": "Retain",
    }
    service = find(found, "Service", "tidemill-broker-0")["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    members = find(found, "ConfigMap", "tidemill-members")["data"]["brokers"]
    assert members == "tidemill-broker-0-0.tidemill-broker-0:10911"
    [container] = pod_of(broker)["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["TIDEMILL_REPLICA_NAME"] == "broker-0-$(POD_ORDINAL)"
    assert variables["TIDEMILL_NODE_ID"] == "$(POD_NAME)"


def test_another_broker_group_restarts_no_process() -> None:
    """The home reports it to the proxies. Only later starts read the longer list."""
    more = ("--set", "brokerGroups[0].name=broker-0,brokerGroups[1].name=broker-1")
    before, after = objects(), objects(*more)
    for name in ("tidemill-proxy", "tidemill-admin"):
        assert find(before, "Deployment", name) == find(after, "Deployment", name)
    one, two = (find(all_of, "StatefulSet", "tidemill-broker-0") for all_of in (before, after))
    assert one["spec"]["template"] == two["spec"]["template"]


THREE = ("--set", "brokerGroups[0].name=broker-0,brokerGroups[0].replicas=3")


def test_replicas_get_their_id_and_all_controller_addresses() -> None:
    found = objects(*THREE, "--set", "controller.replicas=3")
    controllers = [f"tidemill-controller-{number}:10912" for number in range(3)]
    for kind, name in (
        ("ConfigMap", "tidemill-broker-0"),
        ("ConfigMap", "tidemill-proxy"),
        ("ConfigMap", "tidemill-admin"),
    ):
        settings = yaml.safe_load(find(found, kind, name)["data"]["tidemill.yaml"])
        assert settings["controllers"] == controllers
    for address in controllers:
        find(found, "Service", address.partition(":")[0])
    [broker] = pod_of(find(found, "StatefulSet", "tidemill-broker-0"))["containers"]
    variables = {each["name"]: each.get("value") for each in broker["env"]}
    assert variables["TIDEMILL_REPLICA_ID"] == "$(POD_ORDINAL)"
    address = "$(POD_NAME).tidemill-broker-0:10911"
    assert variables["TIDEMILL_REPLICA_ADDRESS"] == address
    # Kubernetes expands a variable that is set earlier in the list.
    assert list(variables).index("POD_NAME") < list(variables).index("TIDEMILL_REPLICA_ADDRESS")


def test_only_controllers_set_the_replica_count() -> None:
    """With a number in the StatefulSet, an upgrade would overwrite the controllers' number."""
    found = objects(*THREE)
    spec = find(found, "StatefulSet", "tidemill-broker-0")["spec"]
    assert "replicas" not in spec
    assert spec["updateStrategy"] == {"type": "RollingUpdate"}, "the partition is theirs too"
    group = find(found, "BrokerGroup", "tidemill-broker-0")
    assert group["spec"] == {
        "group": "broker-0",
        "replicas": 3,
        "minInSync": 2,
        "statefulSet": "tidemill-broker-0",
    }
    # A release deletion keeps the record: without it, replicas with data cannot become master.
    assert group["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    rules = find(found, "Role", "tidemill-controller")["rules"]
    [scale] = [rule for rule in rules if rule["resources"] == ["statefulsets"]]
    assert scale["resourceNames"] == ["tidemill-broker-0"]
    assert find(objects(), "StatefulSet", "tidemill-broker-0")["spec"]["replicas"] == 1


def test_one_replica_in_each_group_needs_no_controller() -> None:
    assert not [one for one in objects() if "controller" in one["metadata"]["name"]]
    assert not [one for one in objects() if one["kind"] == "BrokerGroup"]


def test_anti_affinity_separates_replicas_of_one_broker_group_only() -> None:
    rule = "requiredDuringSchedulingIgnoredDuringExecution"
    for number in range(3):
        name = f"tidemill-broker-{number}"
        found = find(objects("-f", CHART / "values-prod.yaml"), "StatefulSet", name)
        [term] = pod_of(found)["affinity"]["podAntiAffinity"][rule]
        labels = term["labelSelector"]["matchLabels"]
        assert labels["tidemill.io/broker-group"] == f"broker-{number}"


def test_several_broker_groups_are_replaced_in_turn() -> None:
    groups = [{"name": f"broker-{number}"} for number in range(3)]
    replicated = {"name": "broker-3", "replicas": 3}
    several = objects("--set-json", f"brokerGroups={json.dumps([*groups, replicated])}")
    for number in range(3):
        spec = find(several, "StatefulSet", f"tidemill-broker-{number}")["spec"]
        assert spec["updateStrategy"] == {"type": "OnDelete"}
    # Controllers replace replicas, so the job does not include them.
    spec = find(several, "StatefulSet", "tidemill-broker-3")["spec"]
    assert spec["updateStrategy"] == {"type": "RollingUpdate"}
    prod = objects("-f", CHART / "values-prod.yaml")
    assert not [one for one in prod if one["metadata"]["name"] == "tidemill-roll"]
    sets = ",".join(f"tidemill-broker-{number}" for number in range(3))
    [container] = pod_of(find(several, "Job", "tidemill-roll"))["containers"]
    assert f"--stateful-sets={sets}" in container["args"]
    alone = find(objects(), "StatefulSet", "tidemill-broker-0")["spec"]
    assert alone["updateStrategy"] == {"type": "RollingUpdate"}


def paths_of(values: Object, above: str = "") -> list[str]:
    """Return the paths of all values and maps that the chart, not Kubernetes, defines."""
    theirs = {
        "resources",
        "podSecurityContext",
        "securityContext",
        "startupProbe",
        "livenessProbe",
        "readinessProbe",
        "strategy",
        "targetCPUUtilizationPercentage",
    }
    found = []
    for name, value in values.items():
        if name not in theirs:
            found.append(above + name)
            found += paths_of(value, f"{above}{name}.") if isinstance(value, dict) else []
    return found


VALUES: Object = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))


# Every chart version has broker groups. The chart rejects an empty list.
@pytest.mark.parametrize("top", sorted(VALUES.keys() - {"brokerGroups"}))
def test_values_of_an_older_chart_are_enough(top: str) -> None:
    """`helm upgrade --reuse-values` passes only the values of the older chart."""
    paths = paths_of({top: VALUES[top]})
    maps = [path for path in paths if any(each.startswith(f"{path}.") for each in paths)]
    leaves = [path for path in paths if path not in maps]
    expected = rendered()
    # Each map separately, and then all values outside maps at once.
    for missing in [*([path] for path in maps), leaves]:
        sets = ",".join(f"{path}=null" for path in missing)
        assert rendered("--set", sets) == expected, missing


def test_a_null_value_removes_a_kubernetes_default() -> None:
    """A `null` removes a default, for example the user id on OpenShift."""
    sets = "proxy.livenessProbe=null,proxy.podSecurityContext.fsGroup=null,admin.resources=null"
    found = objects("--set", sets)
    proxy, admin = (
        pod_of(find(found, "Deployment", f"tidemill-{of}")) for of in ("proxy", "admin")
    )
    assert "livenessProbe" not in proxy["containers"][0]
    assert "fsGroup" not in proxy["securityContext"]
    assert "resources" not in admin["containers"][0]


def test_every_template_makes_its_values_whole() -> None:
    for path in (CHART / "templates").rglob("*"):
        if path.suffix in {".yaml", ".txt"}:
            assert path.read_text("utf-8").startswith('{{- include "tidemill.values" . -}}'), path


def test_every_value_is_in_the_schema_and_every_profile_lints() -> None:
    """Helm checks the schema when it renders. The schema must have all keys of values.yaml."""
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    schema = yaml.safe_load((CHART / "values.schema.json").read_text("utf-8"))
    assert values.keys() <= schema["properties"].keys()
    for name in ("broker", "proxy", "admin", "controller", "jobs"):
        assert values[name].keys() == schema["properties"][name]["properties"].keys()


def test_no_name_is_longer_than_kubernetes_takes() -> None:
    """Kubernetes adds a hash to a StatefulSet's name in pod labels, and to a CronJob's in jobs."""
    longest = ("--set", "brokerGroups[0].name=g1234567890123456789")
    for one in objects(*longest, release="tidemill-" + "r" * 22):
        limit = {"StatefulSet": 52, "CronJob": 52}.get(one["kind"], 63)
        assert len(one["metadata"]["name"]) <= limit, one["metadata"]["name"]


def test_every_chart_value_has_a_description() -> None:
    """A line `# --` stands above each value, except Kubernetes' own fields and headings."""
    theirs = {
        "requests",
        "limits",
        "httpGet",
        "periodSeconds",
        "timeoutSeconds",
        "failureThreshold",
        "runAsNonRoot",
        "runAsUser",
        "runAsGroup",
        "fsGroup",
        "fsGroupChangePolicy",
        "seccompProfile",
        "allowPrivilegeEscalation",
        "readOnlyRootFilesystem",
        "capabilities",
        "rollingUpdate",
    }
    comment, silent = "", []
    for number, line in enumerate((CHART / "values.yaml").read_text("utf-8").splitlines(), 1):
        key, _, value = line.strip().partition(":")
        if line.strip().startswith("#"):
            comment += line.strip()
            continue
        if value and key.isalpha() and key not in theirs and "# --" not in comment:
            silent.append(f"{number}: {line.strip()}")
        comment = ""
    # The types of strategies, below the line that describes them.
    assert [each for each in silent if not each.endswith("type: RollingUpdate")] == []


def test_a_job_of_the_rest_api_runs_when_its_token_was_made() -> None:
    """If an upgrade adds a token, the check before the upgrade waits for it."""
    found = objects("--set", "admin.auth.enabled=true", "--set", "admin.tls.enabled=true")
    weights = {
        name: int(find(found, "Job", name)["metadata"]["annotations"]["helm.sh/hook-weight"])
        for name in ("tidemill-certificates-setup", "tidemill-check")
    }
    assert weights["tidemill-certificates-setup"] < weights["tidemill-check"]


def test_closed_egress_leaves_dns_open_wherever_it_is() -> None:
    """A cache on the node is not a pod, and DNS in pods may listen on another port."""
    policy = find(objects("-f", CHART / "values-prod.yaml"), "NetworkPolicy", "tidemill-egress")
    [dns] = [
        rule for rule in policy["spec"]["egress"] if any(one["port"] == 53 for one in rule["ports"])
    ]
    assert "to" not in dns
    assert {(one["port"], one["protocol"]) for one in dns["ports"]} == {
        (port, protocol) for port in (53, 5353) for protocol in ("UDP", "TCP")
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("broker.persistence.whenDeleted=Delete", "deletes the messages of broker-0"),
        ("broker.persistence.enabled=false", "deletes the messages of broker-0"),
        ("broker.persistence.whenDeleted=Retain", "claims of the brokers stay"),
    ],
)
def test_notes_state_whether_uninstalling_keeps_claims(value: str, expected: str) -> None:
    kept = find(objects("--set", value), "ConfigMap", "tidemill-claims-stay")
    assert expected in kept["data"]["claims"]


def test_a_secret_of_a_public_authority_is_enough() -> None:
    """The Secret has no ca.crt. A volume that requires one would prevent the pod's start."""
    found = objects(
        "--set",
        "admin.tls.enabled=true,admin.tls.existingSecret=public",
        "--set",
        "proxy.tls.mode=required,proxy.tls.existingSecret=public",
    )
    jobs = [pod_of(one) for one in found if one["kind"] in {"Job", "Pod"}]
    secrets = [
        volume["secret"]
        for pod in jobs
        for volume in pod.get("volumes", [])
        if volume.get("secret", {}).get("secretName") == "public"
    ]
    assert len(secrets) >= 3
    assert all(secret["optional"] for secret in secrets)


def test_the_test_shows_a_certificate_where_clients_must() -> None:
    asked = ("--set", "proxy.tls.mode=required,proxy.tls.existingSecret=front")
    client = ("--set", "proxy.tls.clientCertificates=true")
    assert not [one for one in objects(*asked, *client) if one["kind"] == "Pod"]
    found = objects(*asked, *client, "--set", "proxy.tls.testSecret=somebody")
    pod = pod_of(find(found, "Pod", "tidemill-test"))
    assert "--certificate-file=/etc/tidemill-test-tls/tls.crt" in pod["containers"][0]["args"]
    assert "somebody" in str(pod["volumes"])


def test_job_annotations_apply_to_every_job() -> None:
    """A queue, a quota or a mesh applies to every pod."""
    sets = "jobs.annotations.x=why,jobs.podLabels.l=m,jobs.podAnnotations.p=q"
    found = objects("-f", CHART / "values-ha.yaml", "--set", sets)
    jobs = [one for one in found if one["kind"] in {"Job", "CronJob"}]
    for one in jobs:
        assert one["metadata"]["annotations"]["x"] == "why", one["metadata"]["name"]
    [cron] = [one["spec"]["jobTemplate"] for one in jobs if one["kind"] == "CronJob"]
    assert cron["metadata"]["annotations"] == {"x": "why"}
    pod = find(found, "Pod", "tidemill-test")["metadata"]
    assert (pod["labels"]["l"], pod["annotations"]["p"]) == ("m", "q")


def test_only_pods_that_own_data_have_local_volumes() -> None:
    """`kubectl drain` and the cluster autoscaler refuse to evict a pod with an emptyDir."""
    for one in objects("-f", CHART / "values-ha.yaml"):
        if one["kind"] == "Deployment":
            volumes = pod_of(one).get("volumes", [])
            assert not [volume for volume in volumes if "emptyDir" in volume], one["metadata"]


def test_priority_classes_of_two_namespaces_have_two_names() -> None:
    found = objects("--set", "priorityClass.create=true")
    [priority] = [one for one in found if one["kind"] == "PriorityClass"]
    assert priority["metadata"]["name"] == f"{NAMESPACE}-tidemill"
    assert pod_of(find(found, "Deployment", "tidemill-proxy"))["priorityClassName"] == (
        f"{NAMESPACE}-tidemill"
    )


def matches(selector: Object, labels: dict[str, str]) -> bool:
    """Return whether the selector of a NetworkPolicy selects a pod with these labels."""
    wanted = selector.get("matchLabels", {}).items()
    return all(labels.get(key) == value for key, value in wanted) and all(
        labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", [])
    )


@pytest.mark.parametrize("direction", ["Ingress", "Egress"])
def test_a_network_policy_covers_each_pod_of_the_release(direction: str) -> None:
    """A namespace that denies by default has no connections without one."""
    found = objects(
        *("-f", CHART / "values-ha.yaml", "--set", "networkPolicy.egress.enabled=true"),
        *("--set-json", 'topics=[{"name":"orders"}]'),
    )
    policies = [one["spec"] for one in found if one["kind"] == "NetworkPolicy"]
    selectors = [one["podSelector"] for one in policies if direction in one["policyTypes"]]
    pods = [one["metadata"] for one in found if one["kind"] == "Pod"]
    for one in found:
        if one["kind"] in WORKLOADS and one["kind"] != "Pod":
            spec = one["spec"]
            template = spec["jobTemplate"]["spec"] if one["kind"] == "CronJob" else spec
            pods.append(template["template"]["metadata"])
    assert len(pods) > 8
    for pod in pods:
        assert any(matches(one, pod["labels"]) for one in selectors), pod


def test_the_policy_of_the_jobs_exists_before_the_first_job() -> None:
    found = objects("--set", "networkPolicy.egress.enabled=true")
    policy = find(found, "NetworkPolicy", "tidemill-jobs-setup")["metadata"]["annotations"]
    job = find(found, "Job", "tidemill-certificates-setup")["metadata"]["annotations"]
    assert "pre-install" in policy["helm.sh/hook"]
    assert int(policy["helm.sh/hook-weight"]) < int(job["helm.sh/hook-weight"])


def test_the_rest_api_requires_a_token_by_default() -> None:
    for file in ("values.yaml", "values-ha.yaml", "values-prod.yaml"):
        found = objects("-f", CHART / file)
        settings = find(found, "ConfigMap", "tidemill-admin")["data"]["tidemill.yaml"]
        assert yaml.safe_load(settings)["admin_token_file"] == "/etc/tidemill-admin-token/token"


def settings_of(found: list[Object], component: str) -> dict[str, object]:
    settings = find(found, "ConfigMap", f"tidemill-{component}")["data"]["tidemill.yaml"]
    parsed = yaml.safe_load(settings)
    assert isinstance(parsed, dict)
    return parsed


def secrets_of_pod(found: list[Object], component: str) -> dict[str, tuple[str, int]]:
    """Return the Secrets that a process mounts, and the permissions of their files."""
    pod = pod_of(find(found, "Deployment", f"tidemill-{component}"))
    return {
        one["name"]: (one["secret"]["secretName"], one["secret"]["defaultMode"])
        for one in pod["volumes"]
        if "secret" in one
    }


def test_calls_need_users_by_default() -> None:
    found = objects()
    for component in ("proxy", "admin"):
        settings = settings_of(found, component)
        assert settings["security_floor"] == "on"
        assert settings["security_key_file"] == "/etc/tidemill-security/keys"
        key = secrets_of_pod(found, component)["security-key"]
        assert key == ("tidemill-security-key", 0o440)
    assert settings["security_bootstrap_file"] == "/etc/tidemill-user/tidemill/credentials"
    assert secrets_of_pod(found, "admin")["admin-user"] == ("tidemill-admin-user", 0o440)
    assert "admin-user" not in secrets_of_pod(found, "proxy")
    job = pod_of(find(found, "Job", "tidemill-certificates-setup"))["containers"][0]["args"]
    plan = json.loads(job[-1].removeprefix("--plan="))
    assert plan["keyFiles"] == {"tidemill-security-key": 1}
    assert plan["administrators"] == ["tidemill-admin-user"]
    assert plan["jobUsers"] == {"tidemill-job-users": [job.value for job in sorted(Job)]}
    role = find(found, "Role", "tidemill-certificates-setup")
    users = {"tidemill-security-key", "tidemill-admin-user", "tidemill-job-users"}
    assert users <= set(role["rules"][0]["resourceNames"])


def test_existing_secrets_of_users_are_mounted_and_not_made() -> None:
    secrets = {"Key": "a", "Admin": "b", "JobUsers": "c"}
    values = [f"security.existing{kind}Secret={name}" for kind, name in secrets.items()]
    found = objects("--set", ",".join(values))
    assert secrets_of_pod(found, "proxy")["security-key"][0] == "a"
    assert secrets_of_pod(found, "admin")["admin-user"][0] == "b"
    job = pod_of(find(found, "Job", "tidemill-certificates-setup"))["containers"][0]["args"]
    plan = json.loads(job[-1].removeprefix("--plan="))
    assert (plan["keyFiles"], plan["administrators"], plan["jobUsers"]) == ({}, [], {})
    assert secrets_of_pod(found, "admin")["job-users"][0] == "c"
    check = pod_of(find(found, "Job", "tidemill-check"))
    assert [one["secret"]["secretName"] for one in check["volumes"] if "secret" in one] == ["c"]


# The pods that call the REST API, with the jobs of their users.
CALLING_PODS = {
    ("Job", "tidemill-check"): "check",
    ("Job", "tidemill-provision"): "provision",
    ("Job", "tidemill-roll"): "roll",
    ("Pod", "tidemill-test"): "trial",
}


@pytest.mark.parametrize("has_tls", [False, True])
def test_a_job_mounts_the_secret_of_its_user_alone(*, has_tls: bool) -> None:
    tls = ("--set", f"admin.tls.enabled={str(has_tls).lower()}")
    found = objects("--set-json", 'brokerGroups=[{"name":"broker-0"},{"name":"broker-1"}]', *tls)
    for (kind, name), job in CALLING_PODS.items():
        one = find(found, kind, name)
        pod = one["spec"] if kind == "Pod" else pod_of(one)
        secrets = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
        [secret] = [each for each in secrets if each["secretName"] != "tidemill-admin-tls"]
        assert secret["secretName"] == "tidemill-job-users"
        assert secret["items"] == [{"key": job, "path": "secret"}]
        [container] = pod["containers"]
        values = {each["name"]: each["value"] for each in container["env"]}
        assert values["TIDEMILL_USER"] == Job(job).user
        assert values["TIDEMILL_SECRET_FILE"] == "/etc/tidemill-user/secret"
        assert ("TIDEMILL_ADMIN_PLAIN_TOKEN" in values) is not has_tls
        assert "TIDEMILL_ADMIN_TOKEN_FILE" not in values
    assert settings_of(found, "admin")["security_job_users_dir"] == "/etc/tidemill-job-users"


@pytest.mark.parametrize("mode", ["off", "permissive"])
def test_jobs_have_the_token_where_the_api_accepts_nothing_else(mode: str) -> None:
    found = objects("--set", f"security.mode={mode}")
    for name in ("tidemill-check", "tidemill-provision"):
        pod = pod_of(find(found, "Job", name))
        names = [one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one]
        assert names == ["tidemill-admin-token"]
    assert "security_job_users_dir" not in settings_of(found, "admin")
    assert "job-users" not in secrets_of_pod(found, "admin")


def test_the_mode_off_has_no_users() -> None:
    found = objects("--set", "security.mode=off")
    for component in ("proxy", "admin"):
        assert not {name for name in settings_of(found, component) if "security" in name}
        assert not secrets_of_pod(found, component).keys() & {"security-key", "admin-user"}


def test_the_pipeline_source_is_open_for_the_jobs_of_the_release_alone() -> None:
    assert settings_of(objects(), "proxy")["pipeline_source"] is False
    jobs = "pipeline.enabled=true,pipeline.existingClaim=archive,pipeline.userSecret=reader"
    found = objects("--set", jobs)
    assert settings_of(found, "proxy")["pipeline_source"] is True
    [archive] = pod_of(find(found, "CronJob", "tidemill-pipeline"))["containers"]
    assert "auth.accessKey=$(PIPELINE_USER)" in archive["args"]
    assert "auth.secretKeyFile=/etc/tidemill-user/password" in archive["args"]
    [variable] = archive["env"]
    key = {"name": "reader", "key": "username"}
    assert variable == {"name": "PIPELINE_USER", "valueFrom": {"secretKeyRef": key}}
    others = objects("--set", "proxy.config.pipeline_source=true")
    assert settings_of(others, "proxy")["pipeline_source"] is True


@pytest.mark.parametrize(
    ("file", "cpu_m", "memory_mib"), [("values.yaml", 200, 614), ("values-ha.yaml", 500, 1536)]
)
def test_a_small_release_requests_little(file: str, cpu_m: int, memory_mib: int) -> None:
    found = objects("-f", CHART / file)
    sums = {"cpu": 0, "memory": 0}
    for one in found:
        if one["kind"] not in {"StatefulSet", "Deployment"}:
            continue
        # The chart leaves the number of brokers to the controllers.
        count = one["spec"].get("replicas", 3)
        for container in pod_of(one)["containers"]:
            requests = container["resources"]["requests"]
            sums["cpu"] += count * int(requests["cpu"].removesuffix("m"))
            sums["memory"] += count * int(requests["memory"].removesuffix("Mi"))
    assert 0 < sums["cpu"] <= cpu_m
    assert 0 < sums["memory"] <= memory_mib


@pytest.mark.parametrize(
    ("persistence", "of_group", "is_kept"),
    [
        ({}, {}, True),
        ({"whenDeleted": "Delete"}, {}, False),
        ({"enabled": False}, {}, False),
        ({"enabled": False}, {"enabled": True}, True),
    ],
)
def test_an_uninstallation_keeps_the_records_of_a_group_whose_claims_stay(
    persistence: Object, of_group: Object, *, is_kept: bool
) -> None:
    """A record without its claims names complete replicas, so an empty group has no master."""
    group = {"name": "broker-0", "replicas": 3, "persistence": of_group}
    found = objects(
        *("--set-json", f"brokerGroups={json.dumps([group])}"),
        *("--set-json", f"broker.persistence={json.dumps(persistence)}"),
    )
    for kind, name in (("BrokerGroup", "broker-0"), ("ConfigMap", "claims-stay")):
        annotations = find(found, kind, f"tidemill-{name}")["metadata"].get("annotations", {})
        assert (annotations.get("helm.sh/resource-policy") == "keep") == is_kept, kind
