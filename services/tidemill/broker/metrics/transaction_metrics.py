"""Metrics of transactions: half messages, their results and their checks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, Protocol, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tidemill.broker.engine.layout.numbers import TopicId
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.metrics.metered_rounds import MS_PER_S, MeteredRounds
from tidemill.common.metrics import Labels, Registry, full_parts, histogram_parts

if TYPE_CHECKING:
    from collections import Counter

CHECK_RESULTS: Final = ("written", "busy", "gone", "no_producer")
# The search for the oldest half messages reads the whole table: 40 ms for a million rows.
OLDEST_PERIOD_MS: Final = 10_000


class MeteredChecks(Protocol):
    """The part of `CheckBack` that the metrics read."""

    @property
    def results(self) -> Counter[tuple[TopicId, str]]:
        """Checks by topic id and result."""
        ...

    def find_without_producer(self) -> set[TopicId]:
        """Return the topics with due checks and without a connected producer."""
        ...


@final
class TransactionMetrics:
    """Metrics of the transactions."""

    def __init__(self, registry: Registry, rounds: MeteredRounds, checks: MeteredChecks) -> None:
        self._rounds = rounds
        self._checks = checks
        self._topics = registry.label_sets("rocketmq_half_messages", ("topic",))
        self._oldest_sent_ms: dict[TopicId, int] = {}
        self._oldest_read_at_ms = -OLDEST_PERIOD_MS
        registry.register(self._collect)

    def _collect(self) -> Iterator[Metric]:
        transactions = self._rounds.engine.transactions
        opened = self._rounds.engine.transaction_table.open_by_topic
        yield from self._by_topic(
            GaugeMetricFamily(
                "rocketmq_half_messages",
                "Half messages that are neither committed nor rolled back.",
                labels=("topic",),
            ),
            opened,
        )
        for name, help_, counts in (
            ("commit_messages", "Committed half messages.", transactions.committed),
            ("rollback_messages", "Half messages that were rolled back.", transactions.rolled_back),
            (
                "transaction_expired",
                "Half messages without a decision after their last check.",
                self._rounds.engine.half_checks.expired,
            ),
            (
                "transaction_recovered",
                "Expired half messages that an operator opened again.",
                transactions.recovered,
            ),
        ):
            family = CounterMetricFamily(f"rocketmq_{name}_total", help_, labels=("topic",))
            yield from self._by_topic(family, counts)
        yield from histogram_parts(
            "rocketmq_finish_message_latency",
            "Seconds from a half message to its commit, rollback or expiry.",
            ("topic",),
            self._rounds.engine.half_messages.latencies,
            self._labels_of,
            divisor=MS_PER_S,
        )
        yield from self._collect_checks()
        yield from self._collect_oldest()
        yield CounterMetricFamily(
            "rocketmq_transaction_forgotten_outcomes_total",
            "Results of transactions that were forgotten before their time, because of their"
            " number.",
            value=self._rounds.engine.transaction_table.forgotten_count,
        )

    def _labels_of(self, topic_id: TopicId) -> Labels | None:
        """Return the label of a topic; None if it was deleted."""
        topic = self._rounds.engine.catalog.topics.get(topic_id)
        return None if topic is None else self._topics.admit((topic.name,))

    def _shown(self, counts: Mapping[TopicId, object]) -> Iterator[tuple[TopicId, str]]:
        """Yield the topics of transactions, and those of `counts`."""
        for topic in list(self._rounds.engine.catalog.topics.values()):
            if topic.type == TopicType.TRANSACTION or topic.id in counts:
                yield topic.id, self._topics.admit((topic.name,))[0]

    def _by_topic(
        self, family: CounterMetricFamily | GaugeMetricFamily, counts: Mapping[TopicId, int]
    ) -> Iterator[Metric]:
        for topic_id, name in self._shown(counts):
            family.add_metric((name,), counts.get(topic_id, 0))
            yield from full_parts(family)
        yield family

    def _collect_checks(self) -> Iterator[Metric]:
        results, waiting_ids = self._checks.results, self._checks.find_without_producer()
        opened = self._rounds.engine.transaction_table.open_by_topic
        checks = CounterMetricFamily(
            "rocketmq_transaction_checks_total",
            "Checks of half messages. written: a producer got it. busy, gone: the producer did not"
            " read it. no_producer: no producer of the topic is connected.",
            labels=("topic", "result"),
        )
        waiting = GaugeMetricFamily(
            "rocketmq_transaction_waiting_messages",
            "Open half messages of a topic with due checks and without a connected producer.",
            labels=("topic",),
        )
        for topic_id, name in self._shown(dict.fromkeys(topic_id for topic_id, _ in results)):
            for result in CHECK_RESULTS:
                checks.add_metric((name, result), results.get((topic_id, result), 0))
            count = opened.get(topic_id, 0) if topic_id in waiting_ids else 0
            waiting.add_metric((name,), count)
            yield from full_parts(checks, waiting)
        yield from (checks, waiting)

    def _collect_oldest(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "rocketmq_transaction_oldest_open_seconds",
            "Age of the oldest half message without a decision. 0: there is none. Up to 10 s old.",
            labels=("topic",),
        )
        engine, now_ms = self._rounds.engine, self._rounds.now_ms
        opened = engine.transaction_table.open_by_topic
        if now_ms - self._oldest_read_at_ms >= OLDEST_PERIOD_MS:
            found = {}
            for oldest in engine.transaction_table.find_oldest_open():
                if oldest is None:
                    yield copy.copy(family)  # A part without samples ends a slice of the scrape.
                    continue
                topic_id, half_id = oldest
                sent_at_ms = engine.half_messages.find_sent_ms(half_id)
                if sent_at_ms is not None:
                    found[topic_id] = sent_at_ms
            self._oldest_sent_ms, self._oldest_read_at_ms = found, now_ms
        for topic_id, name in self._shown(opened):
            sent_at_ms = self._oldest_sent_ms.get(topic_id) if topic_id in opened else None
            age_ms = 0 if sent_at_ms is None else max(now_ms - sent_at_ms, 0)
            family.add_metric((name,), age_ms / MS_PER_S)
            yield from full_parts(family)
        yield family
