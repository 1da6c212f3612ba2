"""Every dashboard is one by the types that Grafana publishes; that needs no Grafana."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.clients.client_process import needs
from tools.generate_dashboards import DASHBOARDS

GRAFANA = Path(__file__).parent / "grafana"
CHECK_S = 120.0  # it takes five seconds on an idle machine

pytestmark = needs("node", GRAFANA / "node_modules" / "@grafana" / "schema")


def check(*paths: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["node", str(GRAFANA / "check.mjs"), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=CHECK_S,
        check=False,
    )


def test_every_dashboard_is_one_by_grafanas_types() -> None:
    checked = check(*sorted(DASHBOARDS.glob("*.json")))
    assert checked.stderr == ""
    assert checked.stdout == ""
    assert checked.returncode == 0


def test_the_check_reports_a_field_unknown_to_grafana(tmp_path: Path) -> None:
    text = (DASHBOARDS / "overview.json").read_text("utf-8")
    broken = tmp_path / "broken.json"
    broken.write_text(text.replace('"gridPos"', '"gridPosition"', 1), "utf-8")
    checked = check(broken)
    assert checked.returncode == 1
    assert "gridPosition" in checked.stdout
