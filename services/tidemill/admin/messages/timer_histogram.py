"""The histogram of timers: one sum of the counts of all broker groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Final, NamedTuple

from tidemill.admin.json.timers import (
    HistogramStep,
    TimerHistogramView,
    TimerPeakView,
    TimerTopicView,
)
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

TOPICS_MAX: Final = 20


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
