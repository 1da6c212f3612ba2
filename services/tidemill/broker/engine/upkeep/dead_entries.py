"""Dead entries of queue and index files: which files have mostly dead ones (ADR 0070).

An entry of a queue file is dead if it is before the low of its queue, or if its topic is deleted. A
pair of an index file is dead if it points into a gap of a pack: a stub keeps its pairs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from tidemill.broker.engine.layout import block_file
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.queue_entry import SIZE
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.store.block_file import BlockFile
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.store.message_index import PAIR_SIZE
from tidemill.broker.engine.store.pack import Pack
from tidemill.broker.engine.store.segment import LogDamaged, Segment
from tidemill.broker.engine.upkeep.live_bytes import LiveBytes

FREED_BYTES_MIN: Final = 64 << 10  # of one rewrite: fewer dead bytes stay
FILES_MIN: Final = 2  # of one rewrite
QUEUES_A_SLICE: Final = 256
ROWS_A_SLICE: Final = 16_384  # of a directory of a queue file
BLOCKS_A_SLICE: Final = 16  # of index files: each may read the directories of some packs


class SparseFiles(NamedTuple):
    """Adjacent files with mostly dead entries, and the bytes that remain of them."""

    files: list[BlockFile]
    kept_bytes: int


class _FileContent(NamedTuple):
    """The bytes that a rewrite keeps of a file, and those that it frees."""

    file: BlockFile
    kept_bytes: int
    freed_bytes: int

    def plus(
        self, kept: npt.NDArray[np.int64], items: npt.NDArray[np.int64], item_size: int
    ) -> _FileContent:
        """Return the content with more blocks; a rewrite keeps `kept` of the `items` of each."""
        kept_bytes = int(np.count_nonzero(kept)) * block_file.ROW_SIZE + int(kept.sum()) * item_size
        all_bytes = len(kept) * block_file.ROW_SIZE + int(items.sum()) * item_size
        freed_bytes = self.freed_bytes + all_bytes - kept_bytes
        return _FileContent(self.file, self.kept_bytes + kept_bytes, freed_bytes)


@final
class DeadEntries:
    """The dead entries of one broker."""

    def __init__(self, store: MessageStore, catalog: Catalog, live_bytes: LiveBytes) -> None:
        self._store = store
        self._catalog = catalog
        self._live_bytes = live_bytes
        self._gaps = _Gaps(store)
        # Files with mostly dead entries that were the only ones of their kind at the last search.
        self.lone_count = 0
        # Blocks in gaps that were too recent at the last search.
        self.recent_count = 0

    def first_kept(self, queue: ConsumeQueue) -> int:
        """Return the queue offset of the first entry that a merge keeps.

        The live bytes subtract a dead message by its entry. Until then it stays.
        """
        return self._live_bytes.first_counted(queue, at_most=queue.low)

    def kept_pairs(self, data: memoryview) -> bytes:
        """Return the pairs of an index block that do not point into gaps."""
        offsets = np.frombuffer(data, ">i8", offset=len(data) // 2)
        is_kept = ~self._gaps.contain(offsets.astype(np.int64))
        if is_kept.all():
            return bytes(data)
        hashes = np.frombuffer(data, ">u8", len(offsets))
        return hashes[is_kept].tobytes() + offsets[is_kept].tobytes()

    # ------------------------------------------------------------ files with mostly dead entries

    def find_sparse_queues(self, bytes_max: int) -> Generator[list[File], None, SparseFiles | None]:
        """Return adjacent queue files that may become one file of at most `bytes_max` bytes."""
        keys, lows = yield from self._find_lows()
        found: list[_FileContent] = []
        for file in list(self._store.queue_files):
            directory, content = file.directory, _FileContent(file, 0, 0)
            for begin in range(0, len(directory), ROWS_A_SLICE):
                rows = directory[begin : begin + ROWS_A_SLICE]
                content = content.plus(*_kept_entries(rows, keys, lows), SIZE)
                yield []
            found.append(content)
        return self._choose(found, bytes_max)

    def _find_lows(
        self,
    ) -> Generator[list[File], None, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Return the keys of all queues, in order, and the first entries that they keep."""
        keys, lows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        queues = iter(list(self._catalog.queues.values()))
        while part := list(islice(queues, QUEUES_A_SLICE)):
            found = [queue.topic_id << 32 | queue.queue_id for queue in part]
            keys.append(np.array(found, np.int64))
            found = [self.first_kept(queue) if queue.low else 0 for queue in part]
            lows.append(np.array(found, np.int64))
            yield []
        all_keys, all_lows = np.concatenate(keys), np.concatenate(lows)
        # Stable sorting is fast here: most topics have higher ids than the topics before them.
        order = np.argsort(all_keys, kind="stable")
        return all_keys[order], all_lows[order]

    def find_sparse_index(self, bytes_max: int) -> Generator[list[File], None, SparseFiles | None]:
        """Return adjacent index files that may become one file of at most `bytes_max` bytes."""
        found: list[_FileContent] = []
        for file in list(self._store.index.files):
            rows = file.directory
            firsts, items = rows["first"].astype(np.int64), rows["items"].astype(np.int64)
            kept = items.copy()
            ends = np.append(firsts[1:], file.to_offset)[: len(firsts)]
            for number, (begin, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True)):
                # 0: unknown, of an earlier version. The block before it has no known end.
                if 0 < begin < end and self._gaps.cover(begin, end):
                    is_recent = end > self._store.recent_begin
                    self.recent_count += is_recent
                    kept[number] = items[number] if is_recent else 0
                if number % BLOCKS_A_SLICE == 0:
                    yield []
            found.append(_FileContent(file, 0, 0).plus(kept, items, PAIR_SIZE))
            yield []
        return self._choose(found, bytes_max)

    def _choose(self, files: Sequence[_FileContent], bytes_max: int) -> SparseFiles | None:
        """Return the first adjacent files to rewrite.

        Each of them has mostly dead entries. One that has no such neighbour takes the smaller
        neighbour with it: a file with the same range would have the same name.
        """
        if len(files) == 1:
            self.lone_count += _frees_enough(files)
            return None
        # A replica rebuilds a damaged file only when it is the master.
        damaged = self._store.damaged_files
        is_usable = [one.file.name not in damaged for one in files]
        is_sparse = [
            usable and one.kept_bytes <= one.freed_bytes
            for usable, one in zip(is_usable, files, strict=True)
        ]
        for begin, end in _parts(files, is_sparse, bytes_max):
            wider = [(begin, end)]
            if end - begin == 1:
                wider = [(begin - 1, end), (begin, end + 1)]
            groups = [files[a:b] for a, b in wider if a >= 0 and all(is_usable[a:b])]
            for group in sorted(groups, key=_kept_of):
                is_pair = len(group) >= FILES_MIN and _kept_of(group) <= bytes_max
                if is_pair and _frees_enough(group):
                    return SparseFiles([one.file for one in group], _kept_of(group))
        return None


