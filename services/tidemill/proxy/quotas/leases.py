"""The permits that this proxy holds, and its demand for more. Without I/O or a clock (ADR 0078).

The home leases permits. If it does not answer for the time of a lease, each rate gets a local
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

from tidemill.security.permit_buckets import BURST_S, LEASE_MS, LeaseDemand
from tidemill.security.quotas import STOCK_LIMITS, LimitKey, MatchedLimit

DEMANDS_MAX: Final = 1_000  # of one request to the home; the others follow in later ones
UNLIMITED_PERMITS: Final = 1 << 50  # a petabyte
ROOMS_MAX: Final = 10_000  # of forgotten leases, about 200 bytes each; the oldest one is forgotten
IDLE_MS: Final = 2_000  # without a call, until a lease is returned and forgotten


class _KnownRoom(NamedTuple):
    """The last known room of a stock."""

    permits: int
    is_share: bool  # Whether it is this proxy's part already.


class Cost(NamedTuple):
    """The permits of one limit that a call needs."""

    lease: Lease
    permits: int


@final
class Lease:
    """The permits of one limit."""

    __slots__ = (
        "_refilled_at_ms",
        "amount",
        "confirmed",
        "key",
        "local_used",
        "permits",
        "recent",
        "room",
        "subject",
        "touched_at_ms",
        "used",
        "waiting",
        "waiting_permits",
    )

    def __init__(self, limit: MatchedLimit, now_ms: int, confirmed: int) -> None:
        self.confirmed = confirmed  # number of the last request for it that has an answer
        self.key: LimitKey = limit.key
        self.subject = limit.subject
        self.amount = limit.amount  # per second, or of a stock
        self.room: int | None = None  # of a stock, at the last answer of the home; None: unknown
        self.permits = 0.0
        self.used = 0  # since the last renewal
        self.recent = 0  # used between the last two renewals
        self.local_used = 0  # of the local bucket, and not reported to the home yet
        self.waiting_permits = 0  # costs of all sends that wait
        self.waiting: list[int] = []  # their costs at the last plan, the first one first
        self.touched_at_ms = now_ms
        self._refilled_at_ms: int | None = None  # of the local bucket; None: the home leases

    @property
    def is_local(self) -> bool:
        """Whether the permits are those of the local bucket."""
        return self._refilled_at_ms is not None

    @property
    def is_stock(self) -> bool:
        """Whether the limit is that of a stock, which time does not refill."""
        return self.key.limit in STOCK_LIMITS

    def is_full(self, permits: int) -> bool:
        """Whether a stock has no room for a cost."""
        return self.room is not None and self.permits + self.room < permits

    def missing_ms(self, permits: int) -> int:
        """Return the time until the limit has added the missing permits of a cost."""
        return max(round((permits - max(self.permits, 0)) * 1_000 / self.amount), 1)

    def charge(self, permits: int) -> None:
        """Take permits, also those that are missing. A negative number returns permits."""
        self.permits -= permits
        # Returned permits may be of an earlier period.
        self.used = max(self.used + permits, 0)
        if self.is_local:
            self.local_used = max(self.local_used + permits, 0)

    def change_amount(self, amount: int) -> None:
        """Change the limit. A debt ends, as at the home."""
        self.amount = amount
        self.permits = max(self.permits, 0)

    def refill(self, now_ms: int, proxies: int) -> None:
        """Add the permits of the local bucket, which begins empty."""
        if self._refilled_at_ms is None:
            self.permits = min(self.permits, 0)
        else:
            passed_ms = now_ms - self._refilled_at_ms
            added = self.amount / proxies * passed_ms / 1_000
            # A cost above the burst passes too, in the time that its permits take.
            room = max(self.amount / proxies * BURST_S, *self.waiting[:1], 1)
            self.permits = min(self.permits + added, room)
        self._refilled_at_ms = now_ms

    def begin_local_stock(self, former: _KnownRoom | None, now_ms: int, proxies: int) -> None:
        """Take this proxy's share of the room once; `former` is that of a former lease."""
        if self._refilled_at_ms is not None:
            return
        self._refilled_at_ms = now_ms
        if self.room is not None:
            self.permits += self.room // proxies
            self.room = 0
        elif former is not None:
            self.permits += former.permits if former.is_share else former.permits // proxies
            self.room = 0
        else:
            self.permits = UNLIMITED_PERMITS

    def end_local(self) -> None:
        """Return to leases of the home: the permits of the local bucket are void."""
        if self._refilled_at_ms is not None:
            self._refilled_at_ms = None
            self.permits = min(self.permits, 0)


