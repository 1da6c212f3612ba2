"""Asking all broker groups how much there is to do; a number lacks no part (ADR 0028, 0037).

Timers are asked for first and progress then: a message that is delivered in between is counted
twice, and never missed.
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

QUESTIONS_MAX: Final = 256  # consumers that are scaled here; beyond it Overloaded
QUESTION_IDLE_S: Final = 60.0  # not asked for so long, a question gives way to another
HORIZONS_MAX: Final = 64  # as many as a broker counts at once; people write round numbers
# After a walk over all timers the next one waits for twenty times as long: at most a twentieth of
# a broker's time is spent on it, however many timers there are.
REST_TIMES: Final = 20

T = TypeVar("T")

# By horizon in seconds: of each topic how many timers are due within, at all broker groups.
DueCounts = Mapping[int, Mapping[str, int]]


@final
class DemandQueries:
    """The questions of all who scale consumers, and their answers."""

    def __init__(self, brokers: Brokers, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._brokers = brokers
        self._now_s = now_s
        self._questions: dict[DemandQuery, SharedAnswer[Demand]] = {}
        self._tasks: asyncio.TaskGroup
        self._due: SharedAnswer[DueCounts]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer until the block ends."""
        async with asyncio.TaskGroup() as self._tasks:
            self._due = SharedAnswer(
                self._count_due, self._tasks, now_s=self._now_s, rest=REST_TIMES
            )
            yield

    async def of(self, question: DemandQuery) -> Demand:
        """Return what there is to do, as of the last moments.

        Raises BrokerGroupUnreachable and the like when a part of it cannot be known, GroupNotFound
        and TopicNotFound, Conflict for a group that has read nothing where no topic is named, and
        Overloaded when too many different questions are asked.
        """
        shared = self._questions.get(question)
        if shared is None:
            self._make_room(question)
            shared = SharedAnswer(lambda: self._measure(question), self._tasks, now_s=self._now_s)
            self._questions[question] = shared
        return await shared.get()

    def _make_room(self, question: DemandQuery) -> None:
        """Forget questions that nobody asks any more. Raises Overloaded where too many are left."""
        idle_s = self._now_s() - QUESTION_IDLE_S
        for known in [
            each for each, shared in self._questions.items() if shared.used_at_s < idle_s
        ]:
            del self._questions[known]
        if len(self._questions) >= QUESTIONS_MAX:
            raise Overloaded(f"{QUESTIONS_MAX} consumers are scaled already")
        if len(self._horizons | {question.horizon_s}) > HORIZONS_MAX:
            raise Overloaded(f"{HORIZONS_MAX} different horizons are in use already")

    @property
    def _horizons(self) -> set[int]:
        return {question.horizon_s for question in self._questions}

    # ------------------------------------------------------------ asking

    async def _measure(self, question: DemandQuery) -> Demand:
        scheduled = await self._scheduled(question.horizon_s)
        answers = await self._brokers.call_all(
            calls.GET_GROUP_PROGRESS, pb.GetGroupProgressRequest(name=question.group)
        )
        found = dict(_whole(answers).answers)
        begun = {broker: topics_begun(progress) for broker, progress in found.items()}
        topics = [question.topic] if question.topic else sorted(set().union(*begun.values()))
        if not topics:
            # None would be the number for ever: without it no consumer starts, and none begins.
            raise Conflict(f"group {question.group!r} has not read anything yet: name its topic")
        from_latest = next(iter(found.values())).group.start_from_latest
        unread = await self._unread(topics, begun)
        if not unread and not any(topics[0] in read for read in begun.values()):
            raise TopicNotFound(f"there is no topic {question.topic!r}")
        return demand_of(topics, list(found.values()), {} if from_latest else unread, scheduled)

    async def _scheduled(self, horizon_s: int) -> Mapping[str, int]:
        counts = await self._due.get()
        # Nobody had asked for it when that count began, nor when the one did that may be under way.
        for _ in range(2):
            if horizon_s not in counts:
                counts = await self._due.ask()
        if horizon_s not in counts:
            raise Overloaded("the question was given up for others; ask again")
        return counts[horizon_s]

    async def _count_due(self) -> DueCounts:
        horizons = sorted(self._horizons)
        within_ms = [horizon_s * 1000 for horizon_s in horizons]
        answers = _whole(
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
        """Return of each topic what lies where the group has not begun to read it.

        A topic that is at no such place is missing.
        """

        async def ask(member: BrokerGroupClient) -> Mapping[str, int]:
            return {
                topic: count
                for topic in topics
                if topic not in begun.get(member.name, ())
                and (count := await _find_stored_count(member, topic)) is not None
            }

        # Usually the group reads everything everywhere, and then nobody is asked.
        names = {member.name for member in await self._brokers.members()}
        if all(topic in begun.get(name, ()) for topic in topics for name in names):
            return {}
        sums: dict[str, int] = {}
        for _, counts in _whole(await self._brokers.ask_all(ask)).answers:
            for topic, count in counts.items():
                sums[topic] = sums.get(topic, 0) + count
        return sums


async def _find_stored_count(member: BrokerGroupClient, topic: str) -> int | None:
    """Return how many messages a topic holds at a broker group; None: it has no such topic."""
    try:
        status: pb.TopicStatus = await member.client.call(
            calls.GET_TOPIC_STATUS, pb.GetTopicStatusRequest(name=topic)
        )
    except UNKNOWN_ERRORS:
        return None
    return sum(queue.max_offset - queue.min_offset for queue in status.queues)


def _whole(answers: BrokerAnswers[T]) -> BrokerAnswers[T]:
    """Return what all have answered. Raises BrokerGroupUnreachable when one has not."""
    if answers.unreachable:
        raise BrokerGroupUnreachable(
            f"{', '.join(answers.unreachable)} cannot be asked: what there is to do is not known"
        )
    return answers
