"""Examples and pages for Kubernetes agree with the chart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.render import PROFILES
from tests.support.chart import CHART, ROOT, WORKLOADS, find, need_helm, objects, pod_of
from tests.support.kubernetes_types import KubernetesTypes
from tests.support.pod_security import restricted_errors

PAGES = ROOT / "docs" / "kubernetes"
MILLI = {"m": 1, "": 1000}
MIB = {"Mi": 1, "Gi": 1024}

Object = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def _helm() -> None:
    need_helm()


def amount(quantity: str, units: dict[str, int]) -> int:
    """Return a quantity as a number of the smallest unit of `units`."""
    parts = re.fullmatch(r"(\d+)([a-zA-Z]*)", quantity)
    assert parts is not None, quantity
    return int(parts[1]) * units[parts[2]]


def requests_of(*values: str | Path) -> tuple[int, int]:
    """Return the CPU in thousandths of a core and the MiB that all processes of a release request.

    A StatefulSet without a number of replicas has those of its broker group.
    """
    found = objects(*values)
    replicas = {
        one["spec"]["statefulSet"]: one["spec"]["replicas"]
        for one in found
        if one["kind"] == "BrokerGroup"
    }
    scaled = {
        one["spec"]["scaleTargetRef"]["name"]: one["spec"]["minReplicas"]
        for one in found
        if one["kind"] == "HorizontalPodAutoscaler"
    }
    cpu = mib = 0
    for one in found:
        if one["kind"] in {"StatefulSet", "Deployment"}:
            name = one["metadata"]["name"]
            count = one["spec"].get("replicas") or replicas.get(name) or scaled[name]
            for container in pod_of(one)["containers"]:
                asked = container["resources"]["requests"]
                cpu += count * amount(asked["cpu"], MILLI)
                mib += count * amount(asked["memory"], MIB)
    return cpu, mib


@pytest.mark.parametrize("file", ["values.yaml", "values-dev.yaml", "values-ha.yaml"])
def test_the_page_names_the_requests_of_each_profile(file: str) -> None:
    page = (PAGES / "install.md").read_text("utf-8")
    [row] = [line for line in page.splitlines() if line.startswith(f"| `{file}` |")]
    cpu, mib = requests_of("-f", CHART / file)
    assert f"{cpu}m CPU and {mib} MiB" in row


def printed_pods() -> Iterator[tuple[str, Object]]:
    """Yield the name and the fields of each pod in the examples and on the pages."""
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        for one in yaml.safe_load_all(path.read_text("utf-8")):
            if one and one.get("kind") in WORKLOADS:
                yield path.name, one
    for path in sorted(PAGES.glob("*.md")):
        for block in re.findall(r"```yaml\n(.*?)```", path.read_text("utf-8"), re.DOTALL):
            for one in yaml.safe_load_all(block):
                if isinstance(one, dict) and one.get("kind") in WORKLOADS:
                    yield path.name, one


@pytest.mark.parametrize(("file", "one"), list(printed_pods()))
def test_a_restricted_namespace_accepts_the_pod_of_an_example(file: str, one: Object) -> None:
    assert restricted_errors(pod_of(one)) == [], file
    assert KubernetesTypes().errors(one) == []


def test_the_printed_claim_equals_the_one_of_the_chart() -> None:
    """An operator creates it for a lost volume. Labels let the removal of a release find it."""
    page = (PAGES / "troubleshooting.md").read_text("utf-8")
    [text] = re.findall(r"```yaml\n(# claim.yaml.*?)```", page, re.DOTALL)
    printed = yaml.safe_load(text)
    [template] = find(objects(), "StatefulSet", "tidemill-broker-0")["spec"]["volumeClaimTemplates"]
    assert printed["metadata"]["labels"] == template["metadata"]["labels"]
    assert printed["spec"] == template["spec"]
    assert printed["metadata"]["name"] == f"{template['metadata']['name']}-tidemill-broker-0-0"


@pytest.mark.parametrize("profile", PROFILES)
def test_a_restricted_namespace_accepts_the_pods_of_the_chart(profile: str) -> None:
    values = [part for file in PROFILES[profile] for part in ("-f", file)]
    for one in objects(*values):
        if one["kind"] in WORKLOADS:
            pod = pod_of(one)
            # Additional containers are the user's.
            own = [each for each in pod["containers"] if each["name"] != "beside"]
            fields = {key: value for key, value in pod.items() if key != "initContainers"}
            assert restricted_errors({**fields, "containers": own}) == [], one["metadata"]


def test_the_page_names_each_object_of_a_release() -> None:
    page = (PAGES / "install.md").read_text("utf-8")
    for one in objects("-f", CHART / "values-ha.yaml"):
        if one["kind"] in {"Job", "CronJob", "StatefulSet", "BrokerGroup"}:
            assert f"`{one['metadata']['name']}`" in page
        assert one["kind"] in page or one["kind"] in {"Pod", "ServiceAccount"}, one["kind"]


def test_each_pod_limits_its_part_of_the_node_disk() -> None:
    """A pod without a limit can fill the disk of a node with its log."""
    for profile, files in PROFILES.items():
        for one in objects(*(part for file in files for part in ("-f", file))):
            if one["kind"] not in WORKLOADS:
                continue
            for container in pod_of(one)["containers"]:
                if container["name"] == "beside":
                    continue
                resources = container["resources"]
                where = profile, one["metadata"]["name"]
                assert "ephemeral-storage" in resources["requests"], where
                holds_data = any(
                    "emptyDir" in each and each["name"] == "data"
                    for each in pod_of(one).get("volumes", [])
                )
                # The data would count. The volume has a limit of its own.
                assert ("ephemeral-storage" in resources["limits"]) is not holds_data, where
