"""Repair: a queue or index file in which damage was met is derived from the log again.

Whoever meets a damaged block finds nothing there for the moment, and the file is noted. A job in
the background reads the stretch of the log that the file states, writes the file again under its
name, and lets the queues, or the index, answer from the new one. Of a queue file, blocks that are
intact are kept as they are: they may say more than the log, if that has rotted too.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import final

import numpy as np

from tidemill.broker.engine.layout import block_file, message
from tidemill.broker.engine.layout.block_file import BlockFileDamaged, DirectoryRow
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, QueueOffset, TopicId
from tidemill.broker.engine.layout.queue_entry import ENTRY, SIZE
from tidemill.broker.engine.layout.record import HEADER_SIZE, RecordKind
from tidemill.broker.engine.room import COPY_RESERVE_PART
from tidemill.broker.engine.store.block_file import (
    BlockFile,
    EncodedBlock,
    InsufficientSpace,
    write_block_file,
)
from tidemill.broker.engine.store.message_index import PAIR_SIZE, MessageIndex
from tidemill.broker.engine.store.segment import Hole, Record
from tidemill.broker.engine.upkeep.checkpoint import INDEX_FOLDER, QUEUES_FOLDER, Checkpoints
from tidemill.broker.engine.upkeep.parts import Steps, UpkeepParts
from tidemill.message import stored_message

RECORDS_A_SLICE = 256  # under a millisecond: heads are summed, bodies are not
READ_AHEAD_BYTES = 2 << 20  # of the log, asked for before it is read
PLACES_A_SLICE = 2048  # rows of a file, or groups in queues: looked at, and mostly passed over
NOTICES_MAX = 100  # files between two looks
_TAG_HASH = struct.Struct(">q")
_ENTRIES = np.dtype([("log_offset", ">i8"), ("size", ">u4"), ("tag_hash", ">i8")])
assert _ENTRIES.itemsize == SIZE, "an array of entries is what their layout says"


class _LogAwaited(Exception):
    """What the log says is damaged, and another replica may have it."""


@final
class Rebuilds:
    """The files that were found damaged, and deriving them again."""

    def __init__(
        self, parts: UpkeepParts, checkpoints: Checkpoints, *, ended: Callable[[], None]
    ) -> None:
        """Call `ended` when a queue or index file is whole again, or was deleted."""
        self._folders = {
            QUEUES_FOLDER: checkpoints.queues_folder,
            INDEX_FOLDER: checkpoints.index_folder,
        }
        self._mappings = parts.mappings
        self._room = parts.room
        self._tally = parts.tally
        self._store = parts.store
        self._damaged = parts.store.damaged_files
        self._catalog = parts.catalog
        self._pops = parts.pops
        self._ended = ended
        self._notices: list[str] = []
        self.counts: Counter[str] = Counter({QUEUES_FOLDER: 0, INDEX_FOLDER: 0})

    def _has_room(self, size: int) -> bool:
        # It may use a part of the reserve: the acks that make room may depend on a rebuild.
        return self._room.has_room(size, reserve_part=COPY_RESERVE_PART)

    @property
    def is_due(self) -> bool:
        """Whether a file was found damaged, is still so, and there is room for it once more.

        What is damaged in the log too is mended first.
        """
        return not self._store.log.damage.has_requests and self._find() is not None

    def _find(self) -> BlockFile | None:
        files = self._damaged.values()
        return next((file for file in files if self._has_room(file.size_bytes)), None)

    def take_notices(self) -> list[str]:
        """Return and clear the names of the files that were derived again, for the shell's log."""
        notices, self._notices = self._notices, []
        return notices

    def rebuild(self) -> Steps:
        """Derive the next damaged file again."""
        file = self._find()
        if file is None:
            return
        name, folder = file.name, file.name.rpartition("/")[0]
        try:
            if name in self._folders[folder].names:  # else retention was faster
                if file.magic == block_file.INDEX_MAGIC:
                    yield from self._repair_index(file)
                else:
                    yield from self._repair_queues(file)
                self.counts[folder] += 1
                if len(self._notices) < NOTICES_MAX:
                    self._notices.append(name)
        except _LogAwaited:
            return  # The file stays noted, and what is held for it stays so.
        except (BlockFileDamaged, InsufficientSpace):
            pass  # Whoever meets the damage notes it again.
        self._end(name)

    def _end(self, name: str) -> None:
        self._damaged.pop(name, None)
        self._ended()  # Whatever came of it: nothing is held for the file any more.

    # ------------------------------------------------------------ queue files

    def _repair_queues(self, file: BlockFile) -> Steps:
        """Write a file again; its queues read by its name, and so find what is written."""
        damaged = _DamagedRows(file)
        begin, end = file.to_offset, file.from_offset
        for number, row in enumerate(file.rows()):
            if damaged.check(number, row):
                low, high = self._neighbours(file, row)
                begin, end = min(begin, low), max(end, high)
            yield []
        for n, found in enumerate(self._walk(begin, end), 1):
            damaged.take(found)
            if n % RECORDS_A_SLICE == 0:
                yield []
        for number in damaged.contents:
            damaged.finish(number)
            self._give_up(damaged, number)
            yield []
        yield from self._replace(
            file,
            QUEUES_FOLDER,
            (
                EncodedBlock(*row[:4], damaged.content(number, row))
                for number, row in enumerate(file.rows())
            ),
            block_count_max=file.row_count,
            on_placed=file.adopt,
        )
        yield from self._wake(damaged.queues)

    def _give_up(self, damaged: _DamagedRows, number: int) -> None:
        """Let a queue begin behind what retention has taken of a block that is derived again.

        A start has met the damage where it looked for that. Before the file is whole, a block a
        slice, so that nobody ever takes what is below for messages.
        """
        low = self._store.log.min_offset
        topic_id, queue_id = damaged.key(number)
        queue = self._catalog.queues.get((TopicId(topic_id), QueueId(queue_id)))
        offset, count = damaged.before(number, low)
        if queue is not None and count:
            queue.begin_behind(QueueOffset(offset + count))

    def _neighbours(self, file: BlockFile, row: DirectoryRow) -> tuple[int, int]:
        """Return between which log offsets the messages of a row stand, as far as can be said."""
        low, high = file.from_offset, file.to_offset
        queue = self._catalog.queues.get((TopicId(row.key_1), QueueId(row.key_2)))
        if queue is None or row.first + row.items <= queue.min_offset:
            return high, low  # Nobody reads it any more.
        with suppress(BlockFileDamaged):
            if queue.min_offset < row.first:
                # Not what somebody has verified once: it may have rotted too.
                queue.check_entry(row.first - 1)
                low = max(low, queue.entry(row.first - 1)[0])
        with suppress(BlockFileDamaged):
            if row.first + row.items < queue.max_offset:
                queue.check_entry(row.first + row.items)
                high = min(high, queue.entry(row.first + row.items)[0])
        return low, high

    def _walk(self, begin: int, end: int) -> Iterator[Record | Hole]:
        """Yield what stands in a stretch of the log, which has mostly left the kernel's cache."""
        log = self._store.log
        if begin < min(log.min_offset, end):
            yield Hole(LogOffset(begin), log.min_offset)
        asked_to = 0
        for found in log.walk_between(begin, end):
            if isinstance(found, Hole) and log.damage.request(found.log_offset, found.end):
                raise _LogAwaited
            if found.log_offset >= asked_to:
                log.advise(LogOffset(found.log_offset), READ_AHEAD_BYTES)
                asked_to = found.log_offset + READ_AHEAD_BYTES
            yield found

    def _wake(self, queues: set[tuple[int, int]]) -> Steps:
        """Let those pop again who found nothing in these queues."""
        for n, progress in enumerate(list(self._pops.progress.values())):
            if (progress.topic_id, progress.queue.queue_id) in queues:
                self._pops.ready.add((progress.group_id, progress.named_topic_id))
            if n % PLACES_A_SLICE == 0:
                yield []
        self._pops.ready_topics.update(TopicId(topic_id) for topic_id, _ in queues)

    # ------------------------------------------------------------ index files

    def _repair_index(self, file: BlockFile) -> Steps:
        """Write a file again; the log is asked for the pairs of damaged blocks alone."""
        index = self._store.index
        derived: dict[int, MessageIndex] = {}  # by the first block of a stretch
        stretches = _DamagedStretches(file)
        for _ in stretches.find():
            yield []
        for blocks, neighbours in stretches.found:
            again = derived[blocks.start] = MessageIndex(self._tally)
            for n, found in enumerate(self._walk(neighbours.begin, neighbours.end), 1):
                if isinstance(found, Record) and found.header.kind == RecordKind.MESSAGE:
                    hashes = neighbours.unknown(found.log_offset, _key_hashes(found.tail))
                    again.add(hashes, LogOffset(found.log_offset))
                if n % RECORDS_A_SLICE == 0:
                    yield []
        damaged = {number for blocks, _ in stretches.found for number in blocks}

        def contents() -> Iterator[EncodedBlock]:
            for number, row in enumerate(file.rows()):
                if number in derived:
                    yield from derived[number].blocks(len(derived[number].offsets))
                if number not in damaged:
                    yield EncodedBlock(
                        *row[:4], bytes(file.check_block(number, row.items * PAIR_SIZE))
                    )

        def place(new: BlockFile) -> None:
            index.files = [new if one is file else one for one in index.files]

        yield from self._replace(
            file, INDEX_FOLDER, contents(), block_count_max=file.row_count, on_placed=place
        )

    def _replace(
        self,
        file: BlockFile,
        folder: str,
        blocks: Iterator[EncodedBlock],
        *,
        block_count_max: int,
        on_placed: Callable[[BlockFile], None],
    ) -> Steps:
        yield from write_block_file(
            self._folders[folder],
            self._mappings,
            file.magic,
            self._one_by_one(blocks),
            self._tally,
            self._damaged,
            block_count_max=block_count_max,
            from_offset=file.from_offset,
            to_offset=file.to_offset,
            on_placed=on_placed,
        )

    def _one_by_one(self, blocks: Iterator[EncodedBlock]) -> Iterator[list[EncodedBlock]]:
        for block in blocks:
            if not self._has_room(len(block.data)):
                raise InsufficientSpace
            yield [block]


