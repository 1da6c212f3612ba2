"""Reading rows of an archive, without Spark: a range of offsets of one queue, in order.

A reader raises ArchiveError for a damaged file. It checks the page checksums, the body checksum of
each row, and the footer checksum in the manifest. Parquet has no checksum for a footer.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidemill_pipeline.archive.manifest import Archive, DataFile, QueueKey
from tidemill_pipeline.archive.store import ArchiveStore
from tidemill_pipeline.errors import ArchiveError

_TAIL: Final = struct.Struct("<I4s")  # end of a Parquet file: size of the metadata, magic
_MARK: Final = b"PAR1"
BATCH_ROWS = 2_048  # as in a batch from a broker: 2 MiB with bodies of 1 KiB
BATCH_BYTES = 8 << 20  # limit by the average size of the rows of a file

Piece = tuple[int, int, DataFile]  # first offset, end offset, file


def read_range(
    store: ArchiveStore,
    files: Sequence[DataFile],
    key: QueueKey,
    *,
    start: int,
    end: int,
    columns: Sequence[str],
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a queue from `start` to before `end` with the given columns."""
    for first, last, file in pieces(files, key, start=start, end=end):
        yield from read_piece(store, file, key, start=first, end=last, columns=columns)


def pieces(files: Sequence[DataFile], key: QueueKey, *, start: int, end: int) -> list[Piece]:
    """Return which file holds which offsets of a queue, in order of offsets."""
    return sorted(
        (
            (max(start, span.start), min(end, span.end), file)
            for file in files
            for span in file.spans
            if span.key == key and span.start < end and span.end > start
        ),
        key=lambda each: each[:2],
    )


