"""Checks of an upgrade or a rollback before any change."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.chart import CHART, Object, find, need_helm, objects, pod_of, rendered_beside


@pytest.fixture(autouse=True, scope="module")
def _helm() -> None:
    need_helm()


# Broker groups of one replica each. A job replaces their pods in turn.
SEVERAL = (
    "--set-json",
    'brokerGroups=[{"name":"broker-0"},{"name":"broker-1"},{"name":"broker-2"}]',
)


def test_a_rollback_runs_what_an_upgrade_runs() -> None:
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


def test_a_release_of_another_name_is_refused(tmp_path: Path) -> None:
    """Its brokers would be empty, and the old claims would be unused."""
    standing = objects("--set", "fullnameOverride=mq")
    done = rendered_beside(standing, tmp_path)
    assert "is the StatefulSet mq-broker-0, and the new name is tidemill-broker-0" in done.stderr
    done = rendered_beside(standing, tmp_path, "--set", "fullnameOverride=mq")
    assert done.returncode == 0, done.stderr


def test_a_group_that_goes_is_told_to_the_job(tmp_path: Path) -> None:
    standing = objects(*SEVERAL)
    done = rendered_beside(standing, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--gone=broker-1,broker-2" in done.stdout


def test_a_group_that_goes_where_there_is_no_admin_process_is_refused(tmp_path: Path) -> None:
    standing = objects(*SEVERAL)
    done = rendered_beside(standing, tmp_path, "--set", "admin.replicas=0")
    assert "broker-1,broker-2 exists, and without an admin process" in done.stderr


def test_without_an_admin_process_the_formats_are_looked_at_still() -> None:
    [container] = pod_of(find(objects("--set", "admin.replicas=0"), "Job", "tidemill-check"))[
        "containers"
    ]
    assert "--nobody-to-ask" in container["args"]
    assert "env" not in container


def test_a_chart_that_cannot_read_the_stores_is_refused(tmp_path: Path) -> None:
    found = objects()
    claims = find(found, "ConfigMap", "tidemill-claims-stay")
    claims["data"]["store-format"] = "9999999"
    done = rendered_beside(found, tmp_path)
    assert "write format 9999999" in done.stderr


def test_autoscaled_proxies_are_as_many_as_they_were(tmp_path: Path) -> None:
    """Without a number, the API and an upgrade to autoscaling would set one replica."""
    prod = ("-f", CHART / "values-prod.yaml")

    def proxies(found: list[Object]) -> int:
        count: int = find(found, "Deployment", "tidemill-proxy")["spec"]["replicas"]
        return count

    assert proxies(objects(*prod, "--set", "proxy.replicas=5")) == 5
    standing = objects("--set", "proxy.replicas=9")
    done = rendered_beside(standing, tmp_path, *prod)
    assert proxies([one for one in yaml.safe_load_all(done.stdout) if one]) == 9
    fewest = objects("--set", "proxy.autoscaling.enabled=true,proxy.replicas=1")
    assert proxies(fewest) == 2


# A server that answers discovery reports this itself.
KIND = "--api-versions=tidemill.io/v1/BrokerGroup"


def replicas(count: int) -> tuple[str, str]:
    return "--set-json", f'brokerGroups=[{{"name":"broker-0","replicas":{count}}}]'


def test_fewer_replicas_are_taken_and_those_that_go_are_served_until_they_have(
    tmp_path: Path,
) -> None:
    standing = objects(*replicas(5))
    done = rendered_beside(standing, tmp_path, KIND, *replicas(3))
    assert done.returncode == 0, done.stderr
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert find(found, "BrokerGroup", "tidemill-broker-0")["spec"]["replicas"] == 3
    # Replica 4 may be the master until the controllers move the master.
    assert "tidemill-broker-0-4.tidemill-broker-0" in done.stdout
    afterwards = rendered_beside(found, tmp_path, KIND, *replicas(3))
    assert "tidemill-broker-0-4.tidemill-broker-0" not in afterwards.stdout


def test_replicas_do_not_become_one_broker_that_is_alone(tmp_path: Path) -> None:
    done = rendered_beside(objects(*replicas(3)), tmp_path, KIND)
    assert "broker-0 has 3 replicas, and the values set 1" in done.stderr
    assert "Set replicas to at least 2" in done.stderr
