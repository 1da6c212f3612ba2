"""Folders that are full or cannot be written, and files of credentials that are not there."""

from __future__ import annotations

import json
import random
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.processes.processes import command, environment
from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import FIRST_STORED_AT_MS, FakeCluster
from tests.support.worlds.micro_batches import read_batch
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill_pipeline.archive import writing
from tidemill_pipeline.archive.manifest import ManifestEntry
from tidemill_pipeline.archive.store import ArchiveStore
from tidemill_pipeline.errors import ArchiveError, BadOption, error_summary
from tidemill_pipeline.jobs.archive_upkeep import compact
from tidemill_pipeline.jobs.running import recorded
from tidemill_pipeline.sink.bad_rows import SCHEMA, BadRowWriter, TaskAttempt

FILE_BYTES = 1 << 20  # of the largest file that can be written
RUN_S = 600.0  # for a job on Spark; only a test that fails waits for so long
TASK = "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n  File"


def put_noise(cluster: FakeCluster, count: int) -> None:
    """Store bodies of 50 KiB that do not compress."""
    source = random.Random(1)
    for _ in range(count):
        message = v2.Message(topic=v2.Resource(name="orders"), body=source.randbytes(50 << 10))
        message.system_properties.store_timestamp.FromMilliseconds(FIRST_STORED_AT_MS)
        cluster.put(message, "a")


@pytest.fixture
def full() -> Iterator[None]:
    """Let files of this process grow no further, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("full")
def test_a_full_folder_is_named_with_the_file(cluster: FakeCluster, archive: ArchiveWorld) -> None:
    put_noise(cluster, 40)
    job = archive.job(batch_rows=1000, task_rows=1000)
    with pytest.raises(
        ArchiveError, match=rf"^{archive.path}/messages/.*parquet cannot be .*large"
    ):
        job.append()
    assert not archive.manifest().next_number
    # What fits goes on: nothing of before counts.
    assert archive.job(batch_rows=10, task_rows=10).append().rows == 40
    assert len(archive.bodies()[0]) == 40


@pytest.mark.usefixtures("full")
def test_a_partial_write_to_a_full_folder_is_reported_and_removed(
    cluster: FakeCluster, archive: ArchiveWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it neither hides the reason behind a file that is closed nor keeps the folder full."""
    monkeypatch.setattr(writing, "GROUP_BYTES", 1 << 18)
    put_noise(cluster, 60)
    with pytest.raises(ArchiveError, match=r"parquet cannot be written: .*large"):
        archive.job(batch_rows=1000, task_rows=1000).append()
    assert not list(Path(archive.path).rglob("*.parquet"))


@pytest.mark.usefixtures("full")
def test_a_compaction_without_room_leaves_no_half_of_a_file(
    cluster: FakeCluster, archive: ArchiveWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "GROUP_BYTES", 1 << 18)
    put_noise(cluster, 40)
    archive.job(batch_rows=10, task_rows=10).append()
    before = set(Path(archive.path).rglob("*.parquet"))
    assert len(before) == 4
    with pytest.raises(ArchiveError, match=r"parquet cannot be written: .*large"):
        compact(archive.job())
    assert set(Path(archive.path).rglob("*.parquet")) == before


@pytest.mark.usefixtures("full")
def test_a_table_of_bad_rows_without_room_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    source = random.Random(1)
    noise = [{"row": i, "why": "w", "body": source.randbytes(512 << 10)} for i in range(4)]
    with (
        pytest.raises(ArchiveError, match=r"parquet cannot be written: .*large"),
        BadRowWriter(str(tmp_path), TaskAttempt("w", 0, 0)) as bad,
    ):
        bad.add(pa.Table.from_pylist(noise, schema=SCHEMA))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(cluster: FakeCluster, archive: ArchiveWorld) -> None:
    cluster.add("orders", "a", 0, 5)
    Path(archive.path).mkdir()
    (Path(archive.path) / "messages").touch()
    with pytest.raises(ArchiveError, match=rf"^{archive.path}/messages/.* cannot be written: "):
        archive.append()
    entry = ManifestEntry(number=0, kind="append", at_ms=0, run="r", schema_version=1)
    below = Path(archive.path) / "messages" / "archive"
    with pytest.raises(ArchiveError, match=rf"^{below}/manifest/0.*json cannot be written: "):
        ArchiveStore(str(below)).commit(entry)


