"""Which clients there are: what each told of itself, and when it last gave a sign of life.

Nothing here decides how a call is answered: a client may call a proxy that has just started, and
another client may never announce itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily

from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

if TYPE_CHECKING:
    from prometheus_client.core import Metric

EXPIRY_MS = 120_000  # clients give a sign of life every 10 s, some every 30 s

_PRODUCERS = frozenset({v2.PRODUCER})


@dataclass(slots=True, kw_only=True)
class Client:
    """What is known of one client instance."""

    client_type: int
    group: str
    language: str
    version: str
    seen_at_ms: int  # monotonic


class Clients:
    """The clients of this proxy, the one silent longest first."""

    def __init__(self, *, clients_max: int) -> None:
        self._clients: OrderedDict[str, Client] = OrderedDict()
        self._clients_max = clients_max

    def __len__(self) -> int:
        return len(self._clients)

    def seen(self, client_id: str, client: Client) -> None:
        """Note a sign of life."""
        self._clients[client_id] = client
        self._clients.move_to_end(client_id)
        self._expire(client.seen_at_ms)

    def forget(self, client_id: str) -> None:
        """Forget a client that says it ends."""
        self._clients.pop(client_id, None)

    def _expire(self, now_ms: int) -> None:
        while self._clients:
            oldest = next(iter(self._clients.values()))
            is_silent = now_ms - oldest.seen_at_ms > EXPIRY_MS
            if not is_silent and len(self._clients) <= self._clients_max:
                return
            self._clients.popitem(last=False)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of connected clients."""
        producers = Counter(
            (client.language, client.version)
            for client in self._clients.values()
            if client.client_type in _PRODUCERS
        )
        consumers = Counter(
            (client.group, client.language, client.version)
            for client in self._clients.values()
            if client.client_type not in _PRODUCERS
        )
        producer_family = GaugeMetricFamily(
            "rocketmq_producer_connections",
            "Producers that gave a sign of life within two minutes.",
            labels=("protocol_type", "language", "version"),
        )
        for producer, count in producers.items():
            producer_family.add_metric(("grpc", *producer), count)
        yield producer_family
        consumer_family = GaugeMetricFamily(
            "rocketmq_consumer_connections",
            "Consumers that gave a sign of life within two minutes.",
            labels=("protocol_type", "consume_mode", "consumer_group", "language", "version"),
        )
        for consumer, count in consumers.items():
            consumer_family.add_metric(("grpc", "pop", *consumer), count)
        yield consumer_family
