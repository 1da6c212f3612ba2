"""Writing a range of a queue into the archive: the work of one task.

A task writes one file per hour of store time. It returns the range and the files for the manifest.
Each attempt uses new file names. A failed attempt and an overtaken one therefore leave only files
that no entry names.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tidemill_pipeline.archive.manifest import HOUR_MS, ArchivedRange, DataFile, FileSpan, QueueKey
from tidemill_pipeline.archive.reading import pieces, read_footer, read_piece
from tidemill_pipeline.archive.store import ArchiveStore, write_errors

GROUP_ROWS: Final = 32_768  # of a row group. A reader of one offset reads a whole group.
GROUP_BYTES: Final = 64 << 20  # limit of a row group in memory
_ENDLESS: Final = 2**63 - 1  # after every offset
_COMPRESSION_LEVEL: Final = 1  # zstd. Higher levels take twice the time to save a tenth.
# Columns with few different values. Ids and bodies differ in every row.
_DICTIONARIES: Final = [
    "topic",
    "namespace",
    "broker",
    "queue_id",
    "message_type",
    "tag",
    "born_host",
    "store_host",
]


@final
@dataclass(slots=True)
class WrittenRange:
    """Result of a task: a range of the manifest, and its files."""

    range: ArchivedRange
    files: list[DataFile] = field(default_factory=list)


def write_range(
    store: ArchiveStore,
    key: QueueKey,
    batches: Iterator[pa.RecordBatch],
    *,
    start: int,
    end: int,
    run: str,
    schema: pa.Schema,
) -> WrittenRange:
    """Write the rows of a range, which come in order of offsets.

    The caller knows the number of lost offsets and sets `lost` in the result.
    """
    files = _HourFiles(store, key, run, schema)
    total = _RangeTotals()
    try:
        for batch in batches:
            if not batch.num_rows:
                continue
            total.add(batch)
            for hour, part in _by_hour(batch):
                files.write(hour, part)
        files.close()
    except BaseException:
        files.drop()
        raise
    return WrittenRange(
        range=ArchivedRange(
            key=key,
            start=start,
            end=end,
            rows=total.rows,
            bytes=total.bytes,
            min_store_ms=total.min_store_ms,
            max_store_ms=total.max_store_ms,
            crc_xor=total.crc_xor,
            last_offset=total.last_offset,
            last_store_ms=total.last_store_ms,
        ),
        files=files.done,
    )


def merge_files(
    store: ArchiveStore,
    files: Sequence[DataFile],
    *,
    folder: str,
    schema: pa.Schema,
    bytes_max: int,
) -> list[DataFile]:
    """Write the rows of files in order of queue and offset into files of about `bytes_max`."""
    done: list[DataFile] = []
    current: _OpenDataFile | None = None
    try:
        for key in sorted({span.key for file in files for span in file.spans}):
            end = -1
            for first, last, file in pieces(files, key, start=0, end=_ENDLESS):
                # Another file may have rows between two pieces that are not adjacent.
                follows, end = first == end, last
                columns = schema.names
                for batch in read_piece(store, file, key, start=first, end=last, columns=columns):
                    if current is None:
                        current = _OpenDataFile(store, f"{folder}/{_name('compact')}", schema)
                    current.write(_cast(batch, schema), key, follows=follows)
                    follows = True
                    if current.written_bytes >= bytes_max:
                        done.append(current.close())
                        current = None
        if current is not None:
            done.append(current.close())
    except BaseException:
        _delete_files(store, current, done)
        raise
    return done


def _delete_files(
    store: ArchiveStore, current: _OpenDataFile | None, done: Sequence[DataFile]
) -> None:
    """Delete the files of a failed task, since a full folder would stay full.

    Suppress errors, so that the caller reports the error of the task itself.
    """
    if current is not None:
        current.drop()
    for each in done:
        with contextlib.suppress(Exception):
            store.delete(each.path)


def _cast(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = [batch[field.name].cast(field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@final
@dataclass(slots=True)
class _RangeTotals:
    """Totals of a range for the manifest."""

    rows: int = 0
    bytes: int = 0
    min_store_ms: int = 0
    max_store_ms: int = 0
    crc_xor: int = 0
    last_offset: int = -1
    last_store_ms: int = -1

    def add(self, batch: pa.RecordBatch) -> None:
        times = store_ms(batch)
        low, high = int(times.min()), int(times.max())
        self.min_store_ms = low if not self.rows else min(self.min_store_ms, low)
        self.max_store_ms = max(self.max_store_ms, high)
        self.rows += batch.num_rows
        self.bytes += int(batch["body_size"].to_numpy().sum(dtype=np.int64))
        self.crc_xor ^= crc_xor(batch)
        self.last_offset = int(batch["queue_offset"].to_numpy()[-1])
        self.last_store_ms = int(times[-1])


def crc_xor(batch: pa.RecordBatch) -> int:
    """Return the exclusive or of the body checksums of a batch."""
    return int(np.bitwise_xor.reduce(batch["body_crc32"].to_numpy(), initial=0))


def store_ms(batch: pa.RecordBatch) -> Any:
    """Return the store time of each row in milliseconds, as a numpy array."""
    return batch["store_timestamp"].cast(pa.int64()).to_numpy() // 1000


def _by_hour(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Split a batch at each change of the hour of store time."""
    hours = store_ms(batch) // HOUR_MS
    cuts = [0, *(np.flatnonzero(np.diff(hours)) + 1).tolist(), batch.num_rows]
    for first, last in itertools.pairwise(cuts):
        yield int(hours[first]), batch.slice(first, last - first)


