"""The room of quotas on stored bytes and pending timers, at the home (ADR 0078).

Broker groups report their stocks. The home leases the remaining part of the limit to proxies, as it
does with the permits of a rate. A granted permit counts until a report is so new that it has the
stored message. So a limit holds between two reports, too. A stock is unknown, and limits nothing,
until all broker groups have reported it, or have had the time for it.

The caller passes the monotonic time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from typing import Final, NamedTuple, final

from tidemill.security.permit_buckets import BUCKETS_MAX, SOFT_LIMIT, WARNING_PERIOD_MS, LeaseDemand
from tidemill.security.quotas import LimitKey

REPORT_PERIOD_MS: Final = 1_000  # of the stocks of a broker group
# A permit that was granted this long before a report was used or returned then: a proxy holds
# permits for about 600 ms, and the message is stored soon after.
SETTLE_MS: Final = 1_500
# Without a report for this time, a broker group does not delay the release of permits. Its last
# stock counts. With 10,000 limits, a broker group needs ten reports for all of them.
SILENT_MS: Final = 15_000
# Time for the first report of a broker group: a broker counts its messages after a start. A broker
# group that is down, or that has an older version, then counts as empty.
FIRST_REPORT_MS: Final = 60_000
GRANT_STEP_MS: Final = 250  # grants of this time are one number
# Steps of a bucket: 64 s. Counts of a broker with many queues are at most that old. Beyond it the
# oldest grants are forgotten.
GRANT_STEPS_MAX: Final = 256
UNKNOWN_ROOM: Final = -1


class StockReading(NamedTuple):
    """The stock of one broker group."""

    permits: int
    counted_at_ms: int
    reported_at_ms: int


class StockTotal(NamedTuple):
    """The stock of all broker groups that have reported it."""

    permits: int
    counted_at_ms: int  # the earliest one


@final
class StockReports:
    """The last stocks that broker groups have reported."""

    def __init__(self) -> None:
        # By limit and broker group. `retain` bounds both.
        self._readings: dict[LimitKey, dict[str, StockReading]] = {}
        self._broker_groups: Collection[str] = ()  # that report
        self._since_ms: dict[LimitKey, int] = {}  # when a limit was seen first

    def is_expected(self, key: LimitKey) -> bool:
        """Whether broker groups report this limit."""
        return key in self._since_ms

    def note(self, key: LimitKey, broker_group: str, reading: StockReading) -> None:
        """Take over a report."""
        self._readings.setdefault(key, {})[broker_group] = reading

    def retain(
        self, keys: Collection[LimitKey], broker_groups: Collection[str], now_ms: int
    ) -> None:
        """Expect reports of these limits by these broker groups, and forget all others."""
        self._broker_groups = broker_groups
        for known in (self._readings, self._since_ms):
            for key in [key for key in known if key not in keys]:
                del known[key]
        for key in keys:
            self._since_ms.setdefault(key, now_ms)
        for readings in self._readings.values():
            for name in [name for name in readings if name not in broker_groups]:
                del readings[name]

    def find(self, key: LimitKey, now_ms: int) -> StockTotal | None:
        """Return the sum of all stocks; None if it is unknown."""
        readings = self._readings.get(key)
        if not readings:
            return None
        is_new = now_ms - self._since_ms.get(key, now_ms) < FIRST_REPORT_MS
        if is_new and any(name not in readings for name in self._broker_groups):
            return None
        counted_at_ms = min(
            (
                one.counted_at_ms
                for one in readings.values()
                if now_ms - one.reported_at_ms <= SILENT_MS
            ),
            default=now_ms,
        )
        return StockTotal(sum([one.permits for one in readings.values()]), counted_at_ms)


@final
class _StockBucket:
    """The granted permits of one limit that reports may not have yet."""

    def __init__(self) -> None:
        self._steps: deque[list[int]] = deque()  # time of the first grant, and permits
        self.granted = 0

    def add(self, permits: int, now_ms: int) -> None:
        """Note a grant."""
        self.granted += permits
        if self._steps and now_ms - self._steps[-1][0] < GRANT_STEP_MS:
            self._steps[-1][1] += permits
            return
        self._steps.append([now_ms, permits])
        if len(self._steps) > GRANT_STEPS_MAX:
            self._drop_oldest()

    def give_back(self, permits: int) -> None:
        """Note returned permits. The later grants stay, because they count for longer."""
        for step in self._steps:
            returned = min(step[1], permits)
            step[1] -= returned
            permits -= returned
            self.granted -= returned

    def settle(self, before_ms: int) -> None:
        """Forget grants whose messages are in the reports."""
        while self._steps and self._steps[0][0] + GRANT_STEP_MS <= before_ms:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, permits = self._steps.popleft()
        self.granted -= permits


class StockGrant(NamedTuple):
    """The answer to a demand for room."""

    permits: int
    room: int  # that the limit has left; UNKNOWN_ROOM


@final
class StockBuckets:
    """The room of all limits of stocks."""

    def __init__(self) -> None:
        self.reports = StockReports()
        self._buckets: OrderedDict[LimitKey, _StockBucket] = OrderedDict()
        # When a limit was reported as nearly used up. `retain` bounds it.
        self._warned_at_ms: dict[LimitKey, int] = {}

    def lease(self, demand: LeaseDemand, limit: int, now_ms: int) -> StockGrant:
        """Grant permits out of the room, all or none of those that the first send needs."""
        bucket = self._buckets.get(demand.key)
        if bucket is None:
            if len(self._buckets) >= BUCKETS_MAX:
                self._buckets.popitem(last=False)
            bucket = self._buckets[demand.key] = _StockBucket()
        self._buckets.move_to_end(demand.key)
        bucket.give_back(demand.returned)
        total = self.reports.find(demand.key, now_ms)
        if total is None:
            bucket.settle(now_ms - SETTLE_MS)
            bucket.add(demand.wanted, now_ms)
            return StockGrant(demand.wanted, UNKNOWN_ROOM)
        bucket.settle(total.counted_at_ms - SETTLE_MS)
        room = max(limit - total.permits - bucket.granted, 0)
        granted = min(demand.wanted, room)
        if granted < demand.first:
            granted = 0
        if granted:
            bucket.add(granted, now_ms)
        return StockGrant(granted, room - granted)

    def retain(
        self, keys: Collection[LimitKey], broker_groups: Collection[str], now_ms: int
    ) -> None:
        """Expect reports of these limits by these broker groups, and forget all others."""
        self.reports.retain(keys, broker_groups, now_ms)
        for key in [key for key in self._buckets if key not in keys]:
            del self._buckets[key]
        for key in [key for key in self._warned_at_ms if key not in keys]:
            del self._warned_at_ms[key]

    def used_ratio(self, key: LimitKey, limit: int, now_ms: int) -> float | None:
        """Return the used part of a limit; None if it is unknown."""
        total = self.reports.find(key, now_ms)
        return None if total is None else total.permits / limit

    def is_warning_due(self, key: LimitKey, limit: int, now_ms: int) -> bool:
        """Whether a limit is nearly used up, and was not in the last hour."""
        ratio = self.used_ratio(key, limit, now_ms)
        if ratio is None or ratio < SOFT_LIMIT:
            return False
        warned_at_ms = self._warned_at_ms.get(key)
        if warned_at_ms is not None and now_ms - warned_at_ms < WARNING_PERIOD_MS:
            return False
        self._warned_at_ms[key] = now_ms
        return True
