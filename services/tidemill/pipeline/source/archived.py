"""Messages out of an archive, as they would have come from their broker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from tidemill.pipeline.archive.manifest import DataFile, QueueKey
from tidemill.pipeline.archive.reading import read_range
from tidemill.pipeline.archive.store import ArchiveStore
from tidemill.pipeline.offsets import QueueRange
from tidemill.pipeline.options import SourceOptions
from tidemill.pipeline.rows import ENCODING, PACKED, unpacked


def read_archived(
    options: SourceOptions, schema: pa.Schema, part: QueueRange, files: Sequence[DataFile]
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a task as batches. Runs in an executor."""
    store = ArchiveStore(options.archive_path)
    tags = _tags(options.filter)
    # The archive has bodies as they are stored.
    decodes = options.decodes_body and "body" in schema.names
    more = [*(["tag"] if tags else []), *(["system_properties"] if decodes else [])]
    columns = list(dict.fromkeys([*schema.names, *more]))
    key = QueueKey.of(options.connection.namespace, part.queue)
    for batch in read_range(store, files, key, start=part.start, end=part.end, columns=columns):
        kept = batch
        if tags:
            kept = batch.filter(pc.is_in(batch["tag"], pa.array(tags)))
        if decodes:
            kept = _decoded(kept)
        if kept.num_rows:
            yield pa.RecordBatch.from_arrays(
                [kept[field.name].cast(field.type) for field in schema], schema=schema
            )


def _decoded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with its packed bodies unpacked."""
    encodings = pc.map_lookup(batch["system_properties"], pa.scalar(ENCODING), "first")
    packed = pc.equal(encodings, PACKED).fill_null(False)
    if not pc.any(packed).as_py():
        return batch
    bodies = [
        unpacked(body) if is_packed else body
        for body, is_packed in zip(batch["body"].to_pylist(), packed.to_pylist(), strict=True)
    ]
    at = batch.schema.get_field_index("body")
    field = batch.schema.field(at)
    return batch.set_column(at, field, pa.array(bodies, field.type))


def _tags(expression: str) -> list[str]:
    return [] if expression == "*" else expression.split(" || ")
