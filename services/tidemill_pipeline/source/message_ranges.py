"""Tasks of a read of messages: ranges of offsets, each in pieces from broker and archive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from tidemill_pipeline import offsets as plan
from tidemill_pipeline.archive.manifest import ArchivedRange, DataFile, QueueKey
from tidemill_pipeline.archive.tasks import check_follows
from tidemill_pipeline.client import connect
from tidemill_pipeline.errors import ArchiveError, DataLoss
from tidemill_pipeline.offsets import SourceRange
from tidemill_pipeline.options import SourceOptions
from tidemill_pipeline.pulling import NOT_ARCHIVED, gap_reporter, log, pull_range
from tidemill_pipeline.rows import message_batches
from tidemill_pipeline.schema import OF_BODIES
from tidemill_pipeline.source.archive_rows import read_archived
from tidemill_pipeline.source.queue_bounds import SourceView

if TYPE_CHECKING:
    pass


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerPiece:
    """Offsets of a queue to read from its broker."""

    part: SourceRange
    previous: ArchivedRange | None = None  # the archived range directly before


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivePiece:
    """Offsets of a queue to read from files of an archive."""

    part: SourceRange
    files: tuple[DataFile, ...]
    lost: tuple[tuple[int, int], ...]  # ranges with lost offsets


class MessageRange(InputPartition):
    """One task: a range of a queue in adjacent pieces.

    Begin and end of a task do not depend on the archive. A repeated batch has the same tasks.
    """

    def __init__(self, part: SourceRange, pieces: tuple[BrokerPiece | ArchivePiece, ...]) -> None:
        super().__init__(part)
        self.part = part
        self.pieces = pieces


def plan_ranges(
    options: SourceOptions, ranges: Iterable[SourceRange], view: SourceView
) -> list[MessageRange]:
    """Return the tasks of ranges, and report the offsets that were lost before archiving."""
    given = list(ranges)
    report_gap = gap_reporter(fails=options.fails_on_data_loss)
    for each in given:
        for start, end in _lost_whole(options, each, view):
            report_gap(each.queue, start, end, NOT_ARCHIVED)
    parts = plan.split(
        given, rows_per_partition=options.rows_per_partition, partitions_min=options.partitions_min
    )
    return [MessageRange(part, tuple(_pieces(options, part, view))) for part in parts]


def _lost_whole(
    options: SourceOptions, part: SourceRange, view: SourceView
) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range that the archive records as lost completely."""
    if part.queue not in view.archived_to:
        return
    archived = view.archive.queues[QueueKey.of(options.connection.namespace, part.queue)]
    first = max(part.start, archived.start)  # The broker may still have expired offsets.
    for lost in archived.lost_between(first, part.end):
        if lost.is_lost:
            yield max(first, lost.start), min(part.end, lost.end)


def _pieces(
    options: SourceOptions, part: SourceRange, view: SourceView
) -> Iterator[BrokerPiece | ArchivePiece]:
    queue = part.queue
    if queue not in view.archived_to:
        yield BrokerPiece(part=part)
        return
    key = QueueKey.of(options.connection.namespace, queue)
    archived = view.archive.queues[key]
    first = min(part.end, max(part.start, archived.start))
    to = min(part.end, max(first, archived.end))
    if part.start < first:
        yield BrokerPiece(part=SourceRange(queue=queue, start=part.start, end=first))
    at = first
    for start, end in (*_lost_whole(options, part, view), (to, to)):
        if at < start:
            # The task finds the lost offsets among these.
            lost = archived.lost_between(at, start)
            yield ArchivePiece(
                part=SourceRange(queue=queue, start=at, end=start),
                files=tuple(view.archive.holding(key, at, start)),
                lost=tuple((each.start, each.end) for each in lost),
            )
        at = end
    if to < part.end:
        previous = archived.last_before(to) if to == archived.end else None
        yield BrokerPiece(part=SourceRange(queue=queue, start=to, end=part.end), previous=previous)


def read_messages(
    options: SourceOptions, schema: pa.Schema, partition: MessageRange
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a task as batches. Runs in an executor."""
    for piece in partition.pieces:
        if isinstance(piece, ArchivePiece):
            yield from read_archived(options, schema, piece.part, piece.files, piece.lost)
        else:
            yield from _read_broker(options, schema, piece)


def _read_broker(
    options: SourceOptions, schema: pa.Schema, piece: BrokerPiece
) -> Iterator[pa.RecordBatch]:
    part = piece.part
    try:
        check_follows(options, part.queue, piece.previous)
    except ArchiveError as error:
        if options.fails_on_data_loss:
            raise DataLoss(
                f"{error}. With failOnDataLoss=false the read continues with these messages after"
                " the archive"
            ) from error
        log.warning("%s; the read continues with these messages after the archive", error)
    # The broker does not read bodies if no column needs them.
    with_bodies = not set(OF_BODIES).isdisjoint(schema.names)
    for messages in pull_range(connect(options.connection), options, part, with_bodies=with_bodies):
        yield from message_batches(
            messages,
            schema=schema,
            topic=part.queue.topic,
            broker=part.queue.broker,
            namespace=options.connection.namespace,
            decodes_body=options.decodes_body,
        )
