"""What Spark runs for the archive: a list of tasks, each with an answer, and no row between them.

The rows of an archive go from the broker into Parquet within one Python worker; Spark hands out the
work and repeats what fails (ADR 0050). A task is JSON, and so is its answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, final

import pyarrow as pa

from tidemill.pipeline import schema as columns
from tidemill.pipeline.archive.manifest import DataFile, QueueKey, Range, Span, data_file
from tidemill.pipeline.archive.reading import read_range
from tidemill.pipeline.archive.store import ArchiveStore
from tidemill.pipeline.archive.writing import Written, crc_xor, merge_files, write_range
from tidemill.pipeline.client import connect
from tidemill.pipeline.errors import DataLoss
from tidemill.pipeline.offsets import QueueName, QueueRange
from tidemill.pipeline.options import SourceOptions
from tidemill.pipeline.pulling import pull_range
from tidemill.pipeline.rows import message_batch

ANSWER: Final = "answer string"  # the one column of what tasks answer


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece of work: `append` a range, `verify` one, or `compact` a folder."""

    work: str
    run: str
    key: QueueKey
    start: int
    end: int
    files: tuple[DataFile, ...] = ()
    expected: Range | None = None
    folder: str = ""
    bytes_max: int = 0

    def as_json(self) -> str:
        """Return it as text, for a plan of Spark."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
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
                else Range(**{**expected, "key": QueueKey(*expected["key"])}),
            }
        )


# Runs tasks somewhere, and returns their answers in any order.
Runner = Callable[[SourceOptions, Sequence[Task]], list[dict[str, Any]]]


def run_task(
    options: SourceOptions, task: Task, store: ArchiveStore | None = None
) -> dict[str, Any]:
    """Do one piece of work and return its answer. Runs in an executor."""
    store = store or ArchiveStore(options.archive_path)
    schema = columns.of_dataset("messages")
    if task.work == "append":
        written = append(store, options, task, schema)
        return {"range": asdict(written.range), "files": [asdict(each) for each in written.files]}
    if task.work == "verify":
        assert task.expected is not None, "a verification has what it compares with"
        try:
            wrong, gone = verify(store, options, task), ""
        except DataLoss as error:
            wrong, gone = "", str(error)  # Nobody can say any more; it stays unsealed.
        return {"range": asdict(task.expected), "wrong": wrong, "gone": gone}
    assert task.work == "compact", task.work
    return compact(store, task, schema)


def append(store: ArchiveStore, options: SourceOptions, task: Task, schema: pa.Schema) -> Written:
    """Pull a range from its broker group and write it."""
    return write_range(
        store, task.key, _pulled(options, task, schema), start=task.start, end=task.end,
        run=task.run, schema=schema,
    )  # fmt: skip


def _pulled(options: SourceOptions, task: Task, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    key = task.key
    part = QueueRange(
        name=QueueName(key.topic, key.broker, key.queue_id), start=task.start, end=task.end
    )
    for messages in pull_range(connect(options.connection), options, part):
        yield message_batch(
            messages, schema=schema, topic=key.topic, broker=key.broker, namespace=key.namespace,
            decodes_body=False,
        )  # fmt: skip


def verify(store: ArchiveStore, options: SourceOptions, task: Task) -> str:
    """Compare a row of the manifest with the archive's files and with the broker.

    Returns what is wrong; empty: nothing is.
    """
    expected = task.expected
    assert expected is not None, "a verification compares with a row of the manifest"
    looked = ["queue_offset", "body_crc32"]
    archived = _looked(
        read_range(
            store, task.files, task.key, start=expected.start, end=expected.end, columns=looked
        )
    )
    if (archived.rows, archived.crc_xor) != (expected.rows, expected.crc_xor):
        return f"the manifest has {expected.rows} rows, its files {_counted(archived, expected)}"
    if archived.is_out_of_order:
        return "the files have an offset twice, or out of order"
    schema = pa.schema([pa.field("queue_offset", pa.int64()), pa.field("body_crc32", pa.int64())])
    stored = _looked(_pulled(options, task, schema))
    if stored != archived:
        return f"the archive has {archived.rows} rows, the broker {_counted(stored, expected)}"
    return ""


@final
@dataclass(slots=True)
class _Looked:
    """What rows amount to."""

    rows: int = 0
    crc_xor: int = 0
    offsets_sum: int = 0
    last: int = -1
    is_out_of_order: bool = False


def _looked(batches: Iterator[pa.RecordBatch]) -> _Looked:
    found = _Looked()
    for batch in batches:
        offsets = batch["queue_offset"].to_numpy()
        found.rows += batch.num_rows
        found.crc_xor ^= crc_xor(batch)
        found.offsets_sum += int(offsets.sum())
        if offsets[0] <= found.last or (offsets[1:] <= offsets[:-1]).any():
            found.is_out_of_order = True
        found.last = int(offsets[-1])
    return found


def _counted(found: _Looked, expected: Range) -> str:
    return str(found.rows) + (" with other bodies" if found.rows == expected.rows else "")


def compact(store: ArchiveStore, task: Task, schema: pa.Schema) -> dict[str, Any]:
    """Write the files of a folder as fewer, larger ones."""
    spans = [(span, file) for file in task.files for span in file.spans]
    of_span = {(span.key, span.start): file for span, file in spans}

    def read(span: Span) -> Iterator[pa.RecordBatch]:
        file = of_span[span.key, span.start]
        for batch in read_range(
            store, [file], span.key, start=span.start, end=span.end, columns=schema.names
        ):
            yield pa.RecordBatch.from_arrays(
                [batch[field.name].cast(field.type) for field in schema], schema=schema
            )

    files = merge_files(
        store, [span for span, _ in spans], read, folder=task.folder, schema=schema,
        bytes_max=task.bytes_max,
    )  # fmt: skip
    before, after = sum(file.rows for file in task.files), sum(file.rows for file in files)
    assert before == after, f"compaction keeps all rows: {before} before, {after} after"
    return {
        "files": [asdict(each) for each in files],
        "removed": [file.path for file in task.files],
    }
