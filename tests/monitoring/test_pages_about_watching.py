"""What the pages about dashboards, alerts and runbooks name is there.

Their links and commands are in `tests/unit/test_pages.py`, with those of all pages.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.monitoring.test_alert_rules import judged, promtool
from tests.support.processes.exposed import parse
from tidemill.standalone.settings import StandaloneSettings
from tools.monitoring import alerts
from tools.monitoring.pages import PAGES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OBSERVABILITY = ROOT / "deploy" / "observability"
RUNBOOKS = sorted((DOCS / "runbooks").glob("*.md"))
METRIC = re.compile(r"\brocketmq_\w+")


@pytest.mark.parametrize("path", [*RUNBOOKS, DOCS / "dashboards.md"], ids=lambda path: path.stem)
def test_a_page_names_metrics_that_there_are(path: Path) -> None:
    known = parse((DOCS / "metrics.md").read_text("utf-8"))
    assert set(METRIC.findall(path.read_text("utf-8"))) <= known.keys()


def test_the_page_lists_every_dashboard_and_alert() -> None:
    text = (DOCS / "dashboards.md").read_text("utf-8")
    assert {page.title.removeprefix("Tidemill / ") for page in PAGES} == set(
        re.findall(r"^\| ([A-Z][a-z ]+) \| ", text, re.MULTILINE)
    )
    assert set(re.findall(r"\(runbooks/(\w+)\.md\)", text)) == set(alerts.names())


@judged
def test_a_laptops_prometheus_can_read_its_configuration() -> None:
    assert "is valid prometheus config file" in promtool(
        "check", "config", OBSERVABILITY / "prometheus.yaml"
    )


def test_a_laptops_prometheus_scrapes_the_ports_of_a_standalone() -> None:
    configuration = yaml.safe_load((OBSERVABILITY / "prometheus.yaml").read_text("utf-8"))
    targets = [
        target
        for job in configuration["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    ]
    first = StandaloneSettings.model_fields["metrics_port"].default
    assert targets == [f"127.0.0.1:{first + n}" for n in range(3)]


def test_mounted_files_of_the_compose_file_exist() -> None:
    compose = yaml.safe_load((OBSERVABILITY / "compose.yaml").read_text("utf-8"))
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or (OBSERVABILITY / source).exists(), source
