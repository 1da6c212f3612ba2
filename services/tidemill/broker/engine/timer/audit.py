"""The audit: once a day it counts all pending timers again and walks every chain.

A pending timer must be linked in a slot after the hand, with the due time in the table. Otherwise
it would never be delivered. The audit links such a timer again. Drift counts these corrections and
the wrong counts. Timers change while the audit runs; it observes the changes among the timers that
it has counted already.
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

RECORDS_A_SLICE = 256  # records of chains, about a millisecond
SECONDS_A_SLICE = 65_536  # slots of the wheel that are checked for use
IDS_A_PASS = 1 << 24  # timers per walk of the chains; their seen links need at most 64 MiB
NO_TOPIC = TopicId(0)  # for drift in counts that are not by topic
_UNSEEN = 0
_DUE_VALUES = 0xFFFFFFFF  # a due time is stored as 1 to this value


@final
class TimerAudit:
    """The corrections so far, and the current audit."""

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
        self._counted = 0  # the current audit has counted all ids below
        self._recount = TimerCounts(log, index.table)
        self._links = _SeenLinks(0)
        self.drift: Counter[TopicId] = Counter()  # corrections, by topic id

    def run(self, now_ms: int) -> Iterator[list[File]]:
        """Check and correct all timers, in slices."""
        index = self._index
        index.link_gathered()
        self._counted, self._recount = 0, TimerCounts(self._log, index.table)
        index.links.observer = self
        try:
            for _, pages in groupby(index.table.page_numbers(), _pass_number):
                numbers = list(pages)
                self._links = _SeenLinks(_pass_number(numbers[0]) * IDS_A_PASS)
                yield from self._walk_chains()
                for number in numbers:
                    self._check_page(number, now_ms)
                    yield []
            # Pages added meanwhile: their timers are linked. This ends, because counting is much
            # faster than scheduling.
            while added := [n for n in index.table.page_numbers() if self._is_uncounted(n)]:
                for number in added:
                    self._count(number)
                    yield []
        except TimerLogDamaged:
            index.links.is_damaged = True  # All links will be rebuilt from the table.
            return
        finally:
            index.links.observer = None
            self._links = _SeenLinks(0)
        self._compare_counts()

    def _walk_chains(self) -> Iterator[list[File]]:
        """Walk the chains of all slots after the hand, and remember the timers in them."""
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

    def _check_page(self, number: int, now_ms: int) -> None:
        """Count the timers of a page, and link the pending timers that are in no chain."""
        index, first_id = self._index, number * PAGE_ENTRIES
        rows = self._count(number)
        is_lost = (rows["state"] == TimerState.PENDING) & ~self._links.of_page(first_id, rows)
        for timer_id in (np.flatnonzero(is_lost) + first_id).tolist():
            entry = index.find_pending(TimerId(timer_id))
            if entry is not None and timer_id not in self._quarantined():
                index.links.relink(TimerId(timer_id), entry, timer_record.SCHEDULE, now_ms)
                self.drift[entry.topic_id] += 1

    def _is_uncounted(self, number: int) -> bool:
        return number * PAGE_ENTRIES >= self._counted

    def _count(self, number: int) -> np.ndarray:
        """Count the timers of a page. Return its entries."""
        rows, first_id = self._index.table.rows(number), number * PAGE_ENTRIES
        self._recount.add_rows(first_id, rows)
        self._counted = first_id + len(rows)
        self._tally.add(len(rows))
        return rows

    def _compare_counts(self) -> None:
        found, known = self._recount, self._index.counts
        for topic_id in found.pending.keys() | known.pending.keys():
            difference = abs(found.pending[topic_id] - known.pending[topic_id])
            if difference:
                self.drift[topic_id] += difference
        is_same_size = +found.pending_bytes == +known.pending_bytes
        if not is_same_size or found.pins != known.pins or found.file_live != known.file_live:
            self.drift[NO_TOPIC] += 1
        self._index.counts = found

    # ------------------------------------------------------------ changes meanwhile

    def note_count(self, timer_id: TimerId, entry: TimerEntry, change: int) -> None:
        """Apply a change of counts if the audit has counted the timer already."""
        if timer_id < self._counted:
            self._recount.add(timer_id, entry, change)

    def note_link(self, timer_id: TimerId, due_at_ms: int) -> None:
        """Remember a new link: the chain of its slot may have been walked already."""
        self._links.note(timer_id, due_at_ms)


@final
class _SeenLinks:
    """The links of one pass: for each timer one or several due times.

    A chain may contain outdated links: with a former due time, or in a parking slot.
    """

    def __init__(self, first_id: int) -> None:
        self._first_id = first_id
        self._dues: dict[int, array[int]] = {}  # the first due time, by page and id
        self._others: defaultdict[int, set[int]] = defaultdict(set)  # further ones, by timer

    def note(self, timer_id: int, due_at_ms: int) -> None:
        """Remember a link."""
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
        """Return for each timer of a page whether it is linked with its current due time."""
        values = rows["due"].astype(np.int64) % _DUE_VALUES + 1
        dues = self._dues.get(first_id // PAGE_ENTRIES)
        if dues is None:
            return np.zeros(len(rows), dtype=bool)
        is_linked: np.ndarray = np.frombuffer(dues, dtype=np.uint32) == values
        for at in np.flatnonzero(~is_linked).tolist() if self._others else ():
            is_linked[at] = int(values[at]) in self._others.get(first_id + at, ())
        return is_linked


def _pass_number(page_number: int) -> int:
    return page_number * PAGE_ENTRIES // IDS_A_PASS
