"""A rehearsal of the jobs without a cluster; at its end Java writes Spark's classes to a file.

The file contains the classes that the rehearsal loads: plans of an audit, a stream and a table.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidemill_pipeline import shared_classes
from tidemill_pipeline.archive.spark_tasks import NAME as TASKS
from tidemill_pipeline.archive.spark_tasks import ArchiveTaskSource
from tidemill_pipeline.jobs.audit import AuditSettings, judge
from tidemill_pipeline.jobs.running import progress_line, session
from tidemill_pipeline.schema import ddl

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JVM_END_S: Final = 600.0  # for writing the file; an idle machine needs half a minute


def prepare() -> Path:
    """Create the class file; return its path. Raises PipelineError and OSError."""
    say = progress_line()
    where = shared_classes.folder()
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=where) as scratch:
        draft = Path(scratch) / "draft.jsa"
        with shared_classes.java_options(shared_classes.options_to_make(draft)):
            say("starting Spark")
            with session("prepare", "local[1]") as spark:
                # PySpark has no other name for the process.
                jvm = spark.sparkContext._gateway.proc  # noqa: SLF001
                say("rehearsing the jobs without data")
                _rehearse(spark, scratch)
        say("waiting for Java to write the class file")
        jvm.stdin.close()
        return shared_classes.keep_written(jvm, draft, timeout_s=JVM_END_S)


def _rehearse(spark: SparkSession, scratch: str) -> None:
    events = spark.createDataFrame([], ddl("events"))
    judge(spark, events, AuditSettings(to=f"{scratch}/audit", given={}), now_ms=0)
    spark.dataSource.register(ArchiveTaskSource)
    given = {"endpoints": "127.0.0.1:8081", "topicPattern": ".*", "tasks": "[]"}
    spark.read.format(TASKS).options(**given).load().collect()
    messages = spark.createDataFrame([], ddl("messages"))
    messages.write.parquet(f"{scratch}/messages")
    spark.read.parquet(f"{scratch}/messages").orderBy("queue_offset").count()
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    query = (
        rows.writeStream.format("noop")
        .option("checkpointLocation", f"{scratch}/checkpoint")
        .trigger(once=True)
        .start()
    )
    query.awaitTermination()
