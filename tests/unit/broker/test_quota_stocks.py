"""The stocks of quotas: counted at a broker group, and leased by the home."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from zlib import crc32

import pytest
from structlog.testing import capture_logs

from tests.support.disk.offline_world import finish
from tests.support.security_items import change, delete
from tests.support.worlds.engine_world import World, blob
from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.engine.layout.numbers import QueueId, TimerId
from tidemill.broker.engine.metadata.membership import Home
from tidemill.broker.server.link.quotas import QuotaService
from tidemill.broker.server.members import quota_stocks
from tidemill.broker.server.members.quota_stocks import QuotaStocks
from tidemill.security.quotas import QuotaKind, QuotaLimit, TrafficQuota
from tidemill.security.stock_buckets import UNKNOWN_ROOM
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

DAY_MS = 86_400_000
BYTES, TIMERS = QuotaLimit.STORED_BYTES, QuotaLimit.PENDING_TIMERS
Counts = dict[str, tuple[int | None, int]]


def put_quota(world: World, kind: QuotaKind, value: str, **limits: int) -> None:
    named = {QuotaLimit(name): limit for name, limit in limits.items()}
    change(world, TrafficQuota(kind=kind, value=value, limits=named).to_item())


def count(world: World, stocks: QuotaStocks | None = None) -> Counts:
    """Return the stored bytes and pending timers by quota."""
    found = finish((stocks or QuotaStocks()).count(world.engine, world.now_ms))
    return {
        one.quota: (one.stored_bytes if one.HasField("stored_bytes") else None, one.pending_timers)
        for one in found
    }


def delay(world: World, topic: str, count: int = 1) -> None:
    found, data = world.engine.catalog.topics[world.topic(topic)], blob("late")
    for _ in range(count):
        world.engine.timers.commands.schedule(
            found,
            QueueId(0),
            data,
            crc32(data),
            due_at_ms=world.now_ms + DAY_MS,
            now_ms=world.now_ms,
            firing_ms=world.now_ms,
        )
    world.commit()
    world.engine.timers.index.link_gathered()


def stored_in(world: World, topic: str) -> int:
    queue = world.engine.catalog.queue(world.topic(topic), QueueId(0))
    return sum(size for _, size, _ in queue.walk(queue.min_offset))


def test_topics_and_prefixes_count_their_messages_and_timers() -> None:
    world = World()
    put_quota(world, QuotaKind.TOPIC, "orders", storedBytes=1)
    put_quota(world, QuotaKind.PREFIX, "ord", pendingTimers=1)
    put_quota(world, QuotaKind.PREFIX, "orders", storedBytes=1)
    put_quota(world, QuotaKind.TOPIC, "missing", storedBytes=1)
    put_quota(world, QuotaKind.TOPIC, "letters", publishMessagesPerS=1)
    world.send("a", "b", topic="orders", size=100)
    world.send("a", topic="ordinal", size=100)
    world.send("a", topic="letters", size=100)
    delay(world, "orders", 2)
    delay(world, "ordinal")
    world.background()
    sizes = world.engine.timers.index.counts.pending_bytes
    orders, ordinal = [
        stored_in(world, topic) + sizes[world.topic(topic)] for topic in ("orders", "ordinal")
    ]
    assert count(world) == {
        "topic:orders": (orders, 2),
        "prefix:ord": (orders + ordinal, 3),
        "prefix:orders": (orders, 2),
        "topic:missing": (0, 0),
    }


def test_new_and_dead_messages_are_counted_between_two_looks() -> None:
    world = World()
    put_quota(world, QuotaKind.TOPIC, "orders", storedBytes=1)
    world.send("a", "b", topic="orders", size=100)
    assert count(world) == {"topic:orders": (None, 0)}, "nothing is counted since the start"
    world.background()
    world.send("c", topic="orders", size=100)
    assert count(world) == {"topic:orders": (stored_in(world, "orders"), 0)}
    world.purge("orders", low=2)
    assert count(world) == {"topic:orders": (stored_in(world, "orders"), 0)}
    world.background()
    assert world.engine.live_bytes.bytes_of_topic(world.topic("orders")) == stored_in(
        world, "orders"
    ), "no message was counted twice"
    world.purge("orders")
    world.background()
    assert count(world) == {"topic:orders": (0, 0)}


def test_a_cancelled_timer_does_not_count_and_a_later_due_time_adds_none() -> None:
    world = World()
    put_quota(world, QuotaKind.TOPIC, "orders", pendingTimers=1)
    delay(world, "orders", 2)
    timers = world.engine.timers.commands
    later_ms, now_ms = world.now_ms + 2 * DAY_MS, world.now_ms
    timers.reschedule(TimerId(0), due_at_ms=later_ms, now_ms=now_ms, firing_ms=now_ms)
    world.commit()
    assert count(world)["topic:orders"][1] == 2
    timers.cancel(TimerId(1), now_ms=world.now_ms)
    world.commit()
    assert count(world)["topic:orders"][1] == 1


def test_stored_bytes_include_those_of_delayed_messages() -> None:
    world = World()
    put_quota(world, QuotaKind.TOPIC, "orders", storedBytes=1)
    world.background()
    delay(world, "orders", 2)
    stored_bytes, _ = count(world)["topic:orders"]
    assert stored_bytes is not None
    assert stored_bytes >= 2 * len(blob("late"))
    world.engine.timers.commands.cancel(TimerId(1), now_ms=world.now_ms)
    world.commit()
    assert count(world)["topic:orders"] == (stored_bytes // 2, 1)


def test_many_queues_have_the_counts_of_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_stocks, "QUEUES_MAX", 1)
    world = World()
    put_quota(world, QuotaKind.PREFIX, "o", storedBytes=1)
    world.send("a", topic="orders", size=100)
    world.topic("other")
    world.background()
    before = stored_in(world, "orders")
    world.send("b", topic="orders", size=100)
    world.advance(3_000)
    [stock] = finish(QuotaStocks().count(world.engine, world.now_ms))
    assert (stock.stored_bytes, stock.age_ms) == (before, 3_000)


def test_a_count_takes_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_stocks, "QUOTAS_A_SLICE", 2)
    monkeypatch.setattr(quota_stocks, "TOPICS_A_SLICE", 2)
    monkeypatch.setattr(quota_stocks, "QUEUES_A_SLICE", 4)
    world = World()
    for number in range(4):
        put_quota(world, QuotaKind.PREFIX, f"t{number}", storedBytes=1)
    for number in range(8):
        world.topic(f"t{number % 4}{number}")
    topics = len(world.engine.catalog.topic_ids)
    slices = len(list(QuotaStocks().count(world.engine, 0)))
    # Each limited topic with its one queue costs two.
    assert slices == 4 // 2 + topics // 2 + 8 // 2


def test_replies_have_all_stocks_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_stocks, "STOCKS_MAX", 2)
    stocks, all_of_them = QuotaStocks(), [pb.QuotaStock(quota=str(n)) for n in range(3)]
    pages = [[one.quota for one in stocks.page(all_of_them)] for _ in range(3)]
    assert pages == [["0", "1"], ["2"], ["0", "1"]]


# ------------------------------------------------------------ the home


def run(scenario: Callable[[RoundWorld, QuotaService], Awaitable[None]]) -> None:
    async def main() -> None:
        world = RoundWorld()
        service = QuotaService(world.rounds, lambda: 2, world.clock.monotonic_ms)
        async with asyncio.timeout(20), world.running():
            await scenario(world, service)

    asyncio.run(main())


async def lease(
    service: QuotaService, wanted: int, *, quota: str = "topic:orders", limit: str = TIMERS
) -> tuple[int, int]:
    demand = pb.PermitDemand(quota=quota, limit=limit, wanted=wanted, first=wanted)
    reply = await service.LeasePermits(pb.LeasePermitsRequest(process_id=b"p", demands=[demand]))
    [granted], [room] = reply.granted, reply.rooms
    return granted, room


def test_the_home_leases_the_room_of_all_broker_groups() -> None:
    async def scenario(world: RoundWorld, service: QuotaService) -> None:
        put_quota(world.world, QuotaKind.TOPIC, "orders", pendingTimers=10)
        delay(world.world, "orders", 3)
        assert await lease(service, 1) == (1, UNKNOWN_ROOM), "nothing is counted yet"
        await service.count_stocks()
        assert await lease(service, 1) == (1, 5), "3 are stored, and 1 was granted before"
        service.note_stocks("broker-1", [pb.QuotaStock(quota="topic:orders", pending_timers=4)], 0)
        assert await lease(service, 2) == (0, 1)
        assert await lease(service, 1) == (1, 0)
        # The report is of a broker group that is no member.
        await service.count_stocks()
        assert await lease(service, 1) == (1, 3)
        change(world.world, delete("topic:orders", kind="quota"))
        assert await lease(service, 100) == (100, UNKNOWN_ROOM)

    run(scenario)


def test_the_home_answers_known_limits_beside_unknown_ones() -> None:
    """A proxy of a later version may know a limit that this one does not."""

    async def scenario(world: RoundWorld, service: QuotaService) -> None:
        put_quota(world.world, QuotaKind.TOPIC, "orders", publishMessagesPerS=10)
        known = pb.PermitDemand(quota="topic:orders", limit="publishMessagesPerS", wanted=30)
        unknown = pb.PermitDemand(quota="topic:orders", limit="readsPerS", wanted=30)
        request = pb.LeasePermitsRequest(process_id=b"p", demands=[unknown, known])
        world.advance(2_000)
        reply = await service.LeasePermits(request)
        assert (list(reply.granted), list(reply.rooms)) == ([30, 20], [UNKNOWN_ROOM] * 2)

    run(scenario)


def test_a_new_home_grants_the_permits_of_its_own_time_alone() -> None:
    """Its predecessor may have granted those of the time before."""

    async def scenario(world: RoundWorld, service: QuotaService) -> None:
        limit = QuotaLimit.PUBLISH_MESSAGES
        put_quota(world.world, QuotaKind.TOPIC, "orders", publishMessagesPerS=10)
        world.advance(10_000)
        membership = world.world.engine.catalog.membership
        membership.home = Home(cluster_id="c", name="other", address="h:1")
        await service.count_stocks()
        membership.home = None
        assert await lease(service, 1, limit=limit) == (0, UNKNOWN_ROOM)
        world.advance(1_000)
        assert await lease(service, 11, limit=limit) == (0, UNKNOWN_ROOM)
        assert await lease(service, 10, limit=limit) == (10, UNKNOWN_ROOM)

    run(scenario)


def test_the_used_part_of_a_stock_is_a_metric_and_a_warning() -> None:
    async def scenario(world: RoundWorld, service: QuotaService) -> None:
        put_quota(world.world, QuotaKind.TOPIC, "orders", pendingTimers=10, storedBytes=1_000)
        delay(world.world, "orders", 7)
        with capture_logs() as lines:
            await service.count_stocks()
            assert not lines
            delay(world.world, "orders")
            await service.count_stocks()
            await service.count_stocks()
        assert lines == [
            {
                "event": "quota nearly used up",
                "log_level": "warning",
                "quota": "topic:orders",
                "limit": "pendingTimers",
                "used_ratio": 0.8,
            }
        ]
        [family] = service.collect()
        [sample] = family.samples
        assert sample.labels == {"quota": "topic:orders", "limit": "pendingTimers"}
        assert sample.value == 0.8, "and the stored bytes are unknown"

    run(scenario)


def test_a_broker_that_is_no_longer_the_home_has_no_metrics_of_stocks() -> None:
    async def scenario(world: RoundWorld, service: QuotaService) -> None:
        put_quota(world.world, QuotaKind.TOPIC, "orders", pendingTimers=10)
        await service.count_stocks()
        assert [family.samples != [] for family in service.collect()] == [True]
        catalog = world.world.engine.catalog
        catalog.membership.home = Home(cluster_id="c", name="other", address="h:1")
        await service.count_stocks()
        assert [family.samples for family in service.collect()] == [[]]

    run(scenario)


def test_a_broker_that_is_no_longer_the_home_has_no_metrics_of_rates() -> None:
    async def scenario(world: RoundWorld, service: QuotaService) -> None:
        put_quota(world.world, QuotaKind.TOPIC, "orders", publishMessagesPerS=10)
        await lease(service, 1, limit=QuotaLimit.PUBLISH_MESSAGES)
        await service.count_stocks()
        assert [family.samples != [] for family in service.collect()] == [True]
        catalog = world.world.engine.catalog
        catalog.membership.home = Home(cluster_id="c", name="other", address="h:1")
        await service.count_stocks()
        assert [family.samples for family in service.collect()] == [[]]

    run(scenario)


def test_a_deleted_limit_has_no_metric() -> None:
    """The proxy has ended, so no request shows that the limit is missing."""

    async def scenario(world: RoundWorld, service: QuotaService) -> None:
        put_quota(
            world.world, QuotaKind.TOPIC, "orders", publishMessagesPerS=10, publishBytesPerS=10
        )
        for limit in (QuotaLimit.PUBLISH_MESSAGES, QuotaLimit.PUBLISH_BYTES):
            await lease(service, 1, limit=limit)
        put_quota(world.world, QuotaKind.TOPIC, "orders", publishBytesPerS=10)
        [family] = service.collect()
        assert [sample.labels["limit"] for sample in family.samples] == ["publishBytesPerS"]
        change(world.world, delete("topic:orders", kind="quota"))
        assert [family.samples for family in service.collect()] == [[]]

    run(scenario)


def test_without_a_stock_limit_nothing_is_counted() -> None:
    async def scenario(world: RoundWorld, service: QuotaService) -> None:
        rounds = world.rounds.count
        await service.count_stocks()
        assert world.rounds.count == rounds

    run(scenario)
