"""Mending of the log in place, with bytes of another replica (ADR 0047).

Every record is checked at its own offset before it is written. Only differing bytes are written,
and whole pages if a page is unreadable. A crash in between leaves a record either damaged as before
or whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator

from tidemill.broker.engine.layout import floor, message, record
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.disk import Disk, File
from tidemill.broker.engine.store.mappings import PAGE_BYTES
from tidemill.broker.engine.store.segment import Segment, intact_at
from tidemill.broker.engine.tally import SLICE_BYTES


class ForeignBytes(Exception):
    """The bytes of another replica do not belong at this offset."""


def intact_end(data: memoryview, segment: Segment, begin: int) -> int:
    """Return the end of the whole, intact records in `data`, which begins at log offset `begin`.

    The pad belongs to the last record of a segment. Raises UnknownRecord.
    """
    at, room = 0, segment.end - begin
    while at < min(len(data), room):
        found = intact_at(data[:room], at, LogOffset(begin + at))
        if found is None:
            remaining = room - at
            is_end = remaining < record.PAD.size or (
                len(data) - at >= record.PAD.size
                and record.PAD.unpack_from(data, at) == (record.PAD_MAGIC, remaining)
            )
            return min(len(data), room) if is_end else at
        at += found.header.size
    return at


def mend(
    log: CommitLog, disk: Disk, begin: LogOffset, data: bytes
) -> Generator[list[File], None, None]:
    """Write the bytes that differ. Yield between slices, and at the end the file to sync, if any.

    The caller syncs the last yielded file before it continues. Raises ForeignBytes, DiskFailed, and
    LookupError if retention removed the segment.
    """
    segment = log.segment_of(begin)
    view = memoryview(data)
    if segment.pack is not None:
        yield from _mend_in_pack(log, disk, segment, begin, view)
        return
    end = intact_end(view, segment, begin)
    if not end:
        # Also if the other replica sent nothing.
        raise ForeignBytes("no intact record")
    stretches = list(_differing(log, segment, begin, view[:end]))
    if not stretches:
        return
    yield []
    # Open it by name, and only while it is a file of the log: retention may remove it between two
    # slices.
    file = disk.open(log.segment_of(begin).name)
    try:
        for first, stop in stretches:
            for at in range(first, stop, SLICE_BYTES):
                if begin < log.min_offset:
                    raise LookupError(begin)
                piece = view[at : min(at + SLICE_BYTES, stop)]
                file.write_at(begin + at - segment.start, [piece])
                yield []
        log.remap(segment)
        yield [file]
    finally:
        file.close()


def _mend_in_pack(
    log: CommitLog, disk: Disk, segment: Segment, begin: LogOffset, data: memoryview
) -> Iterator[list[File]]:
    """Write the damaged record at `begin` of a pack, which may be a stub. Raises ForeignBytes."""
    found = intact_at(data, 0, begin)
    if found is None:
        raise ForeignBytes("no intact record")
    # A position of a damaged directory belongs to other records.
    log.reader.check_directory_again(segment, begin)
    at = log.reader.position(segment, begin)
    following, pack = begin + found.header.size, segment.pack
    assert pack is not None, "a pack"
    is_last = following >= pack.header.record_end
    size = pack.header.records_end if is_last else log.reader.position(segment, following)
    size -= at
    gap = log.reader.gap_size(segment, begin)
    if gap > found.header.size:
        # Other records are missing here too. The first one states all that the gap repeats.
        body = floor.Gap(pack.header.floor, pack.header.decided_at)
        forms: Iterable[bytes] = [floor.encode_gap(found.header, gap, body)]
        size = floor.GAP_SIZE
    else:
        forms = _forms(bytes(data[: found.header.size]), found.header)
    fitting = next((one for one in forms if len(one) == size), None)
    if fitting is None:
        raise ForeignBytes(f"another record stands at log offset {begin}")
    yield []
    file = disk.open(segment.name)
    try:
        file.write_at(at, [fitting])
        log.remap(segment)
        yield [file]
    finally:
        file.close()


def _forms(whole: bytes, header: record.RecordHeader) -> Iterator[bytes]:
    """Yield the forms in which a pack may have a record."""
    yield whole
    if header.kind == record.RecordKind.MESSAGE and not record.is_stub(header):
        with contextlib.suppress(ValueError):
            yield message.encode_stub(whole)


def proven_prefix(log: CommitLog, begin: int, data: bytes) -> bytes:
    """Return the part of `data` that was surely written here too, whether confirmed or not.

    That is everything before a record that both logs have at the same offset: such logs are
    prefixes of each other up to there (F-6).
    """
    segment, view, at, same = log.segment_of(LogOffset(begin)), memoryview(data), 0, 0
    end = intact_end(view, segment, begin)
    while at < end and (found := intact_at(view[:end], at, LogOffset(begin + at))) is not None:
        stop = at + found.header.size
        if log.bytes_at(LogOffset(begin + at), stop - at) == view[at:stop]:
            same = stop
        at = stop
    return data[:same]


def _differing(
    log: CommitLog, segment: Segment, begin: LogOffset, data: memoryview
) -> Iterator[tuple[int, int]]:
    """Yield the ranges of `data` to write: records that differ. Raises ForeignBytes."""
    at = 0
    while at < len(data):
        offset = LogOffset(begin + at)
        found = intact_at(data, at, offset)
        # After its head, a pad has undefined bytes, which may differ.
        size = record.PAD.size if found is None else found.header.size
        stop = min(at + size, len(data))
        ours = log.bytes_at(offset, stop - at)
        known = record.find_head(ours, 0, log_offset=offset)
        if found is not None and known is not None and known.head_crc != found.header.head_crc:
            raise ForeignBytes(f"another record stands at log offset {offset}")
        if ours != data[at:stop]:
            yield _in_whole_pages(log, begin - segment.start, (at, stop), segment.start, len(data))
        at = len(data) if found is None else stop


def _in_whole_pages(
    log: CommitLog, base: int, stretch: tuple[int, int], segment_start: int, size: int
) -> tuple[int, int]:
    """Extend a range to the borders of unreadable pages. Raises ForeignBytes.

    The system cannot write a part of such a page, because it would first read the rest.
    """
    first, stop = base + stretch[0], base + stretch[1]
    low = first // PAGE_BYTES * PAGE_BYTES
    high = -(-stop // PAGE_BYTES) * PAGE_BYTES
    if low < first and not log.is_readable(LogOffset(segment_start + low)):
        first = low
    if stop < high and not log.is_readable(LogOffset(segment_start + high - PAGE_BYTES)):
        stop = high
    if first < base or stop > base + size:
        raise ForeignBytes("a part of a page that cannot be read")
    return first - base, stop - base
