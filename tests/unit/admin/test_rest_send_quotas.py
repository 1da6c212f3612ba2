"""Quotas on messages of the REST API: all permits or none, from the home."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tidemill.admin.cluster.item_copy import ItemCopy
from tidemill.admin.messages.quotas import RestSendQuotas
from tidemill.common.errors import BrokerUnreachable, Overloaded
from tidemill.security.permit_buckets import LeaseDemand, QuotaBuckets
from tidemill.security.quotas import QUOTA, LimitKey, QuotaKind, QuotaLimit, TrafficQuota
from tidemill.security.stock_buckets import StockBuckets, StockReading
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

STOCKS = {QuotaLimit.STORED_BYTES, QuotaLimit.PENDING_TIMERS}
MESSAGES, BYTES = QuotaLimit.PUBLISH_MESSAGES, QuotaLimit.PUBLISH_BYTES


class World:
    """A home with buckets in model time, and the quotas of an admin process."""

    def __init__(self) -> None:
        self.quotas: dict[str, TrafficQuota] = {}
        self.version = self.asked = 0
        self.is_up = True
        self.now_ms = 0
        self.stocks = StockBuckets()
        self.buckets = QuotaBuckets(lambda key: self.quotas[key.quota].limits.get(key.limit))
        self.sends = RestSendQuotas(
            self.lease, ItemCopy(QUOTA, self.read_all, lambda: self.version)
        )

    async def read_all(self, _kind: str) -> AsyncIterator[bytes]:
        for quota in self.quotas.values():
            yield json.dumps(quota.to_item()).encode()

    async def lease(self, request: pb.LeasePermitsRequest) -> pb.LeasePermitsReply:
        self.asked += 1
        if not self.is_up:
            raise BrokerUnreachable("down")
        granted = []
        for one in request.demands:
            key = LimitKey(one.quota, QuotaLimit(one.limit))
            demand = LeaseDemand(key, one.wanted, one.first, one.returned)
            if key.limit in STOCKS:
                limit = self.quotas[key.quota].limits[key.limit]
                granted.append(self.stocks.lease(demand, limit, self.now_ms).permits)
                continue
            granted.append(self.buckets.lease(request.process_id, demand, self.now_ms))
        return pb.LeasePermitsReply(granted=granted)

    def put(self, kind: QuotaKind, value: str, **limits: int) -> None:
        named = {QuotaLimit(name): rate for name, rate in limits.items()}
        user_id = 7 if kind is QuotaKind.USER else 0
        quota = TrafficQuota(kind=kind, value=value, user_id=user_id, limits=named)
        self.quotas[quota.name] = quota
        self.version += 1

    def report(self, quota: str, limit: str, permits: int) -> None:
        key = LimitKey(quota, QuotaLimit(limit))
        self.stocks.reports.note(key, "broker-0", StockReading(permits, self.now_ms, self.now_ms))

    async def send(self, size_bytes: int = 10, *, is_delayed: bool = False) -> None:
        await self.sends.admit(
            user="shop", user_id=7, topic="orders", size_bytes=size_bytes, is_delayed=is_delayed
        )


def run(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await scenario(World())

    asyncio.run(main())


def test_a_message_without_a_quota_does_not_ask_the_home() -> None:
    async def scenario(world: World) -> None:
        await world.send()
        world.put(QuotaKind.TOPIC, "other", publishMessagesPerS=1)
        await world.send()
        assert world.asked == 0

    run(scenario)


@pytest.mark.parametrize("kind_and_value", ["user:shop", "topic:orders", "prefix:ord"])
def test_a_message_over_a_limit_is_refused(kind_and_value: str) -> None:
    async def scenario(world: World) -> None:
        kind, _, value = kind_and_value.partition(":")
        world.put(QuotaKind(kind), value, publishMessagesPerS=2)
        for _ in range(4):  # two seconds of the limit
            await world.send()
        with pytest.raises(Overloaded, match=f"of {kind.title()}:{value} is used up"):
            await world.send()
        world.now_ms += 500
        await world.send()
        with pytest.raises(Overloaded):
            await world.send()

    run(scenario)


def test_a_refused_message_takes_no_permits_of_other_limits() -> None:
    async def scenario(world: World) -> None:
        world.put(QuotaKind.TOPIC, "orders", publishMessagesPerS=100, publishBytesPerS=50)
        await world.send(100)
        for _ in range(5):
            with pytest.raises(Overloaded, match="publish bytes/s of Topic:orders"):
                await world.send(100)
        assert world.buckets.buckets[LimitKey("topic:orders", MESSAGES)].permits == 199

    run(scenario)


def test_without_the_home_a_message_with_a_quota_fails() -> None:
    async def scenario(world: World) -> None:
        world.put(QuotaKind.TOPIC, "orders", publishMessagesPerS=100)
        world.is_up = False
        with pytest.raises(BrokerUnreachable):
            await world.send()

    run(scenario)


@pytest.mark.parametrize("stored", [990, 991])
def test_a_message_passes_up_to_the_last_byte_of_a_stock(stored: int) -> None:
    async def scenario(world: World) -> None:
        world.put(QuotaKind.PREFIX, "ord", storedBytes=1_000)
        world.report("prefix:ord", "storedBytes", stored)
        if stored == 990:
            await world.send()
        text = "Prefix:ord has reached its limit of 1000 stored bytes"
        with pytest.raises(Overloaded, match=text):
            await world.send()

    run(scenario)


def test_only_a_delayed_message_needs_room_for_a_timer() -> None:
    async def scenario(world: World) -> None:
        world.put(QuotaKind.TOPIC, "orders", pendingTimers=1, publishMessagesPerS=100)
        world.report("topic:orders", "pendingTimers", 0)
        await world.send(is_delayed=True)
        with pytest.raises(Overloaded, match="has reached its limit of 1 pending timers"):
            await world.send(is_delayed=True)
        await world.send()
        assert world.buckets.buckets[LimitKey("topic:orders", MESSAGES)].permits == 198

    run(scenario)
