"""The histogram of timers of several broker groups."""

from __future__ import annotations

from tidemill.admin.json.timers import HistogramStep
from tidemill.admin.messages.timer_histogram import SPANS, merged
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

HOUR_MS, BUCKETS = SPANS[HistogramStep.HOUR]


def counted(from_ms: int, counts: dict[int, int], **more: int) -> pb.TimerHistogram:
    listed = [counts.get(place, 0) for place in range(BUCKETS)]
    topics = [pb.TimerTopicCount(topic="orders", timers=sum(counts.values()))]
    return pb.TimerHistogram(
        as_of_ms=from_ms + 1, from_ms=from_ms, counts=listed, topics=topics, **more
    )


def test_the_counts_of_broker_groups_are_added() -> None:
    one = counted(HOUR_MS, {0: 1, 5: 2}, overdue=3, later=1)
    other = counted(HOUR_MS, {5: 4}, later=2)
    view = merged(HistogramStep.HOUR, [one, other], with_topics=True)
    assert (view.counts[0], view.counts[5], sum(view.counts)) == (1, 6, 7)
    assert (view.overdue, view.later) == (3, 3)
    assert view.peak is not None
    assert (view.peak.at_ms, view.peak.timers) == (6 * HOUR_MS, 6)
    assert view.topics is not None
    assert [(topic.name, topic.timers) for topic in view.topics] == [("orders", 7)]


def test_a_broker_with_a_later_clock_fills_later_buckets() -> None:
    last = BUCKETS - 1
    early, late = counted(0, {1: 1}), counted(HOUR_MS, {0: 1, last: 1})
    view = merged(HistogramStep.HOUR, [early, late], with_topics=False)
    assert (view.from_ms, view.counts[1], view.later) == (0, 2, 1)
    assert view.topics is None


def test_a_histogram_without_timers_has_no_peak() -> None:
    view = merged(HistogramStep.HOUR, [counted(0, {})], with_topics=True)
    assert view.peak is None
    assert len(view.counts) == BUCKETS
