"""What an archive needs afterwards: larger files, an end of what is kept, and no rubbish."""

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

FILE_BYTES: Final = 128 << 20  # of a compacted file; one of half of it is worth compacting
ORPHAN_AGE_MS: Final = 86_400_000  # a file that does not count may be of a job that still runs


def compact(job: ArchiveJob, *, bytes_max: int = FILE_BYTES) -> tuple[int, int]:
    """Write small files of a folder together; return how many there were and are.

    Each file but one that comes of it is as large as that, and so is never small again. Raises
    ArchiveError for what cannot be read, when the others are done.
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
class Expiring:
    """What an expiry would let go of."""

    files: int
    rows: int
    topics: tuple[str, ...]


def look(job: ArchiveJob, *, before_ms: int, topics: Iterable[str] = ()) -> Expiring:
    """Return what `expire` would let go of, and let go of nothing."""
    archive = job.archive()
    namespace = job.options.connection.namespace
    _, removed = expiring(archive, before_ms=before_ms, namespace=namespace, topics=topics)
    files = [archive.files[path] for path in removed]
    return Expiring(
        files=len(files),
        rows=sum(file.rows for file in files),
        topics=tuple(sorted({span.key.topic for file in files for span in file.spans})),
    )


def expire(job: ArchiveJob, *, before_ms: int, topics: Iterable[str] = ()) -> int:
    """Let go of ranges that were stored before an instant; return how many files that were.

    `topics`: those of the options' namespace alone; without any all that there is.
    """
    namespace = job.options.connection.namespace
    marks, removed = expiring(
        job.archive(), before_ms=before_ms, namespace=namespace, topics=topics
    )
    if marks:
        job.commit("expire", marks=marks, removed=removed)
    return len(removed)


def vacuum(job: ArchiveJob, *, age_ms: int = ORPHAN_AGE_MS) -> int:
    """Delete files that nobody reads any more; return how many.

    That is files that no entry names and that are older than any job, those that an entry let
    go of so long ago, and of the manifest what a snapshot has made needless. An entry says so
    before any is deleted: whoever stood still with such a file in its hands cannot commit it.
    """
    archive = job.archive()
    latest_ms = job.now_ms() - age_ms
    there = dict(job.store.data_files())
    due = {path for path, at_ms in _needless(archive, there).items() if at_ms <= latest_ms}
    # What was deleted by one that was killed is there still, and was said.
    if unsaid := sorted(due.difference(archive.deleted_by)):
        job.commit("vacuum", removed=tuple(unsaid))
    gone = sorted(due.intersection(there))
    for path in gone:
        job.store.delete(path)
    return len(gone) + job.store.delete_old_entries(before_ms=latest_ms)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Files that a vacuum leaves, as they have not been needless for long enough."""

    files: int
    first_due_at_ms: int | None  # None: there is none


def look_waiting(job: ArchiveJob, *, age_ms: int = ORPHAN_AGE_MS) -> Waiting:
    """Return how many data files a later vacuum deletes that one of now does not."""
    latest_ms = job.now_ms() - age_ms
    there = dict(job.store.data_files())
    needless = _needless(job.archive(), there)
    since_ms = [at_ms for path, at_ms in needless.items() if at_ms > latest_ms and path in there]
    return Waiting(
        files=len(since_ms), first_due_at_ms=min(since_ms) + age_ms if since_ms else None
    )


def _needless(archive: Archive, there: Mapping[str, int]) -> dict[str, int]:
    """Return since when files are needless: let go of, or made, and no entry names them.

    `there`: the data files that there are, and when each was made.
    """
    orphans = {path: made_at_ms for path, made_at_ms in there.items() if path not in archive.files}
    return orphans | archive.released_at_ms
