"""Metrics of consumer groups that consume a topic in a way that is almost always a mistake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, final

from prometheus_client.core import GaugeMetricFamily, Metric

from tidemill.broker.metrics.metered_rounds import PAIR_LABELS
from tidemill.common.metrics import full_parts

if TYPE_CHECKING:
    from tidemill.broker.metrics.metered_rounds import MeteredRounds
    from tidemill.broker.server.round.polled_filters import PolledFilters
    from tidemill.common.clock import Clock
    from tidemill.common.metrics import Registry


@final
class ConflictMetrics:
    """The conflicts of filters and of delivery orders."""

    def __init__(
        self, registry: Registry, filters: PolledFilters, rounds: MeteredRounds, clock: Clock
    ) -> None:
        self._filters = filters
        self._rounds = rounds
        self._clock = clock
        registry.register(self._collect)

    def _collect(self) -> Iterator[Metric]:
        filters = GaugeMetricFamily(
            "rocketmq_filter_conflicts",
            "Different filters of the consumers of one group, if there are several.",
            labels=PAIR_LABELS,
        )
        orders = GaugeMetricFamily(
            "rocketmq_order_conflicts",
            "1 for a CONCURRENT consumer group that reads a FIFO topic, out of order.",
            labels=PAIR_LABELS,
        )
        for conflict in self._filters.conflicts(
            self._rounds.engine.catalog, monotonic_ms=self._clock.monotonic_ms()
        ):
            labels = conflict.topic, conflict.group
            if conflict.filters:
                filters.add_metric(labels, len(conflict.filters))
            if conflict.is_order_lost:
                orders.add_metric(labels, 1)
            yield from full_parts(filters, orders)
        yield from (filters, orders)
