"""Times of the log: when the records of its segments were stored."""

from __future__ import annotations

from bisect import bisect_left

from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.segment import Record

NEVER_MS = 1 << 62


def first_stored_at_ms(log: CommitLog, index: int) -> int:
    """Return the time of the first intact record from the begin of segment `index` on.

    Retention relies on it, so the record is checked, once. The segment must be written to.
    """
    segment = log.segments[index]
    if segment.first_stored_at_ms is None:
        found = log.walk_between(segment.start, log.segments[-1].end)
        times = (one.header.stored_at_ms for one in found if isinstance(one, Record))
        segment.first_stored_at_ms = next(times, NEVER_MS)
    return segment.first_stored_at_ms


def stored_before_ms(log: CommitLog, log_offset: LogOffset) -> int:
    """Return an upper bound, not a tight one, of the time of the record at `log_offset`."""
    later = [n for n, segment in enumerate(log.segments) if segment.start > log_offset]
    is_written = bool(later) and log.segments[later[0]].start < log.written_offset
    return first_stored_at_ms(log, later[0]) if is_written else NEVER_MS


def bounds_of_time(log: CommitLog, stored_at_ms: int) -> tuple[LogOffset, LogOffset]:
    """Return two log offsets around a time, according to the first records of the segments.

    Records before the first offset were stored earlier; those from the second one on were not.
    """
    written = bisect_left(log.segments, log.written_offset, key=lambda one: one.start)
    number = bisect_left(
        range(written), stored_at_ms, key=lambda index: first_stored_at_ms(log, index)
    )
    begin = log.segments[number - 1].start if number else log.min_offset
    return begin, log.segments[number].start if number < written else log.written_offset