def read_piece(
    store: ArchiveStore,
    file: DataFile,
    key: QueueKey,
    *,
    start: int,
    end: int,
    columns: Sequence[str],
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a queue from one file."""
    rows = 0
    try:
        for batch in _read_piece(store, file, key, start, end, columns):
            rows += batch.num_rows
            yield batch
    # KeyError and UnicodeDecodeError: a damaged column name in the footer.
    except (OSError, pa.ArrowException, KeyError, UnicodeDecodeError) as error:
        raise ArchiveError(f"{file.path} cannot be read: {error}") from error
    expected = _rows_of(file, key, start=start, end=end)
    if expected is not None and rows != expected:
        raise ArchiveError(
            f"{file.path} is damaged: it has {rows} rows of {key} at offsets from {start} to {end},"
            f" but the manifest has {expected}"
        )


def _rows_of(file: DataFile, key: QueueKey, *, start: int, end: int) -> int | None:
    """Return the number of rows between two offsets of a file; None if the manifest lacks it."""
    for span in file.spans:
        if span.key == key and span.start <= start and end <= span.end:
            if (span.start, span.end) == (start, end):
                return span.rows
            # For a part of a span, the number is known only if the span has no holes.
            return end - start if span.rows == span.end - span.start else None
    return None


def _read_piece(
    store: ArchiveStore, file: DataFile, key: QueueKey, start: int, end: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    with store.open(file.path) as opened:
        parquet = pq.ParquetFile(
            opened, metadata=_checked_metadata(opened, file), page_checksum_verification=True
        )
        for group in _row_groups(parquet, key, start=start, end=end):
            yield from _read_group(parquet, group, file, key, start, end, columns)


def _read_group(
    parquet: pq.ParquetFile,
    group: int,
    file: DataFile,
    key: QueueKey,
    start: int,
    end: int,
    columns: Sequence[str],
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range in one row group. Its average row size limits the batches."""
    has_bodies = "body" in columns
    more = ["broker", "queue_id", "queue_offset", *(["body_crc32"] if has_bodies else [])]
    needed = list(dict.fromkeys([*columns, *more]))
    metadata = parquet.metadata.row_group(group)
    remaining = metadata.num_rows
    count = max(1, min(BATCH_ROWS, BATCH_BYTES * remaining // max(1, metadata.total_byte_size)))
    for batch in parquet.iter_batches(batch_size=count, row_groups=[group], columns=needed):
        remaining -= batch.num_rows
        is_in_range = pc.and_(
            pc.and_(
                pc.equal(batch["broker"], key.broker), pc.equal(batch["queue_id"], key.queue_id)
            ),
            pc.and_(
                pc.greater_equal(batch["queue_offset"], start), pc.less(batch["queue_offset"], end)
            ),
        )
        kept = batch.filter(is_in_range)
        if not kept.num_rows:
            continue
        if has_bodies:
            _check_bodies(kept, file, key)
        yield kept.select(list(columns))
    # Parquet silently skips the rows of a page with a damaged header.
    if remaining:
        raise ArchiveError(f"{file.path} is damaged: {remaining} of its rows cannot be read")


def read_footer(opened: Any) -> bytes:
    """Return the end of an open Parquet file: metadata, their length and the magic."""
    size = opened.size()
    opened.seek(max(0, size - _TAIL.size))
    tail: bytes = opened.read()
    length, mark = _TAIL.unpack(tail) if len(tail) == _TAIL.size else (0, b"")
    if mark != _MARK or length > size - _TAIL.size:
        raise pa.ArrowInvalid("the end of the file is not the end of a Parquet file")
    opened.seek(size - _TAIL.size - length)
    footer: bytes = opened.read()
    return footer


def _checked_metadata(opened: Any, file: DataFile) -> pq.FileMetaData:
    if opened.size() != file.bytes:
        raise ArchiveError(
            f"{file.path} is damaged: it has {opened.size()} bytes, but the manifest has"
            f" {file.bytes}"
        )
    footer = read_footer(opened)
    if zlib.crc32(footer) != file.footer_crc:
        raise ArchiveError(
            f"{file.path} is damaged: its footer does not match the checksum in the manifest"
        )
    return pq.read_metadata(pa.BufferReader(footer))


def _check_bodies(batch: pa.RecordBatch, file: DataFile, key: QueueKey) -> None:
    checksums = np.fromiter(
        (zlib.crc32(body) for body in batch["body"].to_pylist()), np.int64, batch.num_rows
    )
    wrong = np.flatnonzero(checksums != batch["body_crc32"].to_numpy())
    if len(wrong):
        offset = batch["queue_offset"][int(wrong[0])].as_py()
        raise ArchiveError(
            f"{file.path} is damaged: the body at offset {offset} of {key} does not match its"
            " checksum"
        )


def _row_groups(parquet: pq.ParquetFile, key: QueueKey, *, start: int, end: int) -> list[int]:
    """Return the row groups that may have rows of a range, according to their statistics."""
    if not parquet.num_row_groups:
        return []
    first = parquet.metadata.row_group(0)
    # The columns of a row group are leaves: a map has two.
    leaves = {first.column(i).path_in_schema: i for i in range(first.num_columns)}
    at, queue_at = leaves["queue_offset"], leaves["queue_id"]
    found = []
    for i in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(i)
        offsets, queues = group.column(at).statistics, group.column(queue_at).statistics
        if (
            offsets is None
            or not offsets.has_min_max
            or queues is None
            or (
                offsets.min < end
                and offsets.max >= start
                and queues.min <= key.queue_id <= queues.max
            )
        ):
            found.append(i)
    return found


def first_offset_at(store: ArchiveStore, archive: Archive, key: QueueKey, at_ms: int) -> int:
    """Return the first archived offset stored at `at_ms` or later; the end if there is none."""
    queue = archive.queues[key]
    for each in queue.ranges:
        if each.max_store_ms < at_ms or not each.rows:
            continue
        files = archive.holding(key, each.start, each.end)
        for batch in read_range(
            store,
            files,
            key,
            start=each.start,
            end=each.end,
            columns=["queue_offset", "store_timestamp"],
        ):
            instant = pa.scalar(at_ms * 1000, pa.timestamp("us", tz="UTC"))
            newer = batch.filter(pc.greater_equal(batch["store_timestamp"], instant))
            if newer.num_rows:
                return int(newer["queue_offset"][0].as_py())
    return queue.end
