"""What Spark runs for the archive: a list of tasks, each with an answer, and no row between them.

The rows of an archive go from the broker into Parquet within one Python worker; Spark hands out the
work and repeats what fails (ADR 0050). A task is JSON, and so is its answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, final

import numpy as np
import pyarrow as pa

from tidemill_pipeline import schema as columns
from tidemill_pipeline.archive.manifest import (
    ArchivedQueue,
    ArchivedRange,
    DataFile,
    QueueKey,
    data_file,
)
from tidemill_pipeline.archive.reading import read_range
from tidemill_pipeline.archive.store import ArchiveStore
from tidemill_pipeline.archive.writing import WrittenRange, merge_files, write_range
from tidemill_pipeline.client import connect
from tidemill_pipeline.errors import ArchiveError, ClusterRejection, DataLoss
from tidemill_pipeline.offsets import QueueEnds, SourceQueue, SourceRange
from tidemill_pipeline.options import SourceOptions
from tidemill_pipeline.pulling import OnGap, pull_range
from tidemill_pipeline.rows import message_batches

ANSWER: Final = "answer string"  # the one column of what tasks answer


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveTask:
    """One piece of work: `append` a range, `verify` one, or `compact` a folder."""

    work: str
    run: str
    key: QueueKey
    start: int
    end: int
    files: tuple[DataFile, ...] = ()
    # Of `verify` the range itself, of `append` the one before it.
    expected: ArchivedRange | None = None
    nobody: str = ""  # why no broker is asked
    folder: str = ""
    bytes_max: int = 0

    def as_json(self) -> str:
        """Return it as text, for a plan of Spark."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ArchiveTask:
        """Read what `as_json` wrote."""
        found = json.loads(text)
        expected = found["expected"]
        return cls(
            **found
            | {
                "key": QueueKey(*found["key"]),
                "files": tuple(data_file(each) for each in found["files"]),
                "expected": None
                if expected is None
                else ArchivedRange(**{**expected, "key": QueueKey(*expected["key"])}),
            }
        )


# Runs tasks somewhere, and returns their answers in any order.
Runner = Callable[[SourceOptions, Sequence[ArchiveTask]], list[dict[str, Any]]]


def run_task(
    options: SourceOptions, task: ArchiveTask, store: ArchiveStore | None = None
) -> dict[str, Any]:
    """Do one piece of work and return its answer. Runs in an executor.

    What goes wrong with one queue, or one folder, is an answer, too: as an error it would end all
    other tasks. What is no better for the others is raised: no answer, a disk that is full.
    """
    store = store or ArchiveStore(options.archive_path)
    schema = columns.of_dataset("messages")
    if task.work == "append":
        try:
            check_follows(options, task.key.queue, task.expected)
        except ArchiveError as error:
            return _failed(task, str(error))
        except ClusterRejection as error:
            return _failed(task, f"{task.key}: {error}")
        try:
            written = append(store, options, task, schema)
        except DataLoss as error:
            return _failed(task, str(error))
        except ClusterRejection as error:
            return _failed(task, f"{task.key}: {error}")
        return {"range": asdict(written.range), "files": [asdict(each) for each in written.files]}
    if task.work == "verify":
        assert task.expected is not None, "a verification has what it compares with"
        wrong, closed = verify(store, options, task)
        return {"range": asdict(task.expected), "wrong": wrong, "closed": closed}
    assert task.work == "compact", task.work
    try:
        return compact(store, task, schema)
    except ArchiveError as error:
        return _failed(task, str(error))


def _failed(task: ArchiveTask, why: str) -> dict[str, Any]:
    return {"key": list(task.key), "start": task.start, "wrong": why}


def append(
    store: ArchiveStore, options: SourceOptions, task: ArchiveTask, schema: pa.Schema
) -> WrittenRange:
    """Pull a range from its broker group and write it.

    Raises DataLoss, ClusterRejection and ArchiveError.
    """
    gaps = GapList()
    batches = _pulled(options, task, schema, gaps.refuse if options.fails_on_data_loss else gaps)
    written = write_range(
        store, task.key, batches, start=task.start, end=task.end, run=task.run, schema=schema
    )
    written.range = replace(written.range, lost=gaps.offsets)
    return written


@final
@dataclass(slots=True)
class GapList:
    """What was gone of a range when it was pulled."""

    found: list[tuple[int, int]] = field(default_factory=list)
    why: str = ""  # of the last one

    def __call__(self, _queue: SourceQueue, start: int, end: int, why: str) -> None:
        """Take one in."""
        self.found.append((start, end))
        self.why = why

    def refuse(self, queue: SourceQueue, start: int, end: int, why: str) -> None:
        """Raise DataLoss."""
        raise lost_before_archived(queue, start, end, why)

    @property
    def offsets(self) -> int:
        """Return how many offsets they are."""
        return sum(end - start for start, end in self.found)


def lost_before_archived(queue: SourceQueue, start: int, end: int, why: str) -> DataLoss:
    """Return the error that an archive cannot have what it should."""
    return DataLoss(
        f"{queue}: offsets from {start} to {end} were gone before they were archived: {why}. With"
        " --allow-loss the archive goes on behind them, and says so in its manifest"
    )


def check_follows(options: SourceOptions, queue: SourceQueue, last: ArchivedRange | None) -> None:
    """Raise ArchiveError where the last message that was archived is not the broker's.

    A store that was restored from a backup has the same log id, and gives the offsets behind it
    again, to messages that are younger than any that was archived there.
    """
    if last is None or not last.rows:
        return
    part = SourceRange(queue=queue, start=last.last_offset, end=last.last_offset + 1)
    # One that retention took is not there to be compared. It may be none that is asked for.
    gone = GapList()
    options = replace(options, filter="*")
    client = connect(options.connection)
    for messages in pull_range(client, options, part, with_bodies=False, on_gap=gone):
        stored_ms = messages[0].system_properties.store_timestamp.ToMilliseconds()
        if stored_ms != last.last_store_ms:
            raise foreign_queue(
                queue, f"its message at offset {part.start} is of another time than the archive's"
            )


