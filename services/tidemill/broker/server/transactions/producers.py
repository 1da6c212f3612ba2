"""The producers with a telemetry stream at a proxy, by topic, as the proxies report them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeAlias, final

from tidemill.message.client_key import ClientKey
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


class CheckingProxy(Protocol):
    """A proxy that asks its clients for decisions."""

    async def ask(self, question: pb.ProxyQuestion, timeout_ms: int) -> pb.ProxyAnswer:
        """Return the proxy's answer. Raises ProxyUnreachable, Overloaded."""
        ...


class ProducerStream(NamedTuple):
    """One producer at one proxy."""

    proxy: CheckingProxy
    client: ClientKey


# By producer, so that one that is removed and added again comes last.
_OfTopic: TypeAlias = dict[ProducerStream, None]


@final
class Producers:
    """All reported producers."""

    def __init__(self) -> None:
        self._of_topic: dict[str, _OfTopic] = {}
        self._topics: dict[CheckingProxy, dict[ClientKey, frozenset[str]]] = {}
        # Called with a topic that has a producer after it had none.
        self.on_first: Callable[[str], None] = _ignore

    def __contains__(self, topic: str) -> bool:
        return topic in self._of_topic

    def note(self, proxy: CheckingProxy, report: pb.ProducerReport) -> None:
        """Apply a report of a proxy."""
        known = self._topics.setdefault(proxy, {})
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
                is_first = topic not in self._of_topic
                self._of_topic.setdefault(topic, {})[producer] = None
                if is_first:
                    self.on_first(topic)

    def forget(self, proxy: CheckingProxy) -> None:
        """Remove all producers of a disconnected proxy."""
        for client, topics in self._topics.pop(proxy, {}).items():
            for topic in topics:
                self._remove(topic, ProducerStream(proxy, client))

    def _remove(self, topic: str, producer: ProducerStream) -> None:
        of_topic = self._of_topic[topic]
        del of_topic[producer]
        if not of_topic:
            del self._of_topic[topic]

    def in_turn(self, topic: str, sender: ClientKey) -> Iterator[ProducerStream]:
        """Yield the producers to try for a check: first the sender, then the others in turn.

        Each call begins with a different one of the others.
        """
        of_topic = self._of_topic.get(topic, {})
        senders = [one for one in of_topic if one.client == sender]
        yield from senders
        others = [one for one in of_topic if one.client != sender]
        if others:
            first = others[0]
            del of_topic[first]
            of_topic[first] = None
        yield from others


def _ignore(_topic: str) -> None:
    pass
