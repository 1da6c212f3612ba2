"""Polls of several proxies under the limits of one consumer group, in model time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.clocks import ManualClock
from tests.support.security_items import counts_of
from tidemill.proxy.quotas.deliveries import DeliveryPermits, DeliveryQuotas, WaitingRead
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
STEP_MS = 20
BATCH = 32


class Proxy:
    """A proxy whose consumers poll all the time."""

    def __init__(
        self, number: int, home: QuotaBuckets, table: QuotaTable, clock: ManualClock, polls: int
    ) -> None:
        async def lease(demands: Sequence[LeaseDemand]) -> Leased:
            name = bytes([number])
            return Leased([home.lease(name, one, clock.monotonic_ms()) for one in demands], 1)

        self.quotas = DeliveryQuotas(table, lease, clock.monotonic_ms)
        self.polls = polls
        self.reads: list[WaitingRead] = []
        self.pops: list[DeliveryPermits] = []  # in flight
        self.messages = self.size_bytes = 0  # delivered

    async def step(self, random: Random, message_bytes: int) -> None:
        """Answer pops, begin others with the permits that have arrived, and ask the home."""
        for permits in self.pops:
            found = random.choice((0, 1, permits.messages, permits.messages))
            found = min(found, permits.messages)
            permits.spend(found, found * message_bytes)
            if random.random() < 0.1:
                permits.give_back()  # The client has disconnected.
                found = 0
            self.messages += found
            self.size_bytes += found * message_bytes
        self.pops = []
        while len(self.reads) < self.polls:
            self.reads.append(self.quotas.request("billing", random.randint(1, BATCH)))
        for read in [read for read in self.reads if read.permits.done()]:
            self.reads.remove(read)
            permits_or_none = await self.quotas.wait(read)
            assert permits_or_none is not None
            self.pops.append(permits_or_none)
        await self.quotas.renewal.renew()

    def in_flight(self) -> int:
        return sum(permits.messages for permits in self.pops)


def simulate(
    limits: dict[QuotaLimit, int], polls: Sequence[int], seed: int, *, end_ms: int, size: int
) -> list[Proxy]:
    """Poll at all proxies until `end_ms`, and check the bounds after each step."""
    quota = TrafficQuota(kind=QuotaKind.GROUP, value="billing", limits=limits)
    items = {quota.name: json.dumps(quota.to_item()).encode()}
    table = QuotaTable(lambda _kind, name: items.get(name), lambda: counts_of(QUOTA, items))
    table.note_change()
    clock, random = ManualClock(0), Random(seed)
    home = QuotaBuckets(lambda key: limits[key.limit])
    # Each proxy finds out the size of messages by one pop. Later, one message exceeds the permits.
    largest = BATCH * size * len(polls)

    async def main() -> list[Proxy]:
        proxies = [Proxy(n, home, table, clock, count) for n, count in enumerate(polls)]
        for now_ms in range(0, end_ms, STEP_MS):
            clock.now_ms = now_ms
            for proxy in random.sample(proxies, len(proxies)):
                await proxy.step(random, size)
            passed_s = now_ms / 1_000 + BURST_S
            if MESSAGES in limits:
                popped = sum(proxy.messages + proxy.in_flight() for proxy in proxies)
                assert popped <= limits[MESSAGES] * passed_s
            if BYTES in limits:
                assert (
                    sum(each.size_bytes for each in proxies) <= limits[BYTES] * passed_s + largest
                )
        return proxies

    return asyncio.run(main())


@settings(max_examples=30, deadline=None)
@given(
    messages=st.integers(10, 3_000),
    size_bytes=st.integers(5_000, 500_000),
    polls=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    seed=st.integers(0, 1_000),
)
def test_all_deliveries_together_keep_both_limits(
    messages: int, size_bytes: int, polls: list[int], seed: int
) -> None:
    limits = {MESSAGES: messages, BYTES: size_bytes}
    simulate(limits, polls, seed, end_ms=6_000, size=100)


@pytest.mark.parametrize("polls", [[2], [5, 5], [10, 1, 3]])
@pytest.mark.parametrize("rate", [10, 500])
def test_polls_use_the_limit_of_messages(polls: list[int], rate: int) -> None:
    proxies = simulate({MESSAGES: rate}, polls, 1, end_ms=20_000, size=1)
    delivered = sum(proxy.messages for proxy in proxies)
    assert 0.9 * rate * 20 <= delivered


@pytest.mark.parametrize("polls", [[2], [5, 5]])
def test_polls_use_the_limit_of_bytes(polls: list[int]) -> None:
    rate = 100_000
    proxies = simulate({BYTES: rate}, polls, 1, end_ms=30_000, size=1_000)
    delivered = sum(proxy.size_bytes for proxy in proxies)
    assert 0.9 * rate * 30 <= delivered


def test_missing_bytes_are_asked_for_also_when_no_poll_waits() -> None:
    [proxy] = simulate({BYTES: 1_000}, [1], 1, end_ms=1_000, size=1_000)
    key = LimitKey("group:billing", BYTES)
    book = proxy.quotas.renewal.book
    assert book.leases[key].permits < 0
    book.leases[key].waiting = []
    demands = book.plan(1 << 30)
    assert [one.wanted > 0 for one in demands] == [True]
    assert key in book.leases, "not forgotten"
