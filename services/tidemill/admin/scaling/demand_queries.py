"""Queries of demand to all broker groups. A demand always includes all of them (ADR 0028, 0037).

A query counts timers before it reads the progress. So a timer that fires in between is counted
twice, but never missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, TypeVar, final

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import UNKNOWN_ERRORS, BrokerAnswers, BrokerGroupClient, Brokers
from tidemill.admin.scaling.demand import Demand, demand_of, topics_begun
from tidemill.admin.scaling.shared_answer import SharedAnswer
from tidemill.admin.scaling.trigger import DemandQuery
from tidemill.common.errors import BrokerGroupUnreachable, Conflict, Overloaded, TopicNotFound
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

QUERIES_MAX: Final = 256  # different queries; above it, raise Overloaded
QUERY_IDLE_S: Final = 60.0  # an unused query is dropped after this time
HORIZONS_MAX: Final = 64  # the limit of a broker per count; people use round numbers
# The pause after a count of all timers is twenty times as long as the count. So a broker spends at
# most a twentieth of its time on it, for any number of timers.
PAUSE_FACTOR: Final = 20

T = TypeVar("T")

# By horizon in seconds and topic: timers that are due within the horizon, at all broker groups.
DueCounts = Mapping[int, Mapping[str, int]]


@final
class DemandQueries:
    """The current queries of all autoscalers, and their cached answers."""

    def __init__(self, brokers: Brokers, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._brokers = brokers
        self._now_s = now_s
        self._queries: dict[DemandQuery, SharedAnswer[Demand]] = {}
        self._tasks: asyncio.TaskGroup
        self._due: SharedAnswer[DueCounts]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve queries until the block ends."""
        async with asyncio.TaskGroup() as self._tasks:
            self._due = SharedAnswer(
                self._count_due, self._tasks, now_s=self._now_s, pause_factor=PAUSE_FACTOR
            )
            yield

    async def of(self, query: DemandQuery) -> Demand:
        """Return the demand, which is at most some seconds old.

        Raises BrokerGroupUnreachable or another UnavailableError if a part is unknown,
        GroupNotFound, TopicNotFound, Conflict for a query without a topic if the group has not read
        any, and Overloaded if there are too many different queries.
        """
        shared = self._queries.get(query)
        if shared is None:
            self._make_room(query)
            shared = SharedAnswer(lambda: self._measure(query), self._tasks, now_s=self._now_s)
            self._queries[query] = shared
        return await shared.get()

    def _make_room(self, query: DemandQuery) -> None:
        """Drop unused queries. Raises Overloaded if too many remain."""
        idle_s = self._now_s() - QUERY_IDLE_S
        for known in [each for each, shared in self._queries.items() if shared.used_at_s < idle_s]:
            del self._queries[known]
        if len(self._queries) >= QUERIES_MAX:
            raise Overloaded(
                f"{QUERIES_MAX} different triggers are in use already; use fewer, or retry after"
                f" {QUERY_IDLE_S:g} s"
            )
        if len(self._horizons | {query.horizon_s}) > HORIZONS_MAX:
            raise Overloaded(
                f"{HORIZONS_MAX} different horizons are in use already; use the same horizon for"
                " several triggers"
            )

    @property
    def _horizons(self) -> set[int]:
        return {query.horizon_s for query in self._queries}

    # ------------------------------------------------------------ calls

    async def _measure(self, query: DemandQuery) -> Demand:
        scheduled = await self._scheduled(query.horizon_s)
        answers = await self._brokers.call_all(
            calls.GET_GROUP_PROGRESS, pb.GetGroupProgressRequest(name=query.group)
        )
        found = dict(_complete(answers).answers)
        begun = {broker: topics_begun(progress) for broker, progress in found.items()}
        topics = [query.topic] if query.topic else sorted(set().union(*begun.values()))
        if not topics:
            # The demand would be 0 forever: no consumer would start, so none would read a topic.
            raise Conflict(f"group {query.group!r} has not read any topic yet: name its topic")
        from_latest = next(iter(found.values())).group.start_from_latest
        unread = await self._unread(topics, begun)
        if not unread and not any(topics[0] in read for read in begun.values()):
            raise TopicNotFound(f"there is no topic {query.topic!r}")
        return demand_of(topics, list(found.values()), {} if from_latest else unread, scheduled)

    async def _scheduled(self, horizon_s: int) -> Mapping[str, int]:
        counts = await self._due.get()
        # A finished count and a count in progress may have begun before this query.
        for _ in range(2):
            if horizon_s not in counts:
                counts = await self._due.ask()
        if horizon_s not in counts:
            raise Overloaded("other queries displaced this one; try again")
        return counts[horizon_s]

    async def _count_due(self) -> DueCounts:
        horizons = sorted(self._horizons)
        within_ms = [horizon_s * 1000 for horizon_s in horizons]
        answers = _complete(
            await self._brokers.call_all(
                calls.COUNT_TIMERS, pb.CountTimersRequest(within_ms=within_ms)
            )
        )
        sums: dict[int, Counter[str]] = {horizon_s: Counter() for horizon_s in horizons}
        for _, reply in answers.answers:
            for found in reply.topics:
                for horizon_s, count in zip(horizons, found.counts, strict=True):
                    sums[horizon_s][found.topic] += count
        return sums

    async def _unread(self, topics: list[str], begun: Mapping[str, set[str]]) -> Mapping[str, int]:
        """Return by topic the messages at broker groups where the group has not read it yet.

        A topic without such a broker group is missing.
        """

        async def ask(member: BrokerGroupClient) -> Mapping[str, int]:
            return {
                topic: count
                for topic in topics
                if topic not in begun.get(member.name, ())
                and (count := await _find_stored_count(member, topic)) is not None
            }

        # Usually the group reads all topics everywhere, so no call is needed.
        names = {member.name for member in await self._brokers.members()}
        if all(topic in begun.get(name, ()) for topic in topics for name in names):
            return {}
        sums: dict[str, int] = {}
        for _, counts in _complete(await self._brokers.ask_all(ask)).answers:
            for topic, count in counts.items():
                sums[topic] = sums.get(topic, 0) + count
        return sums


async def _find_stored_count(member: BrokerGroupClient, topic: str) -> int | None:
    """Return the number of messages of a topic at a broker group; None if it has no such topic."""
    try:
        status: pb.TopicStatus = await member.client.call(
            calls.GET_TOPIC_STATUS, pb.GetTopicStatusRequest(name=topic)
        )
    except UNKNOWN_ERRORS:
        return None
    return sum(queue.max_offset - queue.min_offset for queue in status.queues)


def _complete(answers: BrokerAnswers[T]) -> BrokerAnswers[T]:
    """Return the answers of all broker groups. Raises BrokerGroupUnreachable if one is missing."""
    if answers.unreachable:
        raise BrokerGroupUnreachable(
            f"{', '.join(answers.unreachable)} cannot be reached, so the demand is unknown; retry"
            " later"
        )
    return answers
