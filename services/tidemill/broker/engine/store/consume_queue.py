"""Consume queues: for each queue, the positions of its messages in the commit log.

The newest entries are in memory: the tail, at most the messages since the last checkpoint. Older
entries are in blocks of `queues/` files. A checkpoint writes one file with a block per queue, and
`engine.merge` merges files later. Therefore one sync makes the entries of any number of queues
durable, and memory does not grow with the backlog. The queues are derived: the broker rebuilds
every entry from the log.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from typing import NamedTuple, TypeAlias, final

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, QueueOffset, TopicId
from tidemill.broker.engine.layout.queue_entry import ENTRY, SIZE
from tidemill.broker.engine.store.block_file import BlockFile

# The position of a message in the log, its size there, and the hash of its tag.
QueueEntry: TypeAlias = tuple[LogOffset, int, int]


class QueueRun(NamedTuple):
    """Consecutive entries of a queue in a block of a derived file."""

    file: BlockFile
    block: int
    first: int
    entry_count: int


@final
class ConsumeQueue:
    """The entries of one queue, from `min_offset` to `max_offset`.

    Entries before `base` are in runs without a gap: each run begins where the previous one ends.
    The runs are three parallel lists, because a store may have millions.
    """

    __slots__ = (
        "_blocks",
        "_files",
        "_firsts",
        "base",
        "low",
        "max_offset",
        "min_offset",
        "queue_id",
        "stated_at",
        "tail",
        "topic_id",
        "trimmed_at",
    )

    def __init__(self, topic_id: TopicId, queue_id: QueueId) -> None:
        self.topic_id = topic_id
        self.queue_id = queue_id
        self._firsts = array("q")
        self._files: list[BlockFile] = []
        self._blocks = array("I")
        self.tail = bytearray()
        self.base = 0  # queue offset of the first entry in the tail
        self.min_offset = QueueOffset(0)
        self.low = QueueOffset(0)  # TRIM records: earlier messages are dead, although stored
        self.max_offset = QueueOffset(0)  # offset of the next message
        self.stated_at = 0  # log offset of the newest record that states max_offset
        self.trimmed_at = 0  # log offset of the TRIM record that states low; 0: unknown

    def append(self, log_offset: LogOffset, size: int, tag_hash: int) -> None:
        """Add the entry of the message at `max_offset`."""
        self.tail += ENTRY.pack(log_offset, size, tag_hash)
        # Every message passes here, and a call of `QueueOffset` costs as much as a field.
        self.max_offset += 1  # type: ignore[assignment]  # The next queue offset.
        self.stated_at = log_offset

    def restart_at(self, offset: QueueOffset, log_offset: LogOffset) -> None:
        """Continue the queue at `offset`: the log has no earlier entries any longer."""
        if offset > self.max_offset:
            self._drop_runs(len(self._firsts))
            self.tail.clear()
            self.base = self.min_offset = self.max_offset = offset
        self.stated_at = max(self.stated_at, log_offset)

    def entries(self, offset: int, count: int) -> list[QueueEntry]:
        """Return up to `count` entries from `offset`.

        `offset` must lie between min_offset and max_offset. Raises BlockFileDamaged.
        """
        assert self.min_offset <= offset < self.max_offset, "offset outside of the queue"
        if offset >= self.base:
            begin = (offset - self.base) * SIZE
            tail = memoryview(self.tail)[begin : begin + count * SIZE]
            return list(ENTRY.iter_unpack(tail))
        part: memoryview | bytes = self._in_one_run(offset, count)
        if len(part) < count * SIZE:
            part = self.data(offset, count)
        return list(ENTRY.iter_unpack(part))

    def data(self, offset: int, count: int, *, recheck: bool = False) -> bytes:
        """Return the bytes of up to `count` entries from `offset`.

        With `recheck`, verify blocks that were verified before. Raises BlockFileDamaged.
        """
        parts: list[memoryview | bytearray] = []
        while offset < self.base and count > 0:
            part = self._in_one_run(offset, count, recheck=recheck)
            parts.append(part)
            offset += len(part) // SIZE
            count -= len(part) // SIZE
        begin = (offset - self.base) * SIZE
        parts.append(self.tail[begin : begin + count * SIZE])
        return b"".join(parts)

    def _in_one_run(self, offset: int, count: int, *, recheck: bool = False) -> memoryview:
        """Return the bytes of up to `count` entries, at most to the end of the run of `offset`."""
        # Without `_run`, for speed: every message of a backlog passes here.
        firsts = self._firsts
        number = bisect_right(firsts, offset)
        end = firsts[number] if number < len(firsts) else self.base
        number -= 1
        first, file = firsts[number], self._files[number]
        read = file.check_block if recheck else file.block
        begin = (offset - first) * SIZE
        return read(self._blocks[number], (end - first) * SIZE)[begin : begin + count * SIZE]

    def _run_of(self, offset: int) -> QueueRun:
        return self._run(bisect_right(self._firsts, offset) - 1)

    def _run(self, number: int) -> QueueRun:
        firsts = self._firsts
        end = firsts[number + 1] if number + 1 < len(firsts) else self.base
        first = firsts[number]
        return QueueRun(self._files[number], self._blocks[number], first, end - first)

    def entry(self, offset: int) -> tuple[LogOffset, int, int]:
        """Return the entry at `offset`, before the end of the queue.

        Raises LookupError if retention has removed it, and as `entries`.
        """
        if offset >= self.base:
            return ENTRY.unpack_from(self.tail, (offset - self.base) * SIZE)
        if offset < self.min_offset:
            raise LookupError(f"retention has removed the entry at offset {offset}")
        return self.entries(offset, 1)[0]

    def check_entry(self, offset: int) -> None:
        """Verify the block of the entry at `offset` again. Raises BlockFileDamaged."""
        if self.min_offset <= offset < self.base:
            run = self._run_of(offset)
            run.file.check_block(run.block, run.entry_count * SIZE)

    def walk(self, offset: int) -> Iterator[tuple[LogOffset, int, int]]:
        """Yield all entries from `offset` on."""
        while offset < self.max_offset:
            entries = self.entries(offset, 4096)
            yield from entries
            offset += len(entries)

    def tail_count_before(self, log_offset: int) -> int:
        """Count the tail entries of messages before a log offset."""
        return _count_before(self.tail, len(self.tail) // SIZE, log_offset)

    def add_run(self, run: QueueRun) -> None:
        """Add the entries of a derived file, and remove them from the tail."""
        if self._firsts and self.base != run.first:
            # After retention the queue continued at a later offset. Older runs are before it.
            self._drop_runs(len(self._firsts))
            self.min_offset = QueueOffset(run.first)
        if not self._firsts:
            self.min_offset = QueueOffset(max(self.min_offset, run.first))
        self._firsts.append(run.first)
        self._files.append(run.file)
        self._blocks.append(run.block)
        end = run.first + run.entry_count
        del self.tail[: max(end - self.base, 0) * SIZE]
        self.base = max(self.base, end)
        self.max_offset = QueueOffset(max(self.max_offset, end))

    def is_in(self, files: Collection[BlockFile]) -> bool:
        """Whether all files of the queue are among `files`: those that are not deleted."""
        return all(file in files for file in self._files)

    def runs_between(self, from_offset: int, to_offset: int) -> range:
        """Return the numbers of the runs in files between two log offsets."""
        begin = bisect_left(self._files, from_offset, key=lambda file: file.from_offset)
        end = bisect_right(self._files, to_offset, key=lambda file: file.to_offset)
        return range(begin, max(begin, end))

    def entries_in(self, numbers: range) -> range:
        """Return the queue offsets of the entries in consecutive runs."""
        if not numbers:
            return range(0)
        last = self._run(numbers[-1])
        return range(self._firsts[numbers[0]], last.first + last.entry_count)

    def replace_runs(self, numbers: range, runs: list[QueueRun]) -> None:
        """Replace runs by other runs with the same entries, or without the first ones.

        In the second case these entries are dead. So are all earlier runs, and they are dropped.
        """
        if not numbers:
            return  # The queue began again later, and dropped the runs.
        is_whole = bool(runs) and runs[0].first == self._firsts[numbers.start]
        at = slice(numbers.start if is_whole else 0, numbers.stop)
        self._firsts[at] = array("q", [run.first for run in runs])
        self._files[at] = [run.file for run in runs]
        self._blocks[at] = array("I", [run.block for run in runs])

    def drop_before(self, log_offset: LogOffset) -> None:
        """Drop the entries of messages before `log_offset`.

        Raise BlockFileDamaged, without a change, if a block is damaged.
        """
        self._begin_at(self.offset_behind(log_offset))

    def drop_known_before(self, log_offset: LogOffset) -> None:
        """Drop the entries that intact blocks assign to messages before `log_offset`.

        The queue then begins exactly there, or with a damaged block that hides the position.
        """
        first = bisect_right(self._files, int(log_offset), key=lambda file: file.to_offset)
        known = self._firsts[first] if first < len(self._firsts) else self.base
        for number in range(first, len(self._firsts)):
            run = self._run(number)
            try:
                data = run.file.check_block(run.block, run.entry_count * SIZE)
            except BlockFileDamaged:
                continue
            count = _count_before(data, run.entry_count, log_offset)
            if count:
                known = run.first + count
            if known < run.first + run.entry_count:
                break
        self._begin_at(max(known, self.min_offset))

    def begin_behind(self, offset: QueueOffset) -> None:
        """Drop the entries before `offset`. The log has none of their messages."""
        self._begin_at(max(offset, self.min_offset))

    def trim(self, low: QueueOffset, log_offset: int = 0) -> None:
        """Let the queue begin at `low`, by a record at `log_offset`: earlier messages are dead.

        The runs of the dead messages stay until a merge drops them: it may be reading them, and
        their bytes are not counted yet. In a replay, `low` may lie behind the end of a queue whose
        messages the log has dropped.
        """
        if low < self.low:
            return
        self.trimmed_at = max(self.trimmed_at, log_offset)
        if low == self.low:
            return
        self.low = low
        if low > self.max_offset:
            self.restart_at(low, LogOffset(0))
        self.min_offset = max(self.min_offset, low)

    def _begin_at(self, offset: int) -> None:
        """Drop the entries before `offset`."""
        self.min_offset = QueueOffset(offset)
        passed = bisect_right(self._firsts, offset) - 1  # the run of `offset`, or the last one
        is_all = offset >= self.base
        self._drop_runs(len(self._firsts) if is_all else max(passed, 0))

    def offset_behind(self, log_offset: int) -> int:
        """Return the first queue offset with a message at or after a log offset.

        Raises BlockFileDamaged.
        """
        return max(self._find_behind(log_offset), self.min_offset)

    def _find_behind(self, log_offset: int) -> int:
        begin = bisect_right(self._files, log_offset, key=lambda file: file.to_offset)
        for number in range(begin, len(self._files)):
            run = self._run(number)
            if run.file.from_offset >= log_offset:
                return run.first
            # A wrong entry would mislead the search, and no record contradicts it.
            data = run.file.check_block(run.block, run.entry_count * SIZE)
            count = _count_before(data, run.entry_count, log_offset)
            if count < run.entry_count:
                return run.first + count
        return self.base + self.tail_count_before(log_offset)

    def _drop_runs(self, count: int) -> None:
        """Drop the oldest runs."""
        del self._firsts[:count], self._files[:count], self._blocks[:count]


def _count_before(data: bytearray | memoryview, count: int, log_offset: int) -> int:
    """Count those of `count` entries that belong to messages before a log offset."""

    def at(n: int) -> int:
        return int(ENTRY.unpack_from(data, n * SIZE)[0])

    if not count or at(count - 1) < log_offset:
        return count
    return bisect_left(range(count), log_offset, key=at)
