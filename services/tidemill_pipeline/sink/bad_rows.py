"""The table of rows that could not be sent.

    DIR/_WRITE-PARTITION-ATTEMPT.parquet   file of an attempt, until the driver commits it
    DIR/bad-WRITE-PARTITION.parquet        committed file

Repetitions of a task or of a batch of a stream have the same WRITE. The rows of a repeated task are
therefore in the table once, and a repeated batch replaces its earlier rows. Readers of a folder as
a table ignore names that begin with an underscore.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, final

import pyarrow as pa
import pyarrow.parquet as pq

from tidemill_pipeline.archive.store import ArchiveStore, write_errors
from tidemill_pipeline.errors import PipelineError

# Row number in the task, reason, and all columns of the row.
SCHEMA: Final = pa.schema(
    [
        ("row", pa.int64()),
        ("why", pa.string()),
        ("body", pa.binary()),
        ("topic", pa.string()),
        ("message_id", pa.string()),
        ("tag", pa.string()),
        ("keys", pa.list_(pa.string())),
        ("message_group", pa.string()),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("due_timestamp", pa.timestamp("us", "UTC")),
        ("delay_ms", pa.int64()),
        ("priority", pa.int32()),
        ("dedup_key", pa.string()),
        ("body_encoding", pa.string()),
    ]
)
_WRITE_BYTES: Final = 8  # 16 hexadecimal digits


class TaskAttempt(NamedTuple):
    """One attempt at one task."""

    write: str  # the same for all attempts, and for repetitions of a batch
    partition: int
    attempt: int


class StagedFile(NamedTuple):
    """The file of an attempt before its commit."""

    attempt: TaskAttempt
    row_count: int

    @property
    def name(self) -> str:
        """Return the name before the commit."""
        write, partition, attempt = self.attempt
        return f"{_staged_prefix(write)}{partition}-{attempt}.parquet"

    @property
    def final_name(self) -> str:
        """Return the name after the commit."""
        return f"{_final_prefix(self.attempt.write)}{self.attempt.partition}.parquet"


@final
class BadRowWriter:
    """Writer of the bad rows of one attempt. A failed attempt leaves no file."""

    def __init__(self, path: str, attempt: TaskAttempt) -> None:
        self._path, self._attempt = path, attempt
        self._store: ArchiveStore | None = None
        self._open = contextlib.ExitStack()
        self._writer: Any = None
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def add(self, rows: pa.Table) -> None:
        """Write rows with the columns of `SCHEMA`. The first call creates the file.

        Raises ArchiveError if the folder is full or read-only.
        """
        with self._errors():
            if self._writer is None:
                if "://" not in self._path:
                    Path(self._path).mkdir(parents=True, exist_ok=True)
                self._store = ArchiveStore(self._path)
                file = self._open.enter_context(self._store.writing(self.staged.name))
                self._writer = self._open.enter_context(pq.ParquetWriter(file, SCHEMA))
            self._writer.write_table(rows)
        self._count += rows.num_rows

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return write_errors(f"{self._path}/{self.staged.name}")

    @property
    def staged(self) -> StagedFile:
        """Return the file as written so far."""
        return StagedFile(self._attempt, self._count)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            with self._errors():
                self._open.close()
            return
        # Suppress errors of the file, so that Spark reports the error of the task.
        with contextlib.suppress(Exception):
            self._open.close()
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.delete(self.staged.name)


def keep(path: str, staged: Collection[StagedFile]) -> None:
    """Commit the attempts of one write, and delete its other files. Raises PipelineError."""
    writes = {each.attempt.write for each in staged}
    if not writes:
        return
    (write,) = writes
    store = ArchiveStore(path)
    counting = set()
    for each in staged:
        if each.row_count:
            try:
                store.move(each.name, each.final_name)
            except FileNotFoundError as error:
                raise PipelineError(
                    f"{path} has no file {each.name}, which a task wrote: deadLetterPath must be a"
                    " folder that the driver and all executors share, or in an object store"
                ) from error
            counting.add(each.final_name)
    # Delete the files of failed and superfluous attempts and of an earlier run of the batch.
    for name in list(store.names()):
        if name.startswith((_staged_prefix(write), _final_prefix(write))) and name not in counting:
            store.delete(name)


def drop(path: str, write: str) -> None:
    """Delete the files of the attempts of a write that are not committed."""
    store = ArchiveStore(path)
    for name in list(store.names()):
        if name.startswith(_staged_prefix(write)):
            store.delete(name)


def _staged_prefix(write: str) -> str:
    return f"_{_digest(write)}-"


def _final_prefix(write: str) -> str:
    return f"bad-{_digest(write)}-"


def _digest(write: str) -> str:
    return blake2b(write.encode(), digest_size=_WRITE_BYTES).hexdigest()
