"""Retention: the state floor moves, and the broker drops the oldest segments.

State that only old segments state is restated (`restatement.py`). Then a FLOOR record says that the
log from the state floor on rebuilds everything, except for live messages before it (ADR 0069). The
oldest segment is dropped when it is before the state floor and no live message is in it.

Below feature level 2 there are no FLOOR records: the oldest segment is dropped at the end of its
retention time, after the same restatement.
"""

from __future__ import annotations

from contextlib import suppress
from typing import final

from tidemill.broker.engine.dedup.tables import KeyTables
from tidemill.broker.engine.fold import Fold
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.expiry import ExpiredRange
from tidemill.broker.engine.layout.floor import Floor
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, TopicId
from tidemill.broker.engine.pop.acks import RoundAcks
from tidemill.broker.engine.pop.progress_index import ProgressKey
from tidemill.broker.engine.pop.queue_queries import find_expired
from tidemill.broker.engine.queue_trims import QueueTrims
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.store.log_times import first_stored_at_ms
from tidemill.broker.engine.timer.delayed_messages import DelayedMessages
from tidemill.broker.engine.timer.held_segments import HeldSegments
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.transaction.checks import HalfChecks
from tidemill.broker.engine.transaction.table import TransactionTable
from tidemill.broker.engine.upkeep.archive_gate import ArchiveGate
from tidemill.broker.engine.upkeep.checkpoint import Checkpoints
from tidemill.broker.engine.upkeep.live_bytes import LiveBytes
from tidemill.broker.engine.upkeep.log_ages import LogAges
from tidemill.broker.engine.upkeep.parts import Steps, UpkeepParts
from tidemill.broker.engine.upkeep.restatement import Restatement
from tidemill.broker.engine.upkeep.retention_rules import RetentionRules
from tidemill.broker.engine.upkeep.segment_search import SegmentSearch
from tidemill.message.resource_names import HIDDEN_TOPICS

# Each of these takes about a millisecond per slice:
QUEUES_CUT_A_SLICE = 16  # queues bisected, in files that may not be cached
EXPIRED_SEEN_A_SLICE = 256  # queues of groups; each costs 1,
EXPIRED_BISECTED = 16  # or this much if the queue is bisected
FLOOR_SEGMENTS_MAX = 64  # that the state floor passes at once
FULL_DISK_EVENTS_MS = 3_600_000  # on a full disk, lifecycle events are kept at most this long


