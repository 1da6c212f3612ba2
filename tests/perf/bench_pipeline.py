"""How many rows a second does the pipeline read from a live broker on the same cores?

    .venv/bin/python -m tests.perf.bench_pipeline [--messages 200000]

State machine: one standalone (one broker group, one proxy), a topic of 4 queues full of messages of
1 KiB, all on this machine with Spark in local[2]. Measured, after one warm-up each: a batch read of
all columns into nothing, the same as a stream with AvailableNow, an archive, and its verification.
The median of RUNS, and all of them, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.pipeline.conftest import SETTINGS
from tests.support.clients.pipeline_load import send_some
from tests.support.processes.processes import Standalone, standalone
from tidemill.common.clock import SystemClock
from tidemill_pipeline.archive.spark_tasks import SparkRunner
from tidemill_pipeline.jobs.archive import ArchiveJob
from tidemill_pipeline.jobs.archive_verify import verify
from tidemill_pipeline.options import parse_source
from tidemill_pipeline.session import build_spark

BODY_SIZE = 1024
QUEUES = 4
RUNS = 3


def main() -> None:
    """Measure, and print one JSON document."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--messages", type=int, default=200_000)
    count = arguments.parse_args().messages
    with tempfile.TemporaryDirectory() as folder, standalone(Path(folder) / "data") as broker:
        broker.put("topics/bench", queues=QUEUES)
        send_some(broker.grpc, "bench", count, body_size=BODY_SIZE)
        spark = build_spark("bench", master="local[2]", settings=SETTINGS)
        spark.sparkContext.setLogLevel("ERROR")
        figures = {
            "batch": _rates(count, lambda _: _batch(spark, broker)),
            "stream": _rates(count, lambda run: _stream(spark, broker, f"{folder}/stream-{run}")),
            "archive": _rates(
                count, lambda run: archive(spark, broker, "bench", f"{folder}/to-{run}")
            ),
            "verify": _rates(count, lambda run: _verify(spark, broker, f"{folder}/to-{run}")),
        }
        spark.stop()
    load = os.getloadavg()[1]
    print(json.dumps({"messages": count, "body_size": BODY_SIZE, "load": load, **figures}))


def _rates(count: int, work: Callable[[int], None]) -> dict[str, Any]:
    took_s = []
    for run in range(RUNS + 1):
        begin_s = time.perf_counter()
        work(run)
        took_s.append(time.perf_counter() - begin_s)
    rates = [round(count / each) for each in took_s[1:]]
    return {"rows_per_s": statistics.median(rates), "runs": rates}


def _options(broker: Standalone) -> dict[str, str]:
    return {"endpoints": broker.grpc, "topic": "bench"}


def _batch(spark: Any, broker: Standalone) -> None:
    reader = spark.read.format("rocketmq").options(**_options(broker))
    reader.load().write.format("noop").mode("overwrite").save()


def _stream(spark: Any, broker: Standalone, folder: str) -> None:
    reader = spark.readStream.format("rocketmq").options(**_options(broker))
    query = (
        reader.option("startingOffsets", "earliest")
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", folder)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def job(spark: Any, broker: Standalone, topic: str, to: str) -> ArchiveJob:
    """Return what archives a topic into a folder."""
    given = {"endpoints": broker.grpc, "topic": topic, "archivePath": to, "readMode": "broker"}
    options = parse_source(given, is_stream=False)
    return ArchiveJob(options, SparkRunner(spark, given), now_ms=SystemClock().wall_ms)


def archive(spark: Any, broker: Standalone, topic: str, to: str) -> None:
    """Archive a topic into a folder."""
    job(spark, broker, topic, to).append()


def _verify(spark: Any, broker: Standalone, to: str) -> None:
    assert verify(job(spark, broker, "bench", to)).wrong == []


if __name__ == "__main__":
    main()
