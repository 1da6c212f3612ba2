"""Spark writers of a batch and of a stream. At-least-once delivery needs no state.

A row that cannot be sent fails the task or goes to the table of bad rows with the reason. The
driver commits the bad rows of the attempts that count.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from tidemill.common.clock import SystemClock
from tidemill_pipeline.client import connect
from tidemill_pipeline.options import SinkOptions
from tidemill_pipeline.pulling import log
from tidemill_pipeline.sink.bad_rows import (
    SCHEMA,
    BadRowWriter,
    StagedFile,
    TaskAttempt,
    drop,
    keep,
)
from tidemill_pipeline.sink.messages import (
    NO_TEXT,
    READ_ONLY,
    SET_BY_CLUSTER,
    RowIds,
    check_columns,
)
from tidemill_pipeline.sink.sending import Sender
from tidemill_pipeline.sink.target_topics import check_target

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

# Spark's properties for the id of a query and of its batch, stable over restarts.
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"
_ID_BYTES: Final = 16  # of the random id of a batch write


@dataclass
class SinkTaskResult(WriterCommitMessage):
    """Result of a task."""

    rows: int
    bad: StagedFile


def send_rows(
    options: SinkOptions, batches: Iterator[pa.RecordBatch], attempt: TaskAttempt
) -> SinkTaskResult:
    """Send the rows of a task and collect bad rows. Runs in an executor."""
    sender = Sender(
        connect(options.connection),
        options,
        max_retries=options.connection.max_retries,
        ids=RowIds(attempt.write, attempt.partition),
        now_ms=SystemClock().wall_ms,
    )
    done = 0
    with BadRowWriter(options.dead_letter_path, attempt) as bad:
        for batch in batches:
            sent = sender.send(rows_of(batch), first=done)
            if sent.bad:
                bad.add(_bad_rows(batch, sent.bad, first=done))
                sent.bad.clear()
            done += batch.num_rows
    return SinkTaskResult(rows=sender.sent.rows, bad=bad.staged)


class _TaskWriter:
    """Common part of the writers: tasks and their bad rows."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        check_columns(
            {field.name: field.dataType.simpleString() for field in schema.fields}, options
        )
        if options.topic:
            check_target(connect(options.connection), options)
        self.options = options
        self.run = secrets.token_hex(_ID_BYTES)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkTaskResult:
        """Send the rows of a task. Runs in an executor."""
        task = _task()
        attempt = TaskAttempt(self._write(), task.partitionId(), task.taskAttemptId())
        return send_rows(self.options, iterator, attempt)

    def _write(self) -> str:
        """Return the id of the write, the same for repeated tasks."""
        return self.run

    def keep(self, messages: Sequence[SinkTaskResult | None]) -> None:
        """Commit the bad rows of the finished tasks, and log their number."""
        if not self.options.dead_letter_path:
            return
        staged = [each.bad for each in messages if each is not None]
        keep(self.options.dead_letter_path, staged)
        if bad := sum(each.row_count for each in staged):
            log.warning("cannot send %d rows; they are in the table of bad rows", bad)

    def drop(self, messages: Sequence[SinkTaskResult | None]) -> None:
        """Delete all bad rows: the write will be repeated."""
        if not self.options.dead_letter_path:
            return
        # If no task of a stream's batch finished, its id is unknown. The repeated batch knows it.
        writes = {each.bad.attempt.write for each in messages if each is not None}
        for write in writes | {self.run}:
            drop(self.options.dead_letter_path, write)


class BatchWriter(_TaskWriter, DataSourceArrowWriter):
    """Writer of a batch. Several in one `foreachBatch` are separate writes."""

    def commit(self, messages: list[SinkTaskResult | None]) -> None:
        """Commit bad rows."""
        self.keep(messages)

    def abort(self, messages: list[SinkTaskResult | None]) -> None:
        """Delete bad rows."""
        self.drop(messages)


class StreamWriter(_TaskWriter, DataSourceStreamArrowWriter):
    """Writer of a stream. It writes each batch at least once."""

    def _write(self) -> str:
        # A restarted query repeats a batch with the same id.
        return f"{_task().getLocalProperty(_QUERY_ID)}/{_task().getLocalProperty(_BATCH_ID)}"

    def commit(self, messages: list[SinkTaskResult | None], batchId: int) -> None:  # noqa: N803, ARG002
        """Commit bad rows."""
        self.keep(messages)

    def abort(self, messages: list[SinkTaskResult | None], batchId: int) -> None:  # noqa: N803, ARG002
        """Delete bad rows."""
        self.drop(messages)


def _task() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "only a task writes"
    return context


def rows_of(batch: pa.RecordBatch) -> Iterator[Mapping[str, Any]]:
    """Yield rows as mappings, with bodies as bytes and times in milliseconds.

    A Spark string may be invalid UTF-8, since `cast(value as string)` does not check it. Such a
    value is None, and the row lists its column under `NO_TEXT`. It lists columns with a value that
    only the cluster sets under `SET_BY_CLUSTER`.
    """
    columns = {}
    undecodable: list[list[str]] = [[] for _ in range(batch.num_rows)]
    read_only: list[list[str]] = [[] for _ in range(batch.num_rows)]
    for name in batch.schema.names:
        if name in READ_ONLY:
            if batch[name].null_count < batch.num_rows:
                for names, is_set in zip(
                    read_only, batch[name].is_valid().to_pylist(), strict=True
                ):
                    if is_set:
                        names.append(name)
        elif name == "body":
            columns[name] = _bodies(batch).to_pylist()
        elif pa.types.is_timestamp(batch.schema.field(name).type):
            of_us = batch[name].cast(pa.int64()).to_pylist()
            columns[name] = [None if us is None else us // 1000 for us in of_us]
        else:
            columns[name] = _values(batch[name], name, undecodable)
    if any(undecodable):
        columns[NO_TEXT] = undecodable
    if any(read_only):
        columns[SET_BY_CLUSTER] = read_only
    names = list(columns)
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(names, values, strict=True))


def _bodies(batch: pa.RecordBatch) -> Any:
    bodies = batch["body"]
    return bodies if pa.types.is_binary(bodies.type) else bodies.cast(pa.large_binary())


def _values(column: Any, name: str, undecodable: list[list[str]]) -> list[Any]:
    with contextlib.suppress(UnicodeDecodeError):
        values: list[Any] = column.to_pylist()
        return values
    values = []
    for cell, names in zip(column, undecodable, strict=True):
        try:
            values.append(cell.as_py())
        except UnicodeDecodeError:
            values.append(None)
            names.append(name)
    return values


def _bad_rows(batch: pa.RecordBatch, bad: list[tuple[int, str]], *, first: int) -> pa.Table:
    """Return bad rows with all their columns, so that users can send them again.

    `bad`: row numbers in the batch, with reasons. `first`: number of the batch's first row in the
    task. All files of the table have the same columns, whatever the frame has.
    """
    rows = pa.Table.from_batches([batch]).take([number for number, _ in bad])
    columns = {
        "row": pa.array([first + number for number, _ in bad]),
        "why": pa.array([why for _, why in bad]),
        **{name: rows[name] for name in rows.column_names},
    }
    return pa.table(
        [
            columns[field.name].cast(field.type)
            if field.name in columns
            else pa.nulls(rows.num_rows, field.type)
            for field in SCHEMA
        ],
        schema=SCHEMA,
    )
