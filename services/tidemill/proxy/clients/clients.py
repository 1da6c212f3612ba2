"""The clients of this proxy: what each reports about itself, and its last sign of life.

This serves operators and metrics. It does not affect the answers to calls, because a client may
call a proxy that has just started, or never announce itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final

from prometheus_client.core import GaugeMetricFamily

from tidemill.common.metrics import OVERFLOW, Labels
from tidemill.common.reserves import has_little, unreserved
from tidemill.message.client_key import NO_OWNER, ClientKey
from tidemill.message.namespaces import namespace_of
from tidemill.message.resource_names import NAMESPACE_SEPARATOR
from tidemill.message.resources import resource_name
from tidemill.proxy.clients.publishers import Publishers
from tidemill.proxy.clients.telemetry_streams import TelemetryStreams
from tidemill.proxy.shares import sharer_of
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

if TYPE_CHECKING:
    from prometheus_client.core import Metric

EXPIRY_MS = 120_000  # clients give a sign of life every 10 s, some every 30 s
# Clients removed per turn of the event loop, in about two microseconds each. If many clients fall
# silent together, one heartbeat or scrape must not remove all of them.
EXPIRED_A_TURN = 1_000
# Clients of a connection that ended, per turn of the event loop, in about ten microseconds each. A
# client has a connection of its own, but a gateway may put the calls of all its clients on one.
FORGOTTEN_A_TURN: Final = 100
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
    user: str = ""  # name; empty if the call had none


@dataclass(slots=True)
class _ClientRecord:
    """A client, with its settings and the gauge that counts it."""

    client: Client
    gauge: ClientGauge
    labels: Labels
    since_ms: int
    settings: bytes
    connections: set[Hashable]  # that presented the client's id
    sharer: str
    loss: int = 0  # number of the loss of its last connection


class LostClients(NamedTuple):
    """Clients that have no connection left."""

    loss: int  # larger than those of earlier losses
    clients: list[ClientKey]


class ClientListing(NamedTuple):
    """A client as a listing shows it."""

    key: ClientKey
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
        self._clients: OrderedDict[ClientKey, _ClientRecord] = OrderedDict()
        self._clients_max = clients_max
        self._monotonic_ms = monotonic_ms
        self._settings_bytes = 0  # of all clients
        # Clients by user or address, the one with the oldest sign of life first, and the bytes of
        # their settings.
        self._of_sharer: dict[str, OrderedDict[ClientKey, None]] = {}
        self._settings_bytes_of: Counter[str] = Counter()
        self._presented: dict[Hashable, set[ClientKey]] = {}  # by connection
        # Of the clients with an owner, by client id. Without users there are none.
        self._owners: dict[str, set[int]] = {}
        self._losses = 0
        self._producers, self._consumers = ClientGauge(), ClientGauge()
        self.streams = TelemetryStreams()
        self.publishers = Publishers()

    def __len__(self) -> int:
        return len(self._clients)

    def record(
        self, key: ClientKey, client: Client, settings: bytes | None = None, *, connection: Hashable
    ) -> None:
        """Record a sign of life and new settings; with None, keep the earlier settings.

        `connection` is the key of the connection on which the client presented its id.
        """
        before = self._clients.get(key)
        since_ms = client.seen_at_ms if before is None else before.since_ms
        connections = {connection} if before is None else {*before.connections, connection}
        if settings is None:
            settings = b"" if before is None else before.settings
        sharer = sharer_of(client.user, client.address)
        self.forget(key)
        self._expire(client.seen_at_ms, room_for=1, sharer=sharer)
        labels: Labels = "grpc", client.language, client.version
        gauge = self._producers
        if client.client_type not in _PRODUCERS:
            labels = "grpc", "pop", client.group, client.language, client.version
            gauge = self._consumers
        if not self._has_room(len(settings), sharer):
            settings = b""
        self._settings_bytes += len(settings)
        self._settings_bytes_of[sharer] += len(settings)
        self._of_sharer.setdefault(sharer, OrderedDict())[key] = None
        if key.owner != NO_OWNER:
            self._owners.setdefault(key.client_id, set()).add(key.owner)
        self._clients[key] = _ClientRecord(
            client, gauge, gauge.add(labels), since_ms, settings, connections, sharer
        )
        for each in connections:
            self._presented.setdefault(each, set()).add(key)

    def _has_room(self, settings_bytes: int, sharer: str) -> bool:
        room = unreserved(ALL_SETTINGS_BYTES_MAX)
        if has_little(self._settings_bytes_of[sharer], ALL_SETTINGS_BYTES_MAX):
            room = ALL_SETTINGS_BYTES_MAX
        all_bytes = self._settings_bytes + settings_bytes
        return settings_bytes <= SETTINGS_BYTES_MAX and all_bytes <= room

    def forget(self, key: ClientKey) -> None:
        """Remove a client."""
        record = self._clients.pop(key, None)
        if record is not None:
            self._settings_bytes -= len(record.settings)
            self._settings_bytes_of[record.sharer] -= len(record.settings)
            of_sharer = self._of_sharer[record.sharer]
            del of_sharer[key]
            if not of_sharer:
                del self._of_sharer[record.sharer], self._settings_bytes_of[record.sharer]
            if key.owner != NO_OWNER:
                self._owners[key.client_id].remove(key.owner)
                if not self._owners[key.client_id]:
                    del self._owners[key.client_id]
            record.gauge.remove(record.labels)
            for connection in record.connections:
                presented = self._presented[connection]
                presented.discard(key)
                if not presented:
                    del self._presented[connection]

    def find_presented(self, key: ClientKey, connection: Hashable) -> list[ClientKey]:
        """Return the clients of this key that a connection presented in telemetry or heartbeats.

        There may be two: one with the owner, and one of the time before the owner was known.
        """
        keys = dict.fromkeys((key, ClientKey(key.client_id)))
        presented = self._presented.get(connection, ())
        return [one for one in keys if one in presented]

    def is_lost(self, key: ClientKey, loss: int) -> bool:
        """Return whether a known client has no connection since this loss."""
        record = self._clients.get(key)
        return record is not None and not record.connections and record.loss == loss

    def forget_connection(self, connection: Hashable) -> Iterator[LostClients]:
        """Forget a connection that ended, in slices of FORGOTTEN_A_TURN clients.

        Yield the clients of each slice that have no connection left.
        """
        for _ in range(0, len(self._presented.get(connection, ())), FORGOTTEN_A_TURN):
            presented = self._presented.get(connection, set())
            self._losses += 1
            lost = LostClients(self._losses, [])
            for _ in range(min(len(presented), FORGOTTEN_A_TURN)):
                key = presented.pop()
                record = self._clients[key]
                record.connections.discard(connection)
                if not record.connections:
                    record.loss = lost.loss
                    lost.clients.append(key)
            if not presented:
                self._presented.pop(connection, None)
            yield lost

    def find(self, key: ClientKey) -> ClientListing | None:
        """Return a client that gave a sign of life within two minutes.

        If it has given none since its owner is known, return the one of before.
        """
        record = self._clients.get(key)
        if record is None and key.owner != NO_OWNER:
            key = ClientKey(key.client_id)
            record = self._clients.get(key)
        if record is None or self._monotonic_ms() - record.client.seen_at_ms > EXPIRY_MS:
            return None
        return ClientListing(key, record.client, record.since_ms, record.settings)

    def find_all(self, client_id: str) -> list[ClientListing]:
        """Return the clients with this id of all owners, the newest sign of life first."""
        owners = sorted({NO_OWNER, *self._owners.get(client_id, ())})
        found = [
            self.find(key)
            for owner in owners
            if (key := ClientKey(client_id, owner)) in self._clients
        ]
        return sorted(
            [one for one in found if one is not None], key=lambda one: -one.client.seen_at_ms
        )

    def list_slices(
        self,
        *,
        group: str,
        topic: str,
        after: str,
        clients_max: int,
        namespace: str = "",
        owner: int = NO_OWNER,
    ) -> Generator[None, None, ClientPage]:
        """Return the first clients by id after `after`, in slices.

        `group`, `topic`, `namespace` and `owner` are filters if not empty and not NO_OWNER.
        """
        listings: dict[ClientKey, ClientListing] = {}
        end: str | None = None  # the first id that cannot be on the page
        # The last part of the name: settings have the namespace in a field of its own.
        topic_bytes = topic.rpartition(NAMESPACE_SEPARATOR)[2].encode()
        inspected, parsed_bytes = 0, 0
        # dict.keys takes a millisecond for 100,000 clients, iteration in order seven.
        for key in list(dict.keys(self._clients)):
            if inspected >= LISTED_A_TURN or parsed_bytes >= PARSED_BYTES_A_TURN:
                inspected, parsed_bytes = 0, 0
                yield
            inspected += 1
            if key.client_id <= after or (end is not None and key.client_id >= end):
                continue
            if owner not in {NO_OWNER, key.owner}:
                continue
            # An expired client must not displace another one from the page.
            listing = self.find(key)
            if listing is None or (group and listing.client.group != group):
                continue
            if topic:
                if topic_bytes not in listing.settings:
                    continue  # This skips most clients without parsing.
                parsed_bytes += len(listing.settings)
                if not _names_topic(listing.settings, topic):
                    continue
            if namespace and namespace_of(listing.client.group) != namespace:
                parsed_bytes += len(listing.settings)
                if not _is_of_namespace(listing, namespace):
                    continue
            listings[key] = listing
            if len(listings) > clients_max + LISTED_A_TURN:
                keys = sorted(listings)
                end = keys[clients_max].client_id
                kept = keys[: _whole_ids(keys, clients_max + 1)]
                listings = {one: listings[one] for one in kept}
        keys = sorted(listings)
        end_of_page = _whole_ids(keys, clients_max)
        page = [listings[key] for key in keys[:end_of_page]]
        return ClientPage(page, len(keys) > end_of_page)

    def _expire(self, now_ms: int, *, room_for: int = 0, sharer: str = "") -> None:
        """Forget silent clients, and the oldest one if there are too many others.

        It is one of `sharer`, for whose client there must be room, if it has half of all clients.
        """
        for _ in range(min(EXPIRED_A_TURN, len(self._clients))):
            key, oldest = next(iter(self._clients.items()))
            is_silent = now_ms - oldest.client.seen_at_ms > EXPIRY_MS
            if not is_silent and len(self._clients) + room_for <= self._clients_max:
                return
            of_sharer = self._of_sharer.get(sharer)
            if of_sharer and not is_silent and 2 * len(of_sharer) >= self._clients_max:
                key = next(iter(of_sharer))
            self.forget(key)

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


def _whole_ids(keys: Sequence[ClientKey], count: int) -> int:
    """Return `count`, or more if the clients with the last id go on: a page ends behind an id."""
    while 0 < count < len(keys) and keys[count].client_id == keys[count - 1].client_id:
        count += 1
    return min(count, len(keys))


def _is_of_namespace(listing: ClientListing, namespace: str) -> bool:
    """Whether a client publishes a topic of a namespace."""
    topics = v2.Settings.FromString(listing.settings).publishing.topics
    return any(namespace_of(resource_name(topic).full) == namespace for topic in topics)


def _names_topic(settings: bytes, topic: str) -> bool:
    """Whether a client publishes or subscribes to a topic."""
    parsed = v2.Settings.FromString(settings)
    return any(
        resource_name(each).full == topic
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
