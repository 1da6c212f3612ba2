"""Pending timers in the order of their ids: a walk over the table in slices, page by page.

Who wants all of them reads the table once by it. `search` has those due first first, and looks at
the whole table for each page.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout.numbers import LogOffset, TimerId, TopicId
from tidemill.broker.engine.layout.timer_entry import TimerEntryDamaged
from tidemill.broker.engine.tally import Allowance, Tally
from tidemill.broker.engine.timer.body import BodyDamaged
from tidemill.broker.engine.timer.status import TimerState
from tidemill.message import stored_message

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from tidemill.broker.engine.timer.body import TimerBodies
    from tidemill.broker.engine.timer.index import TimerIndex

TABLE_PAGES_A_STEP: Final = 32  # 16,384 entries, 1 to 2 ms
BODIES_A_STEP: Final = 64


class PendingQuery(NamedTuple):
    """Which timers are wanted."""

    from_id: int = 0
    topic_ids: Collection[TopicId] | None = None  # None: of all topics
    due_from_ms: int = 0
    due_until_ms: int = 0  # exclusive; 0: no limit
    with_messages: bool = False
    max_timers: int = 1_000
    max_bytes: int = 1 << 20


class PendingTimer(NamedTuple):
    """One timer that waits."""

    timer_id: TimerId
    topic_id: TopicId
    due_at_ms: int
    scheduled_at_ms: int  # 0 where its message cannot be read
    log_offset: LogOffset
    message_id: str  # "" where it cannot be read
    blob: bytes  # the stored message, where it was wanted and can be read
    wheel_slot: int | None  # None where its second has none of its own yet


@final
class PendingWalk:
    """One page under way: call `step` until it returns False, then read `found` and `next_id`."""

    def __init__(
        self, index: TimerIndex, bodies: TimerBodies, tally: Tally, query: PendingQuery
    ) -> None:
        self._index = index
        self._bodies = bodies
        self._tally = tally
        self._query = query
        # In their order, once for all pages of the table; None: all topics.
        self._topic_ids = (
            None
            if query.topic_ids is None
            else np.unique(np.fromiter(query.topic_ids, dtype=np.uint32))
        )
        self._pages: Iterator[int] = iter(
            index.table.live_page_numbers(dict(index.counts.file_live))
        )
        self._ids: deque[int] = deque()  # that match, and are not described
        self._bytes_left = query.max_bytes
        self.found: list[PendingTimer] = []
        # Timers of this page of which nobody can say anything: their entries are damaged.
        self.damaged_count = 0
        # Where the next page begins; None: this was the last one.
        self.next_id: int | None = None

    def step(self) -> bool:
        """Do one slice; True while there is more to do."""
        if self._topic_ids is not None and not len(self._topic_ids):
            return False  # There is none of which it could be.
        if not self._ids:
            return self._look_at_pages()
        allowance = Allowance(self._tally, items=BODIES_A_STEP)
        while self._ids and not allowance.is_spent:
            if len(self.found) >= self._query.max_timers or self._bytes_left <= 0:
                self.next_id = self._ids[0]
                return False
            self._describe(TimerId(self._ids.popleft()))
        return True

    def _look_at_pages(self) -> bool:
        for count, number in enumerate(self._pages, 1):
            self._look_at_page(number)
            if count == TABLE_PAGES_A_STEP or self._ids:
                return True
        return False

    def _look_at_page(self, number: int) -> None:
        query = self._query
        rows = self._index.table.rows(number)
        first = number * len(rows)
        if first + len(rows) <= query.from_id:
            return
        ids = first + np.arange(len(rows), dtype=np.int64)
        due = rows["due"].astype(np.int64)
        wanted = (rows["state"] == TimerState.PENDING) & (ids >= query.from_id)
        wanted &= due >= query.due_from_ms
        if query.due_until_ms:
            wanted &= due < query.due_until_ms
        if self._topic_ids is not None:
            wanted &= _is_among(self._topic_ids, rows["topic_id"])
        self._ids.extend(ids[wanted].tolist())

    def _describe(self, timer_id: TimerId) -> None:
        self._tally.add(1)
        try:
            entry = self._index.get(timer_id)
        except TimerEntryDamaged:
            self.damaged_count += 1
            return
        if entry.state != TimerState.PENDING:
            return  # It has ended since the look.
        scheduled_at_ms, message_id, blob = 0, "", b""
        with suppress(BodyDamaged, ValueError):
            body = self._bodies.read(timer_id, entry)
            scheduled_at_ms = body.stored_at_ms
            message_id = stored_message.message_id_of(body.blob)
            if self._query.with_messages:
                blob = bytes(body.blob)
        self._tally.add(0, size_bytes=len(blob))
        self._bytes_left -= len(blob)
        self.found.append(
            PendingTimer(
                timer_id,
                entry.topic_id,
                entry.due_at_ms,
                scheduled_at_ms,
                entry.log_offset,
                message_id,
                blob,
                self._index.links.wheel_slot_of(entry.due_at_ms),
            )
        )


def _is_among(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return which of `values` there are in `ordered`; np.isin would order it each time."""
    places = np.searchsorted(ordered, values.astype(ordered.dtype))
    found: np.ndarray = ordered[np.minimum(places, len(ordered) - 1)] == values
    return found
