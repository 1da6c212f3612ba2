"""Dashboards and alerts: the stored files match the generator, and each has a full description."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tools import generate_dashboards
from tools.monitoring import alerts
from tools.monitoring.pages import PAGES
from tools.monitoring.vocabulary import Page, Panel

ROOT = Path(__file__).resolve().parents[2]
RUNBOOKS = ROOT / "docs" / "runbooks"
PANELS = [
    pytest.param(page, panel, id=f"{page.name}: {panel.title}")
    for page in PAGES
    for panel in page.panels()
]
# The parts of a runbook, in the order in which an operator needs them.
PARTS = ["Meaning", "Impact", "Diagnosis", "Mitigation"]


@pytest.mark.parametrize("path", generate_dashboards.documents(), ids=lambda path: path.name)
def test_committed_dashboards_match_the_generator(path: Path) -> None:
    made = generate_dashboards.documents()[path]
    assert path.read_text("utf-8") == made, "run `make dashboards`"


def test_no_other_dashboard_is_kept() -> None:
    kept = {path.stem for path in generate_dashboards.DASHBOARDS.iterdir()}
    assert kept == {page.name for page in PAGES}


@pytest.mark.parametrize(("page", "panel"), PANELS)
def test_a_panel_has_a_description_and_queries(page: Page, panel: Panel) -> None:
    assert panel.description.endswith(".")
    assert panel.queries


@pytest.mark.parametrize(("page", "panel"), PANELS)
def test_a_panel_links_to_alerts_that_there_are(page: Page, panel: Panel) -> None:
    assert set(panel.alerts) <= set(alerts.names())


def test_every_alert_is_shown_by_a_panel() -> None:
    shown = {alert for page in PAGES for panel in page.panels() for alert in panel.alerts}
    assert shown == set(alerts.names())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_dashboard_has_the_variables_that_its_queries_name(page: Page) -> None:
    dashboard = _dashboard(page)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource", "cluster", "namespace", "topic", "consumer_group", "node"}
    named = set(re.findall(r"\$(\w+)", " ".join(_expressions(dashboard))))
    assert named <= variables | {"__rate_interval"}
    assert page.has_topics == ("topic" in named)
    assert page.has_groups == ("consumer_group" in named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_panels_have_numbers_of_their_own_and_do_not_overlap(page: Page) -> None:
    panels = _dashboard(page)["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        own = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not own & cells
        cells |= own


@pytest.mark.parametrize("alert", alerts.names())
def test_an_alert_has_a_runbook_with_all_its_parts(alert: str) -> None:
    text = (RUNBOOKS / f"{alert}.md").read_text("utf-8")
    assert text.startswith(f"# {alert}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == PARTS


def test_no_runbook_is_of_an_alert_that_is_none() -> None:
    kept = {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"}
    assert kept == set(alerts.names())


@pytest.mark.parametrize("alert", alerts.names())
def test_an_alert_has_a_severity_and_a_runbook(alert: str) -> None:
    values = {**alerts.default_values(), "runbooksUrl": "https://wiki.example"}
    for rule in alerts.rules_of(alert, values):
        assert rule["alert"] == alert
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["labels"]["service"] == "tidemill"
        assert rule["annotations"]["runbook_url"].endswith(f"/{alert}.md")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_every_threshold_of_the_values_is_one_of_an_alert() -> None:
    used = set().union(*map(alerts.thresholds_of, alerts.names()))
    assert used == set(alerts.default_values())


def _dashboard(page: Page) -> dict[str, Any]:
    text = (generate_dashboards.DASHBOARDS / f"{page.name}.json").read_text("utf-8")
    dashboard: dict[str, Any] = json.loads(text)
    return dashboard


def _expressions(dashboard: dict[str, Any]) -> list[str]:
    return [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets") or []
    ]
