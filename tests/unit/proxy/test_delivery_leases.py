"""The permits of deliveries at several proxies, with the buckets of the home, in model time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import pytest

from tests.support.clocks import ManualClock
from tests.support.security_items import counts_of
from tidemill.common.errors import BrokerUnreachable
from tidemill.proxy.quotas import deliveries, renewal
from tidemill.proxy.quotas.deliveries import MISSED_MS, DeliveryQuotas
from tidemill.proxy.quotas.leases import IDLE_MS
from tidemill.proxy.quotas.renewal import Leased
from tidemill.security.permit_buckets import BURST_S, LeaseDemand, QuotaBuckets
from tidemill.security.quotas import (
    QUOTA,
    LimitKey,
    QuotaKind,
    QuotaLimit,
    QuotaTable,
    TrafficQuota,
)

MESSAGES, BYTES = QuotaLimit.DISPATCH_MESSAGES, QuotaLimit.DISPATCH_BYTES
STEP_MS = 20  # between two renewals of each proxy
BATCH = 32


class Cluster:
    """Proxies with one limited consumer group."""

    def __init__(self, proxies: int, limit: QuotaLimit, rate: int) -> None:
        self.clock = ManualClock()
        self.random = Random(1)
        self._limit = limit
        self._items: dict[str, bytes] = {}
        self._rates: dict[LimitKey, int] = {}  # at the home
        self._table = table = QuotaTable(
            lambda _kind, name: self._items.get(name), lambda: counts_of(QUOTA, self._items)
        )
        self.put_limit(rate)
        self.buckets = QuotaBuckets(self._rates.get)
        self.proxies = [
            DeliveryQuotas(table, self._lease(n, proxies), self.clock.monotonic_ms)
            for n in range(proxies)
        ]
        self.received = [0] * proxies  # messages
        self.lost_part = 0.0  # of requests, and of answers

    def put_limit(self, rate: int) -> None:
        """Put the limit, or change it, at the home and at all proxies."""
        quota = TrafficQuota(kind=QuotaKind.GROUP, value="group", limits={self._limit: rate})
        self._items[quota.name] = json.dumps(quota.to_item()).encode()
        self._rates[LimitKey(quota.name, self._limit)] = rate
        self._table.note_change()

    def _lease(self, n: int, proxies: int) -> Callable[[Sequence[LeaseDemand]], Awaitable[Leased]]:
        async def lease(demands: Sequence[LeaseDemand]) -> Leased:
            now_ms, name = self.clock.monotonic_ms(), bytes([n])
            if self.random.random() < self.lost_part:
                raise BrokerUnreachable("the request is lost")
            granted = [self.buckets.lease(name, demand, now_ms) for demand in demands]
            if self.random.random() < self.lost_part:
                raise BrokerUnreachable("the answer is lost")
            return Leased(granted, proxies)

        return lease

    async def consume(self, n: int, size_bytes: int) -> None:
        """Receive batches without a pause; messages have `size_bytes`."""
        while True:
            permits = await self.proxies[n].wait(self.proxies[n].request("group", BATCH))
            assert permits is not None
            await asyncio.sleep(0)
            permits.spend(permits.messages, permits.messages * size_bytes)
            self.received[n] += permits.messages

    async def poll_without_waiting(self, n: int, pause_ms: int) -> None:
        """Poll with a pause after each poll. A poll has time for one renewal."""
        quotas = self.proxies[n]
        while True:
            read = quotas.request("group", BATCH)
            await self._until(self.clock.now_ms + STEP_MS)
            read.stop()
            permits = await quotas.wait(read)
            if permits is not None:
                self.received[n] += permits.messages
                permits.spend(permits.messages, 0)
            await self._until(self.clock.now_ms + pause_ms)

    async def _until(self, now_ms: int) -> None:
        while self.clock.now_ms < now_ms:  # noqa: ASYNC110  # The steps are the events.
            await asyncio.sleep(0)

    async def advance(self, seconds: float, *, is_random: bool) -> None:
        """Let the time pass. The proxies renew in a fixed order or in a random one."""
        for _ in range(round(seconds * 1_000 / STEP_MS)):
            self.clock.advance(STEP_MS)
            order = list(self.proxies)
            if is_random:
                self.random.shuffle(order)
            for proxy in order:
                await proxy.renewal.renew()
            for _ in range(4):
                await asyncio.sleep(0)


def run(
    cluster: Cluster, sizes: Sequence[Sequence[int]], seconds: float, *, is_random: bool = False
) -> list[int]:
    """Return the messages by proxy; `sizes` has the message size of each consumer by proxy."""

    async def main() -> None:
        tasks = [
            asyncio.create_task(cluster.consume(n, size))
            for n, consumers in enumerate(sizes)
            for size in consumers
        ]
        await cluster.advance(seconds, is_random=is_random)
        for task in tasks:
            task.cancel()

    asyncio.run(main())
    return cluster.received


@pytest.mark.parametrize("is_random", [False, True])
@pytest.mark.parametrize(("rate", "polls"), [(10, 1), (300, 1), (300, 8), (3_000, 1), (30_000, 8)])
def test_proxies_with_equal_demand_get_equal_parts(rate: int, polls: int, is_random: bool) -> None:
    cluster = Cluster(3, MESSAGES, rate)
    received = run(cluster, [[1] * polls] * 3, 60, is_random=is_random)
    assert min(received) >= 0.9 * max(received)
    # A poll takes at most one batch per step.
    possible = min(rate * 60, 3 * polls * BATCH * 60_000 // STEP_MS)
    assert sum(received) >= 0.95 * possible


def test_a_proxy_with_little_demand_gets_it_and_leaves_the_others_their_parts() -> None:
    """One batch per step of the first proxy is less than a third of the limit."""
    cluster = Cluster(3, MESSAGES, 30_000)
    received = run(cluster, [[1], [1] * 32, [1] * 32], 20)
    assert received[0] >= 0.95 * BATCH * 20_000 / STEP_MS
    assert received[1] == pytest.approx(received[2], rel=0.05)
    assert sum(received) >= 0.95 * 30_000 * 20


def test_an_idle_proxy_costs_nothing() -> None:
    cluster = Cluster(3, MESSAGES, 300)
    run(cluster, [[1], [1], [1]], 5)
    before = sum(cluster.received)
    run(cluster, [[1], [], []], 10)
    assert sum(cluster.received) - before >= 0.95 * 300 * 10


@pytest.mark.parametrize("is_random", [False, True])
def test_a_proxy_that_owes_more_than_a_burst_gets_its_part(is_random: bool) -> None:
    """A debt above the burst needs more than a bucket ever has. It is paid in parts."""
    cluster = Cluster(2, BYTES, 1_000_000)
    large, small = run(cluster, [[100_000], [1_000] * 4], 120, is_random=is_random)
    assert large * 100_000 >= 0.4 * 120 * 1_000_000
    assert small * 1_000 >= 0.4 * 120 * 1_000_000


@pytest.mark.parametrize("proxies", [1, 3])
@pytest.mark.parametrize("lost_part", [0.1, 0.4])
def test_permits_of_lost_answers_return_to_the_bucket(lost_part: float, proxies: int) -> None:
    cluster = Cluster(proxies, MESSAGES, 300)
    cluster.lost_part = lost_part
    received = run(cluster, [[1]] * proxies, 40)
    assert 0.9 * 40 * 300 <= sum(received) <= (40 + BURST_S) * 300
    assert min(received) >= 0.8 * max(received)


@pytest.mark.parametrize("size_bytes", [1_000, 50_000, 4_000_000])
@pytest.mark.parametrize("polls", [1, 100])
def test_many_polls_exceed_a_limit_of_bytes_by_one_batch(polls: int, size_bytes: int) -> None:
    """The size of messages is unknown at first. One poll finds it out, and the others wait."""
    rate, seconds = 1_000_000, 60
    cluster = Cluster(1, BYTES, rate)
    batch = BATCH * size_bytes
    for second in range(1, 4):
        received = run(cluster, [[size_bytes] * polls], 1)[0]
        assert received * size_bytes <= (BURST_S + second) * rate + batch
    received = run(cluster, [[size_bytes] * polls], seconds - 3)[0]
    possible = min(seconds * rate, polls * batch * seconds * 1_000 // STEP_MS)
    assert received * size_bytes >= min(0.9 * possible, possible - 4_000_000)


def test_messages_of_mixed_sizes_keep_a_limit_of_bytes_on_average() -> None:
    cluster = Cluster(1, BYTES, 1_000_000)
    received = [0] * 2

    async def consume(kind: int, size_bytes: int) -> None:
        [proxy] = cluster.proxies
        while True:
            permits = await proxy.wait(proxy.request("group", BATCH))
            assert permits is not None
            await asyncio.sleep(0)
            permits.spend(permits.messages, permits.messages * size_bytes)
            received[kind] += permits.messages * size_bytes

    async def main() -> None:
        tasks = [asyncio.create_task(consume(n % 2, (1_000, 200_000)[n % 2])) for n in range(20)]
        await cluster.advance(60, is_random=False)
        for task in tasks:
            task.cancel()

    asyncio.run(main())
    assert 0.8 * 60_000_000 <= sum(received) <= (60 + BURST_S) * 1_000_000 + 10 * BATCH * 200_000


def test_polls_that_do_not_wait_get_their_part_beside_polls_that_wait() -> None:
    """A part of three permits per second takes longer than each of these polls."""
    cluster = Cluster(3, MESSAGES, 10)

    async def main() -> None:
        tasks = [
            asyncio.create_task(cluster.poll_without_waiting(0, 500)),
            *[asyncio.create_task(cluster.consume(n, 1)) for n in (1, 2)],
        ]
        await cluster.advance(60, is_random=True)
        for task in tasks:
            task.cancel()

    asyncio.run(main())
    assert cluster.received[0] >= 0.6 * 200
    assert sum(cluster.received) >= 0.95 * 600


def test_the_demand_of_an_ended_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "MISSED_MAX", 1)
    cluster = Cluster(1, MESSAGES, 1)
    [proxy] = cluster.proxies

    async def main() -> None:
        await proxy.take("group", 1, timeout_ms=0)
        await proxy.take("group", BATCH, timeout_ms=0)
        await proxy.renewal.renew()
        [lease] = proxy.renewal.book.leases.values()
        assert (lease.permits, lease.waiting) == (2, [1, BATCH - 1])
        for _ in range((MISSED_MS + IDLE_MS) // STEP_MS + 1):
            cluster.clock.advance(STEP_MS)
            await proxy.renewal.renew()
        assert not proxy.renewal.book.leases, "its permits are returned"

    asyncio.run(main())


def test_a_renewal_of_many_leases_takes_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "LEASES_A_SLICE", 2)
    groups = [f"group-{n}" for n in range(5)]
    quotas = [
        TrafficQuota(kind=QuotaKind.GROUP, value=group, limits={MESSAGES: 10}) for group in groups
    ]
    items = {quota.name: json.dumps(quota.to_item()).encode() for quota in quotas}
    table = QuotaTable(lambda _kind, name: items.get(name), lambda: counts_of(QUOTA, items))
    table.note_change()
    turns = 0

    async def lease(demands: Sequence[LeaseDemand]) -> Leased:
        return Leased([demand.first for demand in demands], 1)

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        proxy = DeliveryQuotas(table, lease, ManualClock().monotonic_ms)
        reads = [proxy.request(group, BATCH) for group in groups]
        counting = asyncio.create_task(count_turns())
        await proxy.renewal.renew()
        counting.cancel()
        assert all(read.permits.done() for read in reads)
        # Three slices before the request, and three after it.
        assert turns == 4

    asyncio.run(main())


def test_a_read_that_gets_more_messages_owes_their_permits() -> None:
    """A repeated attempt of an ordered consumer group gets its whole batch."""
    cluster = Cluster(1, MESSAGES, 1)
    [proxy] = cluster.proxies

    async def main() -> None:
        read = proxy.request("group", BATCH)
        await proxy.renewal.renew()
        permits = await proxy.wait(read)
        assert permits is not None
        assert permits.messages == 2
        permits.spend(5, 0)
        [lease] = proxy.renewal.book.leases.values()
        assert lease.permits == -3
        cluster.clock.advance(3_000)
        waiting = proxy.request("group", 1)
        for _ in range(2):
            assert not waiting.permits.done(), "the debt comes first"
            await proxy.renewal.renew()
            cluster.clock.advance(1_000)
        await proxy.renewal.renew()
        assert waiting.permits.done()

    asyncio.run(main())


def test_a_changed_limit_ends_the_debt_of_deliveries() -> None:
    """An operator raises a limit because it was too low, so the debt under it ends."""
    cluster = Cluster(1, BYTES, 1_000)

    async def main() -> None:
        # The first batch, of large messages: a debt of nine hours.
        first = cluster.proxies[0].request("group", BATCH)
        await cluster.advance(0.2, is_random=False)
        permits = await cluster.proxies[0].wait(first)
        assert permits is not None
        permits.spend(BATCH, BATCH << 20)
        await cluster.advance(1, is_random=False)
        cluster.put_limit(100_000)
        task = asyncio.create_task(cluster.consume(0, 1_000))
        await cluster.advance(30, is_random=False)
        task.cancel()

    asyncio.run(main())
    assert cluster.received[0] >= 1_000, "of 100 messages per second"


def test_a_read_that_ends_after_a_change_of_the_limit_owes_its_permits() -> None:
    cluster = Cluster(1, BYTES, 1_000)
    quotas = cluster.proxies[0]

    async def main() -> None:
        first = quotas.request("group", 1)
        await cluster.advance(0.2, is_random=False)
        permits = await quotas.wait(first)
        assert permits is not None
        cluster.put_limit(100_000)
        quotas.request("group", 1)  # The proxy knows the new limit.
        permits.spend(1, 1 << 20)
        quotas.request("group", 1)
        [lease] = quotas.renewal.book.leases.values()
        assert lease.amount == 100_000
        assert lease.permits < 0

    asyncio.run(main())
