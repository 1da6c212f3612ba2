"""Conflicts of consumers: different filters of one group, and a FIFO topic without its order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest
from prometheus_client import exposition
from structlog.testing import capture_logs

from tests.support.worlds.engine_world import World
from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.metrics.conflict_metrics import ConflictMetrics
from tidemill.broker.server.admin.consumer_groups import ConsumerGroupAdmin
from tidemill.broker.server.round import polled_filters
from tidemill.broker.server.round.polled_filters import (
    FILTER_LIFE_MS,
    FILTERS_MAX,
    SHOWN_CHARACTERS,
    WARNING_INTERVAL_MS,
    PolledFilters,
)
from tidemill.broker.server.wire.filters import find_filter
from tidemill.common.metrics import Registry
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


class Poller:
    """Notes polls of one consumer group and topic, and returns their conflicts."""

    def __init__(
        self, *, topic_type: TopicType = TopicType.NORMAL, is_ordered: bool = False
    ) -> None:
        self.now_ms = 1_000
        self.world = World()
        put_topic = self.world.engine.administration.put_topic
        topic = put_topic("orders", type_=topic_type, queues=1, now_ms=self.world.now_ms)
        self.topic_id = topic.id
        self.group_id = self.world.group("billing", is_ordered=is_ordered)
        self.filters = PolledFilters()

    def poll(self, client_id: str, *tags: str) -> None:
        self.filters.note(
            self.group_id,
            self.topic_id,
            find_filter(tags, ""),
            client_id,
            catalog=self.world.engine.catalog,
            monotonic_ms=self.now_ms,
        )

    def expressions(self) -> list[str]:
        """Return the filters that differ."""
        catalog = self.world.engine.catalog
        found = self.filters.conflicts(catalog, monotonic_ms=self.now_ms)
        return sorted(each.expression for conflict in found for each in conflict.filters)

    def is_order_lost(self) -> bool:
        found = self.filters.conflicts(self.world.engine.catalog, monotonic_ms=self.now_ms)
        return any(conflict.is_order_lost for conflict in found)


def test_consumers_with_different_filters_are_a_conflict_and_one_warning() -> None:
    poller = Poller()
    with capture_logs() as logs:
        for _ in range(3):
            poller.poll("first", "red")
            poller.poll("second", "blue", "azure")
            poller.now_ms += 1_000
    assert poller.expressions() == ["azure || blue", "red"]
    [warning] = logs
    assert warning["log_level"] == "warning"
    assert warning["filters"] == ["red", "azure || blue"]
    assert warning["client_ids"] == ["first", "second"]
    assert (warning["consumer_group"], warning["topic"]) == ("billing", "orders")


def test_consumers_with_one_filter_are_no_conflict() -> None:
    poller = Poller()
    with capture_logs() as logs:
        poller.poll("first", "red")
        poller.poll("second", "red")
    assert (poller.expressions(), poller.is_order_lost(), logs) == ([], False, [])


def test_a_changed_filter_of_one_client_is_not_a_conflict() -> None:
    poller = Poller()
    with capture_logs() as logs:
        poller.poll("first", "red")
        poller.poll("first")
    assert (poller.expressions(), logs) == ([], [])


def test_a_conflict_ends_ten_minutes_after_the_last_poll_with_one_of_the_filters() -> None:
    poller = Poller()
    poller.poll("first", "red")
    poller.poll("second")
    poller.now_ms += FILTER_LIFE_MS
    poller.poll("first", "red")
    assert poller.expressions() == ["*", "red"]
    poller.now_ms += 1
    assert poller.expressions() == []


def test_a_conflict_that_comes_back_is_logged_once_an_hour() -> None:
    poller = Poller()
    with capture_logs() as logs:
        for _ in range(4):
            poller.poll("first", "red")
            poller.poll("second")
            poller.now_ms += FILTER_LIFE_MS + 1
        assert len(logs) == 1
        poller.now_ms += WARNING_INTERVAL_MS
        poller.poll("first", "red")
        poller.poll("second")
    assert len(logs) == len(("the first", "an hour later"))


def test_the_filters_of_a_group_and_topic_have_a_bound() -> None:
    poller = Poller()
    for n in range(FILTERS_MAX + 5):
        poller.poll(f"client-{n}", f"tag-{n}")
        poller.now_ms += 1
    assert len(poller.expressions()) == FILTERS_MAX
    assert "tag-0" not in poller.expressions()


def test_a_long_filter_is_kept_in_part_and_compared_whole() -> None:
    poller = Poller()
    tags = [f"tag-{n:03}-" + "x" * 100 for n in range(128)]
    with capture_logs() as logs:
        poller.poll("first", *tags)
        poller.poll("second", *tags[:-1])
        poller.poll("third", *tags)
    assert poller.expressions() == [
        f"{tags[0]} || {tags[1]} || ... 125 more",
        f"{tags[0]} || {tags[1]} || ... 126 more",
    ]
    [warning] = logs
    assert len(str(warning["filters"])) < 2 * SHOWN_CHARACTERS + 100


def test_the_filters_of_all_groups_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polled_filters, "FILTERS_OF_ALL_MAX", 10)
    poller = Poller()
    for n in range(20):
        poller.group_id = poller.world.group(f"group-{n}")
        for tag in ("red", "blue", "green"):
            poller.poll(f"client-{tag}", tag)
    catalog = poller.world.engine.catalog
    found = list(poller.filters.conflicts(catalog, monotonic_ms=poller.now_ms))
    assert [conflict.group for conflict in found] == ["group-17", "group-18", "group-19"]


def test_filters_that_are_no_longer_polled_use_no_memory() -> None:
    poller = Poller()
    poller.poll("first", "red")
    poller.poll("second", "blue")
    assert len(poller.filters) == 2
    poller.now_ms += FILTER_LIFE_MS + 1
    assert poller.expressions() == []
    assert len(poller.filters) == 0


def test_a_concurrent_group_that_reads_a_fifo_topic_is_a_conflict_and_one_warning() -> None:
    poller = Poller(topic_type=TopicType.FIFO)
    with capture_logs() as logs:
        poller.poll("first")
        poller.poll("second")
    assert poller.is_order_lost()
    assert poller.expressions() == []
    [warning] = logs
    assert warning["event"] == "a CONCURRENT consumer group reads a FIFO topic"


def test_a_fifo_group_that_reads_a_fifo_topic_is_not_a_conflict() -> None:
    poller = Poller(topic_type=TopicType.FIFO, is_ordered=True)
    poller.poll("first")
    assert not poller.is_order_lost()


def test_a_deleted_group_has_no_conflicts() -> None:
    poller = Poller(topic_type=TopicType.FIFO)
    poller.poll("first")
    poller.world.engine.administration.delete_group("billing", poller.world.now_ms)
    assert not poller.is_order_lost()


class Shown(NamedTuple):
    """The conflicts as an operator sees them."""

    listed: pb.ConflictList
    metrics: str


async def shown(world: RoundWorld, *groups: str) -> Shown:
    admin = ConsumerGroupAdmin(world.rounds)
    listed = await admin.ListConflicts(pb.ListConflictsRequest(groups=groups))
    registry = Registry(cluster="c", node_type="broker", node_id="b")
    ConflictMetrics(registry, world.polls.filters, world.rounds, world.clock)
    slices = registry.text(exposition.generate_latest)
    while True:
        try:
            next(slices)
        except StopIteration as ended:
            return Shown(listed, b"".join(ended.value).decode())


def in_world(scenario: Callable[[RoundWorld], Awaitable[None]]) -> None:
    async def main() -> None:
        world = RoundWorld()
        async with asyncio.timeout(20), world.running():
            await scenario(world)

    asyncio.run(main())


def test_a_conflict_of_polls_is_listed_and_counted() -> None:
    async def scenario(world: RoundWorld) -> None:
        async with world.proxy() as proxy:
            for request_id, tag in enumerate(("red", "blue", "red"), 1):
                await proxy.send(
                    world.pop_frame(request_id, tags=(tag,), renews_for=f"client-{tag}")
                )
                await proxy.reply()
        found = await shown(world, "billing")
        [conflict] = found.listed.conflicts
        assert [list(each.tags) for each in conflict.filters] == [["red"], ["blue"]]
        assert [each.client_id for each in conflict.filters] == ["client-red", "client-blue"]
        assert not (await shown(world, "other")).listed.conflicts
        [line] = [
            line
            for line in found.metrics.splitlines()
            if line.startswith("rocketmq_filter_conflicts{")
        ]
        assert 'consumer_group="billing"' in line
        assert line.endswith(" 2.0")

    in_world(scenario)
