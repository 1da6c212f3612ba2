"""Commands about delayed messages: schedule, cancel, reschedule, and inspection.

Each command records one entry, which the fold applies to the index. Wall time (`now_ms`) stamps the
records. Firing time (`firing_ms`) decides what is due.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from typing import final

from tidemill.broker.engine.layout.dedup import DedupKey
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.message import (
    FLAG_KEYED,
    FLAG_OUTCOME,
    FLAG_SCHEDULE,
    CommittedTimer,
    HalfOutcome,
    KeyedMessage,
    MessageCause,
    MessageEntry,
    TimerTarget,
)
from tidemill.broker.engine.layout.numbers import QueueId, QueueOffset, TimerId, TopicId
from tidemill.broker.engine.layout.timer_control import TimerControl, TimerOperation
from tidemill.broker.engine.layout.timer_entry import TimerEntry, TimerEntryDamaged
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog, Topic
from tidemill.broker.engine.metadata.system_topics import ensure_system_topic
from tidemill.broker.engine.tally import Tally
from tidemill.broker.engine.timer.admission import Admission
from tidemill.broker.engine.timer.body import BodyDamaged, TimerBodies
from tidemill.broker.engine.timer.due_count import DueCount, DueHistogram, DueWalk
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.patch import with_due_time
from tidemill.broker.engine.timer.pending import PendingQuery, PendingWalk
from tidemill.broker.engine.timer.recovery import TimerRecovery
from tidemill.broker.engine.timer.search import TimerSearch
from tidemill.broker.engine.timer.status import (
    REPLACED_QUEUE,
    SCHEDULE_QUEUE,
    ScheduleResult,
    TimerQuery,
    TimerState,
    TimerStatus,
)
from tidemill.common.errors import Conflict, IllegalDeliveryTime, MessageNotFound
from tidemill.common.histogram import Histogram
from tidemill.message import stored_message
from tidemill.message.resource_names import TIMER_TOPIC

# RocketMQ's buckets for the requested delay, and three more: a week, a month, a year.
DELAY_BUCKETS_S = (60, 600, 3600, 43_200, 86_400, 259_200, 604_800, 2_592_000, 31_536_000)
# Two neighbouring fields of a stored message.
_BORN_AND_DUE = struct.Struct(">qq")
_DUE = struct.Struct(">q")
assert stored_message.DUE_AT == stored_message.BORN_AT + 8, "part of the disk format"
# Makes a named tuple without a call of Python code: every schedule does it.
_tuple = tuple.__new__


@final
class TimerCommands:
    """The commands of clients and operators about timers."""

    def __init__(
        self,
        index: TimerIndex,
        admission: Admission,
        bodies: TimerBodies,
        catalog: Catalog,
        store: MessageStore,
        recorder: Recorder,
        recovery: TimerRecovery,
        tally: Tally,
        *,
        quarantined: dict[int, int],
        lateness: Histogram[TopicId],
    ) -> None:
        self._index = index
        self._admission = admission
        self._bodies = bodies
        self._catalog = catalog
        self._store = store
        self._recorder = recorder
        self._recovery = recovery
        self._tally = tally
        self._quarantined = quarantined  # topic id by timer id
        self._lateness = lateness
        self.delays: Histogram[TopicId] = Histogram(DELAY_BUCKETS_S)  # requested delays
        self.recalled: Counter[tuple[int, str]] = Counter()  # by topic id and result
        self.rescheduled: Counter[tuple[int, str]] = Counter()

    # ------------------------------------------------------------ commands

    def schedule(
        self,
        topic: Topic,
        queue_id: QueueId,
        blob: bytes | memoryview,
        crc: int,
        *,
        due_at_ms: int,
        now_ms: int,
        firing_ms: int,
        outcome: HalfOutcome | None = None,
        key: DedupKey | None = None,
        due_max_ms: int | None = None,
    ) -> ScheduleResult:
        """Store a message until it is due, later than `firing_ms`. Raises Overloaded.

        With `outcome`, the message is a committed half message. A full second does not move the due
        time beyond `due_max_ms`.
        """
        if not self._index.pending_count:
            self._recovery.start_loading(firing_ms)
        due_at_ms = self._admission.admit(due_at_ms, topic, len(blob), crc, firing_ms)
        if due_max_ms is not None:
            due_at_ms = min(due_at_ms, due_max_ms)
        data: bytes | memoryview = blob
        if _DUE.unpack_from(blob, stored_message.DUE_AT)[0] != due_at_ms:
            data, crc = with_due_time(blob, crc, due_at_ms)
        timer_topic_id = self._catalog.topic_ids.get(TIMER_TOPIC)
        if timer_topic_id is None:
            timer_topic_id = ensure_system_topic(
                self._catalog, self._recorder, TIMER_TOPIC, now_ms, queues=2
            ).id
        timer_id = self._catalog.queues[timer_topic_id, SCHEDULE_QUEUE].max_offset
        target = _tuple(TimerTarget, (timer_id, due_at_ms, topic.id, queue_id, topic.name))
        flags = FLAG_SCHEDULE
        cause: MessageCause = target
        if outcome is not None:
            flags, cause = FLAG_SCHEDULE | FLAG_OUTCOME, CommittedTimer(target, outcome)
        elif key is not None:
            flags, cause = FLAG_SCHEDULE | FLAG_KEYED, KeyedMessage(target, key)
        entry = timer_topic_id, SCHEDULE_QUEUE, 0, timer_id, flags, cause, data, crc
        self._recorder.append(_tuple(MessageEntry, entry), now_ms)
        self.delays.observe(topic.id, (due_at_ms - firing_ms) // 1000)
        # Export the series from 0 on, so that a rate includes the first delivery.
        self._lateness.declare(topic.id)
        return ScheduleResult(timer_id, due_at_ms)

    def replace(
        self,
        timer_id: TimerId,
        topic: Topic,
        queue_id: QueueId,
        blob: bytes,
        crc: int,
        *,
        due_at_ms: int,
        key: DedupKey,
        now_ms: int,
        firing_ms: int,
    ) -> ScheduleResult:
        """Replace the message of a pending timer, and its due time.

        A time in the past means now. Raises Overloaded, and Conflict if its entry is damaged.
        """
        self._entry(timer_id, topic.id, Counter())  # Before the record: its fold needs the entry.
        self._admission.admit_replacement(topic, len(blob))
        due_at_ms = max(due_at_ms, firing_ms)
        data, crc = with_due_time(blob, crc, due_at_ms)
        queue = self._catalog.queue(self._catalog.topic_ids[TIMER_TOPIC], REPLACED_QUEUE)
        target = TimerTarget(timer_id, due_at_ms, topic.id, queue_id, topic.name)
        place = queue.topic_id, queue.queue_id, 0, queue.max_offset
        flags, cause = FLAG_SCHEDULE | FLAG_KEYED, KeyedMessage(target, key)
        self._recorder.append(MessageEntry(*place, flags, cause, data, crc), now_ms)
        self._quarantined.pop(timer_id, None)
        self.delays.observe(topic.id, (due_at_ms - firing_ms) // 1000)
        return ScheduleResult(QueueOffset(timer_id), due_at_ms)

    def due_of(self, blob: bytes, delay_ms: int | None, now_ms: int) -> int:
        """Return the requested delivery time of a message. Raises IllegalDeliveryTime."""
        born_at_ms, due_at_ms = _BORN_AND_DUE.unpack_from(blob, stored_message.BORN_AT)
        self._admission.note_skew(born_at_ms, now_ms=now_ms)
        try:
            if delay_ms is not None:
                return self._admission.due_after(delay_ms, now_ms=now_ms)
            self._admission.check_due(due_at_ms, now_ms=now_ms)
        except IllegalDeliveryTime:
            self._admission.refused["horizon"] += 1
            raise
        return int(due_at_ms)

    def cancel(
        self,
        timer_id: TimerId,
        *,
        topic_id: TopicId | None = None,
        now_ms: int,
        operation_id: int = 0,
    ) -> None:
        """Cancel a pending timer. It may be cancelled already. Raises MessageNotFound."""
        entry = self._entry(timer_id, topic_id, self.recalled)
        if entry.state == TimerState.CANCELLED:
            self.recalled[entry.topic_id, "duplicate"] += 1
            return
        if entry.state != TimerState.PENDING:
            self.recalled[entry.topic_id, "already_fired"] += 1
            raise _already(entry.state)
        self._recorder.append(
            TimerControl(TimerOperation.CANCEL, timer_id, entry.due_at_ms, 0, operation_id), now_ms
        )
        self._quarantined.pop(timer_id, None)
        self.recalled[entry.topic_id, "recalled"] += 1

    def check_cancel(self, timer_id: TimerId) -> None:
        """Raise the error that `cancel` would raise."""
        status = self.status(timer_id)
        if status.state not in {TimerState.PENDING, TimerState.CANCELLED}:
            raise _already(status.state)

    def reschedule(
        self,
        timer_id: TimerId,
        *,
        due_at_ms: int,
        expected_due_at_ms: int | None = None,
        now_ms: int,
        firing_ms: int,
        operation_id: int = 0,
    ) -> None:
        """Change the due time of a pending timer. A time in the past means now.

        The topic may be deleted; then the message becomes a dead letter at the new time.

        Raises MessageNotFound, IllegalDeliveryTime, and Conflict if its due time is not
        `expected_due_at_ms`.
        """
        self._admission.check_due(due_at_ms, now_ms=firing_ms)
        entry = self._entry(timer_id, None, self.rescheduled)
        if entry.state != TimerState.PENDING:
            self.rescheduled[entry.topic_id, "already_fired"] += 1
            raise _already(entry.state)
        if expected_due_at_ms not in (None, entry.due_at_ms):
            self.rescheduled[entry.topic_id, "conflict"] += 1
            raise Conflict(
                f"timer {timer_id} is now due at {entry.due_at_ms}, not at {expected_due_at_ms}; "
                f"read it again before you change it"
            )
        due_at_ms = max(due_at_ms, firing_ms)
        # Of an operation, a record without an effect moves the cursor.
        if due_at_ms != entry.due_at_ms or operation_id:
            change = TimerOperation.RESCHEDULE, timer_id, entry.due_at_ms, due_at_ms, operation_id
            self._recorder.append(TimerControl(*change), now_ms)
        self.rescheduled[entry.topic_id, "rescheduled"] += 1

    def fire(self, timer_id: TimerId, *, now_ms: int, firing_ms: int) -> None:
        """Make a pending timer due now. Raises MessageNotFound."""
        self.reschedule(timer_id, due_at_ms=firing_ms, now_ms=now_ms, firing_ms=firing_ms)

    def _entry(
        self, timer_id: TimerId, topic_id: TopicId | None, results: Counter[tuple[int, str]]
    ) -> TimerEntry:
        self._index.link_gathered()
        if not 0 <= timer_id < self._index.next_id:
            results[0, "not_found"] += 1
            raise MessageNotFound(f"timer {timer_id} does not exist; check the number")
        try:
            entry = self._index.get(timer_id)
        except TimerEntryDamaged:
            raise Conflict(
                f"the entry of timer {timer_id} is damaged; restart the broker to rebuild it from "
                f"the log"
            ) from None
        if entry.state in (TimerState.UNUSED, TimerState.FORGOTTEN):
            results[0, "not_found"] += 1
            raise MessageNotFound(
                f"timer {timer_id} was delivered or cancelled, and its final state has expired"
            )
        if topic_id not in (None, entry.topic_id):
            results[0, "not_found"] += 1
            raise MessageNotFound(f"timer {timer_id} belongs to another topic; check the topic")
        return entry

    # ------------------------------------------------------------ inspection

    def status(self, timer_id: TimerId) -> TimerStatus:
        """Return the state and the fields of a timer. Raises MessageNotFound."""
        entry = self._entry(timer_id, None, Counter())
        topic = self._catalog.topics.get(entry.topic_id)
        queue_id, scheduled_at_ms, head = 0, 0, b""
        try:
            body = self._bodies.read(timer_id, entry)
            fields = stored_message.decode(body.blob)
        except (BodyDamaged, ValueError):
            pass  # The stored message is damaged: its fields stay empty.
        else:
            queue_id, scheduled_at_ms = body.queue_id, body.stored_at_ms
            head = bytes(body.blob[: fields.user_at])
        return TimerStatus(
            timer_id=timer_id,
            state=TimerState(entry.state),
            is_quarantined=timer_id in self._quarantined,
            topic_id=entry.topic_id,
            topic=topic.name if topic is not None else "",
            queue_id=QueueId(queue_id),
            due_at_ms=entry.due_at_ms,
            scheduled_at_ms=scheduled_at_ms,
            size=entry.size,
            head=head,
        )

    def search(self, query: TimerQuery) -> TimerSearch:
        """Begin a search for pending timers."""
        self._index.link_gathered()
        return TimerSearch(self._index, self._store, self._tally, query, self.status)

    def pending(self, query: PendingQuery) -> PendingWalk:
        """Begin a page of pending timers in the order of their ids."""
        self._index.link_gathered()
        return PendingWalk(self._index, self._bodies, self._tally, query)

    def count_due(self, within_ms: Sequence[int], *, firing_ms: int) -> DueCount:
        """Begin to count, by topic, the timers due within each of some durations."""
        return DueCount(self._due_walk(), within_ms, firing_ms=firing_ms)

    def due_histogram(
        self, step_ms: int, buckets: int, *, firing_ms: int, topic_id: TopicId | None
    ) -> DueHistogram:
        """Begin to count the timers of a topic, or all, by due time."""
        walk = self._due_walk(topic_id)
        return DueHistogram(walk, step_ms, buckets, firing_ms=firing_ms, topic_id=topic_id)

    def _due_walk(self, topic_id: TopicId | None = None) -> DueWalk:
        self._index.link_gathered()
        return DueWalk(self._index, self._tally, list(self._quarantined), topic_id)


def _already(state: int) -> MessageNotFound:
    return MessageNotFound(f"the message has been {TimerState(state).name.lower()} already")
