"""Alerts fire in the expected cases only. promtool runs the cases.

`alerts/NAME.yaml` has the cases of an alert. They run against the alerts of a laptop, with the
default thresholds of the chart.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.clients.client_process import needs
from tools.generate_dashboards import RULES
from tools.monitoring import alerts

HERE = Path(__file__).parent
PROMTOOL = HERE / "prometheus" / "build" / "promtool"
CHECK_S = 60.0  # It takes a second on an idle machine.

judged = needs("go", PROMTOOL)


def promtool(*arguments: object) -> str:
    """Run promtool; if it rejects the input, fail with its output."""
    result = subprocess.run(
        [str(PROMTOOL), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=CHECK_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def cases_of(alert: str) -> dict[str, Any]:
    cases: dict[str, Any] = yaml.safe_load((HERE / "alerts" / f"{alert}.yaml").read_text("utf-8"))
    return cases


@judged
def test_the_rules_are_ones_to_prometheus() -> None:
    rules = sum(len(alerts.rules_of(name, alerts.default_values())) for name in alerts.names())
    assert f"{rules} rules found" in promtool("check", "rules", RULES)


@judged
@pytest.mark.parametrize("alert", alerts.names())
def test_an_alert_fires_when_it_should(alert: str) -> None:
    promtool("test", "rules", HERE / "alerts" / f"{alert}.yaml")


@pytest.mark.parametrize("alert", alerts.names())
def test_an_alert_is_tried_both_ways(alert: str) -> None:
    asked = [check for case in cases_of(alert)["tests"] for check in case["promql_expr_test"]]
    assert all(f'alertname="{alert}"' in check["expr"] for check in asked)
    assert {bool(check["exp_samples"]) for check in asked} == {True, False}
