"""Which clients there are: what each told of itself, and when it last gave a sign of life.

Nothing here decides how a call is answered: a client may call a proxy that has just started, and
another client may never announce itself. It is for people, and for metrics.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final

from prometheus_client.core import GaugeMetricFamily

from tidemill.common.metrics import OVERFLOW, Labels
from tidemill.proxy.clients.telemetry_streams import TelemetryStreams
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
# Settings as clients have sent them, which is some hundred bytes each. Of one client, so that few
# strangers do not take all of it, and of all clients; beyond it settings are not kept.
SETTINGS_BYTES_MAX: Final = 16 << 10
ALL_SETTINGS_BYTES_MAX: Final = 16 << 20
# Looked at in a turn of the loop by who lists clients: half a millisecond. Settings are parsed to
# see whether they name a topic, which takes a millisecond for this much of the shortest names.
LISTED_A_TURN: Final = 256
PARSED_BYTES_A_TURN: Final = 8 << 10

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
    address: str = ""  # where it called from


@dataclass(slots=True)
class _Known:
    """A client, and what is kept beside what it said last."""

    client: Client
    connected: Connected
    labels: Labels
    since_ms: int
    settings: bytes


class Listed(NamedTuple):
    """A client as a list shows it."""

    client_id: str
    client: Client
    since_ms: int  # monotonic
    settings: bytes  # v2.Settings; empty where none are kept


class Page(NamedTuple):
    """Some clients, by their ids, and whether there are more behind them."""

    clients: list[Listed]
    has_more: bool


class Clients:
    """The clients of this proxy, the one silent longest first."""

    def __init__(self, *, clients_max: int, monotonic_ms: Callable[[], int]) -> None:
        self._clients: OrderedDict[str, _Known] = OrderedDict()
        self._clients_max = clients_max
        self._monotonic_ms = monotonic_ms
        self._settings_bytes = 0  # of all
        self._producers, self._consumers = Connected(), Connected()
        self.streams = TelemetryStreams()  # over which clients are spoken to

    def __len__(self) -> int:
        return len(self._clients)

    def seen(self, client_id: str, client: Client, settings: bytes | None = None) -> None:
        """Note a sign of life, and the settings that came with it; None: those of before hold."""
        before = self._clients.get(client_id)
        since_ms = client.seen_at_ms if before is None else before.since_ms
        if settings is None:
            settings = b"" if before is None else before.settings
        self.forget(client_id)
        self._expire(client.seen_at_ms, room_for=1)
        labels: Labels = "grpc", client.language, client.version
        connected = self._producers
        if client.client_type not in _PRODUCERS:
            labels = "grpc", "pop", client.group, client.language, client.version
            connected = self._consumers
        if not self._has_room(len(settings)):
            settings = b""
        self._settings_bytes += len(settings)
        self._clients[client_id] = _Known(
            client, connected, connected.add(labels), since_ms, settings
        )

    def _has_room(self, settings_bytes: int) -> bool:
        all_bytes = self._settings_bytes + settings_bytes
        return settings_bytes <= SETTINGS_BYTES_MAX and all_bytes <= ALL_SETTINGS_BYTES_MAX

    def forget(self, client_id: str) -> None:
        """Forget a client that says it ends."""
        known = self._clients.pop(client_id, None)
        if known is not None:
            self._settings_bytes -= len(known.settings)
            known.connected.remove(known.labels)

    def find(self, client_id: str) -> Listed | None:
        """Return a client that gave a sign of life within two minutes."""
        known = self._clients.get(client_id)
        if known is None or self._monotonic_ms() - known.client.seen_at_ms > EXPIRY_MS:
            return None
        return Listed(client_id, known.client, known.since_ms, known.settings)

    def list_slices(
        self, *, group: str, topic: str, after: str, clients_max: int
    ) -> Generator[None, None, Page]:
        """Return the first clients by id behind `after`, in slices: of a group, of a topic."""
        kept: dict[str, Listed] = {}
        end: str | None = None  # from where on an id is of no use: there are enough below it
        named = topic.encode()
        looked_at, parsed_bytes = 0, 0
        # A millisecond for 100,000; in their order it would be seven.
        for client_id in list(dict.keys(self._clients)):
            if looked_at >= LISTED_A_TURN or parsed_bytes >= PARSED_BYTES_A_TURN:
                looked_at, parsed_bytes = 0, 0
                yield
            looked_at += 1
            if client_id <= after or (end is not None and client_id >= end):
                continue
            # Who is silent takes no place in the page: whoever is behind it would be left out.
            one = self.find(client_id)
            if one is None or (group and one.client.group != group):
                continue
            if topic:
                if named not in one.settings:
                    continue  # Most of them, without parsing.
                parsed_bytes += len(one.settings)
                if not _names_topic(one.settings, topic):
                    continue
            kept[client_id] = one
            if len(kept) > clients_max + LISTED_A_TURN:
                kept = {first: kept[first] for first in sorted(kept)[: clients_max + 1]}
                end = next(reversed(kept))
        page = [kept[client_id] for client_id in sorted(kept)[:clients_max]]
        return Page(page, len(kept) > clients_max)

    def _expire(self, now_ms: int, *, room_for: int = 0) -> None:
        for _ in range(min(EXPIRED_A_TURN, len(self._clients))):
            client_id, oldest = next(iter(self._clients.items()))
            is_silent = now_ms - oldest.client.seen_at_ms > EXPIRY_MS
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


def _names_topic(settings: bytes, topic: str) -> bool:
    """Whether a client publishes to a topic, or subscribes to it."""
    parsed = v2.Settings.FromString(settings)
    return any(
        each.name == topic
        for each in (
            *parsed.publishing.topics,
            *(entry.topic for entry in parsed.subscription.subscriptions),
        )
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
