"""The table of rows that could not be sent: of it counts what the driver has committed.

    DIR/_WRITE-PARTITION-ATTEMPT.parquet   of a task, until the driver says that this attempt counts
    DIR/bad-WRITE-PARTITION.parquet        what counts

WRITE is the same where Spark does a task again, or a batch of a stream: so the rows of a task that
is done again count once, and a batch that is done again takes the place of what it wrote before.
Whoever reads a folder as a table leaves out names that begin with an underscore.
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

# What cannot be sent: which row of its task it was, why, and all that it had.
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
_WRITE_BYTES: Final = 8  # of hexadecimal digits twice as many


class TaskAttempt(NamedTuple):
    """One attempt at one task."""

    write: str  # the same in each attempt, and where a batch is done again
    partition: int
    attempt: int


class StagedFile(NamedTuple):
    """What an attempt has written, in which table."""

    attempt: TaskAttempt
    row_count: int

    @property
    def name(self) -> str:
        """Return the file until it counts."""
        write, partition, attempt = self.attempt
        return f"{_staged_prefix(write)}{partition}-{attempt}.parquet"

    @property
    def final_name(self) -> str:
        """Return the file that counts."""
        return f"{_final_prefix(self.attempt.write)}{self.attempt.partition}.parquet"


@final
class BadRowWriter:
    """The bad rows of one attempt at a task, as they come; what fails leaves none."""

    def __init__(self, path: str, attempt: TaskAttempt) -> None:
        self._path, self._attempt = path, attempt
        self._store: ArchiveStore | None = None
        self._open = contextlib.ExitStack()
        self._writer: Any = None
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def add(self, rows: pa.Table) -> None:
        """Write rows with the columns of `SCHEMA`; the first of them make the file.

        Raises ArchiveError where the folder is full, or cannot be written.
        """
        with self._told():
            if self._writer is None:
                if "://" not in self._path:
                    Path(self._path).mkdir(parents=True, exist_ok=True)
                self._store = ArchiveStore(self._path)
                file = self._open.enter_context(self._store.writing(self.staged.name))
                self._writer = self._open.enter_context(pq.ParquetWriter(file, SCHEMA))
            self._writer.write_table(rows)
        self._count += rows.num_rows

    def _told(self) -> contextlib.AbstractContextManager[None]:
        return write_errors(f"{self._path}/{self.staged.name}")

    @property
    def staged(self) -> StagedFile:
        """Return what is written so far."""
        return StagedFile(self._attempt, self._count)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            with self._told():
                self._open.close()
            return
        # Why the task has failed is what is to be told, whatever its file says to that.
        with contextlib.suppress(Exception):
            self._open.close()
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.delete(self.staged.name)


def keep(path: str, staged: Collection[StagedFile]) -> None:
    """Let attempts of one write count, and nothing else of it. Raises PipelineError."""
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
                    f"{path} has no {each.name}, which a task has written there: deadLetterPath is"
                    " a folder that the driver and all executors have, or one of an object store"
                ) from error
            counting.add(each.final_name)
    # Of attempts that failed or were not wanted, and of the batch when it was done before.
    for name in list(store.names()):
        if name.startswith((_staged_prefix(write), _final_prefix(write))) and name not in counting:
            store.delete(name)


def drop(path: str, write: str) -> None:
    """Delete what attempts have written that are not to count."""
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
