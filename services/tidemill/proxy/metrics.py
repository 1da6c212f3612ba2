"""What the proxy counts. Hot paths add to plain dictionaries; a scrape turns them into samples."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.common.metrics import Registry

# Upper bounds in milliseconds: RocketMQ's, and more where a long poll lasts longer.
LATENCY_BUCKETS_MS = (
    1, 3, 5, 7, 10, 20, 50, 100, 200, 500, 1000, 2000, 3000, 5000, 10_000, 20_000, 30_000,
)  # fmt: skip

Labels = tuple[str, ...]

_RPC_LABELS = (
    "protocol_type",
    "request_code",
    "response_code",
    "result",
    "is_long_polling",
    "is_short_polling_hit",
)


class Latencies:
    """A histogram of milliseconds for each label set."""

    def __init__(self) -> None:
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(self, labels: Labels, value_ms: float) -> None:
        """Count one observation. The label sets must be bounded by the caller."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(LATENCY_BUCKETS_MS) + 1)
            self._sums[labels] = 0.0
        counts[bisect_left(LATENCY_BUCKETS_MS, value_ms)] += 1
        self._sums[labels] += value_ms

    def family(self, name: str, documentation: str, label_names: Labels) -> HistogramMetricFamily:
        """Return all observations as a metric."""
        family = HistogramMetricFamily(name, documentation, labels=label_names)
        bounds = [*(f"{bound:.1f}" for bound in LATENCY_BUCKETS_MS), "+Inf"]
        for labels, counts in self._counts.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric(labels, buckets=buckets, sum_value=self._sums[labels])
        return family


class ProxyMetrics:
    """The counters of one proxy."""

    def __init__(self) -> None:
        self.rpcs = Latencies()
        self.backend = Latencies()
        self.throttled = 0
        self.messages_returned = 0
        self.streams = {"telemetry": 0, "receive": 0}
        self.is_serving = False

    def observe_backend(self, request_code: str, result: str, value_ms: float) -> None:
        """Count a request to a broker."""
        self.backend.observe((request_code, result), value_ms)

    def register(self, registry: Registry) -> None:
        """Show the counters at every scrape."""
        registry.register(self._collect)

    def _collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("rocketmq_proxy_up", "1 while this proxy serves.")
        up.add_metric((), int(self.is_serving))
        yield up
        yield self.rpcs.family(
            "rocketmq_rpc_latency", "Milliseconds of each client call.", _RPC_LABELS
        )
        yield self.backend.family(
            "rocketmq_proxy_backend_latency",
            "Milliseconds from the proxy to a broker and back.",
            ("request_code", "result"),
        )
        throttled = CounterMetricFamily(
            "rocketmq_proxy_throttled_total", "Calls refused by a limit.", labels=("reason",)
        )
        throttled.add_metric(("broker_requests",), self.throttled)
        yield throttled
        returned = CounterMetricFamily(
            "rocketmq_proxy_late_pop_returned_total",
            "Messages popped after the caller had gone, and given back.",
        )
        returned.add_metric((), self.messages_returned)
        yield returned
        streams = GaugeMetricFamily("rocketmq_proxy_streams", "Open streams.", labels=("kind",))
        for kind, count in self.streams.items():
            streams.add_metric((kind,), count)
        yield streams
