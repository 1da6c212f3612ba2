"""Counts of the dead letters of the last hour, from their store times."""

from __future__ import annotations

from typing import Final, NamedTuple, final

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import TopicId
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog, Topic
from tidemill.broker.engine.metadata.settled_letters import DEAD_LETTER_QUEUE
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.time_search import TimeSearch
from tidemill.common.errors import Repairing

HOUR_MS: Final = 3_600_000


class _First(NamedTuple):
    """The first dead letter of the last hour, as of the last count."""

    offset: int  # the end of the queue: there was none
    stored_at_ms: int  # 0: unknown, there was none


@final
class RecentLetters:
    """Counts dead letters, and remembers the first one of the hour for each group.

    Most counts read nothing. If the remembered one is too old, a search by time finds the next.
    """

    def __init__(self, catalog: Catalog, store: MessageStore) -> None:
        self._catalog = catalog
        self._store = store
        self._firsts: dict[TopicId, _First] = {}  # by dead-letter topic
        self.searches = 0  # by time, in this process

    def count(self, topic: Topic, now_ms: int) -> int:
        """Return how many stored messages of a topic became dead letters in the last hour.

        Raises LookupError if the topic was deleted, and Repairing.
        """
        if topic.id not in self._catalog.topics:
            raise LookupError(f"topic {topic.name} with id {topic.id} was deleted")
        queue = self._catalog.queue(topic.id, DEAD_LETTER_QUEUE)
        try:
            first = self._first(topic, queue, now_ms - HOUR_MS)
        except BlockFileDamaged as error:
            raise Repairing from error
        return queue.max_offset - first.offset

    def _first(self, topic: Topic, queue: ConsumeQueue, since_ms: int) -> _First:
        """Return the first dead letter since a time."""
        known = self._firsts.get(topic.id)
        if known is not None and queue.min_offset <= known.offset <= queue.max_offset:
            if known.offset == queue.max_offset:
                return known
            if not known.stored_at_ms:
                # It was stored after the last count.
                known = self._remember(topic, queue, known.offset)
            if known.stored_at_ms >= since_ms:
                return known
        search = TimeSearch(self._store, [queue], since_ms, falls=self._catalog.clock_falls)
        while search.step():
            pass
        self.searches += 1
        return self._remember(topic, queue, max(search.offsets[0], queue.min_offset))

    def _remember(self, topic: Topic, queue: ConsumeQueue, offset: int) -> _First:
        stored_at_ms = 0
        if offset < queue.max_offset:
            _, stored_at_ms = self._store.stored_at(queue, offset)
        found = self._firsts[topic.id] = _First(offset, stored_at_ms)
        return found

    def forget_deleted(self) -> None:
        """Forget the topics that were deleted."""
        topics = self._catalog.topics
        self._firsts = {id_: one for id_, one in self._firsts.items() if id_ in topics}
