"""Dead letters that operators have replayed or discarded, as ranges of offsets (ADR 0093).

    state of a dead letter   event                              next state
    OPEN                     MESSAGE with the flag REPLAY       REPLAYED
    OPEN                     DEAD_LETTER                        DISCARDED
    OPEN                     STATE or snapshot with the range   that of the range
    REPLAYED, DISCARDED      any                                as before: the first event counts

A dead letter without a range is open. Retention, a purge and the deletion of a topic remove ranges
together with their messages.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, final

from tidemill.broker.engine.layout import dead_letter
from tidemill.broker.engine.layout.dead_letter import DeadLetterState, SettledRange, StatedLetters
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, TopicId
from tidemill.broker.engine.store.consume_queue import ConsumeQueue

DEAD_LETTER_LEVEL: Final = 5  # feature level of REPLAY and DEAD_LETTER
DEAD_LETTER_QUEUE: Final = QueueId(0)  # a dead-letter topic has one queue
RANGES_MAX: Final = 65_536  # of a topic, 2.2 MB
# From so many ranges on, a range also joins a neighbour that was settled at another time.
EXACT_RANGES_MAX: Final = 32_768
RANGES_A_BLOCK: Final = 1_024  # of a STATE record or a section: 34 KB, a millisecond
_REPLAYED, _DISCARDED = DeadLetterState.REPLAYED, DeadLetterState.DISCARDED
NEVER_STATED: Final = LogOffset(1 << 62)


class SettledCounts(NamedTuple):
    """The numbers of settled dead letters of a topic."""

    replayed: int
    discarded: int


@final
class _TopicRanges:
    """The ranges of one topic, in order and without overlaps."""

    def __init__(self) -> None:
        self.begins = array("q")
        self.ends = array("q")
        self.times_ms = array("q")
        self.operations = array("q")
        self.states = bytearray()
        self._counts = [0] * len(DeadLetterState)  # offsets by state
        # The log offset of the oldest record that states one of the ranges.
        self.stated_from = NEVER_STATED

    def __len__(self) -> int:
        return len(self.begins)

    def row(self, at: int) -> SettledRange:
        """Return the range of an index."""
        return SettledRange(
            self.begins[at], self.ends[at], self.times_ms[at], self.operations[at], self.states[at]
        )

    def find(self, offset: int) -> SettledRange | None:
        """Return the range with an offset."""
        at = bisect_right(self.begins, offset) - 1
        return self.row(at) if at >= 0 and offset < self.ends[at] else None

    def settle(self, new: SettledRange) -> None:
        """Settle the open offsets of a range."""
        begin = new.begin
        while begin < new.end:
            at = bisect_right(self.begins, begin)
            if at and begin < self.ends[at - 1]:
                begin = self.ends[at - 1]
                continue
            end = min(new.end, self.begins[at]) if at < len(self.begins) else new.end
            self._insert(at, new._replace(begin=begin, end=end))
            self._counts[new.state] += end - begin
            begin = end

    def _insert(self, at: int, new: SettledRange) -> None:
        """Add an open range in front of index `at`, or join it with its neighbours."""
        if at and self.ends[at - 1] == new.begin and self._may_join(at - 1, new):
            at -= 1
            new = self._joined(at, new, begin=self.begins[at])
            self._remove(at)
        if at < len(self.begins) and self.begins[at] == new.end and self._may_join(at, new):
            new = self._joined(at, new, end=self.ends[at])
            self._remove(at)
        self.begins.insert(at, new.begin)
        self.ends.insert(at, new.end)
        self.times_ms.insert(at, new.settled_at_ms)
        self.operations.insert(at, new.operation_id)
        self.states.insert(at, new.state)

    def _may_join(self, at: int, new: SettledRange) -> bool:
        if (self.states[at], self.operations[at]) != (new.state, new.operation_id):
            return False
        return self.times_ms[at] == new.settled_at_ms or len(self.begins) >= EXACT_RANGES_MAX

    def _joined(
        self, at: int, new: SettledRange, *, begin: int | None = None, end: int | None = None
    ) -> SettledRange:
        return new._replace(
            begin=new.begin if begin is None else begin,
            end=new.end if end is None else end,
            settled_at_ms=new.settled_at_ms if self.times_ms[at] == new.settled_at_ms else 0,
        )

    def _remove(self, at: int) -> None:
        for column in (self.begins, self.ends, self.times_ms, self.operations, self.states):
            del column[at]

    def trim(self, low: int) -> None:
        """Forget the offsets before `low`."""
        count = bisect_right(self.ends, low)
        for at in range(count):
            self._counts[self.states[at]] -= self.ends[at] - self.begins[at]
        for column in (self.begins, self.ends, self.times_ms, self.operations, self.states):
            del column[:count]
        if self.begins and self.begins[0] < low:
            self._counts[self.states[0]] -= low - self.begins[0]
            self.begins[0] = low

    def first_open(self, offset: int) -> int:
        """Return the first open offset from one on."""
        at = max(bisect_right(self.begins, offset) - 1, 0)
        while at < len(self.begins) and self.begins[at] <= offset:
            offset = max(offset, self.ends[at])
            at += 1
        return offset

    def copy(self) -> _TopicRanges:
        """Return the ranges as of now."""
        copied = _TopicRanges()
        copied.begins, copied.ends = self.begins[:], self.ends[:]
        copied.times_ms, copied.operations = self.times_ms[:], self.operations[:]
        copied.states = self.states[:]
        return copied

    def blocks(self) -> Iterator[list[SettledRange]]:
        """Yield all ranges, in order."""
        for first in range(0, len(self), RANGES_A_BLOCK):
            yield [self.row(at) for at in range(first, min(first + RANGES_A_BLOCK, len(self)))]

    def counts(self) -> SettledCounts:
        """Return the number of offsets of each state."""
        return SettledCounts(self._counts[_REPLAYED], self._counts[_DISCARDED])


@final
class SettledLetters:
    """The settled dead letters of all dead-letter topics."""

    def __init__(self) -> None:
        self._topics: dict[TopicId, _TopicRanges] = {}

    @property
    def size_bytes(self) -> int:
        """The size of the ranges in a snapshot."""
        return sum([len(ranges) for ranges in self._topics.values()]) * dead_letter.ROW_SIZE

    def find(self, topic_id: TopicId, offset: int) -> SettledRange | None:
        """Return the range with a dead letter; None if it is open."""
        ranges = self._topics.get(topic_id)
        return None if ranges is None else ranges.find(offset)

    def state_of(self, topic_id: TopicId, offset: int) -> DeadLetterState:
        """Return the state of a dead letter."""
        found = self.find(topic_id, offset)
        return DeadLetterState.OPEN if found is None else DeadLetterState(found.state)

    def has_room(self, topic_id: TopicId, count: int) -> bool:
        """Whether a topic may get so many ranges more."""
        ranges = self._topics.get(topic_id)
        return ranges is None or len(ranges) + count <= RANGES_MAX

    def counts_of(self, topic_id: TopicId) -> SettledCounts:
        """Return the numbers of settled dead letters, with those that are not yet forgotten."""
        ranges = self._topics.get(topic_id)
        return SettledCounts(0, 0) if ranges is None else ranges.counts()

    def first_open(self, topic_id: TopicId, offset: int) -> int:
        """Return the first open offset from an offset on; there may be no message yet."""
        ranges = self._topics.get(topic_id)
        return offset if ranges is None else ranges.first_open(offset)

    # ------------------------------------------------------------ fold

    def settle(
        self, topic_id: TopicId, ranges: Iterable[SettledRange], log_offset: LogOffset
    ) -> None:
        """Settle the open dead letters of some ranges, as a record has it."""
        of_topic = self._topics.get(topic_id)
        if of_topic is None:
            of_topic = self._topics[topic_id] = _TopicRanges()
        of_topic.stated_from = min(of_topic.stated_from, log_offset)
        for one in ranges:
            of_topic.settle(one)

    def trim(self, topic_id: TopicId, low: int) -> None:
        """Forget the settled dead letters that retention has removed."""
        ranges = self._topics.get(topic_id)
        if ranges is not None:
            ranges.trim(low)
            if not len(ranges):
                del self._topics[topic_id]

    def trim_all(self, queues: Mapping[tuple[TopicId, QueueId], ConsumeQueue]) -> None:
        """Forget the settled dead letters that retention has removed from the queues."""
        for topic_id in list(self._topics):
            queue = queues.get((topic_id, DEAD_LETTER_QUEUE))
            if queue is not None:
                self.trim(topic_id, queue.min_offset)

    def forget_topic(self, topic_id: TopicId) -> None:
        """Forget the settled dead letters of a deleted topic."""
        self._topics.pop(topic_id, None)

    # ------------------------------------------------------------ the state floor, snapshots

    @property
    def topic_ids(self) -> list[TopicId]:
        """The topics with settled dead letters."""
        return list(self._topics)

    def begin_restatement(
        self, topic_id: TopicId, *, before: int, log_end: LogOffset
    ) -> Iterator[StatedLetters]:
        """Return the ranges of a topic, if a record before a log offset states one of them.

        They are those of this call, even if they are read later. The caller states them at
        `log_end` or behind it.
        """
        ranges = self._topics.get(topic_id)
        if ranges is None or ranges.stated_from >= before:
            return iter(())
        ranges.stated_from = log_end
        return (StatedLetters(topic_id, block) for block in ranges.copy().blocks())

    def freeze(self) -> Iterator[bytes]:
        """Return the sections of a snapshot, as of this call, even if they are read later."""
        frozen = [(topic_id, ranges.copy()) for topic_id, ranges in self._topics.items()]
        return (
            dead_letter.encode_ranges(topic_id, block)
            for topic_id, ranges in frozen
            for block in ranges.blocks()
        )

    @property
    def section_count(self) -> int:
        """The number of sections of a snapshot."""
        return sum([-(-len(ranges) // RANGES_A_BLOCK) for ranges in self._topics.values()])
