"""The producers with a telemetry stream at a proxy, by topic, as the proxies report them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, NamedTuple, Protocol, TypeAlias, final

from tidemill.message.client_key import ClientKey
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

# Producers that are looked at for one check, besides the sender: there may be 100,000.
LOOKED_AT_MAX: Final = 16


class CheckingProxy(Protocol):
    """A proxy that asks its clients for decisions."""

    async def ask(self, question: pb.ProxyQuestion, timeout_ms: int) -> pb.ProxyAnswer:
        """Return the proxy's answer. Raises ProxyUnreachable, Overloaded."""
        ...


class ProducerStream(NamedTuple):
    """One producer at one proxy."""

    proxy: CheckingProxy
    client: ClientKey


# In the order of their turns.
_OfTopic: TypeAlias = dict[ProducerStream, None]


@final
class Producers:
    """All reported producers."""

    def __init__(self) -> None:
        self._of_topic: dict[str, _OfTopic] = {}
        self._topics: dict[CheckingProxy, dict[ClientKey, frozenset[str]]] = {}
        # Called after each report of new topics, and with a producer that has left a proxy.
        self.on_added: Callable[[], None] = _ignore
        self.on_removed: Callable[[ProducerStream], None] = _ignore_producer

    def __contains__(self, topic: str) -> bool:
        return topic in self._of_topic

    def note(self, proxy: CheckingProxy, report: pb.ProducerReport) -> None:
        """Apply a report of a proxy."""
        known = self._topics.setdefault(proxy, {})
        has_new = False
        for reported in report.producers:
            client = ClientKey(reported.client_id, reported.owner)
            topics = frozenset(reported.topics)
            before = known.pop(client, frozenset())
            if topics:
                known[client] = topics
            producer = ProducerStream(proxy, client)
            for topic in before - topics:
                self._remove(topic, producer)
            for topic in topics - before:
                self._of_topic.setdefault(topic, {})[producer] = None
                has_new = True
            if not topics:
                self.on_removed(producer)
        if has_new:
            self.on_added()

    def forget(self, proxy: CheckingProxy) -> None:
        """Remove all producers of a disconnected proxy."""
        for client, topics in self._topics.pop(proxy, {}).items():
            producer = ProducerStream(proxy, client)
            for topic in topics:
                self._remove(topic, producer)
            self.on_removed(producer)

    def _remove(self, topic: str, producer: ProducerStream) -> None:
        of_topic = self._of_topic[topic]
        del of_topic[producer]
        if not of_topic:
            del self._of_topic[topic]

    def in_turn(self, topic: str, sender: ClientKey) -> Iterator[ProducerStream]:
        """Yield some producers to try for a check: first the sender, then others in turn.

        Each one that is yielded becomes the last in turn.
        """
        of_topic = self._of_topic.get(topic, {})
        for proxy in self._topics:
            if (mine := ProducerStream(proxy, sender)) in of_topic:
                yield mine
        for producer in list(islice(of_topic, LOOKED_AT_MAX)):
            if producer.client != sender:
                del of_topic[producer]
                of_topic[producer] = None
                yield producer


def _ignore() -> None:
    pass


def _ignore_producer(_producer: ProducerStream) -> None:
    pass
