"""The producers with a telemetry stream at this proxy, and the topics of each.

Brokers choose among them the producer that gets the check of a half message (ADR 0085). The topics
of a producer come from its settings and from the half messages that it has sent. A client may open
a stream minutes before it sends its settings there. Until then it counts as a producer if it sends
half messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.common.errors import ServiceError
from tidemill.proxy.shares import Shares
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.aio.misuse_log import MisuseLog

if TYPE_CHECKING:
    from tidemill.message.client_key import ClientKey
    from tidemill.proxy.clients.telemetry_streams import TelemetrySink

# Pairs of a stream and a topic: 20 MB. A user or address gets at most as much as is free.
PAIRS_MAX: Final = 100_000
SENT_TOPICS_MAX: Final = 256  # of one client, besides the topics in its settings
REPORTED_AT_ONCE: Final = 500  # producers in one message of the first report


class _SilentStream(NamedTuple):
    """What is known of a stream before its settings."""

    check: Callable[[str], None]
    sharer: str


@final
class _Producer:
    """One client with the topics of its streams, and those of its half messages."""

    def __init__(self, sharer: str) -> None:
        self.sharer = sharer
        self.streams: dict[TelemetrySink, frozenset[str]] = {}  # the newest last
        self.sent: dict[str, None] = {}
        self.check: Callable[[str], None]

    @property
    def topics(self) -> set[str]:
        """All topics that it publishes."""
        return set(self.sent).union(*self.streams.values())


@final
class Publishers:
    """The producers by client, and the followers of their changes."""

    def __init__(self) -> None:
        self._producers: dict[ClientKey, _Producer] = {}
        # Streams without settings; most of them for the first milliseconds.
        self._silent: dict[ClientKey, dict[TelemetrySink, _SilentStream]] = {}
        self._followers: list[Callable[[pb.ProducerReport], None]] = []
        self._shares = Shares(PAIRS_MAX)
        self._misuse = MisuseLog()

    @contextlib.contextmanager
    def open(
        self,
        client: ClientKey,
        stream: TelemetrySink,
        check: Callable[[str], None],
        *,
        sharer: str = "",
    ) -> Iterator[None]:
        """Register a stream until the block ends; the arguments are those of `announce`."""
        self._silent.setdefault(client, {})[stream] = _SilentStream(check, sharer)
        try:
            yield
        finally:
            self.exclude(client, stream)
            self._end(client, stream)

    def exclude(self, client: ClientKey, stream: TelemetrySink) -> None:
        """Send no checks to a stream without settings: it ends, or a consumer opened it."""
        silent = self._silent.get(client, {})
        silent.pop(stream, None)
        if not silent:
            self._silent.pop(client, None)

    def announce(
        self,
        client: ClientKey,
        stream: TelemetrySink,
        topics: Iterable[str],
        check: Callable[[str], None],
        *,
        sharer: str = "",
    ) -> None:
        """Replace the topics of a stream. `check` raises if the client may not publish a topic.

        Topics beyond the share of the user or address are left out.
        """
        self.exclude(client, stream)
        producer = self._producers.get(client)
        if producer is None:
            producer = self._producers[client] = _Producer(sharer)
        before = producer.topics
        self._release(producer, len(producer.streams.pop(stream, ())))
        producer.streams[stream] = frozenset(self._take(producer, topics))
        producer.check = check
        self._report(client, before)

    def note_sent(self, client: ClientKey, topic: str) -> None:
        """Note that a client with a stream has sent a half message to a topic."""
        for stream, (check, sharer) in list(self._silent.get(client, {}).items()):
            self.announce(client, stream, (), check, sharer=sharer)
        producer = self._producers.get(client)
        if producer is None or topic in producer.sent or topic in producer.topics:
            return
        before = producer.topics
        if len(producer.sent) >= SENT_TOPICS_MAX:
            del producer.sent[next(iter(producer.sent))]
            self._release(producer, 1)
        producer.sent.update(dict.fromkeys(self._take(producer, [topic])))
        self._report(client, before)

    def stream_of(self, client: ClientKey, topic: str) -> TelemetrySink | None:
        """Return the stream that gets the checks of a topic.

        None: the client does not publish the topic here, or lost its right.
        """
        producer = self._producers.get(client)
        if producer is None:
            return None
        try:
            producer.check(topic)
        except ServiceError:
            return None
        streams = [one for one, topics in producer.streams.items() if topic in topics]
        if not streams and topic in producer.sent:
            streams = list(producer.streams)
        return streams[-1] if streams else None

    def _take(self, producer: _Producer, topics: Iterable[str]) -> list[str]:
        taken = []
        for topic in topics:
            if not self._shares.has_room(producer.sharer):
                self._misuse.report(
                    "producers",
                    peer=producer.sharer,
                    reason=f"more than {PAIRS_MAX} topics of producers; checks do not reach all",
                    event="producer without checks",
                )
                break
            self._shares.take(producer.sharer)
            taken.append(topic)
        return taken

    def _release(self, producer: _Producer, count: int) -> None:
        for _ in range(count):
            self._shares.give_back(producer.sharer)

    def _end(self, client: ClientKey, stream: TelemetrySink) -> None:
        producer = self._producers.get(client)
        if producer is None or stream not in producer.streams:
            return
        before = producer.topics
        self._release(producer, len(producer.streams.pop(stream)))
        if not producer.streams:
            self._release(producer, len(producer.sent))
            del self._producers[client]
        self._report(client, before)

    # ------------------------------------------------------------ reports

    @contextlib.contextmanager
    def followed(self, write: Callable[[pb.ProducerReport], None]) -> Iterator[None]:
        """Report all producers now, and each change until the block ends."""
        report = pb.ProducerReport()
        for client in self._producers:
            self._add(report, client)
            if len(report.producers) >= REPORTED_AT_ONCE:
                write(report)
                report = pb.ProducerReport()
        if report.producers:
            write(report)
        self._followers.append(write)
        try:
            yield
        finally:
            self._followers.remove(write)

    def _report(self, client: ClientKey, before: set[str]) -> None:
        producer = self._producers.get(client)
        if (set() if producer is None else producer.topics) == before:
            return
        report = pb.ProducerReport()
        self._add(report, client)
        for write in self._followers:
            write(report)

    def _add(self, report: pb.ProducerReport, client: ClientKey) -> None:
        producer = self._producers.get(client)
        topics = [] if producer is None else sorted(producer.topics)
        report.producers.add(client_id=client.client_id, owner=client.owner, topics=topics)
