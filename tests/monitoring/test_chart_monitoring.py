"""The chart passes the tested rules and dashboards to Prometheus Operator and Grafana."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.chart import find, need_helm, objects, pod_of, refusal
from tests.support.kubernetes_types import KubernetesTypes
from tools.generate_dashboards import DASHBOARDS
from tools.monitoring import alerts
from tools.monitoring.grafana import RUNBOOKS_URL

ALERTS = ("--set", "monitoring.alerts.enabled=true")
OPERATOR = "monitoring.coreos.com/v1"

Object = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def _helm() -> None:
    need_helm()


def rules(*arguments: str) -> dict[str, list[Object]]:
    """Return the rules of each PrometheusRule, by the alert's name."""
    found: dict[str, list[Object]] = {}
    for one in objects(*ALERTS, *arguments):
        if one["kind"] == "PrometheusRule":
            [group] = one["spec"]["groups"]
            found[group["rules"][0]["alert"]] = group["rules"]
    return found


def test_monitoring_is_off_by_default() -> None:
    assert not [one for one in objects() if one["apiVersion"] == OPERATOR]
    assert not [one for one in objects() if "dashboard" in one["metadata"]["name"]]


@pytest.mark.parametrize("monitor", ["podMonitor", "serviceMonitor"])
def test_monitoring_objects_match_the_api_types(monitor: str) -> None:
    wanted = ("alerts", "dashboards", monitor)
    enabled = ",".join(f"monitoring.{name}.enabled=true" for name in wanted)
    types = KubernetesTypes()
    for one in objects("--set", enabled):
        assert types.knows(one), one["kind"]
        assert not types.errors(one)


def test_chart_alerts_match_the_generated_rules() -> None:
    values = alerts.default_values()
    assert rules() == {name: alerts.rules_of(name, values) for name in alerts.names()}


def test_a_threshold_is_a_value() -> None:
    [rule] = rules("--set", "monitoring.alerts.thresholds.lagSeconds=1234567")["LagGrowing"]
    values = {**alerts.default_values(), "lagSeconds": 1234567}
    assert rule == alerts.rules_of("LagGrowing", values)[0]


def test_overrides_remove_and_change_alerts_by_name() -> None:
    override = "monitoring.alerts.overrides"
    found = rules(
        "--set",
        f"{override}.TimerLate.enabled=false",
        "--set",
        f"{override}.DlqGrowing.for=1h,{override}.DlqGrowing.severity=critical",
        "--set",
        "monitoring.alerts.ruleLabels.team=messages",
    )
    assert set(found) == set(alerts.names()) - {"TimerLate"}
    [changed] = found["DlqGrowing"]
    assert changed["for"] == "1h"
    assert changed["labels"] == {"severity": "critical", "service": "tidemill", "team": "messages"}


@pytest.mark.parametrize("alert", alerts.names())
def test_every_alert_may_be_overridden(alert: str) -> None:
    assert alert not in rules("--set", f"monitoring.alerts.overrides.{alert}.enabled=false")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("monitoring.alerts.thresholds.lagSecond=1", "lagSecond"),
        ("monitoring.alerts.overrides.LagGrowin.enabled=false", "LagGrowin"),
        ("monitoring.alerts.overrides.LagGrowing.for=soon", "for"),
        ("monitoring.podMonitor.interval=30", "interval"),
        ("monitoring.dashboard.enabled=true", "dashboard"),
    ],
)
def test_a_misspelled_value_is_refused_by_its_name(value: str, named: str) -> None:
    assert named in refusal(value)


def test_every_dashboard_is_a_config_map_for_the_sidecar() -> None:
    found = {}
    for one in objects("--set", "monitoring.dashboards.enabled=true"):
        if "dashboard" in one["metadata"]["name"]:
            assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
            assert one["metadata"]["annotations"]["grafana_folder"] == "Tidemill"
            [(name, text)] = one["data"].items()
            found[name] = json.loads(text)
    assert found == {
        f"tidemill-{path.name}": without_runbooks(json.loads(path.read_text("utf-8")))
        for path in DASHBOARDS.glob("*.json")
    }


def without_runbooks(part: Any) -> Any:
    """Return a part of a dashboard without runbook links: the values have no address for them."""
    if isinstance(part, dict):
        return {name: without_runbooks(each) for name, each in part.items()}
    if isinstance(part, list):
        kept = [each for each in part if not is_runbook(each)]
        return [without_runbooks(each) for each in kept]
    return part


def is_runbook(part: Any) -> bool:
    return isinstance(part, dict) and part.get("url", "").startswith(RUNBOOKS_URL)


def test_runbooks_are_where_the_values_say() -> None:
    url = "https://wiki.example/tidemill"
    found = objects(
        *ALERTS, "--set", f"monitoring.dashboards.enabled=true,monitoring.runbooksUrl={url}"
    )
    text = json.dumps(found)
    assert f"{url}/TimerLate.md" in text
    assert RUNBOOKS_URL not in text


def test_no_object_links_to_missing_runbooks() -> None:
    text = json.dumps(objects(*ALERTS, "--set", "monitoring.dashboards.enabled=true"))
    assert "runbook_url" not in text
    assert "TimerLate.md" not in text


def test_the_pods_of_all_processes_are_scraped() -> None:
    found = objects("--set", "monitoring.podMonitor.enabled=true")
    monitor = find(found, "PodMonitor", "tidemill")["spec"]
    [endpoint] = monitor["podMetricsEndpoints"]
    [expression] = monitor["selector"]["matchExpressions"]
    scraped = set()
    for one in [each for each in found if each["kind"] in {"StatefulSet", "Deployment"}]:
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert monitor["selector"]["matchLabels"].items() <= labels.items()
        ports = {port["name"] for each in pod_of(one)["containers"] for port in each["ports"]}
        assert endpoint["port"] in ports
        scraped.add(labels[expression["key"]])
    assert scraped == set(expression["values"]) == {"broker", "proxy", "admin"}


def test_or_they_are_scraped_through_one_service() -> None:
    found = objects("--set", "monitoring.serviceMonitor.enabled=true")
    selector = find(found, "ServiceMonitor", "tidemill")["spec"]["selector"]["matchLabels"]
    chosen = [
        one
        for one in found
        if one["kind"] == "Service" and selector.items() <= one["metadata"]["labels"].items()
    ]
    assert [one["metadata"]["name"] for one in chosen] == ["tidemill-metrics"]
    for one in [each for each in found if each["kind"] in {"StatefulSet", "Deployment"}]:
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert chosen[0]["spec"]["selector"].items() <= labels.items()
