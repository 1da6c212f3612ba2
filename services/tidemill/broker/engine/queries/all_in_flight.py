"""All that groups have in flight, page by page, and each page of one moment.

The messages come in the order of group, topic, queue and offset, which a message keeps whoever
renews it. So what is out from before the first page until behind the last one is on one of them,
once. The table is in no such order: for each page it is looked at as a whole, in slices, and at
their end, in one slice, once more at what has been placed meanwhile.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout.pop_checkpoint import FLAG_GAPS, FLAG_RELEASED
from tidemill.broker.engine.pop.deadlines import FLAG_DUE
from tidemill.broker.engine.pop.delivery_table import FREE
from tidemill.broker.engine.queries.in_flight import EVER, InFlight, InFlightLook, Wanted

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.numbers import GroupId
    from tidemill.broker.engine.message_store import MessageStore
    from tidemill.broker.engine.pop.progress import PopProgress
    from tidemill.broker.engine.pop.state import PopState
    from tidemill.broker.engine.tally import Tally

OWNERS_A_STEP: Final = 2_048  # half a microsecond each
OWNERS_A_PAGE: Final = 1_024  # queues of groups with something in flight; a page ends with them
SLOTS_A_STEP: Final = 8_192  # of the table: up to a millisecond, where all are wanted
MESSAGES_A_STEP: Final = 64  # whose ids are read


class PlaceInQueues(NamedTuple):
    """A place in the order; of a retry topic it has that one's id."""

    group_id: int = 0
    topic_id: int = 0
    queue_id: int = 0
    queue_offset: int = 0


class _Rank(NamedTuple):
    """A place among the queues of one page."""

    number: int
    queue_offset: int


