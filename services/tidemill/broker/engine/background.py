"""Background work of the engine: preparing segments, checkpoints, retention.

Each job is a generator of slices of at most about two milliseconds, advanced by the owner between
rounds. A slice that reads the state waits until no round is pending, so that what it reads is the
fold of exactly the durable log: derived files and snapshots never run ahead of it.

The order of a checkpoint: queue files, index file, snapshot, then the checkpoint file that names
how far they reach. A crash before the last step leaves files that the next start deletes.

The order of retention: state that only the oldest segment states is stated again, that is made
durable, and only then the segment goes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tidemill.broker.engine.layout import block_file, store_checkpoint
from tidemill.broker.engine.layout.queue_entry import SIZE
from tidemill.broker.engine.layout.store_checkpoint import StoreCheckpoint
from tidemill.broker.engine.metadata.catalog import encode_config
from tidemill.broker.engine.pop.delivery_table import FREE
from tidemill.broker.engine.pop.state import SLOTS_A_SLICE
from tidemill.broker.engine.store import block_file as files
from tidemill.broker.engine.store.block_file import Block, BlockFile
from tidemill.broker.engine.store.consume_queue import ConsumeQueue, Run
from tidemill.broker.engine.store.disk import File, drop_file
from tidemill.broker.engine.store.message_index import BLOCK_PAIRS_MAX

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine

Steps = Iterator[list[File]]
QUEUES_FOLDER = "queues"
INDEX_FOLDER = "index"
SNAPSHOTS_FOLDER = "snapshots"
CHECKPOINT_FILE = "checkpoint"
PREPARE_SLICE_BYTES = 1 << 20
QUEUE_BLOCK_ENTRIES_MAX = 32_768  # 640 KiB: copied, summed and written in a millisecond
PROGRESS_A_SECTION = 64
DELIVERIES_A_STATE_RECORD = 1024
SNAPSHOTS_KEPT = 2

# Kinds of snapshot sections.
SECTION_CATALOG = 1
SECTION_QUEUES = 2
SECTION_PROGRESS = 3
SECTION_ORDERED = 4
SECTION_DELIVERIES = 5


def run_background(engine: Engine) -> Iterator[list[File] | None]:
    """Do whatever is due, for ever; None when nothing is."""
    while True:
        if engine.log.wants_preparation:
            yield from engine.log.prepare(slice_bytes=PREPARE_SLICE_BYTES)
        elif _is_checkpoint_due(engine):
            yield from write_checkpoint(engine)
        elif steps := engine.timers.find_background(engine.now_ms, lambda: _quiet(engine)):
            yield from steps
        elif is_oldest_retired(engine):
            yield from retire_oldest(engine)
        else:
            yield None


# -------------------------------------------------------------------- checkpoint


def _is_checkpoint_due(engine: Engine) -> bool:
    return (
        engine.committed_offset - engine.derived_offset >= engine.config.checkpoint_log_bytes
        or engine.log.record_count - engine.records_at_checkpoint
        >= engine.config.checkpoint_records
    )


def write_checkpoint(engine: Engine) -> Steps:
    """Make everything that is derived from the log so far durable."""
    yield from _quiet(engine)
    begin, derived = engine.committed_offset, engine.derived_offset
    engine.records_at_checkpoint = engine.log.record_count
    if begin == derived:
        return
    positions = [(queue, len(queue.tail) // SIZE) for queue in engine.catalog.queues.values()]
    ends = [[q.topic_id, q.queue_id, q.max_offset, q.stated_at] for q, _ in positions]
    pair_count = len(engine.index.offsets)

    yield from _write_queues(engine, positions, derived, begin)
    yield from _write_index(engine, pair_count, derived, begin)
    yield from _write_snapshot(engine, ends, begin)
    yield from write_checkpoint_file(engine, begin, min_offset=engine.log.min_offset)
    engine.derived_offset = begin
    snapshots = [name for name in engine.disk.names(SNAPSHOTS_FOLDER) if name[-1].isdigit()]
    for name in snapshots[:-SNAPSHOTS_KEPT]:
        yield from drop_file(engine.disk, name)


def _quiet(engine: Engine) -> Steps:
    while engine.has_pending:
        yield []


def _write_queues(
    engine: Engine, positions: list[tuple[ConsumeQueue, int]], derived: int, begin: int
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
        engine.disk, QUEUES_FOLDER, block_file.QUEUE_MAGIC, blocks(),
        block_count_max=count_max, from_offset=derived, to_offset=begin,
    )  # fmt: skip
    name = files.file_name(QUEUES_FOLDER, from_offset=derived, to_offset=begin)
    add_runs(engine, BlockFile(engine.disk, name, block_file.QUEUE_MAGIC))


def add_runs(engine: Engine, file: BlockFile) -> None:
    """Let the queues answer from a derived file."""
    for number, row in enumerate(file.rows):
        queue = engine.catalog.queues.get((row.key_1, row.key_2))
        if queue is not None:
            queue.add_run(Run(file, number, row.first, row.items))


def _write_index(engine: Engine, pair_count: int, derived: int, begin: int) -> Steps:
    yield from files.write_block_file(
        engine.disk, INDEX_FOLDER, block_file.INDEX_MAGIC, engine.index.blocks(pair_count),
        block_count_max=-(-pair_count // BLOCK_PAIRS_MAX), from_offset=derived, to_offset=begin,
    )  # fmt: skip
    name = files.file_name(INDEX_FOLDER, from_offset=derived, to_offset=begin)
    engine.index.take_over(BlockFile(engine.disk, name, block_file.INDEX_MAGIC), pair_count)


def _write_snapshot(engine: Engine, ends: list[list[int]], begin: int) -> Steps:
    state = engine.state
    # What is new from here on is stated by the log from `begin` on.
    progresses = list(state.progress.values())

    def quiet() -> Iterator[None]:
        while engine.has_pending:
            yield None

    def sections() -> Iterator[Block | None]:
        def section(kind: int, number: int, data: bytes) -> Block:
            return Block(kind, number, engine.committed_offset, len(data), data)

        yield from quiet()
        yield section(SECTION_CATALOG, 0, json.dumps(engine.catalog.items()).encode())
        # The ends of the queues belong to the moment at which the queue files were begun.
        data = json.dumps(ends).encode()
        yield Block(SECTION_QUEUES, 0, begin, len(data), data)
        plain = [progress for progress in progresses if progress.ordered is None]
        for first in range(0, len(plain), PROGRESS_A_SECTION):
            yield from quiet()
            chunk = plain[first : first + PROGRESS_A_SECTION]
            yield section(SECTION_PROGRESS, first, state.encode_progress(chunk))
        for progress in progresses:
            if progress.ordered is not None:
                yield from quiet()
                yield section(SECTION_ORDERED, progress.index, state.encode_ordered(progress))
        for number, (first, last) in enumerate(state.slices()):
            yield from quiet()
            yield section(SECTION_DELIVERIES, number, state.encode_deliveries(first, last))

    # The table may grow while its slices are written: at most to its bound, changes included.
    slices_max = len(list(state.slices())) + 2 * engine.config.deliveries_max // SLOTS_A_SLICE + 2
    yield from files.write_block_file(
        engine.disk, SNAPSHOTS_FOLDER, block_file.SNAPSHOT_MAGIC, sections(),
        block_count_max=2 + len(progresses) + slices_max,
        from_offset=begin, to_offset=engine.committed_offset,
    )  # fmt: skip


def write_checkpoint_file(engine: Engine, derived_offset: int, *, min_offset: int) -> Steps:
    """Replace the checkpoint file."""
    disk = engine.disk
    checkpoint = StoreCheckpoint(
        derived_offset=derived_offset,
        durable_offset=engine.committed_offset,
        min_offset=min_offset,
        epoch=engine.log.epoch,
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


# -------------------------------------------------------------------- retention


def is_oldest_retired(engine: Engine) -> bool:
    """Whether the oldest segment has served its time and all it states is in a checkpoint."""
    segments = engine.log.segments
    if len(segments) < 2 or segments[0].end > engine.derived_offset:
        return False
    return engine.is_retirement_near(engine.now_ms, 0) and engine.timers.may_drop(segments[0])


def retire_oldest(engine: Engine) -> Steps:
    """State again what only the oldest segment states, then give it up."""
    end = engine.log.segments[0].end
    yield from _restate(engine, end)
    yield from _quiet(engine)
    expired = 0
    for queue in list(engine.catalog.queues.values()):
        expired += queue.drop_before(end)
        yield []
    engine.expired_count += expired
    gone = {file.name for file in engine.index.drop_before(end)}
    # First, so that a start can tell a segment that was dropped from one that is missing.
    yield from write_checkpoint_file(engine, engine.derived_offset, min_offset=end)
    yield from engine.log.drop_oldest()
    for name in engine.disk.names(QUEUES_FOLDER):
        if name[-1].isdigit() and int(name.rpartition("-")[2]) <= end:
            gone.add(name)
    for name in sorted(gone):
        yield from drop_file(engine.disk, name)


def _restate(engine: Engine, end: int) -> Steps:
    """Append STATE records for all live state that is only stated before log offset `end`."""
    store, state, now_ms = engine.store, engine.state, engine.now_ms
    for key in engine.catalog.stated_before(end):
        # Between two slices it may have been changed or deleted: that must not be undone.
        config = engine.catalog.find_stated_before(key, end)
        if config is not None:
            log_offset = store.append_state(store.CONFIG, encode_config(config), now_ms)
            engine.catalog.stated_at[key] = log_offset
        yield []
    queues = [queue for queue in engine.catalog.queues.values() if queue.stated_at < end]
    if queues:
        rows = [[queue.topic_id, queue.queue_id, queue.max_offset] for queue in queues]
        log_offset = store.append_state(store.QUEUES, json.dumps(rows).encode(), now_ms)
        for queue in queues:
            queue.stated_at = log_offset
    yield []
    progresses = [progress for progress in state.progress.values() if progress.stated_at < end]
    for first in range(0, len(progresses), PROGRESS_A_SECTION):
        chunk = progresses[first : first + PROGRESS_A_SECTION]
        log_offset = store.append_state(store.PROGRESS, state.encode_progress(chunk), now_ms)
        for progress in chunk:
            progress.stated_at = log_offset
        yield []
    yield from _restate_deliveries(engine, end)


def _restate_deliveries(engine: Engine, end: int) -> Steps:
    table = engine.state.table
    for first, last in engine.state.slices():
        # Acks that are not in the log yet must come before the rows that already know them.
        engine.state.flush_acks(engine.now_ms)
        stated = np.frombuffer(table.stated_at, dtype=np.int64)[first:last]
        ids = np.frombuffer(table.ids, dtype=np.int64)[first:last]
        slots = np.flatnonzero((ids != FREE) & (stated < end)) + first
        del stated, ids
        for begin in range(0, len(slots), DELIVERIES_A_STATE_RECORD):
            chunk = slots[begin : begin + DELIVERIES_A_STATE_RECORD]
            rows = table.encode_rows(chunk, engine.state.places())
            log_offset = engine.store.append_state(engine.store.DELIVERIES, rows, engine.now_ms)
            np.frombuffer(table.stated_at, dtype=np.int64)[chunk] = log_offset
        yield []
