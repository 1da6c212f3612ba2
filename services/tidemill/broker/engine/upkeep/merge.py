"""Merging adjacent queue or index files, so that a store of any size has few of them.

A file is small, medium or large by its range of the log. `files_merged` adjacent files of one size
become one file; large files stay. The new file has its name, durably, before the old ones are
deleted (ADR 0015).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple, final

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.queue_entry import SIZE
from tidemill.broker.engine.room import WHOLE_RESERVE
from tidemill.broker.engine.store.block_file import (
    BlockFile,
    EncodedBlock,
    InsufficientSpace,
    write_block_file,
)
from tidemill.broker.engine.store.consume_queue import ConsumeQueue, QueueRun
from tidemill.broker.engine.store.message_index import PAIR_SIZE
from tidemill.broker.engine.tally import Allowance
from tidemill.broker.engine.upkeep.checkpoint import QUEUE_BLOCK_ENTRIES_MAX, Checkpoints
from tidemill.broker.engine.upkeep.parts import Steps, UpkeepParts

MERGED_BYTES_MAX = 128 << 20  # of a derived file, on a disk without a reserve
QUEUES_A_SLICE = 128  # read, or given a run
RUNS_A_SLICE = 96  # verified and copied
INDEX_BLOCKS_A_SLICE = 4  # 512 KiB: verified, copied and written


class _MergedQueue(NamedTuple):
    """The entries of one queue in a merge."""

    queue: ConsumeQueue
    run_count: int
    entries: range


@final
class Merges:
    """The merges of queue and index files."""

    def __init__(self, parts: UpkeepParts, checkpoints: Checkpoints) -> None:
        config = parts.config
        self._checkpoints = checkpoints
        self._mappings = parts.mappings
        self._store = parts.store
        self._catalog = parts.catalog
        self._room = parts.room
        self._tally = parts.tally
        self._files_merged = files_merged = config.files_merged
        log_bytes = config.checkpoint_log_bytes
        # The least log range of a medium and of a large file.
        self._sizes = (files_merged * log_bytes // 2, files_merged**2 * log_bytes // 2)
        # Of one file: a full disk must have room to rebuild it.
        self._bytes_max = config.disk_reserve_bytes // 4 or MERGED_BYTES_MAX
        self._checked_offset = -1  # the derived offset of the last check without a due merge
        self._needed_bytes = 0  # by the merge that waits for room

    def _has_room(self, size: int) -> bool:
        return self._room.has_room(size, reserve_part=WHOLE_RESERVE)

    @property
    def is_due(self) -> bool:
        """Whether there are files to merge, and room for the new file."""
        derived = self._store.derived_offset
        if derived == self._checked_offset:
            return False
        if self._needed_bytes and not self._has_room(self._needed_bytes):
            return False
        found = [self._find(self._store.queue_files), self._find(self._store.index.files)]
        if not any(found):
            self._checked_offset = derived
            return False
        # The old files are deleted only when the new one is durable.
        self._needed_bytes = max(sum(file.size_bytes for file in files) for files in found)
        return self._has_room(self._needed_bytes)

    def _find(self, files: list[BlockFile]) -> list[BlockFile]:
        """Return the next files to merge: the newest adjacent ones without a larger file."""
        for limit in self._sizes:
            found: list[BlockFile] = []
            wanted: list[int] = []
            for file in reversed(files):
                size = file.to_offset - file.from_offset
                if size >= limit or file.size_bytes > self._bytes_max // 2:
                    break
                if limit == self._sizes[0] or size >= self._sizes[0]:
                    wanted.append(len(found))
                found.append(file)
            if len(wanted) >= self._files_merged:
                # Smaller files between them are merged too.
                chosen = self._first_of(found[wanted[0] : wanted[-1] + 1][::-1])
                # A replica rebuilds damaged files only when it is the master.
                damaged = self._store.damaged_files
                return [] if any(one.name in damaged for one in chosen) else chosen
        return []

    def _first_of(self, files: list[BlockFile]) -> list[BlockFile]:
        """Return the oldest files that together do not exceed the size limit of a file."""
        ends = accumulate(file.size_bytes for file in files)
        return [file for file, end in zip(files, ends, strict=True) if end <= self._bytes_max]

    def merge(self) -> Steps:
        """Merge the next files of both kinds, so that both kinds end at the same offsets."""
        try:
            files = self._find(self._store.queue_files)
            if files:
                yield from self._merge_queues(files)
            files = self._find(self._store.index.files)
            if files:
                yield from self._merge_index(files)
        except BlockFileDamaged:
            pass  # The file is noted, and rebuilt before the next attempt.
        except InsufficientSpace:
            pass  # Other writes took the room. The merge begins again when there is room.
        else:
            self._needed_bytes = 0

    # ------------------------------------------------------------ queue files

    def _merge_queues(self, files: list[BlockFile]) -> Steps:
        for file in files:
            file.advise()
            yield []
        from_offset, to_offset = files[0].from_offset, files[-1].to_offset
        queues: list[_MergedQueue] = []
        known = list(self._catalog.queues.values())
        for first in range(0, len(known), QUEUES_A_SLICE):
            for queue in known[first : first + QUEUES_A_SLICE]:
                runs = queue.runs_between(from_offset, to_offset)
                if runs:
                    queues.append(_MergedQueue(queue, len(runs), queue.entries_in(runs)))
            self._tally.add(QUEUES_A_SLICE)
            yield []
        file = yield from write_block_file(
            self._checkpoints.queues_folder,
            self._mappings,
            files[0].magic,
            self._queue_blocks(queues),
            self._tally,
            self._store.damaged_files,
            block_count_max=sum(len(_cuts(one.entries)) for one in queues),
            from_offset=from_offset,
            to_offset=to_offset,
        )
        block = 0
        for n, (queue, _, entries) in enumerate(queues, 1):
            merged = [
                QueueRun(file, block + number, part.start, len(part))
                for number, part in enumerate(_cuts(entries))
            ]
            queue.replace_runs(queue.runs_between(from_offset, to_offset), merged)
            block += len(merged)
            if n % QUEUES_A_SLICE == 0:
                self._tally.add(QUEUES_A_SLICE)
                yield []
        self._store.queue_files = _with(file, self._store.queue_files, frozenset(files))
        for one in files:
            yield from self._checkpoints.drop(one)

    def _queue_blocks(self, queues: list[_MergedQueue]) -> Iterator[list[EncodedBlock]]:
        blocks: list[EncodedBlock] = []
        allowance = Allowance(self._tally, items=RUNS_A_SLICE)
        for queue, run_count, entries in queues:
            for part in _cuts(entries):
                self._check_room()
                # Verified again: bytes that rotted since would get a new checksum.
                data = queue.data(part.start, len(part), recheck=True)
                assert len(data) == len(part) * SIZE, "the runs join"
                blocks.append(
                    EncodedBlock(queue.topic_id, queue.queue_id, part.start, len(part), data)
                )
                self._tally.add(run_count, size_bytes=len(data))
                if allowance.is_spent:
                    yield blocks
                    blocks = []
                    allowance = Allowance(self._tally, items=RUNS_A_SLICE)
        yield blocks

    # ------------------------------------------------------------ index files

    def _merge_index(self, files: list[BlockFile]) -> Steps:
        for file in files:
            file.advise()
            yield []
        file = yield from write_block_file(
            self._checkpoints.index_folder,
            self._mappings,
            files[0].magic,
            self._index_blocks(files),
            self._tally,
            self._store.damaged_files,
            block_count_max=sum(file.row_count for file in files),
            from_offset=files[0].from_offset,
            to_offset=files[-1].to_offset,
        )
        self._store.index.files = _with(file, self._store.index.files, frozenset(files))
        for one in files:
            yield from self._checkpoints.drop(one)

    def _index_blocks(self, files: list[BlockFile]) -> Iterator[list[EncodedBlock]]:
        blocks: list[EncodedBlock] = []
        for file in files:
            for number, row in enumerate(file.rows()):
                data = bytes(file.check_block(number, row.items * PAIR_SIZE))
                blocks.append(EncodedBlock(*row[:4], data))
                if len(blocks) == INDEX_BLOCKS_A_SLICE:
                    self._check_room()
                    yield blocks
                    blocks = []
        yield blocks

    def _check_room(self) -> None:
        """Raise InsufficientSpace if other writes have taken the room."""
        if not self._has_room(0):
            raise InsufficientSpace


def _cuts(stretch: range) -> list[range]:
    """Cut the entries of a queue into blocks."""
    step = QUEUE_BLOCK_ENTRIES_MAX
    return [stretch[at : at + step] for at in range(0, len(stretch), step)]


def _with(file: BlockFile, files: list[BlockFile], old: frozenset[BlockFile]) -> list[BlockFile]:
    at = next(n for n, one in enumerate(files) if one in old)
    return [*files[:at], file, *(one for one in files[at:] if one not in old)]
