"""Whole records of the log for a replica: frames to send, and received records to apply."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.broker.engine.layout import record
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.segment import CorruptStore, Record, Segment, intact_at


def find_frame(
    log: CommitLog, log_offset: LogOffset, size_max: int, *, recheck: bool = False
) -> tuple[memoryview, Segment] | None:
    """Return at least one whole record from `log_offset` on, and its segment; None at the end.

    The pad belongs to the last record of a segment, so the next frame begins with the next segment.
    Every record is checked, so that no replica copies damage. Only records that were just written
    are not checked, unless `recheck` is set. If the first record is damaged, raises LookupError and
    CorruptStore as `CommitLog.read`.
    """
    if log_offset >= log.written_offset:
        return None
    segment = log.segment_of(log_offset)
    begin = at = log_offset - segment.start
    end = min(log.written_offset, segment.end) - segment.start
    is_new = log_offset >= log.durable_offset and not recheck
    while at < end:
        try:
            size = _find_size(log, segment, at, is_new=is_new)
        except CorruptStore:
            if at == begin:
                raise
            break
        if size is None:
            at = end  # The log continues in another segment.
            break
        if at > begin and at + size - begin > size_max:
            break
        at += size
    return log.reader.view(segment)[begin:at], segment


def _find_size(log: CommitLog, segment: Segment, at: int, *, is_new: bool) -> int | None:
    """Return the size of the record at a byte of a segment; None after the last record."""
    offset = LogOffset(segment.start + at)
    if log.reader.is_warm(offset):
        view = log.reader.view(segment)
        if is_new and view[at : at + 4] == record.MAGIC_BYTES:
            size: int = record.HEADER.unpack_from(view, at)[record.SIZE]
            return size
        found = intact_at(view, at, offset)
        if found is not None:
            return found.header.size
    if log.reader.is_pad(segment, offset):
        return None
    return log.reader.read_verified(segment, offset).header.size


def records_between(log: CommitLog, begin: int, end: int) -> Iterator[Record]:
    """Yield the records between two log offsets. Each was checked when it arrived.

    Raises CorruptStore if no record begins at the expected offset.
    """
    at = begin
    while at < end:
        segment = log.segment_of(LogOffset(at))
        remaining = segment.end - at
        view = log.reader.view(segment)
        if remaining < record.HEADER_SIZE or record.PAD.unpack_from(view, at - segment.start) == (
            record.PAD_MAGIC,
            remaining,
        ):
            at = segment.end
            continue
        found = log.record_at(LogOffset(at))
        yield found
        at += found.header.size
