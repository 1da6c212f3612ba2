"""Trims: the queues begin later, because their first messages are dead.

Retention and purges share them. An EXPIRE record moves the groups past the messages that they never
popped. The TRIM record follows. Deliveries in flight stay: their acks succeed, and at their
deadlines the messages expire.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import suppress
from typing import final

from tidemill.broker.engine.fold import Fold
from tidemill.broker.engine.layout import expiry, trim
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.expiry import ExpiredRange, Expiry
from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.layout.trim import Trim, TrimmedQueue, TrimReason
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.pop.acks import RoundAcks
from tidemill.broker.engine.pop.queue_queries import find_expired
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.queue_entries import ENTRIES_A_SLICE, read_entries, size_of
from tidemill.broker.engine.store.consume_queue import ConsumeQueue

GROUPS_A_SLICE = 1_024  # seen, to find the readers of topics
EXPIRED_A_SLICE = 256  # queues of groups: a millisecond
READ_COST = 112  # of a row, beside its entries, in entries

# The groups that have begun each topic.
Readers = Mapping[TopicId, Sequence[GroupId]]


@final
class QueueTrims:
    """The trims of one broker, and what they removed since its start."""

    def __init__(self, catalog: Catalog, pops: PopState, acks: RoundAcks, fold: Fold) -> None:
        self._catalog = catalog
        self._pops = pops
        self._acks = acks
        self._fold = fold
        self.messages: Counter[tuple[TopicId, TrimReason]] = Counter()
        self.size_bytes: Counter[tuple[TopicId, TrimReason]] = Counter()
        self.purged_count = 0  # rows of purges

    def find_readers(self, topic_ids: Collection[TopicId]) -> Generator[None, None, Readers]:
        """Return the groups that have begun to read each topic, in slices."""
        wanted = set(topic_ids)
        readers: dict[TopicId, list[GroupId]] = {id_: [] for id_ in wanted}
        for n, group_id in enumerate(list(self._catalog.groups), 1):
            for topic_id in wanted & self._pops.index.topic_ids_of(group_id):
                readers[topic_id].append(group_id)
            if n % GROUPS_A_SLICE == 0:
                yield
        return readers

    def trim(
        self,
        rows: Sequence[TrimmedQueue],
        readers: Readers,
        now_ms: int,
        *,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Generator[None, None, None]:
        """Let queues begin later, in slices. Rows without effect are omitted.

        `is_wanted` is asked in each slice with records: the reason may have ended.
        """
        for begin in range(0, len(rows), trim.ROWS_MAX):
            part = rows[begin : begin + trim.ROWS_MAX]
            sizes = yield from self._sizes_of(part)
            yield from self._expire(part, readers, now_ms, is_wanted)
            # From here on without a slice: another trim must not come between count and record.
            found = [row for row in part if self._is_effective(row)]
            if not found or not is_wanted():
                continue
            for row in found:
                key = row.topic_id, row.reason
                self.messages[key] += row.low - self._queue(row).min_offset
                self.size_bytes[key] += sizes[row]
                self.purged_count += row.reason is TrimReason.PURGE
            # Gathered acks are applied but not logged. They must precede the record below.
            self._acks.record(now_ms)
            self._fold.append(Trim(found), now_ms)
            yield

    def _queue(self, row: TrimmedQueue) -> ConsumeQueue:
        return self._catalog.queues[row.topic_id, row.queue_id]

    def _is_effective(self, row: TrimmedQueue) -> bool:
        if not self._catalog.is_alive(row.topic_id):
            return False  # Deleted between two slices.
        queue = self._catalog.queues.get((row.topic_id, row.queue_id))
        return queue is not None and queue.min_offset < row.low <= queue.max_offset

    def _sizes_of(
        self, rows: Sequence[TrimmedQueue]
    ) -> Generator[None, None, dict[TrimmedQueue, int]]:
        """Return the bytes that rows remove; messages with damaged entries add nothing."""
        sizes, left = dict.fromkeys(rows, 0), ENTRIES_A_SLICE
        for row in rows:
            offset = 0
            while self._is_effective(row):
                queue = self._queue(row)
                offset = max(offset, int(queue.min_offset))
                count = min(row.low - offset, ENTRIES_A_SLICE)
                if count <= 0:
                    break
                # A damaged file is rebuilt later. The count is for metrics.
                with suppress(BlockFileDamaged):
                    sizes[row] += size_of(read_entries(queue, offset, count))
                offset += count
                left -= count + READ_COST
                if left <= 0:
                    left = ENTRIES_A_SLICE
                    yield
        return sizes

    def _expire(
        self,
        rows: Sequence[TrimmedQueue],
        readers: Readers,
        now_ms: int,
        is_wanted: Callable[[], bool],
    ) -> Generator[None, None, None]:
        """Move the groups past the messages that they never popped."""
        ranges: list[ExpiredRange] = []
        seen = 0
        for row in rows:
            for group_id in readers.get(row.topic_id, ()):
                if not self._is_effective(row) or not is_wanted():
                    break
                if group_id in self._catalog.groups:
                    key = group_id, row.topic_id, row.queue_id
                    ranges += find_expired(self._pops, self._pops.progress_of(*key), row.low)
                seen += 1
                if seen % EXPIRED_A_SLICE == 0:
                    self.record_expired(ranges, now_ms)
                    ranges = []
                    yield
        self.record_expired(ranges, now_ms)

    def record_expired(self, ranges: Sequence[ExpiredRange], now_ms: int) -> None:
        """Record messages that groups never popped and that they lose; the groups skip them.

        No slice may come between the search of the ranges and this call.
        """
        if not ranges:
            return
        # Gathered acks are applied but not logged. They must precede the record below.
        self._acks.record(now_ms)
        for begin in range(0, len(ranges), expiry.ROWS_MAX):
            part = list(ranges[begin : begin + expiry.ROWS_MAX])
            self._fold.append(Expiry(part), now_ms)
            for one in part:
                progress = self._pops.progress[one.group_id, one.topic_id, one.queue_id]
                self._pops.count("expired", progress, one.end - one.begin)
