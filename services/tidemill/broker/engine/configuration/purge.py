"""Purge: an operator declares the messages of a topic dead, all or those before a time.

A purge moves the begin of queues (TRIM records). Before that, EXPIRE records move the groups past
the messages that they never popped, as retention does. Deliveries in flight stay: their acks
succeed, and at their deadlines the messages expire. Delayed messages are not in the queues yet.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, final

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.layout.trim import TrimmedQueue, TrimReason
from tidemill.broker.engine.metadata.catalog import Catalog, Topic
from tidemill.broker.engine.queue_entries import ENTRIES_A_SLICE, read_entries, size_of
from tidemill.broker.engine.queue_trims import QueueTrims
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.common.errors import Conflict

PURGE_LEVEL = 2  # of TRIM records
QUEUE_COST = 64  # of an empty queue, in entries


class PurgedQueue(NamedTuple):
    """A queue of a purge."""

    topic_id: TopicId
    queue_id: QueueId
    low: int | None  # queue offset of the first message that stays; None: no message stays


@final
class PurgeCounting:
    """The count of the messages that a purge removes, and of their bytes in the log.

    Each step takes a round, because a topic may have a hundred million messages.
    """

    def __init__(self, queues: list[tuple[ConsumeQueue, int]]) -> None:
        self.messages = 0
        self.size_bytes = 0  # messages with damaged queue entries add nothing
        self._queues = queues  # with the offset at which the purge ends
        self._offset = 0  # next entry of the last queue

    def step(self) -> bool:
        """Count a part; return True while more remains."""
        allowance = ENTRIES_A_SLICE
        while self._queues and allowance > 0:
            queue, low = self._queues[-1]
            # Retention or another purge may go on between two steps.
            offset = max(self._offset, int(queue.min_offset))
            count = min(allowance, low - offset)
            if count > 0:
                self.messages += count
                self.size_bytes += _size_of(queue, offset, count)
                self._offset = offset + count
            if self._offset >= low or count <= 0:
                self._queues.pop()
                self._offset = 0
            allowance -= max(count, QUEUE_COST)
        return bool(self._queues)


@final
class Purge:
    """The purges of one broker."""

    def __init__(self, catalog: Catalog, trims: QueueTrims) -> None:
        self._catalog = catalog
        self._trims = trims

    def check_level(self) -> None:
        """Raise Conflict if the log may not have TRIM records yet."""
        level = self._catalog.feature_level
        if level < PURGE_LEVEL:
            raise Conflict(
                f"broker group {self._catalog.broker_name} has feature level {level}, and a purge"
                f" needs {PURGE_LEVEL}: upgrade all its replicas, and remove feature_level_max"
            )

    def topics_of(self, topic: Topic, *, with_retries: bool) -> list[Topic]:
        """Return a topic and, on request, the retry topics of all groups for it.

        Raises Conflict for a retry topic.
        """
        if topic.retry_of is not None:
            raise Conflict("retries are purged with their topic: purge it and include the retries")
        retries = self._catalog.retry_topics_for(topic.id) if with_retries else []
        return [topic, *(self._catalog.topics[id_] for id_ in retries)]

    def count(self, queues: Sequence[PurgedQueue]) -> PurgeCounting:
        """Begin to count the messages of a purge."""
        found = [(queue, one) for one in queues if (queue := self._find(one)) is not None]
        return PurgeCounting([(queue, _low_of(queue, one)) for queue, one in found])

    def purge(self, queues: Sequence[PurgedQueue], now_ms: int) -> Generator[None, None, None]:
        """Remove messages. Raises Conflict."""
        self.check_level()
        readers = yield from self._trims.find_readers({one.topic_id for one in queues})
        for one in queues:
            queue = self._find(one)
            if queue is None:
                continue
            # The low of this moment: later messages stay, also those sent during the purge.
            low = _low_of(queue, one)
            row = TrimmedQueue(one.topic_id, one.queue_id, TrimReason.PURGE, low)
            yield from self._trims.trim([row], readers, now_ms)

    def _find(self, one: PurgedQueue) -> ConsumeQueue | None:
        """Return a queue; None if its topic was deleted between two slices."""
        if not self._catalog.is_alive(one.topic_id):
            return None
        return self._catalog.queues.get((one.topic_id, one.queue_id))


def _low_of(queue: ConsumeQueue, one: PurgedQueue) -> int:
    return queue.max_offset if one.low is None else min(one.low, queue.max_offset)


def _size_of(queue: ConsumeQueue, offset: int, count: int) -> int:
    try:
        return size_of(read_entries(queue, offset, count))
    except BlockFileDamaged:
        return 0
