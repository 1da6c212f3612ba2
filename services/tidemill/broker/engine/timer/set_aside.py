"""Segments that were set aside: an original stands in them of which only remains are in the log.

Queue 2 of the hidden topic lists those remains; what is newest of a timer that still waits counts.
Nothing here survives a restart, and nothing must: the queue says it all again (ADR 0016).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple, final

from tidemill.broker.engine.layout import message, record
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import LogOffset, TimerId, TopicId
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.store.commit_log import CommitLog, CorruptStore, Segment
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.status import REMAINS_QUEUE, TIMER_TOPIC

LOOK_PERIOD_MS = 600_000  # whether a file can go; each was kept for days
ENTRIES_A_SLICE = 128  # of the queue; a record each, which may be cold


class _Left(NamedTuple):
    """A pending timer of whose message something is left."""

    timer_id: TimerId
    topic_id: TopicId
    original: LogOffset | None  # where the message stands; None: that is damaged too

    def is_in(self, segment: Segment) -> bool:
        return self.original is None or segment.start <= self.original < segment.end


@final
class SetAside:
    """Which segments are to be set aside, and when their files may go."""

    def __init__(self, index: TimerIndex, log: CommitLog, catalog: Catalog) -> None:
        self._index = index
        self._log = log
        self._catalog = catalog
        self._looked_at_ms: int | None = None
        self.quarantined: dict[int, int] = {}  # timer id -> topic id

    def find_work(
        self, now_ms: int, quiet: Callable[[], Iterator[list[File]]]
    ) -> Iterator[list[File]] | None:
        """Return the steps of what is to be done now."""
        looked_at_ms = self._looked_at_ms
        is_known = looked_at_ms is not None and not self._log.held
        if is_known or (looked_at_ms is not None and now_ms - looked_at_ms < LOOK_PERIOD_MS):
            return None
        self._looked_at_ms = now_ms
        return self._look(quiet)

    def is_needed(self, segment: Segment) -> Generator[list[File], None, bool]:
        """Return whether an original in `segment` is needed. Raises BlockFileDamaged."""
        for left in self._walk():
            if left is None:
                yield []
            elif left.is_in(segment):
                return True
        return False

    def _look(self, quiet: Callable[[], Iterator[list[File]]]) -> Iterator[list[File]]:
        """Delete the files that nobody needs, and say which timers need one."""
        found: list[_Left] = []
        try:
            for left in self._walk():
                if left is None:
                    yield []
                    continue
                found.append(left)
                self.quarantined[left.timer_id] = left.topic_id
        except BlockFileDamaged:
            return  # It is repaired first.
        for segment in list(self._log.held):
            if not any(left.is_in(segment) for left in found):
                # What settled the last of its timers must be durable.
                yield from quiet()
                yield from self._log.drop_held(segment)

    def _walk(self) -> Iterator[_Left | None]:
        """Yield the timers on the list, and None between slices. Raises BlockFileDamaged."""
        topic_id = self._catalog.topic_ids.get(TIMER_TOPIC)
        queue = None if topic_id is None else self._catalog.queues.get((topic_id, REMAINS_QUEUE))
        offset = 0
        while queue is not None and max(offset, queue.min_offset) < queue.max_offset:
            offset = max(offset, queue.min_offset)
            entries = queue.entries(offset, ENTRIES_A_SLICE)
            for log_offset, _, _ in entries:
                left = self._find(log_offset)
                if left is not None:
                    yield left
            offset += len(entries)
            yield None

    def _find(self, log_offset: LogOffset) -> _Left | None:
        """Return what an entry of the queue stands for, None where its timer waits no more."""
        if log_offset < self._log.min_offset:
            return None
        try:
            if log_offset < self._log.committed_offset:
                self._log.verify(log_offset)
            found = self._log.record_at(log_offset)
            remains = message.decode_remains(found.body)
        except (CorruptStore, record.UnknownRecord, ValueError):
            return _Left(TimerId(0), TopicId(0), None)
        entry = self._index.find_pending(remains.target.timer_id)
        if entry is None or entry.log_offset != log_offset:
            return None
        return _Left(remains.target.timer_id, entry.topic_id, remains.log_offset)
