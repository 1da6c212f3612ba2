"""The archive gate on a real broker: messages are kept until sealed; operators see and lift it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.clients.pipeline_load import send_some
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, command, environment, standalone
from tidemill.common.clock import SystemClock
from tidemill_pipeline.archive.tasks import ArchiveTask, run_task
from tidemill_pipeline.errors import ClusterRejection
from tidemill_pipeline.jobs.archive import ArchiveJob
from tidemill_pipeline.jobs.archive_verify import verify
from tidemill_pipeline.options import SourceOptions, parse_source

GATE = "archive"
TOPIC = "orders"
SEGMENT = 16 << 20
CONFIG = f"""
segment_bytes: {SEGMENT}
retention_bytes: {2 * SEGMENT}
archive_gate_group: {GATE}
"""
BODY_BYTES = 64 << 10
MESSAGES = 5 * SEGMENT // BODY_BYTES  # Retention by size would delete more than half.


def a_job(running: Standalone, path: Path) -> ArchiveJob:
    """Return a job that runs its tasks here, without Spark."""
    given = {
        "endpoints": running.grpc,
        "topicPattern": ".*",
        "archivePath": str(path),
        "readMode": "broker",
    }

    def run_here(options: SourceOptions, tasks: Sequence[ArchiveTask]) -> list[dict[str, Any]]:
        return [run_task(options, task) for task in tasks]

    return ArchiveJob(
        parse_source(given, is_stream=False),
        run_here,
        now_ms=SystemClock().wall_ms,
        gate_group=GATE,
    )


def shown(running: Standalone) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = running.get(f"topics/{TOPIC}")["queueStatus"]
    return found


def metric(running: Standalone, name: str) -> float:
    text = httpx.get(running.processes["broker-0"].metrics, trust_env=False).text
    (found,) = re.findall(rf"^rocketmq_storage_{name}{{[^}}]*}} ([0-9.e+]+)$", text, re.MULTILINE)
    return float(found)


def first_offset(running: Standalone) -> int:
    return int(shown(running)[0]["minOffset"])


def test_the_broker_keeps_messages_until_they_are_sealed_or_the_gate_is_lifted(
    tmp_path: Path,
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    with standalone(tmp_path / "data", f"--config={config}") as running:
        running.put(f"topics/{TOPIC}", queues=1)
        running.put(f"groups/{GATE}")
        job = a_job(running, tmp_path / "archive")
        # The gate holds a topic from its first message, once the archiver has seen the topic.
        job.append()
        assert [queue["sealedOffset"] for queue in shown(running)] == [0]
        send_some(running.grpc, TOPIC, MESSAGES, body_size=BODY_BYTES)
        eventually(lambda: metric(running, "archive_gate_holding") == 1)
        assert first_offset(running) == 0
        done = subprocess.run(
            command("--admin", running.admin, "topic", "show", TOPIC),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        assert re.search(rf"^TOPIC.* SEALED\s*$(.|\n)*^{TOPIC} .* 0\s*$", done.stdout, re.MULTILINE)

        job.append()
        assert first_offset(running) == 0, "archived is not sealed"
        assert verify(job).wrong == []
        assert shown(running)[0]["sealedOffset"] == MESSAGES
        eventually(lambda: first_offset(running) > 0)
        eventually(lambda: metric(running, "archive_gate_holding") == 0)

        send_some(running.grpc, TOPIC, MESSAGES, body_size=BODY_BYTES, first=MESSAGES)
        eventually(lambda: metric(running, "archive_gate_holding") == 1)
        assert first_offset(running) <= MESSAGES
        running.delete(f"groups/{GATE}")
        eventually(lambda: first_offset(running) > MESSAGES)
        assert "sealedOffset" not in shown(running)[0]
        assert metric(running, "archive_gate_passed_total") == 0


def test_a_missing_gate_group_names_the_command_that_creates_it(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        running.put(f"topics/{TOPIC}", queues=1)
        with pytest.raises(ClusterRejection, match=f"tidemill group create {GATE}"):
            a_job(running, tmp_path / "archive").append()
