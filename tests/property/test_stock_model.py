"""Proxies and broker groups under a limit of a stock, in model time: the bound and the recovery."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.proxy.quotas.leases import IDLE_MS, Cost, LeaseBook
from tidemill.security.permit_buckets import LEASE_MS, RENEWAL_MS, WARNING_PERIOD_MS, LeaseDemand
from tidemill.security.quotas import LimitKey, MatchedLimit, QuotaLimit
from tidemill.security.stock_buckets import (
    FIRST_REPORT_MS,
    GRANT_STEP_MS,
    GRANT_STEPS_MAX,
    REPORT_PERIOD_MS,
    SETTLE_MS,
    SILENT_MS,
    UNKNOWN_ROOM,
    StockBuckets,
    StockReading,
)

KEY = LimitKey("topic:orders", QuotaLimit.STORED_BYTES)
STEP_MS = 20


class Group:
    """A broker group with messages, which reports their bytes late."""

    def __init__(self, name: str, *, delay_ms: int) -> None:
        self.name = name
        self.delay_ms = delay_ms  # of a report
        self.counted_from_ms = 0  # After a start, it counts its messages first.
        self.stored = 0
        self.reports: list[tuple[int, int]] = []  # times and counts under way

    def step(self, home: StockBuckets, now_ms: int) -> None:
        """Count once per period, and let reports arrive."""
        if now_ms % REPORT_PERIOD_MS == 0 and now_ms >= self.counted_from_ms:
            self.reports.append((now_ms, self.stored))
        while self.reports and self.reports[0][0] + self.delay_ms <= now_ms:
            counted_at_ms, count = self.reports.pop(0)
            home.reports.note(KEY, self.name, StockReading(count, counted_at_ms, now_ms))


class StoringProxy:
    """A proxy that sends messages of one size, and renews its leases."""

    def __init__(self, number: int, home: StockBuckets, limit: int, cost: int) -> None:
        self.name = bytes([number])
        self.home: StockBuckets | None = home  # None: unreachable
        self.limit = limit
        self.cost = cost
        self.book = LeaseBook(0)
        self.refused = 0
        self.next_ms = 0

    def send(self, now_ms: int, count: int, groups: Sequence[Group], random: Random) -> None:
        """Send messages. Those that stay without permits are refused, or would wait."""
        lease = self.book.lease_of(MatchedLimit(KEY, self.limit, "Topic:orders"), now_ms)
        lease.waiting = []
        for _ in range(count):
            if self.book.take([Cost(lease, self.cost)]):
                random.choice(groups).stored += self.cost
            elif lease.is_full(self.cost):
                self.refused += 1
            else:
                lease.waiting = [self.cost]
                return

    def renew(self, now_ms: int, proxies: int) -> None:
        """Renew the leases each 200 ms, and sooner if a send waits."""
        has_waiting = any(lease.waiting for lease in self.book.leases.values())
        if now_ms < self.next_ms and not has_waiting:
            return
        demands = self.book.plan(now_ms)
        if now_ms >= self.next_ms:
            self.next_ms = now_ms + RENEWAL_MS
            self.book.end_period()
        if self.home is None:
            if self.book.is_local(now_ms):
                self.book.renew_local(now_ms)
            return
        grants = [self.home.lease(demand, self.limit, now_ms) for demand in demands]
        rooms = [None if grant.room == UNKNOWN_ROOM else grant.room for grant in grants]
        self.book.apply(demands, [grant.permits for grant in grants], proxies, now_ms, rooms)


class World:
    """A home, broker groups that have reported once, and proxies."""

    def __init__(
        self,
        *,
        limit: int,
        cost: int,
        proxies: int = 1,
        delays_ms: Sequence[int] = (0,),
        seed: int = 1,
    ) -> None:
        self.limit = limit
        self.excess = 0
        self.home = StockBuckets()
        self.groups = [Group(f"broker-{n}", delay_ms=each) for n, each in enumerate(delays_ms)]
        for group in self.groups:
            self.home.reports.note(KEY, group.name, StockReading(0, 0, 0))
        self.proxies = [StoringProxy(n, self.home, limit, cost) for n in range(proxies)]
        self.random = Random(seed)
        self.now_ms = 0

    @property
    def stored(self) -> int:
        return sum(group.stored for group in self.groups)

    def run(self, until_ms: int, loads: Sequence[int]) -> None:
        """Let proxies send `loads` messages per step, and check the bound after each step."""
        while self.now_ms < until_ms:
            for proxy, load in zip(self.proxies, loads, strict=True):
                proxy.send(self.now_ms, load, self.groups, self.random)
                proxy.renew(self.now_ms, len(self.proxies))
            for group in self.groups:
                group.step(self.home, self.now_ms)
            assert self.stored <= self.limit + self.excess
            self.now_ms += STEP_MS

    def restart_home(self, count_ms: int) -> None:
        """Start another home. The first broker group counts its messages for a time."""
        self.home = StockBuckets()
        self.home.retain({KEY}, {group.name for group in self.groups}, self.now_ms)
        self.groups[0].counted_from_ms = self.now_ms + count_ms
        for proxy in self.proxies:
            proxy.home = self.home

    def consume(self, part: float) -> None:
        for group in self.groups:
            group.stored -= int(group.stored * part)


@settings(max_examples=80, deadline=None)
@given(
    limit=st.integers(0, 200_000),
    cost=st.integers(1, 500),
    loads=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    delays_ms=st.lists(st.sampled_from([0, 20, 400, 1_500, 4_000]), min_size=1, max_size=3),
    parts=st.lists(st.floats(0, 1), min_size=5, max_size=5),
    seed=st.integers(0, 1_000),
)
def test_all_proxies_together_never_store_more_than_the_limit(
    limit: int, cost: int, loads: list[int], delays_ms: list[int], parts: list[float], seed: int
) -> None:
    world = World(limit=limit, cost=cost, proxies=len(loads), delays_ms=delays_ms, seed=seed)
    for number, part in enumerate(parts, 1):
        world.run(number * 3_000, loads)
        world.consume(part)


def test_the_limit_is_used_up_to_the_last_message() -> None:
    world = World(limit=10_000, cost=100, proxies=2)
    world.run(20_000, [1, 1])
    assert world.stored == 10_000
    assert all(proxy.refused for proxy in world.proxies)


def test_room_that_consumers_make_is_used_again() -> None:
    world = World(limit=10_000, cost=100, proxies=2, delays_ms=[100, 100])
    world.run(10_000, [1, 1])
    assert world.stored == 10_000
    world.consume(0.5)
    # A period until the report, its delay, and a renewal.
    world.run(10_000 + REPORT_PERIOD_MS + 100 + RENEWAL_MS + SETTLE_MS, [1, 1])
    assert world.stored == 10_000


def test_a_steady_stock_below_the_limit_refuses_nothing() -> None:
    # 5,000 bytes per second. Each message is removed within a second.
    world = World(limit=5_000 * 4, cost=100, delays_ms=[100])
    while world.now_ms < 30_000:
        world.run(world.now_ms + 200, [1])
        world.consume(1.0)
    assert world.proxies[0].refused == 0


def test_without_the_home_each_proxy_uses_its_share_of_the_known_room() -> None:
    world = World(limit=10_000, cost=10, proxies=2)
    world.run(1_000, [1, 1])
    for proxy in world.proxies:
        proxy.home = None
    world.run(30_000, [5, 0])
    # The other proxy has sent nothing since, and its lease was forgotten.
    assert world.limit / 2 <= world.stored <= world.limit
    stored = world.stored
    world.run(60_000, [5, 0])
    assert world.stored == stored, "a share is not refilled"
    world.run(90_000, [0, 5])
    assert world.limit - 2 * 10 * 50 <= world.stored <= world.limit
    for proxy in world.proxies:
        proxy.home = world.home
    world.run(100_000, [1, 1])
    assert world.stored == world.limit


@pytest.mark.parametrize("filled_ms", [500, 10_000])
@pytest.mark.parametrize("load", [1, 20])
@pytest.mark.parametrize("pause_ms", [0, 5_000])
def test_a_limit_holds_while_a_new_home_does_not_know_the_stock(
    filled_ms: int, load: int, pause_ms: int
) -> None:
    world = World(limit=100_000, cost=100, proxies=2, delays_ms=[0, 0])
    world.run(filled_ms, [load, load])
    for proxy in world.proxies:
        proxy.home = None
    world.run(filled_ms + 1_000, [load, load])
    world.restart_home(count_ms=8_000)
    # Two proxies use their shares until the renewal after the first report.
    world.excess = 2 * world.proxies[0].cost * RENEWAL_MS // STEP_MS
    # The leases are forgotten in a pause.
    world.run(world.now_ms + pause_ms, [0, 0])
    world.run(world.now_ms + 30_000, [load, load])
    assert world.stored >= (world.limit if load == 20 else 60_000)


def test_a_broker_group_has_time_for_its_first_report() -> None:
    home = StockBuckets()
    home.retain({KEY}, {"broker-0", "broker-1"}, 1_000)
    home.reports.note(KEY, "broker-0", StockReading(5, 1_000, 1_000))
    assert home.reports.find(KEY, 1_000 + FIRST_REPORT_MS - 1) is None
    found = home.reports.find(KEY, 1_000 + FIRST_REPORT_MS)
    assert found is not None
    assert found.permits == 5, "it is down, or has an older version"
    home.reports.note(KEY, "broker-1", StockReading(7, 1_000, 1_000))
    found = home.reports.find(KEY, 1_000)
    assert found is not None
    assert found.permits == 12


def test_a_share_without_the_home_stays_the_same_when_its_topic_pauses() -> None:
    rate = MatchedLimit(KEY, 1_000_000, "Topic:orders")
    book = LeaseBook(0)
    book.lease_of(rate, 0)
    book.apply(book.plan(0), [0], 3, 0, [900])
    shares = []
    for now_ms in (1_000, 4_000, 7_000):
        lease = book.lease_of(rate, now_ms)
        book.renew_local(now_ms)
        shares.append(lease.permits)
        book.plan(now_ms + IDLE_MS)
        assert not book.leases, "forgotten"
    assert shares == [300, 300, 300]


def test_a_report_that_is_late_because_of_its_pages_keeps_the_limit() -> None:
    """With 10,000 limits, a broker group reports each one every ten seconds."""
    home, limit, stored = StockBuckets(), 10_000_000, 0
    for now_ms in range(0, 30_000, RENEWAL_MS):
        if now_ms % REPORT_PERIOD_MS == 0:
            home.reports.note(KEY, "broker-0", StockReading(0, now_ms, now_ms))
        if now_ms % (10 * REPORT_PERIOD_MS) == 0:
            home.reports.note(KEY, "broker-1", StockReading(stored, now_ms, now_ms))
        stored += home.lease(LeaseDemand(KEY, 1_000_000, 1, 0), limit, now_ms).permits
    assert stored == limit


def test_an_unknown_stock_refuses_nothing() -> None:
    home = StockBuckets()
    demand = LeaseDemand(KEY, wanted=1_000, first=10, returned=0)
    assert home.lease(demand, 1, 0) == (1_000, UNKNOWN_ROOM)
    home.reports.note(KEY, "broker-0", StockReading(0, 100, 100))
    assert home.lease(demand, 2_000, 100) == (1_000, 0), (
        "permits that were granted before the report count"
    )
    home.reports.note(KEY, "broker-0", StockReading(600, 5_000, 5_000))
    assert home.lease(demand, 2_000, 5_000) == (1_000, 400)
    proxy = StoringProxy(1, home, 1, 1_000)
    proxy.home = None
    groups = [Group("broker-0", delay_ms=0)]
    for now_ms in range(0, LEASE_MS + 100, STEP_MS):
        proxy.send(now_ms, 1, groups, Random(1))
        proxy.renew(now_ms, 1)
    assert groups[0].stored, "the proxy has never known the room"


@pytest.mark.parametrize(("wanted", "granted"), [(100, 100), (101, 0)])
def test_a_send_gets_the_last_room_or_nothing(wanted: int, granted: int) -> None:
    home = StockBuckets()
    home.reports.note(KEY, "broker-0", StockReading(900, 0, 0))
    demand = LeaseDemand(KEY, wanted=wanted, first=wanted, returned=0)
    assert home.lease(demand, 1_000, 0) == (granted, 100 - granted)


def test_a_silent_broker_group_keeps_its_stock_and_delays_no_release() -> None:
    home = StockBuckets()
    home.reports.note(KEY, "broker-0", StockReading(500, 0, 0))
    home.reports.note(KEY, "broker-1", StockReading(0, 0, 0))
    all_of_it = LeaseDemand(KEY, wanted=500, first=500, returned=0)
    assert home.lease(all_of_it, 1_000, 0).permits == 500
    home.reports.note(KEY, "broker-1", StockReading(0, SILENT_MS, SILENT_MS))
    assert home.lease(all_of_it, 1_000, SILENT_MS).permits == 0
    # The messages of the permits were consumed, as the only live broker group reports.
    home.reports.note(KEY, "broker-1", StockReading(0, SILENT_MS + 1, SILENT_MS + 1))
    assert home.lease(all_of_it, 1_000, SILENT_MS + 1).permits == 500
    home.retain({KEY}, {"broker-1"}, SILENT_MS + 1)
    home.reports.note(KEY, "broker-1", StockReading(0, 20_000, 20_000))
    assert home.lease(all_of_it, 1_000, 20_000).room == 500, "broker-0 was removed"
    home.retain(set(), set(), 20_000)
    assert home.used_ratio(KEY, 1_000, 20_000) is None


def test_grants_are_kept_for_a_bounded_time() -> None:
    home = StockBuckets()
    home.reports.note(KEY, "broker-0", StockReading(0, 0, 0))
    one = LeaseDemand(KEY, wanted=1, first=1, returned=0)
    for number in range(GRANT_STEPS_MAX + 10):
        home.reports.note(KEY, "broker-0", StockReading(0, 0, number * GRANT_STEP_MS))
        grant = home.lease(one, 1_000, number * GRANT_STEP_MS)
    assert grant.room == 1_000 - GRANT_STEPS_MAX - 1, "before the oldest one is forgotten"


def test_a_stock_near_its_limit_is_reported_once_per_hour() -> None:
    home = StockBuckets()
    home.reports.note(KEY, "broker-0", StockReading(799, 0, 0))
    assert not home.is_warning_due(KEY, 1_000, 0)
    home.reports.note(KEY, "broker-0", StockReading(800, 0, 0))
    assert home.is_warning_due(KEY, 1_000, 0)
    assert home.used_ratio(KEY, 1_000, 0) == 0.8
    assert not home.is_warning_due(KEY, 1_000, WARNING_PERIOD_MS - 1)
    assert home.is_warning_due(KEY, 1_000, WARNING_PERIOD_MS)
