"""The auditor: once a day all pending timers are counted again, and every chain is walked.

A timer that waits must be linked, with the due time that the table has, in a slot after the hand.
One that is not would never come: it is linked again, and counted as drift, like a count that was
wrong. Counts are taken of a moment that moves: what changes behind it is followed.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator
from itertools import chain, groupby
from typing import final

import numpy as np

from tidemill.broker.engine.layout import timer_record
from tidemill.broker.engine.layout.numbers import TimerId, TopicId
from tidemill.broker.engine.layout.timer_entry import TimerEntry
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.tally import Tally
from tidemill.broker.engine.timer.counts import TimerCounts
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.status import TimerState
from tidemill.broker.engine.timer.table import PAGE_ENTRIES
from tidemill.broker.engine.timer.timer_log import TimerLogDamaged

RECORDS_A_SLICE = 256  # of chains: about a millisecond
SECONDS_A_SLICE = 65_536  # of the wheel, looked through for slots that are used
IDS_A_PASS = 1 << 24  # of whose links is noted what was seen: 64 MiB at most
NO_TOPIC = TopicId(0)  # of what is wrong in other counts than those by topic
_UNSEEN = 0
_DUE_VALUES = 0xFFFFFFFF  # a due time is noted as 1 to that


@final
class TimerAudit:
    """What was corrected, and the audit under way."""

    def __init__(
        self,
        index: TimerIndex,
        log: CommitLog,
        tally: Tally,
        *,
        quarantined: Callable[[], Container[int]],
    ) -> None:
        self._index = index
        self._log = log
        self._tally = tally
        self._quarantined = quarantined
        self._passed = 0  # ids that the audit under way has counted
        self._recount = TimerCounts(log, index.table)
        self._links = _Links(0)
        self.drift: Counter[TopicId] = Counter()  # corrections, by topic id

    def run(self, now_ms: int) -> Iterator[list[File]]:
        """Correct what is wrong, in slices."""
        index = self._index
        index.link_gathered()
        self._passed, self._recount = 0, TimerCounts(self._log, index.table)
        index.links.observer = self
        try:
            for _, pages in groupby(index.table.page_numbers(), _pass_of):
                numbers = list(pages)
                self._links = _Links(_pass_of(numbers[0]) * IDS_A_PASS)
                yield from self._see_links()
                for number in numbers:
                    self._look_at(number, now_ms)
                    yield []
            # Pages that have come meanwhile: what is new there is linked. Counting is far faster
            # than they come, so this ends.
            while later := [n for n in index.table.page_numbers() if self._is_ahead(n)]:
                for number in later:
                    self._count(number)
                    yield []
        except TimerLogDamaged:
            index.links.is_damaged = True  # All links are made again from the table.
            return
        finally:
            index.links.observer = None
            self._links = _Links(0)
        self._compare_counts()

    def _see_links(self) -> Iterator[list[File]]:
        """Walk the chains of all slots after the hand, and note which timers they link."""
        index = self._index
        begin_s = index.links.hand_s + 1
        end_s = begin_s + index.links.wheel.slot_count - 1
        for first_s in range(begin_s, end_s, SECONDS_A_SLICE):
            filled = index.links.wheel.filled(first_s, min(first_s + SECONDS_A_SLICE, end_s))
            self._tally.add(1)
            yield []
            for n, record in enumerate(chain.from_iterable(map(index.links.chain, filled))):
                self._links.note(record.timer_id, record.due_at_ms)
                if n % RECORDS_A_SLICE == RECORDS_A_SLICE - 1:
                    self._tally.add(RECORDS_A_SLICE)
                    yield []

    def _look_at(self, number: int, now_ms: int) -> None:
        """Count the timers of a page, and link again those that no chain has."""
        index, first_id = self._index, number * PAGE_ENTRIES
        rows = self._count(number)
        is_lost = (rows["state"] == TimerState.PENDING) & ~self._links.of_page(first_id, rows)
        for timer_id in (np.flatnonzero(is_lost) + first_id).tolist():
            entry = index.find_pending(TimerId(timer_id))
            if entry is not None and timer_id not in self._quarantined():
                index.links.relink(TimerId(timer_id), entry, timer_record.SCHEDULE, now_ms)
                self.drift[entry.topic_id] += 1

    def _is_ahead(self, number: int) -> bool:
        return number * PAGE_ENTRIES >= self._passed

    def _count(self, number: int) -> np.ndarray:
        """Count the timers of a page, and return its entries."""
        rows, first_id = self._index.table.rows(number), number * PAGE_ENTRIES
        self._recount.add_rows(first_id, rows)
        self._passed = first_id + len(rows)
        self._tally.add(len(rows))
        return rows

    def _compare_counts(self) -> None:
        found, known = self._recount, self._index.counts
        for topic_id in found.pending.keys() | known.pending.keys():
            difference = abs(found.pending[topic_id] - known.pending[topic_id])
            if difference:
                self.drift[topic_id] += difference
        if found.pins != known.pins or found.file_live != known.file_live:
            self.drift[NO_TOPIC] += 1
        self._index.counts = found

    # ------------------------------------------------------------ what changes meanwhile

    def note_count(self, timer_id: TimerId, entry: TimerEntry, change: int) -> None:
        """Follow what changes among the ids that the audit has counted already."""
        if timer_id < self._passed:
            self._recount.add(timer_id, entry, change)

    def note_link(self, timer_id: TimerId, due_at_ms: int) -> None:
        """Follow what is linked, maybe in a slot whose chain was walked already."""
        self._links.note(timer_id, due_at_ms)


@final
class _Links:
    """Which timers of one pass are linked, each with a due time, or several.

    A chain may also have links that hold no more: a timer's former due time, or a parking slot.
    """

    def __init__(self, first_id: int) -> None:
        self._first_id = first_id
        self._dues: dict[int, array[int]] = {}  # by page, in the order of the ids
        self._others: defaultdict[int, set[int]] = defaultdict(set)  # by timer, beyond one

    def note(self, timer_id: int, due_at_ms: int) -> None:
        """Note a link."""
        if not 0 <= timer_id - self._first_id < IDS_A_PASS:
            return
        number, at = divmod(timer_id, PAGE_ENTRIES)
        dues = self._dues.get(number)
        if dues is None:
            dues = self._dues[number] = array("I", bytes(4 * PAGE_ENTRIES))
        value = due_at_ms % _DUE_VALUES + 1
        if dues[at] == _UNSEEN:
            dues[at] = value
        elif dues[at] != value:
            self._others[timer_id].add(value)

    def of_page(self, first_id: int, rows: np.ndarray) -> np.ndarray:
        """Return of each timer of a page whether it is linked with the due time that it has."""
        values = rows["due"].astype(np.int64) % _DUE_VALUES + 1
        dues = self._dues.get(first_id // PAGE_ENTRIES)
        if dues is None:
            return np.zeros(len(rows), dtype=bool)
        is_linked: np.ndarray = np.frombuffer(dues, dtype=np.uint32) == values
        for at in np.flatnonzero(~is_linked).tolist() if self._others else ():
            is_linked[at] = int(values[at]) in self._others.get(first_id + at, ())
        return is_linked


def _pass_of(page_number: int) -> int:
    return page_number * PAGE_ENTRIES // IDS_A_PASS
