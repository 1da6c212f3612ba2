"""Which clients there are: what each told of itself, and when it last gave a sign of life.

Nothing here decides how a call is answered: a client may call a proxy that has just started, and
another client may never announce itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from prometheus_client.core import GaugeMetricFamily

from tidemill.common.metrics import OVERFLOW, Labels
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

if TYPE_CHECKING:
    from prometheus_client.core import Metric

EXPIRY_MS = 120_000  # clients give a sign of life every 10 s, some every 30 s
# Forgotten in a turn of the loop, at some two microseconds each: a crowd falls silent at once, and
# a sign of life, or a scrape, is not to pay for all of it.
EXPIRED_A_TURN = 1_000
# Of each of the two gauges. What they tell apart is what clients say of themselves; beyond it they
# are counted together.
LABEL_SETS_MAX = 1_000

_PRODUCERS = frozenset({v2.PRODUCER})
_PRODUCER_LABELS = ("protocol_type", "language", "version")
_CONSUMER_LABELS = ("protocol_type", "consume_mode", "consumer_group", "language", "version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """What is known of one client instance."""

    client_type: int
    group: str
    language: str
    version: str
    seen_at_ms: int  # monotonic


class Clients:
    """The clients of this proxy, the one silent longest first."""

    def __init__(self, *, clients_max: int, monotonic_ms: Callable[[], int]) -> None:
        self._clients: OrderedDict[str, tuple[Client, Connected, Labels]] = OrderedDict()
        self._clients_max = clients_max
        self._monotonic_ms = monotonic_ms
        self._producers, self._consumers = Connected(), Connected()

    def __len__(self) -> int:
        return len(self._clients)

    def seen(self, client_id: str, client: Client) -> None:
        """Note a sign of life."""
        self.forget(client_id)
        self._expire(client.seen_at_ms, room_for=1)
        labels: Labels = "grpc", client.language, client.version
        connected = self._producers
        if client.client_type not in _PRODUCERS:
            labels = "grpc", "pop", client.group, client.language, client.version
            connected = self._consumers
        self._clients[client_id] = client, connected, connected.add(labels)

    def forget(self, client_id: str) -> None:
        """Forget a client that says it ends."""
        known = self._clients.pop(client_id, None)
        if known is not None:
            _, connected, labels = known
            connected.remove(labels)

    def _expire(self, now_ms: int, *, room_for: int = 0) -> None:
        for _ in range(min(EXPIRED_A_TURN, len(self._clients))):
            client_id, (oldest, _, _) = next(iter(self._clients.items()))
            is_silent = now_ms - oldest.seen_at_ms > EXPIRY_MS
            if not is_silent and len(self._clients) + room_for <= self._clients_max:
                return
            self.forget(client_id)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of connected clients."""
        # Here too: where nobody lives on, nobody's heartbeat forgets the dead.
        self._expire(self._monotonic_ms())
        yield self._producers.gauge(
            "rocketmq_producer_connections",
            "Producers that gave a sign of life within two minutes.",
            _PRODUCER_LABELS,
        )
        yield self._consumers.gauge(
            "rocketmq_consumer_connections",
            "Consumers that gave a sign of life within two minutes.",
            _CONSUMER_LABELS,
        )


@final
class Connected:
    """How many clients there are of each kind, of a bounded number of kinds."""

    def __init__(self) -> None:
        self._counts: Counter[Labels] = Counter()

    def add(self, labels: Labels) -> Labels:
        """Count one more; return under which labels."""
        if labels not in self._counts and len(self._counts) >= LABEL_SETS_MAX:
            # What is not the client's to say stays.
            fixed = sum(value in {"grpc", "pop"} for value in labels[:2])
            labels = (*labels[:fixed], *[OVERFLOW] * (len(labels) - fixed))
        self._counts[labels] += 1
        return labels

    def remove(self, labels: Labels) -> None:
        """Count one less."""
        self._counts[labels] -= 1
        if not self._counts[labels]:
            del self._counts[labels]

    def gauge(self, name: str, documentation: str, label_names: Labels) -> GaugeMetricFamily:
        """Return the counts as a metric."""
        family = GaugeMetricFamily(name, documentation, labels=label_names)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        return family
