"""The stocks of quotas at this broker group: stored bytes and pending timers (ADR 0078).

A quota of a topic counts that topic, and a quota of a prefix all topics with the prefix. Copies for
retries belong to the consumer group and do not count. The bytes of delayed messages count for their
topic before they are due, too.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.message.resource_names import TIMER_TOPIC
from tidemill.security.quotas import (
    QUOTA,
    STOCK_LIMITS,
    LimitKey,
    QuotaKind,
    TrafficQuota,
    has_stock_limit,
    quota_of,
)
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.layout.numbers import TopicId

STOCKS_MAX: Final = 1_000  # of a reply to the home, about 60 KB; the next one has the others
QUOTAS_A_SLICE: Final = 500  # half a millisecond
TOPICS_A_SLICE: Final = 200  # half a millisecond, with a few lengths of prefixes
# Queues of limited topics whose messages are counted for each report, in 6 ms. If there are more,
# the report has the counts of the last look at all queues.
QUEUES_MAX: Final = 4_000
QUEUES_A_SLICE: Final = 300  # half a millisecond
AGE_MS_MAX: Final = (1 << 32) - 1


class _LimitedTopic(NamedTuple):
    """A topic, and the names of the quotas that count it."""

    id: TopicId
    queues: int
    quotas: list[str]


@final
class QuotaStocks:
    """The counts of this broker group, made when a report is due."""

    def __init__(self) -> None:
        # By encoded item: quotas with a limit of a stock, as of the last count.
        self._decoded: dict[bytes, TrafficQuota] = {}
        self._begin = 0  # of the next page

    @property
    def limits(self) -> dict[LimitKey, int]:
        """All limits of stocks, as of the last count."""
        return {
            LimitKey(quota.name, limit): count
            for quota in self._decoded.values()
            for limit, count in quota.limits.items()
            if limit in STOCK_LIMITS
        }

    def count(
        self, engine: Engine, monotonic_ms: int
    ) -> Generator[None, None, list[pb.QuotaStock]]:
        """Return the stock of each quota that has a limit of one."""
        yield from self._read_quotas(engine)
        quotas = [quota for quota in self._decoded.values() if STOCK_LIMITS & quota.limits.keys()]
        if not quotas:
            return []
        topics = yield from _find_topics(engine, quotas)
        live_bytes, timers = engine.live_bytes, engine.timers.index.counts
        is_fresh = sum(topic.queues for topic in topics) <= QUEUES_MAX
        stocks = {quota.name: pb.QuotaStock(quota=quota.name) for quota in quotas}
        allowance = QUEUES_A_SLICE
        for topic in topics:
            if is_fresh:
                yield from live_bytes.count_topic(topic.id)
            stored_bytes = max(live_bytes.bytes_of_topic(topic.id), 0)
            stored_bytes += timers.pending_bytes[topic.id]
            for name in topic.quotas:
                stocks[name].stored_bytes += stored_bytes
                stocks[name].pending_timers += timers.pending[topic.id]
            allowance -= topic.queues + 1
            if allowance <= 0:
                yield
                allowance = QUEUES_A_SLICE
        age_ms = 0 if is_fresh else min(max(monotonic_ms - live_bytes.counted_at_ms, 0), AGE_MS_MAX)
        for stock in stocks.values():
            if live_bytes.is_complete:
                # Set it, also to 0.
                stock.stored_bytes, stock.age_ms = stock.stored_bytes, age_ms
            else:
                stock.ClearField("stored_bytes")
        return list(stocks.values())

    def page(self, stocks: list[pb.QuotaStock]) -> list[pb.QuotaStock]:
        """Return the stocks of the next reply to the home, all in turn."""
        begin = self._begin if self._begin < len(stocks) else 0
        self._begin = begin + STOCKS_MAX
        return stocks[begin : begin + STOCKS_MAX]

    def _read_quotas(self, engine: Engine) -> Generator[None, None, None]:
        security = engine.catalog.security
        decoded: dict[bytes, TrafficQuota] = {}
        for number, name in enumerate(security.names(QUOTA), 1):
            encoded = security.find((QUOTA, name))
            if encoded is not None and has_stock_limit(encoded):
                known = self._decoded.get(encoded)
                decoded[encoded] = quota_of(encoded) if known is None else known
            if number % QUOTAS_A_SLICE == 0:
                yield
        self._decoded = decoded


def _find_topics(
    engine: Engine, quotas: list[TrafficQuota]
) -> Generator[None, None, list[_LimitedTopic]]:
    """Return the topics that the quotas count."""
    catalog = engine.catalog
    by_topic = {quota.value: quota.name for quota in quotas if quota.kind is QuotaKind.TOPIC}
    by_prefix = {quota.value: quota.name for quota in quotas if quota.kind is QuotaKind.PREFIX}
    lengths = sorted({len(prefix) for prefix in by_prefix})
    names = list(catalog.topic_ids) if by_prefix else list(by_topic)
    found = []
    for number, name in enumerate(names, 1):
        if number % TOPICS_A_SLICE == 0:
            yield
        topic = catalog.find_topic(name)
        if topic is None or topic.retry_of is not None or name == TIMER_TOPIC:
            continue
        matching = [by_topic[name]] if name in by_topic else []
        prefixes = [name[:length] for length in lengths if length <= len(name)]
        matching += [by_prefix[prefix] for prefix in prefixes if prefix in by_prefix]
        if matching:
            found.append(_LimitedTopic(topic.id, topic.queues, matching))
    return found
