"""The tokens that this proxy holds, and its demand for more. Without I/O or a clock (ADR 0078).

The home leases tokens. If it does not answer for the time of a lease, each rate gets a local
bucket with the limit divided by the number of proxies. A stock then has its last known room,
divided by the number of proxies, and no limit if its room is unknown. The same holds while a new
home does not know the stock.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, final

from tidemill.security.quotas import STOCK_LIMITS, MatchedRate, RateKey
from tidemill.security.token_buckets import BURST_S, LEASE_MS, LeaseDemand

DEMANDS_MAX: Final = 1_000  # of one request to the home; the others follow in later ones
UNLIMITED_TOKENS: Final = 1 << 50  # a petabyte
ROOMS_MAX: Final = 10_000  # of forgotten leases, about 200 bytes each; the oldest one is forgotten
IDLE_MS: Final = 2_000  # without a call, until a lease is returned and forgotten


class _KnownRoom(NamedTuple):
    """The last known room of a stock."""

    tokens: int
    is_share: bool  # Whether it is this proxy's part already.


class Cost(NamedTuple):
    """The tokens of one limit that a call needs."""

    lease: Lease
    tokens: int


@final
class Lease:
    """The tokens of one limit."""

    __slots__ = (
        "_refilled_at_ms",
        "confirmed",
        "key",
        "local_used",
        "rate_per_s",
        "recent",
        "room",
        "subject",
        "tokens",
        "touched_at_ms",
        "used",
        "waiting",
        "waiting_tokens",
    )

    def __init__(self, rate: MatchedRate, now_ms: int, confirmed: int) -> None:
        self.confirmed = confirmed  # number of the last request for it that has an answer
        self.key: RateKey = rate.key
        self.subject = rate.subject
        self.rate_per_s = rate.rate_per_s  # of a stock: its limit
        self.room: int | None = None  # of a stock, at the last answer of the home; None: unknown
        self.tokens = 0.0
        self.used = 0  # since the last renewal
        self.recent = 0  # used between the last two renewals
        self.local_used = 0  # of the local bucket, and not reported to the home yet
        self.waiting_tokens = 0  # costs of all sends that wait
        self.waiting: list[int] = []  # their costs at the last plan, the first one first
        self.touched_at_ms = now_ms
        self._refilled_at_ms: int | None = None  # of the local bucket; None: the home leases

    @property
    def is_local(self) -> bool:
        """Whether the tokens are those of the local bucket."""
        return self._refilled_at_ms is not None

    @property
    def is_stock(self) -> bool:
        """Whether the limit is that of a stock, which time does not refill."""
        return self.key.limit in STOCK_LIMITS

    def is_full(self, tokens: int) -> bool:
        """Whether a stock has no room for a cost."""
        return self.room is not None and self.tokens + self.room < tokens

    def missing_ms(self, tokens: int) -> int:
        """Return the time until the limit has added the missing tokens of a cost."""
        return max(round((tokens - max(self.tokens, 0)) * 1_000 / self.rate_per_s), 1)

    def charge(self, tokens: int) -> None:
        """Take tokens, also those that are missing. A negative number returns tokens."""
        self.tokens -= tokens
        # Returned tokens may be of an earlier period.
        self.used = max(self.used + tokens, 0)
        if self.is_local:
            self.local_used = max(self.local_used + tokens, 0)

    def change_rate(self, rate_per_s: int) -> None:
        """Change the limit. A debt ends, as at the home."""
        self.rate_per_s = rate_per_s
        self.tokens = max(self.tokens, 0)

    def refill(self, now_ms: int, proxies: int) -> None:
        """Add the tokens of the local bucket, which begins empty."""
        if self._refilled_at_ms is None:
            self.tokens = min(self.tokens, 0)
        else:
            passed_ms = now_ms - self._refilled_at_ms
            added = self.rate_per_s / proxies * passed_ms / 1_000
            # A cost above the burst passes too, in the time that its tokens take.
            room = max(self.rate_per_s / proxies * BURST_S, *self.waiting[:1], 1)
            self.tokens = min(self.tokens + added, room)
        self._refilled_at_ms = now_ms

    def begin_local_stock(self, former: _KnownRoom | None, now_ms: int, proxies: int) -> None:
        """Take this proxy's share of the room once; `former` is that of a former lease."""
        if self._refilled_at_ms is not None:
            return
        self._refilled_at_ms = now_ms
        if self.room is not None:
            self.tokens += self.room // proxies
            self.room = 0
        elif former is not None:
            self.tokens += former.tokens if former.is_share else former.tokens // proxies
            self.room = 0
        else:
            self.tokens = UNLIMITED_TOKENS

    def end_local(self) -> None:
        """Return to leases of the home: the tokens of the local bucket are void."""
        if self._refilled_at_ms is not None:
            self._refilled_at_ms = None
            self.tokens = min(self.tokens, 0)