@final
class InFlightWalk:
    """One page under way: call `step` until it returns False, then read what was found."""

    def __init__(
        self,
        store: MessageStore,
        pops: PopState,
        tally: Tally,
        *,
        group_ids: frozenset[GroupId] | None,
        first: PlaceInQueues,
        max_messages: int,
    ) -> None:
        """Begin at a place; `group_ids`: of which groups, None: of all."""
        self._pops = pops
        self._tally = tally
        self._group_ids = group_ids
        self._first = first
        self._max_messages = max_messages
        self._look = InFlightLook(
            store, pops, tally, Wanted(None), after=None, before_id=EVER, max_messages=0
        )
        # What is placed from now on has a later identity.
        self._began_at = store.log.log_end
        self._owners_from = 0
        # The first queues with something in flight, in their order, and the first behind them.
        self._owners: list[PopProgress] = []
        self._next_owner: PlaceInQueues | None = None
        # By number of the table: which of them it is, or -1; the last one stands for new numbers.
        self._ranks = np.empty(0, dtype=np.int64)
        self._void_before = np.empty(0, dtype=np.int64)
        self._slots_from = 0
        # The first deliveries in the order so far: columns are rank, start, slot, and delivery id.
        self._candidates = np.empty((0, 4), dtype=np.int64)
        # Behind which there may be others; None: there are none.
        self._bound: _Rank | None = None
        self._is_taken = False
        self._taken: deque[tuple[PopProgress, InFlight]] = deque()  # whose ids are not read
        self.found: list[InFlight] = []
        # Where the next page begins; None: this was the last one.
        self.next_place: PlaceInQueues | None = None

    def step(self, now_ms: int) -> bool:
        """Do one slice; True while there is more to do."""
        if not len(self._ranks):
            self._choose_owners()
            if self._owners_from >= len(self._pops.owners):
                self._rank_owners()
            return True
        if self._slots_from < len(self._pops.table.ids):
            self._gather(now_ms)
            return True
        if not self._is_taken:
            self._take(now_ms)
            self._is_taken = True
        for _ in range(min(MESSAGES_A_STEP, len(self._taken))):
            self.found.append(self._look.named(*self._taken.popleft()))
        return bool(self._taken)

    # ------------------------------------------------------------ whose

    def _choose_owners(self) -> None:
        """Look at a slice of the queues of groups, and keep the first ones in the order."""
        self._tally.add(1)
        end = self._owners_from + OWNERS_A_STEP
        some = self._pops.owners[self._owners_from : end]
        self._owners_from = end
        owners = [*self._owners, *filter(self._is_wanted, some)]
        owners.sort(key=_place_of)
        self._owners = owners[:OWNERS_A_PAGE]
        for dropped in owners[OWNERS_A_PAGE : OWNERS_A_PAGE + 1]:
            self._next_owner = min(self._next_owner or _place_of(dropped), _place_of(dropped))

    def _is_wanted(self, progress: PopProgress) -> bool:
        return (
            progress.in_flight > 0
            and (self._group_ids is None or progress.group_id in self._group_ids)
            and _place_of(progress)[:3] >= self._first[:3]
            and not self._pops.is_deleted(progress)
        )

    def _rank_owners(self) -> None:
        self._ranks = np.full(len(self._pops.owners) + 1, -1, dtype=np.int64)
        for rank, progress in enumerate(self._owners):
            self._ranks[progress.index] = rank
        self._void_before = np.array([each.void_before for each in self._owners], dtype=np.int64)
        if self._next_owner is not None:
            self._bound = _Rank(len(self._owners), 0)

    @property
    def _offset_from(self) -> int:
        """Of the first queue: its offset with which the page begins."""
        is_same = self._owners and _place_of(self._owners[0])[:3] == self._first[:3]
        return self._first.queue_offset if is_same else 0

    # ------------------------------------------------------------ which deliveries

    def _gather(self, now_ms: int) -> None:
        """Look at a slice of the table, and keep the first deliveries in the order."""
        begin, self._slots_from = self._slots_from, self._slots_from + SLOTS_A_STEP
        ids = np.frombuffer(self._pops.table.ids, dtype=np.int64)[begin : self._slots_from]
        slots = np.flatnonzero((ids != FREE) & (ids < self._began_at)) + begin
        self._keep(np.concatenate([self._candidates, self._matching(slots, now_ms)]))

    def _matching(self, slots: np.ndarray, now_ms: int) -> np.ndarray:
        """Return those of some slots in use that are wanted, as candidates."""
        self._tally.add(1)
        table = self._pops.table
        ids = np.frombuffer(table.ids, dtype=np.int64)[slots]
        starts = np.frombuffer(table.starts, dtype=np.int64)[slots]
        flags = np.frombuffer(table.flags, dtype=np.uint8)[slots]
        numbers = np.frombuffer(table.owners, dtype=np.uint32)[slots]
        ranks = self._ranks[np.minimum(numbers, len(self._ranks) - 1)]
        is_it = np.frombuffer(table.live, dtype=np.uint32)[slots] != 0
        # What has run out, or was released, is revive's, or ready for the next pop.
        is_it &= flags & (FLAG_DUE | FLAG_RELEASED) == 0
        is_it &= np.frombuffer(table.visible_at_ms, dtype=np.int64)[slots] > now_ms
        is_it &= ranks >= 0
        # Of the first queue what ends before the page begins.
        ends = starts + np.frombuffer(table.counts, dtype=np.uint8)[slots]
        has_gaps = is_it & (ranks == 0) & (flags & FLAG_GAPS != 0) & (starts < self._offset_from)
        for i in np.flatnonzero(has_gaps).tolist():
            ends[i] = table.end_of(int(slots[i]))
        is_it &= (ranks != 0) | (ends > self._offset_from)
        rows = np.stack([ranks, starts, slots, ids], axis=1)[is_it]
        wanted: np.ndarray = rows[rows[:, 3] >= self._void_before[rows[:, 0]]]
        return wanted

    def _keep(self, rows: np.ndarray) -> None:
        """Keep as many of some deliveries, in the order, as have the messages of a page."""
        if self._bound is not None:
            rank, start = self._bound
            rows = rows[(rows[:, 0] < rank) | ((rows[:, 0] == rank) & (rows[:, 1] < start))]
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        live = np.frombuffer(self._pops.table.live, dtype=np.uint32)[rows[:, 2]]
        count = int(np.searchsorted(np.cumsum(np.bitwise_count(live)), self._max_messages)) + 1
        # Of those that begin before the page does, but not end there, none is left out.
        is_across = (rows[:, 0] == 0) & (rows[:, 1] <= self._offset_from)
        count = max(count, int(np.count_nonzero(is_across)))
        for rank, start, *_ in rows[count : count + 1].tolist():
            self._bound = min(self._bound or _Rank(rank, start), _Rank(rank, start))
        self._candidates = rows[:count]

    # ------------------------------------------------------------ their messages

    def _take(self, now_ms: int) -> None:
        """Take the messages of the page as they are now: three milliseconds a thousand."""
        table = self._pops.table
        ids = np.frombuffer(table.ids, dtype=np.int64)
        known = self._candidates[:, 2][ids[self._candidates[:, 2]] == self._candidates[:, 3]]
        late = np.flatnonzero(ids >= self._began_at)
        self._keep(self._matching(np.concatenate([known, late]), now_ms))
        taken: list[tuple[_Rank, PopProgress, InFlight]] = []
        for rank, _, slot, delivery_id in self._candidates.tolist():
            progress = self._pops.owners[table.owners[slot]]
            if progress is self._owners[rank] and not self._pops.is_void(progress, delivery_id):
                for index in table.indexes_of(table.live[slot]):
                    place = _Rank(rank, table.offset_of(slot, index))
                    taken.append((place, progress, self._look.placed(slot, index)))
        first, bound = _Rank(0, self._offset_from), self._bound
        taken = [each for each in taken if first <= each[0] and (not bound or each[0] < bound)]
        taken.sort(key=lambda each: each[0])
        for place, *_ in taken[self._max_messages : self._max_messages + 1]:
            bound = place
        self.next_place = None if bound is None else self._place_at(bound)
        self._taken.extend((progress, one) for _, progress, one in taken[: self._max_messages])

    def _place_at(self, rank: _Rank) -> PlaceInQueues:
        if rank.number < len(self._owners):
            of = _place_of(self._owners[rank.number])
            return of._replace(queue_offset=rank.queue_offset)
        assert self._next_owner is not None, "a page ends with its queues where there are others"
        return self._next_owner


def _place_of(progress: PopProgress) -> PlaceInQueues:
    return PlaceInQueues(progress.group_id, progress.topic_id, progress.queue.queue_id)
