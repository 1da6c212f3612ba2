"""Listings (`pending`, `inflight`, `groups`): filters, and rows that change during a read."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StringType, StructField, StructType

from tests.support.worlds.fake_cluster import FakeCluster
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline.data_source import RocketMQDataSource
from tidemill_pipeline.errors import BadOption

COLUMNS = {
    "pending": ("topic", "message_id"),
    "inflight": ("topic", "consumer_group"),
    "groups": ("topic", "consumer_group"),
}
FIRST_MS = 1_000  # The first message's due time. Messages are due 1 ms apart.


def reader_of(cluster: FakeCluster, dataset: str, **options: str) -> Any:
    given = {"endpoints": cluster.endpoint, "maxRetries": "0", "dataset": dataset, **options}
    fields = [StructField(name, StringType()) for name in COLUMNS[dataset]]
    return RocketMQDataSource(given).reader(StructType(fields))


def rows_of(reader: Any, parts: Any = None) -> Iterator[tuple[str | None, str | None]]:
    for part in reader.partitions() if parts is None else parts:
        for batch in reader.read(part):
            assert isinstance(batch, pa.RecordBatch)
            yield from (tuple(row.values()) for row in batch.to_pylist())


@pytest.fixture
def filled(cluster: FakeCluster) -> FakeCluster:
    """Ten pending messages at broker group a, two of another topic, and two consumer groups."""
    for topic in ("orders", "bills"):
        cluster.add(topic, "a", 0, 1)
    cluster.add("orders", "b", 0, 1)
    broker = cluster.brokers["a"]
    broker.pending = [
        pb.Pending(
            topic="bills" if n in {3, 7} else "orders",
            timer_id=n,
            due_at_ms=FIRST_MS + n,
            message_id=f"m{n}",
        )
        for n in range(10)
    ]
    for group in ("billing", "shipping"):
        broker.in_flight.append(pb.InFlight(topic="orders", consumer_group=group))
        broker.progress.append(pb.Progress(topic="orders", consumer_group=group))
    return cluster


# ---------------------------------------------------------------- deleted and unknown objects


@pytest.mark.parametrize("chosen", [{"topicPattern": ".*"}, {"topics": "orders,bills"}])
def test_a_listing_omits_and_reports_a_deleted_topic(
    filled: FakeCluster, caplog: pytest.LogCaptureFixture, chosen: dict[str, str]
) -> None:
    reader = reader_of(filled, "pending", **chosen)
    parts = reader.partitions()
    filled.delete("bills")
    found = list(rows_of(reader, parts))
    assert [row for row in found if row[0] == "orders"] == [
        ("orders", f"m{n}") for n in range(10) if n not in {3, 7}
    ]
    assert "a: bills was deleted since the read began: it is omitted" in caplog.text


@pytest.mark.parametrize("dataset", ["inflight", "groups"])
def test_a_listing_omits_and_reports_a_deleted_consumer_group(
    filled: FakeCluster, caplog: pytest.LogCaptureFixture, dataset: str
) -> None:
    reader = reader_of(filled, dataset, groups="billing,shipping")
    parts = reader.partitions()
    filled.brokers["a"].deleted_groups.add("shipping")
    assert list(rows_of(reader, parts)) == [("orders", "billing")]
    assert "a: shipping was deleted since the read began: it is omitted" in caplog.text


@pytest.mark.parametrize("dataset", ["inflight", "groups"])
def test_a_group_that_is_nowhere_is_refused_with_the_nearest_one(
    filled: FakeCluster, dataset: str
) -> None:
    with pytest.raises(
        BadOption, match=r"^there is no consumer group biling; did you mean billing\?$"
    ):
        reader_of(filled, dataset, groups="shipping,biling").partitions()
    # A broker group that has none of them is not asked.
    reader = reader_of(filled, dataset, groups="shipping")
    assert [part.broker for part in reader.partitions()] == ["a"]
    assert list(rows_of(reader)) == [("orders", "shipping")]
    assert len(list(rows_of(reader_of(filled, dataset, groups="shipping,shipping")))) == 1


def test_a_message_of_a_deleted_topic_has_no_topic(filled: FakeCluster) -> None:
    filled.brokers["a"].pending = [pb.Pending(timer_id=1, message_id="m", due_at_ms=5)]
    assert list(rows_of(reader_of(filled, "pending"))) == [(None, "m")]


def test_unreadable_timers_are_counted(
    filled: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(list(rows_of(reader_of(filled, "pending")))) == 10
    assert caplog.text == ""
    filled.brokers["a"].damaged_timers = 3
    assert len(list(rows_of(reader_of(filled, "pending")))) == 10
    assert "a: 3 delayed messages are omitted" in caplog.text


# ---------------------------------------------------------------- when they are due


def instant(ms: float) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ms)


def due(cluster: FakeCluster, **options: str) -> list[int]:
    found = rows_of(reader_of(cluster, "pending", **options))
    return [int(name[1:]) for _, name in found if name]


def test_timestamp_options_of_pending_timers_select_due_times(filled: FakeCluster) -> None:
    assert due(filled, startingTimestamp="1003", endingTimestamp="1006") == [3, 4, 5]
    assert due(filled, startingTimestamp="1008") == [8, 9]
    for nothing in (
        {"endingTimestamp": "0"},
        {"endingTimestamp": "1970-01-01"},
        {"endingTimestamp": "1960-01-01"},
        {"startingTimestamp": "1006", "endingTimestamp": "1006"},
    ):
        filled.due_ranges.clear()
        assert due(filled, **nothing) == []
        assert filled.due_ranges == set()
    assert due(filled, startingTimestamp="1960-01-01") == list(range(10))


@pytest.mark.parametrize("us", ["5001", "5400", "5600", "5999"])
def test_instants_within_a_millisecond_exclude_earlier_timers(filled: FakeCluster, us: str) -> None:
    at = f"1970-01-01T00:00:01.00{us}Z"
    assert due(filled, startingTimestamp=at) == [6, 7, 8, 9]
    assert due(filled, endingTimestamp=at) == [0, 1, 2, 3, 4, 5]


# ---------------------------------------------------------------- predicates


def pushed(cluster: FakeCluster, *filters: Any, **options: str) -> list[str | None]:
    """Return the ids of the rows that a read with these predicates returns."""
    cluster.due_ranges.clear()
    cluster.asked_topics.clear()
    reader = reader_of(cluster, "pending", pushdown="true", **options)
    assert reader.pushFilters(list(filters)) == list(filters)
    return [name for _, name in rows_of(reader)]


def test_predicates_limit_the_requested_topics_and_brokers(filled: FakeCluster) -> None:
    is_bills = EqualTo(("topic",), "bills")
    for chosen in ({}, {"topics": "orders,bills"}, {"topicPattern": ".*"}):
        assert pushed(filled, is_bills, **chosen) == ["m3", "m7"]
        assert filled.asked_topics == {"bills"}
        assert len(pushed(filled, In(("topic",), ("bills", "orders", "other")), **chosen)) == 10
        assert filled.asked_topics == {"bills", "orders"}
        assert pushed(filled, is_bills, EqualTo(("topic",), "orders"), **chosen) == []
        assert pushed(filled, EqualTo(("topic",), "nowhere"), **chosen) == []
        assert filled.due_ranges == set()
    assert pushed(filled, is_bills, topic="orders") == []
    assert len(pushed(filled, EqualTo(("broker",), "a"))) == 10
    assert filled.due_ranges == {(0, 0)}
    assert pushed(filled, In(("broker",), ("b", "c"))) == []
    assert pushed(filled, EqualTo(("broker",), "c")) == []


def test_predicates_limit_the_requested_due_times(filled: FakeCluster) -> None:
    column = ("due_timestamp",)
    assert pushed(filled, In(column, (instant(1_007), instant(1_003)))) == [
        f"m{n}" for n in (3, 4, 5, 6, 7)
    ]
    assert filled.due_ranges == {(1_003, 1_008)}
    assert pushed(
        filled, GreaterThanOrEqual(column, instant(1_008.5)), startingTimestamp="1002"
    ) == ["m8", "m9"]
    assert pushed(filled, LessThan(column, instant(1_001))) == ["m0", "m1"]
    for nothing in (
        [GreaterThan(column, instant(1_008)), LessThan(column, instant(1_003))],
        [LessThan(column, instant(-1))],
        [LessThanOrEqual(column, instant(-5))],
        [EqualTo(column, instant(1_003)), EqualTo(column, instant(1_007))],
    ):
        assert pushed(filled, *nothing) == []
        assert filled.due_ranges == set()
