"""What of a group is in flight: a look through the delivery table, which changes nothing.

The messages come in the order of their pops, those that are out longest first, and a page begins
behind the place at which the one before has ended. Each page is a look at the whole table, in
slices, since that is in no such order.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import DeliverySlot, LogOffset
from tidemill.broker.engine.layout.pop_checkpoint import (
    FLAG_RELEASED,
    FLAG_RENEWS,
    MESSAGES_MAX,
    cut_client_id,
)
from tidemill.broker.engine.message_store import MessageDamaged
from tidemill.broker.engine.pop.deadlines import FLAG_DUE
from tidemill.broker.engine.pop.deliveries import Delivery
from tidemill.broker.engine.pop.delivery_table import FREE
from tidemill.broker.engine.pop.holder_numbers import NOBODY
from tidemill.message import stored_message

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
    from tidemill.broker.engine.message_store import MessageStore
    from tidemill.broker.engine.pop.progress import PopProgress
    from tidemill.broker.engine.pop.state import PopState
    from tidemill.broker.engine.tally import Tally

SLOTS_A_STEP: Final = 8_192  # of the table: a millisecond where each is of another queue
DELIVERIES_A_LOOK: Final = 1_024  # that a page may come from; it ends where they do
# The same where a message is looked for by its id, which is read of each: behind an empty page the
# next one is a look at the whole table again. 1.5 MiB.
SEARCHED_A_LOOK: Final = 65_536
MESSAGES_A_STEP: Final = 64  # whose ids are read
EVER: Final = 1 << 62  # a log offset that no delivery reaches


class Wanted(NamedTuple):
    """Which messages of a group; None and "": any."""

    group_id: GroupId | None
    topic_id: TopicId | None = None  # with what is on its retry topic
    queue_id: QueueId | None = None  # then without
    client_id: str = ""
    message_id: str = ""


class Place(NamedTuple):
    """A place in the order."""

    popped_at_ms: int
    slot: int
    message_index: int


class InFlight(NamedTuple):
    """One message that is out."""

    delivery: Delivery
    queue_id: QueueId
    is_retry: bool  # then queue and offset are those of the group's retry topic
    queue_offset: int
    message_id: str  # "" where it cannot be read
    delivery_attempt: int
    client_id: str  # "" where that is not known
    popped_at_ms: int
    renews: bool
    is_on_its_way: bool  # it renews, and nobody has told yet that its client has it

    @property
    def place(self) -> Place:
        """Where it stands in the order."""
        return Place(self.popped_at_ms, self.delivery.slot, self.delivery.message_index)


@final
class InFlightLook:
    """One look under way: call `step` until it returns False, and `take` what was found."""

    def __init__(
        self,
        store: MessageStore,
        pops: PopState,
        tally: Tally,
        wanted: Wanted,
        *,
        after: Place | None,
        before_id: int,
        max_messages: int,
    ) -> None:
        """Look for deliveries that were made before the log was at `before_id`."""
        self._store = store
        self._pops = pops
        self._tally = tally
        self._wanted = wanted
        self._after = after
        self._before_id = before_id
        self._messages_left = max_messages
        self._deliveries_max = SEARCHED_A_LOOK if wanted.message_id else DELIVERIES_A_LOOK
        self._slots_from = 0
        # The first in the order so far: columns are popped_at_ms, slot, and delivery id.
        self._candidates = np.empty((0, 3), dtype=np.int64)
        self._is_cut = False  # there are more than these
        self._at = 0  # among the candidates
        self._found: list[InFlight] = []
        # Behind which the next page begins; None: there is none.
        self.end: Place | None = None

    def take(self) -> list[InFlight]:
        """Return and forget what was found since the last call."""
        found, self._found = self._found, []
        return found

    def step(self, now_ms: int) -> bool:
        """Do one slice; True while there is more to do."""
        if self._slots_from < len(self._pops.table.ids):
            self._gather(now_ms)
            return True
        for _ in range(MESSAGES_A_STEP):
            if self._at == len(self._candidates):
                if self._is_cut:
                    popped_at_ms, slot, _ = self._candidates[-1].tolist()
                    self.end = Place(popped_at_ms, slot, MESSAGES_MAX)
                return False
            if not self._look_at_next():
                return False
        return True

    # ------------------------------------------------------------ which deliveries

    def _gather(self, now_ms: int) -> None:
        """Look at a slice of the table, and keep the first ones in the order."""
        slots = self.matching(self._slots_from, now_ms)
        self._slots_from += SLOTS_A_STEP
        if not len(slots):
            return
        table = self._pops.table
        popped = np.frombuffer(table.popped_at_ms, dtype=np.int64)[slots]
        ids = np.frombuffer(table.ids, dtype=np.int64)[slots]
        known = np.concatenate([self._candidates, np.stack([popped, slots, ids], axis=1)])
        order = np.lexsort((known[:, 1], known[:, 0]))
        self._is_cut |= len(known) > self._deliveries_max
        self._candidates = known[order[: self._deliveries_max]]

    def matching(self, begin: int, now_ms: int) -> np.ndarray:
        """Return which slots of a slice of the table, from `begin` on, are wanted."""
        table, wanted = self._pops.table, self._wanted
        end = begin + SLOTS_A_STEP
        self._tally.add(1)
        ids = np.frombuffer(table.ids, dtype=np.int64)[begin:end]
        popped = np.frombuffer(table.popped_at_ms, dtype=np.int64)[begin:end]
        flags = np.frombuffer(table.flags, dtype=np.uint8)[begin:end]
        is_it = (ids != FREE) & (ids < self._before_id)
        is_it &= np.frombuffer(table.live, dtype=np.uint32)[begin:end] != 0
        # What has run out, or was released, is revive's, or ready for the next pop.
        is_it &= flags & (FLAG_DUE | FLAG_RELEASED) == 0
        is_it &= np.frombuffer(table.visible_at_ms, dtype=np.int64)[begin:end] > now_ms
        if wanted.client_id:
            number = table.clients.find(cut_client_id(wanted.client_id))
            if number == NOBODY:
                return np.empty(0, dtype=np.int64)
            is_it &= np.frombuffer(table.holders, dtype=np.uint32)[begin:end] == number
        if self._after is not None:
            # Of the delivery at the place there may be more, unless all of it was looked at.
            first = self._after.slot + (self._after.message_index >= MESSAGES_MAX)
            slots = np.arange(begin, begin + len(ids))
            is_same_time = (popped == self._after.popped_at_ms) & (slots >= first)
            is_it &= (popped > self._after.popped_at_ms) | is_same_time
        slots = np.flatnonzero(is_it) + begin
        matching: np.ndarray = slots[self._are_wanted(slots)]
        return matching

    def _are_wanted(self, slots: np.ndarray) -> np.ndarray:
        """Return by slot whether it is of a queue that is asked for, and not void."""
        table = self._pops.table
        numbers = np.frombuffer(table.owners, dtype=np.uint32)[slots]
        used, used_at = np.unique(numbers, return_inverse=True)
        owners = [self._pops.owners[number] for number in used.tolist()]
        is_wanted = np.array([self._is_wanted(owner) for owner in owners], dtype=bool)
        void_before = np.array([owner.void_before for owner in owners], dtype=np.int64)
        ids = np.frombuffer(table.ids, dtype=np.int64)[slots]
        of_wanted: np.ndarray = is_wanted[used_at] & (ids >= void_before[used_at])
        return of_wanted

    def _is_wanted(self, progress: PopProgress) -> bool:
        wanted = self._wanted
        if wanted.group_id not in {None, progress.group_id} or self._pops.is_deleted(progress):
            return False
        if wanted.topic_id is not None and progress.named_topic_id != wanted.topic_id:
            return False
        is_retry = progress.named_topic_id != progress.topic_id
        queue_id = progress.queue.queue_id
        return wanted.queue_id is None or (queue_id == wanted.queue_id and not is_retry)

    # ------------------------------------------------------------ their messages

    def _look_at_next(self) -> bool:
        """Look at the next delivery; False: this page is full."""
        popped_at_ms, slot, delivery_id = self._candidates[self._at].tolist()
        table = self._pops.table
        is_there = table.ids[slot] == delivery_id and not table.flags[slot] & FLAG_DUE
        for index in table.indexes_of(table.live[slot]) if is_there else ():
            place = Place(popped_at_ms, slot, index)
            if self._after is not None and place <= self._after:
                continue
            if not self._messages_left:
                self.end = self._after
                return False
            self._after = place
            found = self.describe(slot, index)
            if self._wanted.message_id in {"", found.message_id}:
                self._found.append(found)
                self._messages_left -= 1
        self._at += 1
        return True

    def describe(self, slot: int, index: int) -> InFlight:
        """Return a message of a delivery that is there."""
        progress = self._pops.owners[self._pops.table.owners[slot]]
        return self.named(progress, self.placed(slot, index))

    def placed(self, slot: int, index: int) -> InFlight:
        """Return what the table has of a message of a delivery that is there."""
        table = self._pops.table
        progress = self._pops.owners[table.owners[slot]]
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
            table.client_id_of(slot),
            table.popped_at_ms[slot],
            bool(flags & FLAG_RENEWS),
            bool(flags & FLAG_RENEWS and table.handover[slot]),
        )

    def named(self, progress: PopProgress, placed: InFlight) -> InFlight:
        """Return a message with its id, and which delivery of it that is."""
        self._tally.add(1)
        message_id, attempt = "", 1
        # Of what retention has taken, or what is damaged, the rest is told.
        with suppress(BlockFileDamaged, MessageDamaged, LookupError, struct.error, ValueError):
            log_offset = progress.queue.entry(placed.queue_offset)[0]
            if placed.is_retry:
                attempt = self._store.place(log_offset).attempts + 1
            message_id = stored_message.message_id_of(self._store.log.read(log_offset)[1])
        if progress.ordered is not None:
            attempt = progress.ordered.pending.get(placed.queue_offset, 1)
        return placed._replace(message_id=message_id, delivery_attempt=attempt)
