"""The topics that the producers with a telemetry stream at this proxy publish.

Brokers choose among them the producer that gets the check of a half message (ADR 0085).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final, final

from tidemill.common.errors import ServiceError
from tidemill.message.client_key import ClientKey
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

# Pairs of a producer and a topic: 20 MB. Further producers get no checks through this proxy.
PAIRS_MAX: Final = 100_000
REPORTED_AT_ONCE: Final = 500  # producers in one message of the first report


@final
class Publishers:
    """The producers by client, and the followers of their changes."""

    def __init__(self) -> None:
        # By client and stream: the topics that this stream has announced.
        self._streams: dict[ClientKey, dict[object, set[str]]] = {}
        self._checks: dict[ClientKey, Callable[[str], None]] = {}
        self._followers: list[Callable[[pb.ProducerReport], None]] = []
        self._pair_count = 0

    @contextlib.contextmanager
    def open(self, client: ClientKey, stream: object) -> Iterator[None]:
        """Forget what a stream announces when the block ends."""
        try:
            yield
        finally:
            self._end(client, stream)

    def announce(
        self, client: ClientKey, stream: object, topics: Iterable[str], check: Callable[[str], None]
    ) -> None:
        """Replace the topics of a stream. `check` raises if the client may not publish a topic."""
        before = self._topics_of(client)
        announced = self._streams.get(client, {}).get(stream, set())
        new = set(topics)
        if self._pair_count + len(new) - len(announced) > PAIRS_MAX:
            return
        self._pair_count += len(new) - len(announced)
        self._streams.setdefault(client, {})[stream] = new
        self._checks[client] = check
        self._report(client, before)

    def note_sent(self, client: ClientKey, topic: str) -> None:
        """Note that a client with a stream has sent a half message to a topic."""
        streams = self._streams.get(client)
        if not streams or self._pair_count >= PAIRS_MAX:
            return
        before = self._topics_of(client)
        if topic not in before:
            next(reversed(streams.values())).add(topic)
            self._pair_count += 1
            self._report(client, before)

    def may_publish(self, client: ClientKey, topic: str) -> bool:
        """Whether a client publishes a topic, and still has the right to."""
        if topic not in self._topics_of(client):
            return False
        try:
            self._checks[client](topic)
        except ServiceError:
            return False
        return True

    def _end(self, client: ClientKey, stream: object) -> None:
        streams = self._streams.get(client)
        if streams is None or stream not in streams:
            return
        before = self._topics_of(client)
        self._pair_count -= len(streams.pop(stream))
        if not streams:
            del self._streams[client], self._checks[client]
        self._report(client, before)

    def _topics_of(self, client: ClientKey) -> set[str]:
        return set().union(*self._streams.get(client, {}).values())

    # ------------------------------------------------------------ reports

    @contextlib.contextmanager
    def followed(self, write: Callable[[pb.ProducerReport], None]) -> Iterator[None]:
        """Report all producers now, and each change until the block ends."""
        report = pb.ProducerReport()
        for client in self._streams:
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
        if self._topics_of(client) == before:
            return
        report = pb.ProducerReport()
        self._add(report, client)
        for write in self._followers:
            write(report)

    def _add(self, report: pb.ProducerReport, client: ClientKey) -> None:
        topics = sorted(self._topics_of(client))
        report.producers.add(client_id=client.client_id, owner=client.owner, topics=topics)
