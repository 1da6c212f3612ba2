"""A Spark program that retries failed tasks; `local[2]` of the other tests does not.

    python -m tests.support.worlds.retried_tasks HOST:PORT FOLDER

It reads the topic `orders` and writes ROWS rows into the topic `copies`. The cluster fails each of
these calls once. Then it writes BAD_ROWS unsendable rows per task. Each task fails once after it
has saved some of its bad rows in FOLDER. The last line of standard output is JSON with the read
offsets.
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
BAD_ROWS = 400  # per task: enough to fill one of Spark's batches before the task ends
BATCH_ROWS = 100
FILLER = 2000  # characters of a row
KEPT_MS = 60_000  # limit for the first saved bad rows of a task


def failing_once(folder: Path, number: int) -> str:
    """Return a row. The first attempt of a task fails after it has saved a file of bad rows."""
    task = TaskContext.get()
    assert task is not None
    if task.attemptNumber() == 0 and number % BAD_ROWS == BAD_ROWS - 1:
        kept = f"_*-{task.partitionId()}-{task.taskAttemptId()}.parquet"
        eventually(lambda: any(folder.glob(kept)), within_ms=KEPT_MS)
        raise RuntimeError("the first attempt fails")
    return str(number).ljust(FILLER)


def main(endpoint: str, folder: Path) -> None:
    """Read and write. A task does not retry calls, so it fails."""
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