class _Neighbours:
    """What intact blocks of an index file say of those between them.

    The blocks of a file follow each other as the records do; of the first and the last record the
    neighbours may have some keys already.
    """

    def __init__(self, file: BlockFile) -> None:
        self.begin = file.from_offset
        self.end = file.to_offset
        self._known: dict[int, set[bytes]] = defaultdict(set)

    def begin_behind(self, data: memoryview) -> None:
        offsets = _offsets(data)
        self.begin = int(offsets.max())
        self._note(data, offsets, self.begin)

    def end_before(self, data: memoryview) -> None:
        offsets = _offsets(data)
        first = int(offsets.min())
        self.end = first + HEADER_SIZE  # its record included
        self._note(data, offsets, first)

    def _note(self, data: memoryview, offsets: np.ndarray, log_offset: int) -> None:
        for at in np.flatnonzero(offsets == log_offset).tolist():
            self._known[log_offset].add(bytes(data[at * 8 : at * 8 + 8]))

    def unknown(self, log_offset: int, hashes: memoryview) -> bytes:
        """Return those of a record's hashes that no neighbour has."""
        known = self._known.get(log_offset, ())
        each = (bytes(hashes[at : at + 8]) for at in range(0, len(hashes), 8))
        return b"".join(one for one in each if one not in known)


