"""A vacuum with paused jobs and with clocks that jumped. Without Spark."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.worlds.archiving import NOW_MS, ArchiveWorld
from tests.support.worlds.fake_cluster import FakeCluster
from tidemill_pipeline.archive.manifest import DataFile, ManifestEntry
from tidemill_pipeline.archive.reading import read_range
from tidemill_pipeline.archive.store import SNAPSHOT_ENTRIES, ArchiveStore
from tidemill_pipeline.archive.tasks import ArchiveTask
from tidemill_pipeline.errors import AnotherWriter, ArchiveError, PipelineError
from tidemill_pipeline.jobs.archive import ArchiveJob
from tidemill_pipeline.jobs.archive_upkeep import compact, vacuum
from tidemill_pipeline.options import SourceOptions

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def stands_still(job: ArchiveJob, meanwhile: Callable[[], None]) -> ArchiveJob:
    """Return a job that pauses after writing its files, for `meanwhile`, and then continues."""
    run_tasks = job.run_tasks

    def run(options: SourceOptions, tasks: Sequence[ArchiveTask]) -> list[dict[str, Any]]:
        answers = run_tasks(options, tasks)
        meanwhile()
        return answers

    job.run_tasks = run
    return job


def made_at(archive: ArchiveWorld, at_ms: int) -> None:
    for path in Path(archive.path).rglob("*.parquet"):
        os.utime(path, (at_ms / 1000,) * 2)


@pytest.mark.parametrize("work", [ArchiveJob.append, compact])
def test_an_append_paused_during_a_vacuum_is_discarded(
    cluster: FakeCluster, archive: ArchiveWorld, work: Callable[[ArchiveJob], object]
) -> None:
    for _ in range(3):
        cluster.add("orders", "a", 0, 5)
        archive.append()
    assert archive.verify().wrong == []
    cluster.add("orders", "a", 0, 5)
    before = archive.bodies()

    def a_day_passes() -> None:
        made_at(archive, NOW_MS)
        assert vacuum(archive.job(now_ms=NOW_MS + 25 * HOUR_MS)) == 1

    with pytest.raises(AnotherWriter, match="was deleted meanwhile"):
        work(stands_still(archive.job(), a_day_passes))
    assert archive.bodies() == before
    assert vacuum(archive.job(now_ms=NOW_MS + 60 * HOUR_MS)) == 0
    archive.append()
    assert len(archive.bodies()[0]) == 20
    assert archive.verify().wrong == []


def test_a_vacuum_killed_before_deletion_leaves_discarded_files(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 5)

    def a_vacuum_is_killed() -> None:
        made_at(archive, NOW_MS)
        store = DiesDeleting(archive.path)
        with pytest.raises(KeyboardInterrupt):
            vacuum(archive.job(now_ms=NOW_MS + 25 * HOUR_MS, store=store))

    with pytest.raises(AnotherWriter, match="was deleted meanwhile"):
        stands_still(archive.job(), a_vacuum_is_killed).append()
    # The next vacuum deletes the file and writes no new entry.
    number = archive.manifest().next_number
    assert vacuum(archive.job(now_ms=NOW_MS + 26 * HOUR_MS)) == 1
    assert archive.manifest().next_number == number


class DiesDeleting(ArchiveStore):
    """A store that kills its process during a deletion."""

    def delete(self, path: str) -> None:
        """Delete nothing."""
        raise KeyboardInterrupt(path)


def test_a_file_that_is_not_whole_does_not_count(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 5)

    def is_cut() -> None:
        (path,) = Path(archive.path).rglob("*.parquet")
        os.truncate(path, 9)

    with pytest.raises(ArchiveError, match="is missing or has another size than written"):
        stands_still(archive.job(), is_cut).append()
    assert archive.append().rows == 5


def test_a_recent_plan_is_readable_after_a_clock_was_ahead(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    for number in range(2):
        cluster.add("orders", "a", 0, 5)
        archive.job(now_ms=NOW_MS + number).append()
    compact(archive.job(now_ms=NOW_MS + 30 * DAY_MS))  # Its clock is ahead.
    cluster.add("orders", "a", 0, 5)
    archive.append()
    found = archive.manifest()
    ((key, queue),) = found.queues.items()
    planned = found.holding(key, 0, queue.end)
    made_at(archive, NOW_MS - 2 * DAY_MS)
    compact(archive.job())
    # Until a later snapshot exists.
    for _ in range(2 * SNAPSHOT_ENTRIES):
        archive.job().commit("append")
    assert len(list(Path(archive.path).glob("manifest/*.snapshot.json"))) > 0
    vacuum(archive.job(now_ms=NOW_MS + HOUR_MS))
    rows = read_range(
        ArchiveStore(archive.path), planned, key, start=0, end=queue.end, columns=["queue_offset"]
    )
    assert sum(batch.num_rows for batch in rows) == 15


def test_snapshots_record_the_files_deleted_by_a_vacuum(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 5)
    archive.append()
    job = archive.job()
    job.commit("vacuum", removed=("messages/orphan.parquet",))
    for _ in range(2 * SNAPSHOT_ENTRIES):
        archive.job().commit("append")
    file = DataFile(
        path="messages/orphan.parquet", bytes=0, rows=0, max_store_ms=0, spans=(), footer_crc=0
    )
    entry = ManifestEntry(
        number=archive.manifest().next_number,
        kind="append",
        at_ms=1,
        run="r",
        schema_version=1,
        files=(file,),
    )
    with pytest.raises(PipelineError, match="was deleted meanwhile"):
        archive.manifest().check(entry)
