"""Dead entries of queue and index files: which files have mostly dead ones (ADR 0070).

An entry of a queue file is dead if it is before the low of its queue, or if its topic is deleted. A
pair of an index file is dead if it points into a gap of a pack: a stub keeps its pairs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from itertools import accumulate, islice
from typing import Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from tidemill.broker.engine.layout import block_file
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.queue_entry import SIZE
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.store.block_file import BlockFile
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.store.mappings import Mappings
from tidemill.broker.engine.store.message_index import PAIR_SIZE
from tidemill.broker.engine.store.pack import Pack
from tidemill.broker.engine.store.segment import Segment
from tidemill.broker.engine.upkeep.live_bytes import LiveBytes

FREED_BYTES_MIN: Final = 64 << 10  # of one rewrite: fewer dead bytes stay
FILES_MIN: Final = 2  # of one rewrite
QUEUES_A_SLICE: Final = 256
BLOCKS_A_SLICE: Final = 32  # of index files: each may read the directories of some packs


class SparseFiles(NamedTuple):
    """Adjacent files with mostly dead entries, and the bytes that remain of them."""

    files: list[BlockFile]
    kept_bytes: int


class _FileContent(NamedTuple):
    """The bytes that a rewrite keeps of a file, and those that it frees."""

    file: BlockFile
    kept_bytes: int
    freed_bytes: int


@final
class DeadEntries:
    """The dead entries of one broker."""

    def __init__(
        self, store: MessageStore, catalog: Catalog, mappings: Mappings, live_bytes: LiveBytes
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._live_bytes = live_bytes
        self._gaps = _Gaps(store, mappings)
        # Files with mostly dead entries that were the only ones of their kind at the last search.
        self.lone_count = 0

    def first_kept(self, queue: ConsumeQueue) -> int:
        """Return the queue offset of the first entry that a merge keeps.

        The live bytes subtract a dead message by its entry. Until then it stays.
        """
        return self._live_bytes.first_counted(queue, at_most=queue.low)

    def kept_pairs(self, data: memoryview) -> bytes:
        """Return the pairs of an index block that do not point into gaps."""
        offsets = np.frombuffer(data, ">i8", offset=len(data) // 2)
        is_kept = ~self._gaps.contain(offsets.astype(np.int64))
        hashes = np.frombuffer(data, ">u8", len(offsets))
        return hashes[is_kept].tobytes() + offsets[is_kept].tobytes()

    # ------------------------------------------------------------ files with mostly dead entries

    def find_sparse_queues(self, bytes_max: int) -> Generator[list[File], None, SparseFiles | None]:
        """Return adjacent queue files that may become one file of at most `bytes_max` bytes."""
        keys, lows = yield from self._find_lows()
        found: list[_FileContent] = []
        for file in list(self._store.queue_files):
            rows = file.directory
            row_keys = _keys_of(rows["key_1"], rows["key_2"])
            firsts, items = rows["first"].astype(np.int64), rows["items"].astype(np.int64)
            kept = np.zeros(len(rows), np.int64)
            if len(keys):
                places = np.minimum(np.searchsorted(keys, row_keys), len(keys) - 1)
                # Entries of other queues belong to deleted topics.
                is_known = keys[places] == row_keys
                kept[is_known] = (firsts + items - np.maximum(firsts, lows[places]))[is_known]
            found.append(_content_of(file, np.clip(kept, 0, items), items, SIZE))
            yield []
        return self._choose(found, bytes_max)

    def _find_lows(
        self,
    ) -> Generator[list[File], None, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Return the keys of all queues, in order, and the first entries that they keep."""
        keys: list[int] = []
        lows: list[int] = []
        queues = iter(list(self._catalog.queues.values()))
        while part := list(islice(queues, QUEUES_A_SLICE)):
            keys += [queue.topic_id << 32 | queue.queue_id for queue in part]
            lows += [self.first_kept(queue) if queue.low else 0 for queue in part]
            yield []
        order = np.argsort(np.array(keys, np.int64))
        return np.array(keys, np.int64)[order], np.array(lows, np.int64)[order]

    def find_sparse_index(self, bytes_max: int) -> Generator[list[File], None, SparseFiles | None]:
        """Return adjacent index files that may become one file of at most `bytes_max` bytes."""
        found: list[_FileContent] = []
        for file in list(self._store.index.files):
            rows = file.directory
            firsts, items = rows["first"].astype(np.int64), rows["items"].astype(np.int64)
            kept = items.copy()
            ends = np.append(firsts[1:], file.to_offset)[: len(firsts)]
            for number, (begin, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True)):
                if begin and self._gaps.cover(begin, end):
                    kept[number] = 0
                if number % BLOCKS_A_SLICE == 0:
                    yield []
            found.append(_content_of(file, kept, items, PAIR_SIZE))
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
        for begin, end in _stretches([one.kept_bytes <= one.freed_bytes for one in files]):
            wider = [(begin, end)]
            if end - begin == 1:
                wider = [(begin - 1, end), (begin, end + 1)]
            groups = [
                _within(files[a:b], bytes_max) for a, b in wider if a >= 0 and b <= len(files)
            ]
            for group in sorted(groups, key=_kept_of):
                if self._is_worthwhile(group):
                    return SparseFiles([one.file for one in group], _kept_of(group))
        return None

    def _is_worthwhile(self, group: Sequence[_FileContent]) -> bool:
        # A replica rebuilds a damaged file only when it is the master.
        damaged = self._store.damaged_files
        if len(group) < FILES_MIN or any(one.file.name in damaged for one in group):
            return False
        return _frees_enough(group)


