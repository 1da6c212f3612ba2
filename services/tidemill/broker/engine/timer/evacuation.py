"""Evacuation: messages of pending timers are copied out of a segment before retention removes it.

The oldest segment is read once from begin to end, at a limited rate. If it has the newest copy of a
pending timer's message, another copy is appended. The timer keeps its id, due time, recall handle
and message id. Of a damaged message only the intact properties are recorded (the remains), and the
segment is kept aside (`held_segments.py`).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import final
from zlib import crc32

import numpy as np

from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.message import (
    FLAG_REMAINS,
    FLAG_SCHEDULE,
    MessageEntry,
    SalvagedTimer,
    TimerTarget,
)
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, TimerId, TopicId
from tidemill.broker.engine.layout.record import HEADER_SIZE, RecordKind
from tidemill.broker.engine.layout.timer_entry import TimerEntry
from tidemill.broker.engine.layout.timer_record import SCHEDULE
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.room import DiskRoom
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.segment import CorruptStore, Segment
from tidemill.broker.engine.tally import Allowance, Tally
from tidemill.broker.engine.timer.body import BodyDamaged, TimerBodies, TimerBody
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.status import COPY_QUEUE, REMAINS_QUEUE, TimerState
from tidemill.common.errors import MessageBodyTooLarge
from tidemill.message.resource_names import TIMER_TOPIC

RECORDS_A_PAGE = 16  # one page of the table (512 entries) costs as much as 16 records
RECORDS_A_SLICE = 64  # of any kind; most are skipped after their header
MOVES_A_SLICE = 16  # copies, 40 us each
PAUSE_MS = 100  # after the rate is used up
LOOK_AGAIN_MS = 1000  # between two checks for a due segment; retention takes hours
RETRY_MS = 600_000  # for a segment from which a message could not be copied
NOTHING = -1  # in place of a timer id: a record or page without pending timers


@final
class Evacuation:
    """The evacuation of the oldest segment."""

    def __init__(
        self,
        index: TimerIndex,
        log: CommitLog,
        store: MessageStore,
        catalog: Catalog,
        recorder: Recorder,
        bodies: TimerBodies,
        tally: Tally,
        room: DiskRoom,
        *,
        quarantined: dict[int, int],
        rate_bytes: int,
        is_due: Callable[[int], bool],
    ) -> None:
        self._index = index
        self._log = log
        self._store = store
        self._catalog = catalog
        self._recorder = recorder
        self._bodies = bodies
        self._tally = tally
        self._rate_bytes = rate_bytes
        self._room = room
        self._is_due = is_due  # whether retention removes the oldest segment soon, by now_ms
        self._segment: Segment | None = None
        self._timers: Iterator[int] = iter(())
        self._tokens = 0.0
        self._refilled_at_ms = 0
        self._not_before_ms = 0
        self._quarantined = quarantined  # topic id by timer id
        self.evacuated: Counter[TopicId] = Counter()  # by topic id

    def step(self, now_ms: int) -> bool:
        """Do one slice. Return True if more can be done at once."""
        if self._segment is None and not self._begin(now_ms):
            return False
        if now_ms < self._not_before_ms:
            return False
        if not self._room.may_copy:
            self._not_before_ms = now_ms + LOOK_AGAIN_MS
            return False
        elapsed_ms = min(max(now_ms - self._refilled_at_ms, 0), 1000)
        self._refilled_at_ms = now_ms
        self._tokens = min(self._tokens + elapsed_ms * self._rate_bytes / 1000, self._rate_bytes)
        segment = self._segment
        assert segment is not None, "a segment was chosen"
        allowance = Allowance(self._tally, items=MOVES_A_SLICE)
        for n, timer_id in enumerate(self._timers, 1):
            if timer_id != NOTHING:
                self._tally.add(1)
                self._move(TimerId(timer_id), segment, now_ms)
            if self._tokens <= 0:
                self._not_before_ms = now_ms + PAUSE_MS
                return False
            if n == RECORDS_A_SLICE or allowance.is_spent:
                return True
        self._segment = None
        is_pinned = self._index.counts.pins[segment.start] > 0
        self._not_before_ms = now_ms + (RETRY_MS if is_pinned else LOOK_AGAIN_MS)
        return False

    def _begin(self, now_ms: int) -> bool:
        segments = self._log.segments
        if not self._index.pending_count or len(segments) < 2 or now_ms < self._not_before_ms:
            return False
        segment = segments[min(self._log.floor_number, len(segments) - 1)]
        if not self._index.counts.pins[segment.start] or not self._is_due(now_ms):
            self._not_before_ms = now_ms + LOOK_AGAIN_MS
            return False
        self._segment, self._timers = segment, self._timers_in(segment)
        return True

    def _timers_in(self, segment: Segment) -> Iterator[int]:
        """Yield the ids of timers with a copy in `segment`, and NOTHING between them."""
        position: int | None = segment.start
        # Retention may remove the segment between two slices, after its last timer left.
        while position is not None and self._log.min_offset <= segment.start:
            found, position = self._read_slice(segment, position)
            yield from found
        if not self._index.counts.pins[segment.start]:
            return
        table = self._index.table
        for number in table.live_page_numbers(dict(self._index.counts.file_live)):
            rows = table.rows(number)
            is_here = (rows["log_offset"] >= segment.start) & (rows["log_offset"] < segment.end)
            is_here &= rows["state"] == TimerState.PENDING
            yield from repeat(NOTHING, RECORDS_A_PAGE)
            yield from (np.flatnonzero(is_here) + number * len(rows)).tolist()

    def _read_slice(self, segment: Segment, position: int) -> tuple[list[int], int | None]:
        """Return timer ids of some records of a segment, and the next position or None."""
        found: list[int] = []
        try:
            for one in self._log.reader.walk(segment, position):
                if one.header.size < HEADER_SIZE:
                    break  # Damaged: the walk would never move on.
                is_copy = one.header.kind == RecordKind.MESSAGE and one.header.flags & FLAG_SCHEDULE
                found.append(message.decode_target(one.body).timer_id if is_copy else NOTHING)
                if len(found) == RECORDS_A_SLICE:
                    return found, one.log_offset + one.header.size
        except (CorruptStore, struct.error, UnicodeDecodeError):
            pass  # The table finds the timers after a damaged record.
        return found, None

    def _move(self, timer_id: TimerId, segment: Segment, now_ms: int) -> None:
        entry = self._index.find_pending(timer_id)
        if entry is None or not segment.start <= entry.log_offset < segment.end:
            return
        try:
            body = self._bodies.read(timer_id, entry)
            if body.original is None:
                self._copy(timer_id, entry, body, now_ms)
                return
        except BodyDamaged:
            if self._bodies.request_mend(entry.log_offset):
                return  # Its segment stays until the message is mended or given up.
        except MessageBodyTooLarge:
            pass  # Segments are now smaller than the message.
        self._leave_remains(timer_id, entry, now_ms)

    def _copy(self, timer_id: TimerId, entry: TimerEntry, body: TimerBody, now_ms: int) -> None:
        target = TimerTarget(timer_id, entry.due_at_ms, entry.topic_id, body.queue_id, body.origin)
        self._append(COPY_QUEUE, FLAG_SCHEDULE, target, body.blob, body.crc, now_ms)
        self.evacuated[entry.topic_id] += 1
        self._tally.add(0, size_bytes=entry.size)
        self._tokens -= entry.size

    def _leave_remains(self, timer_id: TimerId, entry: TimerEntry, now_ms: int) -> None:
        """Record the remains of a message instead of a copy."""
        self._quarantined[timer_id] = entry.topic_id
        known = self._bodies.find_target(timer_id, entry)
        topic = self._catalog.topics.get(entry.topic_id)
        queue_id, origin, original = QueueId(0), topic.name if topic else "", entry.log_offset
        if known is not None:
            queue_id, origin = known.target.queue_id, known.target.origin
            original = self._bodies.original_of(timer_id, known.log_offset)
        else:
            try:
                if self._is_remains(entry.log_offset):
                    # The record is remains already: the message is in a held segment.
                    before = LogOffset(-self._log.min_offset)
                    original = self._bodies.original_of(timer_id, before)
            except BlockFileDamaged:
                return  # The queue file is rebuilt first.
        target = TimerTarget(timer_id, entry.due_at_ms, entry.topic_id, queue_id, origin)
        _, blob = self._store.remains_of(entry.log_offset, entry.size)
        flags = FLAG_SCHEDULE | FLAG_REMAINS
        remains = SalvagedTimer(target, original)
        try:
            self._append(REMAINS_QUEUE, flags, remains, blob, crc32(blob), now_ms)
        except MessageBodyTooLarge:
            return  # Its properties do not fit either: its segment stays.
        # An overdue timer was tried before and is in no slot.
        self._index.links.relink(timer_id, entry, SCHEDULE, now_ms, change=0)
        self._tokens -= len(blob)

    def _is_remains(self, log_offset: LogOffset) -> bool:
        """Return whether the record is in the queue of remains. Raises BlockFileDamaged."""
        key = self._catalog.topic_ids[TIMER_TOPIC], REMAINS_QUEUE
        queue = self._catalog.queues.get(key)
        offset = 0 if queue is None else queue.offset_behind(log_offset)
        return (
            queue is not None and offset < queue.max_offset and queue.entry(offset)[0] == log_offset
        )

    def _append(
        self,
        queue_id: QueueId,
        flags: int,
        cause: TimerTarget | SalvagedTimer,
        blob: bytes | memoryview,
        crc: int,
        now_ms: int,
    ) -> None:
        topic_id = self._catalog.topic_ids[TIMER_TOPIC]
        queue_offset = self._catalog.queue(topic_id, queue_id).max_offset
        self._recorder.append(
            MessageEntry(topic_id, queue_id, 0, queue_offset, flags, cause, blob, crc), now_ms
        )

    def next_step_ms(self) -> int | None:
        """Return when to continue, None while no segment is being evacuated."""
        if self._segment is None:
            return None
        return self._not_before_ms
