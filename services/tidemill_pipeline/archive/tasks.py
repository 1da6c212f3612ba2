"""The tasks that Spark runs for the archive. Each has an answer; no rows pass through Spark.

One Python worker pulls rows from the broker and writes them into Parquet. Spark distributes the
tasks and repeats failed ones (ADR 0050). A task and its answer are JSON.
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

ANSWER: Final = "answer string"  # the only column of the answers


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveTask:
    """One task: `append` a range, `verify` a range, or `compact` a folder."""

    work: str
    run: str
    key: QueueKey
    start: int
    end: int
    files: tuple[DataFile, ...] = ()
    # Verify: the range itself. Append: the range before it.
    expected: ArchivedRange | None = None
    nobody: str = ""  # reason for not asking a broker
    folder: str = ""
    bytes_max: int = 0

    def as_json(self) -> str:
        """Return the task as text for a Spark plan."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ArchiveTask:
        """Read a text of `as_json`."""
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


# Runs tasks and returns their answers in any order.
Runner = Callable[[SourceOptions, Sequence[ArchiveTask]], list[dict[str, Any]]]


def run_task(
    options: SourceOptions, task: ArchiveTask, store: ArchiveStore | None = None
) -> dict[str, Any]:
    """Run one task in an executor and return its answer.

    A failure of one queue or folder is an answer, since an exception would end all other tasks. A
    failure that affects all tasks is raised: no answer from brokers, a full disk.
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
    batches = _pulled(options, task, schema, gaps.reject if options.fails_on_data_loss else gaps)
    written = write_range(
        store, task.key, batches, start=task.start, end=task.end, run=task.run, schema=schema
    )
    written.range = replace(written.range, lost=gaps.offset_count)
    return written


@final
@dataclass(slots=True)
class GapList:
    """Lost offsets of a range, found by a pull."""

    ranges: list[tuple[int, int]] = field(default_factory=list)
    why: str = ""  # reason for the last one

    def __call__(self, _queue: SourceQueue, start: int, end: int, why: str) -> None:
        """Add a range of lost offsets."""
        self.ranges.append((start, end))
        self.why = why

    def reject(self, queue: SourceQueue, start: int, end: int, why: str) -> None:
        """Raise DataLoss."""
        raise lost_before_archived(queue, start, end, why)

    @property
    def offset_count(self) -> int:
        """Return the number of lost offsets."""
        return sum(end - start for start, end in self.ranges)


def lost_before_archived(queue: SourceQueue, start: int, end: int, why: str) -> DataLoss:
    """Return the error for messages that were lost before they were archived."""
    return DataLoss(
        f"{queue}: offsets from {start} to {end} were lost before they were archived: {why}. With"
        " --allow-loss the archive continues after them and records the loss in its manifest"
    )


def check_follows(options: SourceOptions, queue: SourceQueue, last: ArchivedRange | None) -> None:
    """Raise ArchiveError if the broker has another message at the last archived offset.

    A store that was restored from a backup keeps its log id but assigns later offsets again. The
    messages at these offsets have later store times than the archived ones.
    """
    if last is None or not last.rows:
        return
    part = SourceRange(queue=queue, start=last.last_offset, end=last.last_offset + 1)
    # If retention deleted the message, there is nothing to compare. The filter must not hide it.
    gaps = GapList()
    options = replace(options, filter="*")
    client = connect(options.connection)
    for messages in pull_range(client, options, part, with_bodies=False, on_gap=gaps):
        stored_ms = messages[0].system_properties.store_timestamp.ToMilliseconds()
        if stored_ms != last.last_store_ms:
            raise foreign_queue(
                queue,
                f"its message at offset {part.start} has another store time than in the archive",
            )


def foreign_queue(queue: SourceQueue, why: str) -> ArchiveError:
    """Return the error for a queue that has other messages than the archive at its offsets."""
    return ArchiveError(
        f"{queue}: {why}. Its store was restored from a backup or has lost messages; archive its"
        " new messages into another folder: --to"
    )


def shorter(archived: ArchivedQueue, ends: QueueEnds) -> str:
    """Return the part of a sentence for a queue that ends before its archived end."""
    return f"it ends at {ends.max_offset} but is archived up to {archived.end}"


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
    """Compare a range of the manifest with its files, their checksums and the broker.

    Return two texts, each possibly empty: the differences, and the reason why some offsets could
    not be compared with the broker.
    """
    expected = task.expected
    assert expected is not None, "a verification compares with a row of the manifest"
    # Read all columns, to check the checksums of all pages.
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
            f"the manifest has {expected.rows} rows, but its files {_counted(archived, expected)}",
            "",
        )
    if archived.is_out_of_order:
        return "the files have an offset twice or out of order", ""
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
    kept = archived.without(gaps.ranges)
    if expected.lost and kept != stored and kept.is_among(stored):
        return "", "the broker has messages again that were damaged or lost when it was archived"
    if kept != stored:
        return f"the archive has {kept.rows} rows, but the broker {_counted(stored, expected)}", ""
    return "", gaps.why if expected.rows else ""


@final
class _RowDigests:
    """Offsets and body checksums of rows: 16 bytes per row."""

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
        """Return the rows outside of these ranges."""
        kept = np.ones(self.rows, bool)
        for start, end in gaps:
            kept &= (self._offsets < start) | (self._offsets >= end)
        return _RowDigests(self._offsets[kept], self._checksums[kept])

    def is_among(self, other: _RowDigests) -> bool:
        """Return whether `other` has all of these rows and more."""
        at = np.searchsorted(other._offsets, self._offsets)
        return (
            self.rows < other.rows
            and bool((at < other.rows).all())
            and np.array_equal(other._offsets[at], self._offsets)
            and np.array_equal(other._checksums[at], self._checksums)
        )

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _RowDigests), other
        return np.array_equal(self._offsets, other._offsets) and np.array_equal(
            self._checksums, other._checksums
        )

    __hash__ = None  # type: ignore[assignment]  # Unhashable.


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
