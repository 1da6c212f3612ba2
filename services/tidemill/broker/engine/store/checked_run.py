"""The last records before a log offset, each of them checked. Two logs are compared by them.

Unchecked bytes say nothing about another log: a flipped bit here would look like a difference.
"""

from __future__ import annotations

from typing import NamedTuple, final
from zlib import crc32

from tidemill.broker.engine.layout import record
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import UnknownRecord, is_stub
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.segment import CorruptStore, Record, RecordFreed, Segment, damaged


@final
class CheckedRun(NamedTuple):
    """Consecutive records, and a checksum over all of them without pads."""

    begin: int
    crc: int
    is_behind_stub: bool = False  # an intact record ends there, without its content


def find_last_run(log: CommitLog, low: int, end: int, size: int) -> CheckedRun:
    """Return intact records that end at `end`: the last `size` bytes, or one larger record.

    A record begins at `low`, and none of them begins before it. They begin behind the last stub.
    Equal logs without stubs have equal runs. Raises LogDamaged if the last record before `end` is
    damaged.
    """
    while low < end:
        near = max(low, end - size)
        run, gap = _find_run(log, near, end)
        if run is not None:
            return run
        if near == low:
            raise damaged(log.segment_of(LogOffset(gap)), gap, "no intact record is here")
        size *= 4  # A record has at most some megabytes: few steps.
    return CheckedRun(end, 0)


def _find_run(log: CommitLog, begin: int, end: int) -> tuple[CheckedRun | None, int]:
    """Return the last uninterrupted records from the first one at or after `begin`.

    Also return the begin of the last gap between records.
    """
    at, gap, run = begin, begin, None
    has_gap = False
    while at < end:
        segment = log.segment_of(LogOffset(at))
        stop = min(end, segment.end)
        try:
            found = _find_intact(log, segment, at)
            behind_stub = at + found.header.size if found and is_stub(found.header) else 0
        except RecordFreed:
            behind_stub = log.reader.rest_of_gap(segment, at)[1]
        if behind_stub:
            # Another log may have the whole message, and more records than the gap.
            at = min(behind_stub, end)
            gap, run = at, CheckedRun(at, 0, is_behind_stub=not has_gap)
        elif found is not None:
            data = log.bytes_at(LogOffset(at), min(found.header.size, end - at))
            run = run or CheckedRun(at, 0)
            run = run._replace(crc=crc32(data, run.crc))
            at += found.header.size
        elif run is not None and log.reader.is_pad(segment, at):
            if run.begin == at:  # Another log finds no record there.
                run = run._replace(begin=segment.end)
            at = segment.end
        else:
            has_gap = True
            if run is not None:
                gap, run = at, None
            at = log.reader.find_next_head(segment, at + 1, stop)
    return run, gap


def _find_intact(log: CommitLog, segment: Segment, at: int) -> Record | None:
    if segment.end - at < record.HEADER_SIZE:
        return None
    try:
        return log.reader.read_verified(segment, LogOffset(at))
    except (CorruptStore, UnknownRecord):
        return None
