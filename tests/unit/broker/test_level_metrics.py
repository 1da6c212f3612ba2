"""The metrics of levels."""

from __future__ import annotations

from tests.support.worlds.engine_world import GROUP, TOPIC
from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.metrics.lag import Lag, TopicLag
from tidemill.broker.metrics.level_metrics import LevelMetrics
from tidemill.common.metrics import LABEL_SETS_MAX, Registry


def test_levels_beyond_the_limit_have_no_series_and_are_counted() -> None:
    world, lag = RoundWorld(), Lag()
    world.world.group()
    world.world.topic()
    catalog = world.rounds.engine.catalog
    pair = catalog.group_ids[GROUP], catalog.topic_ids[TOPIC]
    lag.of_levels = {(*pair, level): TopicLag() for level in range(LABEL_SETS_MAX + 3)}
    registry = Registry(cluster="c", node_type="broker", node_id="b")
    LevelMetrics(registry, lag, world.rounds)
    list(registry.collect())  # The next scrape shows the number of this one.
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    for name in ("ready_messages", "oldest_ready_seconds"):
        found = sum(sample.name == f"rocketmq_priority_{name}" for sample in samples)
        assert found == LABEL_SETS_MAX
    [overflow] = [
        sample.value
        for sample in samples
        if sample.name == "rocketmq_metrics_overflow_total"
        and sample.labels["metric"] == "rocketmq_priority_ready_messages"
    ]
    assert overflow == 3
