"""J1 under kill -9 of the driver with its workers and of the broker: no loss, no duplicates."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.support.clients.pipeline_load import send_some
from tests.support.processes.processes import (
    Standalone,
    command,
    descendants,
    environment,
    start_standalone,
)
from tidemill_pipeline.archive.reading import read_range
from tidemill_pipeline.archive.store import ArchiveStore

KILLS = int(os.environ.get("TIDEMILL_PIPELINE_KILLS", "6"))  # For each of driver and broker.
RUN_S = 240.0  # For a complete run on a busy machine.
ALIVE_S = (4.0, 25.0)  # Lifetime of a driver: from its start to about its commit.


def archiver(endpoint: str, to: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command(
            "pipeline",
            "archive",
            "--to",
            to,
            "--endpoints",
            endpoint,
            "--master",
            "local[2]",
            "--batch-rows",
            "700",
            "-t",
            "orders",
            "-O",
            "maxRetries=8",
        ),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def kill(pid: int) -> None:
    """Kill a process of this test with all its descendants."""
    for each in descendants(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def end(broker: Standalone) -> None:
    """Kill a broker that is still up, and release its resources."""
    if broker.process.poll() is None:
        kill(broker.process.pid)
    broker.process.wait()
    if broker.process.stdout is not None:
        broker.process.stdout.close()


def archived_ids(to: Path) -> Counter[str]:
    store = ArchiveStore(str(to))
    archive = store.archive()
    return Counter(
        row["message_id"]
        for key, queue in archive.queues.items()
        for batch in read_range(
            store,
            archive.holding(key, queue.start, queue.end),
            key,
            start=queue.start,
            end=queue.end,
            columns=["message_id"],
        )
        for row in batch.to_pylist()
    )


@pytest.mark.large
def test_an_archive_loses_and_doubles_nothing_under_kills(tmp_path: Path) -> None:
    chance = random.Random(15)
    to, data = tmp_path / "archive", tmp_path / "data"
    port = 0
    sent: set[str] = set()
    broker: Standalone | None = None
    try:
        for turn in range(2 * KILLS):
            if broker is None:
                flags = [f"--grpc-port={port}"] if port else []
                broker = start_standalone(data, *flags)
                port = int(broker.grpc.rpartition(":")[2])
                if not turn:
                    broker.put("topics/orders", queues=4)
            sent |= {i for i, _ in send_some(broker.grpc, "orders", 2_000, first=turn * 2_000)}
            job = archiver(broker.grpc, to)
            kills_broker = turn % 2 == 1
            try:
                job.wait(chance.uniform(*ALIVE_S))
            except subprocess.TimeoutExpired:
                kill(broker.process.pid if kills_broker else job.pid)
                job.wait(RUN_S)
            else:
                if kills_broker:
                    kill(broker.process.pid)
            if kills_broker:
                end(broker)
                broker = None
        broker = broker or start_standalone(data, f"--grpc-port={port}")
        assert archiver(broker.grpc, to).wait(RUN_S) == 0
    finally:
        if broker is not None:
            end(broker)
    assert archived_ids(to) == Counter(sent)
