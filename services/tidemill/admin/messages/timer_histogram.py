"""The histogram of timers: one sum of the counts of all broker groups."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from typing import Final, NamedTuple, final

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.json.timers import (
    HistogramStep,
    TimerHistogramView,
    TimerPeakView,
    TimerTopicView,
)
from tidemill.admin.scaling.shared_answer import SharedAnswer
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

TOPICS_MAX: Final = 20
ANSWER_AGE_S_MAX: Final = 1.0  # from the begin of its scan; an operator sees no difference
ANSWERS_MAX: Final = 64  # of different steps and topics, some kilobytes each


class Span(NamedTuple):
    """The buckets of a step."""

    step_ms: int
    buckets: int


SPANS: Final = {
    HistogramStep.SECOND: Span(1_000, 120),
    HistogramStep.TEN_MINUTES: Span(600_000, 144),
    HistogramStep.HOUR: Span(3_600_000, 720),
    HistogramStep.DAY: Span(86_400_000, 400),
}


@final
class TimerHistograms:
    """The histograms of the last second. Callers of the same step and topic share a scan."""

    def __init__(self, brokers: Brokers, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._brokers = brokers
        self._now_s = now_s
        # By step and topic, the one that was used last at the end.
        self._answers: dict[tuple[HistogramStep, str], SharedAnswer[TimerHistogramView]] = {}
        self._tasks: asyncio.TaskGroup

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve until the block ends."""
        async with asyncio.TaskGroup() as self._tasks:
            yield

    async def of(self, step: HistogramStep, topic: str) -> TimerHistogramView:
        """Return the histogram of a topic, or of all if it is empty.

        Raises TopicNotFound and UnavailableError, which are not cached.
        """
        shared = self._answers.pop((step, topic), None)
        if shared is None:
            shared = SharedAnswer(
                lambda: self._count(step, topic),
                self._tasks,
                now_s=self._now_s,
                age_s_max=ANSWER_AGE_S_MAX,
            )
            if len(self._answers) >= ANSWERS_MAX:
                del self._answers[next(iter(self._answers))]
        self._answers[step, topic] = shared
        return await shared.get()

    async def _count(self, step: HistogramStep, topic: str) -> TimerHistogramView:
        span = SPANS[step]
        request = pb.GetTimerHistogramRequest(
            topic=topic, step_ms=span.step_ms, buckets=span.buckets, topics_max=TOPICS_MAX
        )
        found = await self._brokers.call_all(calls.GET_TIMER_HISTOGRAM, request)
        view = merged(step, [each.value for each in found.answers], with_topics=not topic)
        view.unreachable = found.unreachable or None
        return view


def merged(
    step: HistogramStep, found: Collection[pb.TimerHistogram], *, with_topics: bool
) -> TimerHistogramView:
    """Return the sum of the histograms of broker groups.

    The clocks of brokers differ, so the first buckets may. The sum begins with the earliest one.
    """
    span = SPANS[step]
    begin_ms = min((each.from_ms for each in found), default=0)
    counts = [0] * span.buckets
    overdue = later = 0
    topics: Counter[str] = Counter()
    for each in found:
        shift = (each.from_ms - begin_ms) // span.step_ms
        for place, count in enumerate(each.counts, shift):
            if place < span.buckets:
                counts[place] += count
            else:
                later += count
        overdue += each.overdue
        later += each.later
        topics.update({topic.topic: topic.timers for topic in each.topics})
    fullest = max(range(span.buckets), key=counts.__getitem__)
    peak = TimerPeakView(at_ms=begin_ms + fullest * span.step_ms, timers=counts[fullest])
    largest = topics.most_common(TOPICS_MAX)
    return TimerHistogramView(
        step=step,
        step_ms=span.step_ms,
        as_of_ms=max((each.as_of_ms for each in found), default=0),
        from_ms=begin_ms,
        counts=counts,
        overdue=overdue,
        later=later,
        peak=peak if peak.timers else None,
        topics=[TimerTopicView(name=name, timers=timers) for name, timers in largest]
        if with_topics
        else None,
    )
