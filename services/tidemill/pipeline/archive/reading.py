"""Reading rows back out of an archive, without Spark: one queue, a range of offsets, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidemill.pipeline.archive.manifest import Archive, DataFile, QueueKey
from tidemill.pipeline.archive.store import ArchiveStore

BATCH_ROWS = 2_048  # as many as a batch from a broker has; with bodies of 1 KiB 2 MiB


def read_range(
    store: ArchiveStore,
    files: Sequence[DataFile],
    key: QueueKey,
    *,
    start: int,
    end: int,
    columns: Sequence[str],
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a queue from `start`, before `end`, out of the files that hold them.

    Columns come as they are in the files, in the order that was asked for.
    """
    needed = list(dict.fromkeys([*columns, "broker", "queue_id", "queue_offset"]))
    for file in files:
        with store.open(file.path) as opened:
            parquet = pq.ParquetFile(opened)
            groups = _row_groups(parquet, key, start=start, end=end)
            if not groups:
                continue
            for batch in parquet.iter_batches(
                batch_size=BATCH_ROWS, row_groups=groups, columns=needed
            ):
                mine = pc.and_(
                    pc.and_(
                        pc.equal(batch["broker"], key.broker),
                        pc.equal(batch["queue_id"], key.queue_id),
                    ),
                    pc.and_(
                        pc.greater_equal(batch["queue_offset"], start),
                        pc.less(batch["queue_offset"], end),
                    ),
                )
                kept = batch.filter(mine)
                if kept.num_rows:
                    yield kept.select(list(columns))


def _row_groups(parquet: pq.ParquetFile, key: QueueKey, *, start: int, end: int) -> list[int]:
    """Return the row groups that may have rows of a range, by their statistics."""
    if not parquet.num_row_groups:
        return []
    first = parquet.metadata.row_group(0)
    # The columns of a row group are leaves, of which a list or a map has others than one.
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
    """Return the first archived offset that was stored then or later; if none was, the end."""
    queue = archive.queues[key]
    for each in queue.ranges:
        if each.max_store_ms < at_ms or not each.rows:
            continue
        files = archive.holding(key, each.start, each.end)
        for batch in read_range(
            store, files, key, start=each.start, end=each.end,
            columns=["queue_offset", "store_timestamp"],
        ):  # fmt: skip
            instant = pa.scalar(at_ms * 1000, pa.timestamp("us", tz="UTC"))
            young = batch.filter(pc.greater_equal(batch["store_timestamp"], instant))
            if young.num_rows:
                return int(young["queue_offset"][0].as_py())
    return queue.end
