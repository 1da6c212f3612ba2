"""Messages of an archive, with the same columns as messages of a broker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill_pipeline.archive.manifest import DataFile, QueueKey
from tidemill_pipeline.archive.reading import read_range
from tidemill_pipeline.archive.store import ArchiveStore
from tidemill_pipeline.bodies import unpacked_parts
from tidemill_pipeline.offsets import SourceRange
from tidemill_pipeline.options import SourceOptions
from tidemill_pipeline.pulling import NOT_ARCHIVED, OnGap, gap_reporter
from tidemill_pipeline.rows import ENCODING, PACKED


def read_archived(
    options: SourceOptions,
    schema: pa.Schema,
    part: SourceRange,
    files: Sequence[DataFile],
    lost: Sequence[tuple[int, int]],
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a task as batches. Runs in an executor.

    `lost`: ranges with lost offsets, which are reported.
    """
    store = ArchiveStore(options.archive_path)
    tags = _tags(options.filter)
    # The archive has bodies as they are stored.
    decodes = options.decodes_body and "body" in schema.names
    more = [
        *(["tag"] if tags else []),
        *(["system_properties"] if decodes else []),
        *(["queue_offset"] if lost else []),
    ]
    columns = list(dict.fromkeys([*schema.names, *more]))
    key = QueueKey.of(options.connection.namespace, part.queue)
    batches = read_range(store, files, key, start=part.start, end=part.end, columns=columns)
    if lost:
        report_gap = gap_reporter(fails=options.fails_on_data_loss)
        batches = _with_gaps_reported(batches, part, lost, report_gap)
    for batch in batches:
        kept = batch
        if tags:
            kept = batch.filter(pc.is_in(batch["tag"], pa.array(tags)))
        for rows in _decoded(kept) if decodes else [kept]:
            if rows.num_rows:
                yield pa.RecordBatch.from_arrays(
                    [rows[field.name].cast(field.type) for field in schema], schema=schema
                )


def _with_gaps_reported(
    batches: Iterator[pa.RecordBatch],
    part: SourceRange,
    lost: Sequence[tuple[int, int]],
    report_gap: OnGap,
) -> Iterator[pa.RecordBatch]:
    """Yield batches, and report offsets without a row in ranges with lost offsets."""

    def report(start: int, end: int) -> None:
        for low, high in lost:
            if max(start, low) < min(end, high):
                report_gap(part.queue, max(start, low), min(end, high), NOT_ARCHIVED)

    at = part.start
    for batch in batches:
        offsets = batch["queue_offset"].to_numpy()
        expected = np.concatenate(([at], offsets[:-1] + 1))
        for i in np.flatnonzero(offsets > expected):
            report(int(expected[i]), int(offsets[i]))
        at = int(offsets[-1]) + 1
        yield batch
    report(at, part.end)


def _decoded(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield a batch with unpacked bodies, in several parts if they are large."""
    encodings = pc.map_lookup(batch["system_properties"], pa.scalar(ENCODING), "first")
    packed = pc.equal(encodings, PACKED).fill_null(False)
    if not pc.any(packed).as_py():
        yield batch
        return
    at = batch.schema.get_field_index("body")
    field = batch.schema.field(at)
    for rows, bodies in unpacked_parts(batch["body"].to_pylist(), packed.to_pylist()):
        part = batch.slice(rows.start, rows.stop - rows.start)
        yield part.set_column(at, field, pa.array(bodies, field.type))


def _tags(expression: str) -> list[str]:
    return [] if expression == "*" else expression.split(" || ")
