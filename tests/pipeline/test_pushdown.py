"""Predicates that are handed to the source: what a load that is used twice is answered by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, In, LessThan
from pyspark.sql.types import StringType, StructField, StructType

from tests.pipeline.conftest import reading
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline.data_source import RocketMQDataSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.support.worlds.fake_cluster import FakeCluster

TOPIC = StructType([StructField("topic", StringType())])
# Two predicates of each dataset, with how many of the ten rows each has.
OF_MESSAGES = ("messages", "queue_id = 0", "queue_id = 1", 3, 7)
OF_PENDING = (
    "pending",
    "due_timestamp < timestamp_millis(1003)",
    "due_timestamp >= timestamp_millis(1003)",
    3,
    7,
)
both_datasets = pytest.mark.parametrize(
    ("dataset", "first", "second", "first_rows", "second_rows"), [OF_MESSAGES, OF_PENDING]
)


@pytest.fixture
def filled(cluster: FakeCluster) -> FakeCluster:
    cluster.add("orders", "a", 0, 3)
    cluster.add("orders", "a", 1, 7)
    cluster.brokers["a"].pending = [
        pb.Pending(topic="orders", timer_id=n, due_at_ms=1_000 + n, message_id=f"m{n}")
        for n in range(10)
    ]
    return cluster


def load(spark: SparkSession, cluster: FakeCluster, dataset: str) -> DataFrame:
    frame: DataFrame = reading(
        spark, cluster, topic="orders", dataset=dataset, pushdown="true"
    ).load()
    return frame


@both_datasets
def test_a_load_that_is_asked_with_a_second_predicate_is_refused(
    spark: SparkSession,
    filled: FakeCluster,
    dataset: str,
    first: str,
    second: str,
    first_rows: int,
    second_rows: int,
) -> None:
    frame = load(spark, filled, dataset)
    assert [frame.where(first).count() for _ in range(2)] == [first_rows, first_rows]
    with pytest.raises(Exception, match=r"Use a separate .load\(\) for each predicate"):
        frame.where(second).count()
    both = load(spark, filled, dataset)
    with pytest.raises(Exception, match=r"Use a separate .load\(\) for each predicate"):
        both.where(first).union(both.where(second)).count()
    whole = load(spark, filled, dataset)
    assert whole.count() == first_rows + second_rows
    with pytest.raises(Exception, match=r"Use a separate .load\(\) for each predicate"):
        whole.where(first).count()


@pytest.mark.xfail(
    reason="Spark keeps one read of a load: that of its last predicates", strict=True
)
@both_datasets
def test_a_load_after_a_load_with_a_predicate_is_complete(
    spark: SparkSession,
    filled: FakeCluster,
    dataset: str,
    first: str,
    second: str,
    first_rows: int,
    second_rows: int,
) -> None:
    """Fails as long as Spark does not mend it, and tells when it has: then pushdown is safe."""
    frame = load(spark, filled, dataset)
    assert frame.where(first).count() == first_rows
    assert frame.count() == first_rows + second_rows


@both_datasets
def test_loads_of_their_own_are_right_in_a_union_and_in_an_anti_join(
    spark: SparkSession,
    filled: FakeCluster,
    dataset: str,
    first: str,
    second: str,
    first_rows: int,
    second_rows: int,
) -> None:
    def new() -> DataFrame:
        return load(spark, filled, dataset)

    union = new().where(first).union(new().where(second))
    assert union.count() == first_rows + second_rows
    assert union.select("message_id").distinct().count() == first_rows + second_rows
    rest = new().join(new().where(first), "message_id", "left_anti")
    assert rest.count() == second_rows


def test_every_predicate_is_looked_at_by_spark_too(filled: FakeCluster) -> None:
    """A row that another look at the load let in would break its own predicate otherwise."""
    for dataset in ("messages", "dlq", "pending"):
        given = {"endpoints": filled.endpoint, "dataset": dataset, "pushdown": "true"}
        if dataset == "messages":
            given["topic"] = "orders"
        reader: Any = RocketMQDataSource(given).reader(TOPIC)
        filters = [
            EqualTo(("topic",), "orders"),
            In(("broker",), ("a",)),
            EqualTo(("queue_id",), 0),
            GreaterThanOrEqual(("queue_offset",), 1),
            LessThan(("queue_offset",), 9),
        ]
        assert reader.pushFilters(filters) == filters


def test_the_pushdown_option_logs_a_warning(
    filled: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"endpoints": filled.endpoint, "topic": "orders"}
    RocketMQDataSource(given).reader(TOPIC)
    assert caplog.text == ""
    RocketMQDataSource({**given, "pushdown": "true"}).reader(TOPIC)
    assert "use each .load() once and with one predicate" in caplog.text
