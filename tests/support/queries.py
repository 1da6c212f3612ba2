"""What dashboards and alerts ask: their queries as Prometheus gets them, and what these name."""

from __future__ import annotations

from collections.abc import Iterator

import promql_parser as promql

from tools.monitoring import alerts
from tools.monitoring.pages import PAGES
from tools.monitoring.vocabulary import RATE, Page, Panel

COMPARISONS = frozenset({"==", "!=", ">", "<", ">=", "<="})
VARIABLES = ("cluster", "namespace", "node", "topic", "consumer_group")


def concrete(expression: str, *, rate: str) -> str:
    """Return a query with Grafana's variables as nobody has restricted them."""
    for variable in VARIABLES:
        expression = expression.replace(f'"${variable}"', '".*"')
    return expression.replace(RATE, rate)


def of_panels() -> Iterator[tuple[Page, Panel, str]]:
    """Yield the queries of all panels, still with variables."""
    for page in PAGES:
        for panel in page.panels():
            for query in panel.queries:
                yield page, panel, query.expression


def operands_of_alerts() -> Iterator[tuple[str, str]]:
    """Yield each alert with what it compares: the operands on the left of each comparison."""
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
