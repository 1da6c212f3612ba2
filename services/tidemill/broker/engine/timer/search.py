"""The search for pending timers: a walk over the whole table in slices that finds one page.

The result is sorted by due time, but the table is not. So each page of results reads every entry,
512 at a time, and keeps only `page_size` of them. A timer that changes during the walk is shown as
it is at the end.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable
from itertools import islice
from typing import final

import numpy as np

from tidemill.broker.engine.layout.numbers import TimerId
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.tally import Tally
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.keyed import KeyedTimers
from tidemill.broker.engine.timer.status import TimerQuery, TimerStatus
from tidemill.common.errors import BadRequest, Conflict, MessageNotFound

PAGE_SIZE_MAX = 1000
TABLE_PAGES_A_STEP = 32  # 16,384 entries, 1 to 2 ms
STATUSES_A_STEP = 128


@final
class TimerSearch:
    """A search in progress: call `step` until it returns False, then read `found`."""

    def __init__(
        self,
        index: TimerIndex,
        store: MessageStore,
        tally: Tally,
        query: TimerQuery,
        status: Callable[[TimerId], TimerStatus],
    ) -> None:
        if not 1 <= query.page_size <= PAGE_SIZE_MAX:
            raise BadRequest(f"the page size {query.page_size} is not from 1 to {PAGE_SIZE_MAX}")
        self._index = index
        self._store = store
        self._query = query
        self._status = status
        self._kept: list[tuple[int, int]] = []  # a heap of (-due, -id): its top is the last one
        self._page: list[int] | None = None  # the ids of the result, None during the walk
        self._pages = iter(
            () if query.key else index.table.live_page_numbers(dict(index.counts.file_live))
        )
        self._keyed = KeyedTimers(index, store, tally, query.key) if query.key else None
        self.found: list[TimerStatus] = []  # the page, in order of due time
        self.has_more = False  # whether there is another page
        self.last = (0, 0)  # (due_at_ms, timer_id) of the last timer, as the walk has found it

    def step(self) -> bool:
        """Do one slice. Return True while more remains."""
        pages = list(islice(self._pages, TABLE_PAGES_A_STEP))
        for number in pages:
            self._read_page(number)
        is_looking = bool(pages) or self._read_records()
        return is_looking or self._describe()

    def _read_records(self) -> bool:
        """Read a slice of the records that may have the key. Return False if there are no more."""
        found = self._keyed.step() if self._keyed is not None else None
        if found is None:
            return False
        query = self._query
        for timer_id, entry in found:
            due_at_ms = entry.due_at_ms
            if (
                query.topic_id in (None, entry.topic_id)
                and query.due.has(due_at_ms)
                and (due_at_ms, timer_id) > query.after
            ):
                self._keep(due_at_ms, timer_id)
        return True

    def _describe(self) -> bool:
        """Describe a slice of the timers found. Return True while more remains."""
        size = self._query.page_size
        if self._page is None:
            found = sorted((-due, -timer_id) for due, timer_id in self._kept)
            self.has_more = len(found) > size
            self._page = [timer_id for _, timer_id in found[:size]]
            if self._page:
                self.last = found[:size][-1]
        part, self._page = self._page[:STATUSES_A_STEP], self._page[STATUSES_A_STEP:]
        for timer_id in part:
            # The final state of a timer that was settled during the search may have expired.
            with contextlib.suppress(MessageNotFound, Conflict):
                self.found.append(self._status(TimerId(timer_id)))
        return bool(self._page)

    def _read_page(self, number: int) -> None:
        query = self._query
        rows = self._index.table.rows(number)
        due = rows["due"].astype(np.int64)
        ids = number * len(rows) + np.arange(len(rows), dtype=np.int64)
        is_match = query.due.find_pending(rows)
        if query.topic_id is not None:
            is_match &= rows["topic_id"] == query.topic_id
        after_due, after_id = query.after
        is_match &= (due > after_due) | ((due == after_due) & (ids > after_id))
        matches = np.flatnonzero(is_match)
        if len(self._kept) > query.page_size:
            matches = matches[due[matches] <= -self._kept[0][0]]
        if len(matches) > query.page_size:
            matches = matches[np.lexsort((ids[matches], due[matches]))[: query.page_size + 1]]
        for at in matches.tolist():
            self._keep(int(due[at]), TimerId(int(ids[at])))

    def _keep(self, due_at_ms: int, timer_id: TimerId) -> None:
        rank = (-due_at_ms, -timer_id)
        if len(self._kept) <= self._query.page_size:
            heapq.heappush(self._kept, rank)
        elif rank > self._kept[0]:
            heapq.heapreplace(self._kept, rank)
