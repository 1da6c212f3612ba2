"""Held segments: files kept after retention, because they contain the damaged message of a timer.

The log has only the remains of such a message: its intact properties. Queue 2 of the hidden topic
lists the remains. For a pending timer its newest ones count. A restart reads the queue again, so
that this state needs no file (ADR 0016).

Remains may be damaged themselves. Then the state table has the timer that needs them, but the
offset of its message is unknown. It is searched in the held segments.
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
from tidemill.broker.engine.sorted_search import is_among
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.store.segment import CorruptStore, Hole, Record, Segment
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.status import REMAINS_QUEUE, TimerState
from tidemill.message.resource_names import TIMER_TOPIC

LOOK_PERIOD_MS = 600_000  # between two checks for files to delete; files are kept for days
ENTRIES_A_SLICE = 128  # entries of the queue; each needs a record, which may be cold
RECORDS_A_SLICE = 256  # records of a held segment, with the checksums of their heads
PAGES_A_SLICE = 8  # pages of the state table, as arrays


class _SalvagedMessage(NamedTuple):
    """A pending timer with a salvaged message."""

    timer_id: TimerId
    # Log offset of the message. If it is unknown: minus the offset below which its segment begins.
    original: LogOffset

    def is_in(self, segment: Segment) -> bool:
        if self.original < 0:
            return segment.start < -self.original
        return segment.start <= self.original < segment.end


@final
class HeldSegments:
    """The segments that must be held, and the deletion of their files."""

    def __init__(self, index: TimerIndex, log: CommitLog, catalog: Catalog) -> None:
        self._index = index
        self._log = log
        self._catalog = catalog
        self._looked_at_ms: int | None = None
        self.quarantined: dict[int, int] = {}  # topic id by timer id
        # For timers whose remains lack the offset of the message: the offset that the search has
        # found, or None.
        self.originals: dict[int, LogOffset | None] = {}

    def find_work(
        self, now_ms: int, quiet: Callable[[], Iterator[list[File]]]
    ) -> Iterator[list[File]] | None:
        """Return the steps of the due work, None if none is due."""
        looked_at_ms = self._looked_at_ms
        is_known = looked_at_ms is not None and not self._log.held
        if is_known or (looked_at_ms is not None and now_ms - looked_at_ms < LOOK_PERIOD_MS):
            return None
        self._looked_at_ms = now_ms
        return self._check(now_ms, quiet)

    def is_needed(self, segment: Segment) -> Generator[list[File], None, bool]:
        """Return whether a timer needs a message in `segment`. Raises BlockFileDamaged."""
        for salvaged in self._walk():
            if salvaged is None:
                yield []
            elif self._located(salvaged).is_in(segment):
                return True
        return False

    def _located(self, salvaged: _SalvagedMessage) -> _SalvagedMessage:
        original = self.originals.get(salvaged.timer_id) if salvaged.original < 0 else None
        return salvaged if original is None else salvaged._replace(original=original)

    def _check(
        self, now_ms: int, quiet: Callable[[], Iterator[list[File]]]
    ) -> Iterator[list[File]]:
        """Delete the files that no timer needs, and quarantine the timers that need one."""
        found: list[_SalvagedMessage] = []
        try:
            for salvaged in self._walk():
                if salvaged is None:
                    yield []
                    continue
                found.append(salvaged)
                entry = self._index.find_pending(salvaged.timer_id)
                if entry is not None:
                    self.quarantined[salvaged.timer_id] = entry.topic_id
        except BlockFileDamaged:
            return  # The queue file is rebuilt first.
        yield from self._find_originals({one.timer_id: one for one in found}, now_ms)
        for segment in list(self._log.held):
            if not any(self._located(salvaged).is_in(segment) for salvaged in found):
                # The record that settled its last timer must be durable.
                yield from quiet()
                yield from self._log.drop_held(segment)

    def _walk(self) -> Iterator[_SalvagedMessage | None]:
        """Yield the timers in the queue, and None between slices. Raises BlockFileDamaged."""
        topic_id = self._catalog.topic_ids.get(TIMER_TOPIC)
        queue = None if topic_id is None else self._catalog.queues.get((topic_id, REMAINS_QUEUE))
        damaged: list[LogOffset] = []
        offset = 0
        while queue is not None and max(offset, queue.min_offset) < queue.max_offset:
            offset = max(offset, queue.min_offset)
            entries = queue.entries(offset, ENTRIES_A_SLICE)
            for log_offset, _, _ in entries:
                try:
                    salvaged = self._find(log_offset)
                except (CorruptStore, record.UnknownRecord, ValueError):
                    damaged.append(log_offset)
                    continue
                if salvaged is not None:
                    yield salvaged
            offset += len(entries)
            yield None
        if damaged:
            yield from self._find_owners(damaged)

    def _find(self, log_offset: LogOffset) -> _SalvagedMessage | None:
        """Return the timer of an entry of the queue, None if it is not pending."""
        if log_offset < self._log.state_floor:
            return None  # A pending timer's remains are behind it.
        if log_offset < self._log.committed_offset:
            self._log.verify(log_offset)
        remains = message.decode_remains(self._log.record_at(log_offset).body)
        try:
            entry = self._index.get(remains.target.timer_id)
        except TimerEntryDamaged:
            pass  # The timer may be pending.
        else:
            if entry.state != TimerState.PENDING or entry.log_offset != log_offset:
                return None
        return _SalvagedMessage(remains.target.timer_id, remains.log_offset)

    def _find_owners(self, damaged: list[LogOffset]) -> Iterator[_SalvagedMessage | None]:
        """Yield the pending timers of damaged remains."""
        table = self._index.table
        offsets = np.array(sorted(damaged), dtype=np.int64)
        for n, number in enumerate(table.page_numbers(), 1):
            rows = table.rows(number)
            is_damaged = is_among(offsets, rows["log_offset"])
            is_its = is_damaged & (rows["state"] == TimerState.PENDING)
            for at in np.flatnonzero(is_its).tolist():
                # The message was before its remains in the log.
                before = int(rows["log_offset"][at])
                yield _SalvagedMessage(TimerId(number * len(rows) + at), LogOffset(-before))
            if n % PAGES_A_SLICE == 0:
                yield None

    # ------------------------------------------------------------ searching messages

    def _find_originals(
        self, salvaged: dict[TimerId, _SalvagedMessage], now_ms: int
    ) -> Iterator[list[File]]:
        """Search the held segments for messages with an unknown offset."""
        missing = {id_: -one.original for id_, one in salvaged.items() if one.original < 0}
        for timer_id in self.originals.keys() - missing.keys():
            del self.originals[timer_id]
        new = missing.keys() - self.originals.keys()
        if not new:
            return
        found: dict[TimerId, LogOffset] = {}
        before = max(missing[timer_id] for timer_id in new)
        for segment in [one for one in self._log.held if one.start < before]:
            walk = self._log.reader.walk_past_damage(segment, segment.start, segment.end)
            for n, one in enumerate(walk, 1):
                scheduled = _scheduled_by(one)
                if scheduled in new and segment.start < missing[scheduled]:
                    found[scheduled] = LogOffset(one.log_offset)
                if n % RECORDS_A_SLICE == 0:
                    yield []
        for timer_id in new:
            self.originals[timer_id] = found.get(timer_id)
            entry = self._index.find_pending(timer_id)
            if entry is not None:
                # An overdue timer waited for this search and is in no slot.
                self._index.links.relink(timer_id, entry, SCHEDULE, now_ms, change=0)


def _scheduled_by(found: Record | Hole) -> TimerId | None:
    """Return the timer of a record with its message, None for other records and for remains."""
    if isinstance(found, Hole) or found.header.kind != record.RecordKind.MESSAGE:
        return None
    if found.header.flags & (FLAG_SCHEDULE | FLAG_REMAINS) != FLAG_SCHEDULE:
        return None
    return message.decode_target(found.body).timer_id
