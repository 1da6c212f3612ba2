"""Ages of messages: how long ago the log reached an offset.

The wall clock may be days ahead for a second, so it does not decide about the messages of this
process: for them this module remembers when the log reached an offset, in monotonic time. Messages
of an earlier process have only their wall time. It counts when this process has compared the two
clocks for a minute, because a machine corrects its clock within seconds after a start.

A start begins again: all messages in the log are then of an earlier process. Messages that a
replica copies from the log of its master count like those of an earlier process.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import final

LONG_AGO_MS = -(1 << 62)
SETTLE_MS = 60_000  # after a start; a machine corrects its clock within seconds
MARK_PERIOD_MS = 10_000
MARK_PARTS = 512  # two marks are apart by at most this part of their age; 1/64 is allowed
MARKS_MAX = 16_384  # 400 days need a third of it


@final
class LogAges:
    """When the log reached some offsets, and the difference of the two clocks."""

    def __init__(self) -> None:
        # Parallel lists, ascending: at that time, all records before that offset were committed.
        self._times_ms: list[int] = []
        self._offsets: list[int] = []
        self._begin = 0  # log offset: earlier records were copied
        self._thin_at = 1_024  # number of marks at which some are removed
        self.monotonic_ms: int | None = None  # of the last `note`
        self.has_one_clock = False  # wall time is monotonic
        self.is_sure = False  # the clocks have been compared long enough
        # Largest lag of wall time behind monotonic time in the first minute. The smallest age of
        # that minute counts.
        self.lag_ms = LONG_AGO_MS
        self.sure_at_ms = 0

    def note(self, wall_ms: int, monotonic_ms: int | None, committed_offset: int) -> None:
        """Note the time of both clocks and the end of the committed log.

        Without `monotonic_ms`, wall time is monotonic. Committed records are never cut, so a mark
        stays right.
        """
        self.has_one_clock = monotonic_ms is None
        monotonic_ms = wall_ms if monotonic_ms is None else monotonic_ms
        if self.monotonic_ms is None:
            self.sure_at_ms = monotonic_ms + (0 if self.has_one_clock else SETTLE_MS)
        self.monotonic_ms = monotonic_ms
        if not self.is_sure:
            self.lag_ms = max(self.lag_ms, monotonic_ms - wall_ms)
            self.is_sure = monotonic_ms >= self.sure_at_ms
        times, offsets = self._times_ms, self._offsets
        if not times:
            self._add(monotonic_ms, max(committed_offset, self._begin))
        elif committed_offset > offsets[-1] and monotonic_ms >= times[-1] + MARK_PERIOD_MS:
            self._add(monotonic_ms, committed_offset)

    def note_copy(self, end: int) -> None:
        """Note that the records before log offset `end` were stored before now, by another broker.

        This replica copies them later, so the time at which its log reaches them says nothing.
        """
        self._begin, self._times_ms, self._offsets = end, [], []
        if self.monotonic_ms is not None:
            self._add(self.monotonic_ms, end)

    def _add(self, monotonic_ms: int, offset: int) -> None:
        self._times_ms.append(monotonic_ms)
        self._offsets.append(offset)
        if len(self._times_ms) >= self._thin_at:
            self._thin(monotonic_ms)

    def _thin(self, now_ms: int) -> None:
        """Remove marks that are close together compared with their age."""
        times, offsets = self._times_ms, self._offsets
        kept = [0]
        last = len(times) - 1
        for number in range(1, last):
            # The mark after this one would be too far from the last kept one.
            gap_ms = times[number + 1] - times[kept[-1]]
            if gap_ms > max((now_ms - times[number]) // MARK_PARTS, MARK_PERIOD_MS):
                kept.append(number)
        kept.append(last)
        self._times_ms = [times[number] for number in kept]
        self._offsets = [offsets[number] for number in kept]
        self._thin_at = min(2 * len(kept) + 1_024, MARKS_MAX)

    @property
    def inherited_end(self) -> int:
        """Log offset before which all records are of an earlier process, or not known better."""
        return self._offsets[0] if self._offsets else 0

    def surely_older(self, age_ms: int) -> int:
        """Return a log offset: this process knows that all records before it are `age_ms` old.

        0 if it knows none.
        """
        assert self.monotonic_ms is not None, "noted before"
        number = bisect_right(self._times_ms, self.monotonic_ms - age_ms)
        return self._offsets[number - 1] if number else 0

    def earliest_ms(self, log_offset: int) -> int:
        """Return a monotonic time: a record of this process at `log_offset` is not older."""
        number = bisect_right(self._offsets, log_offset)
        assert number, "a record of this process"
        return self._times_ms[number - 1]

    def inherited_ms(self, stored_at_ms: int) -> int | None:
        """Return the monotonic time of a record of an earlier process; None: unknown yet."""
        # They were all stored before the clocks agreed, also if their clock was years ahead.
        return min(stored_at_ms + self.lag_ms, self.sure_at_ms) if self.is_sure else None

    def wall_before_ms(self, age_ms: int) -> int | None:
        """Return the wall time before which records of an earlier process are `age_ms` old.

        The end of time if all of them are, and None while the clocks are not compared.
        """
        assert self.monotonic_ms is not None, "noted before"
        if not self.is_sure:
            return None
        before_ms = self.monotonic_ms - age_ms
        return 1 << 62 if self.sure_at_ms <= before_ms else before_ms - self.lag_ms