def _parts(
    files: Sequence[_FileContent], is_sparse: Sequence[bool], bytes_max: int
) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of each run of sparse files that keep at most `bytes_max`."""
    begin = kept_bytes = 0
    for number, one in enumerate(files):
        is_full = kept_bytes + one.kept_bytes > bytes_max
        if (is_full or not is_sparse[number]) and begin < number:
            yield begin, number
            begin, kept_bytes = number, 0
        if is_sparse[number]:
            kept_bytes += one.kept_bytes
        else:
            begin, kept_bytes = number + 1, 0
    if begin < len(files):
        yield begin, len(files)


def _frees_enough(group: Iterable[_FileContent]) -> bool:
    freed_bytes = sum(one.freed_bytes for one in group)
    return freed_bytes >= max(FREED_BYTES_MIN, _kept_of(group))


def _kept_of(group: Iterable[_FileContent]) -> int:
    return sum(one.kept_bytes for one in group)


def _kept_entries(
    rows: npt.NDArray[np.void], keys: npt.NDArray[np.int64], lows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the number of entries that a rewrite keeps of each block, and of all its entries."""
    row_keys = rows["key_1"].astype(np.int64) << 32 | rows["key_2"].astype(np.int64)
    firsts, items = rows["first"].astype(np.int64), rows["items"].astype(np.int64)
    kept = np.zeros(len(rows), np.int64)
    if len(keys):
        places = np.minimum(np.searchsorted(keys, row_keys), len(keys) - 1)
        is_known = keys[places] == row_keys  # Other entries belong to deleted topics.
        kept[is_known] = (firsts + items - np.maximum(firsts, lows[places]))[is_known]
    return np.clip(kept, 0, items), items


@final
class _Gaps:
    """The old gaps of the log, for look-ups in log order.

    A repeated send must find its message in a recent gap, so that it is not stored again.
    """

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._log = store.log
        self._known: tuple[Pack, npt.NDArray[np.int64]] | None = None  # the last pack

    def _of(self, segment: Segment) -> npt.NDArray[np.int64]:
        if segment.pack is None:
            return np.zeros((0, 2), np.int64)
        if self._known is None or self._known[0] is not segment.pack:
            try:
                self._known = segment.pack, self._log.reader.gaps(segment)
            except LogDamaged as error:  # The search and the merge end until it is derived.
                raise BlockFileDamaged(str(error)) from error
        return self._known[1]

    def cover(self, begin: int, end: int) -> bool:
        """Return whether gaps cover the log between two log offsets."""
        at = begin
        while at < end:
            if not self._log.min_offset <= at < self._log.log_end:
                return False
            gaps = self._of(self._log.segment_of(LogOffset(at)))
            number = int(np.searchsorted(gaps[:, 0], at, "right")) - 1
            if number < 0 or gaps[number, 1] <= at:
                return False
            at = int(gaps[number, 1])
        return True

    def contain(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return for each log offset whether it is in a gap."""
        found = np.zeros(len(offsets), np.bool_)
        is_old = offsets < self._store.recent_begin
        left = np.flatnonzero((offsets >= self._log.min_offset) & is_old)
        left = left[np.argsort(offsets[left], kind="stable")]
        while len(left):
            segment = self._log.segment_of(LogOffset(int(offsets[left[0]])))
            count = int(np.searchsorted(offsets[left], segment.end)) or len(left)
            part, left = left[:count], left[count:]
            gaps = self._of(segment)
            if len(gaps):
                numbers = np.searchsorted(gaps[:, 0], offsets[part], "right") - 1
                is_behind = numbers >= 0
                found[part] = is_behind & (offsets[part] < gaps[np.maximum(numbers, 0), 1])
        return found
