"""The archive's job over a cluster in memory. Its tasks run in this process, one by one."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.worlds.fake_cluster import FakeCluster
from tests.support.worlds.micro_batches import read_batch
from tidemill_pipeline.archive.manifest import Archive, with_crc
from tidemill_pipeline.archive.reading import read_footer, read_range
from tidemill_pipeline.archive.store import ArchiveStore
from tidemill_pipeline.archive.tasks import ArchiveTask, run_task
from tidemill_pipeline.jobs.archive import ArchiveJob, ArchiveProgress
from tidemill_pipeline.jobs.archive_upkeep import compact
from tidemill_pipeline.jobs.archive_verify import VerificationResult, verify
from tidemill_pipeline.options import SourceOptions, parse_source

NOW_MS = 1_800_000_000_000


def archive_job(
    cluster: FakeCluster,
    path: str,
    *,
    store: ArchiveStore | None = None,
    batch_rows: int = 50,
    task_rows: int = 20,
    now_ms: int = NOW_MS,
    gate_group: str = "",
    store_is_gone: bool = False,
    **options: str,
) -> ArchiveJob:
    """Return a job that archives the whole cluster."""
    parsed = parse_source(
        {
            "endpoints": cluster.endpoint,
            "topicPattern": ".*",
            "archivePath": path,
            "readMode": "broker",
            "pullBatchSize": "7",
            "maxRetries": "2",
            "retryBackoffMs": "5",
            **options,
        },
        is_stream=False,
    )
    own = store or ArchiveStore(path)

    def run_here(options: SourceOptions, tasks: Sequence[ArchiveTask]) -> list[dict[str, Any]]:
        return [run_task(options, task, own) for task in tasks]

    return ArchiveJob(
        parsed,
        run_here,
        now_ms=itertools.count(now_ms).__next__,
        store=own,
        batch_rows=batch_rows,
        cores=1,
        task_rows=task_rows,
        gate_group=gate_group,
        store_is_gone=store_is_gone,
    )


class ArchiveWorld:
    """An archive of a cluster in memory with its jobs and readers."""

    def __init__(self, cluster: FakeCluster, path: Path) -> None:
        self.cluster = cluster
        self.path = str(path)

    def job(self, **options: Any) -> ArchiveJob:
        """Return a job with the options of `archive_job`."""
        return archive_job(self.cluster, self.path, **options)

    def append(self) -> ArchiveProgress:
        """Archive new messages."""
        return self.job().append()

    def verify(self) -> VerificationResult:
        """Compare unsealed ranges with the cluster, and seal equal ones."""
        return verify(self.job())

    def compact(self) -> tuple[int, int]:
        """Merge small files into larger ones."""
        return compact(self.job())

    def manifest(self) -> Archive:
        """Return the current manifest."""
        return ArchiveStore(self.path).archive()

    def accept_files(self) -> None:
        """Write the current sizes and footer checksums of the files into the manifest."""
        store = ArchiveStore(self.path)
        for path in sorted(Path(self.path).glob("manifest/*.json")):
            entry = json.loads(path.read_text("utf-8"))
            del entry["crc"]
            for file in entry["files"]:
                with store.open(file["path"]) as opened:
                    file["bytes"] = opened.size()
                    file["footer_crc"] = zlib.crc32(read_footer(opened))
            path.write_text(with_crc(json.dumps(entry, separators=(",", ":"))), "utf-8")

    def files(self) -> list[Path]:
        """Return the files in the manifest."""
        return [Path(self.path) / path for path in self.manifest().files]

    def read(self, **options: str) -> list[dict[str, Any]]:
        """Return the archived rows of the topic `orders`."""
        given = {"topic": "orders", "readMode": "archive", **options}
        return read_batch(self.cluster, archivePath=self.path, **given)

    def bodies(self) -> list[list[bytes]]:
        """Return the archived bodies of each queue, in the order of the manifest."""
        store = ArchiveStore(self.path)
        archive = store.archive()
        return [
            [
                body
                for batch in read_range(
                    store,
                    archive.holding(key, queue.start, queue.end),
                    key,
                    start=queue.start,
                    end=queue.end,
                    columns=["body"],
                )
                for body in batch["body"].to_pylist()
            ]
            for key, queue in archive.queues.items()
        ]

    def sealed(self) -> list[tuple[str, int, int]]:
        """Return the topic, the sealed end and the end of each queue."""
        queues = self.manifest().queues
        return [(key.topic, queue.sealed, queue.end) for key, queue in queues.items()]
