"""The queries of dashboards and alerts in the form that Prometheus gets, with their operands."""

from __future__ import annotations

from collections.abc import Iterator

import promql_parser as promql

from tools.monitoring import alerts
from tools.monitoring.pages import PAGES
from tools.monitoring.vocabulary import RATE, Page, Panel

COMPARISONS = frozenset({"==", "!=", ">", "<", ">=", "<="})
VARIABLES = ("cluster", "namespace", "node", "topic", "consumer_group")


def concrete(expression: str, *, rate: str) -> str:
    """Return a query with Grafana's variables replaced by their unrestricted values."""
    for variable in VARIABLES:
        expression = expression.replace(f'"${variable}"', '".*"')
    return expression.replace(RATE, rate)


def of_panels() -> Iterator[tuple[Page, Panel, str]]:
    """Yield the queries of all panels with unreplaced variables."""
    for page in PAGES:
        for panel in page.panels():
            for query in panel.queries:
                yield page, panel, query.expression


def operands_of_alerts() -> Iterator[tuple[str, str]]:
    """Yield each alert with the left operand of each of its comparisons."""
    for alert, expression in alerts.expressions():
        for operand in _compared(promql.parse(expression)):
            yield alert, operand.prettify()


def _compared(expression: promql.Expr) -> Iterator[promql.Expr]:
    match expression:
        case promql.ParenExpr():
            yield from _compared(expression.expr)
        case promql.BinaryExpr() if str(expression.op) in COMPARISONS:
            yield expression.lhs
        case promql.BinaryExpr():
            yield from _compared(expression.lhs)
            yield from _compared(expression.rhs)
