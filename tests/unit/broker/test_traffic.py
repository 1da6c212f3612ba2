"""The counts of the hot paths: how long messages waited, by buckets."""

from __future__ import annotations

import pytest

from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.metrics.traffic import Traffic
from tidemill.common.histogram import Histogram
from tidemill.message.stored_message import MESSAGE_TYPE_AT

TOPIC, GROUP = TopicId(1), GroupId(2)
DELAY = 3  # the number in a stored message


def blob(kind: int) -> bytes:
    stored = bytearray(MESSAGE_TYPE_AT + 1)
    stored[MESSAGE_TYPE_AT] = kind
    return bytes(stored)


@pytest.mark.parametrize("waits_ms", [[7], [9, 8, 7], [700, 60, 8], [90_000, 0]])
def test_a_batch_is_counted_like_its_messages_one_by_one(waits_ms: list[int]) -> None:
    traffic = Traffic()
    traffic.handed_over(TOPIC, GROUP, waits_ms, [blob(DELAY)] * len(waits_ms))
    one_by_one: Histogram[int] = Histogram(traffic.waits.bounds)
    for wait_ms in waits_ms:
        one_by_one.observe(0, wait_ms)
    assert traffic.waits.buckets((TOPIC, GROUP, DELAY)) == one_by_one.buckets(0)


def test_an_unknown_type_counts_as_normal() -> None:
    traffic = Traffic()
    traffic.handed_over(TOPIC, GROUP, [1], [blob(200)])
    assert traffic.waits.labels == [(TOPIC, GROUP, 0)]


def test_a_declared_label_shows_zeros_before_its_first_observation() -> None:
    histogram: Histogram[str] = Histogram((1, 2))
    histogram.declare("orders")
    assert histogram.buckets("orders") == ([0, 0, 0], 0)
    histogram.observe("orders", 2)
    histogram.declare("orders")
    assert histogram.buckets("orders") == ([0, 1, 0], 2)
