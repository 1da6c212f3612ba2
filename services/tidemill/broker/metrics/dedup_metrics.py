"""Metrics of producer deduplication: keys, repeats and rejected messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tidemill.broker.engine.layout.numbers import TopicId
from tidemill.broker.metrics.metered_rounds import MeteredRounds
from tidemill.common.metrics import Registry, full_parts

HIT_REASONS: Final = ("committed", "in_flight")
REJECTION_REASONS: Final = ("memory", "version")
LOOKUP_RESULTS: Final = ("known", "unknown")


@final
class DedupMetrics:
    """Metrics of the dedup keys."""

    def __init__(self, registry: Registry, rounds: MeteredRounds) -> None:
        self._rounds = rounds
        self._topics = registry.label_sets("rocketmq_dedup_keys", ("topic",))
        registry.register(self._collect)

    def _collect(self) -> Iterator[Metric]:
        deduplication = self._rounds.engine.deduplication
        yield from self._by_reason(
            "rocketmq_dedup_hit_total",
            "Messages that repeat a dedup key. in_flight: the first one was not committed yet.",
            HIT_REASONS,
            deduplication.hits,
        )
        yield from self._by_reason(
            "rocketmq_dedup_rejected_total",
            "Rejected messages with a dedup key. memory: a new key, without memory for it. version:"
            " the sender has another list of owners than the broker group.",
            REJECTION_REASONS,
            deduplication.rejected,
        )
        for name, help_, counts in (
            (
                "rocketmq_dedup_replaced_total",
                "Pending delayed messages that a message with the same dedup key replaced.",
                deduplication.replaced,
            ),
            (
                "rocketmq_dedup_mismatch_total",
                "Messages that repeat a dedup key with another body.",
                deduplication.mismatches,
            ),
        ):
            family = CounterMetricFamily(name, help_, labels=("topic",))
            for topic_id, topic in self._shown():
                family.add_metric((topic,), counts.get(topic_id, 0))
                yield from full_parts(family)
            yield family
        lookups = CounterMetricFamily(
            "rocketmq_dedup_lookup_total",
            "Lookups of dedup keys at this broker group, which owned them before a spread. unknown:"
            " the new owner stores the message.",
            labels=("result",),
        )
        for result in LOOKUP_RESULTS:
            lookups.add_metric((result,), deduplication.lookups.get(result, 0))
        yield lookups
        keys = GaugeMetricFamily("rocketmq_dedup_keys", "Known dedup keys.", labels=("topic",))
        memory = GaugeMetricFamily(
            "rocketmq_dedup_memory_bytes", "Memory of the known dedup keys.", labels=("topic",)
        )
        used = GaugeMetricFamily(
            "rocketmq_dedup_memory_used_ratio",
            "Used part of the memory for the dedup keys of a topic. Topics without a share use the"
            " same memory. At 1, messages with new keys are rejected.",
            labels=("topic",),
        )
        shared, bound = deduplication.memory.shared()
        shared_ratio = shared / bound if bound > 0 else 1.0  # The shares may take all of it.
        for topic_id, topic in self._shown():
            table = self._rounds.engine.key_tables.tables[topic_id]
            keys.add_metric((topic,), len(table))
            memory.add_metric((topic,), table.memory_bytes)
            policy = self._rounds.engine.key_tables.policy_of(topic_id)
            share = None if policy is None else policy.memory_bytes
            ratio = (
                table.memory_bytes / deduplication.memory.bound_of_share(share)
                if share
                else shared_ratio
            )
            used.add_metric((topic,), ratio)
            yield from full_parts(keys, memory, used)
        yield from (keys, memory, used)

    def _by_reason(
        self,
        name: str,
        help_: str,
        reasons: tuple[str, ...],
        counts: Mapping[tuple[TopicId, str], int],
    ) -> Iterator[Metric]:
        family = CounterMetricFamily(name, help_, labels=("topic", "reason"))
        for topic_id, topic in self._shown():
            for reason in reasons:
                family.add_metric((topic, reason), counts.get((topic_id, reason), 0))
            yield from full_parts(family)
        yield family

    def _shown(self) -> Iterator[tuple[TopicId, str]]:
        """Yield the topics with deduplication."""
        engine = self._rounds.engine
        for topic_id in list(engine.key_tables.tables):
            topic = engine.catalog.topics.get(topic_id)
            if topic is not None and topic_id in engine.key_tables.tables:
                yield topic_id, self._topics.admit((topic.name,))[0]
