"""What autoscalers were told, and how often they asked."""

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

# What nobody was told for so long is told nobody any more: its ScaledObject has gone, or a broker
# group is away. Autoscalers ask several times in it.
REPORT_AGE_S_MAX: Final = 120.0


class _ReportedDemand(NamedTuple):
    demand: Demand
    at_s: float


@final
class ScalerMetrics:
    """The numbers of one scaler. Questions are as few as consumers that are scaled."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._told: dict[DemandQuery, _ReportedDemand] = {}
        self.requests: Counter[tuple[str, str]] = Counter()  # by method, status
        self.stream_count = 0

    def told(self, question: DemandQuery, demand: Demand) -> None:
        """Keep what an autoscaler was told."""
        self._told[question] = _ReportedDemand(demand, self._now_s())
        self._forget()

    def _forget(self) -> None:
        oldest_s = self._now_s() - REPORT_AGE_S_MAX
        self._told = {key: told for key, told in self._told.items() if told.at_s >= oldest_s}

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        self._forget()
        told_of = GaugeMetricFamily(
            "rocketmq_scaler_metric",
            "Messages that an autoscaler was told of in the last two minutes; topic is empty where"
            " all of the group's count.",
            labels=("consumer_group", "topic", "horizon_seconds", "signal"),
        )
        for (group, topic, horizon_s), (demand, _) in self._told.items():
            for signal, count in (
                ("ready", demand.ready),
                ("in_flight", demand.in_flight),
                ("scheduled", demand.scheduled),
            ):
                told_of.add_metric((group, topic, str(horizon_s), signal), count)
        yield told_of
        requests = CounterMetricFamily(
            "rocketmq_scaler_requests_total",
            "Calls of the KEDA scaler, by method and gRPC status; a stream counts when it ends.",
            labels=("method", "status"),
        )
        for (method, status), count in self.requests.items():
            requests.add_metric((method, status), count)
        yield requests
        yield GaugeMetricFamily(
            "rocketmq_scaler_streams",
            "Streams on which KEDA waits to hear that consumers are needed.",
            self.stream_count,
        )
