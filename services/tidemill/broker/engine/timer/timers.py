"""Delayed messages: all commands, the five stages, and opening their files.

    admission   whether a message is taken            index    I: transitions into table and wheel
    load        L: slots into the near wheel          body     B: messages asked for early, checked
    deliver     D: what is due into its topic         flush    files, never ahead of the log
    evacuation  copies out of old segments            janitor  files nobody needs, and the audit

Owned by the engine's one owner; each command appends one record and folds it in at once, in the way
in which a replay folds it. Every answer leaves after the sync.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import final

import numpy as np

from tidemill.broker.engine.layout import message, timer_control, timer_record
from tidemill.broker.engine.layout.message import FLAG_SCHEDULE, FLAG_TIMER, Place, TimerReason
from tidemill.broker.engine.layout.record import Kind
from tidemill.broker.engine.layout.timer_checkpoint import FLAG_CLEAN, UUID_SIZE, TimerCheckpoint
from tidemill.broker.engine.layout.timer_control import Operation, TimerControl
from tidemill.broker.engine.layout.timer_entry import EntryDamaged, TimerEntry
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog, Topic
from tidemill.broker.engine.store.commit_log import CommitLog, Record, Segment
from tidemill.broker.engine.store.disk import Disk, File
from tidemill.broker.engine.timer.admission import Admission
from tidemill.broker.engine.timer.body import Bodies, BodyDamaged
from tidemill.broker.engine.timer.census import Census
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.timer.deliver import Deliverer
from tidemill.broker.engine.timer.evacuation import Evacuation
from tidemill.broker.engine.timer.flush import Flusher
from tidemill.broker.engine.timer.histogram import Histogram
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.janitor import TABLE_FILES_KEPT, Janitor
from tidemill.broker.engine.timer.load import Loader
from tidemill.broker.engine.timer.near_wheel import NearWheel
from tidemill.broker.engine.timer.patch import due_time, with_due_time
from tidemill.broker.engine.timer.search import TimerSearch
from tidemill.broker.engine.timer.status import (
    COPY_QUEUE,
    SCHEDULE_QUEUE,
    TIMER_TOPIC,
    Scheduled,
    TimerQuery,
    TimerState,
    TimerStatus,
)
from tidemill.broker.engine.timer.table import TimerTable
from tidemill.broker.engine.timer.timer_log import TimerLog, TimerLogDamaged
from tidemill.broker.engine.timer.wheel import Wheel, WheelDamaged
from tidemill.common.errors import Conflict, IllegalDeliveryTime, MessageNotFound
from tidemill.message import stored_message

# RocketMQ's buckets for the delay asked for, and three more: a week, a month, a year.
DELAY_BUCKETS_S = (60, 600, 3600, 43_200, 86_400, 259_200, 604_800, 2_592_000, 31_536_000)
FRONTIER_PERIOD_MS = 1_000  # at most one record in it
FRONTIER_IDLE_MS = 60_000  # at least one in it, while timers wait


@final
class Timers:
    """All timers of a broker group."""

    def __init__(
        self,
        disk: Disk,
        config: TimerConfig,
        log: CommitLog,
        store: MessageStore,
        catalog: Catalog,
        *,
        ready: Callable[[int], None],
        may_append: Callable[[], bool],
        is_retirement_near: Callable[[int, int], bool],
    ) -> None:
        self._log = log
        self._store = store
        self._catalog = catalog
        self._may_append = may_append
        table = TimerTable(
            disk, file_entries=config.table_file_entries, pages_max=config.table_pages_max
        )
        wheel = Wheel(disk, slot_count=config.wheel_slots)
        timer_log = TimerLog(disk, file_bytes=config.timer_log_file_bytes)
        self.index = TimerIndex(table, wheel, timer_log, log)
        self.near = NearWheel()
        self.bodies = Bodies(log)
        self.admission = Admission(self.index, config, volume_bytes=disk.total_bytes())
        self.loader = Loader(
            self.index, self.near, self.bodies,
            horizon_ms=config.load_horizon_ms, chunk=config.load_chunk_records,
        )  # fmt: skip
        self.deliverer = Deliverer(
            self.index, self.near, self.bodies, store, catalog,
            ready=ready, may_append=may_append,
            rate_max=config.max_rate, expire_after_ms=config.expire_backlog_after_ms,
        )  # fmt: skip
        self.evacuation = Evacuation(
            self.index, log, store, self.bodies,
            rate_bytes=config.evacuation_rate_bytes,
            is_due=lambda now_ms: is_retirement_near(now_ms, config.evacuation_lead_ms),
            hidden_topic_id=lambda: self._hidden_topic(self._now_ms).id,
        )  # fmt: skip
        self.flusher = Flusher(disk, self.index, log, config)
        self.janitor = Janitor(
            self.index, log, self.flusher, config,
            is_caught_up=lambda: not self.near.outstanding_count,
            quarantined=lambda: self.quarantined,
        )  # fmt: skip
        self.census = Census(self.index)
        self.delays = Histogram(DELAY_BUCKETS_S)  # asked for, by topic id
        self.scheduled: Counter[int] = Counter()  # by topic id
        self.recalled: Counter[tuple[int, str]] = Counter()  # by topic id and result
        self.rescheduled: Counter[tuple[int, str]] = Counter()
        self.frontier_ms = 0  # of the newest FRONTIER record
        self._frontier_at_ms = 0  # when that was written
        self._frontier_events = 0  # transitions by then
        self._now_ms = 0
        self._firing_lag_ms = 0  # by how much firing time is behind wall time
        self._advanced_s = 0
        self._rebuilt_hand_s = 0  # timers due before it may wait in the slot after it
        self._is_loaders_turn = False
        self._needs_relink = False
        self.made_again = ""  # which files the start has made again: "", "wheel", or "all"
        self._needs_complete = False  # the table, after a replay from the log's beginning
        self._has_overdue = False  # timers wait that the hand had passed: damaged, or late
        self._is_open = False
        self.is_rebuilding = False

    # ------------------------------------------------------------ commands

    def set_time(self, now_ms: int, firing_ms: int) -> None:
        """Say what time it is, and by which time messages are due: before a round's commands."""
        self._now_ms = now_ms
        self._firing_lag_ms = now_ms - firing_ms

    def firing_time(self, now_ms: int) -> int:
        """Return by which time messages are due when it is `now_ms`."""
        return now_ms - self._firing_lag_ms

    def schedule(
        self,
        topic: Topic,
        queue_id: int,
        blob: bytes,
        crc: int,
        now_ms: int,
        *,
        due_at_ms: int,
    ) -> Scheduled:
        """Keep a message until it is due; that is later than now. Raises Overloaded."""
        firing_ms = self.firing_time(now_ms)
        if not self.index.pending_count:
            self._begin(firing_ms)
        due_at_ms = self.admission.admit(due_at_ms, topic, len(blob), crc, firing_ms)
        data, crc = with_due_time(blob, crc, due_at_ms)
        hidden_id = self._hidden_topic(now_ms).id
        timer_id = self._catalog.queues[hidden_id, SCHEDULE_QUEUE].max_offset
        origin = topic.name.encode()
        target = message.TARGET.pack(timer_id, due_at_ms, topic.id, queue_id, len(origin)) + origin
        self._store.append_message(
            hidden_id, SCHEDULE_QUEUE, data, crc, now_ms,
            flags=FLAG_SCHEDULE, cause=target,
        )  # fmt: skip
        log_offset = self._store.last_log_offset
        size = self._log.log_end - log_offset
        self.index.schedule(timer_id, due_at_ms, topic.id, log_offset, size, now_ms)
        self.scheduled[topic.id] += 1
        self.delays.observe(topic.id, (due_at_ms - firing_ms) // 1000)
        return Scheduled(timer_id, due_at_ms)

    def due_of(self, blob: bytes, delay_ms: int | None, now_ms: int) -> int:
        """Return when a message wants to be delivered. Raises IllegalDeliveryTime."""
        self.admission.note_skew(stored_message.born_at_ms_of(blob), now_ms)
        try:
            if delay_ms is not None:
                return self.admission.due_after(delay_ms, now_ms)
            due_at_ms = due_time(blob)
            self.admission.check_due(due_at_ms, now_ms)
        except IllegalDeliveryTime:
            self.admission.refused["horizon"] += 1
            raise
        return due_at_ms

    def cancel(self, timer_id: int, *, topic_id: int = 0, now_ms: int) -> None:
        """Cancel a pending timer; OK again when it was cancelled. Raises MessageNotFound."""
        entry = self._entry(timer_id, topic_id, self.recalled)
        if entry.state == TimerState.CANCELLED:
            self.recalled[entry.topic_id, "duplicate"] += 1
            return
        if entry.state != TimerState.PENDING:
            self.recalled[entry.topic_id, "already_fired"] += 1
            raise MessageNotFound(f"the message has been {_name(entry)} already")
        self._append(Operation.CANCEL, timer_id, entry.due_at_ms, 0, now_ms)
        self.index.cancel(timer_id, now_ms)
        self.deliverer.quarantined.pop(timer_id, None)
        self.evacuation.quarantined.pop(timer_id, None)
        self.recalled[entry.topic_id, "recalled"] += 1

    def reschedule(
        self,
        timer_id: int,
        *,
        due_at_ms: int,
        expected_due_at_ms: int | None = None,
        now_ms: int,
    ) -> None:
        """Let a pending timer be due at another time; a time in the past means now.

        Also one whose topic is deleted: its message goes to the dead letters then.

        Raises MessageNotFound, IllegalDeliveryTime, and Conflict when it is not due at
        `expected_due_at_ms` any more.
        """
        firing_ms = self.firing_time(now_ms)
        self.admission.check_due(due_at_ms, firing_ms)
        entry = self._entry(timer_id, 0, self.rescheduled)
        if entry.state != TimerState.PENDING:
            self.rescheduled[entry.topic_id, "already_fired"] += 1
            raise MessageNotFound(f"the message has been {_name(entry)} already")
        if expected_due_at_ms not in (None, entry.due_at_ms):
            self.rescheduled[entry.topic_id, "conflict"] += 1
            raise Conflict(f"the timer is due at {entry.due_at_ms} by now; look again")
        due_at_ms = max(due_at_ms, firing_ms)
        if due_at_ms != entry.due_at_ms:
            self._append(Operation.RESCHEDULE, timer_id, entry.due_at_ms, due_at_ms, now_ms)
            self.index.reschedule(timer_id, entry.due_at_ms, due_at_ms, now_ms)
        self.rescheduled[entry.topic_id, "rescheduled"] += 1

    def fire(self, timer_id: int, *, now_ms: int) -> None:
        """Let a pending timer be due now. Raises MessageNotFound."""
        self.reschedule(timer_id, due_at_ms=self.firing_time(now_ms), now_ms=now_ms)

    def _append(
        self, operation: Operation, timer_id: int, due_at_ms: int, new_due_ms: int, now_ms: int
    ) -> None:
        self._now_ms = now_ms
        control = TimerControl(operation, timer_id, due_at_ms, new_due_ms)
        self._log.append(Kind.TIMER, timer_control.encode(control), now_ms)

    def _entry(self, timer_id: int, topic_id: int, results: Counter[tuple[int, str]]) -> TimerEntry:
        if not 0 <= timer_id < self.index.next_id:
            results[0, "not_found"] += 1
            raise MessageNotFound(f"there is no timer {timer_id}")
        try:
            entry = self.index.get(timer_id)
        except EntryDamaged:
            raise Conflict(
                f"the entry of timer {timer_id} is damaged; the next start of the broker makes it "
                f"again from the log"
            ) from None
        if entry.state in (TimerState.UNUSED, TimerState.FORGOTTEN):
            results[0, "not_found"] += 1
            raise MessageNotFound("the message was delivered or cancelled long ago")
        if topic_id not in (0, entry.topic_id):
            results[0, "not_found"] += 1
            raise MessageNotFound(f"there is no timer {timer_id} of this topic")
        return entry

    # ------------------------------------------------------------ inspection

    def status(self, timer_id: int) -> TimerStatus:
        """Return what is known of a timer. Raises MessageNotFound."""
        entry = self._entry(timer_id, 0, Counter())
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
            queue_id=queue_id,
            due_at_ms=entry.due_at_ms,
            scheduled_at_ms=scheduled_at_ms,
            size=entry.size,
            head=head,
        )

    def search(self, query: TimerQuery) -> TimerSearch:
        """Begin a search of pending timers."""
        return TimerSearch(self.index, self._store, query, self.status)

    @property
    def quarantined(self) -> dict[int, int]:
        """Pending timers whose record is damaged, with their topic ids; 0 when even that is."""
        return self.evacuation.quarantined | self.deliverer.quarantined

    @property
    def files_bytes(self) -> int:
        """Bytes of timer log, wheel and table together."""
        index = self.index
        return index.timer_log.size_bytes + index.wheel.size_bytes + index.table.size_bytes

    @property
    def store_uuid(self) -> bytes:
        """Which store the files belong to, b"" before that is known."""
        secret = self._catalog.handle_secret
        return blake2b(secret, digest_size=UUID_SIZE, person=b"store").digest() if secret else b""

    # ------------------------------------------------------------ time

    def run_due(self, now_ms: int, firing_ms: int) -> bool:
        """Do one slice of each stage; True when there is more to do at once."""
        self.set_time(now_ms, firing_ms)
        if not self.index.next_id:
            return False
        self.deliverer.take_due(firing_ms)
        has_more = self.deliverer.step(now_ms, firing_ms)
        # Delivering and loading take turns, so that one call stays short.
        self._is_loaders_turn = not (has_more and self._is_loaders_turn)
        if self._is_loaders_turn and not self.is_rebuilding:
            has_more |= self.loader.step(firing_ms)
            has_more |= self.bodies.read_ahead()
        has_more |= self.evacuation.step(now_ms)
        is_whole = not (self.is_rebuilding or self.index.is_damaged)
        # A clock that jumped by more than a revolution: the ring must move on to load the rest.
        is_behind = not has_more and self.loader.is_behind(firing_ms)
        if is_whole and (firing_ms // 1000 > self._advanced_s or is_behind):
            self._advanced_s = firing_ms // 1000
            hand_s = self.index.hand_s
            self.loader.advance_hand(firing_ms)
            self._write_frontier(now_ms)
            has_more |= is_behind and self.index.hand_s > hand_s
        return has_more

    def _write_frontier(self, now_ms: int) -> None:
        """Say in the log how far the hand is: when that is news, or has not been said for long."""
        frontier_ms = self.index.hand_s * 1000
        is_news = frontier_ms > self.frontier_ms and self.index.hand_s > self._rebuilt_hand_s
        if not is_news or not self._may_append():
            return
        was_active = self.index.event_count != self._frontier_events
        idle_ms = now_ms - self._frontier_at_ms
        is_due = was_active and idle_ms >= FRONTIER_PERIOD_MS
        if is_due or (self.index.pending_count and idle_ms >= FRONTIER_IDLE_MS):
            self._log.append(Kind.FRONTIER, timer_control.encode_frontier(frontier_ms), now_ms)
            self.frontier_ms, self._frontier_at_ms = frontier_ms, now_ms
            self._frontier_events = self.index.event_count

    def next_due_ms(self) -> int | None:
        """Return when `run_due` has something to do next, None: never."""
        index = self.index
        if not index.next_id:
            return None
        deliverer, lag_ms = self.deliverer, self._firing_lag_ms
        if deliverer.has_work:
            return deliverer.next_step_ms(self._now_ms)
        times = [self.near.next_due_ms()]
        if index.pending_count:
            times.append(self.loader.next_step_ms())
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
        self, now_ms: int, quiet: Callable[[], Iterator[list[File]]]
    ) -> Iterator[list[File]] | None:
        """Return the steps of the most urgent background work, None when there is none."""
        if not self.index.next_id:
            return None
        if self.index.is_damaged:
            return self.rebuild(now_ms, hand_s=self.index.hand_s)
        if self.flusher.is_due(now_ms):
            return self.flusher.flush(now_ms, self.store_uuid, quiet)
        if self.flusher.is_log_due(now_ms):
            return self.flusher.flush_log(now_ms)
        if self.census.is_due(now_ms):
            return self.census.take(now_ms)
        return self.janitor.find_work(now_ms)

    def finish(self, now_ms: int) -> Iterator[list[File]]:
        """Write all files for the last time: the next start has nothing to fold in again."""
        index = self.index
        # A flush that the stop has interrupted holds pages of its own: then what it wrote counts.
        if index.next_id and not (self.is_rebuilding or index.is_damaged or self.flusher.is_active):
            yield from self.flusher.flush(
                now_ms, self.store_uuid, lambda: iter(()), flags=FLAG_CLEAN
            )

    def may_drop(self, segment: Segment) -> bool:
        """Return whether no timer needs the oldest segment, in memory or after a restart."""
        if not self.index.next_id:
            return True
        return not self.index.counts.pins[segment.start] and segment.end <= self.flusher.replay_from

    # ------------------------------------------------------------ opening

    def open(self) -> int:
        """Load the files; return the log offset from which the log must be folded in."""
        self._is_open = True
        checkpoint = self.flusher.find_checkpoint()
        is_usable = (
            checkpoint is not None
            and checkpoint.store_uuid == self.store_uuid
            and checkpoint.replay_from >= self._log.min_offset
        )
        if checkpoint is None or not is_usable or not self._load_table(checkpoint):
            self._reset()
            return self._log.min_offset
        index = self.index
        index.next_id = max(index.next_id, checkpoint.queue_offset)
        index.hand_s = checkpoint.hand_ms // 1000
        # No FRONTIER record before the checkpoint went further.
        self.frontier_ms = checkpoint.hand_ms
        self.flusher.use(checkpoint)
        try:
            self._load_wheel(checkpoint.timer_log_position, checkpoint.slots_used)
        except (TimerLogDamaged, WheelDamaged):
            self._needs_relink = True
        return checkpoint.replay_from

    def _load_table(self, checkpoint: TimerCheckpoint) -> bool:
        """Count what the table has; False when a file or an entry is missing or damaged."""
        table = self.index.table
        known_ids = checkpoint.queue_offset
        is_whole = table.load(
            known_ids=known_ids,
            files_kept=TABLE_FILES_KEPT,
            live_files=checkpoint.live_files or (),
        )
        if not is_whole:
            return False
        for first_id, rows in table.file_batches():
            if table.has_gaps(rows, known_ids - first_id) or not table.is_intact(rows):
                return False
            self.index.count_rows(first_id, rows)
            due = rows["due"][rows["state"] == TimerState.PENDING]
            self._has_overdue |= bool((due <= checkpoint.hand_ms).any())
        return True

    def _load_wheel(self, position: int, slots_used: int) -> None:
        index = self.index
        newer = [(record.slot_s, record.magic) for record in index.timer_log.load(position)]
        index.wheel.load(
            position_min=index.timer_log.begin,
            position_max=index.timer_log.end,
            hand_s=index.hand_s,
            used_count=slots_used,
        )
        for number, (slot_s, magic) in enumerate(newer):
            if slot_s > index.hand_s:
                is_gone = magic & (timer_record.CANCEL | timer_record.RESCHEDULED_OUT)
                at = position + number * timer_record.SIZE
                index.wheel.revise(slot_s, at, change=-1 if is_gone else 1)

    def _reset(self) -> None:
        """Begin with no files: everything is folded in again from the log's first record."""
        for files in self.flusher.drop_checkpoints():
            for file in files:
                file.sync()
        self.index.clear()
        self._needs_complete = True
        self.flusher.replay_from = self._log.min_offset
        self._needs_relink = True

    def _discard_leftovers(self) -> None:
        """Without `open` the replay says all there is: files, if any, know less than it."""
        if not self._is_open:
            self._is_open = True
            if self.flusher.has_files:
                self._reset()

    def replay(self, found: Record) -> None:
        """Fold in a record of the log, from the offset on that `open` returned."""
        self._discard_leftovers()
        index, header = self.index, found.header
        now_ms = header.stored_at_ms
        index.is_linking = not self._needs_relink
        match header.kind:
            case Kind.MESSAGE if header.flags & FLAG_SCHEDULE:
                target = message.decode_target(found.body)
                place = Place._make(message.PLACE.unpack_from(found.body))
                is_copy = place.queue_id == COPY_QUEUE
                index.replay_schedule(
                    target.timer_id, target.due_at_ms, target.topic_id, found.log_offset,
                    header.size, now_ms,
                    kind=timer_record.EVACUATED if is_copy else timer_record.SCHEDULE,
                )  # fmt: skip
            case Kind.MESSAGE if header.flags & FLAG_TIMER:
                cause = message.decode_timer_cause(found.body)
                is_delivered = cause.reason == TimerReason.DELIVERED
                state = TimerState.DELIVERED if is_delivered else TimerState.DROPPED
                index.settle(cause.timer_id, state)
            case Kind.TIMER:
                control = timer_control.decode(found.body)
                if control.operation == Operation.CANCEL:
                    index.cancel(control.timer_id, now_ms)
                else:
                    index.reschedule(
                        control.timer_id, control.due_at_ms, control.new_due_at_ms, now_ms
                    )
            case Kind.FRONTIER:
                self.frontier_ms = max(self.frontier_ms, timer_control.decode_frontier(found.body))
                self._frontier_at_ms = now_ms

    def end_replay(self, now_ms: int) -> None:
        """Link what must be linked again, and start behind the hand."""
        self._discard_leftovers()
        index = self.index
        index.is_linking = True
        if self._needs_complete:
            index.table.complete(known_ids=index.next_id, files_kept=TABLE_FILES_KEPT)
        outage_s = now_ms // 1000 - index.hand_s
        if index.next_id and self._needs_complete:
            self.made_again = "all"
        elif index.next_id and self._needs_relink:
            self.made_again = "wheel"
        if index.next_id and (self._needs_relink or outage_s > index.wheel.slot_count // 2):
            hand_s = self._first_hand_s(now_ms)
            for _ in self._rebuild(index.table.file_batches(), now_ms, hand_s):
                pass
        elif self._has_overdue:
            self._link_overdue(now_ms)
        self._needs_relink = False
        index.arrived = self.loader.arrived
        self.flusher.begin(now_ms)
        self._begin(now_ms)

    def _link_overdue(self, now_ms: int) -> None:
        """Link again what was due before the hand and still waits: quarantined, or late then."""
        index = self.index
        for first_id, rows in index.table.file_batches():
            is_late = (rows["state"] == TimerState.PENDING) & (rows["due"] <= index.hand_s * 1000)
            for at in np.flatnonzero(is_late).tolist():
                entry = index.find_pending(first_id + at)
                if entry is not None:
                    index.relink(first_id + at, entry, timer_record.SCHEDULE, now_ms)

    def _begin(self, firing_ms: int) -> None:
        """Start loading behind the hand; where nothing waits the hand is at the present."""
        if not self.index.pending_count:
            self.index.hand_s = max(self.index.hand_s, firing_ms // 1000 - 1)
        self.loader.begin(firing_ms)

    def rebuild(self, now_ms: int, *, hand_s: int) -> Iterator[list[File]]:
        """Make wheel and timer log again from the table, in slices of a page."""
        return self._rebuild(self.index.table.page_batches(), now_ms, hand_s)

    def _rebuild(
        self, batches: Iterable[tuple[int, np.ndarray]], now_ms: int, hand_s: int
    ) -> Iterator[list[File]]:
        index = self.index
        self.is_rebuilding = True
        index.wheel.clear()
        index.timer_log.clear()
        index.latest_s.clear()
        index.hand_s = self._rebuilt_hand_s = hand_s
        for first_id, rows in batches:
            index.link_rows(first_id, rows, now_ms)
            yield []
        index.event_count += 1
        self._begin(now_ms - self._firing_lag_ms)
        self.is_rebuilding = index.is_damaged = False

    def _first_hand_s(self, now_ms: int) -> int:
        """Return a hand before all that waits, and at most half a revolution behind the clock."""
        index = self.index
        now_s = now_ms // 1000
        first_s = now_s
        for _, rows in index.table.file_batches():
            waiting = rows["due"][rows["state"] == TimerState.PENDING]
            if len(waiting):
                first_s = min(first_s, int(waiting.min()) // 1000)
        return max(first_s - 1, now_s - index.wheel.slot_count // 2, index.hand_s)

    def close(self) -> None:
        """Close the files; nothing is written."""
        self.index.table.close()
        self.index.wheel.close()
        self.index.timer_log.close()

    def _hidden_topic(self, now_ms: int) -> Topic:
        return self._catalog.find_topic(TIMER_TOPIC) or self._store.ensure_system_topic(
            TIMER_TOPIC, None, now_ms, queues=2
        )


def _name(entry: TimerEntry) -> str:
    return TimerState(entry.state).name.lower()
