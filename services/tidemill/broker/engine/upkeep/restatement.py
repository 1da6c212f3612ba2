"""Restatement: state that only old records state is recorded again.

Retention calls it before the state floor moves, or before a segment is dropped. A replay from the
new begin then finds all live state.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TypeVar, final

import numpy as np

from tidemill.broker.engine.dedup.tables import KeyTables
from tidemill.broker.engine.fold import Fold
from tidemill.broker.engine.layout import trim
from tidemill.broker.engine.layout.audit import AuditRow
from tidemill.broker.engine.layout.dedup import StatedKeys
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.state import (
    StatedAudit,
    StatedConfig,
    StatedDeliveries,
    StatedProgress,
    StatedQueues,
)
from tidemill.broker.engine.layout.trim import Trim, TrimmedQueue, TrimReason
from tidemill.broker.engine.pop.acks import RoundAcks
from tidemill.broker.engine.pop.delivery_table import FREE
from tidemill.broker.engine.pop.progress import PopProgress
from tidemill.broker.engine.pop.stated_rows import (
    DELIVERIES_A_STATE_RECORD,
    delivery_rows_of,
    slot_ranges,
)
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.transaction.checks import HalfChecks
from tidemill.broker.engine.upkeep.checkpoint import PROGRESS_A_SECTION
from tidemill.broker.engine.upkeep.parts import Steps, UpkeepParts

# Each of these takes about a millisecond per slice:
KEYS_SEEN_A_SLICE = 4096
ENDS_A_RECORD = 1024  # ends of queues
AUDIT_ROWS_SEEN_A_SLICE = 256
AUDIT_BYTES_A_RECORD = 32 << 10

Key = TypeVar("Key")
Value = TypeVar("Value")


@final
class Restatement:
    """Records live state again that only old records state."""

    def __init__(
        self,
        parts: UpkeepParts,
        acks: RoundAcks,
        fold: Fold,
        half_checks: HalfChecks,
        keys: KeyTables,
    ) -> None:
        self._keys = keys
        self._log = parts.store.log
        self._half_checks = half_checks
        self._catalog = parts.catalog
        self._pops = parts.pops
        self._acks = acks
        self._fold = fold
        self._recreate_block_ms = parts.config.recreate_block_ms

    def restate(self, end: int, now_ms: int) -> Steps:
        """Record all live state that is stated only before log offset `end`, except lows."""
        yield from self._restate_config(end, now_ms)
        yield from self._restate_audit(end, now_ms)
        yield from self._restate_queues(end, now_ms)
        for _ in self._half_checks.restate(end, now_ms):
            yield []
        yield from self._restate_keys(end, now_ms)
        yield from self._restate_letters(end, now_ms)
        for stated in self._catalog.operations.stated_before(end, now_ms):
            # At once: items that an operation changes between two slices must count.
            self._fold.append(stated, now_ms)
            yield []
        # Deliveries first: an ack in between then settles a stated one, also in a replay.
        yield from self._restate_deliveries(end, now_ms)
        yield from self._restate_progress(end, now_ms)

    def restate_lows(self, end: int, now_ms: int) -> Steps:
        """Record the lows again: dead messages before `end` must not come back in a replay."""
        for found in self._queues_in_parts(
            lambda queue: queue.low > 0 and queue.trimmed_at < end, trim.ROWS_MAX
        ):
            rows = [
                TrimmedQueue(queue.topic_id, queue.queue_id, TrimReason.STATED, queue.low)
                for queue in found
            ]
            if rows:
                self._fold.append(Trim(rows), now_ms)
            yield []

    def _restate_config(self, end: int, now_ms: int) -> Steps:
        catalog = self._catalog
        keys = yield from _find_keys(catalog.stated_at, lambda stated_at: stated_at < end)
        for key in keys:
            # The item may have changed between two slices: the change must not be undone.
            item = catalog.find_stated_before(key, LogOffset(end))
            if item is not None:
                if item["op"] == "topic":
                    item = self._keys.with_times(item)
                self._fold.append(StatedConfig(item), now_ms)
            yield []
        for item in catalog.deleted_names.items(end, now_ms - self._recreate_block_ms):
            self._fold.append(StatedConfig(item), now_ms)
            yield []

    def _restate_audit(self, end: int, now_ms: int) -> Steps:
        kept = self._catalog.audit
        sequences = kept.stated_before(end)
        yield []
        for chunk in _in_parts(sequences, AUDIT_ROWS_SEEN_A_SLICE):
            together: list[AuditRow] = []
            size = 0
            # Records that newer ones have displaced between two slices stay away.
            for row in filter(None, map(kept.find, chunk)):
                together.append(row)
                size += len(row.fields)
                if size >= AUDIT_BYTES_A_RECORD:
                    self._fold.append(StatedAudit(together), now_ms)
                    together, size = [], 0
                    yield []
            if together:
                self._fold.append(StatedAudit(together), now_ms)
            yield []

    def _restate_queues(self, end: int, now_ms: int) -> Steps:
        for found in self._queues_in_parts(lambda queue: queue.stated_at < end, ENDS_A_RECORD):
            ends = [(queue.topic_id, queue.queue_id, queue.max_offset) for queue in found]
            if ends:
                self._fold.append(StatedQueues(ends), now_ms)
            yield []

    def _restate_keys(self, end: int, now_ms: int) -> Steps:
        """Record the rows of known dedup keys with messages before log offset `end`."""
        keys = self._keys
        low, stated_at = keys.stated_before
        if stated_at < end:
            low = 0  # The records that stated these rows are before the new state floor, too.
        begin = int(self._log.log_end)
        for topic_id in list(keys.tables):
            for rows in keys.known_rows(topic_id, low=low, end=end):
                if rows:
                    # At once: a key that is freed later must not come back.
                    self._fold.append(StatedKeys([(topic_id, row) for row in rows]), now_ms)
                yield []
        keys.stated_before = end, begin if low == 0 else stated_at

    def _restate_letters(self, end: int, now_ms: int) -> Steps:
        """Record the settled dead letters of topics with a record before log offset `end`."""
        letters = self._catalog.settled_letters
        letters.trim_all(self._catalog.queues)
        for topic_id in letters.topic_ids:
            log_end = LogOffset(self._log.log_end)
            for stated in letters.begin_restatement(topic_id, before=end, log_end=log_end):
                # A state is final, so a block stays true between two slices. A deleted topic must
                # not come back.
                if topic_id in self._catalog.topics:
                    self._fold.append(stated, now_ms)
                yield []
            yield []

    def _queues_in_parts(
        self, is_due: Callable[[ConsumeQueue], bool], size: int
    ) -> Iterator[list[ConsumeQueue]]:
        """Yield the due queues of topics that exist, at most `size` at once, or none of them."""
        known = self._catalog.queues
        for keys in _in_parts(list(known), size):
            # Topics may be deleted between two slices. Their queues must not come back.
            found = [known.get(key) for key in keys]
            yield [
                queue
                for queue in found
                if queue is not None and is_due(queue) and self._catalog.is_alive(queue.topic_id)
            ]

    def _restate_progress(self, end: int, now_ms: int) -> Steps:
        # Keys only: a tuple of each key and progress would burden the garbage collector.
        known = self._pops.progress
        keys = yield from _find_keys(known, lambda progress: _is_due(progress, end))
        for chunk in _in_parts(keys, PROGRESS_A_SECTION):
            # Gathered acks are applied but not logged. They must precede the record below.
            self._acks.record(now_ms)
            found = [known.get(key) for key in chunk]
            # Progress that waits to be forgotten must not come back.
            left = [one for one in found if one is not None and not self._pops.is_deleted(one)]
            rows = [one.as_row() for one in left if _is_due(one, end)]
            if rows:
                self._fold.append(StatedProgress(rows), now_ms)
            yield []

    def _restate_deliveries(self, end: int, now_ms: int) -> Steps:
        table = self._pops.table
        for first, last in slot_ranges(self._pops):
            self._acks.record(now_ms)
            stated = np.frombuffer(table.stated_at, dtype=np.int64)[first:last]
            ids = np.frombuffer(table.ids, dtype=np.int64)[first:last]
            slots = np.flatnonzero((ids != FREE) & (stated < end)) + first
            del stated, ids
            for begin in range(0, len(slots), DELIVERIES_A_STATE_RECORD):
                chunk = slots[begin : begin + DELIVERIES_A_STATE_RECORD]
                self._fold.append(StatedDeliveries(delivery_rows_of(self._pops, chunk)), now_ms)
            yield []


def _is_due(progress: PopProgress, end: int) -> bool:
    """Whether progress is stated only before log offset `end`.

    The settlement of a FIFO batch changes it, and counts only if the CK of the batch is known.
    """
    batch_id = progress.ordered.batch_id if progress.ordered is not None else -1
    return progress.stated_at < end or 0 <= batch_id < end


def _find_keys(
    known: Mapping[Key, Value], is_due: Callable[[Value], bool]
) -> Generator[list[File], None, list[Key]]:
    """Return the keys of due values; each step looks at some of them."""
    keys: list[Key] = []
    for part in _in_parts(list(known), KEYS_SEEN_A_SLICE):
        keys += [key for key in part if key in known and is_due(known[key])]
        yield []
    return keys


def _in_parts(keys: Sequence[Key], size: int) -> Iterator[Sequence[Key]]:
    for first in range(0, len(keys), size):
        yield keys[first : first + size]
