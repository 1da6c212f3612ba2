"""Stage D, deliver: due messages go to their topics.

There are two lanes: on time (at most a second late) and late (a backlog, or the overflow of a
burst). While both have work, the on-time lane gets seven turns of ten. Inside a lane the topics
take turns of one quantum (64 KiB), in order of due time inside a topic. So a burst of one topic
delays another topic by one turn, not by the whole burst.

The delivered message is the transition: it names the timer as its cause. The owner appends it and
settles the timer in one step, so that a cancel comes before or after it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import final

import numpy as np

from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.message import FLAG_TIMER, MessageEntry, TimerCause, TimerReason
from tidemill.broker.engine.layout.numbers import QueueId, TimerId, TopicId
from tidemill.broker.engine.layout.timer_entry import TimerEntry, TimerEntryDamaged
from tidemill.broker.engine.layout.timer_record import SCHEDULE
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.metadata.system_topics import ensure_system_topic
from tidemill.broker.engine.room import DiskRoom
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.tally import Tally
from tidemill.broker.engine.timer.body import BodyDamaged, TimerBodies, TimerBody
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.near_wheel import NearWheel
from tidemill.broker.engine.timer.patch import with_due_time
from tidemill.broker.engine.timer.status import TimerState
from tidemill.common.errors import MessageBodyTooLarge
from tidemill.common.histogram import Histogram
from tidemill.message.resource_names import TIMER_DEAD_LETTER_TOPIC

ON_TIME_MS = 1000  # later messages go to the late lane
TURNS = 10
ON_TIME_TURNS = 7  # of TURNS, while both lanes have work
QUANTUM_BYTES = 64 << 10
QUANTUM_MESSAGES = 64
DELIVERIES_A_SLICE = 64  # over 1 ms
BYTES_A_SLICE = 1 << 20
TOPICS_TAKEN_MAX = 256  # topics added to lanes at once, half a millisecond
AGED_A_TURN = 4  # portions per turn that move to the late lane
NOTICES_MAX = 100  # kinds of notices until the shell takes them
BACK_OFF_MS_MIN = 50
BACK_OFF_MS_MAX = 5_000
LATENESS_BUCKETS_MS = (1, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 60_000)


@final
class _Lane:
    """The topics of one lane, in the order of their turns."""

    def __init__(self) -> None:
        self.topics: dict[int, deque[np.ndarray]] = {}

    def __bool__(self) -> bool:
        return bool(self.topics)

    def add(self, topic_id: TopicId, items: np.ndarray) -> None:
        self.topics.setdefault(topic_id, deque()).append(items)


@final
class Deliverer:
    """The due messages, and their delivery to the topics."""

    def __init__(
        self,
        index: TimerIndex,
        near: NearWheel,
        bodies: TimerBodies,
        catalog: Catalog,
        recorder: Recorder,
        tally: Tally,
        room: DiskRoom,
        *,
        ready: Callable[[TopicId], None],
        quarantined: dict[int, int],
        rate_max: int,
        expire_after_ms: int,
    ) -> None:
        self._index = index
        self._near = near
        self._bodies = bodies
        self._catalog = catalog
        self._recorder = recorder
        self._tally = tally
        self._ready = ready
        self._disk_room = room
        self._rate_max = rate_max
        self._expire_after_ms = expire_after_ms
        self._on_time = _Lane()
        self._late = _Lane()
        self._turn = 0
        self._tokens = 0.0
        self._refilled_at_ms = 0
        self._back_off_ms = 0
        self.retry_at_ms = 0  # 0: delivery is possible
        self.quarantined = quarantined  # topic id by timer id
        # For the shell's log: the count and the last timer id, by topic name and reason.
        self.notices: dict[tuple[str, str], tuple[int, int]] = {}
        # Quarantined timers whose message another replica may have.
        self._awaiting_mend: set[TimerId] = set()
        self.early_count = 0
        self.delivered: Counter[TopicId] = Counter()
        self.dropped: Counter[tuple[int, TimerReason]] = Counter()
        self.lateness: Histogram[TopicId] = Histogram(LATENESS_BUCKETS_MS)

    def take_notices(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return and clear the notices for operators."""
        notices, self.notices = self.notices, {}
        return notices

    def _note(self, timer_id: TimerId, topic: str, reason: str) -> None:
        count, _ = self.notices.get((topic, reason), (0, 0))
        if count or len(self.notices) < NOTICES_MAX:
            self.notices[topic, reason] = (count + 1, timer_id)

    def oldest_due_ms(self) -> int | None:
        """Return the earliest due time in the lanes, None if they are empty."""
        lanes = (self._on_time, self._late)
        dues = [int(q[0]["due"][0]) for lane in lanes for q in lane.topics.values()]
        return min(dues, default=None)

    @property
    def waiting_count(self) -> int:
        """The number of due timers that are neither delivered nor dropped."""
        lanes = (self._on_time, self._late)
        return sum(len(part) for lane in lanes for q in lane.topics.values() for part in q)

    def next_step_ms(self, now_ms: int) -> int | None:
        """Return when `step` has work next, None for never."""
        if not self.has_work:
            return None
        at_ms = max(self.retry_at_ms, now_ms)
        if self._rate_max and self._tokens < 1:
            at_ms = max(at_ms, self._refilled_at_ms + 1 + 1000 // self._rate_max)
        return at_ms

    @property
    def has_work(self) -> bool:
        """Whether a lane has messages."""
        return bool(self._on_time or self._late)

    # ------------------------------------------------------------ lanes

    def take_due(self, firing_ms: int) -> None:
        """Move due timers from the near wheel to the lanes."""
        items = self._near.take_due(firing_ms)
        if items is None:
            return
        end = _end_of_topics(items["topic_id"], TOPICS_TAKEN_MAX)
        if end < len(items):
            self._near.put_back(items[end:])
            items = items[:end]
        split = int(np.searchsorted(items["due"], firing_ms - ON_TIME_MS))
        for lane, part in ((self._late, items[:split]), (self._on_time, items[split:])):
            for topic_id, of_topic in _by_topic(part):
                lane.add(TopicId(topic_id), of_topic)
                self._tally.add(1)

    def resume(self, now_ms: int) -> None:
        """Link timers again after their damaged messages were mended or given up."""
        timer_ids, self._awaiting_mend = self._awaiting_mend, set()
        for timer_id in timer_ids:
            entry = self._index.find_pending(timer_id)
            if entry is not None:
                self._index.links.relink(timer_id, entry, SCHEDULE, now_ms, change=0)

    def step(self, now_ms: int, *, firing_ms: int) -> bool:
        """Deliver one slice. Return True if more can be delivered at once."""
        if now_ms < self.retry_at_ms:
            return False
        room = self._room(now_ms)
        left_bytes = BYTES_A_SLICE
        while room > 0 and left_bytes > 0:
            lane = self._choose(firing_ms)
            if lane is None:
                return False
            count, size = self._take_turn(lane, room, left_bytes, now_ms, firing_ms)
            room -= count
            left_bytes -= size
            if self._rate_max:
                self._tokens -= count
        return self.has_work and (not self._rate_max or self._tokens >= 1)

    def _room(self, now_ms: int) -> int:
        if not self._rate_max:
            return DELIVERIES_A_SLICE
        elapsed_ms = min(now_ms - self._refilled_at_ms, 1000)
        self._refilled_at_ms = now_ms
        self._tokens = min(self._tokens + elapsed_ms * self._rate_max / 1000, self._rate_max)
        return min(DELIVERIES_A_SLICE, int(self._tokens))

    def _choose(self, firing_ms: int) -> _Lane | None:
        """Return the lane that has the next turn."""
        self._age(firing_ms)
        if not self._late:
            return self._on_time or None
        if not self._on_time:
            return self._late
        self._turn = (self._turn + 1) % TURNS
        return self._on_time if self._turn < ON_TIME_TURNS else self._late

    def _age(self, firing_ms: int) -> None:
        """Move messages that are no longer on time to the late lane."""
        limit = firing_ms - ON_TIME_MS
        for _ in range(AGED_A_TURN):
            topic_id = next(iter(self._on_time.topics), None)
            if topic_id is None:
                return
            waiting = self._on_time.topics[topic_id]
            if waiting[0]["due"][0] >= limit:
                return
            self._late.add(topic_id, waiting.popleft())
            self._tally.add(1)
            if not waiting:
                del self._on_time.topics[topic_id]

    def _take_turn(
        self, lane: _Lane, room: int, left_bytes: int, now_ms: int, firing_ms: int
    ) -> tuple[int, int]:
        """Deliver one quantum of the next topic. Return its messages and bytes."""
        topic_id = next(iter(lane.topics))
        waiting = lane.topics.pop(topic_id)
        items = waiting[0]
        part = items[: min(QUANTUM_MESSAGES, room)]
        sizes = np.cumsum(part["size"])
        count = max(int(np.searchsorted(sizes, min(QUANTUM_BYTES, left_bytes), side="right")), 1)
        part = part[:count]
        self._tally.add(count, size_bytes=int(sizes[count - 1]))
        done = self._deliver_all(part, now_ms, firing_ms)
        if done == len(items):
            waiting.popleft()
        else:
            waiting[0] = items[done:]
        if waiting:
            lane.topics[topic_id] = waiting  # After the other topics.
        if done < count:
            self._back_off(now_ms)
            return room, 0
        return count, int(sizes[count - 1])

    def _back_off(self, now_ms: int) -> None:
        """Delay the next attempt, because delivery is not possible now."""
        self._back_off_ms = min(max(self._back_off_ms * 2, BACK_OFF_MS_MIN), BACK_OFF_MS_MAX)
        self.retry_at_ms = now_ms + self._back_off_ms

    # ------------------------------------------------------------ one message

    def _deliver_all(self, items: np.ndarray, now_ms: int, firing_ms: int) -> int:
        """Deliver `items`. Return the number of handled ones."""
        for n, (due_at_ms, timer_id, _, _, slot_s) in enumerate(items.tolist()):
            if self._disk_room.is_full:
                return n
            if due_at_ms > firing_ms:
                self.early_count += 1  # A defect: the near wheel returns only due timers.
                return n
            try:
                entry = self._index.get(timer_id)
            except TimerEntryDamaged:
                self.quarantined[timer_id] = 0
            else:
                # Skip a timer that was settled or rescheduled after it was loaded.
                if entry.state == TimerState.PENDING and entry.due_at_ms == due_at_ms:
                    self._deliver(timer_id, entry, now_ms, firing_ms)
            self._near.note_settled(slot_s)
        self._back_off_ms = self.retry_at_ms = 0
        return len(items)

    def _deliver(self, timer_id: TimerId, entry: TimerEntry, now_ms: int, firing_ms: int) -> None:
        try:
            body = self._bodies.read(timer_id, entry)
        except BodyDamaged:
            # It stays pending and pins its segment until its message is mended.
            self.quarantined[timer_id] = entry.topic_id
            if self._bodies.request_mend(entry.log_offset):
                self._awaiting_mend.add(timer_id)
            self._note(timer_id, "", "damaged")
            return
        self.quarantined.pop(timer_id, None)
        try:
            self._deliver_body(timer_id, entry, body, now_ms, firing_ms)
        except MessageBodyTooLarge:
            # Segments are now smaller than the message. It waits for larger ones.
            self.quarantined[timer_id] = entry.topic_id

    def _deliver_body(
        self, timer_id: TimerId, entry: TimerEntry, body: TimerBody, now_ms: int, firing_ms: int
    ) -> None:
        is_expired = 0 < self._expire_after_ms < firing_ms - entry.due_at_ms
        queues = self._catalog.open_queues.get(entry.topic_id)
        if body.original is not None:
            self._drop(timer_id, entry, body, TimerReason.DAMAGED, now_ms)
        elif queues is None:
            self._drop(timer_id, entry, body, TimerReason.TOPIC_DELETED, now_ms)
        elif is_expired:
            self._drop(timer_id, entry, body, TimerReason.EXPIRED, now_ms)
        else:
            queue = queues[body.queue_id % len(queues)]
            self._append(timer_id, entry, body, queue, now_ms)
            self.delivered[entry.topic_id] += 1
            self.lateness.observe(entry.topic_id, firing_ms - entry.due_at_ms)

    def _drop(
        self,
        timer_id: TimerId,
        entry: TimerEntry,
        body: TimerBody,
        reason: TimerReason,
        now_ms: int,
    ) -> None:
        """Copy a message that cannot be delivered to the dead-letter topic of timers."""
        target = ensure_system_topic(self._catalog, self._recorder, TIMER_DEAD_LETTER_TOPIC, now_ms)
        self._append(
            timer_id, entry, body, self._catalog.queue(target.id, QueueId(0)), now_ms, reason
        )
        self.dropped[entry.topic_id, reason] += 1
        self._note(timer_id, body.origin, reason.name.lower())

    def _append(
        self,
        timer_id: TimerId,
        entry: TimerEntry,
        body: TimerBody,
        queue: ConsumeQueue,
        now_ms: int,
        reason: TimerReason = TimerReason.DELIVERED,
    ) -> None:
        blob, crc = with_due_time(body.blob, body.crc, entry.due_at_ms)
        origin = body.origin if reason != TimerReason.DELIVERED else ""
        cause = TimerCause(timer_id, entry.due_at_ms, reason, origin)
        self._recorder.append(
            MessageEntry(
                queue.topic_id, queue.queue_id, 0, queue.max_offset, FLAG_TIMER, cause, blob, crc
            ),
            now_ms,
        )
        self._ready(queue.topic_id)


def _end_of_topics(topic_ids: np.ndarray, count: int) -> int:
    """Return the number of items before the first item of the topic number `count` (from 0)."""
    _, firsts = np.unique(topic_ids, return_index=True)
    return len(topic_ids) if len(firsts) <= count else int(np.sort(firsts)[count])


def _by_topic(items: np.ndarray) -> Iterable[tuple[int, np.ndarray]]:
    topics = items["topic_id"]
    if not len(items):
        return []
    if (topics == topics[0]).all():
        return [(int(topics[0]), items)]
    order = np.argsort(topics, kind="stable")
    items, topics = items[order], topics[order]
    begins = [0, *(np.flatnonzero(np.diff(topics)) + 1).tolist()]
    ends = [*begins[1:], len(items)]
    topic_ids = topics[begins].tolist()
    return [
        (topic_id, items[begin:end])
        for topic_id, begin, end in zip(topic_ids, begins, ends, strict=True)
    ]
