"""Looking for pending timers: a walk over the whole table in slices, keeping the first page.

The answer is sorted by due time, which no file is; so each page of answers costs a look at every
entry, 512 at a time, and holds only `page_size` of them. Timers that change during the walk are
shown as they are at its end.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator
from itertools import islice
from typing import final

import numpy as np

from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.message import FLAG_SCHEDULE
from tidemill.broker.engine.layout.numbers import LogOffset, TimerId
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.message_store import MessageDamaged, MessageStore
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.status import TimerQuery, TimerState, TimerStatus
from tidemill.common.errors import BadRequest, Conflict, MessageNotFound
from tidemill.message import stored_message

PAGE_SIZE_MAX = 1000
TABLE_PAGES_A_STEP = 32  # 16,384 entries, 1 to 2 ms
OFFSETS_A_STEP = 256  # records that have a key
STATUSES_A_STEP = 128
KEY_MATCHES_MAX = 10_000  # records with the same key that are looked at, the newest first


@final
class TimerSearch:
    """One search under way: call `step` until it returns False, then read `found`."""

    def __init__(
        self,
        index: TimerIndex,
        store: MessageStore,
        query: TimerQuery,
        status: Callable[[TimerId], TimerStatus],
    ) -> None:
        if not 1 <= query.page_size <= PAGE_SIZE_MAX:
            raise BadRequest(f"a page has 1 to {PAGE_SIZE_MAX} timers, not {query.page_size}")
        self._index = index
        self._store = store
        self._query = query
        self._status = status
        self._kept: list[tuple[int, int]] = []  # (-due, -id): the heap's top is the last one
        self._page: list[int] | None = None  # the ids of the answer, once they are known
        self._pages = iter(
            () if query.key else index.table.live_page_numbers(dict(index.counts.file_live))
        )
        self._matches: Iterator[list[LogOffset]] = iter(())
        self._matches_left = KEY_MATCHES_MAX
        self._offsets: list[LogOffset] = []  # of the matches, those that are to be looked at next
        if query.key:
            self._matches = store.index.find(stored_message.key_hash("key", query.key))
        self._seen: set[int] = set()
        self.found: list[TimerStatus] = []  # the page, the timer due first first
        self.has_more = False  # whether there are timers behind it
        self.last = (0, 0)  # (due_at_ms, timer_id) of the last of them, as the walk has met it

    def step(self) -> bool:
        """Do one slice; True while there is more to do."""
        pages = list(islice(self._pages, TABLE_PAGES_A_STEP))
        for number in pages:
            self._look_at_page(number)
        is_looking = bool(pages) or self._look_at_records()
        return is_looking or self._describe()

    def _look_at_records(self) -> bool:
        """Look at a slice of the records that seem to have the key; False: there are no more."""
        if not self._offsets:
            matches = next(self._matches, None) if self._matches_left else None
            if matches is None:
                return False
            self._offsets = matches[: self._matches_left]
            self._matches_left -= len(self._offsets)
        part, self._offsets = self._offsets[:OFFSETS_A_STEP], self._offsets[OFFSETS_A_STEP:]
        for log_offset in part:
            self._look_at_record(log_offset)
        return True

    def _describe(self) -> bool:
        """Describe a slice of what was found; True while there is more."""
        size = self._query.page_size
        if self._page is None:
            places = sorted((-due, -timer_id) for due, timer_id in self._kept)
            self.has_more = len(places) > size
            self._page = [timer_id for _, timer_id in places[:size]]
            if self._page:
                self.last = places[:size][-1]
        part, self._page = self._page[:STATUSES_A_STEP], self._page[STATUSES_A_STEP:]
        for timer_id in part:
            # What ended during the search may be forgotten by now.
            with contextlib.suppress(MessageNotFound, Conflict):
                self.found.append(self._status(TimerId(timer_id)))
        return bool(self._page)

    def _look_at_page(self, number: int) -> None:
        query = self._query
        rows = self._index.table.rows(number)
        due = rows["due"].astype(np.int64)
        ids = number * len(rows) + np.arange(len(rows), dtype=np.int64)
        wanted = (rows["state"] == TimerState.PENDING) & (due >= query.due_from_ms)
        if query.topic_id is not None:
            wanted &= rows["topic_id"] == query.topic_id
        if query.due_to_ms:
            wanted &= due < query.due_to_ms
        after_due, after_id = query.after
        wanted &= (due > after_due) | ((due == after_due) & (ids > after_id))
        places = np.flatnonzero(wanted)
        if len(self._kept) > query.page_size:
            places = places[due[places] <= -self._kept[0][0]]
        if len(places) > query.page_size:
            places = places[np.lexsort((ids[places], due[places]))[: query.page_size + 1]]
        for at in places.tolist():
            self._keep(int(due[at]), TimerId(int(ids[at])))

    def _look_at_record(self, log_offset: LogOffset) -> None:
        if log_offset < self._store.log.min_offset:
            return
        try:
            found = self._store.record(log_offset)
        except (MessageDamaged, LookupError):
            return  # Whose keys they were cannot be said any more.
        if found.header.kind != RecordKind.MESSAGE or not found.header.flags & FLAG_SCHEDULE:
            return
        timer_id = message.decode_target(found.body).timer_id
        entry = self._index.find_pending(timer_id)
        query = self._query
        if (
            entry is None
            or timer_id in self._seen
            or not stored_message.has_key(found.tail, query.key)
        ):
            return
        self._seen.add(timer_id)
        due_at_ms = entry.due_at_ms
        if (
            query.topic_id in (None, entry.topic_id)
            and due_at_ms >= query.due_from_ms
            and (not query.due_to_ms or due_at_ms < query.due_to_ms)
            and (due_at_ms, timer_id) > query.after
        ):
            self._keep(due_at_ms, timer_id)

    def _keep(self, due_at_ms: int, timer_id: TimerId) -> None:
        place = (-due_at_ms, -timer_id)
        if len(self._kept) <= self._query.page_size:
            heapq.heappush(self._kept, place)
        elif place > self._kept[0]:
            heapq.heapreplace(self._kept, place)
