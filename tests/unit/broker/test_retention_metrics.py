"""Metrics of retention: what it removed, by topic and reason, and what is live."""

from __future__ import annotations

import asyncio

from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.engine.metadata.topic_retention import RetentionChange
from tidemill.broker.metrics.retention_metrics import RetentionMetrics
from tidemill.broker.metrics.store_metrics import TopicSizes
from tidemill.broker.server.scrape.topic_sizes import SizeReader
from tidemill.common.metrics import Registry

REMOVED = "rocketmq_retention_trimmed_messages_total"
MINUTE_MS = 60_000


def test_removed_and_live_messages_are_shown_by_topic() -> None:
    async def main() -> None:
        world, sizes = RoundWorld(), TopicSizes()
        registry = Registry(cluster="test", node_type="broker", node_id="broker-0")
        RetentionMetrics(registry, sizes, world.rounds)
        read = SizeReader(world.rounds, sizes, world.clock)

        def shown(name: str) -> dict[tuple[str, str], float]:
            return {
                (sample.labels["topic"], sample.labels.get("reason", "")): sample.value
                for metric in registry.collect()
                for sample in metric.samples
                if sample.name == name
            }

        engine_world = world.world
        engine_world.topic("quiet")
        engine_world.engine.administration.put_topic(
            "orders",
            type_=None,
            queues=1,
            retention=RetentionChange(ms=MINUTE_MS),
            now_ms=engine_world.now_ms,
        )
        engine_world.send("a", "b")
        assert shown("rocketmq_topic_bytes") == {}, "nothing is counted yet"
        for _ in range(20):
            engine_world.background()
            engine_world.now_ms += 10_000
        engine_world.send("c", "d", "e")
        engine_world.background()
        engine_world.purge(low=3)
        engine_world.background()
        async with world.running():
            await read()
        assert shown(REMOVED) == {
            ("orders", "time"): 2,
            ("orders", "purge"): 1,
            ("quiet", "time"): 0,
        }
        live = shown("rocketmq_topic_bytes")
        assert live["quiet", ""] == 0
        assert live["orders", ""] > 0
        assert shown("rocketmq_retention_trimmed_bytes_total")["orders", "purge"] > 0
        assert list(shown("rocketmq_topic_oldest_seconds")) == [("orders", "")]

    asyncio.run(main())
