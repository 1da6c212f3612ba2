"""The metrics of transactions in a few scenarios."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from tests.support.worlds.engine_world import TOPIC
from tests.support.worlds.transaction_world import TransactionWorld
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.numbers import HalfId, TopicId
from tidemill.broker.engine.metadata.transaction_policy import PolicyChange
from tidemill.broker.engine.timer.firing_clock import FiringClock
from tidemill.broker.metrics.transaction_metrics import OLDEST_PERIOD_MS, TransactionMetrics
from tidemill.common.histogram import Histogram
from tidemill.common.metrics import Registry

SECOND_MS = 1_000
FAST = PolicyChange(first_check_ms=1_000, period_ms=1_000, attempts=1)


@dataclass
class Source:
    """An engine and its clock, as the rounds have them."""

    engine: Engine
    now_ms: int
    firing_clock: FiringClock = field(default_factory=FiringClock)
    pending_count: int = 0
    revive_latencies: Histogram[tuple[()]] = field(default_factory=Histogram)
    append_times_us: Histogram[tuple[()]] = field(default_factory=Histogram)
    sync_times_us: Histogram[tuple[()]] = field(default_factory=Histogram)
    disk_full_in_s: float = math.inf
    failed_read_count: int = 0


@dataclass
class Checks:
    """The counts of checks."""

    results: Counter[tuple[TopicId, str]] = field(default_factory=Counter)
    without_producer: set[TopicId] = field(default_factory=set)

    def find_without_producer(self) -> set[TopicId]:
        return self.without_producer


class Scraped:
    """A world with its metrics."""

    def __init__(self) -> None:
        self.world = TransactionWorld()
        self.source = Source(self.world.engine, self.world.now_ms)
        self.checks = Checks()
        self.registry = Registry(cluster="test", node_type="broker", node_id="broker-0")
        TransactionMetrics(self.registry, self.source, self.checks)

    def value(self, name: str, **labels: str) -> float | None:
        """Scrape, and return one sample; None if it is missing."""
        self.source.now_ms = self.world.now_ms
        for metric in self.registry.collect():
            for sample in metric.samples:
                is_wanted = labels.items() <= sample.labels.items()
                if sample.name == f"rocketmq_{name}" and is_wanted:
                    return sample.value
        return None

    def orders(self, name: str, **labels: str) -> float | None:
        return self.value(name, topic=TOPIC, **labels)


def test_half_messages_and_their_results_are_counted_once() -> None:
    scraped = Scraped()
    world = scraped.world
    assert scraped.orders("half_messages") is None, "the topic has no transactions"
    halves = [world.half(text) for text in "abc"]
    assert scraped.orders("half_messages") == 3
    world.advance(2 * SECOND_MS)
    for _ in range(2):
        world.commit_half(halves[0])
        world.roll_back(halves[1])
    assert scraped.orders("half_messages") == 1
    assert scraped.orders("commit_messages_total") == 1
    assert scraped.orders("rollback_messages_total") == 1
    assert scraped.orders("finish_message_latency_count") == 2
    assert scraped.orders("finish_message_latency_sum") == 4


def test_expired_and_recovered_messages_are_counted() -> None:
    scraped = Scraped()
    world = scraped.world
    world.set_policy(FAST)
    half_id = world.half("a")
    world.advance(2 * SECOND_MS)
    world.write_checks()
    world.advance(2 * SECOND_MS)
    world.run_due()
    assert scraped.orders("transaction_expired_total") == 1
    assert scraped.orders("finish_message_latency_count") == 1
    world.recover(HalfId(half_id))
    assert scraped.orders("transaction_recovered_total") == 1
    assert scraped.orders("half_messages") == 1
    assert scraped.value("transaction_forgotten_outcomes_total") == 0


def test_checks_are_counted_by_result_and_those_without_a_producer_wait() -> None:
    scraped = Scraped()
    world = scraped.world
    half_id = world.half("a")
    topic_id = world.topic(TOPIC)
    scraped.checks.results[topic_id, "no_producer"] = 2
    scraped.checks.without_producer.add(topic_id)
    assert scraped.orders("transaction_checks_total", result="no_producer") == 2
    assert scraped.orders("transaction_checks_total", result="written") == 0
    assert scraped.orders("transaction_waiting_messages") == 1
    world.commit_half(half_id)
    assert scraped.orders("transaction_waiting_messages") == 0


def test_the_age_of_the_oldest_half_message_is_that_of_its_topic() -> None:
    scraped = Scraped()
    world = scraped.world
    first = world.half("a")
    world.advance(3 * SECOND_MS)
    world.half("b", topic="other")
    world.half("c")
    assert scraped.orders("transaction_oldest_open_seconds") == 3
    assert scraped.value("transaction_oldest_open_seconds", topic="other") == 0
    world.commit_half(first)
    world.advance(OLDEST_PERIOD_MS)
    assert scraped.orders("transaction_oldest_open_seconds") == OLDEST_PERIOD_MS / SECOND_MS
