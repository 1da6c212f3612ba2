"""Histograms as plain lists: an observation costs well under a microsecond.

Whoever counts keeps one; `common.metrics.histogram_family` shows it when somebody scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Generic, TypeVar, final

# Upper bounds in milliseconds: RocketMQ's, and more where a long poll lasts longer.
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
    """A histogram for each label; `bounds` are the upper edges of all buckets but the last.

    Labels must be bounded by whoever observes.
    """

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BUCKETS_MS) -> None:
        self.bounds = bounds
        # Of each label: a count for each bucket and the rest, and in the end the sum.
        self._counts: dict[Label, list[float]] = {}

    def observe(self, label: Label, value: float, count: int = 1) -> None:
        """Add `count` equal observations."""
        counts = self._counts.get(label)
        if counts is None:
            counts = self._counts[label] = [0] * (len(self.bounds) + 2)
        counts[bisect_left(self.bounds, value)] += count
        counts[-1] += value * count

    def know(self, label: Label) -> None:
        """Show a label that has no observation yet, so that its first one is seen as one more."""
        self._counts.setdefault(label, [0] * (len(self.bounds) + 2))

    def merge(self, label: Label, counts: Iterable[float], total: float) -> None:
        """Add observations that were counted elsewhere, by the same bounds, and their sum."""
        own = self._counts.get(label) or [0] * (len(self.bounds) + 2)
        self._counts[label] = [a + b for a, b in zip(own, (*counts, total), strict=True)]

    def __contains__(self, label: Label) -> bool:
        return label in self._counts

    @property
    def labels(self) -> list[Label]:
        """All labels that have an observation, or are known."""
        return list(self._counts)

    def buckets(self, label: Label) -> tuple[list[float], float]:
        """Return a count a bucket, the last one for what is above all bounds, and the sum."""
        *counts, total = self._counts[label]
        return counts, total

    def totals(self) -> dict[Label, int]:
        """Return how many observations each label has."""
        return {label: int(sum(counts[:-1])) for label, counts in self._counts.items()}

    def drop(self, label: Label) -> None:
        """Forget the observations of a label."""
        self._counts.pop(label, None)
