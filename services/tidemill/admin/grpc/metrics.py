"""Metrics of the gRPC service Admin: number, codes and duration of calls by method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tidemill.common.histogram import Histogram
from tidemill.common.metrics import histogram_family

if TYPE_CHECKING:
    from prometheus_client.core import Metric

MS_PER_S: Final = 1_000


@final
class AdminGrpcMetrics:
    """The metrics of the service. The number of methods and codes is small."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()  # by method and code
        self.durations_ms: Histogram[str] = Histogram()  # by method
        self.in_flight = 0

    def note(self, method: str, code: str, duration_s: float) -> None:
        """Count a call that has ended."""
        self.calls[method, code] += 1
        self.durations_ms.observe(method, duration_s * MS_PER_S)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        calls = CounterMetricFamily(
            "rocketmq_admin_grpc_requests_total",
            "Calls of the gRPC service Admin, by method and code: the code in the status of the"
            " response, or the gRPC status of a call without a response.",
            labels=("method", "code"),
        )
        for (method, code), count in self.calls.items():
            calls.add_metric((method, code), count)
        yield calls
        yield histogram_family(
            "rocketmq_admin_grpc_seconds",
            "Seconds from the request of a call of the gRPC service Admin to its response.",
            ("method",),
            self.durations_ms,
            lambda method: (method,),
            divisor=MS_PER_S,
        )
        yield GaugeMetricFamily(
            "rocketmq_admin_grpc_in_flight",
            "Calls of the gRPC service Admin in progress.",
            self.in_flight,
        )
