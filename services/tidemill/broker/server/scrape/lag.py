"""Consumer progress for scrapes and for GetActivity, read in rounds, at most once per second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.metrics.lag import LAG_AGE_MS_MAX, Lag, TopicLag
from tidemill.common.errors import QueryFailed, UnavailableError

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.catalog import Topic
    from tidemill.broker.engine.pop.progress_index import ProgressKey
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn
    from tidemill.common.clock import Clock

LAG_WAIT_S = 1  # after it a scrape shows the previous values, and the next scrape continues
# The period of passes, as a multiple of the processor time of a pass: they take at most a twentieth
# of a core, for any number of queues.
PASS_COST_FACTOR = 20
# Queues of groups read in one round, and groups begun: one to two milliseconds.
PROGRESS_A_ROUND = 256


class LagReader:
    """Brings `Lag` up to date; awaited before each scrape and each GetActivity."""

    def __init__(self, rounds: Rounds, lag: Lag, clock: Clock) -> None:
        self._rounds = rounds
        self.lag = lag
        self._clock = clock
        self._read_at_ms = -LAG_AGE_MS_MAX
        self._period_ms: float = LAG_AGE_MS_MAX
        self._one_by_one = asyncio.Lock()  # The callers share a pass.
        # The current pass: queues not read yet, and the values so far.
        self._unseen: Iterator[ProgressKey | None] | None = None
        self._found: dict[tuple[GroupId, TopicId, bool], TopicLag] = {}
        self._levels: dict[tuple[GroupId, TopicId, int], TopicLag] = {}
        self._topics_of_group: dict[GroupId, list[tuple[TopicId, bool]]] = {}
        self._in_flight_count = 0
        self._cost_s = 0.0

    async def __call__(self) -> None:
        """Read the progress of all groups, unless the values are younger than a second."""
        try:
            async with asyncio.timeout(LAG_WAIT_S), self._one_by_one:
                if self._unseen is None:
                    now_ms = self._clock.monotonic_ms()
                    if now_ms - self._read_at_ms < self._period_ms:
                        return
                    self._read_at_ms = now_ms
                    self._begin()
                while await self._rounds.read(self._look_at_some):
                    pass
                self._end()
        except QueryFailed:
            self._unseen = None  # A defect: the next scrape begins again.
        except (UnavailableError, TimeoutError):
            return  # Draining, a stalled disk, or many queues: the previous values stay.

    def _begin(self) -> None:
        engine = self._rounds.engine
        self._unseen = queues_of_groups(engine)
        self._found, self._levels = {}, {}
        self._topics_of_group = {group_id: [] for group_id in engine.catalog.groups}
        self._in_flight_count, self._cost_s = 0, 0.0

    def _end(self) -> None:
        self._unseen = None
        self._period_ms = max(LAG_AGE_MS_MAX, self._cost_s * 1_000 * PASS_COST_FACTOR)
        lag = self.lag
        lag.of_topics, lag.of_levels = self._found, self._levels
        lag.topics_of_group = self._topics_of_group
        lag.in_flight_count = self._in_flight_count
        lag.now_ms = self._clock.wall_ms()

    def _look_at_some(self, engine: Engine, _turn: Turn) -> bool:
        """Add some queues to the pass; return whether queues may remain."""
        assert self._unseen is not None, "a pass has begun"
        began_s = time.thread_time()
        some = list(islice(self._unseen, PROGRESS_A_ROUND))
        for key in filter(None, some):
            queue = engine.inspection.find_progress(key)
            if queue is None:
                continue
            named_id = engine.state.index.peek(key).named_topic_id
            place = key[0], named_id, queue.is_retry
            if place not in self._found:
                self._found[place] = TopicLag()
                self._topics_of_group.setdefault(key[0], []).append(place[1:])
            self._found[place].add(queue)
            named = engine.catalog.topics.get(named_id)
            if named is not None and named.type is TopicType.PRIORITY:
                level = key[0], named_id, queue.queue_id
                self._levels.setdefault(level, TopicLag()).add(queue)
            self._in_flight_count += queue.in_flight_count
        self._cost_s += time.thread_time() - began_s
        return len(some) == PROGRESS_A_ROUND


def queues_of_groups(
    engine: Engine, named_id: TopicId | None = None
) -> Iterator[ProgressKey | None]:
    """Yield the queues that groups are given, and None for each group. Groups may be deleted.

    With a topic, yield only the queues of the topic and of its retry topics.
    """
    for group_id in list(engine.catalog.groups):
        yield None
        group = engine.catalog.groups.get(group_id)
        if group is not None:
            for topic_id in engine.inspection.topics_given(group):
                topic = engine.catalog.topics.get(topic_id)
                if named_id is not None and topic is not None:
                    topic = topic if named_id in {topic_id, _retried_id(topic)} else None
                for number in range(topic.queues if topic is not None else 0):
                    yield group_id, topic_id, QueueId(number)


def _retried_id(topic: Topic) -> TopicId | None:
    """Return the topic of a retry topic; None if the topic is not a retry topic."""
    return topic.retry_of[1] if topic.retry_of is not None else None
