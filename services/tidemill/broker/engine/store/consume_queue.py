"""Consume queues: per queue, where in the commit log its messages lie.

The newest entries are in memory (the tail, at most what the log holds since the last checkpoint);
older ones are in the blocks of `queues/` files, one file a checkpoint with a block a queue. So one
sync makes the entries of any number of queues durable, and memory does not grow with the backlog.
Derived: the log is the truth and rebuilds every entry.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple, final

from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, QueueOffset, TopicId
from tidemill.broker.engine.layout.queue_entry import ENTRY, SIZE
from tidemill.broker.engine.store.block_file import BlockFile


class Run(NamedTuple):
    """A stretch of a queue's entries in a derived file."""

    file: BlockFile
    block: int
    first: int
    entry_count: int


@final
class ConsumeQueue:
    """The entries of one queue, from `min_offset` to `max_offset`."""

    __slots__ = (
        "_firsts", "_runs", "base", "max_offset", "min_offset", "queue_id", "stated_at", "tail",
        "topic_id",
    )  # fmt: skip

    def __init__(self, topic_id: TopicId, queue_id: QueueId) -> None:
        self.topic_id = topic_id
        self.queue_id = queue_id
        self._runs: list[Run] = []
        self._firsts: list[int] = []
        self.tail = bytearray()
        self.base = 0  # queue offset of the first entry in the tail
        self.min_offset = QueueOffset(0)
        self.max_offset = QueueOffset(0)  # offset that the next message gets
        self.stated_at = 0  # log offset of the newest record that says what max_offset is

    def append(self, log_offset: LogOffset, size: int, tag_hash: int) -> None:
        """Add the entry of the message at `max_offset`."""
        self.tail += ENTRY.pack(log_offset, size, tag_hash)
        # Every message passes here, and a call to name the number costs as much as a field.
        self.max_offset += 1  # type: ignore[assignment]  # The next queue offset.
        self.stated_at = log_offset

    def restart_at(self, offset: QueueOffset, log_offset: LogOffset) -> None:
        """Make the queue go on at `offset`: what was before is gone from the log."""
        if offset > self.max_offset:
            self.tail.clear()
            self.base = self.min_offset = self.max_offset = offset
        self.stated_at = max(self.stated_at, log_offset)

    def entries(self, offset: int, count: int) -> list[tuple[LogOffset, int, int]]:
        """Return `count` entries (log_offset, size, tag_hash) from `offset`, or all there are.

        `offset` must lie between min_offset and max_offset. Raises BlockFileDamaged.
        """
        assert self.min_offset <= offset < self.max_offset, "offset outside of the queue"
        found: list[tuple[LogOffset, int, int]] = []
        while offset < self.base and count > 0:
            run = self._runs[bisect_right(self._firsts, offset) - 1]
            begin = (offset - run.first) * SIZE
            data = run.file.block(run.block, run.entry_count * SIZE)
            part = list(ENTRY.iter_unpack(data[begin : begin + count * SIZE]))
            found += part
            offset += len(part)
            count -= len(part)
        begin = (offset - self.base) * SIZE
        found += ENTRY.iter_unpack(memoryview(self.tail)[begin : begin + count * SIZE])
        return found

    def entry(self, offset: int) -> tuple[LogOffset, int, int]:
        """Return the entry at `offset`, which must lie inside the queue. Raises as `entries`."""
        if offset >= self.base:
            return ENTRY.unpack_from(self.tail, (offset - self.base) * SIZE)
        return self.entries(offset, 1)[0]

    def check_entry(self, offset: int) -> None:
        """Verify again what the entry at `offset` is read from. Raises BlockFileDamaged."""
        if self.min_offset <= offset < self.base:
            run = self._runs[bisect_right(self._firsts, offset) - 1]
            run.file.check_block(run.block, run.entry_count * SIZE)

    def walk(self, offset: int) -> Iterator[tuple[LogOffset, int, int]]:
        """Yield all entries from `offset` on."""
        while offset < self.max_offset:
            entries = self.entries(offset, 4096)
            yield from entries
            offset += len(entries)

    def tail_count_before(self, log_offset: LogOffset) -> int:
        """Count the entries in the tail of messages before a log offset."""
        tail, count = self.tail, len(self.tail) // SIZE
        if not count or ENTRY.unpack_from(tail, (count - 1) * SIZE)[0] < log_offset:
            return count

        def at(n: int) -> int:
            return int(ENTRY.unpack_from(tail, n * SIZE)[0])

        return bisect_left(range(count), int(log_offset), key=at)

    def add_run(self, run: Run) -> None:
        """Take entries of a derived file over; those in the tail that it states are given up."""
        end = run.first + run.entry_count
        if self._runs and self._runs[-1].first + self._runs[-1].entry_count != run.first:
            # The queue went on at a later offset after retention: older runs are below it.
            self._runs.clear()
            self._firsts.clear()
            self.min_offset = QueueOffset(run.first)
        if not self._runs:
            self.min_offset = QueueOffset(max(self.min_offset, run.first))
        self._runs.append(run)
        self._firsts.append(run.first)
        del self.tail[: max(end - self.base, 0) * SIZE]
        self.base = max(self.base, end)
        self.max_offset = QueueOffset(max(self.max_offset, end))

    def replace_run(self, first: int, old: BlockFile, new: BlockFile) -> None:
        """Answer from `new` what a block of `old` answered, if it is still asked."""
        at = bisect_right(self._firsts, first) - 1
        if at >= 0 and self._runs[at].file is old:
            self._runs[at] = self._runs[at]._replace(file=new)

    def drop_before(self, log_offset: LogOffset) -> int:
        """Give up entries of messages before `log_offset`; return how many those were.

        Raises BlockFileDamaged, and changes nothing then.
        """
        low, high = int(self.min_offset), int(self.max_offset)
        while low < high:
            middle = (low + high) // 2
            if self.entry(middle)[0] < log_offset:
                low = middle + 1
            else:
                high = middle
        dropped, self.min_offset = low - self.min_offset, QueueOffset(low)
        while self._runs and self._runs[0].first + self._runs[0].entry_count <= low:
            del self._runs[0], self._firsts[0]
        return dropped

    def offset_at(self, stored_at_ms: int, stored_at: Callable[[LogOffset], int]) -> int:
        """Return the first offset whose message was stored at or after a time, else max_offset.

        Raises as `entries`.
        """
        low, high = int(self.min_offset), int(self.max_offset)
        while low < high:
            middle = (low + high) // 2
            if stored_at(self.entry(middle)[0]) < stored_at_ms:
                low = middle + 1
            else:
                high = middle
        return low
