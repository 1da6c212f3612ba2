"""Metrics of topics of type PRIORITY, by level."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.metrics.metered_rounds import PAIR_LABELS
from tidemill.common.metrics import full_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from tidemill.broker.engine.layout.numbers import GroupId, TopicId
    from tidemill.broker.metrics.lag import Lag
    from tidemill.broker.metrics.metered_rounds import MeteredRounds
    from tidemill.common.metrics import Registry

_LEVEL_LABELS: Final = (*PAIR_LABELS, "level")
_SLOT_LABELS: Final = (*_LEVEL_LABELS, "slot")
_DELIVERED: Final = "rocketmq_priority_delivered_total"
_READY: Final = "rocketmq_priority_ready_messages"
_SLOTS: Final = {False: "strict", True: "fair"}


@final
class LevelMetrics:
    """Metrics by level. Topics of other types have no series.

    Levels beyond the limit of label sets have no series; `rocketmq_metrics_overflow_total` counts
    them.
    """

    def __init__(self, registry: Registry, lag: Lag, rounds: MeteredRounds) -> None:
        self._idle = registry.idle_pairs  # noted by `MessageMetrics`
        self._lag = lag
        self._rounds = rounds
        self._delivered_sets = registry.label_sets(_DELIVERED, _SLOT_LABELS)
        self._ready_sets = registry.label_sets(_READY, _LEVEL_LABELS)
        registry.register(self._collect)

    def _collect(self) -> Iterator[Metric]:
        yield from self._collect_stored()
        yield from self._collect_delivered()
        yield from self._collect_ready()

    def _collect_stored(self) -> Iterator[Metric]:
        catalog = self._rounds.engine.catalog
        stored = CounterMetricFamily(
            "rocketmq_priority_stored_total",
            "Messages that were ever stored in a level of a PRIORITY topic.",
            labels=("topic", "level"),
        )
        for topic in list(catalog.topics.values()):
            if topic.type is TopicType.PRIORITY:
                for queue in catalog.queues_of(topic):
                    stored.add_metric((topic.name, str(queue.queue_id)), queue.max_offset)
                yield from full_parts(stored)
        yield stored

    def _collect_delivered(self) -> Iterator[Metric]:
        delivered = CounterMetricFamily(
            _DELIVERED,
            "Deliveries of a level, in slots that go by priority (strict) or by age (fair).",
            labels=_SLOT_LABELS,
        )
        for pair, counts in list(self._rounds.engine.state.delivered_by_level.items()):
            names = self._names_of(*pair)
            if names is None:
                continue
            for (level, is_fair), count in sorted(counts.items()):
                labels = (*names, str(level), _SLOTS[is_fair])
                if self._delivered_sets.admit(labels) == labels:
                    delivered.add_metric(labels, count)
            yield from full_parts(delivered)
        yield delivered

    def _collect_ready(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily(
            _READY,
            "Messages of a level that wait for a consumer, retries included.",
            labels=_LEVEL_LABELS,
        )
        oldest = GaugeMetricFamily(
            "rocketmq_priority_oldest_ready_seconds",
            "Age of the oldest message of a level that waits for a consumer; 0: none waits.",
            labels=_LEVEL_LABELS,
        )
        factors = GaugeMetricFamily(
            "rocketmq_priority_factor",
            "Setting priorityFactor of a consumer group that reads a PRIORITY topic.",
            labels=PAIR_LABELS,
        )
        groups, now_ms = self._rounds.engine.catalog.groups, self._lag.now_ms
        known: set[tuple[str, ...]] = set()
        for (group_id, topic_id, level), found in self._lag.of_levels.items():
            names = self._names_of(group_id, topic_id)
            if names is None:
                continue
            if names not in known:
                known.add(names)
                factors.add_metric(names, groups[group_id].priority_factor)
            labels = (*names, str(level))
            if self._ready_sets.admit(labels) != labels:
                continue
            ready.add_metric(labels, found.ready_count)
            since_ms = found.oldest_ready_at_ms
            oldest.add_metric(labels, max(now_ms - since_ms, 0) / 1_000 if since_ms else 0)
            yield from full_parts(ready, oldest, factors)
        yield from (ready, oldest, factors)

    def _names_of(self, group_id: GroupId, topic_id: TopicId) -> tuple[str, str] | None:
        """Return the labels of a pair; None if it is deleted or idle."""
        catalog = self._rounds.engine.catalog
        topic, group = catalog.topics.get(topic_id), catalog.groups.get(group_id)
        if topic is None or group is None or (topic_id, group_id) in self._idle:
            return None
        return topic.name, group.name
