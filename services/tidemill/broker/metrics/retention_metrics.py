"""Metrics of retention: removed messages and live messages, by topic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tidemill.broker.engine.layout.trim import TrimReason
from tidemill.broker.metrics.metered_rounds import MS_PER_S, MeteredRounds
from tidemill.broker.metrics.store_metrics import TopicSizes
from tidemill.common.metrics import Registry, full_parts

TRIM_LABELS = ("topic", "reason")


@final
class RetentionMetrics:
    """Metrics of retention. A deleted topic has no series."""

    def __init__(self, registry: Registry, sizes: TopicSizes, rounds: MeteredRounds) -> None:
        self._sizes = sizes
        self._rounds = rounds
        self._topics = registry.label_sets("rocketmq_topic_bytes", ("topic",))
        registry.register(self._collect)

    def _collect(self) -> Iterator[Metric]:
        engine = self._rounds.engine
        messages = CounterMetricFamily(
            "rocketmq_retention_trimmed_messages_total",
            "Messages removed because of their age, the size of topics, acks of all consumer"
            " groups, a purge, or a full disk (disk_full_policy).",
            labels=TRIM_LABELS,
        )
        size_bytes = CounterMetricFamily(
            "rocketmq_retention_trimmed_bytes_total",
            "Sizes of the removed messages in the log.",
            labels=TRIM_LABELS,
        )
        live = GaugeMetricFamily(
            "rocketmq_topic_bytes",
            "Sizes of a topic's live messages in the log, as of the last look of retention. Absent"
            " until the first count after a start is complete.",
            labels=("topic",),
        )
        oldest = GaugeMetricFamily(
            "rocketmq_topic_oldest_seconds",
            "Age of the oldest live message of a topic. Absent without a live message.",
            labels=("topic",),
        )
        trims, sizes = engine.trims, engine.live_bytes
        for topic in list(engine.catalog.topics.values()):
            (name,) = admitted = self._topics.admit((topic.name,))
            for reason in TrimReason:
                # Messages of every topic grow old. The other reasons are rare.
                if reason is TrimReason.TIME or trims.messages[topic.id, reason]:
                    labels = name, reason.name.lower()
                    messages.add_metric(labels, trims.messages[topic.id, reason])
                    size_bytes.add_metric(labels, trims.size_bytes[topic.id, reason])
            if admitted == (topic.name,):
                if sizes.is_complete:
                    live.add_metric(admitted, sizes.bytes_of_topic(topic.id))
                stored_at_ms = self._sizes.oldest_at_ms.get(topic.id)
                if stored_at_ms is not None:
                    age_ms = max(self._rounds.now_ms - stored_at_ms, 0)
                    oldest.add_metric(admitted, age_ms / MS_PER_S)
            yield from full_parts(messages, size_bytes, live, oldest)
        yield from (messages, size_bytes, live, oldest)
