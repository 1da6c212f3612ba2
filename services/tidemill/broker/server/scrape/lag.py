"""Consumer progress for the metrics, read in rounds at a scrape, at most once per second."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.metrics.lag import LAG_AGE_MS_MAX, Lag, TopicLag
from tidemill.common.errors import UnavailableError

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.pop.progress_index import ProgressKey
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn
    from tidemill.common.clock import Clock

LAG_WAIT_S = 1  # after it a scrape shows the previous values, and the next scrape continues
PROGRESS_A_ROUND = 256  # queues of groups read in one round: one to two milliseconds


class LagReader:
    """Brings `Lag` up to date; awaited before each scrape."""

    def __init__(self, rounds: Rounds, lag: Lag, clock: Clock) -> None:
        self._rounds = rounds
        self._lag = lag
        self._clock = clock
        self._read_at_ms = -LAG_AGE_MS_MAX
        # The current pass: queues not read yet, and the values so far.
        self._unseen: list[ProgressKey] = []
        self._seen_topics: set[tuple[GroupId, TopicId]] = set()
        self._found: dict[tuple[GroupId, TopicId, bool], TopicLag] = {}
        self._in_flight_count = 0

    async def __call__(self) -> None:
        """Read the progress of all groups, unless the values are younger than a second."""
        now_ms = self._clock.monotonic_ms()
        if not self._unseen:
            if now_ms - self._read_at_ms < LAG_AGE_MS_MAX:
                return
            self._read_at_ms = now_ms
        try:
            async with asyncio.timeout(LAG_WAIT_S):
                if not self._unseen:
                    self._unseen, self._found = await self._rounds.call(_queues), {}
                    self._seen_topics, self._in_flight_count = set(), 0
                while self._unseen:
                    await self._rounds.call(self._look_at_some)
        except (UnavailableError, TimeoutError):
            return  # Draining, a stalled disk, or many queues: the previous values stay.
        self._lag.of_topics = self._found
        self._lag.in_flight_count = self._in_flight_count
        self._lag.now_ms = self._clock.wall_ms()

    def _look_at_some(self, engine: Engine, _turn: Turn) -> None:
        some = self._unseen[-PROGRESS_A_ROUND:]
        del self._unseen[-PROGRESS_A_ROUND:]
        for key in some:
            group_id, topic_id, _ = key
            queue = engine.inspection.find_progress(key)
            if queue is None:
                continue
            if (group_id, topic_id) not in self._seen_topics:
                self._seen_topics.add((group_id, topic_id))
                # Queues that were added to the topic after the group's last pop.
                self._unseen += [
                    (group_id, topic_id, QueueId(number))
                    for number in range(engine.catalog.topics[topic_id].queues)
                    if (group_id, topic_id, number) not in engine.state.progress
                ]
            named_id = engine.state.index.peek(key).named_topic_id
            place = group_id, named_id, queue.is_retry
            self._found.setdefault(place, TopicLag()).add(queue)
            self._in_flight_count += queue.in_flight_count


def _queues(engine: Engine, _turn: Turn) -> list[ProgressKey]:
    return list(engine.state.progress)
