"""Classes of a dashboard: a page has rows, a row has panels, a panel has queries.

A query is PromQL. Three words in capitals abbreviate the selectors that most queries share:

    HERE   series of the selected cluster, namespace and node
    TOPIC  series of the selected topics
    GROUP  series of the selected consumer groups
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

# Selector of each word. An unrestricted selector also matches series without the label: on a
# laptop no series has a namespace.
SELECTORS: Final = {
    "HERE": 'cluster=~"$cluster",namespace=~"$namespace",node_id=~"$node"',
    "TOPIC": 'topic=~"$topic"',
    "GROUP": 'consumer_group=~"$consumer_group"',
}
# Range of a rate: at least four scrapes and at least one point of the graph.
RATE: Final = "$__rate_interval"


class Look(enum.Enum):
    """Form in which a panel shows its series."""

    LINES = "lines"
    STACKED = "stacked lines"
    HEATMAP = "heat map"
    BARS = "bars of the current values"
    STATES = "states over time"
    NUMBER = "current number"


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel."""

    text: str
    legend: str = ""

    @property
    def expression(self) -> str:
        """PromQL with Grafana's variables."""
        words = re.compile(rf"\b({'|'.join(SELECTORS)})\b")
        return words.sub(lambda found: SELECTORS[found[0]], " ".join(self.text.split())).replace(
            "[RATE]", f"[{RATE}]"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A graph, number or other view of one or more queries."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    look: Look = Look.LINES
    # Related alerts; the panel links to their runbooks.
    alerts: tuple[str, ...] = ()
    # A number is orange from `warns_at` and red from `fails_at`.
    warns_at: float | None = None
    fails_at: float | None = None
    # A number that must not be low is red below this value and green from it on.
    good_from: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels about one subject."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A dashboard."""

    name: str  # of its file, and the end of its address
    title: str
    description: str
    rows: tuple[Row, ...]
    # Whether the page has the variables topic and consumer group.
    has_topics: bool = False
    has_groups: bool = False
    # Prefixes of metrics that other exporters provide, such as kube-state-metrics.
    needs: tuple[str, ...] = ()

    def panels(self) -> Iterator[Panel]:
        """Yield all panels."""
        for row in self.rows:
            yield from row.panels


def panel(
    title: str,
    description: str,
    *queries: Query | str,
    unit: str = "short",
    look: Look = Look.LINES,
    alerts: tuple[str, ...] = (),
    warns_at: float | None = None,
    fails_at: float | None = None,
    good_from: float | None = None,
) -> Panel:
    """Return a panel. A query without a legend can be a string."""
    return Panel(
        title=title,
        description=description,
        queries=tuple(Query(query) if isinstance(query, str) else query for query in queries),
        unit=unit,
        look=look,
        alerts=alerts,
        warns_at=warns_at,
        fails_at=fails_at,
        good_from=good_from,
    )


def quantiles(
    metric: str,
    selector: str = "HERE",
    *,
    by: str = "",
    legend: str = "",
    of: tuple[float, ...] = (0.5, 0.99),
) -> tuple[Query, ...]:
    """Return one query per quantile of a histogram; `by` splits each into series."""
    labels = f"le, {by}" if by else "le"
    buckets = f"sum by ({labels}) (rate({metric}_bucket{{{selector}}}[RATE]))"
    return tuple(
        Query(
            f"histogram_quantile({q:g}, {buckets})", f"P{q * 100:g}{f' {legend}' if legend else ''}"
        )
        for q in of
    )


def heatmap(metric: str, selector: str = "HERE") -> Query:
    """Return the query of a heat map over a histogram."""
    return Query(f"sum by (le) (rate({metric}_bucket{{{selector}}}[RATE]))", "{{le}}")


def ratio(part: str, whole: str) -> str:
    """Return the query of a share of a whole; the share is 0 if both are 0."""
    # Smaller than any rate of a series, so it changes no other result.
    return f"({part}) / clamp_min({whole}, 1e-9)"
