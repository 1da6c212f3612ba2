"""Where records begin: a position that a client names may be inside one.

Nothing in a record says so: its body may hold what looks like a record, at just that position. So a
read begins where one was told to go on, or where records lead from the begin of their segment.
Those are walked in slices, once: the pages behind it begin where the page before has ended, and who
asks for another place later is led from the last way mark before it.
"""

from __future__ import annotations

from typing import Final, final

from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.segment import Hole
from tidemill.broker.engine.tally import Allowance, Tally

RECORDS_A_STEP: Final = 256  # 2 us each
KNOWN_MAX: Final = 4_096  # positions: each reader needs its last one
# Of the log, with a mark each where it was walked: a segment of 1 GiB has a million records.
WAY_BYTES: Final = 1 << 20
WAYS_MAX: Final = 16_384  # marks, about 100 bytes each


@final
class RecordStarts:
    """Positions at which a record begins, of one log."""

    def __init__(self, log: CommitLog, tally: Tally) -> None:
        self._log = log
        self._tally = tally
        self._known: dict[int, None] = {}  # the oldest first
        self._ways: dict[int, int] = {}  # by its part of the log, a position; the oldest first

    def pass_by(self, position: int) -> None:
        """Keep that a walk came by a record's begin, if it is the first one that does there."""
        part = position // WAY_BYTES
        if part not in self._ways:
            self._ways[part] = position
            if len(self._ways) > WAYS_MAX:
                del self._ways[next(iter(self._ways))]

    def before(self, position: int) -> int:
        """Return the last known begin of a record in a position's segment that is not behind it."""
        begin = self._log.segment_start(LogOffset(position))
        for part in range(position // WAY_BYTES, begin // WAY_BYTES - 1, -1):
            found = self._ways.get(part, -1)
            if begin <= found <= position:
                return found
        return begin

    def note(self, position: int) -> None:
        """Keep that a record begins at `position`, or will."""
        self._known.pop(position, None)
        self._known[position] = None
        if len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]

    def look(self, position: int) -> RecordStartSearch:
        """Begin to look for the first record that does not begin before `position`."""
        log = self._log
        is_known = (
            position in self._known
            or position <= log.min_offset
            or position >= log.committed_offset
        )
        return RecordStartSearch(log, self._tally, self, position, is_known=is_known)


@final
class RecordStartSearch:
    """One look under way: call `step` until it returns False, and read `place`."""

    def __init__(
        self, log: CommitLog, tally: Tally, places: RecordStarts, position: int, *, is_known: bool
    ) -> None:
        self._log = log
        self._tally = tally
        self._places = places
        self._position = position
        self._at = position if is_known else places.before(position)
        self._is_sure = True  # behind damage a body may have been taken for records

    @property
    def place(self) -> int:
        """Where the first record begins that does not begin before the position."""
        return max(self._at, self._position)

    def step(self) -> bool:
        """Do one slice; True while there is more to do."""
        log, position = self._log, self._position
        if self._at >= position or position < log.min_offset:
            return False
        allowance = Allowance(self._tally, items=RECORDS_A_STEP)
        segment = log.segment_of(LogOffset(self._at))
        is_warm = log.reader.is_warm(LogOffset(self._at))
        stop = min(int(log.committed_offset), int(segment.end))
        records = log.reader.walk_past_damage(
            segment, self._at - segment.start, stop - segment.start
        )
        for found in records:
            if isinstance(found, Hole):
                self._is_sure = False
                self._tally.add(1)
                self._at = int(found.end)
            else:
                header = found.header
                self._tally.add(1, size_bytes=0 if is_warm else header.size)
                self._at = header.log_offset + header.size
            if self._at >= position:
                return False
            if self._is_sure:
                self._places.pass_by(self._at)
            if allowance.is_spent:
                return True
        self._at = stop  # Behind the pad at its end.
        return False