def test_a_job_finds_out_before_it_begins_that_its_folder_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """But for one that makes room there."""
    (tmp_path / "_runs").touch()
    with (
        pytest.raises(ArchiveError, match=rf"^{tmp_path}/_runs/.*json cannot be written: "),
        recorded("audit", str(tmp_path)),
    ):
        pytest.fail("it has begun")
    with recorded("archive-vacuum", str(tmp_path), makes_room=True) as run:
        run.detail["files_deleted"] = 1
    assert caplog.text.count("run not recorded") == 2
    (tmp_path / "_runs").unlink()
    with recorded("audit", str(tmp_path)):
        (record,) = (tmp_path / "_runs").iterdir()
        assert json.loads(record.read_text())["status"] == "running"
    assert json.loads(record.read_text())["status"] == "done"


@pytest.mark.parametrize(
    ("option", "more"),
    [
        ("auth.secretKeyFile", {"auth.accessKey": "k"}),
        ("auth.tokenFile", {}),
        ("tls.caFile", {"tls.enabled": "true"}),
        ("tls.certificateFile", {"tls.enabled": "true"}),
    ],
)
def test_an_error_names_a_missing_credentials_file(
    cluster: FakeCluster, option: str, more: dict[str, str]
) -> None:
    cluster.add("orders", "a", 0, 5)
    with pytest.raises(
        BadOption, match=f"option {option} = /nosuch: cannot read the file: No such"
    ):
        read_batch(cluster, topic="orders", **more, **{option: "/nosuch"})


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            [TASK, "OSError: [Errno 28] Error writing bytes to file. Detail: No space left"],
            "[Errno 28] Error writing bytes to file. Detail: No space left",
        ),
        (
            [TASK, "PermissionError: [Errno 13] Permission denied: '/a/b'", "", "\tat java"],
            "[Errno 13] Permission denied: '/a/b'",
        ),
        (
            [
                "calling o1.parquet.",
                ": org.apache.spark.SparkException: Job aborted",
                "Caused by: java.io.IOException: Mkdirs failed to create file:/a/0 (exists=false)",
                "\tat org.apache",
                "\t... 1 more",
            ],
            "Mkdirs failed to create file:/a/0",
        ),
        (
            [": java.io.FileNotFoundException: /tmp/b/0 (No space left on device)", "\tat java"],
            "/tmp/b/0 (No space left on device)",
        ),
        (
            [': java.io.IOException: Cannot run program "python3": error=13, Permission denied'],
            'Cannot run program "python3": error=13, Permission denied',
        ),
        (["Caused by: java.nio.file.AccessDeniedException: /a/b"], "AccessDeniedException: /a/b"),
    ],
)
def test_file_errors_are_found_in_spark_errors(lines: list[str], reason: str) -> None:
    assert error_summary(RuntimeError("\n".join(lines))) == ("OSError", reason)


@pytest.mark.parametrize(
    "text",
    ["java.io.IOException: Connection reset by peer", "ValueError: [Errno 1] is no number", "at a"],
)
def test_an_error_without_a_file_is_unchanged(text: str) -> None:
    assert error_summary(RuntimeError(text)) is None


@pytest.mark.large
def test_a_job_with_a_full_folder_ends_with_an_error_text(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    put_noise(cluster, 40)
    line = f"pipeline archive --to {tmp_path / 'a'} --endpoints {cluster.endpoint}"
    limited = ["sh", "-c", f'ulimit -f {FILE_BYTES // 512}; exec "$@"', "sh"]
    done = subprocess.run(
        [*limited, *command(*line.split(), "--master", "local[1]")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == EXIT_REFUSED, output
    assert ".parquet cannot be written: " in output
    assert "Traceback" not in output
    assert "ERROR" not in output
