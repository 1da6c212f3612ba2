"""BrokerQuotas: the home leases permits to proxies (ADR 0078).

The buckets are memory of the process and no state. A new home begins with empty ones: its
predecessor may have granted all permits until then. Each second, the home counts its own stocks of
quotas, and it gets those of the other broker groups.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, final

import structlog
from prometheus_client.core import GaugeMetricFamily

from tidemill.broker.server.members.quota_stocks import QuotaStocks
from tidemill.broker.server.round.rpc import read_in_round
from tidemill.common.errors import BadRequest, ServiceError
from tidemill.security.permit_buckets import LeaseDemand, QuotaBuckets
from tidemill.security.quotas import QUOTA, STOCK_LIMITS, LimitKey, QuotaLimit, quota_of
from tidemill.security.stock_buckets import (
    REPORT_PERIOD_MS,
    UNKNOWN_ROOM,
    StockBuckets,
    StockGrant,
    StockReading,
)
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

log = structlog.get_logger()

DEMANDS_MAX: Final = 1_000  # of one request: they take 3 ms
DECODED_MAX: Final = 10_000  # quotas, the limit of a cluster
_LIMITS: Final = frozenset({limit.value for limit in QuotaLimit})
PERMITS_MAX: Final = 1 << 40  # of one demand: more bytes than all proxies can hold


@final
class QuotaService:
    """The permit buckets of the home."""

    def __init__(
        self, rounds: Rounds, count_proxies: Callable[[], int], monotonic_ms: Callable[[], int]
    ) -> None:
        """`count_proxies` returns the number of connected proxies."""
        self._monotonic_ms = monotonic_ms
        self._rounds = rounds
        self._count_proxies = count_proxies
        # By quota: its item, and the limits in it.
        self._decoded: dict[str, tuple[bytes, Mapping[QuotaLimit, int]]] = {}
        self._buckets = QuotaBuckets(self._find_limit, monotonic_ms())
        self._counts = QuotaStocks()  # of this broker group
        self._stocks = StockBuckets()

    async def LeasePermits(self, request: pb.LeasePermitsRequest) -> pb.LeasePermitsReply:
        """Take unused permits back, and lease others."""

        def lease(engine: Engine, _turn: Turn) -> pb.LeasePermitsReply:
            engine.administration.check_home("permits of quotas")
            if len(request.demands) > DEMANDS_MAX:
                raise BadRequest(
                    f"{len(request.demands)} demands; at most {DEMANDS_MAX} are allowed"
                )
            demands = [_demand_of(demand, request.number) for demand in request.demands]
            now_ms = self._monotonic_ms()
            grants = [
                # A proxy of a later version knows more limits. Those of this version go on.
                StockGrant(asked.wanted, UNKNOWN_ROOM)
                if demand is None
                else self._grant(request.process_id, demand, now_ms)
                for asked, demand in zip(request.demands, demands, strict=True)
            ]
            for demand in demands:
                if demand is not None:
                    self._warn(demand.key, now_ms)
            return pb.LeasePermitsReply(
                granted=[grant.permits for grant in grants],
                rooms=[grant.room for grant in grants],
                proxies=self._count_proxies(),
            )

        return await read_in_round(self._rounds, lease)

    def _grant(self, process_id: bytes, demand: LeaseDemand, now_ms: int) -> StockGrant:
        if demand.key.limit not in STOCK_LIMITS:
            return StockGrant(self._buckets.lease(process_id, demand, now_ms), UNKNOWN_ROOM)
        limit = self._find_limit(demand.key)
        if limit is None:
            return StockGrant(demand.wanted, UNKNOWN_ROOM)  # It has just been deleted.
        return self._stocks.lease(demand, limit, now_ms)

    # ------------------------------------------------------------ stocks

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Count the stocks of this broker group, while it is the home, until the block ends."""
        async with asyncio.TaskGroup() as tasks:
            counting = tasks.create_task(self._count_stocks(), name="stocks of quotas")
            yield
            counting.cancel()

    async def _count_stocks(self) -> None:
        while True:
            await asyncio.sleep(REPORT_PERIOD_MS / 1_000)
            # While the broker drains or is not the master, it does not answer proxies either.
            with contextlib.suppress(ServiceError):
                await self.count_stocks()

    async def count_stocks(self) -> None:
        """Count the stocks of this broker group, if it is the home. Raises ServiceError."""
        engine = self._rounds.engine
        home = engine.catalog.membership.home
        is_home = home is None or home.name == engine.catalog.broker_name
        if not is_home or not self._rounds.is_master:
            # The last ones before this broker becomes the home are at most a second old.
            self._buckets = QuotaBuckets(self._find_limit, self._monotonic_ms())
            self._stocks.retain((), (), self._monotonic_ms())  # The metrics are those of the home.
            return
        if not engine.catalog.security.count(QUOTA) and not self._counts.limits:
            return

        def count(engine: Engine, turn: Turn) -> Generator[None, None, list[pb.QuotaStock]]:
            return (yield from self._counts.count(engine, turn.monotonic_ms))

        began_ms = self._monotonic_ms()
        stocks = await self._rounds.read_slices(count)
        catalog, now_ms = engine.catalog, self._monotonic_ms()
        limits = self._counts.limits
        self._stocks.retain(limits, {catalog.broker_name, *catalog.membership.groups}, now_ms)
        self.note_stocks(catalog.broker_name, stocks, now_ms - began_ms)
        for key, limit in limits.items():
            if self._stocks.is_warning_due(key, limit, now_ms):
                ratio = self._stocks.used_ratio(key, limit, now_ms)
                self._log_warning(key, ratio or 0)

    def note_stocks(self, broker_group: str, stocks: Sequence[pb.QuotaStock], took_ms: int) -> None:
        """Take over the stocks of a broker group, `took_ms` after it was asked for them."""
        now_ms = self._monotonic_ms()
        for stock in stocks:
            asked_at_ms = now_ms - took_ms
            timers = StockReading(stock.pending_timers, asked_at_ms, now_ms)
            key = LimitKey(stock.quota, QuotaLimit.PENDING_TIMERS)
            # A broker group that has just become the home does not know the limits yet.
            if self._stocks.reports.is_expected(key):
                self._stocks.reports.note(key, broker_group, timers)
            key = LimitKey(stock.quota, QuotaLimit.STORED_BYTES)
            if stock.HasField("stored_bytes") and self._stocks.reports.is_expected(key):
                counted_at_ms = asked_at_ms - stock.age_ms
                stored = StockReading(stock.stored_bytes, counted_at_ms, now_ms)
                self._stocks.reports.note(key, broker_group, stored)

    # ------------------------------------------------------------ metrics

    def _warn(self, key: LimitKey, now_ms: int) -> None:
        bucket = self._buckets.buckets.get(key)
        if bucket is not None and bucket.is_warning_due(now_ms):
            self._log_warning(key, bucket.used_ratio(now_ms))

    @staticmethod
    def _log_warning(key: LimitKey, used_ratio: float) -> None:
        log.warning(
            "quota nearly used up",
            quota=key.quota,
            limit=key.limit.value,
            used_ratio=round(used_ratio, 3),
        )

    def collect(self) -> Iterator[Metric]:
        """Yield the used part of each rate with recent demand, and of each stock."""
        ratios = GaugeMetricFamily(
            "rocketmq_quota_used_ratio",
            "Used part of the limit of a quota: of a rate over the last ten seconds, of stored"
            " bytes and pending timers now.",
            labels=("quota", "limit"),
        )
        now_ms = self._monotonic_ms()
        # Without a request, a bucket does not know yet that its limit was deleted.
        self._buckets.drop_deleted()
        for key, bucket in self._buckets.buckets.items():
            ratios.add_metric((key.quota, key.limit.value), bucket.used_ratio(now_ms))
        for key, limit in self._counts.limits.items():
            if (ratio := self._stocks.used_ratio(key, limit, now_ms)) is not None:
                ratios.add_metric((key.quota, key.limit.value), ratio)
        yield ratios

    def _find_limit(self, key: LimitKey) -> int | None:
        encoded = self._rounds.engine.catalog.security.find((QUOTA, key.quota))
        if encoded is None:
            return None
        known = self._decoded.get(key.quota)
        if known is None or known[0] is not encoded:
            if len(self._decoded) >= DECODED_MAX:
                self._decoded.clear()
            known = self._decoded[key.quota] = encoded, quota_of(encoded).limits
        return known[1].get(key.limit)


def _demand_of(demand: pb.PermitDemand, number: int) -> LeaseDemand | None:
    """Read a demand; None if its limit is unknown. Raises BadRequest."""
    counts = demand.wanted, demand.first, demand.returned
    if not all(0 <= count <= PERMITS_MAX for count in (*counts, demand.used_locally)):
        raise BadRequest(f"a demand of {counts} permits; each is 0 to {PERMITS_MAX}")
    if demand.limit not in _LIMITS:
        return None
    key = LimitKey(demand.quota, QuotaLimit(demand.limit))
    return LeaseDemand(key, *counts, number, demand.confirmed, demand.used_locally)
