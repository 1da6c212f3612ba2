"""Queries name metrics and labels that the processes export, by docs/metrics.md.

Another test compares this page with the processes. So a renamed metric fails here, before a panel
is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import promql_parser as promql
import pytest

from tests.support import queries
from tests.support.processes.exposed import COMMON, ExposedMetric, parse
from tools.monitoring import alerts
from tools.monitoring.pages import PAGES

METRICS = parse((Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text("utf-8"))
# Labels and metrics that Prometheus adds for its targets.
OF_TARGETS = frozenset({"namespace", "pod", "instance", "job"})
OF_PROMETHEUS = {
    "up": ExposedMetric("up", "gauge", ""),
    "ALERTS": ExposedMetric("ALERTS", "gauge", "", {"alertname", "alertstate", "service"}),
}
HISTOGRAM = ("_bucket", "_count", "_sum")
OTHERS = tuple(prefix for page in PAGES for prefix in page.needs)

ASKED = [
    *(
        pytest.param(queries.concrete(expression, rate="1m"), id=f"{page.name}: {panel.title}")
        for page, panel, expression in queries.of_panels()
    ),
    *(pytest.param(expression, id=alert) for alert, expression in alerts.expressions()),
]


def labels_of(name: str) -> set[str]:
    """Return the labels of a metric's samples; raise KeyError if no process exports it."""
    family = next((name.removesuffix(end) for end in HISTOGRAM if name.endswith(end)), name)
    if name not in METRICS | OF_PROMETHEUS and METRICS[family].type == "histogram":
        return METRICS[family].labels | ({"le"} if name.endswith("_bucket") else set())
    return (METRICS | OF_PROMETHEUS)[name].labels


def selectors(expression: promql.Expr) -> list[promql.VectorSelector]:
    found: list[promql.VectorSelector] = []

    def visit(part: promql.Expr) -> None:
        if isinstance(part, promql.VectorSelector):
            found.append(part)

    promql.walk(expression, pre_visit=visit)
    return found


def grouped(expression: promql.Expr) -> Iterator[tuple[list[str], promql.Expr]]:
    """Yield the labels by which parts of an expression are aggregated, with each part."""
    found: list[promql.AggregateExpr] = []

    def visit(part: promql.Expr) -> None:
        if isinstance(part, promql.AggregateExpr):
            found.append(part)

    promql.walk(expression, pre_visit=visit)
    for part in found:
        if part.modifier is not None:
            yield part.modifier.labels, part.expr


@pytest.mark.parametrize("query", ASKED)
def test_a_query_uses_exported_labels_only(query: str) -> None:
    expression = promql.parse(query)
    for selector in selectors(expression):
        if selector.name is None or selector.name.startswith(OTHERS):
            continue
        known = labels_of(selector.name) | COMMON | OF_TARGETS
        assert {matcher.name for matcher in selector.matchers.matchers} <= known, selector.name
    for labels, part in grouped(expression):
        within = selectors(part)
        if any(selector.name and selector.name.startswith(OTHERS) for selector in within):
            continue
        of_parts = [labels_of(selector.name) for selector in within if selector.name]
        assert set(labels) <= set().union(*of_parts) | COMMON | OF_TARGETS, labels


def test_an_unexported_metric_is_an_error() -> None:
    with pytest.raises(KeyError):
        labels_of("rocketmq_messages_inn_total")
