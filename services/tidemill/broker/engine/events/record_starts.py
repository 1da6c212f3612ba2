"""The positions of record starts: a position from a client may be inside a record.

The bytes at a position do not prove a begin, because a body may contain bytes that look like a
record. So a read begins at a position that a reply has contained, or at a record that a walk from
the begin of its segment reaches. The walk runs in slices and leaves marks. A later search continues
from the last mark before its position.
"""

from __future__ import annotations

from typing import Final, final

from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.segment import Hole
from tidemill.broker.engine.tally import Allowance, Tally

RECORDS_A_STEP: Final = 256  # 2 us each
KNOWN_MAX: Final = 4_096  # positions in replies: each reader needs its last one
# Bytes of the log per mark: a segment of 1 GiB has a million records.
MARK_BYTES: Final = 1 << 20
MARKS_MAX: Final = 16_384  # about 100 bytes each


@final
class RecordStarts:
    """The known positions of record starts in one log."""

    def __init__(self, log: CommitLog, tally: Tally) -> None:
        self._log = log
        self._tally = tally
        self._known: dict[int, None] = {}  # the oldest first
        self._marks: dict[int, int] = {}  # a position by part of the log, the oldest first

    def mark(self, position: int) -> None:
        """Remember the begin of a record that a walk has reached, one per part of the log."""
        part = position // MARK_BYTES
        if part not in self._marks:
            self._marks[part] = position
            if len(self._marks) > MARKS_MAX:
                del self._marks[next(iter(self._marks))]

    def before(self, position: int) -> int:
        """Return the last known begin of a record up to `position`, in the same segment."""
        begin = self._log.segment_start(LogOffset(position))
        for part in range(position // MARK_BYTES, begin // MARK_BYTES - 1, -1):
            found = self._marks.get(part, -1)
            if begin <= found <= position:
                return found
        return begin

    def note(self, position: int) -> None:
        """Remember a position of a reply. A record begins there or will begin there."""
        self._known.pop(position, None)
        self._known[position] = None
        if len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]

    def search(self, position: int) -> RecordStartSearch:
        """Begin to search for the first record at or after `position`."""
        log = self._log
        is_known = (
            position in self._known
            or position <= log.min_offset
            or position >= log.committed_offset
        )
        return RecordStartSearch(log, self._tally, self, position, is_known=is_known)


@final
class RecordStartSearch:
    """A search in progress: call `step` until it returns False, then read `found`."""

    def __init__(
        self, log: CommitLog, tally: Tally, starts: RecordStarts, position: int, *, is_known: bool
    ) -> None:
        self._log = log
        self._tally = tally
        self._starts = starts
        self._position = position
        self._at = position if is_known else starts.before(position)
        self._is_sure = True  # False after damage: the walk may have read a body as records

    @property
    def found(self) -> int:
        """The begin of the first record at or after the position."""
        return max(self._at, self._position)

    def step(self) -> bool:
        """Do one slice. Return True while more remains."""
        log, position = self._log, self._position
        if self._at >= position or position < log.min_offset:
            return False
        allowance = Allowance(self._tally, items=RECORDS_A_STEP)
        segment = log.segment_of(LogOffset(self._at))
        is_warm = log.reader.is_warm(LogOffset(self._at))
        stop = min(int(log.committed_offset), int(segment.end))
        records = log.reader.walk_past_damage(segment, self._at, stop)
        for found in records:
            if isinstance(found, Hole):
                log.damage.check_directories()
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
                self._starts.mark(self._at)
            if allowance.is_spent:
                return True
        self._at = stop  # After the padding of the segment.
        return False
