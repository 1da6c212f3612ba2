"""Messages in flight: a listing of the delivery table in pages, in one of two orders.

    PopOrder     by pop time: the oldest deliveries first
    QueueOrder   by consumer group, topic, queue and offset

A message keeps its place in the queue order when its delivery is renewed or replaced. A walk
through all pages therefore lists each message once that is in flight during the whole walk.

The table has neither order. Each page reads the whole table in slices and keeps the first
deliveries of its order. A page in queue order takes its messages in one slice, which also reads the
deliveries that were made since the page began.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar, final

import numpy as np

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import DeliverySlot, LogOffset
from tidemill.broker.engine.layout.pop_checkpoint import (
    FLAG_GAPS,
    FLAG_RELEASED,
    FLAG_RENEWS,
    MESSAGES_MAX,
    cut_client,
)
from tidemill.broker.engine.message_store import MessageDamaged
from tidemill.broker.engine.pop.deadlines import FLAG_DUE
from tidemill.broker.engine.pop.deliveries import Delivery
from tidemill.broker.engine.pop.delivery_table import FREE
from tidemill.broker.engine.pop.queue_queries import ordered_attempt
from tidemill.message import stored_message
from tidemill.message.client_key import ClientKey

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
    from tidemill.broker.engine.message_store import MessageStore
    from tidemill.broker.engine.pop.progress import PopProgress
    from tidemill.broker.engine.pop.state import PopState
    from tidemill.broker.engine.tally import Tally

OWNERS_A_STEP: Final = 2_048  # half a microsecond each
OWNERS_A_PAGE: Final = 1_024  # queues of groups with deliveries; a page ends with them
SLOTS_A_STEP: Final = 8_192  # in the table: a millisecond if each belongs to another queue
MESSAGES_A_STEP: Final = 64  # their ids are read from the log
# Messages that a page reads in search of one id. The page after an empty one reads the whole table
# again. 2 MiB.
SEARCHED_A_PAGE: Final = 65_536
ENDLESS: Final = 1 << 62  # a log offset that no delivery reaches

P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)


class InFlightFilter(NamedTuple):
    """The messages of a listing; None and "" stand for all."""

    group_ids: frozenset[GroupId] | None = None
    topic_id: TopicId | None = None  # including its retry topic
    queue_id: QueueId | None = None  # of the topic itself
    client_id: str = ""
    message_id: str = ""
    before_id: int = ENDLESS  # deliveries with this identity or a later one are left out


class PopPosition(NamedTuple):
    """A message in the order of pops."""

    popped_at_ms: int
    slot: int
    message_index: int


class QueuePosition(NamedTuple):
    """A message in the order of queues; a message on a retry topic has the id of that topic."""

    group_id: int = 0
    topic_id: int = 0
    queue_id: int = 0
    queue_offset: int = 0


class InFlight(NamedTuple):
    """One message in flight."""

    delivery: Delivery
    queue_id: QueueId
    is_retry: bool  # then queue and offset are those of the group's retry topic
    queue_offset: int
    message_id: str  # "" if it cannot be read
    delivery_attempt: int
    client_id: str  # "" if unknown
    popped_at_ms: int
    renews: bool
    is_handover_pending: bool  # it renews, and no proxy has reported that the client has it

    @property
    def position(self) -> PopPosition:
        """The position in the order of pops."""
        return PopPosition(self.popped_at_ms, self.delivery.slot, self.delivery.message_index)


class _Key(NamedTuple):
    """A place in the order of one page. Deliveries are ordered by `major` and `minor`."""

    major: int
    minor: int
    message_index: int = 0


class _Order(Protocol[P_co]):
    """The order of a page. A row of a delivery has the columns major, minor, slot and identity."""

    first: _Key  # where the page begins
    bound: _Key | None  # the first key behind the page; None: the page ends the listing
    takes_at_once: bool  # whether all messages of the page are taken in one slice

    def prepare(self) -> bool:
        """Do one slice of the work before the scan of the table; return whether more is left."""

    def rows(self, slots: np.ndarray, wanted: InFlightFilter) -> np.ndarray:
        """Return the rows of those deliveries that belong to the listing and end behind `first`."""

    def spanning_count(self, rows: np.ndarray) -> int:
        """Return how many of the ordered rows begin before `first`; a page keeps all of them."""

    def key(self, row: Sequence[int], index: int) -> _Key:
        """Return the key of a message."""

    def position(self, key: _Key) -> P_co:
        """Return the position where the next page continues."""


@final
class InFlightListing(Generic[P]):
    """One page under way: call `step` until it returns False, and `take` the messages."""

    def __init__(
        self,
        store: MessageStore,
        pops: PopState,
        tally: Tally,
        wanted: InFlightFilter,
        order: _Order[P],
        *,
        max_messages: int,
    ) -> None:
        self._store = store
        self._pops = pops
        self._tally = tally
        self._wanted = wanted
        self._order = order
        self._messages_left = max_messages
        self._kept_max = SEARCHED_A_PAGE if wanted.message_id else max_messages
        # Deliveries made from now on have a later identity.
        self._began_at = int(store.log.log_end)
        self._slots_from = 0
        self._rows = np.empty((0, 4), dtype=np.int64)  # the first deliveries in the order so far
        self._messages: Iterator[tuple[_Key, PopProgress, InFlight]] | None = None
        self._found: list[InFlight] = []

    @property
    def next_position(self) -> P | None:
        """The position where the next page continues; None: this was the last page."""
        bound = self._order.bound
        return None if bound is None else self._order.position(bound)

    def take(self) -> list[InFlight]:
        """Return and forget the messages found since the last call."""
        found, self._found = self._found, []
        return found

    def step(self, now_ms: int) -> bool:
        """Do one slice; return whether there is more to do."""
        if self._order.prepare():
            return True
        if self._slots_from < len(self._pops.table.ids):
            begin, self._slots_from = self._slots_from, self._slots_from + SLOTS_A_STEP
            ids = np.frombuffer(self._pops.table.ids, dtype=np.int64)[begin : self._slots_from]
            slots = np.flatnonzero((ids != FREE) & (ids < self._began_at)) + begin
            del ids
            self._keep(np.concatenate([self._rows, self._matching(slots, now_ms)]))
            return True
        if self._messages is None:
            self._messages = self._taken(now_ms)
        for _ in range(MESSAGES_A_STEP):
            message = next(self._messages, None)
            if message is None:
                return False
            key, progress, found = message
            if not self._messages_left:
                self._order.bound = key
                return False
            found = self._identified(progress, found)
            if self._wanted.message_id in {"", found.message_id}:
                self._found.append(found)
                self._messages_left -= 1
        return True

    # ------------------------------------------------------------ deliveries

    def _matching(self, slots: np.ndarray, now_ms: int) -> np.ndarray:
        """Return the rows of those of some used slots that belong to the listing."""
        self._tally.add(1)
        table, wanted = self._pops.table, self._wanted
        flags = np.frombuffer(table.flags, dtype=np.uint8)[slots]
        is_it = np.frombuffer(table.live, dtype=np.uint32)[slots] != 0
        is_it &= np.frombuffer(table.ids, dtype=np.int64)[slots] < wanted.before_id
        # An expired or released delivery waits for revive or for the next pop.
        is_it &= flags & (FLAG_DUE | FLAG_RELEASED) == 0
        is_it &= np.frombuffer(table.visible_at_ms, dtype=np.int64)[slots] > now_ms
        if wanted.client_id:
            holders = np.frombuffer(table.holders, dtype=np.uint32)[slots]
            is_it &= table.clients.are_of(cut_client(ClientKey(wanted.client_id)), holders)
        return self._order.rows(slots[is_it], wanted)

    def _keep(self, rows: np.ndarray) -> None:
        """Keep the first of some deliveries, as many as have the messages of a page."""
        order = self._order
        if order.bound is not None:
            major, minor, _ = order.bound
            rows = rows[(rows[:, 0] < major) | ((rows[:, 0] == major) & (rows[:, 1] < minor))]
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        live = np.frombuffer(self._pops.table.live, dtype=np.uint32)[rows[:, 2]]
        count = int(np.searchsorted(np.cumsum(np.bitwise_count(live)), self._kept_max)) + 1
        count = max(count, order.spanning_count(rows))
        for major, minor, *_ in rows[count : count + 1].tolist():
            order.bound = min(order.bound or _Key(major, minor), _Key(major, minor))
        self._rows = rows[:count]

    # ------------------------------------------------------------ messages

    def _taken(self, now_ms: int) -> Iterator[tuple[_Key, PopProgress, InFlight]]:
        """Return the messages of the page in their order, without their ids."""
        if not self._order.takes_at_once:
            return self._live_messages()
        # 3 ms per 1,000 messages.
        ids = np.frombuffer(self._pops.table.ids, dtype=np.int64)
        known = self._rows[:, 2][ids[self._rows[:, 2]] == self._rows[:, 3]]
        late = np.flatnonzero(ids >= self._began_at)
        del ids
        self._keep(self._matching(np.concatenate([known, late]), now_ms))
        return iter(sorted(self._live_messages(), key=lambda message: message[0]))

    def _live_messages(self) -> Iterator[tuple[_Key, PopProgress, InFlight]]:
        order, table = self._order, self._pops.table
        for row in self._rows.tolist():
            _, _, slot, delivery_id = row
            if table.ids[slot] != delivery_id or table.flags[slot] & FLAG_DUE:
                continue  # Settled or expired since it was read.
            progress = self._pops.owners[table.owners[slot]]
            for index in table.indexes_of(table.live[slot]):
                key = order.key(row, index)
                if order.first <= key and (order.bound is None or key < order.bound):
                    yield key, progress, self._described(progress, slot, index)

    def _described(self, progress: PopProgress, slot: int, index: int) -> InFlight:
        """Describe a message from its entry in the table."""
        table = self._pops.table
        flags = table.flags[slot]
        delivery = Delivery(
            progress.group_id,
            progress.named_topic_id,
            DeliverySlot(slot),
            LogOffset(table.ids[slot]),
            index,
            table.visible_at_ms[slot],
        )
        return InFlight(
            delivery,
            progress.queue.queue_id,
            progress.named_topic_id != progress.topic_id,
            table.offset_of(slot, index),
            "",
            1,
            table.client_of(slot).client_id,
            table.popped_at_ms[slot],
            bool(flags & FLAG_RENEWS),
            bool(flags & FLAG_RENEWS and table.handover[slot]),
        )

    def _identified(self, progress: PopProgress, found: InFlight) -> InFlight:
        """Return a message with its id and its delivery attempt."""
        self._tally.add(1)
        message_id, attempt = "", 1
        # The other fields of an expired or damaged message are known.
        with suppress(BlockFileDamaged, MessageDamaged, LookupError, struct.error, ValueError):
            log_offset = progress.queue.entry(found.queue_offset)[0]
            if found.is_retry:
                attempt = self._store.place(log_offset).attempts + 1
            message_id = stored_message.message_id_of(self._store.log.read(log_offset)[1])
        if progress.ordered is not None:
            attempt = ordered_attempt(self._pops, progress, found.delivery.slot, found.queue_offset)
        return found._replace(message_id=message_id, delivery_attempt=attempt)


@final
class PopOrder:
    """The order of pops: by pop time, then by slot."""

    takes_at_once = False

    def __init__(self, pops: PopState, after: PopPosition | None) -> None:
        """Begin behind a position; None: at the oldest delivery."""
        self._pops = pops
        self.first = _Key(0, 0)
        if after is not None:
            self.first = _Key(after.popped_at_ms, after.slot, after.message_index + 1)
        self.bound: _Key | None = None

    def prepare(self) -> bool:
        """Nothing comes before the table."""
        return False

    def rows(self, slots: np.ndarray, wanted: InFlightFilter) -> np.ndarray:
        """Return the rows of the deliveries that belong to the listing."""
        table = self._pops.table
        popped = np.frombuffer(table.popped_at_ms, dtype=np.int64)[slots]
        major, minor, index = self.first
        first_slot = minor + (index >= MESSAGES_MAX)
        is_behind = (popped > major) | ((popped == major) & (slots >= first_slot))
        slots = slots[is_behind]
        numbers = np.frombuffer(table.owners, dtype=np.uint32)[slots]
        used, used_at = np.unique(numbers, return_inverse=True)
        owners = [self._pops.owners[number] for number in used.tolist()]
        is_wanted = np.array([_is_wanted(self._pops, each, wanted) for each in owners], dtype=bool)
        void_before = np.array([each.void_before for each in owners], dtype=np.int64)
        ids = np.frombuffer(table.ids, dtype=np.int64)[slots]
        rows = np.stack([popped[is_behind], slots, slots, ids], axis=1)
        matching: np.ndarray = rows[is_wanted[used_at] & (ids >= void_before[used_at])]
        return matching

    def spanning_count(self, _rows: np.ndarray) -> int:
        """No delivery begins before the page."""
        return 0

    def key(self, row: Sequence[int], index: int) -> _Key:
        """Return the key of a message."""
        return _Key(row[0], row[1], index)

    def position(self, key: _Key) -> PopPosition:
        """Return the last position before `key`: the next page begins behind it."""
        if key.message_index:
            return PopPosition(key.major, key.minor, key.message_index - 1)
        if key.minor:
            return PopPosition(key.major, key.minor - 1, MESSAGES_MAX)
        return PopPosition(key.major - 1, len(self._pops.table.ids), MESSAGES_MAX)


@final
class QueueOrder:
    """The order of queues. A page has the queues with deliveries that come first."""

    takes_at_once = True

    def __init__(
        self, pops: PopState, tally: Tally, wanted: InFlightFilter, first: QueuePosition
    ) -> None:
        """Begin at a position."""
        self._pops = pops
        self._tally = tally
        self._wanted = wanted
        self._begin = first
        self.first = _Key(0, 0)
        self.bound: _Key | None = None
        self._owners_from = 0
        # The first queues with deliveries, in their order, and the first one behind them.
        self._owners: list[PopProgress] = []
        self._next_owner: QueuePosition | None = None
        # By number of the owner: its rank among them, or -1; the last one stands for new numbers.
        self._ranks = np.empty(0, dtype=np.int64)
        self._void_before = np.empty(0, dtype=np.int64)

    def prepare(self) -> bool:
        """Choose the queues of the page."""
        if len(self._ranks):
            return False
        self._choose_owners()
        if self._owners_from >= len(self._pops.owners):
            self._rank_owners()
        return True

    def _choose_owners(self) -> None:
        """Read a slice of the queues of groups, and keep the first ones in the order."""
        self._tally.add(1)
        end = self._owners_from + OWNERS_A_STEP
        some = self._pops.owners[self._owners_from : end]
        self._owners_from = end
        owners = [*self._owners, *filter(self._is_on_page, some)]
        owners.sort(key=_queue_of)
        self._owners = owners[:OWNERS_A_PAGE]
        for dropped in owners[OWNERS_A_PAGE : OWNERS_A_PAGE + 1]:
            self._next_owner = min(self._next_owner or _queue_of(dropped), _queue_of(dropped))

    def _is_on_page(self, progress: PopProgress) -> bool:
        return (
            progress.in_flight > 0
            and _queue_of(progress)[:3] >= self._begin[:3]
            and _is_wanted(self._pops, progress, self._wanted)
        )

    def _rank_owners(self) -> None:
        self._ranks = np.full(len(self._pops.owners) + 1, -1, dtype=np.int64)
        for rank, progress in enumerate(self._owners):
            self._ranks[progress.index] = rank
        self._void_before = np.array([each.void_before for each in self._owners], dtype=np.int64)
        if self._next_owner is not None:
            self.bound = _Key(len(self._owners), 0)
        if self._owners and _queue_of(self._owners[0])[:3] == self._begin[:3]:
            self.first = _Key(0, self._begin.queue_offset)

    def rows(self, slots: np.ndarray, _wanted: InFlightFilter) -> np.ndarray:
        """Return the rows of the deliveries that belong to the queues of the page."""
        table = self._pops.table
        numbers = np.frombuffer(table.owners, dtype=np.uint32)[slots]
        ranks = self._ranks[np.minimum(numbers, len(self._ranks) - 1)]
        is_on_page = ranks >= 0
        slots, ranks = slots[is_on_page], ranks[is_on_page]
        ids = np.frombuffer(table.ids, dtype=np.int64)[slots]
        starts = np.frombuffer(table.starts, dtype=np.int64)[slots]
        ends = starts + np.frombuffer(table.counts, dtype=np.uint8)[slots]
        # Of the first queue, deliveries that end before the page begins are left out.
        flags = np.frombuffer(table.flags, dtype=np.uint8)[slots]
        has_gaps = (ranks == 0) & (flags & FLAG_GAPS != 0) & (starts < self.first.minor)
        for i in np.flatnonzero(has_gaps).tolist():
            ends[i] = table.end_of(int(slots[i]))
        is_behind = (ranks != 0) | (ends > self.first.minor)
        rows = np.stack([ranks, starts, slots, ids], axis=1)[is_behind]
        matching: np.ndarray = rows[rows[:, 3] >= self._void_before[rows[:, 0]]]
        return matching

    def spanning_count(self, rows: np.ndarray) -> int:
        """Return how many deliveries of the first queue begin before the page and reach into it."""
        return int(np.count_nonzero((rows[:, 0] == 0) & (rows[:, 1] <= self.first.minor)))

    def key(self, row: Sequence[int], index: int) -> _Key:
        """Return the key of a message."""
        return _Key(row[0], self._pops.table.offset_of(row[2], index))

    def position(self, key: _Key) -> QueuePosition:
        """Return the position of a key."""
        if key.major < len(self._owners):
            queue = _queue_of(self._owners[key.major])
            return queue._replace(queue_offset=key.minor)
        assert self._next_owner is not None, "a page ends with its queues only if there are others"
        return self._next_owner


def _queue_of(progress: PopProgress) -> QueuePosition:
    return QueuePosition(progress.group_id, progress.topic_id, progress.queue.queue_id)


def _is_wanted(pops: PopState, progress: PopProgress, wanted: InFlightFilter) -> bool:
    """Whether a listing has the deliveries of a queue of a group."""
    if wanted.group_ids is not None and progress.group_id not in wanted.group_ids:
        return False
    if pops.is_deleted(progress):
        return False
    if wanted.topic_id is not None and progress.named_topic_id != wanted.topic_id:
        return False
    is_retry = progress.named_topic_id != progress.topic_id
    queue_id = progress.queue.queue_id
    return wanted.queue_id is None or (queue_id == wanted.queue_id and not is_retry)
