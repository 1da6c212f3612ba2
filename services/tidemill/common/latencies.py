"""Histograms of milliseconds, kept as plain lists: an observation costs under a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import final

from prometheus_client.core import HistogramMetricFamily

# Upper bounds in milliseconds: RocketMQ's, and more where a long poll lasts longer.
LATENCY_BUCKETS_MS = (
    1, 3, 5, 7, 10, 20, 50, 100, 200, 500, 1000, 2000, 3000, 5000, 10_000, 20_000, 30_000,
)  # fmt: skip

Labels = tuple[str, ...]


@final
class Latencies:
    """A histogram for each label set."""

    def __init__(self, buckets_ms: tuple[int, ...] = LATENCY_BUCKETS_MS) -> None:
        self._buckets_ms = buckets_ms
        # Of each label set: a count for each bucket and the rest, and in the end the sum.
        self._counts: dict[Labels, list[float]] = {}

    def observe(self, labels: Labels, value_ms: float, count: int = 1) -> None:
        """Add `count` equal observations. The label sets must be bounded by the caller."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0.0] * (len(self._buckets_ms) + 2)
        counts[bisect_left(self._buckets_ms, value_ms)] += count
        counts[-1] += value_ms * count

    def family(self, name: str, documentation: str, label_names: Labels) -> HistogramMetricFamily:
        """Return all observations as a metric."""
        family = HistogramMetricFamily(name, documentation, labels=label_names)
        bounds = [*(f"{bound:.1f}" for bound in self._buckets_ms), "+Inf"]
        for labels, (*counts, total_ms) in self._counts.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric(labels, buckets=buckets, sum_value=total_ms)
        return family
