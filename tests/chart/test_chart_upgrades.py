"""Checks of an upgrade or a rollback before any change."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.support.chart import (
    CHART,
    ROOT,
    Object,
    find,
    need_helm,
    objects,
    pod_of,
    rendered,
    rendered_beside,
)


@pytest.fixture(autouse=True, scope="module")
def _helm() -> None:
    need_helm()


# Broker groups of one replica each. A job replaces their pods in turn.
SEVERAL = (
    "--set-json",
    'brokerGroups=[{"name":"broker-0"},{"name":"broker-1"},{"name":"broker-2"}]',
)


def test_a_rollback_runs_the_hooks_of_an_upgrade() -> None:
    """Helm does not render the chart for a rollback. It runs the hooks of the old revision."""
    found = objects(*SEVERAL)
    hooks = {
        (one["kind"], one["metadata"]["name"]): set(hook.split(","))
        for one in found
        if (hook := one["metadata"].get("annotations", {}).get("helm.sh/hook"))
    }
    upgrades = [name for name, events in hooks.items() if any("-upgrade" in e for e in events)]
    assert ("Job", "tidemill-check") in upgrades
    assert ("Job", "tidemill-roll") in upgrades
    for name in upgrades:
        for event in hooks[name]:
            assert event.replace("-upgrade", "-rollback") in hooks[name], name


def jobs_of(text: str, event: str) -> set[str]:
    """Return the names of the jobs that Helm runs for an event, without the release's name."""
    return {
        one["metadata"]["name"].removeprefix("tidemill-")
        for one in yaml.safe_load_all(text)
        if one and one["kind"] == "Job"
        if event in one["metadata"].get("annotations", {}).get("helm.sh/hook", "").split(",")
    }


def secrets_of(release: list[Object]) -> list[Object]:
    """Return the Secrets that the certificate job of a release has made."""
    job = find(release, "Job", "tidemill-certificates-setup")
    [plan] = [arg for arg in pod_of(job)["containers"][0]["args"] if arg.startswith("--plan=")]
    wanted = json.loads(plan.removeprefix("--plan="))
    names = [wanted["authority"], *wanted["certificates"], *wanted["tokens"]]
    names += [*wanted["keyFiles"], *wanted["administrators"], *wanted["jobUsers"]]
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": job["metadata"]["namespace"]},
        }
        for name in names
    ]


def standing_release(*values: str) -> list[Object]:
    """Return the objects of an installed release, with the Secrets of its job."""
    release = objects(*values)
    return [*release, *secrets_of(release)]


def test_an_upgrade_without_a_change_starts_one_job(tmp_path: Path) -> None:
    """Each job is a pod and a Python process. The job of topics repeats what failed before."""
    done = rendered_beside(standing_release(), tmp_path)
    assert done.returncode == 0, done.stderr
    assert jobs_of(done.stdout, "pre-upgrade") == set()
    assert jobs_of(done.stdout, "post-upgrade") == {"provision"}
    # Another revision may have changed Secrets and broker groups since.
    assert jobs_of(done.stdout, "pre-rollback") == {"certificates-setup", "check"}
    assert jobs_of(done.stdout, "pre-install") == {"certificates-setup"}


@pytest.mark.parametrize(
    ("change", "jobs"),
    [
        (("--set", "internalTls.job.days=60"), {"certificates-setup"}),
        (("--set", "admin.auth.key=other"), {"certificates-setup"}),
        (
            ("--set-json", 'brokerGroups=[{"name":"broker-0"},{"name":"broker-1"}]'),
            {"certificates-setup", "check"},
        ),
        # The check compares it with the record, also if a job was killed without the StatefulSet.
        (("--set", "broker.persistence.size=11Gi"), {"check", "grow"}),
    ],
)
def test_an_upgrade_runs_the_jobs_of_its_change(
    tmp_path: Path, change: tuple[str, str], jobs: set[str]
) -> None:
    done = rendered_beside(standing_release(), tmp_path, *change)
    assert jobs_of(done.stdout, "pre-upgrade") == jobs


def test_an_upgrade_creates_deleted_secrets_again(tmp_path: Path) -> None:
    """docs/kubernetes/security.md names this as the remedy for a key that has leaked."""
    release = objects()
    for deleted in secrets_of(release):
        secrets = [one for one in secrets_of(release) if one != deleted]
        done = rendered_beside([*release, *secrets], tmp_path)
        assert jobs_of(done.stdout, "pre-upgrade") == {"certificates-setup"}, deleted


