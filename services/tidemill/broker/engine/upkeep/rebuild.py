"""Rebuild: a damaged queue or index file is derived from the log again, as are pack directories.

A reader that meets a damaged block notes the file and finds nothing there for now. A background job
reads the file's range of the log and writes the file again under its name. The queues or the index
then read the new file. Intact blocks are copied: if the log is damaged too, they contain more.

The derived directory of a pack is in memory until the pack is replaced. Its records state it.
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
from tidemill.broker.engine.layout.record import HEADER_SIZE, RecordKind, is_gap
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

RECORDS_A_SLICE = 256  # under a millisecond: checksums of heads are checked, of bodies not
READ_AHEAD_BYTES = 2 << 20  # of the log, requested from the kernel before the read
PLACES_A_SLICE = 2048  # progress of groups in queues; mostly skipped
NOTICES_MAX = 100  # file names between two calls of `take_notices`
_TAG_HASH = struct.Struct(">q")
_ENTRIES = np.dtype([("log_offset", ">i8"), ("size", ">u4"), ("tag_hash", ">i8")])
assert _ENTRIES.itemsize == SIZE, "the array of entries has the size of their layout"


class _PendingLogMend(Exception):
    """The log is damaged here too, and another replica may have the intact bytes."""


@final
class Rebuilds:
    """The damaged queue and index files, and the job that rebuilds them."""

    def __init__(
        self, parts: UpkeepParts, checkpoints: Checkpoints, *, ended: Callable[[], None]
    ) -> None:
        """Call `ended` when a queue or index file is intact again or deleted."""
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
        # A rebuild may use a part of the reserve: acks that free space may depend on it.
        return self._room.has_room(size, reserve_part=COPY_RESERVE_PART)

    @property
    def is_due(self) -> bool:
        """Whether a file is damaged and the disk has room for a second copy.

        Damage of the log is mended first.
        """
        if self.has_directory:
            return True
        return not self._store.log.damage.has_requests and self._find() is not None

    @property
    def has_directory(self) -> bool:
        """Whether the directory of a pack is damaged. Replicas derive it too: it takes no room."""
        return self._store.log.damage.next_directory is not None

    def _find(self) -> BlockFile | None:
        files = self._damaged.values()
        return next((file for file in files if self._has_room(file.size_bytes)), None)

    def take_notices(self) -> list[str]:
        """Return and clear the names of rebuilt files, for the shell's log."""
        notices, self._notices = self._notices, []
        return notices

    def rebuild(self) -> Steps:
        """Rebuild the next damaged file."""
        if self.has_directory:
            yield from self.derive_directory()
            return
        file = self._find()
        if file is None:
            return
        name, folder = file.name, file.name.rpartition("/")[0]
        try:
            if name in self._folders[folder].names:  # False if retention has dropped it
                if file.magic == block_file.INDEX_MAGIC:
                    yield from self._rebuild_index(file)
                else:
                    yield from self._rebuild_queues(file)
                self.counts[folder] += 1
                self._note(name)
        except _PendingLogMend:
            return  # The file stays noted, and deliveries that need it stay held.
        except (BlockFileDamaged, InsufficientSpace):
            pass  # The next reader notes the damage again.
        self._end(name)

    def derive_directory(self) -> Steps:
        """Derive the damaged directory of the next pack."""
        log = self._store.log
        begin = log.damage.next_directory
        if begin is None:
            return
        segment = next((one for one in log.segments if one.start == begin), None)
        if segment is not None and segment.pack is not None:
            name, pack = segment.name, segment.pack
            for _ in pack.derive(self._mappings, name):
                yield []
                if segment.pack is not pack or log.min_offset > begin:
                    break  # It is packed again, or removed.
            else:
                self._note(name)
        log.damage.end_directory(begin)
        self._ended()

    def _note(self, name: str) -> None:
        if len(self._notices) < NOTICES_MAX:
            self._notices.append(name)

    def _end(self, name: str) -> None:
        self._damaged.pop(name, None)
        self._ended()  # Also after a failure: no delivery is held for the file any longer.

    # ------------------------------------------------------------ queue files

    def _rebuild_queues(self, file: BlockFile) -> Steps:
        """Write a queue file again. Its queues read by name, and so use the new file."""
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
        """Let a queue begin after the part of a rebuilt block that retention has dropped.

        At the start, the damage hid the begin of the queue. This runs before the new file is in
        place, one block per slice, so that no reader takes dropped messages for stored ones.
        """
        low = self._store.log.min_offset
        topic_id, queue_id = damaged.key(number)
        queue = self._catalog.queues.get((TopicId(topic_id), QueueId(queue_id)))
        offset, count = damaged.before(number, low)
        if queue is not None and count:
            queue.begin_behind(QueueOffset(offset + count))

    def _neighbours(self, file: BlockFile, row: DirectoryRow) -> tuple[int, int]:
        """Return the range of log offsets of a row's messages, as narrow as it is known."""
        low, high = file.from_offset, file.to_offset
        queue = self._catalog.queues.get((TopicId(row.key_1), QueueId(row.key_2)))
        if queue is None or row.first + row.items <= queue.min_offset:
            return high, low  # An empty range: the block has only dropped messages.
        with suppress(BlockFileDamaged):
            if queue.min_offset < row.first:
                # Verify the neighbour now: an earlier check does not show later damage.
                queue.check_entry(row.first - 1)
                low = max(low, queue.entry(row.first - 1)[0])
        with suppress(BlockFileDamaged):
            if row.first + row.items < queue.max_offset:
                queue.check_entry(row.first + row.items)
                high = min(high, queue.entry(row.first + row.items)[0])
        return low, high

    def _walk(self, begin: int, end: int) -> Iterator[Record | Hole]:
        """Yield the records and holes in a range of the log, which is mostly not cached."""
        log = self._store.log
        if begin < min(log.min_offset, end):
            yield Hole(LogOffset(begin), log.min_offset)
        asked_to = 0
        for found in log.walk_between(begin, end):
            if isinstance(found, Hole) and log.damage.request(found.log_offset, found.end):
                raise _PendingLogMend
            if found.log_offset >= asked_to:
                log.advise(LogOffset(found.log_offset), READ_AHEAD_BYTES)
                asked_to = found.log_offset + READ_AHEAD_BYTES
            yield found

    def _wake(self, queues: set[tuple[int, int]]) -> Steps:
        """Let groups pop again that found nothing in these queues."""
        for n, progress in enumerate(list(self._pops.progress.values())):
            if (progress.topic_id, progress.queue.queue_id) in queues:
                self._pops.ready.add((progress.group_id, progress.named_topic_id))
            if n % PLACES_A_SLICE == 0:
                yield []
        self._pops.ready_topics.update(TopicId(topic_id) for topic_id, _ in queues)

    # ------------------------------------------------------------ index files

    def _rebuild_index(self, file: BlockFile) -> Steps:
        """Write an index file again; only the pairs of damaged blocks are read from the log."""
        index = self._store.index
        derived: dict[int, MessageIndex] = {}  # by the first block of a range
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
    """The range of the log between two intact blocks of an index file.

    The blocks have the order of the records. The intact blocks may contain some keys of the first
    and the last record of the range.
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
        """Return the hashes of a record that no intact neighbour contains."""
        known = self._known.get(log_offset, ())
        each = (bytes(hashes[at : at + 8]) for at in range(0, len(hashes), 8))
        return b"".join(one for one in each if one not in known)


class _DamagedStretches:
    """The ranges of damaged blocks in an index file."""

    def __init__(self, file: BlockFile) -> None:
        self._file = file
        self.found: list[tuple[range, _Neighbours]] = []

    def find(self) -> Iterator[None]:
        """Verify the blocks, one per step."""
        previous: memoryview | None = None  # the previous intact block
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
    """The damaged blocks of a queue file, with their entries as derived from the log."""

    def __init__(self, file: BlockFile) -> None:
        self._file = file
        self.contents: dict[int, bytearray] = {}  # by row; an entry of zeros is unknown
        self.queues: set[tuple[int, int]] = set()
        self._rows: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._firsts: dict[int, int] = {}
        self._keys: dict[int, tuple[int, int]] = {}  # topic and queue
        self._holes: list[Hole] = []

    def check(self, number: int, row: DirectoryRow) -> bool:
        """Verify a block; note it and return True if it is damaged."""
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
        """Return a block's first queue offset, and its number of messages before `log_offset`."""
        entries = np.frombuffer(self.contents[number], dtype=_ENTRIES)
        count = np.searchsorted(entries["log_offset"].astype(np.int64), log_offset)
        return self._firsts[number], int(count)

    def content(self, number: int, row: DirectoryRow) -> bytes:
        """Return the derived block if the old one is damaged, else the intact block."""
        if number in self.contents:
            return bytes(self.contents[number])
        return bytes(self._file.check_block(number, row.items * SIZE))

    def take(self, found: Record | Hole) -> None:
        """Add the next record or hole of the log."""
        if isinstance(found, Record) and is_gap(found.header):
            # Entries of the dead messages that were there.
            found = Hole(found.header.log_offset, LogOffset(found.log_offset + found.header.size))
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
        """Complete a block: entries without a record point to a hole of the log.

        A reader then finds a damaged message instead of skipping it. Only such entries have the
        size 0 before.
        """
        entries = np.frombuffer(self.contents[number], dtype=_ENTRIES)
        missing = np.flatnonzero(entries["size"] == 0)
        if not len(missing):
            return
        ends = entries["log_offset"].astype(np.int64) + entries["size"]
        behind = np.maximum(np.maximum.accumulate(ends), self._file.from_offset)[missing]
        # The first hole that ends after the previous entry. One exists if an entry is missing.
        holes = np.array([*self._holes, (self._file.from_offset,) * 2], dtype=np.int64)
        which = np.searchsorted(holes[:-1, 1], behind, side="right")
        begins, hole_ends = holes[which].T
        entries["log_offset"][missing] = begins
        entries["size"][missing] = hole_ends - begins


def _key_hashes(blob: memoryview) -> memoryview:
    (count,) = stored_message.KEY_COUNT.unpack_from(blob, stored_message.KEY_COUNT_AT)
    begin = stored_message.FIXED_SIZE
    return blob[begin : begin + count * stored_message.KEY_HASH_SIZE]
