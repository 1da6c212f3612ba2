"""Spark that does a failed task again, as a program: `local[2]` of the other tests never does.

    python -m tests.support.worlds.retried_tasks HOST:PORT FOLDER

It reads the topic `orders` and writes ROWS rows into the topic `copies`, of a cluster that fails
each of them once. Then it writes rows that cannot be sent, BAD_ROWS a task, of tasks that fail once
each when they have kept some of them apart: FOLDER has those. What it read is told as JSON on the
last line of standard output.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from pyspark import TaskContext
from pyspark.sql import functions as F  # noqa: N812  # As all of Spark's users write it.

from tests.pipeline.conftest import SETTINGS
from tests.support.eventually import eventually
from tidemill_pipeline.jobs.running import session

ROWS = 500
TASKS = 2
BAD_ROWS = 400  # of a task: some fill what Spark hands on at once, before the task has ended
BATCH_ROWS = 100
FILLER = 2000  # characters of a row
KEPT_MS = 60_000  # for a task's first bad rows to be kept; only a test that fails waits for so long


def failing_once(folder: Path, number: int) -> str:
    """Return a row; the first attempt at a task fails when a file of bad rows is there of it."""
    task = TaskContext.get()
    assert task is not None
    if task.attemptNumber() == 0 and number % BAD_ROWS == BAD_ROWS - 1:
        kept = f"_*-{task.partitionId()}-{task.taskAttemptId()}.parquet"
        eventually(lambda: any(folder.glob(kept)), within_ms=KEPT_MS)
        raise RuntimeError("the first attempt fails")
    return str(number).ljust(FILLER)


def main(endpoint: str, folder: Path) -> None:
    """Read, and write. No call is made again within a task, so that tasks fail."""
    given = {"endpoints": endpoint, "maxRetries": "0"}
    settings = {**SETTINGS, "spark.sql.execution.arrow.maxRecordsPerBatch": str(BATCH_ROWS)}
    with session("retried tasks", "local[2,3]", settings) as spark:
        frame = spark.read.format("rocketmq").options(**given, topic="orders").load()
        offsets = [row.queue_offset for row in frame.collect()]
        rows = spark.range(0, ROWS, 1, TASKS).selectExpr("concat('row ', id) as body")
        rows.write.format("rocketmq").mode("append").options(**given, topic="copies").save()
        tag = F.udf(partial(failing_once, folder), "string")("id").alias("tag")
        body = F.lit(None).cast("string").alias("body")
        bad = spark.range(0, TASKS * BAD_ROWS, 1, TASKS).select(tag, body)
        bad.write.format("rocketmq").mode("append").options(
            **given, topic="copies", onError="dead-letter", deadLetterPath=str(folder)
        ).save()
    sys.stdout.write(f"{json.dumps(offsets)}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
