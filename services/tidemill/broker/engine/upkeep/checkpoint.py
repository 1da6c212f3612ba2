"""Checkpoints: a checkpoint makes all derived state durable, so that the next start is short.

A checkpoint is a generator of slices of at most about two milliseconds. The owner advances it
between rounds. A slice that reads state first waits until no round is pending. The state is then
the fold of exactly the durable log, so derived files and snapshots are never ahead of the log. On a
busy broker each wait costs a sync, so a slice then reads as much as it may.

The order of writes: queue files, index file, snapshot, checkpoint file with the new offsets. After
a crash before the last step, the next start deletes the new files (ADR 0003).

A failed write ends the process and every later start. A checkpoint therefore writes no file that
does not fit on the disk: it waits for room, or omits the snapshot. Without a new snapshot, the next
start uses the previous one or reads the whole log.

This is one module, because the order of the writes is one rule.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from itertools import chain, islice
from typing import Any, final

import numpy as np

from tidemill.broker.engine.dedup.tables import KeyTables
from tidemill.broker.engine.layout import (
    audit,
    block_file,
    delivery_rows,
    progress_rows,
    snapshot,
    store_checkpoint,
)
from tidemill.broker.engine.layout.audit import AuditRow
from tidemill.broker.engine.layout.floor import floor_item
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, TopicId
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_ORDERED
from tidemill.broker.engine.layout.queue_entry import SIZE
from tidemill.broker.engine.layout.snapshot import SLOTS_A_SLICE, SnapshotSection
from tidemill.broker.engine.layout.store_checkpoint import StoreCheckpoint
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.pop.progress import PopProgress
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.pop.stated_rows import delivery_rows_of, slot_ranges
from tidemill.broker.engine.room import DERIVED_RESERVE_PART
from tidemill.broker.engine.store import block_file as files
from tidemill.broker.engine.store.block_file import BlockFile, EncodedBlock
from tidemill.broker.engine.store.consume_queue import ConsumeQueue, QueueRun
from tidemill.broker.engine.store.disk import CachedFolder, DiskHasNoSpace, File, ReadFailed
from tidemill.broker.engine.store.message_index import BLOCK_PAIRS_MAX, PAIR_SIZE
from tidemill.broker.engine.transaction.table import TransactionTable
from tidemill.broker.engine.upkeep.parts import Steps, UpkeepParts

QUEUES_FOLDER = "queues"
INDEX_FOLDER = "index"
SNAPSHOTS_FOLDER = "snapshots"
CHECKPOINT_FILE = "checkpoint"
NEXT_CHECKPOINT_FILE = f"{CHECKPOINT_FILE}.new"
QUEUE_BLOCK_ENTRIES_MAX = 32_768  # 640 KiB: copied, summed and written in a millisecond
QUEUES_A_SLICE = 512  # queues measured, or given a run
BLOCKS_A_SLICE = 128  # blocks of different queues; each is copied, summed and listed
CATALOG_ITEMS_A_SECTION = 128  # a group's JSON takes up to ten microseconds
AUDIT_ROWS_A_SECTION = 128  # of at most 9 KiB each, mostly 500 bytes
SECURITY_BYTES_A_SECTION = 256 << 10  # of encoded items, which are only copied and summed
TRANSACTION_BYTES_AN_ITEM = 1 << 10  # copied and summed as fast as one item of another section
ENDS_A_SECTION = 1024
# Each ordered queue has its own section, which takes 20 microseconds.
PROGRESS_A_SECTION = 64
SNAPSHOTS_KEPT = 2
# Estimates for the first snapshot of a process. Later snapshots are about as large as the last.
PROGRESS_BYTES = 128
CATALOG_ITEM_BYTES = 512  # as JSON


@final
class _Extents:
    """The ends of the queues at the begin of a checkpoint."""

    def __init__(self) -> None:
        # The queues with entries in their tails, and the entry counts. With one tuple per queue the
        # garbage collector would run a full collection.
        self.queues: list[ConsumeQueue] = []
        self.counts = array("q")
        self.block_count = 0  # blocks of all tails
        # As `QueueEnd`, but plain tuples of numbers: the collector untracks them.
        self.ends: list[tuple[int, ...]] = []

    @property
    def size_bytes(self) -> int:
        """The size of the queue file."""
        directory = block_file.HEADER_SIZE + self.block_count * block_file.ROW_SIZE
        return directory + sum(self.counts) * SIZE

    def add(self, queue: ConsumeQueue, begin: LogOffset) -> None:
        """Add the end of a queue at the time when the log ended at `begin`."""
        count = queue.tail_count_before(begin)
        if count:
            self.queues.append(queue)
            self.counts.append(count)
            self.block_count += -(-count // QUEUE_BLOCK_ENTRIES_MAX)
        stated_at = queue.stated_at
        if stated_at >= begin:
            # The queue has newer messages. If its tail had no entry before `begin`, the record that
            # stated its end is unknown. Then the next retirement restates it.
            stated_at = queue.entry(queue.base + count - 1)[0] if count else 0
        end_offset = queue.base + count
        row = (queue.topic_id, queue.queue_id, end_offset, stated_at)
        # A TRIM record behind `begin` may name messages behind it; the replay reads that record.
        low = min(queue.low, end_offset)
        self.ends.append((*row, low) if low else row)


@final
class SnapshotSize:
    """The expected size of the next snapshot."""

    def __init__(
        self, catalog: Catalog, pops: PopState, transactions: TransactionTable, keys: KeyTables
    ) -> None:
        self._catalog = catalog
        self._keys = keys
        self._transactions = transactions
        self._pops = pops
        self.last_bytes = 0  # the size of the last snapshot of this process

    @property
    def size_bytes(self) -> int:
        """The expected size: an estimate from memory, and at least the size of the last one."""
        known = (
            self._pops.table.used_count * delivery_rows.ROW_SIZE
            + len(self._pops.progress) * PROGRESS_BYTES
            + self._catalog.item_count * CATALOG_ITEM_BYTES
            + self._catalog.security.size_bytes
            + self._catalog.audit.size_bytes
            + self._transactions.size_bytes
            + self._keys.size_bytes
            + self._catalog.settled_letters.size_bytes
        )
        return max(known, self.last_bytes)


@final
class Checkpoints:
    """Writer of checkpoints, with the conditions for the next one.

    It is one class, because the order of the writes is one rule.
    """

    def __init__(
        self,
        parts: UpkeepParts,
        snapshot_size: SnapshotSize,
        transactions: TransactionTable,
        keys: KeyTables,
    ) -> None:
        self._keys = keys
        self._transactions = transactions
        self._config = parts.config
        self._disk = parts.disk
        self._mappings = parts.mappings
        self._store = parts.store
        self._log = parts.store.log
        self._catalog = parts.catalog
        self._pops = parts.pops
        self._quiet = parts.quiet
        self._room = parts.room
        self._tally = parts.tally
        self.snapshot_size = snapshot_size
        self.queues_folder = CachedFolder(parts.disk, QUEUES_FOLDER)
        self.index_folder = CachedFolder(parts.disk, INDEX_FOLDER)
        self._snapshots_folder = CachedFolder(parts.disk, SNAPSHOTS_FOLDER)
        self._records_then = 0  # records of the log at the last checkpoint
        self._wanted_bytes = 0  # the size of a checkpoint that waits for room; 0: none waits
        self.is_without_snapshot = False  # the last checkpoint had no room for a snapshot
        self._requested_end = 0  # log offset that a requested checkpoint has to reach

    @property
    def may_begin(self) -> bool:
        """Whether the state is complete: a replica without a snapshot must catch up first."""
        return self._pops.catch_up is None

    @property
    def is_due(self) -> bool:
        """Whether one is requested or enough was logged since the last, and none waits for room."""
        log = self._log
        is_time = (
            log.committed_offset - self._store.derived_offset >= self._config.checkpoint_log_bytes
            or log.record_count - self._records_then >= self._config.checkpoint_records
        )
        return (is_time or self.is_requested) and not self.waits_for_room

    @property
    def is_requested(self) -> bool:
        """Whether a requested checkpoint is not written yet.

        One that had begun before the request does not reach far enough.
        """
        return self._store.derived_offset < self._requested_end

    def request(self) -> None:
        """Let the next job be a checkpoint, unless the disk is too full for one."""
        has_room = self._has_room(self._wanted_bytes)
        self._requested_end = self._log.committed_offset if has_room else 0

    @property
    def waits_for_room(self) -> bool:
        """Whether the last checkpoint had no room for derived files, and still has none."""
        return self._wanted_bytes > 0 and not self._has_room(self._wanted_bytes)

    def _has_room(self, size: int) -> bool:
        return self._room.has_room(size, reserve_part=DERIVED_RESERVE_PART)

    def write(self) -> Steps:
        """Make everything durable that is derived from the log so far."""
        yield from self._write()
        if self.waits_for_room:
            self._requested_end = 0

    def _write(self) -> Steps:
        yield from self._quiet()
        begin, derived = self._log.committed_offset, self._store.derived_offset
        record_count = self._log.record_count
        if begin == derived:
            self._records_then = record_count
            return
        queues = deque(self._catalog.queues.values())
        pair_count = len(self._store.index.offsets)

        extents = yield from self._find_extents(queues, begin)
        self._wanted_bytes = extents.size_bytes + _index_bytes(pair_count)
        if self.waits_for_room:
            return
        self._wanted_bytes = 0
        self._records_then = record_count
        yield from self._write_queues(extents, derived, begin)
        yield from self._write_index(pair_count, derived, begin)
        yield from self._write_snapshot(extents.ends, begin)
        yield from self.write_file(begin, min_offset=self._log.min_offset)
        self._store.derived_offset = begin
        snapshots = [name for name in self._snapshots_folder.names if name[-1].isdigit()]
        for name in snapshots[:-SNAPSHOTS_KEPT]:
            self._mappings.forget(name)
            yield from self._snapshots_folder.drop(name)

    def _find_extents(
        self, queues: deque[ConsumeQueue], begin: LogOffset
    ) -> Generator[list[File], None, _Extents]:
        """Return the ends of the queues when the log ended at `begin`; queues grow meanwhile."""
        extents = _Extents()
        # `popleft` frees the container with its items. To free it at once would be a long slice.
        while queues:
            count = min(QUEUES_A_SLICE, len(queues))
            for _ in range(count):
                extents.add(queues.popleft(), begin)
            self._tally.add(count)
            yield []
        return extents

    def _write_queues(self, extents: _Extents, derived: int, begin: int) -> Steps:
        file = yield from files.write_block_file(
            self.queues_folder,
            self._mappings,
            block_file.QUEUE_MAGIC,
            _in_slices(_queue_blocks(extents)),
            self._tally,
            self._store.damaged_files,
            block_count_max=extents.block_count,
            from_offset=derived,
            to_offset=begin,
        )
        self._store.queue_files.append(file)
        for first in range(0, file.row_count, QUEUES_A_SLICE):
            numbers = range(first, min(first + QUEUES_A_SLICE, file.row_count))
            add_runs(self._catalog, file, numbers)
            self._tally.add(len(numbers))
            yield []

    def _write_index(self, pair_count: int, derived: int, begin: int) -> Steps:
        index = self._store.index
        file = yield from files.write_block_file(
            self.index_folder,
            self._mappings,
            block_file.INDEX_MAGIC,
            ([block] for block in index.blocks(pair_count)),
            self._tally,
            self._store.damaged_files,
            block_count_max=-(-pair_count // BLOCK_PAIRS_MAX),
            from_offset=derived,
            to_offset=begin,
        )
        index.replace_tail(file, pair_count)

    def _write_snapshot(self, ends: list[tuple[int, ...]], begin: int) -> Steps:
        pops = self._pops
        yield from self._quiet()
        # Invariant: all items are of one moment, since the fold has one offset for all of them.
        items, item_count = self._catalog.items(), self._catalog.item_count
        if self._log.state_floor > self._log.min_offset:
            items, item_count = chain([floor_item(self._log.state_floor)], items), item_count + 1
        transactions = self._transactions.freeze()
        keys, key_sections = self._keys.freeze(), self._keys.section_count
        letters, letter_sections = self._freeze_letters()
        audit_count, audited = len(self._catalog.audit), self._catalog.audit.all_rows()
        covered = self._log.committed_offset
        # The log after `begin` states everything that is created from here on.
        progresses = list(pops.progress.values())
        # The table may grow while its slices are written, up to twice `deliveries_max`.
        slices_max = (
            len(list(slot_ranges(pops))) + 2 * self._config.deliveries_max // SLOTS_A_SLICE + 2
        )
        yield []

        block_count_max = (
            -(-item_count // CATALOG_ITEMS_A_SECTION)
            + self._catalog.security.size_bytes // SECURITY_BYTES_A_SECTION
            + -(-audit_count // AUDIT_ROWS_A_SECTION)
            + len(transactions)
            + key_sections
            + letter_sections
            + (-(-len(ends) // ENDS_A_SECTION) or 1)
            + len(progresses)
            + slices_max
        )
        # The directory is written last, at the front of the file.
        directory_bytes = block_file.HEADER_SIZE + block_count_max * block_file.ROW_SIZE
        self.is_without_snapshot = not self._has_room(
            directory_bytes + self.snapshot_size.size_bytes + self._config.segment_bytes
        )
        if self.is_without_snapshot:
            return

        def slices() -> Iterator[list[EncodedBlock]]:
            yield from self._catalog_sections(items, covered)
            yield from self._audit_sections(audited, covered)
            yield from self._transaction_sections(transactions, covered)
            yield from self._sections(SnapshotSection.KEYS, keys, covered)
            for kind, encoded in letters:
                yield from self._sections(kind, encoded, covered)
            yield from self._end_sections(ends, begin)
            yield from self._progress_sections(progresses)
            yield from self._delivery_sections()

        try:
            file = yield from files.write_block_file(
                self._snapshots_folder,
                self._mappings,
                block_file.SNAPSHOT_MAGIC,
                self._while_room(slices(), directory_bytes),
                self._tally,
                {},
                block_count_max=block_count_max,
                from_offset=begin,
                to_offset=covered,
            )
        except files.InsufficientSpace:
            self.is_without_snapshot = True
        else:
            self.snapshot_size.last_bytes = file.size_bytes

    def _while_room(
        self, slices: Iterator[list[EncodedBlock]], directory_bytes: int
    ) -> Iterator[list[EncodedBlock]]:
        """Yield slices while they fit on the disk. Raises InsufficientSpace.

        The log grows meanwhile, so each slice is checked.
        """
        for blocks in slices:
            if not self._has_room(directory_bytes + sum(len(block.data) for block in blocks)):
                raise files.InsufficientSpace
            yield blocks

    # ------------------------------------------------------------ sections of a snapshot

    def _catalog_sections(
        self, items: Iterator[dict[str, Any] | bytes], covered: int
    ) -> Iterator[list[EncodedBlock]]:
        number = 0
        while chunk := _take_section(items):
            self._tally.add(len(chunk))
            data = snapshot.encode_items(chunk)
            yield [EncodedBlock(SnapshotSection.CATALOG, number, covered, len(data), data)]
            number += 1

    def _audit_sections(
        self, rows: Iterator[AuditRow], covered: int
    ) -> Iterator[list[EncodedBlock]]:
        number = 0
        while chunk := list(islice(rows, AUDIT_ROWS_A_SECTION)):
            self._tally.add(len(chunk))
            data = audit.encode_rows(chunk)
            yield [EncodedBlock(SnapshotSection.AUDIT, number, covered, len(data), data)]
            number += 1

    def _transaction_sections(
        self, blocks: list[bytearray], covered: int
    ) -> Iterator[list[EncodedBlock]]:
        for number, rows in enumerate(blocks):
            self._tally.add(len(rows) // TRANSACTION_BYTES_AN_ITEM)
            yield [
                EncodedBlock(SnapshotSection.TRANSACTIONS, number, covered, len(rows), bytes(rows))
            ]

    def _freeze_letters(self) -> tuple[list[tuple[SnapshotSection, Iterator[bytes]]], int]:
        """Return the sections of settled dead letters and of operations, and their number."""
        letters, operations = self._catalog.settled_letters, self._catalog.operations
        letters.trim_all(self._catalog.queues)
        count = letters.section_count + operations.section_count
        return [
            (SnapshotSection.LETTERS, letters.freeze()),
            (SnapshotSection.OPERATIONS, operations.freeze()),
        ], count

    def _sections(
        self, kind: SnapshotSection, sections: Iterator[bytes], covered: int
    ) -> Iterator[list[EncodedBlock]]:
        for number, data in enumerate(sections):
            self._tally.add(len(data) // TRANSACTION_BYTES_AN_ITEM)
            yield [EncodedBlock(kind, number, covered, len(data), data)]

    def _end_sections(
        self, ends: list[tuple[int, ...]], begin: int
    ) -> Iterator[list[EncodedBlock]]:
        """Yield the ends of the queues as of the begin of the checkpoint."""
        for first in range(0, len(ends) or 1, ENDS_A_SECTION):
            chunk = ends[:ENDS_A_SECTION]
            del ends[:ENDS_A_SECTION]
            self._tally.add(len(chunk))
            data = snapshot.encode_ends(chunk)
            yield [EncodedBlock(SnapshotSection.QUEUES, first, begin, len(data), data)]

    def _progress_sections(self, progresses: list[PopProgress]) -> Iterator[list[EncodedBlock]]:
        """Yield the progress of groups. Each slice is read while no round is pending."""
        for first in range(0, len(progresses), PROGRESS_A_SECTION):
            yield from self._when_quiet()
            chunk = progresses[:PROGRESS_A_SECTION]
            del progresses[:PROGRESS_A_SECTION]
            self._tally.add(len(chunk))
            blocks = []
            rows = [one.as_row() for one in chunk if one.ordered is None]
            if rows:
                blocks.append(
                    self._section(SnapshotSection.PROGRESS, first, progress_rows.encode(rows))
                )
            blocks += self._ordered_sections([one for one in chunk if one.ordered is not None])
            yield blocks

    def _ordered_sections(self, progresses: list[PopProgress]) -> list[EncodedBlock]:
        """Return a section per ordered queue; one call makes the rows of all of them."""
        slots: list[int] = []
        ends = []
        for progress in progresses:
            slots += self._pops.deliveries_of(progress)
            ends.append(len(slots))
        deliveries = delivery_rows_of(self._pops, np.array(slots, dtype=np.int64))
        self._tally.add(len(slots))
        blocks, begin = [], 0
        for progress, end in zip(progresses, ends, strict=True):
            own = delivery_rows.part_of(deliveries, begin, end)
            data = snapshot.encode_ordered(progress.as_row(), own)
            blocks.append(self._section(SnapshotSection.ORDERED, progress.index, data))
            begin = end
        return blocks

    def _delivery_sections(self) -> Iterator[list[EncodedBlock]]:
        """Yield the slices of the delivery table. Each is read while no round is pending."""
        for number, (first, last) in enumerate(slot_ranges(self._pops)):
            yield from self._when_quiet()
            slots = self._slots_between(first, last)
            self._tally.add(len(slots))
            data = delivery_rows.encode(delivery_rows_of(self._pops, slots))
            yield [self._section(SnapshotSection.DELIVERIES, number, data)]

    def _slots_between(self, first: int, last: int) -> np.ndarray:
        """Return the used slots of a slice, except live deliveries of ordered queues."""
        table = self._pops.table
        slots = table.in_use(first, last)
        is_ordered = np.frombuffer(table.flags, dtype=np.uint8)[slots] & FLAG_ORDERED != 0
        is_live = np.frombuffer(table.live, dtype=np.uint32)[slots] != 0
        wanted: np.ndarray = slots[~(is_ordered & is_live)]
        return wanted

    def _section(self, kind: SnapshotSection, number: int, data: bytes) -> EncodedBlock:
        return EncodedBlock(kind, number, self._log.committed_offset, len(data), data)

    def _when_quiet(self) -> Iterator[list[EncodedBlock]]:
        for _ in self._quiet():
            yield []

    def drop(self, file: BlockFile) -> Steps:
        """Delete a queue or index file that is not needed any longer."""
        self._mappings.forget(file.name)
        folder = self.index_folder if file.magic == block_file.INDEX_MAGIC else self.queues_folder
        yield from folder.drop(file.name)

    def write_file(self, derived_offset: int, *, min_offset: int) -> Steps:
        """Replace the checkpoint file."""
        disk, committed = self._disk, self._log.committed_offset
        checkpoint = StoreCheckpoint(
            derived_offset=derived_offset,
            durable_offset=committed,
            min_offset=min_offset,
            epoch=self._log.epoch,
        )
        file = disk.open(NEXT_CHECKPOINT_FILE, create=not self._has_next_file())
        file.write_at(0, [store_checkpoint.encode(checkpoint)])
        yield [file]
        file.close()
        disk.rename(NEXT_CHECKPOINT_FILE, CHECKPOINT_FILE)
        yield [disk.folder(".")]
        # On a full disk, the removal of the oldest segment needs the next file. So it exists, with
        # the block of the file that was replaced now.
        with suppress(DiskHasNoSpace):
            file = disk.open(NEXT_CHECKPOINT_FILE, create=True)
            with closing(file):
                file.write_at(0, [bytes(store_checkpoint.SIZE)])
        self._log.checkpoint_end = max(self._log.checkpoint_end, committed)

    def _has_next_file(self) -> bool:
        """Return whether the next file exists. An unreadable one is deleted."""
        try:
            return self._disk.read(NEXT_CHECKPOINT_FILE) is not None
        except ReadFailed:
            self._disk.delete(NEXT_CHECKPOINT_FILE)
            return False


def _take_section(items: Iterator[dict[str, Any] | bytes]) -> list[dict[str, Any] | bytes]:
    """Take the items of the next section; none at the end."""
    section: list[dict[str, Any] | bytes] = []
    size = 0
    for item in items:
        section.append(item)
        if isinstance(item, bytes):
            size += len(item)
        if len(section) == CATALOG_ITEMS_A_SECTION or size >= SECURITY_BYTES_A_SECTION:
            break
    return section


def _index_bytes(pair_count: int) -> int:
    rows = -(-pair_count // BLOCK_PAIRS_MAX)
    return block_file.HEADER_SIZE + rows * block_file.ROW_SIZE + pair_count * PAIR_SIZE


def _queue_blocks(extents: _Extents) -> Iterator[EncodedBlock]:
    step = QUEUE_BLOCK_ENTRIES_MAX
    for queue, count in zip(extents.queues, extents.counts, strict=True):
        for first in range(0, count, step):
            items = min(step, count - first)
            data = bytes(queue.tail[first * SIZE : (first + items) * SIZE])
            yield EncodedBlock(queue.topic_id, queue.queue_id, queue.base + first, items, data)


def _in_slices(blocks: Iterator[EncodedBlock]) -> Iterator[list[EncodedBlock]]:
    """Batch blocks into slices: many small blocks or one large block per slice."""
    together: list[EncodedBlock] = []
    entry_count = 0
    for block in blocks:
        is_full = entry_count + block.items > QUEUE_BLOCK_ENTRIES_MAX
        if together and (is_full or len(together) == BLOCKS_A_SLICE):
            yield together
            together, entry_count = [], 0
        together.append(block)
        entry_count += block.items
    if together:
        yield together


def add_runs(catalog: Catalog, file: BlockFile, numbers: range) -> None:
    """Let the queues read from some blocks of a queue file."""
    for number, row in zip(numbers, file.rows(numbers.start, numbers.stop), strict=True):
        queue = catalog.queues.get((TopicId(row.key_1), QueueId(row.key_2)))
        if queue is not None:
            queue.add_run(QueueRun(file, number, row.first, row.items))