def test_an_upgrade_that_removes_a_broker_group_runs_the_check(tmp_path: Path) -> None:
    done = rendered_beside(objects(*SEVERAL), tmp_path)
    assert "check" in jobs_of(done.stdout, "pre-upgrade")


def test_an_upgrade_of_an_unknown_state_runs_all_jobs(tmp_path: Path) -> None:
    """Without a cluster, templates see nothing of it. Older charts recorded less."""
    expected = {"certificates-setup", "check"}
    assert jobs_of(rendered(), "pre-upgrade") == expected
    standing = objects()
    del find(standing, "ConfigMap", "tidemill-claims-stay")["data"]["secrets"]
    del find(standing, "ConfigMap", "tidemill-claims-stay")["data"]["broker-groups"]
    assert jobs_of(rendered_beside(standing, tmp_path).stdout, "pre-upgrade") == expected


def test_the_check_has_the_token_in_an_upgrade_from_a_release_without_users_of_jobs(
    tmp_path: Path,
) -> None:
    """It runs before the new admin process, which creates these users."""

    def secrets_of_check(standing: list[Object], *values: str) -> list[str]:
        done = rendered_beside(standing, tmp_path, *values)
        found = [one for one in yaml.safe_load_all(done.stdout) if one]
        volumes = pod_of(find(found, "Job", "tidemill-check"))["volumes"]
        provision = pod_of(find(found, "Job", "tidemill-provision"))["volumes"]
        assert "tidemill-job-users" in str(provision)
        return [one["secret"]["secretName"] for one in volumes if "secret" in one]

    standing = objects()
    assert secrets_of_check(standing) == ["tidemill-job-users"]
    del find(standing, "ConfigMap", "tidemill-claims-stay")["data"]["job-users"]
    assert secrets_of_check(standing) == ["tidemill-admin-token"]
    standing = objects("--set", "security.mode=permissive")
    assert secrets_of_check(standing, "--set", "security.mode=on") == ["tidemill-admin-token"]


def test_a_release_of_another_name_is_refused(tmp_path: Path) -> None:
    """Its brokers would be empty, and the old claims would be unused."""
    standing = objects("--set", "fullnameOverride=mq")
    done = rendered_beside(standing, tmp_path)
    assert "is the StatefulSet mq-broker-0, and the new name is tidemill-broker-0" in done.stderr
    [page] = re.findall(r"restore into a new release \((docs/[^)]+)\)", done.stderr)
    assert "## Restore into another release" in (ROOT / page).read_text("utf-8")
    done = rendered_beside(standing, tmp_path, "--set", "fullnameOverride=mq")
    assert done.returncode == 0, done.stderr


