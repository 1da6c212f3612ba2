"""The size of each topic in the log, as the metrics show it."""

from __future__ import annotations

import asyncio

from tests.support.disk.counted_work import Meter
from tests.support.worlds.engine_world import World
from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.queries.inspection import ENTRIES_A_STRETCH, STRETCHES
from tidemill.broker.metrics.store_metrics import StoreMetrics, TopicSizes
from tidemill.broker.server.scrape.topic_sizes import QUEUES_A_ROUND, SIZES_AGE_MS_MAX, SizeReader
from tidemill.common.metrics import Registry


def bytes_of(world: World, topic: str) -> tuple[int, int]:
    """Return the reported size of a topic's first queue, and the sum of its entries."""
    engine = world.engine
    queue = engine.catalog.queue(TopicId(world.topic(topic)), QueueId(0))
    return engine.inspection.log_bytes(queue), sum(
        size for _, size, _ in queue.walk(queue.min_offset)
    )


def test_the_size_of_a_few_messages_is_exact_even_after_a_restart() -> None:
    world = World()
    for n in range(STRETCHES * ENTRIES_A_STRETCH):
        world.send(f"m{n}", size=n)
        if n == 100:
            world.checkpoint()
    reported, exact = bytes_of(world, "orders")
    assert reported == exact > STRETCHES * ENTRIES_A_STRETCH * 100
    world.restart()
    assert bytes_of(world, "orders") == (exact, exact)
    assert bytes_of(world, "empty") == (0, 0)


def test_the_size_of_many_messages_is_estimated_from_a_limited_number() -> None:
    world = World(segment_bytes=16 << 20)
    for n in range(40):
        world.send(*["m"] * 50, size=20 * n)
        if n == 20:
            world.checkpoint()
    meter = Meter(world.engine)
    reported, exact = bytes_of(world, "orders")
    assert meter.take().items == STRETCHES * ENTRIES_A_STRETCH
    assert 0.9 * exact < reported < 1.1 * exact


def test_deleted_messages_are_not_counted() -> None:
    world = World(retention_bytes=1 << 20)
    while len(world.engine.log.segments) < 4:
        world.send("m", size=100_000)
    before, _ = bytes_of(world, "orders")
    world.checkpoint()
    world.retire()
    reported, exact = bytes_of(world, "orders")
    assert reported == exact < before - 900_000


def test_topics_show_their_size_until_they_are_deleted() -> None:
    async def main() -> None:
        world, sizes = RoundWorld(), TopicSizes()
        registry = Registry(cluster="test", node_type="broker", node_id="broker-0")
        StoreMetrics(registry, sizes, world.rounds)
        read = SizeReader(world.rounds, sizes, world.clock)

        def shown() -> dict[str, float]:
            return {
                sample.labels["topic"]: sample.value
                for metric in registry.collect()
                for sample in metric.samples
                if sample.name == "rocketmq_storage_topic_bytes"
            }

        async with world.running():
            engine = world.world.engine
            wide = world.world.topic("wide", queues=2 * QUEUES_A_ROUND + 1)
            for queue_id in range(2 * QUEUES_A_ROUND + 1):
                world.world.send("m", topic="wide", queue_id=queue_id)
            await read()
            (of_one,) = {engine.inspection.log_bytes(q) for q in engine.catalog.open_queues[wide]}
            assert shown() == {"orders": 0, "wide": of_one * (2 * QUEUES_A_ROUND + 1)}
            world.world.send("m", topic="wide")
            await read()
            assert shown()["wide"] == of_one * (2 * QUEUES_A_ROUND + 1), (
                "the last value is young enough"
            )
            world.advance(SIZES_AGE_MS_MAX)
            await read()
            assert shown()["wide"] == of_one * (2 * QUEUES_A_ROUND + 2)
            engine.administration.delete_topic("wide", world.world.now_ms)
            assert shown() == {"orders": 0}

    asyncio.run(main())
