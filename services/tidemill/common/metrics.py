"""The metrics of every process: common collectors, and the limit of label sets.

Hot paths count in plain dictionaries. Collectors turn the counts into samples at a scrape
(`metrics_server.py`).

Twenty thousand topics make half a million samples, which take seconds. Therefore a collector may
yield a metric in several parts, in any order. The server joins the text of the parts and runs other
tasks between them.
"""

from __future__ import annotations

import copy
import functools
import platform
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import accumulate, chain
from typing import Any, Final, TypeVar

import prometheus_client
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry

from tidemill.common.histogram import Histogram
from tidemill.common.idle_pairs import IdlePairs
from tidemill.common.version import commit, version

LABEL_SETS_MAX: Final = 50_000  # per metric; further topics are counted under OVERFLOW
OVERFLOW: Final = "__overflow__"
SAMPLES_PER_PART: Final = 64  # takes about a millisecond to create and to encode
_END_OF_OPENMETRICS = b"# EOF\n"

Labels = tuple[str, ...]
Label = TypeVar("Label")


def histogram_family(
    name: str,
    documentation: str,
    label_names: Labels,
    histogram: Histogram[Label],
    labels_of: Callable[[Label], Labels | None],
    *,
    divisor: int = 1,
) -> HistogramMetricFamily:
    """Return a histogram as a metric, with its values divided by `divisor`.

    `labels_of` returns the label values for a label of the histogram; None omits the label.
    """
    family = HistogramMetricFamily(name, documentation, labels=label_names)
    add = _adder(family, histogram, labels_of, divisor)
    for label in histogram.labels:
        add(label)
    return family


def histogram_parts(
    name: str,
    documentation: str,
    label_names: Labels,
    histogram: Histogram[Label],
    labels_of: Callable[[Label], Labels | None],
    *,
    divisor: int = 1,
) -> Iterator[Metric]:
    """Yield the metric of `histogram_family` in parts, for a histogram with many labels."""
    family = HistogramMetricFamily(name, documentation, labels=label_names)
    add = _adder(family, histogram, labels_of, divisor)
    for label in histogram.labels:
        add(label)
        yield from full_parts(family)
    yield family


def _adder(
    family: HistogramMetricFamily,
    histogram: Histogram[Label],
    labels_of: Callable[[Label], Labels | None],
    divisor: int,
) -> Callable[[Label], None]:
    bounds = [*(str(bound / divisor) for bound in histogram.bounds), "+Inf"]

    def add(label: Label) -> None:
        labels = labels_of(label)
        if labels is not None and label in histogram:
            counts, total = histogram.buckets(label)
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric(labels, buckets=buckets, sum_value=total / divisor)

    return add


def full_parts(*families: Metric) -> Iterator[Metric]:
    """Yield the samples of `families` and clear them, if there are enough for a part.

    A collector of many samples calls it after each item that it adds.
    """
    if sum(len(family.samples) for family in families) < SAMPLES_PER_PART:
        return
    for family in families:
        part = copy.copy(family)
        family.samples = []
        yield part


class Registry:
    """The metrics of this process; every sample has the common labels of the process."""

    def __init__(
        self,
        *,
        cluster: str,
        node_type: str,
        node_id: str,
        now_s: Callable[[], float] = time.monotonic,
        **extra: str,
    ) -> None:
        self.common: Final = {
            "cluster": cluster,
            "node_type": node_type,
            "node_id": node_id,
            **extra,
        }
        self._collectors = CollectorRegistry(auto_describe=False)
        self._overflows: dict[str, int] = {}
        self.idle_pairs: Final = IdlePairs(now_s)
        # Metric names stay as declared. Creation times would add a series to each metric.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # theirs
        prometheus_client.ProcessCollector(registry=self._collectors)
        prometheus_client.GCCollector(registry=self._collectors)
        self._collectors.register(_FunctionCollector(self._collect_own))

    def register(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Call `collect` for its metrics at every scrape."""
        self._collectors.register(_FunctionCollector(collect))

    def label_sets(
        self, metric: str, label_names: Labels, limit: int = LABEL_SETS_MAX
    ) -> LabelSets:
        """Return the label sets of one metric, limited in number."""
        self._overflows.setdefault(metric, 0)
        return LabelSets(metric, label_names, limit, self._overflows)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, with the common labels on each sample."""
        for metric in self._collectors.collect():
            metric.samples = [
                sample._replace(labels={**self.common, **sample.labels})
                for sample in metric.samples
            ]
            yield metric

    def text(self, encode: Callable[[Any], bytes]) -> Generator[None, None, list[bytes]]:
        """Return all metrics as text of `encode`; each slice of the work encodes some samples."""
        texts: dict[str, list[bytes]] = {}
        for metric in self.collect():
            part, samples = copy.copy(metric), metric.samples
            for first in range(0, len(samples) or 1, SAMPLES_PER_PART):
                part.samples = samples[first : first + SAMPLES_PER_PART]
                collector = _FunctionCollector(functools.partial(list, [part]))
                encoded = encode(collector).removesuffix(_END_OF_OPENMETRICS)
                parts = texts.setdefault(metric.name, [])
                parts.append(_without_head(encoded) if parts else encoded)
                yield
        end = [_END_OF_OPENMETRICS] if encode(_FunctionCollector(list)) else []
        return [*chain.from_iterable(texts.values()), *end]

    def _collect_own(self) -> Iterator[Metric]:
        build = GaugeMetricFamily(
            "rocketmq_build_info",
            "Version and commit of this process.",
            labels=("version", "commit", "python"),
        )
        build.add_metric((version(), commit(), platform.python_version()), 1)
        yield build
        overflow = CounterMetricFamily(
            "rocketmq_metrics_overflow_total",
            "Label sets folded into the overflow topic, by metric.",
            labels=("metric",),
        )
        for metric, count in self._overflows.items():
            overflow.add_metric((metric,), count)
        yield overflow
        yield GaugeMetricFamily(
            "rocketmq_metrics_idle_pairs",
            "Pairs of topic and consumer group without a change for an hour, whose series are left"
            " out.",
            value=len(self.idle_pairs),
        )


class LabelSets:
    """The label sets of one metric; at most `limit`, so that topics cannot exhaust memory."""

    def __init__(
        self, metric: str, label_names: Labels, limit: int, overflows: dict[str, int]
    ) -> None:
        self._metric = metric
        self._topic_at = label_names.index("topic") if "topic" in label_names else 0
        self._limit = limit
        self._overflows = overflows
        self._known: set[Labels] = set()

    def admit(self, labels: Labels) -> Labels:
        """Return `labels`; if the metric is full and they are new, return the overflow set."""
        if labels in self._known:
            return labels
        if len(self._known) < self._limit:
            self._known.add(labels)
            return labels
        self._overflows[self._metric] = self._overflows.get(self._metric, 0) + 1
        at = self._topic_at
        return (*labels[:at], OVERFLOW, *labels[at + 1 :])

    def forget(self, labels: Labels) -> None:
        """Remove the label set of a deleted resource."""
        self._known.discard(labels)


def _without_head(text: bytes) -> bytes:
    """Return the samples of a metric without the HELP and TYPE lines."""
    while text.startswith(b"# "):
        text = text.partition(b"\n")[2]
    return text


class _FunctionCollector(Collector):
    """A collector that calls a function."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()
