"""Stage B, body: the messages of loaded timers are read ahead, and checked on delivery.

The positions of their messages are sorted and joined where they are close together, and the kernel
is asked to read them. When they are due, seconds later, they are in its cache. Recent messages are
in the cache anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout import message, record
from tidemill.broker.engine.layout.message import FLAG_REMAINS, FLAG_SCHEDULE, SalvagedTimer
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, TimerId, TopicId
from tidemill.broker.engine.layout.timer_entry import TimerEntry
from tidemill.broker.engine.store.commit_log import (
    GAP_BYTES_MAX,
    READ_BYTES_MAX,
    WARM_BYTES,
    CommitLog,
)
from tidemill.broker.engine.store.segment import CorruptStore

READS_A_SLICE = 128  # 1-2 us each
READS_WAITING_MAX = 65_536  # further hints are dropped


class BodyDamaged(Exception):
    """The message of a timer does not match its entry, or is not intact."""


class TimerBody(NamedTuple):
    """The message of a timer."""

    queue_id: QueueId  # queue of its topic, chosen when it was sent
    crc: int
    stored_at_ms: int
    blob: memoryview
    head: memoryview  # body of the record, with the name of the topic
    original: LogOffset | None = None  # log offset of the message, if this is its salvaged part

    @property
    def origin(self) -> str:
        """The name of its topic, which may be deleted."""
        return message.decode_target(self.head).origin


@final
class TimerBodies:
    """The messages of timers, in the commit log."""

    def __init__(self, log: CommitLog, originals: Mapping[int, LogOffset | None]) -> None:
        self._log = log
        # Log offsets of messages whose salvaged part does not contain it, by timer. None: the
        # search has not found it. A missing timer was not searched yet.
        self._originals = originals
        self._reads: deque[tuple[int, int]] = deque()

    def plan_reads(self, ranges: np.ndarray) -> None:
        """Plan to read messages, given as rows of (log offset, size)."""
        cold = ranges[ranges[:, 0] < self._log.log_end - WARM_BYTES]
        if not len(cold) or len(self._reads) >= READS_WAITING_MAX:
            return
        cold = cold[np.argsort(cold[:, 0])]
        begins, ends = cold[:, 0], cold[:, 0] + cold[:, 1]
        is_apart = begins[1:] - ends[:-1] > GAP_BYTES_MAX
        firsts = np.append(0, np.flatnonzero(is_apart) + 1)
        lasts = np.append(firsts[1:], len(cold)) - 1
        for begin, end in zip(begins[firsts].tolist(), ends[lasts].tolist(), strict=True):
            for at in range(begin, end, READ_BYTES_MAX):
                self._reads.append((at, min(READ_BYTES_MAX, end - at)))

    def read_ahead(self) -> bool:
        """Ask the kernel for one slice of the planned reads. Return True if more remain."""
        for _ in range(min(READS_A_SLICE, len(self._reads))):
            log_offset, size = self._reads.popleft()
            if log_offset >= self._log.min_offset:
                self._log.advise(LogOffset(log_offset), size)
        return bool(self._reads)

    def read(self, timer_id: TimerId, entry: TimerEntry) -> TimerBody:
        """Return the message of a timer. Raises BodyDamaged if it is damaged or another timer's.

        Returns the salvaged part of a damaged message until the message has been mended.
        """
        try:
            body = self._read(timer_id, entry.log_offset, entry.topic_id)
        except BodyDamaged:
            found = self._originals.get(timer_id)
            if found is None:
                raise
            return self._read(timer_id, found, entry.topic_id)
        if body.original is not None:
            original = self.original_of(timer_id, body.original)
            if original < 0 and timer_id not in self._originals:
                raise BodyDamaged(f"timer {timer_id}: the search for its message has not ended")
            with suppress(BodyDamaged):
                return self._read(timer_id, original, entry.topic_id)
        return body

    def original_of(self, timer_id: TimerId, recorded: LogOffset) -> LogOffset:
        """Return the log offset of a salvaged message: as `recorded`, or as the search found it."""
        found = self._originals.get(timer_id) if recorded < 0 else None
        return recorded if found is None else found

    def _read(self, timer_id: TimerId, log_offset: LogOffset, topic_id: TopicId) -> TimerBody:
        log = self._log
        try:
            if log_offset < log.min_offset:
                found = log.read_held(log_offset)
            else:
                # Always verify: the record may have been on the disk for days.
                if log_offset < log.committed_offset:
                    log.verify(log_offset)
                found = log.record_at(log_offset)
        except (CorruptStore, LookupError, record.UnknownRecord) as error:
            self.request_mend(log_offset)
            raise BodyDamaged(f"timer {timer_id}: {error}") from error
        header = found.header
        if header.kind != record.RecordKind.MESSAGE or not header.flags & FLAG_SCHEDULE:
            raise BodyDamaged(f"timer {timer_id}: the record at its log offset is not its message")
        other_id, _, other_topic_id, queue_id, _ = message.TARGET.unpack_from(
            found.body, message.PLACE_SIZE
        )
        if other_id != timer_id or other_topic_id != topic_id:
            raise BodyDamaged(f"timer {timer_id}: its log offset has the message of {other_id}")
        original = None
        if header.flags & FLAG_REMAINS:
            original = message.decode_remains(found.body).log_offset
        return TimerBody(
            queue_id, header.tail_crc, header.stored_at_ms, found.tail, found.body, original
        )

    def request_mend(self, log_offset: LogOffset) -> bool:
        """Ask another replica for a damaged message. Return False if none can have it."""
        return log_offset >= self._log.min_offset and self._log.damage.request(log_offset)

    def find_target(self, timer_id: TimerId, entry: TimerEntry) -> SalvagedTimer | None:
        """Return the target of a damaged record, None if its head is damaged too.

        The result has the log offset of the original message.
        """
        view = self._log.bytes_at(entry.log_offset, entry.size)
        header = record.find_head(view, 0, log_offset=entry.log_offset)
        if header is None or not header.flags & FLAG_SCHEDULE:
            return None
        head = view[record.HEADER_SIZE : header.head_size]
        if header.flags & FLAG_REMAINS:
            found = message.decode_remains(head)
        else:
            found = SalvagedTimer(message.decode_target(head), entry.log_offset)
        return found if found.target.timer_id == timer_id else None
