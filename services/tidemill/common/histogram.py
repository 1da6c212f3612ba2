"""Histograms as plain lists: an observation costs well under a microsecond.

The code that counts owns the histogram. `common.metrics.histogram_family` exports it at a scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Generic, TypeVar, final

# Upper bounds in milliseconds: those of RocketMQ, and more for long polls.
LATENCY_BUCKETS_MS = (
    1,
    3,
    5,
    7,
    10,
    20,
    50,
    100,
    200,
    500,
    1000,
    2000,
    3000,
    5000,
    10_000,
    20_000,
    30_000,
)

Label = TypeVar("Label")


@final
class Histogram(Generic[Label]):
    """A histogram per label; `bounds` are the upper edges of all buckets except the last.

    The caller must bound the number of labels.
    """

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BUCKETS_MS) -> None:
        self.bounds = bounds
        # Per label: one count per bucket, the last for larger values, and then the sum.
        self._counts: dict[Label, list[float]] = {}

    def observe(self, label: Label, value: float, count: int = 1) -> None:
        """Add `count` equal observations."""
        counts = self._counts.get(label)
        if counts is None:
            counts = self._counts[label] = [0] * (len(self.bounds) + 2)
        counts[bisect_left(self.bounds, value)] += count
        counts[-1] += value * count

    def declare(self, label: Label) -> None:
        """Export a label without observations, so that its first one is an increase."""
        self._counts.setdefault(label, [0] * (len(self.bounds) + 2))

    def merge(self, label: Label, counts: Iterable[float], total: float) -> None:
        """Add observations and their sum from elsewhere, counted with the same bounds."""
        own = self._counts.get(label) or [0] * (len(self.bounds) + 2)
        self._counts[label] = [a + b for a, b in zip(own, (*counts, total), strict=True)]

    def __contains__(self, label: Label) -> bool:
        return label in self._counts

    @property
    def labels(self) -> list[Label]:
        """All labels with an observation or a declaration."""
        return list(self._counts)

    def buckets(self, label: Label) -> tuple[list[float], float]:
        """Return one count per bucket, the last for values above all bounds, and the sum."""
        *counts, total = self._counts[label]
        return counts, total

    def totals(self) -> dict[Label, int]:
        """Return the number of observations per label."""
        return {label: int(sum(counts[:-1])) for label, counts in self._counts.items()}

    def drop(self, label: Label) -> None:
        """Remove the observations of a label."""
        self._counts.pop(label, None)