def foreign_queue(queue: SourceQueue, why: str) -> ArchiveError:
    """Return the error that a queue is not the one that was archived, though it is called so."""
    return ArchiveError(
        f"{queue}: {why}. Its store was restored from a backup, or has lost messages; what it has"
        " now is not what is archived, and goes into another folder: --to"
    )


def shorter(archived: ArchivedQueue, ends: QueueEnds) -> str:
    """Return that a queue ends before what is archived of it, as a part of a sentence."""
    return f"it ends at {ends.max_offset}, and is archived up to {archived.end}"


def _pulled(
    options: SourceOptions, task: ArchiveTask, schema: pa.Schema, on_gap: OnGap
) -> Iterator[pa.RecordBatch]:
    key = task.key
    part = SourceRange(queue=key.queue, start=task.start, end=task.end)
    for messages in pull_range(connect(options.connection), options, part, on_gap=on_gap):
        yield from message_batches(
            messages,
            schema=schema,
            topic=key.topic,
            broker=key.broker,
            namespace=key.namespace,
            decodes_body=False,
        )


def verify(store: ArchiveStore, options: SourceOptions, task: ArchiveTask) -> tuple[str, str]:
    """Compare a row of the manifest, the archive's files, their checksums, and the broker.

    Returns what is wrong, and why some or all of it could not be compared with the broker; each is
    empty where nothing is.
    """
    expected = task.expected
    assert expected is not None, "a verification compares with a row of the manifest"
    # All columns: of those whose values are not compared, pages are, with their checksums.
    every = columns.of_dataset("messages").names
    try:
        archived = _digests_of(
            read_range(
                store, task.files, task.key, start=expected.start, end=expected.end, columns=every
            )
        )
    except ArchiveError as error:
        return str(error), ""
    if (archived.rows, archived.crc_xor) != (expected.rows, expected.crc_xor):
        return (
            f"the manifest has {expected.rows} rows, its files {_counted(archived, expected)}",
            "",
        )
    if archived.is_out_of_order:
        return "the files have an offset twice, or out of order", ""
    if task.nobody:
        return "", task.nobody if expected.rows else ""
    schema = pa.schema([pa.field("queue_offset", pa.int64()), pa.field("body_crc32", pa.int64())])
    gaps = GapList()
    try:
        check_follows(options, task.key.queue, expected)
        stored = _digests_of(_pulled(options, task, schema, gaps))
    except ArchiveError as error:
        return f"{error}; --store-is-gone seals it by its files alone", ""
    except ClusterRejection as error:
        return f"it cannot be compared: {error}", ""
    kept = archived.without(gaps.found)
    if expected.lost and kept != stored and kept.is_among(stored):
        return "", "the broker has again what was damaged or gone when it was archived"
    if kept != stored:
        return f"the archive has {kept.rows} rows, the broker {_counted(stored, expected)}", ""
    return "", gaps.why if expected.rows else ""


@final
class _RowDigests:
    """Rows by their offsets and the checksums of their bodies: 16 bytes each."""

    def __init__(self, offsets: Any, checksums: Any) -> None:
        self._offsets, self._checksums = offsets, checksums

    @property
    def rows(self) -> int:
        return len(self._offsets)

    @property
    def crc_xor(self) -> int:
        return int(np.bitwise_xor.reduce(self._checksums, initial=0))

    @property
    def is_out_of_order(self) -> bool:
        return bool((self._offsets[1:] <= self._offsets[:-1]).any())

    def without(self, gaps: Sequence[tuple[int, int]]) -> _RowDigests:
        """Return what lies in none of these ranges."""
        kept = np.ones(self.rows, bool)
        for start, end in gaps:
            kept &= (self._offsets < start) | (self._offsets >= end)
        return _RowDigests(self._offsets[kept], self._checksums[kept])

    def is_among(self, other: _RowDigests) -> bool:
        """Say whether all of it is in another one, too."""
        places = np.searchsorted(other._offsets, self._offsets)
        return (
            self.rows < other.rows
            and bool((places < other.rows).all())
            and np.array_equal(other._offsets[places], self._offsets)
            and np.array_equal(other._checksums[places], self._checksums)
        )

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _RowDigests), other
        return np.array_equal(self._offsets, other._offsets) and np.array_equal(
            self._checksums, other._checksums
        )

    __hash__ = None  # type: ignore[assignment]  # Nobody puts it into a set.


def _digests_of(batches: Iterator[pa.RecordBatch]) -> _RowDigests:
    offsets, checksums = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for batch in batches:
        offsets.append(batch["queue_offset"].to_numpy())
        checksums.append(batch["body_crc32"].to_numpy())
    return _RowDigests(np.concatenate(offsets), np.concatenate(checksums))


def _counted(found: _RowDigests, expected: ArchivedRange) -> str:
    return str(found.rows) + (" with other bodies" if found.rows == expected.rows else "")


def compact(store: ArchiveStore, task: ArchiveTask, schema: pa.Schema) -> dict[str, Any]:
    """Write the files of a folder as fewer, larger ones."""
    files = merge_files(
        store, task.files, folder=task.folder, schema=schema, bytes_max=task.bytes_max
    )
    before, after = sum(file.rows for file in task.files), sum(file.rows for file in files)
    assert before == after, f"compaction keeps all rows: {before} before, {after} after"
    return {
        "files": [asdict(each) for each in files],
        "removed": [file.path for file in task.files],
    }
