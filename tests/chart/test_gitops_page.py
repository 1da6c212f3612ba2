"""The commands of the GitOps page render what the page says."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.chart import HELM, KUBERNETES, ROOT, Object, find, need_helm, objects, pod_of

PAGE = (ROOT / "docs" / "kubernetes" / "gitops.md").read_text("utf-8")
COMMANDS = sorted(set(re.findall(r"^helm (template [^|]*)", PAGE, re.MULTILINE)))


@pytest.fixture(autouse=True, scope="module")
def _helm() -> None:
    need_helm()


def rendered_by(command: str, folder: Path) -> list[Object]:
    """Return the objects of a printed `helm template`, with the values of the profile ha."""
    values = ROOT / "charts" / "tidemill" / "values-ha.yaml"
    arguments = shlex.split(command.replace("mine.yaml", str(values)))
    text = subprocess.run(
        # Helm of our build takes itself for one of an old Kubernetes.
        [HELM, *arguments, "--kube-version", KUBERNETES],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "", "HOME": str(folder)},
    ).stdout
    return [one for one in yaml.safe_load_all(text) if one]


def is_hook(one: Object) -> bool:
    return "helm.sh/hook" in one["metadata"].get("annotations", {})


def command_with(part: str) -> str:
    [found] = [command for command in COMMANDS if part in command]
    return str(found)


def test_the_page_has_three_commands_that_render() -> None:
    assert len(COMMANDS) == 3


def test_applied_objects_need_no_hook_but_the_secrets(tmp_path: Path) -> None:
    """The CronJob creates these Secrets. All else that pods refer to is applied with them."""
    found = rendered_by(command_with("--no-hooks"), tmp_path)
    assert not [one for one in found if is_hook(one) or one["kind"] in {"Job", "Pod"}]
    cron = find(found, "CronJob", "tidemill-certificates")
    assert find(found, "ServiceAccount", pod_of(cron)["serviceAccountName"])
    assert find(found, "Role", "tidemill-certificates")
    hooks = rendered_by(command_with("--no-hooks").replace("--no-hooks", ""), tmp_path)
    setup = find(hooks, "Job", "tidemill-certificates-setup")
    assert [c["args"] for c in pod_of(cron)["containers"]] == [
        c["args"] for c in pod_of(setup)["containers"]
    ]
    configs = {one["metadata"]["name"] for one in found if one["kind"] == "ConfigMap"}
    for one in found:
        if one["kind"] in {"StatefulSet", "Deployment"}:
            for volume in pod_of(one)["volumes"]:
                assert volume.get("configMap", {"name": "tidemill-members"})["name"] in configs


def test_a_synchronisation_resets_no_number(tmp_path: Path) -> None:
    found = rendered_by(command_with("--no-hooks"), tmp_path)
    broker = find(found, "StatefulSet", "tidemill-broker-0")["spec"]
    assert "replicas" not in broker
    assert "rollingUpdate" not in broker["updateStrategy"]
    scaled = objects("--set", "proxy.autoscaling.enabled=true")
    assert "replicas" not in find(scaled, "Deployment", "tidemill-proxy")["spec"]


@pytest.mark.parametrize("job", ["check", "provision"])
def test_a_job_of_the_page_needs_no_other_hook(tmp_path: Path, job: str) -> None:
    [one] = rendered_by(command_with(f"templates/jobs/{job}.yaml"), tmp_path)
    assert one["metadata"]["name"] == f"tidemill-{job}"
    applied = rendered_by(command_with("--no-hooks"), tmp_path)
    pod = pod_of(one)
    accounts = {each["metadata"]["name"] for each in applied if each["kind"] == "ServiceAccount"}
    assert pod["serviceAccountName"] in accounts | {"default"}
    for volume in pod["volumes"]:
        if "configMap" in volume:
            assert find(applied, "ConfigMap", volume["configMap"]["name"])


def test_only_records_are_kept_when_a_tool_prunes(tmp_path: Path) -> None:
    kept = {
        one["metadata"]["name"]
        for one in rendered_by(command_with("--no-hooks"), tmp_path)
        if one["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }
    assert kept == {"tidemill-broker-0", "tidemill-claims-stay"}
