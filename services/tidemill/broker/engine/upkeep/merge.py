"""Merging adjacent queue or index files, so that a store of any size has few of them.

A file is small, medium or large by its range of the log. `files_merged` adjacent files of one size
become one file; large files stay until most of their entries are dead. A merge drops dead entries
(ADR 0070). The new file has its name, durably, before the old ones are deleted (ADR 0015).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.queue_entry import SIZE
from tidemill.broker.engine.room import COPY_RESERVE_PART, WHOLE_RESERVE
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
from tidemill.broker.engine.upkeep.dead_entries import DeadEntries
from tidemill.broker.engine.upkeep.live_bytes import LiveBytes
from tidemill.broker.engine.upkeep.parts import Steps, UpkeepParts

MERGED_BYTES_MAX = 128 << 20  # of a derived file, on a disk without a reserve
QUEUES_A_SLICE = 128  # read, or given a run
RUNS_A_SLICE = 96  # verified and copied
LOOK_PERIOD_MS = 10_000  # between two searches for files with mostly dead entries
NEVER = -1, -1, -1, -1  # no search yet, or one that could not rewrite what it found


class _MergedQueue(NamedTuple):
    """The entries of one queue in a merge."""

    queue: ConsumeQueue
    run_count: int
    entries: range  # those that are kept


@final
class Merges:
    """The merges of queue and index files."""

    def __init__(self, parts: UpkeepParts, checkpoints: Checkpoints, live_bytes: LiveBytes) -> None:
        config = parts.config
        self._checkpoints = checkpoints
        self._mappings = parts.mappings
        self._store = parts.store
        self._catalog = parts.catalog
        self._room = parts.room
        self._tally = parts.tally
        self._quiet = parts.quiet
        self._dead = DeadEntries(parts.store, parts.catalog, live_bytes)
        self._files_merged = files_merged = config.files_merged
        log_bytes = config.checkpoint_log_bytes
        # The least log range of a medium and of a large file.
        self._sizes = (files_merged * log_bytes // 2, files_merged**2 * log_bytes // 2)
        # Of one file: a full disk must have room to rebuild it.
        self._bytes_max = config.disk_reserve_bytes // 4 or MERGED_BYTES_MAX
        self._checked_offset = -1  # the derived offset of the last check without a due merge
        self._needed_bytes = 0  # by the merge that waits for room
        self._room_part = WHOLE_RESERVE  # of the reserve, which the current merge leaves free
        self._look_at_ms = 0  # the next search for files with mostly dead entries
        self._deaths = NEVER  # at the last search
        # A rewrite that waits for room: its bytes, and `_deaths_now` at the search that found it.
        self._waiting = 0, NEVER

    def _has_room(self, size: int) -> bool:
        return self._room.has_room(size, reserve_part=self._room_part)

    def next_ms(self) -> int | None:
        """Return the wall time of the next search for dead entries; None: none can be found."""
        return None if self._deaths == self._deaths_now else self._look_at_ms

    def find_dead_entries(self, now_ms: int) -> Steps | None:
        """Return the steps that rewrite files with mostly dead entries; None if none is due."""
        if now_ms < self._look_at_ms or self._deaths == self._deaths_now:
            return None
        self._look_at_ms = now_ms + LOOK_PERIOD_MS
        needed_bytes, deaths = self._waiting
        if deaths == self._deaths_now and not self._room.has_room(
            needed_bytes, reserve_part=COPY_RESERVE_PART
        ):
            return None
        self._deaths, self._waiting = self._deaths_now, (0, NEVER)
        return self._drop_dead_entries()

    def defer(self, now_ms: int) -> None:
        """Postpone a due search: the background has no job now, maybe because others wait."""
        if self._look_at_ms <= now_ms:
            self._look_at_ms = now_ms + LOOK_PERIOD_MS

    @property
    def may_free_space(self) -> bool:
        """Whether messages have died since the last search. A failed search does not count."""
        return self._deaths not in (NEVER, self._deaths_now)

    @property
    def _deaths_now(self) -> tuple[int, int, int, int]:
        """A value that changes when a search may find more.

        Messages have died, a pack was installed, a lone file has got a neighbour, or messages in
        gaps are not recent any longer.
        """
        derived = self._store.derived_offset if self._dead.lone_count else 0
        recent = self._store.recent_begin if self._dead.recent_count else 0
        return self._catalog.deaths, self._store.log.pack_count, derived, recent

    def _drop_dead_entries(self) -> Steps:
        self._dead.lone_count = self._dead.recent_count = 0
        self._room_part = COPY_RESERVE_PART  # As packs, these files free more than they take.
        try:
            while found := (yield from self._dead.find_sparse_queues(self._bytes_max // 2)):
                self._check_room_for(found.kept_bytes)
                yield from self._merge_queues(found.files)
            while found := (yield from self._dead.find_sparse_index(self._bytes_max // 2)):
                self._check_room_for(found.kept_bytes)
                yield from self._merge_index(found.files)
        except (BlockFileDamaged, InsufficientSpace):
            self._deaths = NEVER  # Search again later.
        if self._store.damaged_files:
            self._deaths = NEVER  # They were left out.
        self._room_part = WHOLE_RESERVE
        if self._dead.lone_count:
            self._checkpoints.request()  # It gives the lone file a neighbour.

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
        block_count = dead_count = 0
        for file in files:
            dead_count += int(file.directory["items"].sum(dtype=np.int64))
        known = list(self._catalog.queues.values())
        for first in range(0, len(known), QUEUES_A_SLICE):
            for queue in known[first : first + QUEUES_A_SLICE]:
                runs = queue.runs_between(from_offset, to_offset)
                if runs:
                    entries = queue.entries_in(runs)
                    begin = max(entries.start, self._dead.first_kept(queue))
                    kept = range(min(begin, entries.stop), entries.stop)
                    dead_count -= len(kept)
                    queues.append(_MergedQueue(queue, len(runs), kept))
                    block_count += -(-len(kept) // QUEUE_BLOCK_ENTRIES_MAX)
            self._tally.add(QUEUES_A_SLICE)
            yield []
        # The records must be committed by which entries are dead, deletions of topics included: a
        # new master may lack others, and this process then reads its files again.
        yield from self._quiet()
        if dead_count:
            # An unclean election may take back committed records. The checkpoint names their end.
            low = self._store.log.min_offset
            yield from self._checkpoints.write_file(self._store.derived_offset, min_offset=low)
        file = yield from write_block_file(
            self._checkpoints.queues_folder,
            self._mappings,
            files[0].magic,
            self._queue_blocks(queues),
            self._tally,
            self._store.damaged_files,
            block_count_max=block_count,
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
            for part in _cuts(entries) or [entries]:
                if part:
                    self._check_room()
                    # Verified again: bytes that rotted since would get a new checksum.
                    data = queue.data(part.start, len(part), recheck=True)
                    assert len(data) == len(part) * SIZE, "the runs join"
                    key = queue.topic_id, queue.queue_id
                    blocks.append(EncodedBlock(*key, part.start, len(part), data))
                self._tally.add(run_count, size_bytes=len(part) * SIZE)
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
        for file in files:
            for number, row in enumerate(file.rows()):
                self._check_room()
                data = self._dead.kept_pairs(file.check_block(number, row.items * PAIR_SIZE))
                pair_count = len(data) // PAIR_SIZE
                blocks = [EncodedBlock(0, 0, _first_offset(data), pair_count, data)]
                yield blocks if data else []

    def _check_room_for(self, size: int) -> None:
        """Raise InsufficientSpace if a rewrite does not fit; it then waits for room."""
        if not self._has_room(size):
            self._waiting = size, self._deaths_now
        self._check_room(size)

    def _check_room(self, size: int = 0) -> None:
        """Raise InsufficientSpace if there is no room for `size` bytes more."""
        if not self._has_room(size):
            raise InsufficientSpace


def _first_offset(pairs: bytes) -> int:
    """Return the log offset of the first message of an index block; 0 without pairs."""
    return int(np.frombuffer(pairs, ">i8", offset=len(pairs) // 2).min()) if pairs else 0


def _cuts(stretch: range) -> list[range]:
    """Cut the entries of a queue into blocks."""
    step = QUEUE_BLOCK_ENTRIES_MAX
    return [stretch[at : at + step] for at in range(0, len(stretch), step)]


def _with(file: BlockFile, files: list[BlockFile], old: frozenset[BlockFile]) -> list[BlockFile]:
    at = next(n for n, one in enumerate(files) if one in old)
    return [*files[:at], file, *(one for one in files[at:] if one not in old)]
