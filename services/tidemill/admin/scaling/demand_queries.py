"""Queries of demand to all broker groups. A demand always includes all of them (ADR 0028, 0037).

A query uses a count of timers that is some seconds old, and reads the progress afterwards. Timers
that have been delivered in between count as ready, and no longer as scheduled. A timer that became
due in the last second is counted twice, but none is missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeVar, final

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import BrokerAnswers, Brokers
from tidemill.admin.scaling.demand import Demand, DueCounts, demand_of, topics_of
from tidemill.admin.scaling.shared_answer import SharedAnswer
from tidemill.admin.scaling.trigger import DemandQuery
from tidemill.common.clock import SystemClock
from tidemill.common.errors import (
    BrokerGroupUnreachable,
    Conflict,
    GroupNotFound,
    Overloaded,
    TopicNotFound,
)
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

QUERIES_MAX: Final = 256  # different queries; above it, raise Overloaded
QUERY_IDLE_S: Final = 60.0  # an unused query is dropped after this time
HORIZONS_MAX: Final = 64  # the limit of a broker per count; people use round numbers
# The pause after a count of all timers is twenty times as long as the count. So a broker spends at
# most a twentieth of its time on it, for any number of timers.
PAUSE_FACTOR: Final = 20

# Ages of a count, in seconds: a broker with ten million timers is counted each eight seconds. An
# older count repeats timers that have been delivered after the last of these ages.
AGES_S: Final = tuple(range(1, 17))

T = TypeVar("T")


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
        try:
            return await shared.get()
        except (GroupNotFound, TopicNotFound, Conflict):
            # Triggers of groups that do not exist must not use up the places of others.
            if self._queries.get(query) is shared:
                del self._queries[query]
            raise

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
        due = await self._due_counts(query.horizon_s)
        named = [query.topic] if query.topic else []
        answers = await self._brokers.call_all(
            calls.GET_GROUP_PROGRESS, pb.GetGroupProgressRequest(name=query.group, topics=named)
        )
        found = dict(_complete(answers).answers)
        known = topics_of(found.values())
        if query.topic and query.topic not in known:
            raise TopicNotFound(f"there is no topic {query.topic!r}")
        topics = named or sorted(known)
        if not topics:
            # The demand would be 0 forever: no consumer would start, so none would read a topic.
            raise Conflict(f"group {query.group!r} has not read any topic yet: name its topic")
        demand = demand_of(topics, found, due, query.horizon_s, now_s=self._now_s())
        # Consumers of a paused group get nothing, so only deliveries in flight need them.
        now_ms = SystemClock().wall_ms()
        is_paused = any(each.group.pause.until_ms > now_ms for each in found.values())
        return demand.paused() if is_paused else demand

    async def _due_counts(self, horizon_s: int) -> DueCounts:
        due = await self._due.get()
        # A finished count and a count in progress may have begun before this query.
        for _ in range(2):
            if horizon_s not in due.within_s:
                due = await self._due.ask()
        if horizon_s not in due.within_s:
            raise Overloaded("other queries displaced this one; try again")
        return due

    async def _count_due(self) -> DueCounts:
        within_s = sorted(self._horizons.union(AGES_S))
        within_ms = [s * 1000 for s in within_s]
        begun_at_s = self._now_s()
        answers = _complete(
            await self._brokers.call_all(
                calls.COUNT_TIMERS, pb.CountTimersRequest(within_ms=within_ms)
            )
        )
        counts = {
            broker: {count.topic: count for count in reply.topics}
            for broker, reply in answers.answers
        }
        return DueCounts(within_s, begun_at_s, counts)


def _complete(answers: BrokerAnswers[T]) -> BrokerAnswers[T]:
    """Return the answers of all broker groups. Raises BrokerGroupUnreachable if one is missing."""
    if answers.unreachable:
        raise BrokerGroupUnreachable(
            f"{', '.join(answers.unreachable)} cannot be reached, so the demand is unknown; retry"
            " later"
        )
    return answers
