"""The source as a stream, against a cluster in memory: offsets, admission, new queues, gaps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.pipeline.conftest import streaming
from tests.support.eventually import eventually
from tests.support.worlds.streaming_queries import run_to_end
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.listener import ProgressPublisher, watch
from tidemill_pipeline.metrics import PipelineMetrics
from tidemill_pipeline.options import parse_source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.worlds.fake_cluster import FakeCluster

Places = set[tuple[str, int, int]]


def run_available(
    frame: Any, folder: Path, seen: Callable[[int, list[Any]], None] = lambda _batch, _rows: None
) -> list[tuple[int, Places]]:
    """Run a stream until it has nothing more; return its batches."""
    batches: list[tuple[int, Places]] = []

    def keep(batch: Any, number: int) -> None:
        rows = batch.select("broker", "queue_id", "queue_offset").collect()
        batches.append((number, {tuple(row) for row in rows}))
        seen(number, rows)

    writer = frame.load().writeStream.foreachBatch(keep)
    run_to_end(writer.option("checkpointLocation", str(folder / "checkpoint")))
    return batches


def test_batches_are_bounded_end_at_the_frozen_target_and_continue_after_a_restart(
    spark: SparkSession, cluster: FakeCluster, tmp_path: Path
) -> None:
    for queue_id in range(4):
        cluster.add("orders", "a", queue_id, 250)
    options = {"topic": "orders", "startingOffsets": "earliest", "maxRowsPerTrigger": 400}

    def keeps_writing(number: int, rows: list[Any]) -> None:
        cluster.add("orders", "a", 0, 5)

    batches = run_available(streaming(spark, cluster, **options), tmp_path, keeps_writing)
    assert [len(rows) for _, rows in batches] == [400, 400, 200]
    first = set().union(*(rows for _, rows in batches))
    assert first == {("a", queue, i) for queue in range(4) for i in range(250)}
    # A broker group and a queue that were not there before; and what came meanwhile.
    cluster.add("orders", "b", 0, 30)
    again = run_available(streaming(spark, cluster, **options), tmp_path)
    second = set().union(*(rows for _, rows in again))
    assert second == {*(("a", 0, i) for i in range(250, 265)), *(("b", 0, i) for i in range(30))}


def test_a_gap_fails_a_stream_or_is_skipped(
    spark: SparkSession, cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 20)
    options = {"topic": "orders", "startingOffsets": "earliest"}
    run_available(streaming(spark, cluster, **options), tmp_path)
    cluster.add("orders", "a", 0, 20)
    cluster.expire("orders", "a", 0, 30)
    with pytest.raises(Exception, match="offsets from 20 to 30 are lost"):
        run_available(streaming(spark, cluster, **options), tmp_path)
    batches = run_available(streaming(spark, cluster, **options, failOnDataLoss="false"), tmp_path)
    assert set().union(*(rows for _, rows in batches)) == {("a", 0, i) for i in range(30, 40)}


def test_failed_calls_are_retried_and_secrets_do_not_leak(
    spark: SparkSession, cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 50)
    cluster.failing = {"ReadMessages": 1, "GetQueues": 1}
    cluster.breaks_after = 3
    secret = tmp_path / "secret"
    secret.write_text("very-secret-text\n")
    options = {
        "topic": "orders",
        "startingOffsets": "earliest",
        "auth.accessKey": "me",
        "auth.secretKeyFile": secret,
    }
    reader = streaming(spark, cluster, **options)
    batches = run_available(reader, tmp_path)
    assert sum(len(rows) for _, rows in batches) == 50
    assert any("Credential=me" in each.get("authorization", "") for each in cluster.headers)
    kept = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert kept
    assert all(b"very-secret-text" not in path.read_bytes() for path in kept)
    plan = reader.load()._jdf.queryExecution().toString()
    assert "very-secret-text" not in plan


def test_a_watched_query_is_counted(
    spark: SparkSession, cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 40)
    metrics = PipelineMetrics("copy")
    watching = watch(spark, metrics)
    try:
        run_available(
            streaming(spark, cluster, topic="orders", startingOffsets="earliest"), tmp_path
        )
        eventually(lambda: metrics.rows["orders"] == 40)
    finally:
        spark.streams.removeListener(watching)
    assert metrics.waiting["orders"] == 0


def test_a_query_that_asks_for_it_publishes_its_progress(
    spark: SparkSession, cluster: FakeCluster, tmp_path: Path
) -> None:
    """Of its last batch too, and of the queues behind one that the cluster refuses."""
    for topic in ("a", "b", "c"):
        cluster.add(topic, "a", 0, 30)
    secret = tmp_path / "secret"
    secret.write_text("very-secret-text\n")
    options = {
        "topics": "a,b,c",
        "startingOffsets": "earliest",
        "reportProgressAs": "copies",
        "auth.accessKey": "access-key",
        "auth.secretKeyFile": secret,
    }
    publisher = ProgressPublisher("access-key")
    spark.streams.addListener(publisher)
    try:
        # Once it is read.
        run_available(
            streaming(spark, cluster, **options), tmp_path, lambda *_: cluster.refused.add("b")
        )

        def published() -> bool:
            found = {each.topic: each.pull_offset for each in cluster.brokers["a"].progress}
            return found == {"a": 30, "c": 30}

        eventually(published)
    finally:
        spark.streams.removeListener(publisher)
    assert any("Credential=access-key" in each.get("authorization", "") for each in cluster.headers)
    kept = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert any(b'"as": "copies"' in path.read_bytes() for path in kept)
    assert all(b"access-key" not in path.read_bytes() for path in kept)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dataset": "events"}, "for messages and dlq, not for events"),
        ({"readMode": "archive", "archivePath": "a"}, "does not connect to brokers"),
    ],
)
def test_reporting_progress_requires_a_dataset_with_progress(
    options: dict[str, str], why: str
) -> None:
    given = {"endpoints": "a:1", "topic": "a", "reportProgressAs": "g", **options}
    with pytest.raises(BadOption, match=why):
        parse_source(given, is_stream=True)


def test_events_of_a_watched_query_are_counted(
    spark: SparkSession, cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.add_events(
        "a", *(pb.Event(kind=pb.EVENT_KIND_STORED, topic="orders", at_ms=1) for _ in range(7))
    )
    metrics = PipelineMetrics("copy")
    watching = watch(spark, metrics)
    reader = spark.readStream.format("rocketmq").option("startingOffsets", "earliest")
    events = reader.options(endpoints=cluster.endpoint, dataset="events", topic="orders").load()
    try:
        noop = events.writeStream.format("noop")
        run_to_end(noop.option("checkpointLocation", str(tmp_path)))
        eventually(lambda: metrics.rows["*"] == 7 and metrics.waiting_bytes == {"a": 0})
    finally:
        spark.streams.removeListener(watching)
