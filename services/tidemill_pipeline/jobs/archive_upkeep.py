"""Upkeep of an archive: compaction, expiry and deletion of unused files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, final

from tidemill_pipeline.archive.manifest import (
    Archive,
    DataFile,
    by_incarnation,
    data_file,
    expiring,
)
from tidemill_pipeline.archive.tasks import ArchiveTask
from tidemill_pipeline.errors import ArchiveError
from tidemill_pipeline.jobs.archive import ArchiveJob

FILE_BYTES: Final = 128 << 20  # size of a compacted file; files below half of it are compacted
ORPHAN_AGE_MS: Final = 86_400_000  # a younger file without an entry may belong to a running job


def compact(job: ArchiveJob, *, bytes_max: int = FILE_BYTES) -> tuple[int, int]:
    """Combine small files of each folder; return the number of files before and after.

    All new files of a folder but one have `bytes_max`, so they are never compacted again. Raises
    ArchiveError for unreadable files after the other folders are done.
    """
    archive = job.archive()
    folders: dict[str, list[DataFile]] = {}
    for path, file in sorted(archive.files.items()):
        if file.bytes < bytes_max // 2:
            folders.setdefault(path.rpartition("/")[0], []).append(file)
    tasks = [
        ArchiveTask(
            work="compact",
            run=job.run,
            key=files[0].spans[0].key,
            start=0,
            end=0,
            files=tuple(files),
            folder=folder,
            bytes_max=bytes_max,
        )
        for folder, small in sorted(folders.items())
        for files in by_incarnation(small)
        if len(files) > 1
    ]
    every = job.run_tasks(job.options, tasks)
    answers = [answer for answer in every if not answer.get("wrong")]
    removed = tuple(path for answer in answers for path in answer["removed"])
    files = tuple(data_file(each) for answer in answers for each in answer["files"])
    if removed:
        job.commit("compact", files=files, removed=removed)
    if len(answers) < len(every):
        wrong = sorted(answer["wrong"] for answer in every if answer.get("wrong"))
        raise ArchiveError("\n".join(wrong))
    return len(removed), len(files)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiryPlan:
    """Files and messages that an expiry would remove."""

    files: int
    rows: int
    topics: tuple[str, ...]


def look(job: ArchiveJob, *, before_ms: int, topics: Iterable[str] = ()) -> ExpiryPlan:
    """Return what `expire` would remove, without a change."""
    archive = job.archive()
    namespace = job.options.connection.namespace
    _, removed = expiring(archive, before_ms=before_ms, namespace=namespace, topics=topics)
    files = [archive.files[path] for path in removed]
    return ExpiryPlan(
        files=len(files),
        rows=sum(file.rows for file in files),
        topics=tuple(sorted({span.key.topic for file in files for span in file.spans})),
    )


def expire(job: ArchiveJob, *, before_ms: int, topics: Iterable[str] = ()) -> int:
    """Remove ranges that were stored before an instant; return the number of their files.

    `topics`: topics of the options' namespace. Empty: all topics of all namespaces.
    """
    namespace = job.options.connection.namespace
    marks, removed = expiring(
        job.archive(), before_ms=before_ms, namespace=namespace, topics=topics
    )
    if marks:
        job.commit("expire", marks=marks, removed=removed)
    return len(removed)


def vacuum(job: ArchiveJob, *, age_ms: int = ORPHAN_AGE_MS) -> int:
    """Delete unused files; return their number.

    Unused for `age_ms` are files without an entry, files that an entry removed, and manifest
    entries that a snapshot replaces. An entry is committed first, so a job that was suspended with
    such a file cannot commit the file later.
    """
    archive = job.archive()
    latest_ms = job.now_ms() - age_ms
    there = dict(job.store.data_files())
    due = {path for path, at_ms in _needless(archive, there).items() if at_ms <= latest_ms}
    # A killed vacuum may have recorded these files without deleting them.
    if unsaid := sorted(due.difference(archive.deleted_by)):
        job.commit("vacuum", removed=tuple(unsaid))
    gone = sorted(due.intersection(there))
    for path in gone:
        job.store.delete(path)
    return len(gone) + job.store.delete_old_entries(before_ms=latest_ms)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class YoungFiles:
    """Unused files that are too young for a vacuum."""

    files: int
    first_due_at_ms: int | None  # None: no file


def look_waiting(job: ArchiveJob, *, age_ms: int = ORPHAN_AGE_MS) -> YoungFiles:
    """Return the unused data files that a vacuum does not delete yet."""
    latest_ms = job.now_ms() - age_ms
    there = dict(job.store.data_files())
    needless = _needless(job.archive(), there)
    since_ms = [at_ms for path, at_ms in needless.items() if at_ms > latest_ms and path in there]
    return YoungFiles(
        files=len(since_ms), first_due_at_ms=min(since_ms) + age_ms if since_ms else None
    )


def _needless(archive: Archive, there: Mapping[str, int]) -> dict[str, int]:
    """Return the unused files, each with the time since when it is unused.

    `there`: the existing data files with their creation times.
    """
    orphans = {path: made_at_ms for path, made_at_ms in there.items() if path not in archive.files}
    return orphans | archive.released_at_ms
