"""Stage B, body (the reference's get-message): messages are asked for early, and checked.

Of what is loaded the places of the messages are sorted, joined where they lie close together, and
the kernel is asked to read them: when they are due, seconds later, they are in its cache. What was
written lately is there anyway.
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
READS_WAITING_MAX = 65_536  # a hint may be dropped


class BodyDamaged(Exception):
    """The message of a timer is not what its entry says."""


class TimerBody(NamedTuple):
    """The message of a timer."""

    queue_id: QueueId  # of its topic, as chosen when it was sent
    crc: int
    stored_at_ms: int
    blob: memoryview
    head: memoryview  # the body of the record, which names the topic
    original: LogOffset | None = None  # where the message stands of which this is what is left

    @property
    def origin(self) -> str:
        """The name of its topic, which may be gone."""
        return message.decode_target(self.head).origin


@final
class TimerBodies:
    """Messages of timers, in the commit log."""

    def __init__(self, log: CommitLog, originals: Mapping[int, LogOffset | None]) -> None:
        self._log = log
        # By timer, of those of which what is left does not say it: where the message stands, None
        # where that was not found; one that is not there was not looked for yet.
        self._originals = originals
        self._reads: deque[tuple[int, int]] = deque()

    def expect(self, places: np.ndarray) -> None:
        """Plan to read messages; rows of (log offset, size)."""
        cold = places[places[:, 0] < self._log.log_end - WARM_BYTES]
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
        """Ask for one slice of what is planned; True when there is more."""
        for _ in range(min(READS_A_SLICE, len(self._reads))):
            log_offset, size = self._reads.popleft()
            if log_offset >= self._log.min_offset:
                self._log.advise(LogOffset(log_offset), size)
        return bool(self._reads)

    def read(self, timer_id: TimerId, entry: TimerEntry) -> TimerBody:
        """Return the message of a timer. Raises BodyDamaged when it is not intact, or another's.

        Of one that was damaged it is what is left, until somebody has repaired the original.
        """
        try:
            body = self._read(timer_id, entry.log_offset, entry.topic_id)
        except BodyDamaged:
            found = self._originals.get(timer_id)
            if found is None:
                raise
            return self._read(timer_id, found, entry.topic_id)
        if body.original is not None:
            original = self.original(timer_id, body.original)
            if original < 0 and timer_id not in self._originals:
                raise BodyDamaged(f"timer {timer_id}: its message was not looked for yet")
            with suppress(BodyDamaged):
                return self._read(timer_id, original, entry.topic_id)
        return body

    def original(self, timer_id: TimerId, said: LogOffset) -> LogOffset:
        """Return where a message stands by what its remains have `said`, or by what was found."""
        found = self._originals.get(timer_id) if said < 0 else None
        return said if found is None else found

    def _read(self, timer_id: TimerId, log_offset: LogOffset, topic_id: TopicId) -> TimerBody:
        log = self._log
        try:
            if log_offset < log.min_offset:
                found = log.read_held(log_offset)
            else:
                # Whoever wrote it: days may have passed since, and the disk had it alone.
                if log_offset < log.committed_offset:
                    log.verify(log_offset)
                found = log.record_at(log_offset)
        except (CorruptStore, LookupError, record.UnknownRecord) as error:
            self.is_awaited(log_offset)
            raise BodyDamaged(f"timer {timer_id}: {error}") from error
        header = found.header
        if header.kind != record.RecordKind.MESSAGE or not header.flags & FLAG_SCHEDULE:
            raise BodyDamaged(f"timer {timer_id}: no delayed message at its log offset")
        other_id, _, other_topic_id, queue_id, _ = message.TARGET.unpack_from(
            found.body, message.PLACE_SIZE
        )
        if other_id != timer_id or other_topic_id != topic_id:
            raise BodyDamaged(f"timer {timer_id}: its log offset has timer {other_id}")
        original = None
        if header.flags & FLAG_REMAINS:
            original = message.decode_remains(found.body).log_offset
        return TimerBody(
            queue_id, header.tail_crc, header.stored_at_ms, found.tail, found.body, original
        )

    def is_awaited(self, log_offset: LogOffset) -> bool:
        """Whether a damaged message may come back from another replica; it is asked for then."""
        return log_offset >= self._log.min_offset and self._log.damage.request(log_offset)

    def find_target(self, timer_id: TimerId, entry: TimerEntry) -> SalvagedTimer | None:
        """Return what the head of a damaged record says, None where that is damaged too.

        Its log offset is where the message stands that was sent.
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