class _HourFiles:
    """The files of one task. Only the last is open, since rows come in order of time."""

    def __init__(self, store: ArchiveStore, key: QueueKey, run: str, schema: pa.Schema) -> None:
        self._store, self._key, self._run, self._schema = store, key, run, schema
        self._hour = -1
        self._open: _OpenDataFile | None = None
        self.done: list[DataFile] = []

    def write(self, hour: int, batch: pa.RecordBatch) -> None:
        if hour != self._hour:
            self.close()
        if self._open is None:
            at = datetime.fromtimestamp(hour * HOUR_MS / 1000, UTC)
            folder = self._store.partition(
                namespace=self._key.namespace,
                topic=self._key.topic,
                day=f"{at:%Y-%m-%d}",
                hour=f"{at:%H}",
            )
            self._open = _OpenDataFile(self._store, f"{folder}/{_name(self._run)}", self._schema)
            self._hour = hour
        self._open.write(batch, self._key, follows=True)

    def close(self) -> None:
        if self._open is not None:
            self.done.append(self._open.close())
            self._open = None

    def drop(self) -> None:
        """Delete the open file and the finished ones."""
        _delete_files(self._store, self._open, self.done)


def _name(run: str) -> str:
    return f"{run}-{secrets.token_hex(8)}.parquet"


class _OpenDataFile:
    """One Parquet file during its write."""

    def __init__(self, store: ArchiveStore, path: str, schema: pa.Schema) -> None:
        self._store, self._path = store, path
        self._exits = contextlib.ExitStack()
        with write_errors(f"{store.path}/{path}"):
            self._sink = self._exits.enter_context(store.writing(path))
            self._writer = self._exits.enter_context(
                pq.ParquetWriter(
                    self._sink,
                    schema,
                    compression="zstd",
                    compression_level=_COMPRESSION_LEVEL,
                    use_dictionary=_DICTIONARIES,
                    write_statistics=["queue_id", "queue_offset", "store_timestamp"],
                    coerce_timestamps="us",
                    write_page_checksum=True,
                )
            )
        self._schema = schema
        self._held: list[pa.RecordBatch] = []
        self._held_rows = 0
        self._held_bytes = 0
        self._rows = 0
        self._max_store_ms = 0
        self._spans: list[FileSpan] = []

    @property
    def written_bytes(self) -> int:
        """Return the bytes written to disk so far."""
        return int(self._sink.tell())

    def write(self, batch: pa.RecordBatch, key: QueueKey, *, follows: bool) -> None:
        """Add rows of a queue. `follows`: no file has rows between these and the last ones."""
        offsets = batch["queue_offset"]
        first, last = int(offsets[0].as_py()), int(offsets[-1].as_py())
        span = FileSpan(key=key, start=first, end=last + 1, rows=batch.num_rows)
        if follows and self._spans and self._spans[-1].key == key:
            before = self._spans.pop()
            span = replace(before, end=last + 1, rows=before.rows + batch.num_rows)
        self._spans.append(span)
        self._rows += batch.num_rows
        self._max_store_ms = max(self._max_store_ms, int(store_ms(batch).max()))
        self._held.append(batch)
        self._held_rows += batch.num_rows
        self._held_bytes += batch.nbytes
        if self._held_rows >= GROUP_ROWS or self._held_bytes >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            held = pa.Table.from_batches(self._held, schema=self._schema)
            with write_errors(f"{self._store.path}/{self._path}"):
                self._writer.write_table(held)
            self._held, self._held_rows, self._held_bytes = [], 0, 0

    def close(self) -> DataFile:
        self._flush()
        with write_errors(f"{self._store.path}/{self._path}"):
            self._exits.close()
        with self._store.open(self._path) as opened:
            size, footer_crc = opened.size(), zlib.crc32(read_footer(opened))
        return DataFile(
            path=self._path,
            bytes=size,
            rows=self._rows,
            max_store_ms=self._max_store_ms,
            spans=tuple(self._spans),
            footer_crc=footer_crc,
        )

    def drop(self) -> None:
        """Delete the file. Suppress errors."""
        with contextlib.suppress(Exception):
            self._exits.close()  # If the disk is full, the footer cannot be written either.
        with contextlib.suppress(Exception):
            self._store.delete(self._path)
