"""The clients of this proxy: what each reports about itself, and its last sign of life.

This serves operators and metrics. It does not affect the answers to calls, because a client may
call a proxy that has just started, or never announce itself.
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
# Clients removed per turn of the event loop, in about two microseconds each. If many clients fall
# silent together, one heartbeat or scrape must not remove all of them.
EXPIRED_A_TURN = 1_000
# Per gauge. Clients choose these labels; further label sets are counted together.
LABEL_SETS_MAX = 1_000
# Stored settings, usually some hundred bytes each: of one client, so that few clients cannot use
# all memory, and of all clients. Settings above these limits are not stored.
SETTINGS_BYTES_MAX: Final = 16 << 10
ALL_SETTINGS_BYTES_MAX: Final = 16 << 20
# Clients that a listing inspects per turn of the event loop: half a millisecond. Parsing this many
# bytes of settings, to find a topic, takes a millisecond for the shortest names.
LISTED_A_TURN: Final = 256
PARSED_BYTES_A_TURN: Final = 8 << 10

_PRODUCERS = frozenset({v2.PRODUCER})
_PRODUCER_LABELS = ("protocol_type", "language", "version")
_CONSUMER_LABELS = ("protocol_type", "consume_mode", "consumer_group", "language", "version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One client instance, as it reports itself."""

    client_type: int
    group: str
    language: str
    version: str
    seen_at_ms: int  # monotonic
    address: str = ""  # from which it called


@dataclass(slots=True)
class _ClientRecord:
    """A client, with its settings and the gauge that counts it."""

    client: Client
    gauge: ClientGauge
    labels: Labels
    since_ms: int
    settings: bytes


class ClientListing(NamedTuple):
    """A client as a listing shows it."""

    client_id: str
    client: Client
    since_ms: int  # monotonic
    settings: bytes  # v2.Settings; empty if not stored


class ClientPage(NamedTuple):
    """Some clients in the order of their ids."""

    clients: list[ClientListing]
    has_more: bool


