"""The token buckets of quotas at the home, and the tokens that it leases to proxies (ADR 0078).

A token is one message or one byte. The home grants tokens from a bucket and takes unused ones back.
So all proxies together use at most `rate * time + burst` tokens. The only exception is a cost above
the burst: it is granted when the bucket is full, and the bucket is then in debt.

A bucket is not state of the engine. The caller passes the monotonic time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple, final

from tidemill.security.quotas import RateKey

BURST_S: Final = 2.0  # tokens of this time fit into a bucket
LEASE_MS: Final = 400  # a proxy uses tokens for this time after its last renewal
RENEWAL_MS: Final = 200  # period of renewals
BUCKETS_MAX: Final = 20_000  # 10,000 quotas with two limits; beyond it the oldest one is forgotten
WINDOW_MS: Final = 10_000  # of the used ratio
SOFT_LIMIT: Final = 0.8  # used ratio of a warning
WARNING_PERIOD_MS: Final = 3_600_000  # between two warnings about one limit
PROXIES_MAX: Final = 1_024  # demands that a bucket remembers, one of each proxy


class LeaseDemand(NamedTuple):
    """The demand of a proxy for tokens of one bucket."""

    key: RateKey
    wanted: int  # for the time of a lease, `first` included
    first: int  # cost of the first waiting send, all or none; 0: no send waits
    returned: int  # unused tokens of earlier leases


@final
class QuotaBucket:
    """The tokens of one limit of one quota."""

    def __init__(self, rate_per_s: int, now_ms: int) -> None:
        self.rate_per_s = rate_per_s
        self.tokens = rate_per_s * BURST_S
        self._at_ms = now_ms
        self._used = 0.0  # tokens of the present window
        self._window_ms = now_ms  # begin of the present window
        self._used_ratio = 0.0  # of the last whole window
        self._warned_at_ms: int | None = None
        self._wanted: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # by proxy: ms, tokens

    def lease(self, proxy: bytes, demand: LeaseDemand, now_ms: int) -> int:
        """Take unused tokens back, and return the number of granted tokens."""
        self.refill(now_ms)
        burst = self.rate_per_s * BURST_S
        self.tokens = min(self.tokens + demand.returned, burst)
        self._used -= demand.returned
        share = self._share_of(proxy, demand.wanted, now_ms)
        granted = min(demand.wanted, int(max(self.tokens, 0) * share))
        if granted < demand.first:
            # All or none: a part of the tokens would be unused at the proxy.
            granted = demand.first if self.tokens >= min(demand.first, burst) else 0
        self.tokens -= granted
        self._used += granted
        return granted

    def change_rate(self, rate_per_s: int, now_ms: int) -> None:
        """Change the limit. A debt ends: an operator raises a limit because it was too low."""
        self.refill(now_ms)
        self.rate_per_s = rate_per_s
        self.tokens = max(self.tokens, 0)

    def used_ratio(self, now_ms: int) -> float:
        """Return the used part of the limit over the last ten seconds."""
        self.refill(now_ms)
        return self._used_ratio

    def is_warning_due(self, now_ms: int) -> bool:
        """Whether the limit is nearly used up, and was not in the last hour."""
        if self._used_ratio < SOFT_LIMIT:
            return False
        if self._warned_at_ms is not None and now_ms - self._warned_at_ms < WARNING_PERIOD_MS:
            return False
        self._warned_at_ms = now_ms
        return True

    def refill(self, now_ms: int) -> None:
        """Add the tokens of the time since the last call."""
        passed_ms = max(now_ms - self._at_ms, 0)
        self._at_ms = max(now_ms, self._at_ms)
        added = self.rate_per_s * passed_ms / 1_000
        self.tokens = min(self.tokens + added, self.rate_per_s * BURST_S)
        window_ms = now_ms - self._window_ms
        if window_ms >= WINDOW_MS:
            self._used_ratio = max(self._used, 0) * 1_000 / (self.rate_per_s * window_ms)
            self._used, self._window_ms = 0.0, now_ms

    def _share_of(self, proxy: bytes, wanted: int, now_ms: int) -> float:
        """Return the part of the tokens for a proxy, by the demands of the last lease time."""
        self._wanted.pop(proxy, None)
        if wanted:
            self._wanted[proxy] = now_ms, wanted
        while self._wanted:
            oldest, (at_ms, _) = next(iter(self._wanted.items()))
            if now_ms - at_ms < LEASE_MS and len(self._wanted) <= PROXIES_MAX:
                break
            del self._wanted[oldest]
        total = sum(each for _, each in self._wanted.values())
        return wanted / total if total else 1.0


@final
class QuotaBuckets:
    """The buckets of all quotas with recent demand."""

    def __init__(self, find_rate: Callable[[RateKey], int | None]) -> None:
        """`find_rate` returns the limit of a quota per second; None if there is none."""
        self._find_rate = find_rate
        self.buckets: OrderedDict[RateKey, QuotaBucket] = OrderedDict()

    def lease(self, proxy: bytes, demand: LeaseDemand, now_ms: int) -> int:
        """Return the granted tokens; all that are wanted if the quota has just been deleted."""
        rate = self._find_rate(demand.key)
        if rate is None:
            self.buckets.pop(demand.key, None)
            return demand.wanted
        bucket = self.buckets.get(demand.key)
        if bucket is None:
            if len(self.buckets) >= BUCKETS_MAX:
                self.buckets.popitem(last=False)
            bucket = self.buckets[demand.key] = QuotaBucket(rate, now_ms)
        self.buckets.move_to_end(demand.key)
        if bucket.rate_per_s != rate:
            bucket.change_rate(rate, now_ms)
        return bucket.lease(proxy, demand, now_ms)
