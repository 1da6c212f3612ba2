"""The table of transactions: open half messages, and the remembered results of others.

Only the fold changes it. Rows are in the order of their half ids, in blocks. A snapshot takes the
blocks as they are; a block that it shares is copied before its next change.

    state         event        next state
    (unknown)     HALF         HALF          a new half message, or a copy after a restatement
    HALF          HALF         HALF          a copy; only its log offset is new
    HALF          CHECKED      HALF
    HALF          COMMITTED    COMMITTED
    HALF          ROLLED_BACK  ROLLED_BACK
    HALF          EXPIRED      EXPIRED
    EXPIRED       RECOVERED    RECOVERED
    (unknown)     a result     that result   the log before the state floor had the half message

A record that fits none of these rows changes nothing: `TRANSITIONS` has them all.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from enum import Enum, auto
from typing import Final, final

import numpy as np

from tidemill.broker.engine.layout.message import HalfMessage
from tidemill.broker.engine.layout.numbers import HalfId, LogOffset, TopicId
from tidemill.broker.engine.layout.transaction import (
    ROW,
    ROW_DTYPE,
    ROW_SIZE,
    TransactionRow,
    TransactionState,
)
from tidemill.broker.engine.transaction.config import TransactionConfig
from tidemill.broker.engine.transaction.results import ResultOrder

BLOCK_ROWS_MAX = 4_096  # 147 KB: a copy takes 20 us
FORGOTTEN_A_LOOK = 1_024  # by a look of retention, about 2 ms
_NO_AGE = 0  # a time at which no result is old
BLOCK_ROWS_MERGED = BLOCK_ROWS_MAX // 2  # two neighbours with fewer rows become one block


class TransactionEvent(Enum):
    """The effects of records on a transaction."""

    HALF = auto()
    CHECKED = auto()
    COMMITTED = auto()
    ROLLED_BACK = auto()
    EXPIRED = auto()
    RECOVERED = auto()


_HALF = TransactionState.HALF
_EXPIRED_STATES: Final = (TransactionState.EXPIRED, TransactionState.RECOVERED)
_RESULTS: Final = {
    TransactionEvent.COMMITTED: TransactionState.COMMITTED,
    TransactionEvent.ROLLED_BACK: TransactionState.ROLLED_BACK,
    TransactionEvent.EXPIRED: TransactionState.EXPIRED,
    TransactionEvent.RECOVERED: TransactionState.RECOVERED,
}
# By state (None: unknown) and event. A pair without a row changes nothing.
TRANSITIONS: Final[dict[tuple[TransactionState | None, TransactionEvent], TransactionState]] = {
    (None, TransactionEvent.HALF): _HALF,
    (_HALF, TransactionEvent.HALF): _HALF,
    (_HALF, TransactionEvent.CHECKED): _HALF,
    (_HALF, TransactionEvent.COMMITTED): TransactionState.COMMITTED,
    (_HALF, TransactionEvent.ROLLED_BACK): TransactionState.ROLLED_BACK,
    (_HALF, TransactionEvent.EXPIRED): TransactionState.EXPIRED,
    (TransactionState.EXPIRED, TransactionEvent.RECOVERED): TransactionState.RECOVERED,
    **{(None, event): state for event, state in _RESULTS.items()},
}


@final
class _Block:
    """Some rows, in the order of their half ids."""

    __slots__ = ("half_ids", "is_shared", "rows")

    def __init__(self, half_ids: array[int], rows: bytearray) -> None:
        self.half_ids = half_ids
        self.rows = rows
        self.is_shared = False

    def as_array(self) -> np.ndarray:
        """Return the rows without a copy. No row may be added or removed while it is in use."""
        return np.frombuffer(self.rows, dtype=ROW_DTYPE)


@final
class TransactionTable:
    """All transactions that are open or remembered."""

    def __init__(self, config: TransactionConfig) -> None:
        self._outcomes_max = config.outcomes_max
        self._blocks: list[_Block] = []
        self._firsts: list[int] = []  # the first half id of each block
        # A client repeats a decision soon. An operator recovers an expired message within days.
        self._decided = ResultOrder(config.outcome_memory_ms)
        self._expired = ResultOrder(config.expired_memory_ms)
        self.open_count = 0
        self.open_by_topic: Counter[TopicId] = Counter()
        self.forgotten_count = 0  # results that were forgotten before their time

    def __len__(self) -> int:
        return sum(len(block.half_ids) for block in self._blocks)

    @property
    def size_bytes(self) -> int:
        """The size of the rows in a snapshot."""
        return len(self) * ROW_SIZE

    # ------------------------------------------------------------ queries

    def find(self, half_id: int) -> TransactionRow | None:
        """Return a transaction; None if it is unknown or forgotten."""
        found = self._locate(half_id)
        if found is None:
            return None
        block, at = found
        return TransactionRow._make(ROW.unpack_from(block.rows, at * ROW_SIZE))

    def walk(self, after: int = -1) -> Iterator[np.ndarray]:
        """Yield the rows with larger half ids, as arrays of at most one block.

        Each array is a copy. Rows may change between two steps; none is skipped.
        """
        while True:
            number = bisect_right(self._firsts, after) - 1
            if number >= 0 and self._blocks[number].half_ids[-1] <= after:
                number += 1
            number = max(number, 0)
            if number >= len(self._blocks):
                return
            block = self._blocks[number]
            begin = bisect_right(block.half_ids, after)
            rows = block.as_array()[begin:].copy()
            after = block.half_ids[-1]
            yield rows

    def open_before(self, end: int) -> Iterator[list[HalfId]]:
        """Yield the open half messages with their newest record before log offset `end`, by block.

        A block without one yields an empty list.
        """
        for rows in self.walk():
            is_due = (rows["state"] == _HALF) & (rows["log_offset"] < end)
            yield [HalfId(half_id) for half_id in rows["half_id"][is_due].tolist()]

    def oldest_result(self, now_ms: int) -> int | None:
        """Return the log offset of the oldest remembered result; None if there is none.

        First forgets some that are too old: a bounded part, so that a look is one slice.
        """
        self._forget(now_ms, FORGOTTEN_A_LOOK)
        orders = [order for order in (self._decided, self._expired) if order]
        return min((order.oldest[0] for order in orders), default=None)

    def find_oldest_open(self) -> Iterator[tuple[TopicId, HalfId] | None]:
        """Yield the oldest open half message of each topic, and None after each block."""
        topics: set[int] = set()
        for rows in self.walk():
            is_open = rows["state"] == _HALF
            topic_ids, firsts = np.unique(rows["topic_id"][is_open], return_index=True)
            half_ids = rows["half_id"][is_open][firsts]
            for topic_id, half_id in zip(topic_ids.tolist(), half_ids.tolist(), strict=True):
                if topic_id not in topics:
                    topics.add(topic_id)
                    yield TopicId(topic_id), HalfId(half_id)
            if len(topics) >= len(self.open_by_topic):
                return
            yield None

    # ------------------------------------------------------------ fold

    def apply_half(self, half_id: HalfId, half: HalfMessage, log_offset: LogOffset) -> bool:
        """Apply a HALF record; return whether it opened a half message."""
        found = self._locate(half_id)
        if found is not None:
            block, at = found
            row = TransactionRow._make(ROW.unpack_from(block.rows, at * ROW_SIZE))
            if (TransactionState(row.state), TransactionEvent.HALF) in TRANSITIONS:
                self._put(half_id, row._replace(log_offset=log_offset))
            return False
        row = TransactionRow(
            half_id,
            log_offset,
            half.next_check_ms,
            half.topic_id,
            half.period_ms,
            half.checks,
            half.checks_max,
            _HALF,
        )
        self._insert(half_id, ROW.pack(*row))
        self._count_open(half.topic_id, 1)
        return True

    def apply_check(self, half_id: HalfId, checks: int, next_check_ms: int) -> None:
        """Apply a CHECKED record."""
        row = self.find(half_id)
        if row is not None and _next_state(row, TransactionEvent.CHECKED) is not None:
            self._put(half_id, row._replace(checks=checks, time_ms=next_check_ms))

    def apply_result(
        self,
        half_id: HalfId,
        event: TransactionEvent,
        topic_id: TopicId,
        log_offset: LogOffset,
        stored_at_ms: int,
    ) -> None:
        """Apply a record that ends a transaction. `topic_id` counts if the half is unknown."""
        row = self.find(half_id)
        state = _next_state(row, event)
        if state is None:
            return
        if row is None:
            row = TransactionRow(half_id, log_offset, stored_at_ms, topic_id, 0, 0, 0, state)
            self._insert(half_id, ROW.pack(*row))
        else:
            if row.state == _HALF:
                self._count_open(row.topic_id, -1)
            row = row._replace(log_offset=log_offset, time_ms=stored_at_ms, state=state)
            self._put(half_id, row)
        order = self._order_of(state)
        order.add(log_offset, half_id)
        if len(order) > self._outcomes_max:
            self._forget(_NO_AGE, 2)  # Two for each new one: the number falls to the bound.

    def forget_topic(self, topic_id: TopicId) -> None:
        """Remove the open half messages of a deleted topic. They can no longer be committed."""
        if not self.open_by_topic.get(topic_id):
            return
        for number in range(len(self._blocks) - 1, -1, -1):
            rows = self._blocks[number].as_array()
            is_kept = ~((rows["topic_id"] == topic_id) & (rows["state"] == _HALF))
            if is_kept.all():
                continue
            kept = rows[is_kept]
            block = _Block(array("q", kept["half_id"].tolist()), bytearray(kept.tobytes()))
            self._blocks[number] = block
            if len(kept):
                self._firsts[number] = block.half_ids[0]
            else:
                del self._blocks[number], self._firsts[number]
        self._count_open(topic_id, -self.open_by_topic[topic_id])

    def _count_open(self, topic_id: TopicId, change: int) -> None:
        self.open_count += change
        self.open_by_topic[topic_id] += change
        if not self.open_by_topic[topic_id]:
            del self.open_by_topic[topic_id]

    def _order_of(self, state: int) -> ResultOrder:
        return self._expired if state in _EXPIRED_STATES else self._decided

    def _forget(self, now_ms: int, limit: int) -> None:
        """Forget up to `limit` results of each order that are too old or too many."""
        for order in (self._decided, self._expired):
            for _ in range(limit):
                if not order:
                    break
                log_offset, half_id = order.oldest
                row = self.find(half_id)
                if row is not None and row.log_offset == log_offset:
                    is_old = row.time_ms <= now_ms - order.memory_ms
                    if not is_old and len(order) <= self._outcomes_max:
                        break
                    self.forgotten_count += not is_old
                    self._remove(HalfId(half_id))
                # Otherwise a later record has changed the result: its place is behind.
                order.drop_oldest()

    # ------------------------------------------------------------ snapshots

    def freeze(self) -> list[bytearray]:
        """Return the rows as of now, as encoded blocks that never change."""
        for block in self._blocks:
            block.is_shared = True
        return [block.rows for block in self._blocks]

    def load(self, encoded: bytes | memoryview) -> None:
        """Add a block of a snapshot. Call it in the order of the blocks that `freeze` returned."""
        rows = np.frombuffer(encoded, dtype=ROW_DTYPE)
        half_ids = array("q", rows["half_id"].tolist())
        if half_ids:
            self._blocks.append(_Block(half_ids, bytearray(encoded)))
            self._firsts.append(half_ids[0])
        is_open = rows["state"] == _HALF
        topic_ids, counts = np.unique(rows["topic_id"][is_open], return_counts=True)
        for topic_id, count in zip(topic_ids.tolist(), counts.tolist(), strict=True):
            self._count_open(TopicId(topic_id), count)

    def end_load(self) -> None:
        """Bring the results of a snapshot into the order of their records."""
        parts = [block.as_array() for block in self._blocks]
        if not parts:
            return
        rows = np.concatenate(parts)
        rows = rows[rows["state"] != _HALF]
        rows = rows[np.argsort(rows["log_offset"], kind="stable")]
        is_expired = np.zeros(len(rows), np.bool_)
        for state in _EXPIRED_STATES:
            is_expired |= rows["state"] == state
        for order, some in ((self._decided, rows[~is_expired]), (self._expired, rows[is_expired])):
            order.load(some["log_offset"].tolist(), some["half_id"].tolist())

    # ------------------------------------------------------------ blocks

    def _locate(self, half_id: int) -> tuple[_Block, int] | None:
        """Return the block and the index of a row."""
        number = bisect_right(self._firsts, half_id) - 1
        if number < 0:
            return None
        block = self._blocks[number]
        half_ids = block.half_ids
        at = bisect_left(half_ids, half_id)
        return (block, at) if at < len(half_ids) and half_ids[at] == half_id else None

    def _writable(self, number: int) -> _Block:
        block = self._blocks[number]
        if block.is_shared:
            block = self._blocks[number] = _Block(block.half_ids[:], block.rows[:])
        return block

    def _put(self, half_id: HalfId, row: TransactionRow) -> None:
        block = self._writable(bisect_right(self._firsts, half_id) - 1)
        at = bisect_left(block.half_ids, half_id)
        ROW.pack_into(block.rows, at * ROW_SIZE, *row)

    def _insert(self, half_id: HalfId, encoded: bytes) -> None:
        number = max(bisect_right(self._firsts, half_id) - 1, 0)
        if not self._blocks or (
            len(self._blocks[number].half_ids) >= BLOCK_ROWS_MAX
            and number == len(self._blocks) - 1
            and half_id > self._blocks[number].half_ids[-1]
        ):
            # The usual case of a full block: a new half message has the highest id.
            self._blocks.append(_Block(array("q", [half_id]), bytearray(encoded)))
            self._firsts.append(half_id)
            return
        block = self._writable(number)
        if len(block.half_ids) >= BLOCK_ROWS_MAX:
            middle = BLOCK_ROWS_MAX // 2
            upper = _Block(block.half_ids[middle:], block.rows[middle * ROW_SIZE :])
            del block.half_ids[middle:], block.rows[middle * ROW_SIZE :]
            self._blocks.insert(number + 1, upper)
            self._firsts.insert(number + 1, upper.half_ids[0])
            if half_id > upper.half_ids[0]:
                number, block = number + 1, upper
        at = bisect_left(block.half_ids, half_id)
        block.half_ids.insert(at, half_id)
        block.rows[at * ROW_SIZE : at * ROW_SIZE] = encoded
        self._firsts[number] = block.half_ids[0]

    def _remove(self, half_id: HalfId) -> None:
        number = bisect_right(self._firsts, half_id) - 1
        block = self._writable(number)
        at = bisect_left(block.half_ids, half_id)
        del block.half_ids[at], block.rows[at * ROW_SIZE : (at + 1) * ROW_SIZE]
        if not block.half_ids:
            del self._blocks[number], self._firsts[number]
            return
        self._firsts[number] = block.half_ids[0]
        if len(block.half_ids) < BLOCK_ROWS_MERGED:
            self._merge(number)

    def _merge(self, number: int) -> None:
        """Join a small block and a small neighbour, so that the blocks stay few."""
        for low in (number - 1, number):
            if low >= 0 and low + 1 < len(self._blocks):
                upper = self._blocks[low + 1]
                count = len(self._blocks[low].half_ids) + len(upper.half_ids)
                if count <= BLOCK_ROWS_MERGED:
                    block = self._writable(low)
                    block.half_ids.extend(upper.half_ids)
                    block.rows.extend(upper.rows)
                    del self._blocks[low + 1], self._firsts[low + 1]
                    return


def _next_state(row: TransactionRow | None, event: TransactionEvent) -> TransactionState | None:
    state = None if row is None else TransactionState(row.state)
    return TRANSITIONS.get((state, event))
