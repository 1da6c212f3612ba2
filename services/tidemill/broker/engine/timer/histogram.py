"""Counts of observations by label and bucket, for the shell to show."""

from __future__ import annotations

from bisect import bisect_left
from typing import final


@final
class Histogram:
    """A histogram for each label; `bounds` are the upper edges of all buckets but the last."""

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds = bounds
        self.counts: dict[int, list[int]] = {}  # by label: a count a bucket
        self.sums: dict[int, int] = {}

    def observe(self, label: int, value: int) -> None:
        """Count one observation."""
        counts = self.counts.get(label)
        if counts is None:
            counts = self.counts[label] = [0] * (len(self.bounds) + 1)
            self.sums[label] = 0
        counts[bisect_left(self.bounds, value)] += 1
        self.sums[label] += value

    def totals(self) -> dict[int, int]:
        """Return how many observations each label has."""
        return {label: sum(counts) for label, counts in self.counts.items()}