@final
class LeaseBook:
    """All leases of the proxy."""

    def __init__(self, now_ms: int) -> None:
        self.leases: dict[LimitKey, Lease] = {}
        # Limits that calls wait for, at most one entry for each lease. The first one has waited
        # the longest time for a request.
        self._wanted: dict[LimitKey, None] = {}
        self.proxies = 1  # as the home has counted them last
        # The last known rooms of stocks without a lease, for a time without the home.
        self._rooms: OrderedDict[LimitKey, _KnownRoom] = OrderedDict()
        self._answered_at_ms = now_ms  # by the home
        self._number = 0  # of the last request

    def lease_of(self, limit: MatchedLimit, now_ms: int) -> Lease:
        """Return the lease of a limit, without permits at first."""
        lease = self.leases.get(limit.key)
        if lease is None:
            lease = self.leases[limit.key] = Lease(limit, now_ms, self._number)
        if lease.amount != limit.amount:
            lease.change_amount(limit.amount)
        lease.touched_at_ms = now_ms
        return lease

    def charge(self, limit: MatchedLimit, permits: int, now_ms: int) -> None:
        """Charge a call that has begun under `limit`. The limit may have changed since then."""
        lease = self.leases.get(limit.key) or self.lease_of(limit, now_ms)
        lease.touched_at_ms = now_ms
        lease.charge(permits)

    def take(self, costs: Sequence[Cost], *, leave_waiting: bool = False) -> bool:
        """Take all permits of a send, or none; optionally, leave those that waiting sends need."""
        for lease, permits in costs:
            if lease.permits < permits + (lease.waiting_permits if leave_waiting else 0):
                return False
        for lease, permits in costs:
            lease.permits -= permits
            lease.used += permits
            if lease.is_local:
                lease.local_used += permits
        return True

    def find_missing(self, costs: Iterable[Cost]) -> Cost | None:
        """Return the cost whose permits take the longest time; None if all are there."""
        missing = [cost for cost in costs if cost.lease.permits < cost.permits]
        return max(missing, key=lambda cost: cost.lease.missing_ms(cost.permits), default=None)

    def is_local(self, now_ms: int) -> bool:
        """Whether the home has not answered for the time of a lease."""
        return now_ms - self._answered_at_ms > LEASE_MS

    def next_leases(self) -> list[Lease]:
        """Return the leases of the next request to the home.

        Those that calls wait for come first, and then the others, each of both in turn.
        """
        self._number += 1
        chosen: dict[LimitKey, Lease] = {}
        while self._wanted and len(chosen) < DEMANDS_MAX:
            key = next(iter(self._wanted))
            del self._wanted[key]
            if (lease := self.leases.get(key)) is not None:
                chosen[key] = lease
        chosen |= itertools.islice(self.leases.items(), DEMANDS_MAX - len(chosen))
        for key in chosen:
            self.leases[key] = self.leases.pop(key)
        return list(chosen.values())

    def ask_first(self, key: LimitKey) -> None:
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
            # Deliveries may owe permits for their bytes. The home has to know them.
            is_idle = is_idle and lease.permits >= 0
            # Twice the use of a period, because a lease is as long as two of them.
            need = 0 if is_idle else sum(lease.waiting) + 2 * max(lease.used, lease.recent)
            # Only leased permits go back, not those of a local bucket.
            held = 0 if lease.is_local else int(lease.permits)
            returned = max(held - need, 0)
            if returned:
                lease.permits -= returned
                held -= returned
            # A debt is paid in parts: all of it may be more than a bucket of the home ever has.
            first = max(lease.waiting[0] - max(held, 0), 0) if lease.waiting else 0
            wanted = max(need - held, first)
            # More than the burst of its part is of a time whose permits the home has dropped.
            burst = math.ceil(lease.amount * BURST_S / self.proxies)
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
        local = _KnownRoom(int(lease.permits), is_share=True)
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
        """Add the permits that the home has granted."""
        # The other proxies may not be connected to a new home yet.
        share_of = max(self.proxies, proxies)
        self._answered_at_ms, self.proxies = now_ms, max(proxies, 1)
        for demand, permits, room in itertools.zip_longest(demands, granted, rooms):
            lease = self.leases.get(demand.key)
            if lease is None:
                continue
            lease.confirmed = demand.number
            lease.local_used = max(lease.local_used - demand.used_locally, 0)
            former = self._rooms.get(lease.key)
            is_known = lease.room is not None or former is not None
            if lease.is_stock and room is None and is_known:
                # A new home grants all permits until it knows the stock. These do not count.
                lease.begin_local_stock(former, now_ms, share_of)
                continue
            lease.end_local()
            lease.permits += permits
            lease.room = room
            if room is not None:
                self._rooms.pop(lease.key, None)
