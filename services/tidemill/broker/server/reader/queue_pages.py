"""Pages of queues: their offsets and their sizes in the log."""

from __future__ import annotations

import fnmatch
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Final, final

from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.metadata.dedup_policy import DedupKeySource
from tidemill.broker.engine.tally import Allowance
from tidemill.broker.server.reader.log_id import log_id_of
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX, HIDDEN_TOPIC_PREFIX
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.layout.numbers import TopicId
    from tidemill.broker.engine.metadata.catalog import Topic

QUEUES_A_PAGE: Final = 4_096  # some 80 bytes each
TOPICS_A_SLICE: Final = 1_024  # compared with the requested names
QUEUES_A_SLICE: Final = 256  # fewer if their sizes must be estimated
ENTRIES_A_SLICE: Final = 4_096  # queue entries read for these estimates: about a millisecond


@final
class QueuePage:
    """A page of queues in progress."""

    def __init__(self, is_requested: Callable[[Topic], bool], topic_id: int, queue_id: int) -> None:
        """Begin with a queue of a topic, or with the next one after it."""
        self._is_requested = is_requested
        self._first = topic_id, queue_id
        self._topic_ids: deque[TopicId] = deque()  # not filtered yet
        self._queues: deque[tuple[Topic, int]] = deque()  # requested, and not described yet
        self.reply = pb.BrokerGroupQueues()

    def add_topics(self, topic_ids: Iterable[TopicId]) -> None:
        """Add the ids of topics that may be requested."""
        self._topic_ids.extend(sorted(id_ for id_ in topic_ids if id_ >= self._first[0]))

    def step(self, engine: Engine) -> bool:
        """Do one slice; return True if there is more to do."""
        if not self._queues:
            return self._choose(engine)
        allowance = Allowance(engine.tally, items=ENTRIES_A_SLICE)
        budget = min(QUEUES_A_SLICE, len(self._queues))
        while budget and not allowance.is_spent:
            topic, number = self._queues[0]
            if len(self.reply.queues) >= QUEUES_A_PAGE:
                self.reply.cursor = f"{topic.id}.{number}"
                return False
            self._queues.popleft()
            budget -= 1
            if engine.catalog.is_alive(topic.id):
                self._describe(engine, topic, QueueId(number))
        return True

    def _choose(self, engine: Engine) -> bool:
        topic_id, queue_id = self._first
        for _ in range(min(TOPICS_A_SLICE, len(self._topic_ids))):
            topic = engine.catalog.topics.get(self._topic_ids.popleft())
            if topic is None or not self._is_requested(topic):
                continue
            first = queue_id if topic.id == topic_id else 0
            self._queues.extend((topic, number) for number in range(first, topic.queues))
            if len(self._queues) >= QUEUES_A_PAGE:
                break
        return bool(self._queues or self._topic_ids)

    def _describe(self, engine: Engine, topic: Topic, number: QueueId) -> None:
        queue = engine.catalog.queue(topic.id, number)
        self.reply.queues.add(
            topic=topic.name,
            topic_id=topic.id,
            queue_id=number,
            min_offset=queue.min_offset,
            max_offset=queue.max_offset,
            bytes=engine.inspection.log_bytes(queue),
            dedup_window_ms=_window_of_properties(topic),
        )


def _window_of_properties(topic: Topic) -> int:
    """Return the window of dedup keys that come from the property; 0 without such keys."""
    policy = topic.dedup
    if policy is None or policy.key_from is DedupKeySource.MESSAGE_ID:
        return 0
    return policy.window_ms


def describe_log(engine: Engine, reply: pb.BrokerGroupQueues) -> None:
    """Add the name of the broker group, and the id and extent of its log."""
    reply.broker = engine.catalog.broker_name
    reply.log_min, reply.log_end = engine.log.state_floor, engine.log.committed_offset
    engine.events.record_starts.note(engine.log.committed_offset)
    reply.log_id = log_id_of(engine)


def topic_filter(names: Collection[str], pattern: str) -> Callable[[Topic], bool]:
    """Return a predicate for the topics with one of these names or a name that fits `pattern`."""
    names = frozenset(names)
    # fnmatch patterns do not backtrack: the time is proportional to the length of the name.
    matcher = re.compile(fnmatch.translate(pattern))

    def is_requested(topic: Topic) -> bool:
        if topic.name.startswith(HIDDEN_TOPIC_PREFIX):
            return False
        if topic.name in names:
            return True
        if topic.is_system and not topic.name.startswith(DEAD_LETTER_TOPIC_PREFIX):
            return False
        return bool(pattern) and matcher.match(topic.name) is not None

    return is_requested