class _DamagedStretches:
    """The stretches of damaged blocks of an index file."""

    def __init__(self, file: BlockFile) -> None:
        self._file = file
        self.found: list[tuple[range, _Neighbours]] = []

    def find(self) -> Iterator[None]:
        """Verify the blocks, one a step."""
        previous: memoryview | None = None  # the intact block before
        for number, row in enumerate(self._file.rows()):
            try:
                data = self._file.check_block(number, row.items * PAIR_SIZE)
            except BlockFileDamaged:
                self._add(number, previous)
            else:
                if self.found and self.found[-1][0].stop == number:
                    self.found[-1][1].end_before(data)
                previous = data
            yield

    def _add(self, number: int, previous: memoryview | None) -> None:
        if self.found and self.found[-1][0].stop == number:
            blocks, neighbours = self.found[-1]
            self.found[-1] = range(blocks.start, number + 1), neighbours
            return
        neighbours = _Neighbours(self._file)
        if previous is not None:
            neighbours.begin_behind(previous)
        self.found.append((range(number, number + 1), neighbours))


def _offsets(data: memoryview) -> np.ndarray:
    return np.frombuffer(data, ">i8", offset=len(data) // 2)


@final
class _DamagedRows:
    """The damaged blocks of a queue file, and what the log says of their entries."""

    def __init__(self, file: BlockFile) -> None:
        self._file = file
        self.contents: dict[int, bytearray] = {}  # by row; an entry of zeros is not known yet
        self.queues: set[tuple[int, int]] = set()
        self._rows: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._firsts: dict[int, int] = {}
        self._keys: dict[int, tuple[int, int]] = {}  # topic and queue
        self._holes: list[Hole] = []

    def check(self, number: int, row: DirectoryRow) -> bool:
        """Verify a block; note one that is damaged, and return whether it is."""
        try:
            self._file.check_block(number, row.items * SIZE)
        except BlockFileDamaged:
            self.contents[number] = bytearray(row.items * SIZE)
            self._firsts[number] = row.first
            self._keys[number] = row.key_1, row.key_2
            self._rows[row.key_1, row.key_2].append(number)
            self.queues.add((row.key_1, row.key_2))
            return True
        return False

    def key(self, number: int) -> tuple[int, int]:
        """Return the topic and the queue of a block."""
        return self._keys[number]

    def before(self, number: int, log_offset: int) -> tuple[int, int]:
        """Return a block's first queue offset, and how many of its messages are before a place."""
        entries = np.frombuffer(self.contents[number], dtype=_ENTRIES)
        count = np.searchsorted(entries["log_offset"].astype(np.int64), log_offset)
        return self._firsts[number], int(count)

    def content(self, number: int, row: DirectoryRow) -> bytes:
        """Return what is to be written: what was derived, or the intact block."""
        if number in self.contents:
            return bytes(self.contents[number])
        return bytes(self._file.check_block(number, row.items * SIZE))

    def take(self, found: Record | Hole) -> None:
        """Take in what stands next in the log."""
        if isinstance(found, Hole):
            self._holes.append(found)
            return
        if found.header.kind != RecordKind.MESSAGE:
            return
        place = message.MessagePosition._make(message.PLACE.unpack_from(found.body))
        for number in self._rows.get((place.topic_id, place.queue_id), ()):
            at = place.queue_offset - self._firsts[number]
            if 0 <= at * SIZE < len(self.contents[number]):
                (tag_hash,) = _TAG_HASH.unpack_from(found.tail, stored_message.TAG_HASH_AT)
                ENTRY.pack_into(
                    self.contents[number], at * SIZE, found.log_offset, found.header.size, tag_hash
                )

    def finish(self, number: int) -> None:
        """Complete a block: what the log no longer says lies where the log is damaged.

        So who reads it finds it damaged, and it is not passed over. Every entry has a size but
        those that nothing was found for.
        """
        entries = np.frombuffer(self.contents[number], dtype=_ENTRIES)
        missing = np.flatnonzero(entries["size"] == 0)
        if not len(missing):
            return
        ends = entries["log_offset"].astype(np.int64) + entries["size"]
        behind = np.maximum(np.maximum.accumulate(ends), self._file.from_offset)[missing]
        # The first hole that ends behind what came before; there is one, or the log says it all.
        holes = np.array([*self._holes, (self._file.from_offset,) * 2], dtype=np.int64)
        which = np.searchsorted(holes[:-1, 1], behind, side="right")
        begins, hole_ends = holes[which].T
        entries["log_offset"][missing] = begins
        entries["size"][missing] = hole_ends - begins


def _key_hashes(blob: memoryview) -> memoryview:
    (count,) = stored_message.KEY_COUNT.unpack_from(blob, stored_message.KEY_COUNT_AT)
    begin = stored_message.FIXED_SIZE
    return blob[begin : begin + count * stored_message.KEY_HASH_SIZE]
