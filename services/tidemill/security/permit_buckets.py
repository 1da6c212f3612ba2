"""The permit buckets of quotas at the home, and the permits that it leases to proxies (ADR 0078).

A permit is one message or one byte. The home grants permits from a bucket and takes unused ones
back. So all proxies together use at most `rate * time + burst` permits. The only exception is a
cost above the burst: it is granted when the bucket is full, and the bucket is then in debt.

Proxies with unmet demand get equal parts of a bucket. The order and the number of their requests do
not matter. For this, a bucket counts the granted permits of each proxy: its level. A grant leaves
the permits that proxies of a lower level need to reach the same level. A proxy without unmet demand
saves nothing up: its next demand begins at least at the lowest level of those with unmet demand, or
at the highest level if there are none.

A bucket is not state of the engine. The caller passes the monotonic time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple, final

from tidemill.security.quotas import LimitKey

BURST_S: Final = 2.0  # permits of this time fit into a bucket
FILLED_MS: Final = 2_000  # the time in which an empty bucket fills up: BURST_S
LEASE_MS: Final = 400  # a proxy uses permits for this time after its last renewal
RENEWAL_MS: Final = 200  # period of renewals
BUCKETS_MAX: Final = 20_000  # 10,000 quotas with two limits; beyond it the oldest one is forgotten
WINDOW_MS: Final = 10_000  # of the used ratio
SOFT_LIMIT: Final = 0.8  # used ratio of a warning
WARNING_PERIOD_MS: Final = 3_600_000  # between two warnings about one limit
PROXIES_MAX: Final = 1_024  # shares of a bucket, one of each proxy
# Without a demand for this time, a share is forgotten, because its proxy has ended. A proxy with
# many leases needs several requests to renew all of them.
SHARE_MS: Final = 1_000


class LeaseDemand(NamedTuple):
    """The demand of a proxy for permits of one bucket."""

    key: LimitKey
    wanted: int  # for the time of a lease, `first` included
    first: int  # cost of the first waiting send, all or none; 0: no send waits
    returned: int  # unused permits of earlier leases
    number: int = 0  # of the request, in their order; 0: the proxy does not notice lost answers
    confirmed: int = 0  # number of the last request for this bucket that has an answer
    used_locally: int = 0  # without the home, since its last answer, at most the burst


class _ProxyShare(NamedTuple):
    """The permits that a proxy still wants, and those that it has got."""

    at_ms: int  # of its last demand
    unmet: int
    level: int  # granted permits, to be compared with those of other proxies
    number: int  # of its last request
    granted: int  # by the answer to it


@final
class QuotaBucket:
    """The permits of one limit of one quota."""

    def __init__(self, rate_per_s: int, now_ms: int, began_ms: int) -> None:
        """Begin with the permits of the time since `began_ms`, when the home began to lease."""
        self.rate_per_s = rate_per_s
        # The former home may have granted all permits of the time before.
        self.permits = rate_per_s * min(max(now_ms - began_ms, 0) / 1_000, BURST_S)
        self._at_ms = now_ms
        self._used = 0.0  # permits of the present window
        self._window_ms = now_ms  # begin of the present window
        self._used_ratio = 0.0  # of the last whole window
        self._warned_at_ms: int | None = None
        # By proxy, the oldest one first.
        self._shares: OrderedDict[bytes, _ProxyShare] = OrderedDict()

    def lease(self, proxy: bytes, demand: LeaseDemand, now_ms: int) -> int:
        """Take unused permits back, and return the number of granted permits."""
        self.refill(now_ms)
        if not self._undo_lost(proxy, demand):
            return 0
        burst = self.rate_per_s * BURST_S
        if self.permits > 0:
            # The bucket has filled up while the proxies used their local ones. No debt arises,
            # because a full bucket does not keep the permits of a longer time.
            self.permits = max(self.permits - demand.used_locally, 0)
        self.permits = min(self.permits + demand.returned, burst)
        self._used -= demand.returned
        level = self._level_of(proxy, demand, now_ms)
        granted = self._part_of(level, demand.wanted)
        if granted < demand.first:
            # All or none: a part of the permits would be unused at the proxy.
            granted = demand.first if self._free_for(level) >= min(demand.first, burst) else 0
        self.permits -= granted
        self._used += granted
        unmet = demand.wanted - granted
        share = _ProxyShare(now_ms, unmet, level + granted, demand.number, granted)
        self._shares[proxy] = share
        return granted

    def change_rate(self, rate_per_s: int, now_ms: int) -> None:
        """Change the limit. A debt ends: an operator raises a limit because it was too low."""
        self.refill(now_ms)
        self.rate_per_s = rate_per_s
        self.permits = max(self.permits, 0)

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
        """Add the permits of the time since the last call."""
        passed_ms = max(now_ms - self._at_ms, 0)
        self._at_ms = max(now_ms, self._at_ms)
        added = self.rate_per_s * passed_ms / 1_000
        self.permits = min(self.permits + added, self.rate_per_s * BURST_S)
        window_ms = now_ms - self._window_ms
        if window_ms >= WINDOW_MS:
            self._used_ratio = max(self._used, 0) * 1_000 / (self.rate_per_s * window_ms)
            self._used, self._window_ms = 0.0, now_ms

    def _undo_lost(self, proxy: bytes, demand: LeaseDemand) -> bool:
        """Take back the permits of a lost answer. Return False for a request that is too late."""
        own = self._shares.get(proxy)
        if own is None or not demand.number:
            return True
        if demand.number <= own.number:
            return False  # A later request has overtaken it, so its answer is not awaited.
        if own.number > demand.confirmed:
            self.permits += own.granted
            self._used -= own.granted
            unmet, level = own.unmet + own.granted, own.level - own.granted
            self._shares[proxy] = own._replace(unmet=unmet, level=level, granted=0)
        return True

    def _level_of(self, proxy: bytes, demand: LeaseDemand, now_ms: int) -> int:
        """Return the level of a proxy. Forget its share, and those of ended proxies."""
        own = self._shares.pop(proxy, None)
        while self._shares:
            oldest, share = next(iter(self._shares.items()))
            if now_ms - share.at_ms < SHARE_MS and len(self._shares) < PROXIES_MAX:
                break
            del self._shares[oldest]
        own_level = 0 if own is None else own.level - demand.returned
        if own is not None and own.unmet:
            return own_level
        # The proxy has got all that it wanted, so it begins at the level of those that wait. If
        # none waits, it begins at the highest one: what the others have got is no debt to it.
        unmet = [each.level for each in self._shares.values() if each.unmet]
        if unmet:
            return max(own_level, min(unmet))
        return max(own_level, *[each.level for each in self._shares.values()], 0)

    def _part_of(self, level: int, wanted: int) -> int:
        """Return the permits for a demand if all unmet demands get the same level."""
        permits = float(max(int(self.permits), 0))
        if not permits or sum([each.unmet for each in self._shares.values()]) + wanted <= permits:
            return min(wanted, int(permits))
        # The common level rises until the permits are used up. Demands begin and end on the way.
        demands = [(level, wanted), *[(each.level, each.unmet) for each in self._shares.values()]]
        steps = sorted(
            [(begin, 1) for begin, _ in demands] + [(begin + most, -1) for begin, most in demands]
        )
        common, rising = float(steps[0][0]), 0
        for at, change in steps:
            if (needed := (at - common) * rising) >= permits:
                break
            permits -= needed
            common, rising = at, rising + change
        common += permits / max(rising, 1)
        return min(max(int(common - level), 0), wanted)

    def _free_for(self, level: int) -> float:
        """Return the permits that proxies of a lower level leave to one of this level."""
        behind = [min(each.unmet, max(level - each.level, 0)) for each in self._shares.values()]
        return self.permits - sum(behind)


@final
class QuotaBuckets:
    """The buckets of all quotas with recent demand."""

    def __init__(
        self, find_rate: Callable[[LimitKey], int | None], began_ms: int | None = None
    ) -> None:
        """`find_rate` returns the limit of a quota per second; None if there is none.

        The home leases permits since `began_ms`; None: for a long time.
        """
        self._find_rate = find_rate
        self._began_ms = began_ms
        self.buckets: OrderedDict[LimitKey, QuotaBucket] = OrderedDict()

    def drop_deleted(self) -> None:
        """Drop the buckets of limits that were deleted."""
        for key in [key for key in self.buckets if self._find_rate(key) is None]:
            del self.buckets[key]

    def lease(self, proxy: bytes, demand: LeaseDemand, now_ms: int) -> int:
        """Return the granted permits; all that are wanted if the quota has just been deleted."""
        rate = self._find_rate(demand.key)
        if rate is None:
            self.buckets.pop(demand.key, None)
            return demand.wanted
        bucket = self.buckets.get(demand.key)
        if bucket is None:
            if len(self.buckets) >= BUCKETS_MAX:
                self.buckets.popitem(last=False)
            began_ms = now_ms - FILLED_MS if self._began_ms is None else self._began_ms
            bucket = self.buckets[demand.key] = QuotaBucket(rate, now_ms, began_ms)
        self.buckets.move_to_end(demand.key)
        if bucket.rate_per_s != rate:
            bucket.change_rate(rate, now_ms)
        return bucket.lease(proxy, demand, now_ms)
