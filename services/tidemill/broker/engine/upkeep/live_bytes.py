"""Live and dead bytes: the record sizes of the messages, per topic and per segment.

A message is live while its topic exists and its queue offset is not below the low of its queue.
Background slices read the queue entries: new ones are added, and those of dead messages subtracted.
So a count is late by the time between two looks, and no send pays for it. Messages of the hidden
timer topic count as live: timers decide for themselves.

The sizes of dead messages are known until their segment is packed or removed. Messages that died
before they were counted are unknown: before the start, or within seconds after they were stored.

No file has the counts: a start counts again, and `is_complete` tells when it has counted all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import final

import numpy as np
import numpy.typing as npt

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.queue_entries import ENTRIES_A_SLICE, read_entries
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.upkeep.freed_bytes import FreedBytes
from tidemill.broker.engine.upkeep.parts import Steps

LOOK_PERIOD_MS = 10_000  # between the begins of two counts
QUEUE_COST = 48  # of a queue without changes, in entries: 341 of them in a slice
CHUNK_COST = 64  # of the arrays of a read, in entries
# Pairs of a segment and a topic with known dead bytes: 10 MB. Beyond it the topic is not known.
DEAD_PAIRS_MAX = 65_536
NO_TOPIC = TopicId(0)  # the topic of dead bytes beyond that number; ids begin at 1
END_OF_LOG = 1 << 62


class _CountedQueue:
    """The entries of a queue that are counted: from `begin` to before `end`."""

    __slots__ = ("begin", "end", "queue")

    def __init__(self, queue: ConsumeQueue) -> None:
        self.queue = queue
        self.begin = self.end = int(queue.min_offset)


class _EntriesMissing(Exception):
    """The derived files lack entries of dead messages."""


@final
class LiveBytes:
    """The counts of one broker."""

    def __init__(self, store: MessageStore, catalog: Catalog) -> None:
        self._store = store
        self._log = store.log
        self._catalog = catalog
        self.is_complete = False  # all messages were counted since the start
        # The counts include all messages before this log offset, dead ones until the next look.
        self.counted_to = 0
        # Monotonic: the begin of the last look, and of the last one that has counted all.
        self._looked_at_ms = self.counted_at_ms = 0
        # By topic, as a list of all queues would take a slice some milliseconds.
        self._queues: dict[TopicId, dict[QueueId, _CountedQueue]] = {}
        self._of_topic: Counter[TopicId] = Counter()
        self._of_segment: Counter[int] = Counter()  # by segment start
        self._dead: dict[int, Counter[TopicId]] = {}  # by segment start
        self._dead_pairs = 0
        self._dead_of_topic: Counter[TopicId] = Counter()
        self._pack_sizes: dict[int, int] = {}  # of the packs that the counts know
        self.freed = FreedBytes(store.log)
        self._starts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._starts_of: tuple[int, int, int] | None = None
        self._allowance = 0
        self._due_ms: int | None = None  # monotonic; None: now
        self._seen_to = 0  # begin of the last segment at the last look

    def bytes_of_topic(self, topic_id: TopicId) -> int:
        """Return the live bytes of a topic, as of the last look."""
        return self._of_topic[topic_id]

    def live_bytes_in(self, segment_start: int) -> int:
        """Return the live bytes of the segment that begins there, as of the last look."""
        return self._of_segment[segment_start]

    def dead_bytes_of_topic(self, topic_id: TopicId) -> int:
        """Return the known dead bytes of a topic that are still in the log."""
        return self._dead_of_topic[topic_id]

    def dead_bytes_in(self, segment_start: int) -> int:
        """Return the known dead bytes of the segment that begins there."""
        return self._dead.get(segment_start, Counter()).total()

    def is_exact(self, queues: Iterable[ConsumeQueue]) -> bool:
        """Whether the dead messages of these queues are subtracted."""
        if not self.is_complete:
            return False
        for queue in queues:
            one = self._find(queue)
            if one is not None and one.begin < queue.min_offset:
                return False
        return True

    def first_counted(self, queue: ConsumeQueue, *, at_most: int) -> int:
        """Return the first counted queue offset of a queue, or `at_most` if that is earlier.

        The counts subtract dead messages from there on by their entries.
        """
        one = self._find(queue)
        return at_most if one is None or one.queue is not queue else min(one.begin, at_most)

    def is_due(self, monotonic_ms: int) -> bool:
        """Whether a look is due."""
        segments = self._log.segments
        has_grown = bool(segments) and segments[-1].start > self._seen_to
        return self._due_ms is None or monotonic_ms >= self._due_ms or has_grown

    def request_look(self) -> None:
        """Let the next look begin at once."""
        self._due_ms = None

    def look(self, monotonic_ms: int) -> Steps:
        """Count new and dead messages. The next look is due later."""
        self._due_ms = monotonic_ms + LOOK_PERIOD_MS
        self._seen_to = self._log.segments[-1].start if self._log.segments else 0
        self._looked_at_ms = monotonic_ms
        yield from self.count()

    def count_topic(self, topic_id: TopicId) -> Iterator[None]:
        """Count the new and dead messages of one topic, in slices, between two looks.

        If the derived files are damaged or lack entries, the next look takes care of it.
        """
        number = 0
        while (topic := self._catalog.topics.get(topic_id)) and number < topic.queues:
            queue = self._catalog.queues.get((topic_id, QueueId(number)))
            if queue is not None:
                try:
                    for _ in self._count_queue(queue):
                        yield
                except (BlockFileDamaged, _EntriesMissing):
                    return
            number += 1

    def count(self) -> Steps:
        """Count messages that are new or dead since the last look."""
        end = int(self._log.folded_offset)
        self.note_packs()
        try:
            self._allowance = ENTRIES_A_SLICE
            yield from self._subtract_deleted()
            yield from self._count_queues()
        except BlockFileDamaged:
            return  # The file is rebuilt first. The next look continues.
        except _EntriesMissing:
            self._begin_again()
            return
        self.is_complete, self.counted_to = True, end
        self.counted_at_ms = self._looked_at_ms
        for start in [start for start in self._of_segment if start < self._log.min_offset]:
            del self._of_segment[start]
        for start in [start for start in self._dead if start < self._log.min_offset]:
            self._forget_dead(start)

    def note_packs(self) -> None:
        """Note the space that packing and deletion have freed. The content of packs is not dead."""
        packs = [one for one in self._log.segments if one.pack is not None]
        sizes: dict[int, int] = {one.start: one.file_size for one in packs}
        for start, size in sizes.items():
            if self._pack_sizes.get(start) != size:
                self._forget_dead(start)
        self._pack_sizes = sizes
        self.freed.note(self.live_bytes_in)

    def forget_before(self, queue: ConsumeQueue, offset: int) -> Steps:
        """Subtract the messages before `offset`: their segment is dropped. Count them first.

        Raises BlockFileDamaged.
        """
        one = self._find(queue)
        if one is None or one.queue is not queue:
            return
        try:
            while one.begin < min(offset, one.end):
                self._subtract(one, min(offset, one.end))
                if self._is_spent(0):
                    yield []
        except _EntriesMissing:
            self._begin_again()

    def _begin_again(self) -> None:
        self.is_complete, self.counted_to = False, 0
        self._queues.clear()
        self._of_topic.clear()
        self._of_segment.clear()
        self._dead.clear()
        self._dead_of_topic.clear()
        self._dead_pairs = 0
        self._due_ms = None

    def _is_spent(self, cost: int) -> bool:
        """Count work; return whether the slice is over."""
        self._allowance -= cost
        if self._allowance > 0:
            return False
        self._allowance = ENTRIES_A_SLICE
        return True

    def _is_alive(self, one: _CountedQueue) -> bool:
        queue = one.queue
        known = self._catalog.queues.get((queue.topic_id, queue.queue_id))
        return known is queue and self._catalog.is_alive(queue.topic_id)

    def _find(self, queue: ConsumeQueue) -> _CountedQueue | None:
        return self._queues.get(queue.topic_id, {}).get(queue.queue_id)

    def _subtract_deleted(self) -> Steps:
        for topic_id in list(self._queues):
            for queue_id, one in list(self._queues[topic_id].items()):
                if self._is_spent(QUEUE_COST):
                    yield []
                if self._is_alive(one):
                    continue
                while one.begin < one.end:
                    # A merge may have dropped the files: it keeps only what live queues need.
                    if not one.queue.is_in(frozenset(self._store.queue_files)):
                        raise _EntriesMissing
                    self._subtract(one, one.end)
                    if self._is_spent(0):
                        yield []
                del self._queues[topic_id][queue_id]
            if not self._queues[topic_id]:
                del self._queues[topic_id]
            if not self._catalog.is_alive(topic_id):
                self._of_topic.pop(topic_id, None)

    def _count_queues(self) -> Steps:
        for topic_id in list(self._catalog.topics):
            number = 0
            while (topic := self._catalog.topics.get(topic_id)) and number < topic.queues:
                if self._is_spent(QUEUE_COST):
                    yield []
                queue = self._catalog.queues.get((topic_id, QueueId(number)))
                if queue is not None:
                    yield from self._count_queue(queue)
                number += 1

    def _count_queue(self, queue: ConsumeQueue) -> Steps:
        one = self._find(queue)
        if one is None:
            is_alive = self._catalog.is_alive(queue.topic_id)
            if queue.min_offset == queue.max_offset or not is_alive:
                return
            one = _CountedQueue(queue)
            self._queues.setdefault(queue.topic_id, {})[queue.queue_id] = one
        # Between two slices, another count may have forgotten all.
        while self._find(queue) is one and one.queue is queue and self._is_uncounted(one):
            self._count_some(one)
            if self._is_spent(0):
                yield []

    def _is_uncounted(self, one: _CountedQueue) -> bool:
        is_counted = one.begin >= one.queue.min_offset and one.end >= one.queue.max_offset
        return not is_counted and self._is_alive(one)

    def _count_some(self, one: _CountedQueue) -> None:
        """Count at most a slice of a queue."""
        low, high = int(one.queue.min_offset), int(one.queue.max_offset)
        if one.begin < min(low, one.end):
            self._subtract(one, min(low, one.end))
        elif one.end <= low:
            one.begin = one.end = low  # Messages that died before they were counted.
        if one.begin >= low and one.end < high:
            count = min(high - one.end, ENTRIES_A_SLICE)
            self._add(one.queue, one.end, count, sign=1)
            one.end += count

    def _subtract(self, one: _CountedQueue, end: int) -> None:
        runs = one.queue.runs_between(0, END_OF_LOG)
        stored = one.queue.entries_in(runs).start if runs else one.queue.base
        if one.begin < stored:
            raise _EntriesMissing
        count = min(end - one.begin, ENTRIES_A_SLICE)
        self._add(one.queue, one.begin, count, sign=-1)
        one.begin += count

    def _add(self, queue: ConsumeQueue, offset: int, count: int, *, sign: int) -> None:
        """Add or subtract the sizes of `count` entries."""
        entries = read_entries(queue, offset, count)
        self._allowance -= count + CHUNK_COST
        sizes = entries["size"].astype(np.int64)
        self._of_topic[queue.topic_id] += sign * int(sizes.sum())
        starts = self._segment_starts()
        numbers = np.searchsorted(starts, entries["log_offset"].astype(np.int64), "right") - 1
        is_in_log = numbers >= 0
        sums = np.bincount(numbers[is_in_log], weights=sizes[is_in_log])
        for number in np.flatnonzero(sums).tolist():
            start, size_bytes = int(starts[number]), int(sums[number])
            self._of_segment[start] += sign * size_bytes
            if sign < 0:
                self._add_dead(start, queue.topic_id, size_bytes)

    def _add_dead(self, start: int, topic_id: TopicId, size_bytes: int) -> None:
        dead = self._dead.setdefault(start, Counter())
        if topic_id not in dead:
            if self._dead_pairs >= DEAD_PAIRS_MAX:
                topic_id = NO_TOPIC
            self._dead_pairs += topic_id not in dead
        dead[topic_id] += size_bytes
        self._dead_of_topic[topic_id] += size_bytes

    def _forget_dead(self, start: int) -> None:
        """Forget the dead bytes of a segment that is packed or removed."""
        dead = self._dead.pop(start, Counter())
        self._dead_pairs -= len(dead)
        for topic_id, size_bytes in dead.items():
            self._dead_of_topic[topic_id] -= size_bytes
            if not self._dead_of_topic[topic_id]:
                del self._dead_of_topic[topic_id]

    def _segment_starts(self) -> npt.NDArray[np.int64]:
        segments = self._log.segments
        key = len(segments), int(segments[0].start), int(segments[-1].start)
        if key != self._starts_of:
            self._starts_of = key
            self._starts = np.array([one.start for one in segments], np.int64)
        return self._starts
