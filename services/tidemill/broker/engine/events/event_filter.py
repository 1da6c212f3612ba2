"""The filter of a read of events."""

from __future__ import annotations

from typing import final

from tidemill.broker.engine.events.event import EventKind, EventQuery
from tidemill.broker.engine.events.lookup import KnownMessage, first_topic


@final
class EventFilter:
    """The conditions of a query. An empty set matches everything."""

    __slots__ = ("_kinds", "_topics", "is_all", "message_id")

    def __init__(self, query: EventQuery) -> None:
        self._topics = query.topics
        self._kinds = query.kinds
        self.message_id = query.message_id
        self.is_all = not (query.kinds or query.topics or query.message_id)

    def wants(self, *kinds: EventKind) -> bool:
        """Return whether events of one of these kinds may match."""
        return not self._kinds or any(kind in self._kinds for kind in kinds)

    def matches(self, kind: int, topic: str, known: KnownMessage) -> bool:
        """Return whether an event of a message matches."""
        if self._kinds and kind not in self._kinds:
            return False
        if self.message_id and known.message_id != self.message_id:
            return False
        return not self._topics or first_topic(topic, known) in self._topics