class Clients:
    """The clients of this proxy, the one with the oldest sign of life first."""

    def __init__(self, *, clients_max: int, monotonic_ms: Callable[[], int]) -> None:
        self._clients: OrderedDict[str, _ClientRecord] = OrderedDict()
        self._clients_max = clients_max
        self._monotonic_ms = monotonic_ms
        self._settings_bytes = 0  # of all clients
        self._producers, self._consumers = ClientGauge(), ClientGauge()
        self.streams = TelemetryStreams()

    def __len__(self) -> int:
        return len(self._clients)

    def record(self, client_id: str, client: Client, settings: bytes | None = None) -> None:
        """Record a sign of life and new settings; with None, keep the earlier settings."""
        before = self._clients.get(client_id)
        since_ms = client.seen_at_ms if before is None else before.since_ms
        if settings is None:
            settings = b"" if before is None else before.settings
        self.forget(client_id)
        self._expire(client.seen_at_ms, room_for=1)
        labels: Labels = "grpc", client.language, client.version
        gauge = self._producers
        if client.client_type not in _PRODUCERS:
            labels = "grpc", "pop", client.group, client.language, client.version
            gauge = self._consumers
        if not self._has_room(len(settings)):
            settings = b""
        self._settings_bytes += len(settings)
        self._clients[client_id] = _ClientRecord(
            client, gauge, gauge.add(labels), since_ms, settings
        )

    def _has_room(self, settings_bytes: int) -> bool:
        all_bytes = self._settings_bytes + settings_bytes
        return settings_bytes <= SETTINGS_BYTES_MAX and all_bytes <= ALL_SETTINGS_BYTES_MAX

    def forget(self, client_id: str) -> None:
        """Remove a client."""
        record = self._clients.pop(client_id, None)
        if record is not None:
            self._settings_bytes -= len(record.settings)
            record.gauge.remove(record.labels)

    def find(self, client_id: str) -> ClientListing | None:
        """Return a client that gave a sign of life within two minutes."""
        record = self._clients.get(client_id)
        if record is None or self._monotonic_ms() - record.client.seen_at_ms > EXPIRY_MS:
            return None
        return ClientListing(client_id, record.client, record.since_ms, record.settings)

    def list_slices(
        self, *, group: str, topic: str, after: str, clients_max: int
    ) -> Generator[None, None, ClientPage]:
        """Return the first clients by id after `after`, in slices.

        `group` and `topic` are filters if not empty.
        """
        listings: dict[str, ClientListing] = {}
        end: str | None = None  # first id that cannot be on the page
        topic_bytes = topic.encode()
        inspected, parsed_bytes = 0, 0
        # dict.keys takes a millisecond for 100,000 clients, iteration in order seven.
        for client_id in list(dict.keys(self._clients)):
            if inspected >= LISTED_A_TURN or parsed_bytes >= PARSED_BYTES_A_TURN:
                inspected, parsed_bytes = 0, 0
                yield
            inspected += 1
            if client_id <= after or (end is not None and client_id >= end):
                continue
            # An expired client must not displace another one from the page.
            listing = self.find(client_id)
            if listing is None or (group and listing.client.group != group):
                continue
            if topic:
                if topic_bytes not in listing.settings:
                    continue  # This skips most clients without parsing.
                parsed_bytes += len(listing.settings)
                if not _names_topic(listing.settings, topic):
                    continue
            listings[client_id] = listing
            if len(listings) > clients_max + LISTED_A_TURN:
                listings = {key: listings[key] for key in sorted(listings)[: clients_max + 1]}
                end = next(reversed(listings))
        page = [listings[key] for key in sorted(listings)[:clients_max]]
        return ClientPage(page, len(listings) > clients_max)

    def _expire(self, now_ms: int, *, room_for: int = 0) -> None:
        for _ in range(min(EXPIRED_A_TURN, len(self._clients))):
            client_id, oldest = next(iter(self._clients.items()))
            is_silent = now_ms - oldest.client.seen_at_ms > EXPIRY_MS
            if not is_silent and len(self._clients) + room_for <= self._clients_max:
                return
            self.forget(client_id)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of connected clients."""
        # Without heartbeats of other clients, only a scrape removes expired ones.
        self._expire(self._monotonic_ms())
        yield self._producers.family(
            "rocketmq_producer_connections",
            "Producers that gave a sign of life within two minutes.",
            _PRODUCER_LABELS,
        )
        yield self._consumers.family(
            "rocketmq_consumer_connections",
            "Consumers that gave a sign of life within two minutes.",
            _CONSUMER_LABELS,
        )


def _names_topic(settings: bytes, topic: str) -> bool:
    """Whether a client publishes or subscribes to a topic."""
    parsed = v2.Settings.FromString(settings)
    return any(
        each.name == topic
        for each in (
            *parsed.publishing.topics,
            *(entry.topic for entry in parsed.subscription.subscriptions),
        )
    )


@final
class ClientGauge:
    """Number of clients by label set; the number of label sets is limited."""

    def __init__(self) -> None:
        self._counts: Counter[Labels] = Counter()

    def add(self, labels: Labels) -> Labels:
        """Count one more client. Return its labels in the gauge."""
        if labels not in self._counts and len(self._counts) >= LABEL_SETS_MAX:
            # Labels that the client does not choose stay.
            fixed = sum(value in {"grpc", "pop"} for value in labels[:2])
            labels = (*labels[:fixed], *[OVERFLOW] * (len(labels) - fixed))
        self._counts[labels] += 1
        return labels

    def remove(self, labels: Labels) -> None:
        """Count one client less."""
        self._counts[labels] -= 1
        if not self._counts[labels]:
            del self._counts[labels]

    def family(self, name: str, documentation: str, label_names: Labels) -> GaugeMetricFamily:
        """Return the counts as a metric."""
        family = GaugeMetricFamily(name, documentation, labels=label_names)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        return family
