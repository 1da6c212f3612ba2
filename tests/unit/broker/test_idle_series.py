"""The series of a topic and consumer group without messages for an hour are left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from prometheus_client import exposition
from prometheus_client.parser import text_string_to_metric_families

from tests.support.worlds.engine_world import World
from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.metrics.lag import Lag, TopicLag
from tidemill.broker.metrics.message_metrics import MessageMetrics
from tidemill.broker.metrics.metered_rounds import MeteredRounds
from tidemill.broker.metrics.pop_metrics import PopMetrics
from tidemill.broker.metrics.traffic import Traffic
from tidemill.common.histogram import Histogram
from tidemill.common.idle_pairs import IDLE_S
from tidemill.common.metrics import Registry


class Scrapes:
    """The metrics of a broker with two consumer groups that have read a topic."""

    def __init__(self, world: World) -> None:
        self.now_s = 0.0
        self.traffic, self.lag = Traffic(), Lag()
        self.topic_id = world.topic()
        self.groups = [GroupId(world.group(name)) for name in ("a", "b")]
        for group_id in self.groups:
            self.deliver(group_id)
            self.lag.of_topics[group_id, self.topic_id, False] = TopicLag()
        rounds = cast(
            "MeteredRounds",
            SimpleNamespace(
                engine=world.engine,
                now_ms=world.now_ms,
                pending_count=0,
                revive_latencies=Histogram((1, 10)),
            ),
        )
        self._registry = Registry(
            cluster="c", node_type="broker", node_id="b", now_s=lambda: self.now_s
        )
        MessageMetrics(self._registry, self.traffic, self.lag, rounds)
        PopMetrics(self._registry, self.traffic, self.lag, rounds)

    def deliver(self, group_id: GroupId) -> None:
        self.traffic.delivered(self.topic_id, group_id, [1], 10)
        self.traffic.waits.observe((TopicId(self.topic_id), group_id, 1), 5)

    def series(self) -> dict[str, int]:
        """Return the number of series of each group, and the idle pairs."""
        slices = self._registry.text(exposition.generate_latest)
        while True:
            try:
                next(slices)
            except StopIteration as ended:
                text = b"".join(ended.value).decode()
                break
        found = {"a": 0, "b": 0, "idle": 0}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if family.name == "rocketmq_metrics_idle_pairs":
                    found["idle"] = int(sample.value)
                elif "topic" in sample.labels and "consumer_group" in sample.labels:
                    found[sample.labels["consumer_group"]] += 1
        return found


def test_a_pair_without_messages_for_an_hour_has_no_series() -> None:
    scrapes = Scrapes(World())
    first = scrapes.series()
    assert first["a"] == first["b"] > 40
    scrapes.now_s = IDLE_S
    scrapes.deliver(scrapes.groups[0])
    scrapes.series()  # notes that b is idle, after a part of its series
    assert scrapes.series() == {"a": first["a"], "b": 0, "idle": 1}
    scrapes.deliver(scrapes.groups[1])
    scrapes.series()
    assert scrapes.series() == {"a": first["a"], "b": first["b"], "idle": 0}


def test_a_pair_with_lag_keeps_its_series() -> None:
    scrapes = Scrapes(World())
    first = scrapes.series()
    scrapes.now_s = 2 * IDLE_S
    scrapes.lag.of_topics[scrapes.groups[1], scrapes.topic_id, False].ready_count = 1
    scrapes.series()
    assert scrapes.series() == {"a": 0, "b": first["b"], "idle": 1}
