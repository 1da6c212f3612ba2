"""What a dashboard is made of: pages of rows of panels of queries.

A query is PromQL in which three capital words stand for what nearly all have in common, so that it
can be read:

    HERE   the series of the chosen cluster, namespace and node
    TOPIC  those of the chosen topics          GROUP  those of the chosen consumer groups
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

# What a word of a query stands for. A selector that nobody has restricted matches everything, also
# series without the label: on a laptop nothing has a namespace.
SELECTORS: Final = {
    "HERE": 'cluster=~"$cluster",namespace=~"$namespace",node_id=~"$node"',
    "TOPIC": 'topic=~"$topic"',
    "GROUP": 'consumer_group=~"$consumer_group"',
}
# The span of a rate: four scrapes at least, and no less than a point of the graph.
RATE: Final = "$__rate_interval"


class Look(enum.Enum):
    """How a panel shows its series."""

    LINES = "lines"
    STACKED = "stacked lines"
    HEATMAP = "heat map"
    BARS = "bars, of now"
    STATES = "states over time"
    NUMBER = "number, of now"


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
    """One question, and the answer to it."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    look: Look = Look.LINES
    # The alerts about what is shown: the panel links to their runbooks.
    alerts: tuple[str, ...] = ()
    # Where a number turns from green to orange and to red; None: it stays as it is.
    warns_at: float | None = None
    fails_at: float | None = None
    # Where it turns from red to green, of what must not be low.
    good_from: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels about one subject."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A dashboard."""

    name: str  # its file, and what its address ends in
    title: str
    description: str
    rows: tuple[Row, ...]
    # Whether the variables of topics and consumer groups mean something here.
    has_topics: bool = False
    has_groups: bool = False
    # What the names of metrics begin with that it needs and that are not ours, but Kubernetes'.
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
    """Return a panel; a query without a legend may be a plain string."""
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
    """Return queries of quantiles of a histogram, one a line; `by` splits each."""
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
    """Return the query of a part of a whole: 0 where there is nothing of either."""
    # No series of a rate is as small as this, and nothing divided by it is nothing.
    return f"({part}) / clamp_min({whole}, 1e-9)"
