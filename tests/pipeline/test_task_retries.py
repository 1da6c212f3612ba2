"""Failed tasks that Spark repeats, and batches that a restarted query repeats."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from tests.pipeline.conftest import streaming
from tests.support.eventually import eventually
from tests.support.processes.processes import command, descendants, environment
from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import PAGE_ROWS, FakeCluster
from tests.support.worlds.retried_tasks import BAD_ROWS, ROWS, TASKS
from tests.support.worlds.streaming_queries import run_to_end
from tidemill_pipeline.pulling import BATCH_ROWS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STORED = 2 * BATCH_ROWS
RUN_S = 600.0  # Start and end of Spark. Only a failing test waits this long.
SENDS_BEFORE = 5  # Stored before a send fails, of 32 rows each.


def ids_by_body(cluster: FakeCluster) -> dict[bytes, set[str]]:
    """Return the ids under which each body was sent."""
    found: dict[bytes, set[str]] = {}
    for message in cluster.sent:
        found.setdefault(message.body, set()).add(message.system_properties.message_id)
    return found


def check_repeats_are_known(cluster: FakeCluster, bodies: set[bytes]) -> None:
    """Check that rows came, some of them again, and that each has an id of its own."""
    assert len(cluster.sent) > len(bodies)
    ids = ids_by_body(cluster)
    assert ids.keys() == bodies
    assert Counter(len(each) for each in ids.values()) == {1: len(bodies)}
    assert len(set().union(*ids.values())) == len(bodies)


def test_a_task_that_is_done_again_loses_and_doubles_nothing(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, STORED)
    cluster.create("copies")
    # After a batch that Spark already has.
    cluster.breaks_after = BATCH_ROWS // PAGE_ROWS + 1
    cluster.passing, cluster.failing = {"SendMessage": SENDS_BEFORE}, {"SendMessage": 1}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.worlds.retried_tasks", cluster.endpoint, tmp_path],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert cluster.pulls == [("a", 0, 0)] * 2, "the task was done twice"
    offsets = json.loads(done.stdout.splitlines()[-1])
    assert sorted(offsets) == list(range(STORED))
    check_repeats_are_known(cluster, {b"row %d" % n for n in range(ROWS)})
    # Each unsent row is in the table once. The table has no rows of the first attempts.
    bad = [path.name for path in tmp_path.iterdir()]
    assert len(bad) == TASKS
    assert all(name.startswith("bad-") for name in bad)
    tags = pq.read_table(tmp_path, columns=["tag"])["tag"].to_pylist()
    assert sorted(int(tag) for tag in tags) == list(range(TASKS * BAD_ROWS))
    # All rows arrived, so the job's terminal shows no output of Spark and no failure of a task.
    of_spark = re.compile(r" WARN | ERROR |log4j|log level|Traceback")
    assert [line for line in done.stderr.splitlines() if of_spark.search(line)] == []


def kill_workers(job: int) -> int:
    """Kill the Python processes that run a job's tasks; return their number."""
    killed = 0
    for pid in descendants(job):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"pyspark.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                killed += 1
    return killed


def is_amid(archive: ArchiveWorld, cluster: FakeCluster, entries: int) -> bool:
    """Return whether a batch of 20 calls is in progress after `entries` committed batches."""
    return archive.manifest().next_number == entries and len(cluster.pulls) > 20 * entries + 5


def test_an_archive_loses_and_doubles_nothing_where_workers_are_killed(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    for queue_id in range(2):
        cluster.add("orders", "a", queue_id, 400)
    line = (
        f"pipeline archive --to {archive.path} --endpoints {cluster.endpoint} -t orders"
        " --master local[2,3] --batch-rows 400 -O maxRatePerTask=100 -O pullBatchSize=20"
    )
    job = subprocess.Popen(
        command(*line.split()),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for entries in range(2):  # Amid the first batch, and amid the second.
            eventually(partial(is_amid, archive, cluster, entries), within_ms=600_000)
            assert kill_workers(job.pid) > 0
        output, _ = job.communicate(timeout=RUN_S)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, output
    assert (
        output.splitlines()[-1]
        == "archived 800 messages, 0.0 MB of bodies; the archive has caught up"
    )
    assert sorted(itertools.chain(*archive.bodies())) == sorted(
        message.body
        for queue in cluster.brokers["a"].queues.values()
        for message in queue.messages
        if message is not None
    )


def test_a_batch_that_is_done_again_is_known_by_its_ids(
    spark: SparkSession, cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 200)
    cluster.create("copies")
    bodies = {f"orders/a/0/{i}".encode() for i in range(200)}
    frame = streaming(spark, cluster, topic="orders", startingOffsets="earliest").load()

    def run() -> None:
        writer = (
            frame.select("body")
            .writeStream.format("rocketmq")
            .options(
                endpoints=cluster.endpoint,
                topic="copies",
                maxRetries="0",
                checkpointLocation=str(tmp_path / "checkpoint"),
            )
        )
        run_to_end(writer)

    cluster.passing, cluster.failing = {"SendMessage": SENDS_BEFORE - 2}, {"SendMessage": 1}
    with pytest.raises(Exception, match="a send failed 1 times"):
        run()
    assert 0 < len(cluster.sent) < 200
    run()
    check_repeats_are_known(cluster, {body.ljust(10, b".") for body in bodies})
    # A second write creates new messages.
    before = {each.system_properties.message_id for each in cluster.sent}
    cluster.sent.clear()
    cluster.add("orders", "a", 0, 50)
    run()
    after = {each.system_properties.message_id for each in cluster.sent}
    assert len(after) == 50
    assert before.isdisjoint(after)
