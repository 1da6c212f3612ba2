"""Metrics of the scaler: reported demands and calls."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tidemill.admin.scaling.demand import Demand
from tidemill.admin.scaling.trigger import DemandQuery

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# An older report is dropped: its ScaledObject was deleted, or a broker group is unreachable.
# Autoscalers ask several times within this time.
REPORT_AGE_S_MAX: Final = 120.0


class _ReportedDemand(NamedTuple):
    demand: Demand
    at_s: float


@final
class ScalerMetrics:
    """The metrics of one scaler. There is one series per query."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._reports: dict[DemandQuery, _ReportedDemand] = {}
        self.requests: Counter[tuple[str, str]] = Counter()  # by method, status
        self.stream_count = 0

    def record(self, query: DemandQuery, demand: Demand) -> None:
        """Record a demand that was reported to an autoscaler."""
        self._reports[query] = _ReportedDemand(demand, self._now_s())
        self._drop_old()

    def _drop_old(self) -> None:
        oldest_s = self._now_s() - REPORT_AGE_S_MAX
        self._reports = {key: each for key, each in self._reports.items() if each.at_s >= oldest_s}

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        self._drop_old()
        reported = GaugeMetricFamily(
            "rocketmq_scaler_metric",
            "Messages that were reported to autoscalers in the last two minutes; topic is empty if"
            " all topics of the group count.",
            labels=("consumer_group", "topic", "horizon_seconds", "signal"),
        )
        for (group, topic, horizon_s), (demand, _) in self._reports.items():
            for signal, count in (
                ("ready", demand.ready),
                ("in_flight", demand.in_flight),
                ("scheduled", demand.scheduled),
            ):
                reported.add_metric((group, topic, str(horizon_s), signal), count)
        yield reported
        requests = CounterMetricFamily(
            "rocketmq_scaler_requests_total",
            "Calls of the KEDA scaler by method and gRPC status; a stream counts when it ends.",
            labels=("method", "status"),
        )
        for (method, status), count in self.requests.items():
            requests.add_metric((method, status), count)
        yield requests
        yield GaugeMetricFamily(
            "rocketmq_scaler_streams",
            "Open streams on which KEDA waits for a need of consumers.",
            self.stream_count,
        )
