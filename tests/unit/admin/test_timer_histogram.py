"""The histogram of timers of several broker groups."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from tests.support.clocks import ManualClock
from tidemill.admin.cluster.brokers import BrokerAnswer, BrokerAnswers, Brokers
from tidemill.admin.json.timers import HistogramStep
from tidemill.admin.messages.timer_histogram import (
    ANSWER_AGE_S_MAX,
    ANSWERS_MAX,
    SPANS,
    TimerHistograms,
    merged,
)
from tidemill.common.errors import TopicNotFound
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


class CountingBrokers:
    """A broker group that counts the scans of its timers."""

    def __init__(self) -> None:
        self.scanned: list[str] = []  # topics

    async def call_all(
        self, _call: object, request: pb.GetTimerHistogramRequest
    ) -> BrokerAnswers[pb.TimerHistogram]:
        self.scanned.append(request.topic)
        await asyncio.sleep(0)
        if request.topic == "missing":
            raise TopicNotFound("there is no such topic")
        counts = counted(0, {0: len(self.scanned)})
        return BrokerAnswers([BrokerAnswer("broker-0", counts)], ["broker-1"])


def with_histograms(
    scenario: Callable[[TimerHistograms, CountingBrokers, ManualClock], Awaitable[None]],
) -> None:
    async def main() -> None:
        clock, brokers = ManualClock(), CountingBrokers()
        histograms = TimerHistograms(
            cast(Brokers, brokers), now_s=lambda: clock.monotonic_ms() / 1000
        )
        async with asyncio.timeout(20), histograms.running():
            await scenario(histograms, brokers, clock)

    asyncio.run(main())


def test_callers_of_the_same_step_and_topic_share_a_scan_for_a_second() -> None:
    async def scenario(
        histograms: TimerHistograms, brokers: CountingBrokers, clock: ManualClock
    ) -> None:
        hour = HistogramStep.HOUR
        views = await asyncio.gather(*(histograms.of(hour, "orders") for _ in range(8)))
        assert brokers.scanned == ["orders"]
        assert {view.counts[0] for view in views} == {1}
        assert views[0].unreachable == ["broker-1"]
        clock.advance(int(ANSWER_AGE_S_MAX * 1000) - 1)
        assert (await histograms.of(hour, "orders")).counts[0] == 1
        clock.advance(1)
        assert (await histograms.of(hour, "orders")).counts[0] == 2
        await histograms.of(HistogramStep.DAY, "orders")
        assert (await histograms.of(hour, "")).topics is not None
        assert brokers.scanned == ["orders", "orders", "orders", ""]

    with_histograms(scenario)


def test_errors_are_not_kept() -> None:
    async def scenario(
        histograms: TimerHistograms, brokers: CountingBrokers, _clock: ManualClock
    ) -> None:
        for _ in range(2):
            with pytest.raises(TopicNotFound):
                await histograms.of(HistogramStep.HOUR, "missing")
        assert len(brokers.scanned) == 2

    with_histograms(scenario)


def test_the_number_of_kept_answers_is_bounded() -> None:
    async def scenario(
        histograms: TimerHistograms, brokers: CountingBrokers, _clock: ManualClock
    ) -> None:
        async def scans_of(topic: str) -> int:
            before = len(brokers.scanned)
            await histograms.of(HistogramStep.HOUR, topic)
            return len(brokers.scanned) - before

        for n in range(ANSWERS_MAX):
            assert await scans_of(f"t{n}") == 1
        assert await scans_of("t0") == 0
        assert await scans_of("more") == 1
        assert await scans_of("t0") == 0, "it was used after t1"
        assert await scans_of("t1") == 1

    with_histograms(scenario)
