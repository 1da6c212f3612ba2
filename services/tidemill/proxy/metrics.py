"""Metrics of the proxy. Hot paths count in plain dictionaries; a scrape makes samples of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tidemill.common.errors import FilterBeyondLimit, IllegalFilter
from tidemill.common.histogram import Histogram
from tidemill.common.metrics import Labels, histogram_family

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.common.metrics import Registry

_RPC_LABELS = (
    "protocol_type",
    "request_code",
    "response_code",
    "result",
    "is_long_polling",
    "is_short_polling_hit",
)


class ProxyMetrics:
    """The counters of one proxy."""

    def __init__(self, *, former_lives: int = 0) -> None:
        """Start at zero. `former_lives`: earlier proxies in the same container."""
        self._former_lives = former_lives
        self.rpcs: Histogram[Labels] = Histogram()
        self.backend: Histogram[Labels] = Histogram()
        self.throttled = 0
        self.messages_returned = 0
        self.rejected_filters = {"syntax": 0, "limit": 0}
        self.streams = {"telemetry": 0, "receive": 0, "pull": 0}
        self.is_serving = False

    def observe_backend(self, broker: str, request_code: str, result: str, value_ms: float) -> None:
        """Count a request to a broker."""
        self.backend.observe((broker, request_code, result), value_ms)

    def note_rejection(self, error: BaseException | None) -> None:
        """Count the filter that a call was rejected for, if it was rejected for one."""
        if isinstance(error, IllegalFilter):
            reason = "limit" if isinstance(error, FilterBeyondLimit) else "syntax"
            self.rejected_filters[reason] += 1

    def register(self, registry: Registry) -> None:
        """Export the counters at every scrape."""
        registry.register(self._collect)

    def _collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("rocketmq_proxy_up", "1 while this proxy serves.")
        up.add_metric((), int(self.is_serving))
        yield up
        restarts = CounterMetricFamily(
            "rocketmq_proxy_restarts_total",
            "Proxies before this one that died in the same container, whose port was kept open.",
        )
        restarts.add_metric((), self._former_lives)
        yield restarts
        yield histogram_family(
            "rocketmq_rpc_latency",
            "Milliseconds of each client call.",
            _RPC_LABELS,
            self.rpcs,
            lambda labels: labels,
        )
        yield histogram_family(
            "rocketmq_proxy_backend_latency",
            "Milliseconds from the proxy to a broker and back.",
            ("broker", "request_code", "result"),
            self.backend,
            lambda labels: labels,
        )
        throttled = CounterMetricFamily(
            "rocketmq_proxy_throttled_total", "Calls refused by a limit.", labels=("reason",)
        )
        throttled.add_metric(("broker_requests",), self.throttled)
        yield throttled
        returned = CounterMetricFamily(
            "rocketmq_proxy_late_pop_returned_total",
            "Messages popped for a cancelled caller, and given back.",
        )
        returned.add_metric((), self.messages_returned)
        yield returned
        filters = CounterMetricFamily(
            "rocketmq_filter_rejected_total",
            "Calls rejected for their filter: it is malformed, or beyond a limit.",
            labels=("reason",),
        )
        for reason, count in self.rejected_filters.items():
            filters.add_metric((reason,), count)
        yield filters
        streams = GaugeMetricFamily("rocketmq_proxy_streams", "Open streams.", labels=("kind",))
        for kind, count in self.streams.items():
            streams.add_metric((kind,), count)
        yield streams


def request_code(method: str) -> str:
    """Return the label of a method in metrics: SendMessage is send_message."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in method)[1:]
