"""An archive in an S3 object store. Without a Spark session: tasks run in the test process."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import boto3
import pyarrow as pa
import pytest
from moto.server import ThreadedMotoServer

from tests.support.worlds.archiving import NOW_MS, archive_job
from tests.support.worlds.fake_cluster import FakeCluster
from tests.support.worlds.micro_batches import read_batch
from tidemill_pipeline.archive.manifest import ManifestEntry
from tidemill_pipeline.archive.store import ArchiveStore
from tidemill_pipeline.errors import AnotherWriter, ArchiveError
from tidemill_pipeline.jobs.archive_upkeep import compact, vacuum
from tidemill_pipeline.jobs.archive_verify import verify
from tidemill_pipeline.schema import VERSION
from tidemill_pipeline.sink.bad_rows import SCHEMA, BadRowWriter, TaskAttempt, drop, keep


@pytest.fixture
def server() -> Iterator[ThreadedMotoServer]:
    """Serve S3 for a test."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def path(server: ThreadedMotoServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the path of an archive in its own bucket, and set the environment for it."""
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "us",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = f"tide-{secrets.token_hex(4)}"  # Servers of one process share their buckets.
    boto3.client("s3").create_bucket(Bucket=bucket)
    return f"s3a://{bucket}/archives/orders"


def test_an_archive_lives_in_an_object_store(cluster: FakeCluster, path: str) -> None:
    def rows(mode: str) -> list[int]:
        found = read_batch(cluster, topic="orders", archivePath=path, readMode=mode)
        return sorted(row["queue_offset"] for row in found)

    cluster.add("orders", "a", 0, 70, body_size=100)
    assert archive_job(cluster, path).append().rows == 70
    cluster.add("orders", "a", 0, 30, body_size=100)
    assert archive_job(cluster, path).append().rows == 30
    assert archive_job(cluster, path).append().rows == 0
    assert verify(archive_job(cluster, path)).wrong == []
    before, after = compact(archive_job(cluster, path))
    assert before > after
    assert verify(archive_job(cluster, path)).wrong == []
    cluster.add("orders", "a", 0, 5)
    assert rows("archive") == list(range(100))
    assert rows("auto") == list(range(105))
    # Files without a manifest entry are deleted at the age of one day.
    store = ArchiveStore(path)
    assert len(list(store.data_files())) == before + after
    vacuum(archive_job(cluster, path, now_ms=2 * NOW_MS))
    assert len(list(store.data_files())) == after
    assert rows("archive") == list(range(100))


def test_a_number_that_is_taken_is_not_written_over(cluster: FakeCluster, path: str) -> None:
    """The check is not a lock: two archivers at the same time would both write."""
    cluster.add("orders", "a", 0, 10)
    archive_job(cluster, path).append()
    entry = ManifestEntry(
        number=0, kind="expire", at_ms=NOW_MS, run="other", schema_version=VERSION
    )
    with pytest.raises(AnotherWriter, match="run one at a time"):
        ArchiveStore(path).commit(entry)
    assert verify(archive_job(cluster, path)).wrong == []


def test_bad_rows_count_there_as_in_a_folder(path: str) -> None:
    drop(path, "w")
    rows = pa.table({name: [None, None] for name in SCHEMA.names}, schema=SCHEMA)
    for number in range(2):
        with BadRowWriter(path, TaskAttempt("w", 0, number)) as bad:
            bad.add(rows)
    assert all(name.startswith("_") for name in ArchiveStore(path).names())
    keep(path, [bad.staged])
    assert list(ArchiveStore(path).names()) == [bad.staged.final_name]


def test_a_missing_object_is_an_error(path: str) -> None:
    with pytest.raises(ArchiveError, match="there is no archive at s3a://"):
        ArchiveStore(path).existing()


def test_a_missing_bucket_is_an_error(cluster: FakeCluster, path: str) -> None:
    cluster.add("orders", "a", 0, 10)
    missing = path.replace("s3a://", "s3a://no-")
    with pytest.raises(ArchiveError, match=f"^{missing}/messages/.*NO_SUCH_BUCKET"):
        archive_job(cluster, missing).append()


def test_an_unreachable_object_store_is_an_error(
    cluster: FakeCluster, path: str, server: ThreadedMotoServer
) -> None:
    cluster.add("orders", "a", 0, 10)
    job = archive_job(cluster, path)
    job.append()
    server.stop()
    with pytest.raises(ArchiveError, match=f"^{path} cannot be read: .*NETWORK_CONNECTION"):
        job.append()
