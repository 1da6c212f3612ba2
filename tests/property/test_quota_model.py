"""Several proxies under one limit, in model time: the bound, its use, and the fallback."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.proxy.quotas.leases import Cost, LeaseBook
from tidemill.security.permit_buckets import (
    BURST_S,
    LEASE_MS,
    RENEWAL_MS,
    WARNING_PERIOD_MS,
    LeaseDemand,
    QuotaBuckets,
)
from tidemill.security.quotas import LimitKey, MatchedLimit, QuotaLimit

KEY = LimitKey("topic:orders", QuotaLimit.PUBLISH_MESSAGES)
STEP_MS = 10


class Proxy:
    """A proxy with clients that always send. It renews its leases."""

    def __init__(self, number: int, home: QuotaBuckets, rate_per_s: int, cost: int) -> None:
        self.name = bytes([number])
        self.home: QuotaBuckets | None = home  # None: unreachable
        self.book = LeaseBook(0)
        self.rate = MatchedLimit(KEY, rate_per_s, "Topic:orders")
        self.cost = cost
        self.passed = 0  # permits of sends that have passed
        self.next_ms = 0
        self.next_period_ms = 0

    def send(self, now_ms: int, count: int) -> None:
        """Pass the sends of one step until the permits are used up. The other sends wait."""
        lease = self.book.lease_of(self.rate, now_ms)
        for number in range(count):
            if not self.book.take([Cost(lease, self.cost)]):
                lease.waiting = [self.cost] * (count - number)
                return
            self.passed += self.cost
        lease.waiting = []

    def renew(self, now_ms: int, proxies: int) -> None:
        """Renew the leases every 200 ms, or every 20 ms while a send waits."""
        has_waiting = any(lease.waiting for lease in self.book.leases.values())
        if now_ms < self.next_ms and not (has_waiting and now_ms >= self.next_ms - 180):
            return
        self.next_ms = now_ms + RENEWAL_MS
        demands = self.book.plan(now_ms)
        if now_ms >= self.next_period_ms:
            self.next_period_ms = now_ms + RENEWAL_MS
            self.book.end_period()
        if self.home is None:
            if self.book.is_local(now_ms):
                self.book.renew_local(now_ms)
            return
        granted = [self.home.lease(self.name, demand, now_ms) for demand in demands]
        self.book.apply(demands, granted, proxies, now_ms)


def simulate(
    proxies: Sequence[Proxy],
    random: Random,
    *,
    begin_ms: int = 0,
    end_ms: int,
    loads: Sequence[int],
    rate: int,
) -> None:
    """Let all proxies send `loads` messages per step, and check the bound after each step."""
    for now_ms in range(begin_ms, end_ms, STEP_MS):
        order = list(zip(proxies, loads, strict=True))
        random.shuffle(order)
        for proxy, load in order:
            proxy.send(now_ms, load)
            proxy.renew(now_ms, len(proxies))
        used = sum(proxy.passed for proxy in proxies)
        most = rate * now_ms / 1_000 + max(rate * BURST_S, proxies[0].cost)
        assert used <= most, f"{used} permits after {now_ms} ms; at most {most}"


@settings(max_examples=60, deadline=None)
@given(
    rate=st.integers(50, 20_000),
    loads=st.lists(st.integers(0, 400), min_size=1, max_size=5),
    cost=st.integers(1, 20),
    seed=st.integers(0, 1_000),
)
def test_all_proxies_together_never_exceed_the_limit(
    rate: int, loads: list[int], cost: int, seed: int
) -> None:
    home = QuotaBuckets(lambda _key: rate)
    proxies = [Proxy(n, home, rate, cost) for n in range(len(loads))]
    simulate(proxies, Random(seed), end_ms=12_000, loads=loads, rate=rate)


@pytest.mark.parametrize("loads", [[100], [100, 100, 100], [300, 20, 5], [40, 0, 40]])
@pytest.mark.parametrize("rate", [500, 2_000])
def test_demand_uses_the_limit_within_five_percent(loads: list[int], rate: int) -> None:
    home = QuotaBuckets(lambda _key: rate)
    proxies = [Proxy(n, home, rate, 1) for n in range(len(loads))]
    random = Random(1)
    simulate(proxies, random, end_ms=3_000, loads=loads, rate=rate)
    before = sum(proxy.passed for proxy in proxies)
    simulate(proxies, random, begin_ms=3_000, end_ms=13_000, loads=loads, rate=rate)
    used = sum(proxy.passed for proxy in proxies) - before
    assert 0.95 * rate * 10 <= used <= 1.05 * rate * 10


@pytest.mark.parametrize(("rate", "cost"), [(10, 1), (2_000, 1), (2_000, 150), (100, 500)])
def test_proxies_with_equal_load_store_equal_parts(rate: int, cost: int) -> None:
    home = QuotaBuckets(lambda _key: rate)
    proxies = [Proxy(n, home, rate, cost) for n in range(3)]
    simulate(proxies, Random(1), end_ms=60_000, loads=[100] * 3, rate=rate)
    stored = [proxy.passed for proxy in proxies]
    # The first proxy gets the full bucket, and the last turn may be incomplete.
    once = max(rate * BURST_S, cost) + cost
    assert max(stored) - min(stored) <= 0.05 * max(stored) + once
    assert sum(stored) >= 0.9 * rate * 60


def test_a_proxy_that_begins_later_takes_no_part_of_one_that_was_satisfied() -> None:
    """The earlier grants of a proxy are no debt to a proxy that begins after them."""
    rate, random = 1_000, Random(1)
    home = QuotaBuckets(lambda _key: rate)
    steady, greedy = Proxy(1, home, rate, 1), Proxy(2, home, rate, 1)
    # 400 messages/s are less than half of the limit.
    simulate([steady], random, end_ms=60_000, loads=[4], rate=rate)
    before = steady.passed
    assert before >= 0.95 * 400 * 60
    loads = [4, 50]
    simulate([steady, greedy], random, begin_ms=60_000, end_ms=70_000, loads=loads, rate=rate)
    assert steady.passed - before >= 0.9 * 400 * 10


def test_a_proxy_with_large_messages_gets_its_part_beside_small_ones() -> None:
    """A message above the burst needs a full bucket, which small ones could keep empty."""
    home = QuotaBuckets(lambda _key: 1_000)
    large, small = Proxy(1, home, 1_000, 5_000), Proxy(2, home, 1_000, 10)
    simulate([large, small], Random(1), end_ms=100_000, loads=[1, 10], rate=1_000)
    assert large.passed >= 0.4 * 1_000 * 100
    assert small.passed >= 0.4 * 1_000 * 100


def test_without_the_home_each_proxy_uses_its_part_of_the_limit() -> None:
    rate, home = 900, QuotaBuckets(lambda _key: 900)
    proxies = [Proxy(n, home, rate, 1) for n in range(3)]
    random = Random(1)
    simulate(proxies, random, end_ms=3_000, loads=[100, 100, 100], rate=rate)
    for proxy in proxies:
        proxy.home = None
    begin_ms = 3_000 + LEASE_MS + RENEWAL_MS
    simulate(proxies, random, begin_ms=3_000, end_ms=begin_ms, loads=[100] * 3, rate=rate)
    before = [proxy.passed for proxy in proxies]
    end_ms = begin_ms + 10_000
    simulate(proxies, random, begin_ms=begin_ms, end_ms=end_ms, loads=[100] * 3, rate=rate)
    for proxy, passed in zip(proxies, before, strict=True):
        assert 0.95 * 3_000 <= proxy.passed - passed <= 1.05 * 3_000
    # The bucket of the home is full again.
    before = [proxy.passed for proxy in proxies]
    for proxy in proxies:
        proxy.home = home
    for now_ms in range(end_ms, end_ms + 3_000, STEP_MS):
        for proxy in proxies:
            proxy.send(now_ms, 100)
            proxy.renew(now_ms, 3)
    assert sum(proxy.passed for proxy in proxies) - sum(before) <= rate * (3 + BURST_S)


def test_a_cost_above_the_burst_passes_when_the_bucket_is_full() -> None:
    home = QuotaBuckets(lambda _key: 100)
    proxy = Proxy(1, home, 100, 1_000)
    simulate([proxy], Random(1), end_ms=1_000, loads=[1], rate=100)
    assert proxy.passed == 1_000
    bucket = home.buckets[KEY]
    assert bucket.permits < 0, "in debt"
    for now_ms in range(1_000, 9_900, STEP_MS):
        proxy.send(now_ms, 1)
        proxy.renew(now_ms, 1)
    assert proxy.passed == 1_000, "the debt takes 8 s, and the burst two more"
    for now_ms in range(9_900, 10_300, STEP_MS):
        proxy.send(now_ms, 1)
        proxy.renew(now_ms, 1)
    assert proxy.passed == 2_000


def test_a_changed_limit_ends_the_debt_of_the_former_one() -> None:
    rates = [1]
    home = QuotaBuckets(lambda _key: rates[0])
    large = LeaseDemand(KEY, wanted=4 << 20, first=4 << 20, returned=0)
    assert home.lease(b"p", large, 0) == 4 << 20, "a debt of 48 days"
    one = LeaseDemand(KEY, wanted=1, first=1, returned=0)
    assert home.lease(b"p", one, 10_000) == 0
    rates[0] = 1_000
    assert home.lease(b"p", one, 10_010) == 0, "a change gives no permits"
    assert home.lease(b"p", one, 10_020) == 1


def test_a_limit_that_is_nearly_used_up_is_reported_once_per_hour() -> None:
    rate, home = 1_000, QuotaBuckets(lambda _key: 1_000)
    proxy = Proxy(1, home, rate, 1)
    warned = 0
    for now_ms in range(0, 30_000, STEP_MS):
        proxy.send(now_ms, 100)
        proxy.renew(now_ms, 1)
        bucket = home.buckets.get(KEY)
        warned += bucket is not None and bucket.is_warning_due(now_ms)
    bucket = home.buckets[KEY]
    assert warned == 1
    assert bucket.used_ratio(30_000) == pytest.approx(1, abs=0.05)
    assert bucket.is_warning_due(30_000 + WARNING_PERIOD_MS)
    assert bucket.used_ratio(30_000 + WARNING_PERIOD_MS) < 0.05, "nothing was sent"
    assert not bucket.is_warning_due(30_000 + 2 * WARNING_PERIOD_MS)


def test_unused_permits_are_returned() -> None:
    home = QuotaBuckets(lambda _key: 1_000)
    first, second = Proxy(1, home, 1_000, 1), Proxy(2, home, 1_000, 1)
    simulate([first, second], Random(1), end_ms=1_000, loads=[10, 0], rate=1_000)
    for now_ms in range(1_000, 2_000, STEP_MS):
        first.renew(now_ms, 2)
    assert first.book.leases[KEY].permits < 1
    for now_ms in range(2_000, 4_000, STEP_MS):
        first.renew(now_ms, 2)
    assert not first.book.leases, "forgotten"


def test_a_changed_and_a_deleted_limit_count_at_the_next_renewal() -> None:
    rates: dict[LimitKey, int] = {KEY: 1_000}
    home = QuotaBuckets(rates.get)
    proxy = Proxy(1, home, 1_000, 1)
    simulate([proxy], Random(1), end_ms=4_000, loads=[100], rate=1_000)
    rates[KEY] = 100
    before = proxy.passed
    for now_ms in range(4_000, 14_000, STEP_MS):
        proxy.send(now_ms, 100)
        proxy.renew(now_ms, 1)
    assert proxy.passed - before <= 100 * 10 + 1_000
    del rates[KEY]
    proxy.send(14_000, 100)
    proxy.renew(14_300, 1)
    assert not home.buckets


def test_a_request_that_is_overtaken_gets_no_permits() -> None:
    home = QuotaBuckets(lambda _key: 100)

    def lease(number: int, confirmed: int) -> int:
        demand = LeaseDemand(KEY, 30, 30, 0, number=number, confirmed=confirmed)
        return home.lease(b"p", demand, 0)

    assert [lease(1, 0), lease(2, 1)] == [30, 30]
    assert home.buckets[KEY].permits == 140
    assert lease(1, 0) == 0
    assert lease(2, 1) == 0
    assert home.buckets[KEY].permits == 140
    assert lease(3, 1) == 30, "in place of those of the lost answer"
    assert home.buckets[KEY].permits == 140
    assert lease(4, 3) == 30
    assert home.buckets[KEY].permits == 110


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize(
    ("up_ms", "down_ms"),
    [(600, 600), (1_000, 1_000), (1_000, 3_000), (2_500, 1_500), (5_000, 5_000), (10_000, 700)],
)
def test_a_home_that_flaps_keeps_the_limit_within_five_percent(
    up_ms: int, down_ms: int, is_new: bool
) -> None:
    """`is_new`: another process takes over, without the former buckets."""
    rate, count, end_ms = 1_000, 3, 120_000
    home = QuotaBuckets(lambda _key: rate)
    proxies = [Proxy(n, home, rate, 1) for n in range(count)]
    begin_used = 0
    for now_ms in range(0, end_ms, STEP_MS):
        is_up = now_ms % (up_ms + down_ms) < up_ms
        if is_up and proxies[0].home is None and is_new:
            home = QuotaBuckets(lambda _key: rate, began_ms=now_ms)
        for proxy in proxies:
            proxy.home = home if is_up else None
            proxy.send(now_ms, 100)
            proxy.renew(now_ms, count)
        if now_ms == 10_000:
            begin_used = sum(proxy.passed for proxy in proxies)
    used = sum(proxy.passed for proxy in proxies) - begin_used
    limit = rate * (end_ms - 10_000) / 1_000
    assert used <= 1.05 * limit, f"{used / limit:.2f} of the limit"
    assert used >= 0.5 * limit, f"{used / limit:.2f} of the limit"
