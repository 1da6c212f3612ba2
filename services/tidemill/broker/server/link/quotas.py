"""BrokerQuotas: the home leases tokens to proxies (ADR 0078).

The buckets are memory of the process and no state: a new home begins with full ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, final

import structlog
from prometheus_client.core import GaugeMetricFamily

from tidemill.broker.server.round.rpc import read_in_round
from tidemill.common.errors import BadRequest
from tidemill.security.quotas import QUOTA, QuotaLimit, RateKey, quota_of
from tidemill.security.token_buckets import LeaseDemand, QuotaBuckets
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

log = structlog.get_logger()

DEMANDS_MAX: Final = 1_000  # of one request: they take 3 ms
DECODED_MAX: Final = 10_000  # quotas, the limit of a cluster
TOKENS_MAX: Final = 1 << 40  # of one demand: more bytes than all proxies can hold


@final
class QuotaService:
    """The token buckets of the home."""

    def __init__(
        self, rounds: Rounds, count_proxies: Callable[[], int], monotonic_ms: Callable[[], int]
    ) -> None:
        """`count_proxies` returns the number of connected proxies."""
        self._monotonic_ms = monotonic_ms
        self._rounds = rounds
        self._count_proxies = count_proxies
        self._engine: Engine | None = None  # of the request in progress
        # By quota: its item, and the limits in it.
        self._decoded: dict[str, tuple[bytes, Mapping[QuotaLimit, int]]] = {}
        self._buckets = QuotaBuckets(self._find_rate)

    async def LeaseTokens(self, request: pb.LeaseTokensRequest) -> pb.LeaseTokensReply:
        """Take unused tokens back, and lease others."""

        def lease(engine: Engine, _turn: Turn) -> pb.LeaseTokensReply:
            engine.administration.check_home("tokens of quotas")
            if len(request.demands) > DEMANDS_MAX:
                raise BadRequest(
                    f"{len(request.demands)} demands; at most {DEMANDS_MAX} are allowed"
                )
            demands = list(map(_demand_of, request.demands))
            self._engine, now_ms = engine, self._monotonic_ms()
            granted = [
                self._buckets.lease(request.process_id, demand, now_ms) for demand in demands
            ]
            for demand in demands:
                self._warn(demand.key, now_ms)
            return pb.LeaseTokensReply(granted=granted, proxies=self._count_proxies())

        return await read_in_round(self._rounds, lease)

    def _warn(self, key: RateKey, now_ms: int) -> None:
        bucket = self._buckets.buckets.get(key)
        if bucket is not None and bucket.is_warning_due(now_ms):
            log.warning(
                "quota nearly used up",
                quota=key.quota,
                limit=key.limit.value,
                used_ratio=round(bucket.used_ratio(now_ms), 3),
            )

    def collect(self) -> Iterator[Metric]:
        """Yield the used part of each limit with recent demand."""
        ratios = GaugeMetricFamily(
            "rocketmq_quota_used_ratio",
            "Used part of the limit of a quota over the last ten seconds.",
            labels=("quota", "limit"),
        )
        now_ms = self._monotonic_ms()
        for key, bucket in self._buckets.buckets.items():
            ratios.add_metric((key.quota, key.limit.value), bucket.used_ratio(now_ms))
        yield ratios

    def _find_rate(self, key: RateKey) -> int | None:
        assert self._engine is not None, "a request is in progress"
        encoded = self._engine.catalog.security.find((QUOTA, key.quota))
        if encoded is None:
            return None
        known = self._decoded.get(key.quota)
        if known is None or known[0] is not encoded:
            if len(self._decoded) >= DECODED_MAX:
                self._decoded.clear()
            known = self._decoded[key.quota] = encoded, quota_of(encoded).limits
        return known[1].get(key.limit)


def _demand_of(demand: pb.TokenDemand) -> LeaseDemand:
    """Read a demand. Raises BadRequest."""
    try:
        limit = QuotaLimit(demand.limit)
    except ValueError:
        raise BadRequest(f"the limit {demand.limit!r} is unknown; upgrade the broker") from None
    counts = demand.wanted, demand.first, demand.returned
    if not all(0 <= count <= TOKENS_MAX for count in counts):
        raise BadRequest(f"a demand of {counts} tokens; each is 0 to {TOKENS_MAX}")
    return LeaseDemand(RateKey(demand.quota, limit), *counts)
