"""The source in batch, against a cluster in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from tests.pipeline.conftest import reading
from tests.support.worlds.fake_cluster import FIRST_STORED_AT_MS
from tidemill_pipeline.data_source import RocketMQDataSource
from tidemill_pipeline.errors import BadOption

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.worlds.fake_cluster import FakeCluster

ID, TAG = StructField("message_id", StringType()), StructField("tag", StringType())


def test_a_topic_is_read_whole_with_every_column(spark: SparkSession, cluster: FakeCluster) -> None:
    cluster.add("orders", "broker-a", 0, 700)
    cluster.add("orders", "broker-b", 1, 300)
    frame = reading(spark, cluster, topic="orders").load()
    rows = frame.collect()
    assert len(rows) == 1000
    assert {(r.broker, r.queue_id, r.queue_offset) for r in rows} == {
        *(("broker-a", 0, i) for i in range(700)),
        *(("broker-b", 1, i) for i in range(300)),
    }
    first = next(r for r in rows if r.broker == "broker-b" and r.queue_offset == 7)
    assert bytes(first.body) == b"orders/broker-b/1/7"
    assert first.message_id == "orders-broker-b-1-7"
    assert first.store_timestamp.timestamp() == 1_700_000_000.007


def test_times_offsets_tags_holes_and_subschemas(spark: SparkSession, cluster: FakeCluster) -> None:
    cluster.add("orders", "a", 0, 100, tag="even")
    cluster.add("orders", "a", 0, 100, tag="odd")
    cluster.brokers["a"].queues["orders", 0].messages[50:60] = [None] * 10
    between = reading(
        spark,
        cluster,
        topic="orders",
        startingTimestamp=1_700_000_000_040,
        endingTimestamp=1_700_000_000_070,
        failOnDataLoss="false",
    ).load()
    assert [r.queue_offset for r in between.orderBy("queue_offset").collect()] == [
        *range(40, 50),
        *range(60, 70),
    ]
    tail = (
        reading(
            spark,
            cluster,
            topic="orders",
            startingOffsets='{"orders": {"a": {"0": 190}}}',
            filter="odd || other",
            minPartitions=3,
        )
        .schema("queue_offset bigint, topic string")
        .load()
    )
    assert tail.columns == ["queue_offset", "topic"]
    assert tail.rdd.getNumPartitions() == 3
    assert {tuple(r) for r in tail.collect()} == {(i, "orders") for i in range(190, 200)}


def test_invalid_options_are_rejected_with_the_reason(
    spark: SparkSession, cluster: FakeCluster
) -> None:
    cluster.add("orders", "a", 0, 1)
    with pytest.raises(Exception, match="did you mean startingOffsets"):
        reading(spark, cluster, topic="orders", startingOffset="latest").load()
    with pytest.raises(Exception, match="has no column bodi"):
        reading(spark, cluster, topic="orders").schema("bodi binary").load().collect()
    with pytest.raises(Exception, match="does not exist"):
        reading(
            spark, cluster, topic="orders", startingOffsets='{"orders": {"a": {"9": 0}}}'
        ).load().collect()
    with pytest.raises(Exception, match="no queue has a message"):
        reading(
            spark, cluster, topic="orders", startingTimestamp="2030-01-01T00:00:00Z"
        ).load().collect()


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ([ID, StructField("tag", StringType(), nullable=False)], "column tag may be null"),
        ([TAG, ID, TAG], "column tag is named 2 times"),
        ([], "choose at least one column"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_columns_that_no_read_has_are_refused(
    cluster: FakeCluster, columns: list[StructField], sentence: str, is_stream: bool
) -> None:
    source = RocketMQDataSource({"endpoints": cluster.endpoint, "topic": "orders"})
    with pytest.raises(BadOption, match=sentence):
        (source.streamReader if is_stream else source.reader)(StructType(columns))


def test_a_not_null_column_in_a_schema_is_rejected(
    spark: SparkSession, cluster: FakeCluster
) -> None:
    """Spark would give `coalesce` of a column that it is told is NOT NULL another answer."""
    cluster.add("orders", "a", 0, 1)
    loads = reading(spark, cluster, topic="orders")
    shown = "coalesce(tag, 'none') as shown"
    (row,) = loads.schema("message_id string, tag string").load().selectExpr(shown).collect()
    assert row.shown == "none"
    with pytest.raises(Exception, match="column tag may be null, as all columns"):
        loads.schema("message_id string, tag string NOT NULL").load().selectExpr(shown).collect()


def test_predicates_reach_the_source_where_they_may(
    spark: SparkSession, cluster: FakeCluster
) -> None:
    for queue_id in range(3):
        cluster.add("orders", "a", queue_id, 50)
    frame = reading(spark, cluster, topic="orders", pushdown="true").load()
    kept = frame.where("queue_id = 1 and queue_offset >= 40 and tag is null").collect()
    assert [r.queue_offset for r in kept] == list(range(40, 50))
    assert {(queue, offset) for _, queue, offset in cluster.pulls} == {(1, 40)}


def test_messages_older_than_a_predicate_are_not_pulled(
    spark: SparkSession, cluster: FakeCluster
) -> None:
    cluster.add("orders", "a", 0, 50, step_ms=1_000)
    loads = reading(spark, cluster, topic="orders", pushdown="true")
    at_ms = FIRST_STORED_AT_MS + 40_000
    for compared, first in ((">=", 40), (">", 41), ("=", 40)):
        cluster.pulls.clear()
        kept = loads.load().where(f"store_timestamp {compared} timestamp_millis({at_ms})").collect()
        offsets = [row.queue_offset for row in kept]
        assert offsets == ([40] if compared == "=" else list(range(first, 50)))
        assert {offset for *_, offset in cluster.pulls} == {40}
    cluster.pulls.clear()
    assert loads.load().where(f"store_timestamp < timestamp_millis({at_ms})").count() == 40
    assert {offset for *_, offset in cluster.pulls} == {0}


def test_due_times_reach_the_source(spark: SparkSession, cluster: FakeCluster) -> None:
    from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

    cluster.add("orders", "a", 0, 1)
    cluster.brokers["a"].pending = [
        pb.Pending(topic="orders", timer_id=n, due_at_ms=1_000 + n) for n in range(10)
    ]
    loads = reading(spark, cluster, dataset="pending", pushdown="true")

    def read(where: str) -> list[int]:
        cluster.due_ranges.clear()
        return sorted(row.timer_id for row in loads.load().where(where).collect())

    def at(ms: int) -> str:
        return f"timestamp_millis({ms})"

    assert read(f"due_timestamp > {at(1_003)} and due_timestamp < {at(1_006)}") == [4, 5]
    assert cluster.due_ranges == {(1_003, 1_007)}
    assert read(f"due_timestamp >= {at(1_008)}") == [8, 9]
    assert cluster.due_ranges == {(1_008, 0)}
    assert read(f"due_timestamp <= {at(1_001)} and timer_id > 0") == [1]
    assert cluster.due_ranges == {(0, 1_002)}
    assert read(f"due_timestamp = {at(1_005)}") == [5]
    assert cluster.due_ranges == {(1_005, 1_006)}


def test_every_kind_of_body_and_property_comes_through(
    spark: SparkSession, cluster: FakeCluster
) -> None:
    import gzip

    from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

    packed = gzip.compress(b"hello " * 100)
    for body, encoding in ((b"", v2.IDENTITY), (b"\xff\x00", v2.IDENTITY), (packed, v2.GZIP)):
        message = v2.Message(topic=v2.Resource(name="orders"), body=body)
        message.system_properties.body_encoding = encoding
        message.user_properties.update({f"p{i}": str(i) for i in range(128)})
        cluster.put(message)
    cluster.put(v2.Message(topic=v2.Resource(name="orders"), body=bytes(4 << 20)))
    rows = reading(spark, cluster, topic="orders").load().orderBy("queue_offset").collect()
    assert [bytes(r.body) for r in rows[:3]] == [b"", b"\xff\x00", b"hello " * 100]
    assert rows[2].body_size == len(packed)
    assert len(rows[3].body) == 4 << 20
    assert rows[0].properties == {f"p{i}": str(i) for i in range(128)}
    assert rows[0].tag is None
    raw = reading(spark, cluster, topic="orders", bodyEncoding="raw").load()
    assert bytes(raw.orderBy("queue_offset").collect()[2].body) == packed
    none = reading(spark, cluster, topic="orders", includeBody="false").load()
    assert "body" not in none.columns


def test_batches_have_the_columns_that_spark_expects(spark: SparkSession) -> None:
    from tidemill_pipeline import schema

    for dataset in schema.COLUMNS:
        struct = StructType.fromDDL(schema.ddl(dataset))
        assert schema.arrow_schema(struct) == schema.of_dataset(dataset)


def test_a_session_whose_timestamps_have_no_zone_reads_instants(
    spark: SparkSession, cluster: FakeCluster
) -> None:
    cluster.add("orders", "a", 0, 1)
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        frame = reading(spark, cluster, topic="orders").load()
        assert frame.selectExpr("unix_millis(store_timestamp)").collect() == [(FIRST_STORED_AT_MS,)]
    finally:
        spark.conf.unset("spark.sql.timestampType")


def test_datasets_return_timers_deliveries_and_progress(
    spark: SparkSession, cluster: FakeCluster
) -> None:
    from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

    cluster.add("orders", "a", 0, 3)
    broker = cluster.brokers["a"]
    broker.pending = [pb.Pending(topic="orders", timer_id=i, due_at_ms=1000 + i) for i in range(5)]
    broker.in_flight = [pb.InFlight(consumer_group="g", topic="orders", attempt=2, delivery_id=9)]
    broker.progress = [
        pb.Progress(
            consumer_group="g", topic="orders", max_offset=3, commit_offset=1, pull_offset=-1
        )
    ]
    pending = reading(spark, cluster, dataset="pending", topic="orders").load().collect()
    assert sorted(r.timer_id for r in pending) == [0, 1, 2, 3, 4]
    out = reading(spark, cluster, dataset="inflight", groups="g").load().collect()
    assert [(r.attempt, r.delivery) for r in out] == [(2, "a:9:0")]
    far = reading(spark, cluster, dataset="groups").load().collect()
    assert [(r.lag, r.pull_offset, r.oldest_unacked_ts) for r in far] == [(2, None, None)]
    begun = reading(spark, cluster, topic="orders", startingOffsets="group:g").load().collect()
    assert sorted(r.queue_offset for r in begun) == [1, 2]
