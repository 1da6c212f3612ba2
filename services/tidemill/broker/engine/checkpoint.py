"""Checkpoints: what is derived from the log so far becomes durable, so that a start is short.

A checkpoint is a generator of slices of at most about two milliseconds, advanced by the owner
between rounds. A slice that reads the state waits until no round is pending, so that what it reads
is the fold of exactly the durable log: derived files and snapshots never run ahead of it.

Queue files, index file, snapshot, then the checkpoint file that names how far they reach. A crash
before the last step leaves files that the next start deletes (ADR 0003).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias, final

import numpy as np

from tidemill.broker.engine.layout import (
    block_file,
    delivery_rows,
    progress_rows,
    snapshot,
    store_checkpoint,
)
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_ORDERED
from tidemill.broker.engine.layout.queue_entry import SIZE
from tidemill.broker.engine.layout.snapshot import SLOTS_A_SLICE, QueueEnd, Section
from tidemill.broker.engine.layout.store_checkpoint import StoreCheckpoint
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.store import block_file as files
from tidemill.broker.engine.store.block_file import Block, BlockFile
from tidemill.broker.engine.store.consume_queue import ConsumeQueue, Run
from tidemill.broker.engine.store.disk import Disk, File, drop_file
from tidemill.broker.engine.store.message_index import BLOCK_PAIRS_MAX

Steps: TypeAlias = Iterator[list[File]]
Quiet: TypeAlias = Callable[[], Steps]  # gives way until no round is pending

QUEUES_FOLDER = "queues"
INDEX_FOLDER = "index"
SNAPSHOTS_FOLDER = "snapshots"
CHECKPOINT_FILE = "checkpoint"
QUEUE_BLOCK_ENTRIES_MAX = 32_768  # 640 KiB: copied, summed and written in a millisecond
PROGRESS_A_SECTION = 64
SNAPSHOTS_KEPT = 2


@final
class Checkpoints:
    """When the derived files were written, and writing them."""

    def __init__(
        self,
        disk: Disk,
        store: MessageStore,
        catalog: Catalog,
        pops: PopState,
        quiet: Quiet,
        *,
        log_bytes: int,
        records: int,
        deliveries_max: int,
    ) -> None:
        self._disk = disk
        self._store = store
        self._log = store.log
        self._catalog = catalog
        self._pops = pops
        self._quiet = quiet
        self._log_bytes = log_bytes
        self._records = records
        self._deliveries_max = deliveries_max
        self._records_then = 0  # of the log at the last checkpoint

    @property
    def is_due(self) -> bool:
        """Whether enough has been logged since the last one."""
        log = self._log
        return (
            log.committed_offset - self._store.derived_offset >= self._log_bytes
            or log.record_count - self._records_then >= self._records
        )

    def write(self) -> Steps:
        """Make everything that is derived from the log so far durable."""
        yield from self._quiet()
        begin, derived = self._log.committed_offset, self._store.derived_offset
        self._records_then = self._log.record_count
        if begin == derived:
            return
        queues = list(self._catalog.queues.values())
        positions = [(queue, len(queue.tail) // SIZE) for queue in queues]
        ends = [QueueEnd(q.topic_id, q.queue_id, q.max_offset, q.stated_at) for q in queues]
        pair_count = len(self._store.index.offsets)

        yield from self._write_queues(positions, derived, begin)
        yield from self._write_index(pair_count, derived, begin)
        yield from self._write_snapshot(ends, begin)
        yield from self.write_file(begin, min_offset=self._log.min_offset)
        self._store.derived_offset = begin
        snapshots = [name for name in self._disk.names(SNAPSHOTS_FOLDER) if name[-1].isdigit()]
        for name in snapshots[:-SNAPSHOTS_KEPT]:
            yield from drop_file(self._disk, name)

    def _write_queues(
        self, positions: list[tuple[ConsumeQueue, int]], derived: int, begin: int
    ) -> Steps:
        step = QUEUE_BLOCK_ENTRIES_MAX

        def blocks() -> Iterator[Block]:
            for queue, count in positions:
                for first in range(0, count, step):
                    items = min(step, count - first)
                    data = bytes(queue.tail[first * SIZE : (first + items) * SIZE])
                    yield Block(queue.topic_id, queue.queue_id, queue.base + first, items, data)

        count_max = sum(-(-count // step) for _, count in positions)
        yield from files.write_block_file(
            self._disk, QUEUES_FOLDER, block_file.QUEUE_MAGIC, blocks(),
            block_count_max=count_max, from_offset=derived, to_offset=begin,
        )  # fmt: skip
        name = files.file_name(QUEUES_FOLDER, from_offset=derived, to_offset=begin)
        damaged = self._store.damaged_files
        add_runs(self._catalog, BlockFile(self._disk, name, block_file.QUEUE_MAGIC, damaged))

    def _write_index(self, pair_count: int, derived: int, begin: int) -> Steps:
        index = self._store.index
        yield from files.write_block_file(
            self._disk, INDEX_FOLDER, block_file.INDEX_MAGIC, index.blocks(pair_count),
            block_count_max=-(-pair_count // BLOCK_PAIRS_MAX),
            from_offset=derived, to_offset=begin,
        )  # fmt: skip
        name = files.file_name(INDEX_FOLDER, from_offset=derived, to_offset=begin)
        damaged = self._store.damaged_files
        index.take_over(BlockFile(self._disk, name, block_file.INDEX_MAGIC, damaged), pair_count)

    def _write_snapshot(self, ends: list[QueueEnd], begin: int) -> Steps:
        pops = self._pops
        # What is new from here on is stated by the log from `begin` on.
        progresses = list(pops.progress.values())
        # The table may grow while its slices are written: at most to its bound, changes included.
        slices_max = len(list(pops.slices())) + 2 * self._deliveries_max // SLOTS_A_SLICE + 2
        yield from files.write_block_file(
            self._disk, SNAPSHOTS_FOLDER, block_file.SNAPSHOT_MAGIC,
            self._sections(ends, begin),
            block_count_max=2 + len(progresses) + slices_max,
            from_offset=begin, to_offset=self._log.committed_offset,
        )  # fmt: skip

    def _sections(self, ends: list[QueueEnd], begin: int) -> Iterator[Block | None]:
        """Yield the sections of a snapshot, each as of a moment at which no round is pending."""
        pops = self._pops
        progresses = list(pops.progress.values())
        plain = [progress for progress in progresses if progress.ordered is None]

        yield from self._when_quiet()
        yield self._section(Section.CATALOG, 0, snapshot.encode_items(self._catalog.items()))
        # The ends of the queues belong to the moment at which the queue files were begun.
        data = snapshot.encode_ends(ends)
        yield Block(Section.QUEUES, 0, begin, len(data), data)
        for first in range(0, len(plain), PROGRESS_A_SECTION):
            yield from self._when_quiet()
            rows = [progress.as_row() for progress in plain[first : first + PROGRESS_A_SECTION]]
            yield self._section(Section.PROGRESS, first, progress_rows.encode(rows))
        for progress in progresses:
            if progress.ordered is not None:
                yield from self._when_quiet()
                deliveries = pops.rows_of(np.array(pops.deliveries_of(progress), dtype=np.int64))
                data = snapshot.encode_ordered(progress.as_row(), deliveries)
                yield self._section(Section.ORDERED, progress.index, data)
        for number, (first, last) in enumerate(pops.slices()):
            yield from self._when_quiet()
            data = delivery_rows.encode(pops.rows_of(self._slots_between(first, last)))
            yield self._section(Section.DELIVERIES, number, data)

    def _slots_between(self, first: int, last: int) -> np.ndarray:
        """Return the used slots of a slice, live ones of ordered queues left out."""
        table = self._pops.table
        slots = table.in_use(first, last)
        is_ordered = np.frombuffer(table.flags, dtype=np.uint8)[slots] & FLAG_ORDERED != 0
        is_live = np.frombuffer(table.live, dtype=np.uint32)[slots] != 0
        wanted: np.ndarray = slots[~(is_ordered & is_live)]
        return wanted

    def _section(self, kind: Section, number: int, data: bytes) -> Block:
        return Block(kind, number, self._log.committed_offset, len(data), data)

    def _when_quiet(self) -> Iterator[None]:
        for _ in self._quiet():
            yield None

    def write_file(self, derived_offset: int, *, min_offset: int) -> Steps:
        """Replace the checkpoint file."""
        disk = self._disk
        checkpoint = StoreCheckpoint(
            derived_offset=derived_offset,
            durable_offset=self._log.committed_offset,
            min_offset=min_offset,
            epoch=self._log.epoch,
        )
        temporary = f"{CHECKPOINT_FILE}.new"
        if disk.read(temporary) is not None:
            disk.delete(temporary)
        file = disk.open(temporary, create=True)
        file.write_at(0, [store_checkpoint.encode(checkpoint)])
        yield [file]
        file.close()
        disk.rename(temporary, CHECKPOINT_FILE)
        yield [disk.folder(".")]


def add_runs(catalog: Catalog, file: BlockFile) -> None:
    """Let the queues answer from a derived file."""
    for number, row in enumerate(file.rows):
        queue = catalog.queues.get((TopicId(row.key_1), QueueId(row.key_2)))
        if queue is not None:
            queue.add_run(Run(file, number, row.first, row.items))
