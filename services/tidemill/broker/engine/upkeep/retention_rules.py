"""Retention per topic: looks that move the begin of queues, because messages are old or too many.

The master looks every 10 s, in slices. For each queue, each rule proposes a low, and the highest
one counts. The archive gate bounds it. TRIM records state the lows, and replicas follow them.
On a full disk, `disk_full_policy` may let the oldest messages die.

A start loses only the time of the next look.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple, TypeVar, cast, final

import numpy as np

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.layout.trim import TrimmedQueue, TrimReason
from tidemill.broker.engine.metadata.beginnings import home_id_of
from tidemill.broker.engine.metadata.catalog import Topic
from tidemill.broker.engine.metadata.topic_retention import KEEP_FOREVER_MS, RETENTION_LEVEL
from tidemill.broker.engine.pop.queue_queries import consumer_offset
from tidemill.broker.engine.queue_entries import (
    ENTRIES_A_SLICE,
    ENTRY_TYPE,
    Entries,
    read_entries,
    size_of,
)
from tidemill.broker.engine.queue_trims import QueueTrims, Readers
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.store.segment import Segment
from tidemill.broker.engine.time_search import TimeSearch
from tidemill.broker.engine.upkeep.archive_gate import ArchiveGate
from tidemill.broker.engine.upkeep.live_bytes import END_OF_LOG, LiveBytes
from tidemill.broker.engine.upkeep.log_ages import LONG_AGO_MS, LogAges
from tidemill.broker.engine.upkeep.packing import SEGMENTS_KEPT
from tidemill.broker.engine.upkeep.parts import Steps, UpkeepParts
from tidemill.common.errors import Repairing
from tidemill.message.resource_names import HIDDEN_TOPICS

LOOK_PERIOD_MS = 10_000  # between the begins of two looks
FREES_WITHIN_MS = 60_000  # on a full disk, packing and other work that may free space
QUEUES_A_SLICE = 256  # 1 to 2 ms if each checks a block that is not cached
BISECT_COST = 16  # of a bisected queue, in queues: it verifies a block
GATE_COST = 4  # of a queue that the archive gate bounds, in queues
TRIM_BYTES = 1 << 20  # a row that frees as much is written at once
TRIM_PARTS = 64  # other rows wait until the oldest message is this part of `ms` older than `ms`
ENTRIES_MIN = 16  # read from each queue of a topic with too many bytes
VISIT_PARTS = 1024  # a row that waits is looked at again after this part of `ms`


class DiskTrim(NamedTuple):
    """The messages of one segment that died because the disk was full."""

    topics: list[str]  # names
    messages: int
    size_bytes: int


_T = TypeVar("_T")
_Lows = dict[QueueId, TrimmedQueue]


@final
class RetentionRules:
    """The rules of all topics, at the master.

    It is one class, because the rules share one look at the queues and its slices.
    """

    def __init__(
        self,
        parts: UpkeepParts,
        trims: QueueTrims,
        ages: LogAges,
        live_bytes: LiveBytes,
        gate: ArchiveGate,
        *,
        default_ms: int,
    ) -> None:
        self._store = parts.store
        self._log = parts.store.log
        self._catalog = parts.catalog
        self._pops = parts.pops
        self._trims = trims
        self._ages = ages
        self._live_bytes = live_bytes
        self._gate = gate
        self.default_ms = default_ms
        self._retention_bytes = parts.config.retention_bytes
        self._room = parts.room
        self._trims_oldest = parts.config.disk_full_policy == "trim_oldest"
        # Whether packing, or the removal of a segment, may free space. The engine connects it.
        self.may_free_space: Callable[[int], bool] = lambda _now_ms: True
        # Whether a pack of a segment frees space on the full disk, if messages of so many bytes die
        # in it. The engine connects it.
        self.may_pack: Callable[[Segment, int, int], bool] = lambda _segment, _bytes, _now_ms: False
        # On a full disk: bytes of the log at the last look, and since when they have not shrunk.
        self._full: tuple[int, int] | None = None
        self._stuck_at_ms: int | None = None  # monotonic: since a look, the disk is full in vain
        # The last segment that was trimmed on a full disk: its begin, and its size then. No other
        # one is trimmed before its space returns.
        self._awaited: tuple[int, int] | None = None
        self._disk_trims: list[DiskTrim] = []
        self._due_ms = LONG_AGO_MS  # monotonic
        # The next look is due when the log begins behind this offset.
        self._waits_for = END_OF_LOG
        self._seen_to = 0  # begin of the last segment at the last look
        # Per topic: its `ms`, and the monotonic time before which no message is as old.
        self._quiet_until_ms: dict[TopicId, tuple[int, int]] = {}
        # By the topic's id at the home: groups that have begun it; None: not found in this look.
        self._begun: dict[int, set[GroupId]] | None = None
        # Acks come all the time. A log that grows fast has more looks than one every 10 s.
        self._acked_at_ms = LONG_AGO_MS  # monotonic: the last look at them
        self._looks_at_acked = False
        self._left = QUEUES_A_SLICE  # queues that the slice may still visit

    @property
    def is_active(self) -> bool:
        """Whether the log may have these records."""
        return self._catalog.feature_level >= RETENTION_LEVEL

    def is_due(self) -> bool:
        """Whether a look is due."""
        now_ms = self._ages.monotonic_ms
        if not self.is_active or now_ms is None:
            return False
        # A new segment: limits by size must not be exceeded by all that comes in 10 s.
        has_grown = self._log.segments[-1].start > self._seen_to if self._log.segments else False
        is_awaited = self._log.min_offset > self._waits_for
        return now_ms >= self._due_ms or has_grown or is_awaited

    def request_look(self) -> None:
        """Let the next look begin at once."""
        self._due_ms = LONG_AGO_MS

    @property
    def _now_ms(self) -> int:
        assert self._ages.monotonic_ms is not None, "noted before each slice"
        return self._ages.monotonic_ms

    def ms_of(self, topic: Topic) -> int | None:
        """Return how long messages of a topic are kept; None: for ever."""
        ms = self._catalog.retention_of(topic).ms
        ms = self.default_ms if ms is None else ms
        return None if ms == KEEP_FOREVER_MS else ms

    def look(self, now_ms: int) -> Steps:
        """Move the lows of all queues."""
        self._due_ms = self._now_ms + LOOK_PERIOD_MS
        self._waits_for = END_OF_LOG
        self._seen_to = self._log.segments[-1].start if self._log.segments else 0
        self._left, self._begun = QUEUES_A_SLICE, None
        self._looks_at_acked = self._now_ms >= self._acked_at_ms + LOOK_PERIOD_MS
        if self._looks_at_acked:
            self._acked_at_ms = self._now_ms
        self._gate.begin_look()
        is_stuck, is_unpurged = self._note_stuck(now_ms), self._until_purged()
        trimmed_bytes = self._trims.size_bytes.total() if is_stuck else 0
        try:
            yield from self._look_at_topics(now_ms)
            yield from self._bound_all(now_ms)
            if is_stuck and self._trims.size_bytes.total() - trimmed_bytes < TRIM_BYTES:
                yield from self._trim_oldest(now_ms, is_unpurged)
        except (BlockFileDamaged, Repairing):
            return  # The file is rebuilt first. The next look begins again.
        if self._gate.end_look():
            # The gate has given way for one segment. The next one follows when that one is gone.
            self._waits_for = self._log.min_offset

    def _look_at_topics(self, now_ms: int) -> Steps:
        self._forget_deleted()
        for topic_id in list(self._catalog.topics):
            if self._is_spent(1):
                yield []
            topic = self._catalog.topics.get(topic_id)
            if topic is None or not self._catalog.is_alive(topic_id) or topic.name in HIDDEN_TOPICS:
                continue
            lows: _Lows = {}
            is_wanted = self._until_purged()
            yield from self._find_old(topic, lows)
            yield from self._find_excess(topic, lows)
            yield from self._find_acked(topic, lows)
            yield from self._trim(topic, lows, now_ms, is_wanted=is_wanted)

    def _forget_deleted(self) -> None:
        if len(self._quiet_until_ms) > 2 * len(self._catalog.topics) + 64:
            known = self._quiet_until_ms
            self._quiet_until_ms = {id_: known[id_] for id_ in self._catalog.topics if id_ in known}

    def _is_spent(self, cost: int) -> bool:
        """Count visited queues; return whether the slice is over."""
        self._left -= cost
        if self._left > 0:
            return False
        self._left = QUEUES_A_SLICE
        return True

    def _until_purged(self) -> Callable[[], bool]:
        """Return whether no purge has come since: it makes room, so that messages may stay."""
        purged_count = self._trims.purged_count
        return lambda: purged_count == self._trims.purged_count

    def _walk(self, topic: Topic) -> Iterator[ConsumeQueue | None]:
        """Yield the queues of a topic with messages, and None when the slice is over."""
        for number in range(topic.queues):
            if self._is_spent(1):
                yield None
            queue = self._catalog.queues.get((topic.id, QueueId(number)))
            if queue is not None and self._has_messages(queue):
                yield queue

    # ------------------------------------------------------------ one topic

    def _trim(
        self,
        topic: Topic,
        lows: _Lows,
        now_ms: int,
        *,
        segment_end: int | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Steps:
        """Record the lows that the gate allows.

        Without room, the gate gives way for messages before `segment_end`. Default: the end of the
        oldest segment.
        """
        if segment_end is None:
            # The segment that is written to cannot go, so nothing in it makes room.
            segments = self._log.segments
            segment_end = segments[0].end if len(segments) > 1 else 0
        retention = self._catalog.retention_of(topic)
        rows = []
        for row in list(lows.values()):
            if self._is_spent(GATE_COST):
                yield []
            queue = self._catalog.queues.get((row.topic_id, row.queue_id))
            if queue is None:
                return
            low = self._gate.bound(queue, row.low, segment_end=segment_end)
            if low > queue.min_offset:
                rows.append(row._replace(low=low))
        if not rows:
            return
        readers: Readers = yield from _as_steps(self._readers_of(topic.id))

        def is_unchanged() -> bool:
            # After a change of the setting, the next look decides again.
            now = self._catalog.topics.get(topic.id)
            return now is not None and self._catalog.retention_of(now) == retention

        yield from _as_steps(
            self._trims.trim(
                rows, readers, now_ms, is_wanted=lambda: is_unchanged() and is_wanted()
            )
        )

    def _readers_of(self, topic_id: TopicId) -> Generator[None, None, Readers]:
        group_ids = self._pops.index.find_readers(topic_id)
        if group_ids is not None:
            return {topic_id: sorted(group_ids)}
        return (yield from self._trims.find_readers([topic_id]))

    # ------------------------------------------------------------ by time

    def _find_old(self, topic: Topic, lows: _Lows) -> Steps:
        """Propose lows behind the messages that are older than the `ms` of the topic."""
        ms, now_ms = self.ms_of(topic), self._now_ms
        if ms is None:
            return
        known_ms, until_ms = self._quiet_until_ms.get(topic.id, (ms, now_ms))
        if known_ms == ms and now_ms < until_ms:
            return
        until_ms = now_ms + ms
        for queue in self._walk(topic):
            if queue is None:
                yield []
                continue
            stored_ms = self._head_ms(queue)
            if stored_ms is None or stored_ms + ms > now_ms:
                until_ms = min(until_ms, now_ms if stored_ms is None else stored_ms + ms)
                continue
            if self._is_spent(BISECT_COST):
                yield []
            late_ms = stored_ms + ms + ms // TRIM_PARTS
            low = self._old_end(queue, ms) if self._has_messages(queue) else 0
            if (
                now_ms >= late_ms
                or (yield from self._find_bytes(queue, 0, low, enough=TRIM_BYTES)) >= TRIM_BYTES
            ):
                _raise_low(lows, queue, TrimReason.TIME, low)
                until_ms = now_ms
            else:
                until_ms = min(until_ms, late_ms, now_ms + ms // VISIT_PARTS)
        self._quiet_until_ms[topic.id] = ms, until_ms

    def _head_ms(self, queue: ConsumeQueue) -> int | None:
        """Return a monotonic time: the first message of a queue is not older. None: unknown yet.

        Raises BlockFileDamaged.
        """
        log_offset = queue.entry(queue.min_offset)[0]
        if log_offset >= self._ages.inherited_end:
            return self._ages.earliest_ms(log_offset)
        return self._ages.inherited_ms(self._store.stored_at(queue, queue.min_offset)[1])

    def _old_end(self, queue: ConsumeQueue, ms: int) -> int:
        """Return the end of the old messages of a queue. Raises BlockFileDamaged, Repairing."""
        ages = self._ages
        surely, wall_ms = ages.surely_older(ms), ages.wall_before_ms(ms)
        if surely >= ages.inherited_end or wall_ms is None:
            return queue.offset_behind(surely)
        search = TimeSearch(self._store, [queue], wall_ms, falls=self._catalog.clock_falls)
        while search.step():
            pass
        # No clock of an earlier process decides about messages of this one.
        return min(search.offsets[0], queue.offset_behind(ages.inherited_end))

    def _find_bytes(
        self, queue: ConsumeQueue, begin: int, end: int, *, enough: int = END_OF_LOG
    ) -> Generator[list[File], None, int]:
        """Return the bytes of the live messages between two offsets, as far as `enough`."""
        offset, size_bytes = begin, 0
        while offset < end and size_bytes < enough and self._has_messages(queue):
            offset = max(offset, int(queue.min_offset))
            count = min(end - offset, ENTRIES_A_SLICE // 4)
            if count > 0:
                size_bytes += size_of(read_entries(queue, offset, count))
            offset += count
            if self._is_spent(BISECT_COST if count < ENTRIES_MIN * 64 else QUEUES_A_SLICE // 4):
                yield []
        return size_bytes

    def _has_messages(self, queue: ConsumeQueue) -> bool:
        """Whether a queue still exists, and has messages."""
        known = self._catalog.queues.get((queue.topic_id, queue.queue_id))
        is_alive = known is queue and self._catalog.is_alive(queue.topic_id)
        return is_alive and queue.min_offset < queue.max_offset

    # ------------------------------------------------------------ by size

    def _find_excess(self, topic: Topic, lows: _Lows) -> Steps:
        """Propose lows behind the oldest messages of a topic with too many bytes."""
        limit = self._catalog.retention_of(topic).bytes
        if limit is None or self._excess_of(topic, limit) < min(TRIM_BYTES, limit // TRIM_PARTS):
            return
        begins: dict[QueueId, int] = {}
        for queue in self._walk(topic):
            if queue is None:
                yield []
            elif not self._live_bytes.is_exact([queue]):
                return  # Messages died since the last count.
            else:
                begins[queue.queue_id] = int(queue.min_offset)
        excess = self._excess_of(topic, limit)
        found: _Lows = {}
        while excess > 0:
            entries, until = yield from self._find_oldest(topic, begins)
            if not len(entries):
                break
            sums = np.cumsum(entries["size"].astype(np.int64))
            number = int(np.searchsorted(sums, excess, "left"))
            if number < len(sums):
                until = int(entries["log_offset"][number]) + 1
            excess -= int(sums[min(number, len(sums) - 1)])
            for queue in self._walk(topic):
                if queue is None or (queue.queue_id in begins and self._is_spent(BISECT_COST)):
                    yield []
                if queue is not None and queue.queue_id in begins and self._has_messages(queue):
                    begins[queue.queue_id] = queue.offset_behind(until)
                    _raise_low(found, queue, TrimReason.BYTES, begins[queue.queue_id])
        for queue in self._walk(topic):
            if queue is None:
                yield []
            elif queue.queue_id in found:
                _raise_low(lows, queue, TrimReason.BYTES, found[queue.queue_id].low)

    def _excess_of(self, topic: Topic, limit: int) -> int:
        return self._live_bytes.bytes_of_topic(topic.id) - limit

    def _find_oldest(
        self, topic: Topic, begins: dict[QueueId, int]
    ) -> Generator[list[File], None, tuple[Entries, int]]:
        """Return the oldest entries of some queues, and the log offset up to which they are all."""
        count = max(ENTRIES_A_SLICE // 4 // max(len(begins), 1), ENTRIES_MIN)
        found, until = np.empty(count * len(begins), ENTRY_TYPE), int(self._log.log_end)
        found_count = 0
        for queue in self._walk(topic):
            if queue is None or (queue.queue_id in begins and self._is_spent(BISECT_COST)):
                yield []
            if queue is None or queue.queue_id not in begins or not self._has_messages(queue):
                continue
            begin = max(begins[queue.queue_id], int(queue.min_offset))
            end = min(begin + count, int(queue.max_offset))
            if end <= begin:
                continue
            entries = read_entries(queue, begin, end - begin)
            found[found_count : found_count + len(entries)] = entries
            found_count += len(entries)
            if end < queue.max_offset:
                until = min(until, int(entries["log_offset"][-1]) + 1)
        yield []  # The entries of all queues are a slice.
        found = found[:found_count]
        found = found[found["log_offset"] < until]
        return found[np.argsort(found["log_offset"], kind="stable")], until

    def _bound_all(self, now_ms: int) -> Steps:
        """Trim the topics without a limit of their own if they have too many bytes together.

        Topics that keep their messages for ever are not among them. The oldest segments lose their
        messages, because space returns by whole segments.
        """
        if not self._retention_bytes:
            return
        is_wanted, is_first = self._until_purged(), True
        for segment in self._log.segments[:-1]:
            if not is_first:
                yield from self._live_bytes.count()
            is_first, topics, size_bytes = False, [], 0
            for topic in list(self._catalog.topics.values()):
                if self._is_spent(1):
                    yield []
                topic_bytes = self._live_bytes.bytes_of_topic(topic.id)
                if topic_bytes and self._is_bounded(topic):
                    topics.append(topic)
                    size_bytes += topic_bytes
            if not self._live_bytes.is_complete or size_bytes <= self._retention_bytes:
                return
            for topic in topics:
                if self._is_spent(1):
                    yield []
                lows = yield from self._find_before(topic, segment.end, TrimReason.BYTES)
                if not is_wanted():
                    return  # Enough may be gone now. The next look counts again.
                yield from self._trim(topic, lows, now_ms, is_wanted=is_wanted)

    def _is_bounded(self, topic: Topic) -> bool:
        """Whether the limit of the broker applies to a topic."""
        retention = self._catalog.retention_of(topic)
        is_limited = retention.bytes is None and retention.ms != KEEP_FOREVER_MS
        return is_limited and topic.name not in HIDDEN_TOPICS and self._catalog.is_alive(topic.id)

    def _find_before(
        self, topic: Topic, end: int, reason: TrimReason
    ) -> Generator[list[File], None, _Lows]:
        """Return lows behind all messages of a topic before a log offset."""
        lows: _Lows = {}
        for queue in self._walk(topic):
            if queue is None:
                yield []
            elif queue.entry(queue.min_offset)[0] < end:
                if self._is_spent(BISECT_COST):
                    yield []
                if self._has_messages(queue):
                    _raise_low(lows, queue, reason, queue.offset_behind(end))
        return lows

    # ------------------------------------------------------------ on a full disk

    def take_notices(self) -> list[DiskTrim]:
        """Return and clear the notices for operators."""
        notices, self._disk_trims = self._disk_trims, []
        return notices

    def _note_stuck(self, now_ms: int) -> bool:
        """Return whether the disk is full, and nothing has freed space since an earlier look.

        Packing searches for work on the full disk between two looks.
        """
        if not self._trims_oldest or not self._room.is_full:
            self._stuck_at_ms = self._awaited = self._full = None
            return False
        log_bytes = sum(one.file_size for one in self._log.segments)
        before_bytes, since_ms = self._full or (log_bytes, self._now_ms)
        if log_bytes < before_bytes:
            since_ms = self._now_ms
        self._full = log_bytes, since_ms
        # While messages die all the time, something may always free space.
        if self.may_free_space(now_ms) and self._now_ms < since_ms + FREES_WITHIN_MS:
            self._stuck_at_ms = None
            return False
        if self._stuck_at_ms is None:
            self._stuck_at_ms = self._now_ms
        if self._now_ms < self._stuck_at_ms + LOOK_PERIOD_MS:
            return False
        return all((one.start, one.file_size) != self._awaited for one in self._log.segments)

    def _trim_oldest(self, now_ms: int, is_unpurged: Callable[[], bool]) -> Steps:
        """Trim the oldest segment that frees space without the messages that may die.

        `is_unpurged` tells whether no purge has come since the begin of the look.
        """
        segments = self._log.segments
        yield from self._live_bytes.count()

        def is_wanted() -> bool:
            # A purge makes room soon. Other processes may free space as well.
            return self._room.is_full and is_unpurged()

        for number, segment in enumerate(segments[:-1]):
            # The two newest segments are not packed. Only the oldest segment is removed.
            if number and number >= len(segments) - SEGMENTS_KEPT:
                return
            trimmable = yield from self._find_trimmable_bytes(segment)
            if not self._frees_space(number, trimmable, now_ms):
                continue
            topics, messages, size_bytes = [], 0, 0
            for topic in list(self._catalog.topics.values()):
                if self._is_spent(1):
                    yield []
                key = topic.id, TrimReason.DISK
                before = self._trims.messages[key], self._trims.size_bytes[key]
                yield from self._trim_before(topic, segment.end, now_ms, is_wanted)
                if self._trims.messages[key] > before[0]:
                    topics.append(topic.name)
                    messages += self._trims.messages[key] - before[0]
                    size_bytes += self._trims.size_bytes[key] - before[1]
            if messages:
                self._disk_trims.append(DiskTrim(topics, messages, size_bytes))
                self._stuck_at_ms = self._now_ms  # Packing is next.
                self._awaited = segment.start, segment.file_size
                return

    def _find_trimmable_bytes(self, segment: Segment) -> Generator[list[File], None, int]:
        """Return the bytes of the messages in a segment that the rule may trim."""
        size_bytes = 0
        for topic in list(self._catalog.topics.values()):
            if self._is_spent(1):
                yield []
            for queue in self._walk(topic) if self._may_trim(topic) else []:
                if queue is None:
                    yield []
                elif queue.entry(queue.min_offset)[0] < segment.end:
                    if self._is_spent(2 * BISECT_COST):
                        yield []
                    begin, end = map(queue.offset_behind, (segment.start, segment.end))
                    size_bytes += yield from self._find_bytes(queue, begin, end)
        return size_bytes

    def _frees_space(self, number: int, trimmable: int, now_ms: int) -> bool:
        """Whether a segment is packed or removed without the messages that may be trimmed."""
        segments = self._log.segments
        segment = segments[number]
        if not trimmable or not self._live_bytes.is_complete:
            return False
        if number == 0 and self._live_bytes.live_bytes_in(segment.start) <= trimmable:
            return True
        return number < len(segments) - SEGMENTS_KEPT and self.may_pack(segment, trimmable, now_ms)

    def _may_trim(self, topic: Topic) -> bool:
        return topic.name not in HIDDEN_TOPICS and self.ms_of(topic) is not None

    def _trim_before(
        self, topic: Topic, end: int, now_ms: int, is_wanted: Callable[[], bool]
    ) -> Steps:
        """Trim the messages of a topic before a log offset, unless it keeps them for ever."""
        if not self._may_trim(topic):
            return
        lows = yield from self._find_before(topic, end, TrimReason.DISK)
        yield from self._trim(topic, lows, now_ms, segment_end=end, is_wanted=is_wanted)

    # ------------------------------------------------------------ by progress

    def _find_acked(self, topic: Topic, lows: _Lows) -> Steps:
        """Propose lows behind the messages that all groups of a topic have settled."""
        if not self._looks_at_acked or not self._catalog.retention_of(topic).frees_acked:
            return
        readers: Readers = yield from _as_steps(self._readers_of(topic.id))
        pulling = self._catalog.pull_offsets.group_ids_of(topic.id)
        if self._begun is None:
            yield from self._find_begun()
        begun = (self._begun or {}).get(home_id_of(topic, self._catalog) or 0, set())
        group_ids = pulling | begun | set(readers[topic.id])
        if not group_ids:
            return
        for queue in self._walk(topic):
            if queue is None:
                yield []
                continue
            low = int(queue.max_offset)
            for group_id in group_ids:
                if self._is_spent(1):
                    yield []
                low = min(low, self._settled_end(queue, group_id, is_pulling=group_id in pulling))
            _raise_low(lows, queue, TrimReason.ACKED, low)

    def _settled_end(self, queue: ConsumeQueue, group_id: GroupId, *, is_pulling: bool) -> int:
        """Return the offset before which a group has settled all messages of a queue."""
        key = group_id, queue.topic_id, queue.queue_id
        progress = self._pops.progress.get(key)
        if group_id not in self._catalog.groups:
            return int(queue.max_offset)  # Deleted between two slices.
        pulled = self._catalog.pull_offsets.find(key)
        if is_pulling and progress is None:
            return pulled or 0
        popped = 0 if progress is None else consumer_offset(self._pops, progress)
        return popped if pulled is None else min(popped, pulled)

    def _find_begun(self) -> Steps:
        """Find the groups that have begun each topic at any broker group, once per look."""
        found: dict[int, set[GroupId]] = {}
        for group in list(self._catalog.groups.values()):
            if self._is_spent(1 + len(group.begun) // 16):
                yield []
            for topic_id, _ in group.begun:
                found.setdefault(topic_id, set()).add(group.id)
        self._begun = found


def _as_steps(slices: Generator[None, None, _T]) -> Generator[list[File], None, _T]:
    """Return slices as steps without files."""
    while True:
        try:
            next(slices)
        except StopIteration as ended:
            return cast("_T", ended.value)
        yield []


def _raise_low(lows: _Lows, queue: ConsumeQueue, reason: TrimReason, low: int) -> None:
    """Propose a low, unless a higher one is proposed."""
    known = lows.get(queue.queue_id)
    if low > queue.min_offset and (known is None or known.low < low):
        lows[queue.queue_id] = TrimmedQueue(queue.topic_id, queue.queue_id, reason, low)