def _stretches(is_sparse: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the begin and the end of each run of adjacent True values."""
    edges = np.flatnonzero(np.diff([False, *is_sparse, False])).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _within(group: Sequence[_FileContent], bytes_max: int) -> Sequence[_FileContent]:
    """Return the first files of a group that together keep at most `bytes_max` bytes."""
    ends = accumulate(one.kept_bytes for one in group)
    return [one for one, end in zip(group, ends, strict=True) if end <= bytes_max]


def _frees_enough(group: Iterable[_FileContent]) -> bool:
    freed_bytes = sum(one.freed_bytes for one in group)
    return freed_bytes >= max(FREED_BYTES_MIN, _kept_of(group))


def _kept_of(group: Iterable[_FileContent]) -> int:
    return sum(one.kept_bytes for one in group)


def _content_of(
    file: BlockFile, kept: npt.NDArray[np.int64], items: npt.NDArray[np.int64], item_size: int
) -> _FileContent:
    rows = int(np.count_nonzero(kept)) * block_file.ROW_SIZE
    kept_bytes = rows + int(kept.sum()) * item_size
    all_bytes = len(kept) * block_file.ROW_SIZE + int(items.sum()) * item_size
    return _FileContent(file, kept_bytes, all_bytes - kept_bytes)


def _keys_of(
    topic_ids: npt.NDArray[np.uint32], queue_ids: npt.NDArray[np.uint32]
) -> npt.NDArray[np.int64]:
    return topic_ids.astype(np.int64) << 32 | queue_ids.astype(np.int64)


@final
class _Gaps:
    """The gaps of the log, for look-ups in log order."""

    def __init__(self, store: MessageStore, mappings: Mappings) -> None:
        self._log = store.log
        self._mappings = mappings
        self._known: tuple[Pack, npt.NDArray[np.int64]] | None = None  # the last pack

    def _of(self, segment: Segment) -> npt.NDArray[np.int64]:
        if segment.pack is None:
            return np.zeros((0, 2), np.int64)
        if self._known is None or self._known[0] is not segment.pack:
            self._known = segment.pack, segment.pack.gaps(self._mappings, segment.name)
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
        left = np.flatnonzero(offsets >= self._log.min_offset)
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
