"""Purge: an operator declares the messages of a topic dead, all or those before a time.

A purge moves the begin of queues (TRIM records). Before that, EXPIRE records move the groups past
the messages that they never popped, as retention does. Deliveries in flight stay: their acks
succeed, and at their deadlines the messages expire. Delayed messages are not in the queues yet.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, final

import numpy as np

from tidemill.broker.engine.fold import Fold
from tidemill.broker.engine.layout import expiry
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.expiry import ExpiredRange, Expiry
from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.layout.queue_entry import SIZE
from tidemill.broker.engine.layout.trim import Trim, TrimmedQueue, TrimReason
from tidemill.broker.engine.metadata.catalog import Catalog, Topic
from tidemill.broker.engine.pop.acks import RoundAcks
from tidemill.broker.engine.pop.queue_queries import find_expired
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.common.errors import Conflict

PURGE_LEVEL = 2  # of TRIM records
ENTRIES_A_SLICE = 16_384  # a millisecond to copy and add up
QUEUE_COST = 64  # of an empty queue, in entries
GROUPS_A_SLICE = 1_024
ENTRY_TYPE = np.dtype([("log_offset", ">i8"), ("size", ">u4"), ("tag_hash", ">i8")])
assert ENTRY_TYPE.itemsize == SIZE, "the same entries"


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

    def __init__(self, catalog: Catalog, pops: PopState, acks: RoundAcks, fold: Fold) -> None:
        self._catalog = catalog
        self._pops = pops
        self._acks = acks
        self._fold = fold

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
        topic_ids = {one.topic_id for one in queues}
        readers: dict[TopicId, list[GroupId]] = {id_: [] for id_ in topic_ids}
        for n, group_id in enumerate(list(self._catalog.groups)):
            for topic_id in topic_ids & self._pops.index.topic_ids_of(group_id):
                readers[topic_id].append(group_id)
            if n % GROUPS_A_SLICE == 0:
                yield
        for one in queues:
            queue = self._find(one)
            if queue is None:
                continue
            # The low of this moment: later messages stay, also those sent during the purge.
            low = _low_of(queue, one)
            if low <= queue.min_offset:
                continue
            self._expire(one, readers[one.topic_id], low, now_ms)
            trimmed = TrimmedQueue(one.topic_id, one.queue_id, TrimReason.PURGE, low)
            self._fold.append(Trim([trimmed]), now_ms)
            yield

    def _find(self, one: PurgedQueue) -> ConsumeQueue | None:
        """Return a queue; None if its topic was deleted between two slices."""
        if not self._catalog.is_alive(one.topic_id):
            return None
        return self._catalog.queues.get((one.topic_id, one.queue_id))

    def _expire(
        self, one: PurgedQueue, group_ids: Sequence[GroupId], low: int, now_ms: int
    ) -> None:
        """Move the groups past the messages that they never popped."""
        # Gathered acks are applied but not logged. They must precede the records below.
        self._acks.record(now_ms)
        ranges: list[ExpiredRange] = []
        for group_id in group_ids:
            if group_id in self._catalog.groups:
                progress = self._pops.progress_of(group_id, one.topic_id, one.queue_id)
                ranges += find_expired(self._pops, progress, low)
        for begin in range(0, len(ranges), expiry.ROWS_MAX):
            part = ranges[begin : begin + expiry.ROWS_MAX]
            self._fold.append(Expiry(part), now_ms)
            for each in part:
                progress = self._pops.progress[each.group_id, each.topic_id, each.queue_id]
                self._pops.count("expired", progress, each.end - each.begin)


def _low_of(queue: ConsumeQueue, one: PurgedQueue) -> int:
    return queue.max_offset if one.low is None else min(one.low, queue.max_offset)


def _size_of(queue: ConsumeQueue, offset: int, count: int) -> int:
    try:
        entries = np.frombuffer(queue.data(offset, count), dtype=ENTRY_TYPE)
    except BlockFileDamaged:
        return 0
    return int(entries["size"].sum(dtype=np.int64))
