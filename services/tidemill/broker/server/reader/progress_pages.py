"""Pages of the progress of consumer groups, queue by queue, unread queues included."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.pop.progress_index import ProgressKey

QUEUES_A_SLICE: Final = 256  # one to two milliseconds
QUEUES_A_TOPIC: Final = 2  # the cost of finding the queues of one topic, in queues
QUEUES_A_PAGE: Final = 4_096  # up to 350 bytes each


@final
class ProgressPage:
    """A page in progress, ordered by the ids of group, topic and queue."""

    def __init__(self, group_id: int, topic_id: int, queue_id: int) -> None:
        """Begin with a queue of a group, or with the next one after it."""
        self._first = group_id, topic_id, queue_id
        self._group_ids: deque[GroupId] = deque()  # not begun yet
        # Of the current group: the topics not begun yet, and the queues of the current topic.
        self._topics: deque[_TopicQueues] = deque()
        self._queues: deque[ProgressKey] = deque()
        self._is_popped = False  # whether the group pops the current topic
        self.reply = pb.ListProgressReply()

    def add_groups(self, group_ids: Iterable[GroupId]) -> None:
        """Add the ids of the requested groups."""
        self._group_ids.extend(sorted(id_ for id_ in group_ids if id_ >= self._first[0]))

    def step(self, engine: Engine) -> bool:
        """Do one slice; return True if there is more to do."""
        budget = QUEUES_A_SLICE
        while budget > 0:
            if self._queues:
                key = self._queues[0]
                if len(self.reply.items) >= QUEUES_A_PAGE:
                    self.reply.cursor = ".".join(map(str, key))
                    return False
                self._queues.popleft()
                self._describe(engine, key)
                budget -= 1
            elif self._topics:
                self._begin_topic()
                budget -= QUEUES_A_TOPIC
            elif self._group_ids:
                self._begin_group(engine)
                budget -= QUEUES_A_TOPIC * (1 + len(self._topics))
            else:
                return False
        return True

    def _begin_topic(self) -> None:
        topic_id, numbers, self._is_popped = self._topics.popleft()
        keys = ((GroupId(self._first[0]), topic_id, number) for number in numbers)
        self._queues.extend(key for key in keys if key >= self._first)

    def _begin_group(self, engine: Engine) -> None:
        group_id = self._group_ids.popleft()
        if group_id != self._first[0]:
            self._first = group_id, 0, 0
        self._topics.extend(_topics_of(engine, group_id))

    def _describe(self, engine: Engine, key: ProgressKey) -> None:
        group_id, topic_id, queue_id = key
        group, topic = engine.catalog.groups.get(group_id), engine.catalog.topics.get(topic_id)
        if group is None or topic is None or not engine.catalog.is_alive(topic_id):
            return  # Deleted between two slices.
        pulled = engine.catalog.pull_offsets.find(key)
        item = pb.Progress(
            consumer_group=group.name,
            topic=topic.name,
            queue_id=queue_id,
            pull_offset=-1 if pulled is None else pulled,
        )
        found = engine.inspection.find_progress(key) if self._is_popped else None
        if found is None:
            queue = engine.catalog.queue(topic_id, queue_id)
            item.min_offset, item.max_offset = queue.min_offset, queue.max_offset
            item.commit_offset = item.pop_offset = -1
        else:
            item.topic, item.is_retry = found.topic, found.is_retry
            item.min_offset, item.max_offset = found.min_offset, found.max_offset
            item.commit_offset, item.pop_offset = found.consumer_offset, found.pop_offset
            item.oldest_unacked_at_ms = found.oldest_unacked_at_ms
            item.ready_count, item.in_flight_count = found.ready_count, found.in_flight_count
        self.reply.items.append(item)


class _TopicQueues(NamedTuple):
    """The queues of a topic that a group reads: all if it pops, else those that it pulls."""

    topic_id: TopicId
    queues: Iterable[QueueId]
    is_popped: bool


def _topics_of(engine: Engine, group_id: GroupId) -> list[_TopicQueues]:
    catalog = engine.catalog
    group = catalog.groups.get(group_id)
    if group is None:
        return []
    topics: dict[TopicId, _TopicQueues] = {}
    pulled = sorted(catalog.pull_offsets.of_group(group_id))
    for topic_id, keys in itertools.groupby(pulled, key=lambda key: key[1]):
        topics[topic_id] = _TopicQueues(topic_id, [key[2] for key in keys], is_popped=False)
    for topic_id in engine.inspection.topics_read(group):
        queues = map(QueueId, range(catalog.topics[topic_id].queues))
        topics[topic_id] = _TopicQueues(topic_id, queues, is_popped=True)
    return sorted(topics.values())
