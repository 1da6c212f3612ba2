"""Spark that does a failed task again, as a program: `local[2]` of the other tests never does.

    python -m tests.support.retried_tasks HOST:PORT

It reads the topic `orders` and writes ROWS rows into the topic `copies`, of a cluster that fails
each of them once. What it read is told as JSON on the last line of standard output.
"""

from __future__ import annotations

import json
import sys

from tests.pipeline.conftest import SETTINGS
from tidemill.pipeline.jobs.running import session

ROWS = 500
TASKS = 2


def main(endpoint: str) -> None:
    """Read, and write. No call is made again within a task, so that tasks fail."""
    given = {"endpoints": endpoint, "maxRetries": "0"}
    with session("retried tasks", "local[2,3]", SETTINGS) as spark:
        frame = spark.read.format("rocketmq").options(**given, topic="orders").load()
        offsets = [row.queue_offset for row in frame.collect()]
        rows = spark.range(0, ROWS, 1, TASKS).selectExpr("concat('row ', id) as body")
        rows.write.format("rocketmq").mode("append").options(**given, topic="copies").save()
    sys.stdout.write(f"{json.dumps(offsets)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
