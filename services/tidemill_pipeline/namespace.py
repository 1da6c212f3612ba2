"""The namespace of a pipeline: full names in requests, bare names in rows.

Without a namespace, requests and rows have full names, as `shop%orders`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from tidemill.message.namespaces import full_name, namespace_of, without_namespace
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX, NAMESPACE_SEPARATOR
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb


@final
class NamespaceNames:
    """The names of topics and consumer groups of one namespace."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def full(self, name: str) -> str:
        """Return the full name of a topic or consumer group."""
        return full_name(self._namespace, name)

    def bare(self, full: str) -> str:
        """Return the name in rows."""
        return without_namespace(self._namespace, full)

    def have(self, full: str) -> bool:
        """Return whether a name is of the namespace. Without a namespace, every name is."""
        return not self._namespace or namespace_of(full) == self._namespace

    def glob(self, pattern: str) -> str:
        """Return a wildcard pattern with all full names that a regular expression may match."""
        if not pattern:
            return ""
        if "|" in pattern:
            return "*"  # One wildcard cannot stand for alternatives.
        prefix = DEAD_LETTER_TOPIC_PREFIX if pattern.startswith(DEAD_LETTER_TOPIC_PREFIX) else ""
        return (
            f"{prefix}{self._namespace}{NAMESPACE_SEPARATOR}*" if self._namespace else f"{prefix}*"
        )

    def items(
        self, items: Iterable[pb.Pending | pb.InFlight | pb.Progress]
    ) -> list[pb.Pending | pb.InFlight | pb.Progress]:
        """Return the items of a listing that are of the namespace, with bare names."""
        if not self._namespace:
            return list(items)
        own = []
        for each in items:
            owner = each.topic if isinstance(each, pb.Pending) else each.consumer_group
            if self.have(owner):
                each.topic = self.bare(each.topic)
                if not isinstance(each, pb.Pending):
                    each.consumer_group = self.bare(each.consumer_group)
                own.append(each)
        return own

    def shorten_events(self, answer: pb.ReadEventsReply) -> None:
        """Drop the events of other namespaces, and give the others bare names.

        An event without a topic and without a consumer group belongs to all namespaces.
        """
        if not self._namespace:
            return
        own = []
        for event in answer.events:
            owner = event.origin_topic or event.topic or event.consumer_group
            if not owner or self.have(owner):
                event.topic = self.bare(event.topic)
                event.origin_topic = self.bare(event.origin_topic)
                event.consumer_group = self.bare(event.consumer_group)
                own.append(event)
        del answer.events[:]
        answer.events.extend(own)
