"""Segments that were set aside: an original stands in them of which only remains are in the log.

Queue 2 of the hidden topic lists those remains; what is newest of a timer that still waits counts.
Nothing here survives a restart, and nothing must: the queue says it all again (ADR 0016).

Remains may be damaged themselves. Whose they are the state table says, if anybody waits for them;
where the message stands nobody knows then, and it is looked for in the files that were set aside.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout import message, record
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.message import FLAG_REMAINS, FLAG_SCHEDULE
from tidemill.broker.engine.layout.numbers import LogOffset, TimerId
from tidemill.broker.engine.layout.timer_entry import TimerEntryDamaged
from tidemill.broker.engine.layout.timer_record import SCHEDULE
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.store.segment import CorruptStore, Hole, Record, Segment
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.status import REMAINS_QUEUE, TIMER_TOPIC, TimerState

LOOK_PERIOD_MS = 600_000  # whether a file can go; each was kept for days
ENTRIES_A_SLICE = 128  # of the queue; a record each, which may be cold
RECORDS_A_SLICE = 256  # of a file that was set aside: heads are summed
PAGES_A_SLICE = 8  # of the state table, looked at as arrays


class _Left(NamedTuple):
    """A pending timer of whose message something is left."""

    timer_id: TimerId
    # Where the message stands; below 0: in a segment that begins before so much, nobody knows in
    # which.
    original: LogOffset

    def is_in(self, segment: Segment) -> bool:
        if self.original < 0:
            return segment.start < -self.original
        return segment.start <= self.original < segment.end


@final
class HeldSegments:
    """Which segments are to be set aside, and when their files may go."""

    def __init__(self, index: TimerIndex, log: CommitLog, catalog: Catalog) -> None:
        self._index = index
        self._log = log
        self._catalog = catalog
        self._looked_at_ms: int | None = None
        self.quarantined: dict[int, int] = {}  # timer id -> topic id
        # By timer whose remains do not say where its message stands: where it was found, or None.
        self.originals: dict[int, LogOffset | None] = {}

    def find_work(
        self, now_ms: int, quiet: Callable[[], Iterator[list[File]]]
    ) -> Iterator[list[File]] | None:
        """Return the steps of what is to be done now."""
        looked_at_ms = self._looked_at_ms
        is_known = looked_at_ms is not None and not self._log.held
        if is_known or (looked_at_ms is not None and now_ms - looked_at_ms < LOOK_PERIOD_MS):
            return None
        self._looked_at_ms = now_ms
        return self._look(now_ms, quiet)

    def is_needed(self, segment: Segment) -> Generator[list[File], None, bool]:
        """Return whether an original in `segment` is needed. Raises BlockFileDamaged."""
        for left in self._walk():
            if left is None:
                yield []
            elif self._known(left).is_in(segment):
                return True
        return False

    def _known(self, left: _Left) -> _Left:
        original = self.originals.get(left.timer_id) if left.original < 0 else None
        return left if original is None else left._replace(original=original)

    def _look(self, now_ms: int, quiet: Callable[[], Iterator[list[File]]]) -> Iterator[list[File]]:
        """Delete the files that nobody needs, and say which timers need one."""
        found: list[_Left] = []
        try:
            for left in self._walk():
                if left is None:
                    yield []
                    continue
                found.append(left)
                entry = self._index.find_pending(left.timer_id)
                if entry is not None:
                    self.quarantined[left.timer_id] = entry.topic_id
        except BlockFileDamaged:
            return  # It is repaired first.
        yield from self._find_originals({one.timer_id: one for one in found}, now_ms)
        for segment in list(self._log.held):
            if not any(self._known(left).is_in(segment) for left in found):
                # What settled the last of its timers must be durable.
                yield from quiet()
                yield from self._log.drop_held(segment)

    def _walk(self) -> Iterator[_Left | None]:
        """Yield the timers on the list, and None between slices. Raises BlockFileDamaged."""
        topic_id = self._catalog.topic_ids.get(TIMER_TOPIC)
        queue = None if topic_id is None else self._catalog.queues.get((topic_id, REMAINS_QUEUE))
        damaged: list[LogOffset] = []
        offset = 0
        while queue is not None and max(offset, queue.min_offset) < queue.max_offset:
            offset = max(offset, queue.min_offset)
            entries = queue.entries(offset, ENTRIES_A_SLICE)
            for log_offset, _, _ in entries:
                try:
                    left = self._find(log_offset)
                except (CorruptStore, record.UnknownRecord, ValueError):
                    damaged.append(log_offset)
                    continue
                if left is not None:
                    yield left
            offset += len(entries)
            yield None
        if damaged:
            yield from self._find_owners(damaged)

    def _find(self, log_offset: LogOffset) -> _Left | None:
        """Return what an entry of the queue stands for, None where its timer waits no more."""
        if log_offset < self._log.min_offset:
            return None
        if log_offset < self._log.committed_offset:
            self._log.verify(log_offset)
        remains = message.decode_remains(self._log.record_at(log_offset).body)
        try:
            entry = self._index.get(remains.target.timer_id)
        except TimerEntryDamaged:
            pass  # Nobody can say that it waits no more.
        else:
            if entry.state != TimerState.PENDING or entry.log_offset != log_offset:
                return None
        return _Left(remains.target.timer_id, remains.log_offset)

    def _find_owners(self, damaged: list[LogOffset]) -> Iterator[_Left | None]:
        """Yield the timers that wait for records of the list that are damaged themselves."""
        table = self._index.table
        for n, number in enumerate(table.page_numbers(), 1):
            rows = table.rows(number)
            is_its = np.isin(rows["log_offset"], damaged) & (rows["state"] == TimerState.PENDING)
            for at in np.flatnonzero(is_its).tolist():
                # The message was in front of what is left of it.
                before = int(rows["log_offset"][at])
                yield _Left(TimerId(number * len(rows) + at), LogOffset(-before))
            if n % PAGES_A_SLICE == 0:
                yield None

    # ------------------------------------------------------------ looking for messages

    def _find_originals(self, left: dict[TimerId, _Left], now_ms: int) -> Iterator[list[File]]:
        """Look for the messages of which nobody knows where they stand."""
        wanted = {timer_id: -one.original for timer_id, one in left.items() if one.original < 0}
        for timer_id in self.originals.keys() - wanted.keys():
            del self.originals[timer_id]
        new = wanted.keys() - self.originals.keys()
        if not new:
            return
        found: dict[TimerId, LogOffset] = {}
        before = max(wanted[timer_id] for timer_id in new)
        for segment in [one for one in self._log.held if one.start < before]:
            for n, one in enumerate(self._log.reader.walk_past_damage(segment, 0, segment.size), 1):
                scheduled = _scheduled_by(one)
                if scheduled in new and segment.start < wanted[scheduled]:
                    found[scheduled] = LogOffset(one.log_offset)
                if n % RECORDS_A_SLICE == 0:
                    yield []
        for timer_id in new:
            self.originals[timer_id] = found.get(timer_id)
            entry = self._index.find_pending(timer_id)
            if entry is not None:
                # One that is overdue waited for this, and is in no slot any more.
                self._index.links.relink(timer_id, entry, SCHEDULE, now_ms, change=0)


def _scheduled_by(found: Record | Hole) -> TimerId | None:
    """Return the timer whose message a record is, None where it is none, or remains."""
    if isinstance(found, Hole) or found.header.kind != record.RecordKind.MESSAGE:
        return None
    if found.header.flags & (FLAG_SCHEDULE | FLAG_REMAINS) != FLAG_SCHEDULE:
        return None
    return message.decode_target(found.body).timer_id
