"""SQL tables and temporary views of topics: created, read and written with SQL alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.worlds.fake_cluster import FakeCluster
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline.schema import COLUMNS, MESSAGES, OF_BODIES, Column

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def table(spark: SparkSession, cluster: FakeCluster) -> Iterator[str]:
    """The table `orders` of a topic with five messages."""
    cluster.add("orders", "a", 0, 5)
    options = f"endpoints '{cluster.endpoint}', topic 'orders', maxRowsPerTrigger '2', batchSize 8"
    spark.sql(f"CREATE TABLE orders USING rocketmq OPTIONS ({options}) COMMENT 'of the shop'")
    yield "orders"
    spark.sql("DROP TABLE orders")


def offsets(spark: SparkSession, statement: str) -> list[int]:
    return sorted(row.queue_offset for row in spark.sql(statement).collect())


def test_a_table_has_the_columns_of_its_dataset_and_reads_its_topic(
    spark: SparkSession, cluster: FakeCluster, table: str
) -> None:
    assert spark.table(table).columns == [column.name for column in MESSAGES]
    assert offsets(spark, f"SELECT * FROM {table}") == [0, 1, 2, 3, 4]
    cluster.add("orders", "a", 0, 1)
    assert offsets(spark, f"SELECT queue_offset FROM {table} WHERE queue_offset > 3") == [4, 5]
    assert offsets(spark, f"SELECT * FROM {table} WITH (endingOffsets '{at(2)}')") == [0, 1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("dataset 'events'", COLUMNS["events"]),
        ("dataset 'dlq', groups 'g', includeBody 'false'", MESSAGES),
        ("topic '%DLQ%*'", MESSAGES),
    ],
)
def test_a_table_of_each_dataset_has_its_columns(
    spark: SparkSession, cluster: FakeCluster, options: str, expected: tuple[Column, ...]
) -> None:
    cluster.add("%DLQ%g", "a", 0, 2)
    cluster.add_events("a", pb.Event(topic="%DLQ%g"), pb.Event(topic="%DLQ%g"))
    given = f"endpoints '{cluster.endpoint}', {options}"
    spark.sql(f"CREATE TABLE chosen USING rocketmq OPTIONS ({given})")
    try:
        omitted = OF_BODIES if "includeBody" in options else ()
        names = [each.name for each in expected if each.name not in omitted]
        assert spark.table("chosen").columns == names
        assert spark.table("chosen").count() == 2
    finally:
        spark.sql("DROP TABLE chosen")


def at(offset: int) -> str:
    return f'{{"orders": {{"a": {{"0": {offset}}}}}}}'


def test_a_table_is_written_and_a_bad_row_is_refused(
    spark: SparkSession, cluster: FakeCluster, table: str
) -> None:
    spark.sql(f"INSERT INTO {table} (body, tag) VALUES (binary('one'), 'eu')")
    spark.sql(f"INSERT INTO {table} BY NAME SELECT binary('two') AS body, array('k') AS keys")
    one, two = cluster.sent
    assert (one.topic.name, one.body, one.system_properties.tag) == ("orders", b"one", "eu")
    assert (two.topic.name, two.body, list(two.system_properties.keys)) == ("orders", b"two", ["k"])
    with pytest.raises(Exception, match=r"a value for namespace, broker, .* only the cluster sets"):
        spark.sql(f"INSERT INTO {table} SELECT * FROM {table}")
    assert len(cluster.sent) == 2


def test_a_table_is_read_as_a_stream(
    spark: SparkSession, cluster: FakeCluster, table: str, tmp_path: Path
) -> None:
    """Spark passes a stream into a table without the columns of the table, so it needs options."""
    rows = spark.readStream.option("startingOffsets", "earliest").table(table).select("body")
    writer = rows.writeStream.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True)
    with pytest.raises(Exception, match=r"no options\. Spark does not pass"):
        writer.toTable(table).awaitTermination()
    assert cluster.sent == []
    given = {"endpoints": cluster.endpoint, "topic": "orders"}
    writer.options(**given).toTable(table).awaitTermination()
    assert len(cluster.sent) == 5
    assert cluster.calls.count("SendMessage") == 3, "two rows per trigger"


def test_a_wrong_table_is_not_created(spark: SparkSession, cluster: FakeCluster) -> None:
    begin = f"CREATE TABLE t USING rocketmq OPTIONS (endpoints '{cluster.endpoint}', topic 'orders'"
    for more, sentence in (
        (", filtr 'a'", "there is no option filtr; did you mean filter"),
        (", batchSize 9000", "option batchSize = 9000: at most 128"),
        (", `auth.accessKey` 'k'", r"a table does not store it. Add WITH .* to each statement"),
    ):
        with pytest.raises(Exception, match=sentence):
            spark.sql(f"{begin}{more})")
    with pytest.raises(Exception, match="option endpoints: required"):
        spark.sql("CREATE TABLE t USING rocketmq OPTIONS (topic 'orders')")
    assert not spark.catalog.tableExists("t")


def test_a_table_with_a_list_of_columns_takes_its_options_from_statements(
    spark: SparkSession, cluster: FakeCluster
) -> None:
    cluster.create("orders")
    given = f"endpoints '{cluster.endpoint}', topic 'orders'"
    spark.sql(f"CREATE TABLE bodies (body STRING) USING rocketmq OPTIONS ({given})")
    try:
        for statement in ("SELECT * FROM bodies", "INSERT INTO bodies VALUES ('one')"):
            with pytest.raises(Exception, match=r"create the table without columns, or set the"):
                spark.sql(statement).collect()
        spark.sql(f"INSERT INTO bodies WITH ({given}) VALUES ('one')")
    finally:
        spark.sql("DROP TABLE bodies")
    assert [each.body for each in cluster.sent] == [b"one"]


def test_rows_of_one_table_never_use_the_options_of_another(
    spark: SparkSession, cluster: FakeCluster, table: str
) -> None:
    """Spark copies the metadata of columns to frames that derive from them."""
    frame = spark.table(table).selectExpr("body", "'others' AS topic")
    writer = frame.write.format("rocketmq").mode("append")
    with FakeCluster().serving() as other:
        other.create("others")
        writer.option("endpoints", other.endpoint).save()
        assert {each.topic.name for each in other.sent} == {"others"}
    with pytest.raises(Exception, match="option endpoints: required"):
        frame.write.format("rocketmq").mode("append").option("topic", "others").save()
    assert cluster.sent == []


def test_a_view_is_read_and_written(spark: SparkSession, cluster: FakeCluster) -> None:
    cluster.add("orders", "a", 0, 3)
    given = f"USING rocketmq OPTIONS (endpoints '{cluster.endpoint}', topic 'orders')"
    spark.sql(f"CREATE TEMPORARY VIEW every_column {given}")
    spark.sql(f"CREATE TEMPORARY VIEW bodies (body STRING, tag STRING) {given}")
    try:
        assert offsets(spark, "SELECT * FROM every_column") == [0, 1, 2]
        spark.sql("INSERT INTO every_column (body) VALUES (binary('one'))")
        spark.sql("INSERT INTO bodies VALUES ('two', 'eu')")
    finally:
        spark.catalog.dropTempView("every_column")
        spark.catalog.dropTempView("bodies")
    assert [each.body for each in cluster.sent] == [b"one", b"two"]