def test_an_upgrade_job_gets_the_names_of_removed_broker_groups(tmp_path: Path) -> None:
    standing = objects(*SEVERAL)
    done = rendered_beside(standing, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--gone=broker-1,broker-2" in done.stdout


def test_removing_a_broker_group_requires_an_admin_process(tmp_path: Path) -> None:
    standing = objects(*SEVERAL)
    done = rendered_beside(standing, tmp_path, "--set", "admin.replicas=0")
    assert "broker-1,broker-2 exists, and without an admin process" in done.stderr


def test_without_an_admin_process_the_formats_are_looked_at_still() -> None:
    [container] = pod_of(find(objects("--set", "admin.replicas=0"), "Job", "tidemill-check"))[
        "containers"
    ]
    assert "--without-rest-api" in container["args"]
    assert "env" not in container


def test_a_chart_that_cannot_read_the_stores_is_refused(tmp_path: Path) -> None:
    found = objects()
    claims = find(found, "ConfigMap", "tidemill-claims-stay")
    claims["data"]["store-format"] = "9999999"
    done = rendered_beside(found, tmp_path)
    assert "may have written format 9999999" in done.stderr
    assert "(docs/kubernetes/backup-and-restore.md)" in done.stderr


def test_autoscaled_proxies_have_no_number_of_their_own(tmp_path: Path) -> None:
    """Each synchronization by GitOps would reset it.

    Helm sets one replica if the number is missing in the new manifest and was in the old one.
    Therefore an upgrade by Helm repeats the current number.
    """
    prod = ("-f", CHART / "values-prod.yaml")

    def proxies(found: list[Object]) -> int | None:
        spec: dict[str, int] = find(found, "Deployment", "tidemill-proxy")["spec"]
        return spec.get("replicas")

    assert proxies(objects(*prod, "--set", "proxy.replicas=5")) is None
    standing = objects("--set", "proxy.replicas=9")
    done = rendered_beside(standing, tmp_path, *prod)
    assert proxies([one for one in yaml.safe_load_all(done.stdout) if one]) == 9


def replicas(count: int) -> tuple[str, str]:
    return "--set-json", f'brokerGroups=[{{"name":"broker-0","replicas":{count}}}]'


def test_addresses_of_removed_replicas_stay_until_the_next_upgrade(tmp_path: Path) -> None:
    standing = objects(*replicas(5))
    find(standing, "StatefulSet", "tidemill-broker-0")["spec"]["replicas"] = 5
    done = rendered_beside(standing, tmp_path, *replicas(3))
    assert done.returncode == 0, done.stderr
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert find(found, "BrokerGroup", "tidemill-broker-0")["spec"]["replicas"] == 3
    # Replica 4 may be the master until the controllers move the master.
    assert "tidemill-broker-0-4.tidemill-broker-0" in done.stdout
    find(found, "StatefulSet", "tidemill-broker-0")["spec"]["replicas"] = 3
    afterwards = rendered_beside(found, tmp_path, *replicas(3))
    assert "tidemill-broker-0-4.tidemill-broker-0" not in afterwards.stdout


def test_one_replica_runs_until_the_controllers_of_several_do(tmp_path: Path) -> None:
    """Kubernetes would end the only broker at once, before a controller could let it lead."""

    def strategy(text: str) -> object:
        found = [one for one in yaml.safe_load_all(text) if one]
        return find(found, "StatefulSet", "tidemill-broker-0")["spec"]["updateStrategy"]

    done = rendered_beside(objects(), tmp_path, *replicas(3))
    # `rollingUpdate: null` removes the partition if a rollback returns to this revision.
    assert strategy(done.stdout) == {"type": "OnDelete", "rollingUpdate": None}
    installed = rendered(*replicas(3))
    (tmp_path / "several").mkdir()
    later = rendered_beside(objects(*replicas(3)), tmp_path / "several", *replicas(3))
    assert strategy(installed) == strategy(later.stdout) == {"type": "RollingUpdate"}


def test_replicas_do_not_become_one_broker_that_is_alone(tmp_path: Path) -> None:
    done = rendered_beside(objects(*replicas(3)), tmp_path)
    assert "broker-0 has several replicas, and the values set 1" in done.stderr
    assert "Set replicas to at least 2" in done.stderr
    # Without the ConfigMap, the pods show it.
    standing = [one for one in objects(*replicas(3)) if one["kind"] != "ConfigMap"]
    find(standing, "StatefulSet", "tidemill-broker-0")["spec"]["replicas"] = 3
    (tmp_path / "without").mkdir()
    done = rendered_beside(standing, tmp_path / "without")
    assert "broker-0 has several replicas, and the values set 1" in done.stderr


def test_a_revision_of_one_replica_refuses_a_rollback_from_several() -> None:
    """The check of the old revision reads the state that the newer one has recorded."""
    recorded = find(objects(*replicas(3)), "ConfigMap", "tidemill-claims-stay")["data"]
    assert recorded["replicated"] == "broker-0"
    [check] = pod_of(find(objects(), "Job", "tidemill-check"))["containers"]
    assert "--replicated=" in check["args"]
    [check] = pod_of(find(objects(*replicas(3)), "Job", "tidemill-check"))["containers"]
    assert "--replicated=broker-0" in check["args"]


@pytest.mark.parametrize("count", [1, 3])
def test_templates_need_no_right_on_broker_groups(tmp_path: Path, count: int) -> None:
    """A namespace admin may have none, and the kind may exist in the cluster."""
    kind = "--api-versions=tidemill.io/v1/BrokerGroup"
    standing = objects(*replicas(count))
    done = rendered_beside(standing, tmp_path, kind, *replicas(count), forbidden=("brokergroups",))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("broker.persistence.size=9Gi", "a volume cannot shrink. Set the size to at least 10Gi"),
        ("broker.persistence.storageClass=fast", 'changes from "the default" to "fast"'),
        ("broker.persistence.accessModes={ReadWriteMany}", "persistence.accessModes of broker-0"),
        ("broker.persistence.enabled=false", "the kind of volume of broker-0 changes"),
    ],
)
def test_claims_that_kubernetes_cannot_change_are_refused(
    tmp_path: Path, value: str, reason: str
) -> None:
    """The API server would refuse the StatefulSet after other objects have changed."""
    done = rendered_beside(objects(), tmp_path, "--set", value)
    assert reason in done.stderr


