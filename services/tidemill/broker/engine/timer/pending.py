"""Pending timers in order of their ids: a walk over the table in slices, page by page.

It reads the table once for all pages of results. `search.py` sorts by due time instead, and reads
the whole table for each page of results.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout.numbers import LogOffset, TimerId, TopicId
from tidemill.broker.engine.layout.timer_entry import TimerEntryDamaged
from tidemill.broker.engine.sorted_search import is_among
from tidemill.broker.engine.tally import Allowance, Tally
from tidemill.broker.engine.timer.body import BodyDamaged
from tidemill.broker.engine.timer.status import DueRange, TimerState
from tidemill.message import stored_message

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from tidemill.broker.engine.timer.body import TimerBodies
    from tidemill.broker.engine.timer.index import TimerIndex

TABLE_PAGES_A_STEP: Final = 32  # 16,384 entries, 1 to 2 ms
BODIES_A_STEP: Final = 64


class PendingQuery(NamedTuple):
    """The conditions and limits of a page of pending timers."""

    from_id: int = 0
    topic_ids: Collection[TopicId] | None = None  # None: all topics
    due: DueRange = DueRange()
    with_messages: bool = False
    max_timers: int = 1_000
    max_bytes: int = 1 << 20


class PendingTimer(NamedTuple):
    """One pending timer."""

    timer_id: TimerId
    topic_id: TopicId
    due_at_ms: int
    scheduled_at_ms: int  # 0 if its message is damaged
    log_offset: LogOffset
    message_id: str  # "" if its message is damaged
    blob: bytes  # the stored message if requested, b"" if it is damaged
    wheel_slot: int | None  # None while its second has no slot


@final
class PendingWalk:
    """A page in progress: call `step` until it returns False, then read `found` and `next_id`."""

    def __init__(
        self, index: TimerIndex, bodies: TimerBodies, tally: Tally, query: PendingQuery
    ) -> None:
        self._index = index
        self._bodies = bodies
        self._tally = tally
        self._query = query
        # Sorted once for all pages of the table. None: all topics.
        self._topic_ids = (
            None
            if query.topic_ids is None
            else np.array(sorted(set(query.topic_ids)), dtype=np.uint32)
        )
        self._pages: Iterator[int] = iter(
            index.table.live_page_numbers(dict(index.counts.file_live))
        )
        self._ids: deque[int] = deque()  # matching timers that are not described yet
        self._bytes_left = query.max_bytes
        self.found: list[PendingTimer] = []
        self.damaged_count = 0  # timers of this page with a damaged entry, which are omitted
        self.next_id: int | None = None  # the begin of the next page, None after the last one

    def step(self) -> bool:
        """Do one slice. Return True while more remains."""
        if self._topic_ids is not None and not len(self._topic_ids):
            return False  # No topic can match.
        if not self._ids:
            return self._read_pages()
        allowance = Allowance(self._tally, items=BODIES_A_STEP)
        while self._ids and not allowance.is_spent:
            if len(self.found) >= self._query.max_timers or self._bytes_left <= 0:
                self.next_id = self._ids[0]
                return False
            self._describe(TimerId(self._ids.popleft()))
        return True

    def _read_pages(self) -> bool:
        for count, number in enumerate(self._pages, 1):
            self._read_page(number)
            if count == TABLE_PAGES_A_STEP or self._ids:
                return True
        return False

    def _read_page(self, number: int) -> None:
        query = self._query
        rows = self._index.table.rows(number)
        first = number * len(rows)
        if first + len(rows) <= query.from_id:
            return
        ids = first + np.arange(len(rows), dtype=np.int64)
        is_match = query.due.find_pending(rows) & (ids >= query.from_id)
        if self._topic_ids is not None:
            is_match &= is_among(self._topic_ids, rows["topic_id"])
        self._ids.extend(ids[is_match].tolist())

    def _describe(self, timer_id: TimerId) -> None:
        self._tally.add(1)
        try:
            entry = self._index.get(timer_id)
        except TimerEntryDamaged:
            self.damaged_count += 1
            return
        if entry.state != TimerState.PENDING:
            return  # It was settled after the walk had found it.
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
