"""Evacuation: messages of pending timers leave a segment before retention takes it.

The oldest segment is read once from its beginning to its end; of each timer that still waits and
whose newest copy lies there, another copy is appended, at no more than a set rate. The timer keeps
its id, its due time, its recall handle and its message id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import final

from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.message import FLAG_SCHEDULE, Target
from tidemill.broker.engine.layout.record import Kind
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.store.commit_log import CommitLog, Record
from tidemill.broker.engine.timer.body import Bodies, BodyDamaged
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.status import COPY_QUEUE

RECORDS_A_SLICE = 256  # of any kind, mostly passed over by their header
LOOK_AGAIN_MS = 1000  # whether a segment is due; retention is counted in hours


@final
class Evacuation:
    """The segment that is being evacuated, and how far."""

    def __init__(
        self,
        index: TimerIndex,
        log: CommitLog,
        store: MessageStore,
        bodies: Bodies,
        *,
        rate_bytes: int,
        is_due: Callable[[int], bool],
        hidden_topic_id: Callable[[], int],
    ) -> None:
        self._index = index
        self._log = log
        self._store = store
        self._bodies = bodies
        self._rate_bytes = rate_bytes
        self._is_due = is_due  # whether the oldest segment will have to go soon, by now_ms
        self._hidden_topic_id = hidden_topic_id
        self._records: Iterator[Record] | None = None
        self._tokens = 0.0
        self._refilled_at_ms = 0
        self._not_before_ms = 0
        self.quarantined: dict[int, int] = {}
        self.evacuated: Counter[int] = Counter()  # by topic id

    def step(self, now_ms: int) -> bool:
        """Do one slice; True when there is more to do at once."""
        if self._records is None and not self._begin(now_ms):
            return False
        elapsed_ms = min(max(now_ms - self._refilled_at_ms, 0), 1000)
        self._refilled_at_ms = now_ms
        self._tokens = min(self._tokens + elapsed_ms * self._rate_bytes / 1000, self._rate_bytes)
        assert self._records is not None, "a segment was chosen"
        for n, found in enumerate(self._records, 1):
            self._move(found, now_ms)
            if self._tokens <= 0:
                self._not_before_ms = now_ms + 100
                return False
            if n == RECORDS_A_SLICE:
                return True
        self._records = None
        self._not_before_ms = now_ms + LOOK_AGAIN_MS
        return False

    def _begin(self, now_ms: int) -> bool:
        segments = self._log.segments
        if not self._index.pending_count or len(segments) < 2 or now_ms < self._not_before_ms:
            return False
        if not self._index.pins[segments[0].start] or not self._is_due(now_ms):
            self._not_before_ms = now_ms + LOOK_AGAIN_MS
            return False
        self._records = self._log.walk(segments[0])
        return True

    def _move(self, found: Record, now_ms: int) -> None:
        header = found.header
        if header.kind != Kind.MESSAGE or not header.flags & FLAG_SCHEDULE:
            return
        timer_id = message.decode_target(found.body).timer_id
        entry = self._index.find_pending(timer_id)
        if entry is None or entry.log_offset != found.log_offset:
            return
        try:
            body = self._bodies.read(timer_id, entry)
        except BodyDamaged:
            self.quarantined[timer_id] = entry.topic_id  # Its segment stays.
            return
        target = Target(timer_id, entry.due_at_ms, entry.topic_id, body.queue_id, body.origin)
        self._store.append_message(
            self._hidden_topic_id(), COPY_QUEUE, body.blob, body.crc, now_ms,
            flags=FLAG_SCHEDULE, cause=message.encode_target(target),
        )  # fmt: skip
        log_offset = self._store.last_log_offset
        self._index.evacuate(timer_id, log_offset, self._log.log_end - log_offset)
        self.evacuated[entry.topic_id] += 1
        self._tokens -= header.size

    def next_step_ms(self) -> int | None:
        """Return when to go on, None while nothing is to be evacuated."""
        if self._records is None:
            return None
        return self._not_before_ms
