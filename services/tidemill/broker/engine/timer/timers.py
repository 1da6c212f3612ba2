"""Delayed messages: all commands, and the turns of the five stages.

    admission   whether a message is taken            index    I: transitions into table and wheel
    load        L: slots into the near wheel          body     B: messages asked for early, checked
    deliver     D: what is due into its topic         flush    files, never ahead of the log
    evacuation  copies out of old segments            janitor  files nobody needs, and the audit
    set_aside   segments of which there is no copy
    opening     the files at a start, and making them again

Owned by the engine's one owner; each command records one entry, which the fold applies to the
index. Wall time (`now_ms`) stamps records; firing time (`firing_ms`) says what is due.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import final

from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.message import FLAG_SCHEDULE, MessageEntry, TimerTarget
from tidemill.broker.engine.layout.numbers import QueueId, TimerId, TopicId
from tidemill.broker.engine.layout.timer_checkpoint import FLAG_CLEAN
from tidemill.broker.engine.layout.timer_control import Frontier, TimerControl, TimerOperation
from tidemill.broker.engine.layout.timer_entry import TimerEntry, TimerEntryDamaged
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog, Topic
from tidemill.broker.engine.metadata.system_topics import ensure_system_topic
from tidemill.broker.engine.room import DiskRoom
from tidemill.broker.engine.store.disk import Disk, File
from tidemill.broker.engine.store.segment import Segment
from tidemill.broker.engine.tally import Tally
from tidemill.broker.engine.timer.admission import Admission
from tidemill.broker.engine.timer.audit import TimerAudit
from tidemill.broker.engine.timer.body import BodyDamaged, TimerBodies
from tidemill.broker.engine.timer.census import Census
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.timer.deliver import Deliverer
from tidemill.broker.engine.timer.due_count import DueCount
from tidemill.broker.engine.timer.evacuation import Evacuation
from tidemill.broker.engine.timer.flush import Flusher
from tidemill.broker.engine.timer.held_segments import HeldSegments
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.janitor import Janitor
from tidemill.broker.engine.timer.load import SlotLoader
from tidemill.broker.engine.timer.near_wheel import NearWheel
from tidemill.broker.engine.timer.patch import with_due_time
from tidemill.broker.engine.timer.pending import PendingQuery, PendingWalk
from tidemill.broker.engine.timer.recovery import TimerRecovery
from tidemill.broker.engine.timer.search import TimerSearch
from tidemill.broker.engine.timer.status import (
    SCHEDULE_QUEUE,
    TIMER_TOPIC,
    ScheduleResult,
    TimerQuery,
    TimerState,
    TimerStatus,
)
from tidemill.common.errors import Conflict, IllegalDeliveryTime, MessageNotFound
from tidemill.common.histogram import Histogram
from tidemill.message import stored_message

# RocketMQ's buckets for the delay asked for, and three more: a week, a month, a year.
DELAY_BUCKETS_S = (60, 600, 3600, 43_200, 86_400, 259_200, 604_800, 2_592_000, 31_536_000)
# Of a stored message, where they stand side by side.
_BORN_AND_DUE = struct.Struct(">qq")
_DUE = struct.Struct(">q")
assert stored_message.DUE_AT == stored_message.BORN_AT + 8, "part of the disk format"
# Makes a named tuple of a tuple without a call of Python code, for what every schedule makes.
_tuple = tuple.__new__
FRONTIER_PERIOD_MS = 1_000  # at most one record in it
FRONTIER_IDLE_MS = 60_000  # at least one in it, while timers wait


@final
class Timers:
    """All timers of a broker group."""

    def __init__(
        self,
        disk: Disk,
        config: TimerConfig,
        store: MessageStore,
        catalog: Catalog,
        index: TimerIndex,
        held_segments: HeldSegments,
        recorder: Recorder,
        tally: Tally,
        room: DiskRoom,
        *,
        ready: Callable[[TopicId], None],
        is_retirement_near: Callable[[int, int], bool],
    ) -> None:
        log = store.log
        self._store = store
        self._catalog = catalog
        self._recorder = recorder
        self._room = room
        self.index = index
        self.held_segments = held_segments
        self.near = NearWheel()
        self.bodies = TimerBodies(log, held_segments.originals)
        self.admission = Admission(index, config, volume_bytes=disk.total_bytes())
        self.loader = SlotLoader(
            index,
            self.near,
            self.bodies,
            horizon_ms=config.load_horizon_ms,
            chunk=config.load_chunk_records,
        )
        self.deliverer = Deliverer(
            index,
            self.near,
            self.bodies,
            catalog,
            recorder,
            tally,
            room,
            ready=ready,
            quarantined=held_segments.quarantined,
            rate_max=config.max_rate,
            expire_after_ms=config.expire_backlog_after_ms,
        )
        self.evacuation = Evacuation(
            index,
            log,
            store,
            catalog,
            recorder,
            self.bodies,
            tally,
            room,
            quarantined=held_segments.quarantined,
            rate_bytes=config.evacuation_rate_bytes,
            is_due=lambda now_ms: is_retirement_near(now_ms, config.evacuation_lead_ms),
        )
        self.flusher = Flusher(disk, index, log, config)
        self.opening = TimerRecovery(index, self.loader, self.flusher, log, catalog)
        self.janitor = Janitor(
            index,
            self.flusher,
            config,
            audit=TimerAudit(index, log, tally, quarantined=lambda: self.quarantined),
        )
        self.census = Census(index, tally)
        self._tally = tally
        self.delays: Histogram[TopicId] = Histogram(DELAY_BUCKETS_S)  # asked for
        self.recalled: Counter[tuple[int, str]] = Counter()  # by topic id and result
        self.rescheduled: Counter[tuple[int, str]] = Counter()
        # What is due sooner is linked before slots are loaded: up to the end of a second, they are.
        self._gathered_ahead_ms = config.load_horizon_ms + 1000
        self._advanced_s = 0
        self._is_loaders_turn = False

    # ------------------------------------------------------------ commands

    def schedule(
        self,
        topic: Topic,
        queue_id: QueueId,
        blob: bytes,
        crc: int,
        *,
        due_at_ms: int,
        now_ms: int,
        firing_ms: int,
    ) -> ScheduleResult:
        """Keep a message until it is due; that is later than `firing_ms`. Raises Overloaded."""
        if not self.index.pending_count:
            self.opening.begin(firing_ms)
        due_at_ms = self.admission.admit(due_at_ms, topic, len(blob), crc, firing_ms)
        data: bytes | memoryview = blob
        if _DUE.unpack_from(blob, stored_message.DUE_AT)[0] != due_at_ms:
            data, crc = with_due_time(blob, crc, due_at_ms)
        hidden_id = self._catalog.topic_ids.get(TIMER_TOPIC)
        if hidden_id is None:
            hidden_id = ensure_system_topic(
                self._catalog, self._recorder, TIMER_TOPIC, now_ms, queues=2
            ).id
        timer_id = self._catalog.queues[hidden_id, SCHEDULE_QUEUE].max_offset
        target = _tuple(TimerTarget, (timer_id, due_at_ms, topic.id, queue_id, topic.name))
        entry = hidden_id, SCHEDULE_QUEUE, 0, timer_id, FLAG_SCHEDULE, target, data, crc
        self._recorder.append(_tuple(MessageEntry, entry), now_ms)
        self.delays.observe(topic.id, (due_at_ms - firing_ms) // 1000)
        # Its first delivery shall be seen as one more.
        self.deliverer.lateness.declare(topic.id)
        return ScheduleResult(timer_id, due_at_ms)

    def due_of(self, blob: bytes, delay_ms: int | None, now_ms: int) -> int:
        """Return when a message wants to be delivered. Raises IllegalDeliveryTime."""
        born_at_ms, due_at_ms = _BORN_AND_DUE.unpack_from(blob, stored_message.BORN_AT)
        self.admission.note_skew(born_at_ms, now_ms=now_ms)
        try:
            if delay_ms is not None:
                return self.admission.due_after(delay_ms, now_ms=now_ms)
            self.admission.check_due(due_at_ms, now_ms=now_ms)
        except IllegalDeliveryTime:
            self.admission.refused["horizon"] += 1
            raise
        return int(due_at_ms)

    def cancel(self, timer_id: TimerId, *, topic_id: TopicId | None = None, now_ms: int) -> None:
        """Cancel a pending timer; OK again when it was cancelled. Raises MessageNotFound."""
        entry = self._entry(timer_id, topic_id, self.recalled)
        if entry.state == TimerState.CANCELLED:
            self.recalled[entry.topic_id, "duplicate"] += 1
            return
        if entry.state != TimerState.PENDING:
            self.recalled[entry.topic_id, "already_fired"] += 1
            raise MessageNotFound(f"the message has been {_name(entry)} already")
        self._recorder.append(
            TimerControl(TimerOperation.CANCEL, timer_id, entry.due_at_ms, 0), now_ms
        )
        self.deliverer.quarantined.pop(timer_id, None)
        self.recalled[entry.topic_id, "recalled"] += 1

    def check_cancel(self, timer_id: TimerId) -> None:
        """Raise what cancelling a timer would raise."""
        status = self.status(timer_id)
        if status.state not in {TimerState.PENDING, TimerState.CANCELLED}:
            raise MessageNotFound(f"the message has been {status.state.name.lower()} already")

    def reschedule(
        self,
        timer_id: TimerId,
        *,
        due_at_ms: int,
        expected_due_at_ms: int | None = None,
        now_ms: int,
        firing_ms: int,
    ) -> None:
        """Let a pending timer be due at another time; a time in the past means now.

        Also one whose topic is deleted: its message goes to the dead letters then.

        Raises MessageNotFound, IllegalDeliveryTime, and Conflict when it is not due at
        `expected_due_at_ms` any more.
        """
        self.admission.check_due(due_at_ms, now_ms=firing_ms)
        entry = self._entry(timer_id, None, self.rescheduled)
        if entry.state != TimerState.PENDING:
            self.rescheduled[entry.topic_id, "already_fired"] += 1
            raise MessageNotFound(f"the message has been {_name(entry)} already")
        if expected_due_at_ms not in (None, entry.due_at_ms):
            self.rescheduled[entry.topic_id, "conflict"] += 1
            raise Conflict(f"the timer is due at {entry.due_at_ms} by now; look again")
        due_at_ms = max(due_at_ms, firing_ms)
        if due_at_ms != entry.due_at_ms:
            self._recorder.append(
                TimerControl(TimerOperation.RESCHEDULE, timer_id, entry.due_at_ms, due_at_ms),
                now_ms,
            )
        self.rescheduled[entry.topic_id, "rescheduled"] += 1

    def fire(self, timer_id: TimerId, *, now_ms: int, firing_ms: int) -> None:
        """Let a pending timer be due now. Raises MessageNotFound."""
        self.reschedule(timer_id, due_at_ms=firing_ms, now_ms=now_ms, firing_ms=firing_ms)

    def _entry(
        self, timer_id: TimerId, topic_id: TopicId | None, results: Counter[tuple[int, str]]
    ) -> TimerEntry:
        self.index.link_gathered()
        if not 0 <= timer_id < self.index.next_id:
            results[0, "not_found"] += 1
            raise MessageNotFound(f"there is no timer {timer_id}")
        try:
            entry = self.index.get(timer_id)
        except TimerEntryDamaged:
            raise Conflict(
                f"the entry of timer {timer_id} is damaged; the next start of the broker makes it "
                f"again from the log"
            ) from None
        if entry.state in (TimerState.UNUSED, TimerState.FORGOTTEN):
            results[0, "not_found"] += 1
            raise MessageNotFound("the message was delivered or cancelled long ago")
        if topic_id not in (None, entry.topic_id):
            results[0, "not_found"] += 1
            raise MessageNotFound(f"there is no timer {timer_id} of this topic")
        return entry

    # ------------------------------------------------------------ inspection

    def status(self, timer_id: TimerId) -> TimerStatus:
        """Return what is known of a timer. Raises MessageNotFound."""
        entry = self._entry(timer_id, None, Counter())
        topic = self._catalog.topics.get(entry.topic_id)
        queue_id, scheduled_at_ms, head = 0, 0, b""
        try:
            body = self.bodies.read(timer_id, entry)
            fields = stored_message.decode(body.blob)
        except (BodyDamaged, ValueError):
            pass  # What is stored is not what was sent: there is nothing to show of it.
        else:
            queue_id, scheduled_at_ms = body.queue_id, body.stored_at_ms
            head = bytes(body.blob[: fields.user_at])
        return TimerStatus(
            timer_id=timer_id,
            state=TimerState(entry.state),
            is_quarantined=timer_id in self.quarantined,
            topic_id=entry.topic_id,
            topic=topic.name if topic is not None else "",
            queue_id=QueueId(queue_id),
            due_at_ms=entry.due_at_ms,
            scheduled_at_ms=scheduled_at_ms,
            size=entry.size,
            head=head,
        )

    def search(self, query: TimerQuery) -> TimerSearch:
        """Begin a search of pending timers."""
        self.index.link_gathered()
        return TimerSearch(self.index, self._store, query, self.status)

    def pending(self, query: PendingQuery) -> PendingWalk:
        """Begin a page of pending timers in the order of their ids."""
        self.index.link_gathered()
        return PendingWalk(self.index, self.bodies, self._tally, query)

    def count_due(self, within_ms: Sequence[int], *, firing_ms: int) -> DueCount:
        """Begin to count by topic how many timers are due within each of some durations."""
        self.index.link_gathered()
        return DueCount(
            self.index, self._tally, list(self.quarantined), within_ms, firing_ms=firing_ms
        )

    @property
    def quarantined(self) -> dict[int, int]:
        """Pending timers whose record is damaged, with their topic ids; 0 when even that is."""
        return self.held_segments.quarantined

    @property
    def files_bytes(self) -> int:
        """Bytes of timer log, wheel and table together."""
        index = self.index
        return index.timer_log.size_bytes + index.wheel.size_bytes + index.table.size_bytes

    # ------------------------------------------------------------ time

    def due_slices(self, now_ms: int, *, firing_ms: int) -> Generator[None, None, bool]:
        """Do one slice of each stage, and yield between them.

        Returns whether there is more to do at once.
        """
        index = self.index
        if not index.next_id:
            return False
        gathered_due_ms = index.gathered_due_ms
        if gathered_due_ms is not None and gathered_due_ms < firing_ms + self._gathered_ahead_ms:
            index.link_gathered()
            yield
        is_rebuilding = self.opening.is_rebuilding
        self.deliverer.take_due(firing_ms)
        yield
        has_more = self.deliverer.step(now_ms, firing_ms=firing_ms)
        yield
        # Delivering and loading take turns, so that one call stays short.
        self._is_loaders_turn = not (has_more and self._is_loaders_turn)
        if self._is_loaders_turn and not is_rebuilding:
            has_more |= self.loader.step(firing_ms)
            yield
            has_more |= self.bodies.read_ahead()
            yield
        has_more |= self.evacuation.step(now_ms)
        yield
        is_whole = not (is_rebuilding or index.is_damaged)
        # A clock that jumped by more than a revolution: the ring must move on to load the rest.
        is_behind = not has_more and self.loader.is_behind(firing_ms)
        if is_whole and (firing_ms // 1000 > self._advanced_s or is_behind):
            self._advanced_s = firing_ms // 1000
            hand_s = index.hand_s
            self.loader.advance_hand(firing_ms)
            self._write_frontier(now_ms)
            has_more |= is_behind and index.hand_s > hand_s
        return has_more

    def _write_frontier(self, now_ms: int) -> None:
        """Say in the log how far the hand is: when that is news, or has not been said for long."""
        index = self.index
        frontier_ms = index.hand_s * 1000
        is_news = frontier_ms > index.frontier_ms and index.hand_s > self.opening.rebuilt_hand_s
        if not is_news or self._room.is_full:
            return
        was_active = index.event_count != index.frontier_events
        idle_ms = now_ms - index.frontier_at_ms
        is_due = was_active and idle_ms >= FRONTIER_PERIOD_MS
        if is_due or (index.pending_count and idle_ms >= FRONTIER_IDLE_MS):
            self._recorder.append(Frontier(frontier_ms), now_ms)

    def next_due_ms(self, now_ms: int, *, firing_ms: int) -> int | None:
        """Return when, by wall time, `run_due` has something to do next; None: never."""
        index = self.index
        if not index.next_id:
            return None
        if self.deliverer.has_work:
            return self.deliverer.next_step_ms(now_ms)
        times = [self.near.next_due_ms()]
        if index.gathered_due_ms is not None:
            times.append(index.gathered_due_ms - self._gathered_ahead_ms)
        if index.pending_count:
            times.append(self.loader.next_step_ms())
        lag_ms = now_ms - firing_ms
        wanted = [at_ms + lag_ms for at_ms in times if at_ms is not None]
        evacuation_ms = self.evacuation.next_step_ms()
        if evacuation_ms is not None:
            wanted.append(evacuation_ms)
        return min(wanted, default=None)

    def next_background_ms(self) -> int | None:
        """Return when files are to be written next, None while nothing is to be."""
        return self.flusher.next_ms() if self.index.next_id else None

    # ------------------------------------------------------------ background

    def wants_background(self, now_ms: int) -> bool:
        """Whether files are to be written, or to be made again, now."""
        return (
            self.index.is_damaged
            or self.flusher.is_log_due(now_ms)
            or (bool(self.index.next_id) and self.flusher.is_due(now_ms))
        )

    def find_background(
        self, now_ms: int, *, firing_ms: int, quiet: Callable[[], Iterator[list[File]]]
    ) -> Iterator[list[File]] | None:
        """Return the steps of the most urgent background work, None when there is none."""
        if not self.index.next_id:
            return None
        if self.index.is_following:
            # All else moves the hand, or makes records: the engine that delivers does it.
            is_due = not self.index.is_damaged and self.flusher.is_due(now_ms)
            return self.flusher.flush(now_ms, self.opening.store_uuid, quiet) if is_due else None
        if self.index.is_damaged:
            return self.opening.rebuild(now_ms, firing_ms=firing_ms)
        if self.flusher.is_due(now_ms):
            return self.flusher.flush(now_ms, self.opening.store_uuid, quiet)
        if self.flusher.is_log_due(now_ms):
            return self.flusher.flush_log(now_ms)
        if self.census.is_due(now_ms):
            return self.census.take(now_ms)
        return self.held_segments.find_work(now_ms, quiet) or self.janitor.find_work(now_ms)

    def finish(self, now_ms: int) -> Iterator[list[File]]:
        """Write all files for the last time: the next start has nothing to fold in again."""
        index = self.index
        # A flush that the stop has interrupted holds pages of its own: then what it wrote counts.
        is_busy = self.opening.is_rebuilding or index.is_damaged or self.flusher.is_active
        index.link_gathered()
        if index.next_id and not is_busy:
            yield from self.flusher.flush(
                now_ms, self.opening.store_uuid, lambda: iter(()), flags=FLAG_CLEAN
            )

    def may_drop(self, segment: Segment) -> bool:
        """Return whether no timer needs the oldest segment, in memory or after a restart."""
        if not self.index.next_id:
            return True
        self.index.link_gathered()
        return not self.index.counts.pins[segment.start] and segment.end <= self.flusher.replay_from

    def close(self) -> None:
        """Close the files; nothing is written."""
        self.index.table.close()
        self.index.wheel.close()
        self.index.timer_log.close()


def _name(entry: TimerEntry) -> str:
    return TimerState(entry.state).name.lower()
