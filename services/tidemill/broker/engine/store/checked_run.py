"""The last records before a place of the log, each of them checked: what two logs are compared by.

Bytes that nobody has checked say nothing of another log: a bit that has flipped here would look as
if the other one had something else.
"""

from __future__ import annotations

from typing import NamedTuple, final
from zlib import crc32

from tidemill.broker.engine.layout import record
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import UnknownRecord
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.segment import CorruptStore, Record, Segment, damaged


@final
class CheckedRun(NamedTuple):
    """Records without a gap, and a checksum over all of them, without the pads between them."""

    begin: int
    crc: int


def find_last_run(log: CommitLog, low: int, end: int, size: int) -> CheckedRun:
    """Return intact records that end at `end`: of the last `size` bytes, or one that is larger.

    A record begins at `low`, and none of them before. In two logs that are the same this is the
    same. Raises LogDamaged where the last one before `end` is damaged.
    """
    while low < end:
        near = max(low, end - size)
        run, gap = _find_run(log, near, end)
        if run is not None:
            return run
        if near == low:
            raise damaged(log.segment_of(LogOffset(gap)), gap, "no intact record is here")
        size *= 4  # A record takes up to some megabytes: few steps.
    return CheckedRun(end, 0)


def _find_run(log: CommitLog, begin: int, end: int) -> tuple[CheckedRun | None, int]:
    """Return the records from the first one at or behind `begin` on that nothing interrupts.

    And where the last gap between records begins.
    """
    at, gap, run = begin, begin, None
    while at < end:
        segment = log.segment_of(LogOffset(at))
        stop = min(end, segment.end)
        found = _find_intact(log, segment, at)
        if found is not None:
            data = log.bytes_at(LogOffset(at), min(found.header.size, end - at))
            begin, crc = (at, 0) if run is None else run
            run = CheckedRun(begin, crc32(data, crc))
            at += found.header.size
        elif run is not None and log.reader.is_pad(segment, at):
            at = segment.end
        else:
            if run is not None:
                gap, run = at, None
            at = segment.start + log.reader.find_next_head(
                segment, at + 1 - segment.start, stop - segment.start
            )
    return run, gap


def _find_intact(log: CommitLog, segment: Segment, at: int) -> Record | None:
    if segment.end - at < record.HEADER_SIZE:
        return None
    try:
        return log.reader.read_verified(segment, LogOffset(at))
    except (CorruptStore, UnknownRecord):
        return None