def plan_of(found: list[Object]) -> object:
    """Return the plan of the jobs that enlarge volumes."""
    plans = set()
    for name in ("tidemill-grow", "tidemill-grow-replicas-1"):
        [container] = pod_of(find(found, "Job", name))["containers"]
        [plan] = [one for one in container["args"] if one.startswith("--plan=")]
        plans.add(plan)
    [plan] = plans
    return yaml.safe_load(plan.removeprefix("--plan="))


def test_a_larger_size_renders_the_jobs_that_enlarge_volumes(tmp_path: Path) -> None:
    standing = objects(*replicas(3))
    larger = ("--set", "broker.persistence.size=20Gi", *replicas(3))
    done = rendered_beside(standing, tmp_path, *larger)
    assert done.returncode == 0, done.stderr
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    expected = [{"group": "broker-0", "statefulSet": "tidemill-broker-0", "size": "20Gi"}]
    assert plan_of(found) == expected
    role = find(found, "Role", "tidemill-grow")["rules"]
    claims = [f"data-tidemill-broker-0-{n}" for n in range(3)]
    assert claims in [rule.get("resourceNames") for rule in role]
    [of_group] = [one for one in found if one["kind"] == "StatefulSet"]
    assert "replicas" not in of_group["spec"], "a rollback would set its number"


def test_the_jobs_stay_while_a_claim_is_too_small(tmp_path: Path) -> None:
    larger = ("--set", "broker.persistence.size=20Gi", *replicas(3))
    standing = objects(*larger)
    find(standing, "StatefulSet", "tidemill-broker-0")["spec"]["replicas"] = 3
    done = rendered_beside(standing, tmp_path, *larger)
    assert "tidemill-grow" not in done.stdout
    size = {"resources": {"requests": {"storage": "10Gi"}}}
    claim = {"metadata": {"name": "data-tidemill-broker-0-1"}, "spec": size}
    standing.append({"kind": "PersistentVolumeClaim", **claim})
    done = rendered_beside(standing, tmp_path, *larger)
    assert plan_of([one for one in yaml.safe_load_all(done.stdout) if one])


def recorded_mode(release: list[Object], mode: str | None) -> list[Object]:
    """Return an installed release with this recorded mode; None: before users."""
    data = find(release, "ConfigMap", "tidemill-claims-stay")["data"]
    del data["security-mode"]
    if mode is not None:
        data["security-mode"] = mode
    return release


@pytest.mark.parametrize("mode", [None, "off", "permissive"])
def test_an_upgrade_without_a_mode_does_not_begin_to_refuse_clients(
    tmp_path: Path, mode: str | None
) -> None:
    installed = recorded_mode(standing_release("--set", "security.mode=off"), mode)
    done = rendered_beside(installed, tmp_path)
    assert done.returncode != 0
    assert "security.mode is not set, and its default is on" in done.stderr
    for chosen in ("off", "permissive", "on"):
        done = rendered_beside(installed, tmp_path, "--set", f"security.mode={chosen}")
        assert done.returncode == 0, done.stderr


def test_a_release_with_users_keeps_its_default_mode(tmp_path: Path) -> None:
    done = rendered_beside(standing_release(), tmp_path)
    assert done.returncode == 0, done.stderr
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert find(found, "ConfigMap", "tidemill-claims-stay")["data"]["security-mode"] == "on"
    check = pod_of(find(found, "Job", "tidemill-check"))["containers"][0]["args"]
    assert "--default-security" in check, "Argo CD renders without the installed state"


def test_a_rollback_job_of_an_explicit_mode_accepts_each_recorded_mode() -> None:
    for mode in ("off", "on"):
        check = find(objects("--set", f"security.mode={mode}"), "Job", "tidemill-check")
        assert "--default-security" not in pod_of(check)["containers"][0]["args"]