@final
class LeaseBook:
    """All leases of the proxy."""

    def __init__(self, now_ms: int) -> None:
        self.leases: dict[RateKey, Lease] = {}
        # Limits that calls wait for, at most one entry for each lease. The first one has waited
        # the longest time for a request.
        self._wanted: dict[RateKey, None] = {}
        self.proxies = 1  # as the home has counted them last
        # The last known rooms of stocks without a lease, for a time without the home.
        self._rooms: OrderedDict[RateKey, _KnownRoom] = OrderedDict()
        self._answered_at_ms = now_ms  # by the home
        self._number = 0  # of the last request

    def lease_of(self, rate: MatchedRate, now_ms: int) -> Lease:
        """Return the lease of a limit, without tokens at first."""
        lease = self.leases.get(rate.key)
        if lease is None:
            lease = self.leases[rate.key] = Lease(rate, now_ms, self._number)
        if lease.rate_per_s != rate.rate_per_s:
            lease.change_rate(rate.rate_per_s)
        lease.touched_at_ms = now_ms
        return lease

    def charge(self, rate: MatchedRate, tokens: int, now_ms: int) -> None:
        """Charge a call that has begun under `rate`. The limit may have changed since then."""
        lease = self.leases.get(rate.key) or self.lease_of(rate, now_ms)
        lease.touched_at_ms = now_ms
        lease.charge(tokens)

    def take(self, costs: Sequence[Cost], *, leave_waiting: bool = False) -> bool:
        """Take all tokens of a send, or none; optionally, leave those that waiting sends need."""
        for lease, tokens in costs:
            if lease.tokens < tokens + (lease.waiting_tokens if leave_waiting else 0):
                return False
        for lease, tokens in costs:
            lease.tokens -= tokens
            lease.used += tokens
            if lease.is_local:
                lease.local_used += tokens
        return True

    def find_missing(self, costs: Iterable[Cost]) -> Cost | None:
        """Return the cost whose tokens take the longest time; None if all are there."""
        missing = [cost for cost in costs if cost.lease.tokens < cost.tokens]
        return max(missing, key=lambda cost: cost.lease.missing_ms(cost.tokens), default=None)

    def is_local(self, now_ms: int) -> bool:
        """Whether the home has not answered for the time of a lease."""
        return now_ms - self._answered_at_ms > LEASE_MS

    def next_leases(self) -> list[Lease]:
        """Return the leases of the next request to the home.

        Those that calls wait for come first, and then the others, each of both in turn.
        """
        self._number += 1
        chosen: dict[RateKey, Lease] = {}
        while self._wanted and len(chosen) < DEMANDS_MAX:
            key = next(iter(self._wanted))
            del self._wanted[key]
            if (lease := self.leases.get(key)) is not None:
                chosen[key] = lease
        chosen |= itertools.islice(self.leases.items(), DEMANDS_MAX - len(chosen))
        for key in chosen:
            self.leases[key] = self.leases.pop(key)
        return list(chosen.values())

    def ask_first(self, key: RateKey) -> None:
        """Let the next request to the home have a limit, because a call waits for it."""
        self._wanted[key] = None

    def renew_local(self, now_ms: int, leases: Iterable[Lease] | None = None) -> None:
        """Fill the local buckets of leases. Default: all."""
        for lease in self.leases.values() if leases is None else leases:
            if lease.is_stock:
                lease.begin_local_stock(self._rooms.get(lease.key), now_ms, self.proxies)
            else:
                lease.refill(now_ms, self.proxies)

    def plan(self, now_ms: int, leases: Iterable[Lease] | None = None) -> list[LeaseDemand]:
        """Return the demands of leases, for a request to the home. Default: the next ones."""
        demands = []
        for lease in self.next_leases() if leases is None else leases:
            is_idle = now_ms - lease.touched_at_ms >= IDLE_MS and not lease.waiting
            if lease.waiting:
                self.ask_first(lease.key)
            # Deliveries may owe tokens for their bytes. The home has to know them.
            is_idle = is_idle and lease.tokens >= 0
            # Twice the use of a period, because a lease is as long as two of them.
            need = 0 if is_idle else sum(lease.waiting) + 2 * max(lease.used, lease.recent)
            # Only leased tokens go back, not those of a local bucket.
            held = 0 if lease.is_local else int(lease.tokens)
            returned = max(held - need, 0)
            if returned:
                lease.tokens -= returned
                held -= returned
            # A debt is paid in parts: all of it may be more than a bucket of the home ever has.
            first = max(lease.waiting[0] - max(held, 0), 0) if lease.waiting else 0
            wanted = max(need - held, first)
            # More than the burst of its part is of a time whose tokens the home has dropped.
            burst = math.ceil(lease.rate_per_s * BURST_S / self.proxies)
            lease.local_used = 0 if lease.is_stock else min(lease.local_used, burst)
            demands.append(
                LeaseDemand(
                    lease.key,
                    wanted,
                    first,
                    returned,
                    self._number,
                    lease.confirmed,
                    lease.local_used,
                )
            )
            if is_idle:
                self._forget(lease)
        return demands

    def _forget(self, lease: Lease) -> None:
        del self.leases[lease.key]
        self._rooms.pop(lease.key, None)
        if lease.room is None:
            return
        if len(self._rooms) >= ROOMS_MAX:
            self._rooms.popitem(last=False)
        local = _KnownRoom(int(lease.tokens), is_share=True)
        self._rooms[lease.key] = local if lease.is_local else _KnownRoom(lease.room, is_share=False)

    def end_period(self) -> None:
        """Begin the next period of renewals."""
        for lease in self.leases.values():
            lease.recent, lease.used = lease.used, 0

    def apply(
        self,
        demands: Sequence[LeaseDemand],
        granted: Sequence[int],
        proxies: int,
        now_ms: int,
        rooms: Sequence[int | None] = (),
    ) -> None:
        """Add the tokens that the home has granted."""
        # The other proxies may not be connected to a new home yet.
        share_of = max(self.proxies, proxies)
        self._answered_at_ms, self.proxies = now_ms, max(proxies, 1)
        for demand, tokens, room in itertools.zip_longest(demands, granted, rooms):
            lease = self.leases.get(demand.key)
            if lease is None:
                continue
            lease.confirmed = demand.number
            lease.local_used = max(lease.local_used - demand.used_locally, 0)
            former = self._rooms.get(lease.key)
            is_known = lease.room is not None or former is not None
            if lease.is_stock and room is None and is_known:
                # A new home grants all tokens until it knows the stock. These do not count.
                lease.begin_local_stock(former, now_ms, share_of)
                continue
            lease.end_local()
            lease.tokens += tokens
            lease.room = room
            if room is not None:
                self._rooms.pop(lease.key, None)
