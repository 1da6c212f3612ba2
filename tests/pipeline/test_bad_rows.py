"""The table of bad rows: rows of a task, or of a batch, that is done again count once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pipeline.conftest import streaming
from tests.support.worlds.fake_cluster import FakeCluster
from tests.support.worlds.streaming_queries import run_to_end
from tidemill_pipeline.errors import PipelineError
from tidemill_pipeline.options import parse_sink
from tidemill_pipeline.sink.bad_rows import TaskAttempt, drop, keep
from tidemill_pipeline.sink.writer import SinkTaskResult, send_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A folder that the first bad row makes."""
    return tmp_path / "bad"


def done(
    cluster: FakeCluster,
    table: Path,
    *bodies: bytes,
    attempt: int = 0,
    partition: int = 0,
    write: str = "w",
    breaks: bool = False,
) -> SinkTaskResult:
    """Do a task in batches of two rows; the fake refuses the body `refuse me`."""
    options = parse_sink(
        {
            "endpoints": cluster.endpoint,
            "topic": "orders",
            "onError": "dead-letter",
            "deadLetterPath": str(table),
        }
    )

    def batches() -> Iterator[pa.RecordBatch]:
        for at in range(0, len(bodies), 2):
            yield pa.record_batch({"body": pa.array(bodies[at : at + 2], pa.binary())})
        if breaks:
            raise RuntimeError("no more rows")

    return send_rows(options, batches(), TaskAttempt(write, partition, attempt))


def numbers(table: Path) -> list[int]:
    """Return which rows of their tasks a reader of the table finds."""
    return sorted(pq.read_table(table)["row"].to_pylist()) if any(table.glob("bad*")) else []


BAD = b"refuse me"


def test_bad_rows_of_the_attempt_count_that_the_driver_has_committed(
    cluster: FakeCluster, table: Path
) -> None:
    first = done(cluster, table, BAD, b"a", b"b", BAD, attempt=1)
    second = done(cluster, table, BAD, b"a", b"b", BAD, attempt=2)
    assert numbers(table) == []
    keep(str(table), [second.bad])
    assert numbers(table) == [0, 3]
    assert len(list(table.iterdir())) == 1
    assert first.bad.row_count == second.bad.row_count == 2


def test_tasks_of_several_writes_have_files_of_their_own(cluster: FakeCluster, table: Path) -> None:
    for write in ("one", "other"):
        parts = [done(cluster, table, b"a", BAD, partition=n, write=write).bad for n in range(2)]
        keep(str(table), [*parts, done(cluster, table, b"a", partition=2, write=write).bad])
    assert numbers(table) == [1, 1, 1, 1]


def test_an_attempt_that_fails_leaves_nothing(cluster: FakeCluster, table: Path) -> None:
    with pytest.raises(RuntimeError, match="no more rows"):
        done(cluster, table, BAD, b"a", BAD, breaks=True)
    assert list(table.iterdir()) == []


def test_uncommitted_bad_rows_are_deleted(cluster: FakeCluster, table: Path) -> None:
    keep(str(table), [done(cluster, table, BAD, write="before").bad])
    done(cluster, table, b"a", BAD)
    drop(str(table), "w")
    assert numbers(table) == [0]
    assert len(list(table.iterdir())) == 1
    drop(str(table / "nowhere"), "w")


def test_a_repeated_batch_replaces_its_earlier_bad_rows(cluster: FakeCluster, table: Path) -> None:
    """One that was committed here, and not in Spark's checkpoint, and has fewer bad rows now."""
    keep(str(table), [done(cluster, table, BAD, BAD, partition=n).bad for n in range(2)])
    assert numbers(table) == [0, 0, 1, 1]
    good = done(cluster, table, b"a", b"b", attempt=4).bad
    keep(str(table), [good, done(cluster, table, b"a", BAD, partition=1, attempt=5).bad])
    assert numbers(table) == [1]


def test_a_folder_missing_at_the_driver_is_an_error(cluster: FakeCluster, table: Path) -> None:
    of_another_machine = done(cluster, table, BAD).bad
    (file,) = table.iterdir()
    file.unlink()
    with pytest.raises(PipelineError, match="a folder that the driver and all executors share"):
        keep(str(table), [of_another_machine])


def test_a_batch_of_a_stream_that_failed_leaves_its_bad_rows_out(
    spark: SparkSession, cluster: FakeCluster, table: Path, tmp_path: Path
) -> None:
    """One task has bad rows and is done; another one fails, and with it the batch."""
    for queue_id in range(2):
        cluster.add("orders", "a", queue_id, 4)
    cluster.create("copies")
    frame = streaming(spark, cluster, topic="orders", startingOffsets="earliest").load()
    bad_first = frame.selectExpr("if(queue_id = 0 and queue_offset < 2, null, body) as body")

    def run() -> None:
        writer = bad_first.writeStream.format("rocketmq").options(
            endpoints=cluster.endpoint,
            topic="copies",
            maxRetries="0",
            onError="dead-letter",
            deadLetterPath=str(table),
            checkpointLocation=str(tmp_path / "checkpoint"),
        )
        run_to_end(writer)

    # Whichever of the two sends first, and once more as the batch is done again.
    for _ in range(2):
        cluster.passing, cluster.failing = {"SendMessage": 1}, {"SendMessage": 1}
        with pytest.raises(Exception, match="a send failed"):
            run()
        assert numbers(table) == []
    cluster.failing = {}
    run()
    assert numbers(table) == [0, 1]
    assert len(list(table.iterdir())) == 1
