"""Whole records of the log for a replica: frames to send, and received records to apply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tidemill.broker.engine.layout import record
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.segment import CorruptStore, Record, Segment, intact_at


class WholeRecords(NamedTuple):
    """Consecutive records of one segment, as its file has them."""

    data: memoryview  # of a pack: stubs end with their last byte that has a meaning
    end: LogOffset  # log offset of the next record
    segment: Segment


def find_frame(
    log: CommitLog, log_offset: LogOffset, size_max: int, *, recheck: bool = False
) -> WholeRecords | None:
    """Return at least one whole record from `log_offset` on; None at the end of the log.

    The pad belongs to the last record of a segment, so the next frame begins with the next segment.
    Every record is checked, so that no replica copies damage. Only records that were just written
    are not checked, unless `recheck` is set. If the first record is damaged, raises LookupError and
    CorruptStore as `CommitLog.read`.
    """
    if log_offset >= log.written_offset:
        return None
    segment = log.segment_of(log_offset)
    begin = at = log.reader.position(segment, log_offset)
    offset, end = log_offset, min(log.written_offset, segment.end)
    is_new = log_offset >= log.durable_offset and not recheck
    while offset < end:
        try:
            sizes = _find_sizes(log, segment, offset, is_new=is_new)
        except CorruptStore:
            if at == begin:
                raise
            break
        if sizes is None:
            # The log continues in another segment. A pack has no pad.
            at += end - offset if segment.pack is None else 0
            offset = end
            break
        size, stored = sizes
        if at > begin and at + stored - begin > size_max:
            break
        offset, at = LogOffset(offset + size), at + stored
        if stored < size and segment.pack is None:
            break  # The bytes behind a stub have no meaning, and a gap may have a segment of them.
    return WholeRecords(log.reader.view(segment)[begin:at], offset, segment)


def _find_sizes(
    log: CommitLog, segment: Segment, offset: LogOffset, *, is_new: bool
) -> tuple[int, int] | None:
    """Return the bytes of a record in the log and in its file; None after the last record."""
    if segment.pack is None and log.reader.is_warm(offset):
        view, at = log.reader.view(segment), offset - segment.start
        if is_new and view[at : at + 4] == record.MAGIC_BYTES:
            fields = record.HEADER.unpack_from(view, at)
            if not fields[record.FLAGS] & record.STUB:
                return fields[record.SIZE], fields[record.SIZE]
        found = intact_at(view, at, offset)
        if found is not None:
            return found.header.size, record.HEADER_SIZE + len(found.body) + len(found.tail)
    if log.reader.is_pad(segment, offset):
        return None
    header = log.reader.read_verified(segment, offset).header
    view, at = log.reader.view(segment), log.reader.position(segment, offset)
    return header.size, record.stored_size(view, at, header)


def records_between(log: CommitLog, begin: int, end: int) -> Iterator[Record]:
    """Yield the records between two log offsets. Each was checked when it arrived.

    Raises CorruptStore if no record begins at the expected offset.
    """
    at = begin
    while at < end:
        segment = log.segment_of(LogOffset(at))
        if log.reader.end_of_records(segment, at) or (
            segment.pack is None
            and record.PAD.unpack_from(log.reader.view(segment), at - segment.start)
            == (record.PAD_MAGIC, segment.end - at)
        ):
            at = segment.end
            continue
        found = log.record_at(LogOffset(at))
        yield found
        at += found.header.size