@final
class Retention:
    """The age of the oldest segment, and the steps that drop it.

    It is one class, because each step relies on the state that the one before has recorded again.
    """

    def __init__(
        self,
        parts: UpkeepParts,
        acks: RoundAcks,
        timer_index: TimerIndex,
        held_segments: HeldSegments,
        fold: Fold,
        trims: QueueTrims,
        checkpoints: Checkpoints,
        gate: ArchiveGate,
        ages: LogAges,
        live_bytes: LiveBytes,
        transactions: TransactionTable,
        half_checks: HalfChecks,
        keys: KeyTables,
    ) -> None:
        self._store = parts.store
        self._log = parts.store.log
        self._catalog = parts.catalog
        self._pops = parts.pops
        self._acks = acks
        self._timer_index = timer_index
        self._held_segments = held_segments
        self._fold = fold
        self._transactions = transactions
        self._half_checks = half_checks
        self._restatement = Restatement(parts, acks, fold, half_checks, keys)
        self._trims = trims
        self._checkpoints = checkpoints
        self._quiet = parts.quiet
        self.gate = gate
        self._ages = ages
        self.live_bytes = live_bytes
        self.retention_ms = parts.config.retention_ms
        self._recreate_block_ms = parts.config.recreate_block_ms
        self._retention_bytes = parts.config.retention_bytes
        self._event_retention_ms = parts.config.event_retention_ms
        self._room = parts.room
        self.may_go_before = 0  # at a replica: the begin of the master's log
        # By segment start: when this process filled the segment, in monotonic time.
        self._full_since_ms: dict[int, int] = {}
        # An earlier process has filled the segments before this offset.
        self._inherited_end = 0
        self.rules = RetentionRules(
            parts, trims, ages, live_bytes, gate, default_ms=parts.config.retention_ms
        )
        self._was_count = False  # the last look
        self._hidden_begin = 0  # the state floor for which the hidden queues were searched
        # Searches for a live message: in the oldest segment, and before the next state floor.
        self._oldest_search = SegmentSearch()
        self._floor_search = SegmentSearch()

    def is_near(self, now_ms: int, lead_ms: int) -> bool:
        """Whether the retention of the segment at the state floor ends within `lead_ms`."""
        log, number = self._log, self._log.floor_number
        if number + 1 >= len(log.segments) or log.committed_offset <= log.segments[number].end:
            return False
        if self.rules.is_active:
            is_too_large = self._is_too_large and self._is_unneeded(log.segments[number].end)
            return is_too_large or self._age_ms(number, now_ms) >= self._events_ms - lead_ms
        return self._is_too_large or self._age_ms(number, now_ms) >= self.retention_ms - lead_ms

    @property
    def _events_ms(self) -> int:
        """How long lifecycle events are kept, while live messages hold their segment."""
        return self._event_retention_ms or self.retention_ms

    def _age_ms(self, number: int, now_ms: int) -> int:
        """Return the age of a segment: that of its youngest record."""
        ages = self._ages
        if ages.monotonic_ms is not None and ages.is_sure:
            # A record stored by a fast clock must not hold back the segments after it.
            at_ms = now_ms if ages.has_one_clock else ages.monotonic_ms
            return at_ms - self._since_ms(number, at_ms)
        # The next segment began at that time, so all records of this one are at least as old.
        return now_ms - first_stored_at_ms(self._log, number + 1)

    @property
    def _is_too_large(self) -> bool:
        # The size limit does not apply to delayed messages.
        size = self._log.log_end - self._log.min_offset - self._timer_index.pinned_bytes
        return 0 < self._retention_bytes < size

    def find_look(self, now_ms: int, *, is_master: bool = True) -> Steps | None:
        """Return the steps of a look at all queues: the counts, or the rules of the master."""
        monotonic_ms = self._ages.monotonic_ms
        assert monotonic_ms is not None, "noted before"
        is_rules_due = is_master and self.rules.is_due()
        # If the log grows by a segment during each count, another one is always due.
        if self.live_bytes.is_due(monotonic_ms) and not (is_rules_due and self._was_count):
            self._was_count = True
            return self._count(monotonic_ms)
        self._was_count = False
        return self.rules.look(now_ms) if is_rules_due else None

    def _count(self, monotonic_ms: int) -> Steps:
        was_complete = self.live_bytes.is_complete
        yield from self.live_bytes.look(monotonic_ms)
        if not was_complete:
            self.rules.request_look()  # The rules by size have waited for the count.

    def request_look(self) -> None:
        """Let the next look at all queues begin at once."""
        self.live_bytes.request_look()
        self.rules.request_look()

    @property
    def _is_drop_due(self) -> bool:
        """Whether the oldest segment is before the state floor, without a live message."""
        oldest = self._log.segments[0]
        return oldest.end <= self._log.state_floor and self._is_unneeded(oldest.end)

    def _next_floor(self, now_ms: int, timers: DelayedMessages) -> int:
        """Return the log offset up to which the state floor may move now."""
        log, floor = self._log, self._log.state_floor
        first = log.floor_number
        last = min(first + FLOOR_SEGMENTS_MAX, len(log.segments) - 1)
        for number in range(first, last):
            end = log.segments[number].end
            if end > self._store.derived_offset or not self._may_pass(number, now_ms, timers):
                break
            floor = end
            if not self._is_old(number, now_ms):
                break  # The search for a live message takes a slice.
        return floor

    def _may_pass(self, number: int, now_ms: int, timers: DelayedMessages) -> bool:
        """Whether the state floor may pass a segment, checkpoints aside."""
        segment = self._log.segments[number]
        if not timers.may_drop(segment):
            return False
        # A clock that jumps forward must not make clients forget their answers.
        result = self._transactions.oldest_result(now_ms if self._ages.is_sure else 0)
        if result is not None and result < segment.end:
            return False
        if self._is_old(number, now_ms):
            return True
        may_go = self._room.is_full or not self._event_retention_ms
        return may_go and self._is_unneeded(segment.end)

    def _is_old(self, number: int, now_ms: int) -> bool:
        """Whether the events of a segment have been kept long enough."""
        least_ms = self._events_ms
        if self._room.is_full:
            least_ms = min(least_ms, FULL_DISK_EVENTS_MS)
        return self._ages.is_sure and self._age_ms(number, now_ms) >= least_ms

    def wants_checkpoint(self, now_ms: int, timers: DelayedMessages) -> bool:
        """Whether the segment at the state floor is over, and no checkpoint covers it yet.

        On a full disk the log does not grow, so no checkpoint becomes due otherwise.
        """
        log, number = self._log, self._log.floor_number
        if number + 1 >= len(log.segments):
            return False
        end = log.segments[number].end
        if not self._store.derived_offset < end <= log.committed_offset:
            return False
        if self.rules.is_active:
            return self._may_pass(number, now_ms, timers)
        return self._is_over(now_ms, timers)

    def _is_over(self, now_ms: int, timers: DelayedMessages) -> bool:
        oldest = self._log.segments[0]
        is_over = self._has_served(now_ms)
        if is_over:
            is_over = self.gate.lets_go(oldest.end)
        else:
            self.gate.reset()
        is_over = is_over or self._is_unneeded(oldest.end)
        return is_over and timers.may_drop(oldest)

    def _is_unneeded(self, end: int) -> bool:
        """Whether no queue has a live message before log offset `end`."""
        is_oldest = end == self._log.segments[0].end
        search = self._oldest_search if is_oldest else self._floor_search
        return search.is_over(
            self._catalog.queues, end, lambda queue: self._has_messages(queue, end)
        )

    def _has_messages(self, queue: ConsumeQueue, end: int) -> bool:
        if self._catalog.queues.get((queue.topic_id, queue.queue_id)) is not queue:
            return False
        topic = self._catalog.topics.get(queue.topic_id)
        if topic is not None and topic.name in HIDDEN_TOPICS:
            return False  # `_may_pass` decides for timers and transactions.
        if queue.min_offset == queue.max_offset:
            return False
        try:
            return queue.entry(queue.min_offset)[0] < end
        except BlockFileDamaged:
            return True  # Unknown until the rebuild.

    def note(self, wall_ms: int, monotonic_ms: int | None) -> None:
        """Note the time of both clocks; None: wall time is monotonic."""
        if self._ages.monotonic_ms is None and self._log.segments:
            self._inherited_end = max(self._inherited_end, self._log.segments[-1].start)
        self._ages.note(wall_ms, monotonic_ms, self._log.committed_offset)
        assert self._ages.monotonic_ms is not None, "just noted"
        monotonic_ms, segments = self._ages.monotonic_ms, self._log.segments
        known = self._full_since_ms
        for number in range(len(segments) - 2, -1, -1):
            start = segments[number].start
            if start < self._inherited_end or start in known:
                break
            known[start] = monotonic_ms

    def note_copy(self, end: int) -> None:
        """Note that a replica copies records before log offset `end` that are older than now."""
        self._inherited_end = end
        self._ages.note_copy(end)

    def _has_served(self, now_ms: int) -> bool:
        """Whether the retention of the oldest segment is over, by size or by time.

        Wall time may be days ahead for a second, so it does not decide alone.
        """
        return self.is_near(now_ms, 0) and (self._is_too_large or self._ages.is_sure)

    def _since_ms(self, number: int, monotonic_ms: int) -> int:
        """Return when a segment became full, in monotonic time."""
        start = self._log.segments[number].start
        if start >= self._inherited_end:
            return self._full_since_ms.get(start, monotonic_ms)  # Full since the last `note`.
        # The next segment began at that time, so all records of this one are at least as old.
        inherited_ms = self._ages.inherited_ms(first_stored_at_ms(self._log, number + 1))
        return monotonic_ms if inherited_ms is None else inherited_ms

    def is_due_at_replica(self, timers: DelayedMessages) -> bool:
        """Whether the master has dropped the oldest segment here, and no derived file needs it."""
        segments = self._log.segments
        if len(segments) < 2 or segments[0].end > self.may_go_before:
            return False
        return segments[0].end <= self._store.derived_offset and timers.may_drop(segments[0])

    def wants_checkpoint_at_replica(self) -> bool:
        """Whether a replica could drop its oldest segment after a checkpoint."""
        segments, derived = self._log.segments, self._store.derived_offset
        if len(segments) < 2 or segments[0].end > self.may_go_before:
            return False
        return derived < segments[0].end <= self._log.committed_offset

    def find_work(self, now_ms: int, timers: DelayedMessages) -> Steps | None:
        """Return the steps that drop the oldest segment or move the state floor, or None."""
        segments = self._log.segments
        if len(segments) < 2 or segments[0].end > self._store.derived_offset:
            return None
        if not self.rules.is_active:
            return self.retire_oldest(now_ms) if self._is_over(now_ms, timers) else None
        # Each search is asked once: the call after its end begins another one.
        if self._is_drop_due:
            return self._drop_oldest(now_ms, with_messages=False)
        floor = self._next_floor(now_ms, timers)
        return self.move_floor(floor, now_ms) if floor > self._log.state_floor else None

    def retire_oldest(self, now_ms: int) -> Steps:
        """Restate what only the oldest segment states, then drop it with its live messages."""
        end = self._log.segments[0].end
        yield from self._restatement.restate(end, now_ms)
        yield from self._expire(end, now_ms)
        yield from self._drop_oldest(now_ms, with_messages=True)

    def _drop_oldest(self, now_ms: int, *, with_messages: bool) -> Steps:
        """Drop the oldest segment. Its state is restated already."""
        end = self._log.segments[0].end
        yield from self.give_up_oldest(now_ms, with_messages=with_messages)
        if self._log.min_offset < end:
            return
        if self.rules.is_active:
            self.gate.note_end(end)
        else:
            self.gate.note_dropped()

    def move_floor(self, floor: int, now_ms: int) -> Steps:
        """Restate what only records before `floor` state, and record the new state floor."""
        yield from self._restatement.restate(floor, now_ms)
        yield from self._restatement.restate_lows(floor, now_ms)
        for half_ids in self._transactions.open_before(floor):
            if half_ids:
                return  # A half message is damaged, and a replica may have it: wait for it.
            yield []
        # Gathered acks are applied but not logged. They must precede the record below.
        self._acks.record(now_ms)
        self._fold.append(Floor(floor), now_ms)
        yield from self._quiet()

    def find_passed_hidden(self) -> Steps | None:
        """Return the steps that drop the messages of one hidden queue before the state floor.

        No timer and no transaction needs an earlier message, so their queues begin at the floor.
        None: nothing is left to drop.
        """
        floor = LogOffset(self._log.state_floor)
        if floor == self._hidden_begin:
            return None
        topics = [self._catalog.find_topic(name) for name in sorted(HIDDEN_TOPICS)]
        for topic in [one for one in topics if one is not None]:
            # More than `queues_of`: the number of its queues counts only the first ones.
            own = [queue for key, queue in self._catalog.queues.items() if key[0] == topic.id]
            for queue in own:
                # A damaged file is rebuilt first; the next floor moves on.
                with suppress(BlockFileDamaged):
                    if queue.min_offset < queue.offset_behind(floor):
                        return self._drop_passed(queue, floor)
        self._hidden_begin = floor
        return None

    def _drop_passed(self, queue: ConsumeQueue, floor: LogOffset) -> Steps:
        with suppress(BlockFileDamaged):
            yield from self._drop_before(queue, floor)

    def _drop_before(self, queue: ConsumeQueue, end: LogOffset) -> Steps:
        """Drop the entries of a queue before log offset `end`. Raises BlockFileDamaged."""
        yield from self.live_bytes.forget_before(queue, queue.offset_behind(end))
        queue.drop_before(end)

    def give_up_oldest(self, now_ms: int, *, with_messages: bool = True) -> Steps:
        """Drop the oldest segment. Its state is restated already.

        Without `with_messages`, a segment with a live message stays. The searches for one trust
        blocks that were verified before, so this verifies them again.
        """
        end = self._log.segments[0].end
        # The counts need the entries that are dropped below.
        yield from self.live_bytes.count()
        yield from self._quiet()
        for n, queue in enumerate(list(self._catalog.queues.values())):
            try:
                queue.check_entry(queue.min_offset)
                if not with_messages and self._has_messages(queue, end):
                    return
                yield from self._drop_before(queue, end)
            except BlockFileDamaged:
                return  # The file is rebuilt first. These steps may then run again.
            if n % QUEUES_CUT_A_SLICE == 0:
                yield []
        try:
            is_needed = yield from self._held_segments.is_needed(self._log.segments[0])
        except BlockFileDamaged:
            return
        index_files = self._store.index.drop_before(end)
        queue_files = [file for file in self._store.queue_files if file.to_offset <= end]
        del self._store.queue_files[: len(queue_files)]
        # Invariant: before the segment. A start then knows that the segment is not missing.
        yield from self._checkpoints.write_file(self._store.derived_offset, min_offset=end)
        self._full_since_ms.pop(self._log.segments[0].start, None)
        self._catalog.deleted_names.drop_before(end, now_ms - self._recreate_block_ms)
        if is_needed:
            yield from self._log.set_oldest_aside()
        else:
            yield from self._log.drop_oldest()
        for file in [*index_files, *queue_files]:
            yield from self._checkpoints.drop(file)

    def _expire(self, end: int, now_ms: int) -> Steps:
        """Record the dropped messages that groups never popped; groups then skip them.

        A group that has popped from a topic reads all queues of the topic, also those without a
        record of progress.
        """
        lows: dict[tuple[TopicId, QueueId], int] = {}  # first queue offset after `end`
        seen = 0
        ranges: list[ExpiredRange] = []
        for group_id in list(self._catalog.groups):
            for topic_id in self._pops.index.topic_ids_of(group_id):
                topic = self._catalog.topics.get(topic_id)
                for number in range(topic.queues if topic is not None else 0):
                    key = group_id, topic_id, QueueId(number)
                    seen += self._find_expired(key, end, lows, ranges)
                    if seen >= EXPIRED_SEEN_A_SLICE:
                        self._trims.record_expired(ranges, now_ms)
                        seen, ranges = 0, []
                        yield []
        self._trims.record_expired(ranges, now_ms)
        yield []

    def _find_expired(
        self,
        key: ProgressKey,
        end: int,
        lows: dict[tuple[TopicId, QueueId], int],
        ranges: list[ExpiredRange],
    ) -> int:
        """Add the messages of a queue that a group never popped to `ranges`; return the cost."""
        group_id, topic_id, queue_id = key
        queue = self._catalog.queues.get((topic_id, queue_id))
        progress = self._pops.progress.get(key)
        position = 0 if progress is None else progress.position
        is_ordered = progress is not None and progress.ordered is not None
        if queue is None or (position >= queue.max_offset and not is_ordered):
            return 1  # The usual case.
        if not self._catalog.is_alive(topic_id) or group_id not in self._catalog.groups:
            return 1  # Deleted between two slices.
        cost, low = 1, lows.get(key[1:])
        if low is None:
            try:
                low = lows[key[1:]] = int(queue.offset_behind(end))
            except BlockFileDamaged:
                return 1  # The file is rebuilt first. Then all this runs again.
            cost = EXPIRED_BISECTED
        if queue.min_offset < low:
            ranges += find_expired(self._pops, self._pops.progress_of(*key), low)
        return cost
