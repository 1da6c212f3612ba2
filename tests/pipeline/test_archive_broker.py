"""J1 against a real broker, by Spark's own tasks, and reading back without one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.clients.pipeline_load import send_some
from tests.support.processes.processes import standalone
from tidemill.common.clock import SystemClock
from tidemill_pipeline.archive.spark_tasks import SparkRunner
from tidemill_pipeline.jobs.archive import ArchiveJob
from tidemill_pipeline.jobs.archive_upkeep import compact
from tidemill_pipeline.jobs.archive_verify import verify
from tidemill_pipeline.options import parse_source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_an_archive_is_complete_and_readable_without_the_broker(
    spark: SparkSession, tmp_path: Path
) -> None:
    to = str(tmp_path / "archive")
    with standalone(tmp_path / "data") as broker:
        broker.put("topics/orders", queues=4)
        given = {
            "endpoints": broker.grpc,
            "topicPattern": ".*",
            "archivePath": to,
            "readMode": "broker",
        }
        options = parse_source(given, is_stream=False)
        job = ArchiveJob(options, SparkRunner(spark, given), now_ms=SystemClock().wall_ms)
        sent = send_some(broker.grpc, "orders", 1000)
        assert job.append().rows == 1000
        assert job.append().rows == 0
        sent |= send_some(broker.grpc, "orders", 200, first=1000)
        assert job.append().rows == 200
        assert verify(job).wrong == []
        before, after = compact(job)
        assert before > after
        sent |= send_some(broker.grpc, "orders", 50, first=1200)
        # The archive has 1200, the broker the rest, and no row comes from both.
        both = _reader(spark, to).option("endpoints", broker.grpc).load().collect()
        assert len(both) == 1250
        assert {(row.message_id, bytes(row.body)) for row in both} == sent
    alone = _reader(spark, to).option("readMode", "archive").load()
    rows = alone.collect()
    assert len(rows) == 1200
    assert {row.message_id for row in rows} == {f"orders-{i}" for i in range(1200)}
    assert rows[0].properties == {"colour": "red"}
    some = _reader(spark, to).option("readMode", "archive").option("filter", "nobody")
    assert some.load().count() == 0


def _reader(spark: SparkSession, to: str):  # type: ignore[no-untyped-def]  # Spark's.
    return spark.read.format("rocketmq").option("topic", "orders").option("archivePath", to)
