"""Pop for ordered groups: one live batch per queue, in the order of the queue.

A live batch blocks its queue until each of its messages is settled or has run out. The next batch
begins with the lowest unsettled message. A settled message is never delivered again. A repeated
attempt gets the batch that it already holds.

Attempts count per message. A client processes a batch in order. So a batch that ends counts an
attempt of its first unsettled message, and none of the messages behind it. A change-invisible
counts an attempt of its message.
"""

from __future__ import annotations

from typing import final

import numpy as np

from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.message import Reason
from tidemill.broker.engine.layout.numbers import DeliverySlot, LogOffset
from tidemill.broker.engine.layout.pop_checkpoint import (
    FLAG_RELEASED,
    FLAG_SUPERSEDES,
    MESSAGES_MAX,
)
from tidemill.broker.engine.layout.state import StatedDeliveries
from tidemill.broker.engine.message_filter import EVERY_MESSAGE, MessageFilter
from tidemill.broker.engine.metadata.catalog import ConsumerGroup
from tidemill.broker.engine.pop.acks import RoundAcks
from tidemill.broker.engine.pop.budget import PopBudget
from tidemill.broker.engine.pop.deliveries import DeliveryBatch, DeliveryWriter
from tidemill.broker.engine.pop.linked_lists import NIL
from tidemill.broker.engine.pop.message_selection import MessageSelection, MessageSelector
from tidemill.broker.engine.pop.progress import OrderedState, PopProgress
from tidemill.broker.engine.pop.queue_queries import is_locking, locking_slots
from tidemill.broker.engine.pop.redelivery import Redelivery
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.pop.stated_rows import delivery_rows_of
from tidemill.broker.engine.tally import Allowance, Tally
from tidemill.message.client_key import UNKNOWN_CLIENT, ClientKey

NONE = -1  # no queue offset


@final
class OrderedPop:
    """The pop of ordered groups."""

    def __init__(
        self,
        state: PopState,
        reader: MessageSelector,
        deliveries: DeliveryWriter,
        acks: RoundAcks,
        redelivery: Redelivery,
        tally: Tally,
        recorder: Recorder,
    ) -> None:
        self._state = state
        self._reader = reader
        self._deliveries = deliveries
        self._acks = acks
        self._redelivery = redelivery
        self._tally = tally
        self._recorder = recorder
        # The client of the current pop, and the dead letters that its queues may still write.
        self._allowance = Allowance(tally, items=0)
        self._client = UNKNOWN_CLIENT

    def begin_pop(self, client: ClientKey, now_ms: int) -> None:
        """Begin a pop. Log the acks first, so that acked messages block no queue."""
        self._client = client
        self._allowance = Allowance(self._tally, items=MESSAGES_MAX)
        self._acks.record(now_ms)

    def is_unavailable(self, progress: PopProgress, attempt_id: str, now_ms: int) -> bool:
        """Return whether `pop` would neither take nor settle messages of a queue. Cheap."""
        ordered = progress.ordered
        assert ordered is not None, "the progress of an ordered group knows its order"
        pending, queue = ordered.pending, progress.queue
        if progress.head == NIL:
            return not pending and progress.position >= queue.max_offset
        return (
            is_locking(self._state, progress.head, now_ms)
            and not (attempt_id and attempt_id == ordered.attempt_id)
            and (not queue.min_offset or min(pending, default=0) >= queue.min_offset)
        )

    def pop(
        self,
        progress: PopProgress,
        group: ConsumerGroup,
        budget: PopBudget,
        visible_at_ms: int,
        wanted: MessageFilter,
        attempt_id: str,
        now_ms: int,
    ) -> DeliveryBatch | None:
        """Take the messages of a queue that fit, None if it is blocked or none fits."""
        ordered = progress.ordered
        assert ordered is not None, "the progress of an ordered group knows its order"
        self._settle_expired(progress)
        # The CK of this batch voids all messages that no earlier record settles.
        self._acks.record(now_ms)
        is_repeat = bool(attempt_id) and attempt_id == ordered.attempt_id
        slots = self._state.deliveries_of(progress)
        if slots and not self._state.table.is_owned(slots[0], self._client.owner):
            is_repeat = False  # Another user has chosen the same attempt id.
        if any(is_locking(self._state, slot, now_ms) for slot in slots):
            if is_repeat:
                ordered.holder = ordered.batch_id, self._client.client_id
            return self._repeated_batch(progress, slots, budget) if is_repeat else None
        if not self.dead_letter_exhausted(slots, progress, group, self._allowance, now_ms):
            # The remaining ones block the queue until the next turn.
            self._state.ready.add((progress.group_id, progress.named_topic_id))
            return None
        selection = self._choose(progress, budget, wanted)
        if not selection.offsets:
            return None
        failed = set() if is_repeat else {self._failed_offset(slot, progress) for slot in slots}
        attempts = tuple(
            [ordered.pending.get(offset, 1) + (offset in failed) for offset in selection.offsets]
        )
        if slots and not is_repeat:
            again = sum(offset in ordered.pending for offset in selection.offsets)
            self._state.count_redelivered(slots[0], progress, again)
        self._count_dropped(progress, ordered, selection)
        batch = self._deliveries.deliver(
            progress,
            selection,
            visible_at_ms,
            now_ms,
            size_bytes=budget.taken_bytes,
            attempts=attempts,
            attempt_id=attempt_id,
        )
        ordered.holder = ordered.batch_id, self._client.client_id
        return self._redelivery.apply_attempt_limit(batch, attempts, progress, group, now_ms)

    def _count_dropped(
        self, progress: PopProgress, ordered: OrderedState, selection: MessageSelection
    ) -> None:
        """Count the pending messages that the CK of a new batch drops."""
        low = progress.queue.min_offset
        expired = sum(offset < low for offset in ordered.pending)
        if expired:
            self._state.count("expired_before_revive", progress, expired)
        skipped = sum(
            low <= offset < selection.offsets[-1] and offset not in selection.offsets
            for offset in ordered.pending
        )
        if skipped:
            self._state.count("filtered_retry", progress, skipped)

    def release(self, progress: PopProgress, now_ms: int) -> list[int]:
        """Release the deliveries that lock a queue, and return their slots.

        They are treated as expired: their attempts count, and their handles are valid until the
        next pop.
        """
        self._acks.record(now_ms)
        slots = locking_slots(self._state, progress)
        if slots:
            deliveries = delivery_rows_of(self._state, np.array(slots))
            deliveries.rows["flags"] |= FLAG_RELEASED
            self._recorder.append(StatedDeliveries(deliveries), now_ms)
        return slots

    def _choose(
        self, progress: PopProgress, budget: PopBudget, wanted: MessageFilter
    ) -> MessageSelection:
        """Choose pending messages, the lowest first, then new ones after all pending ones.

        A pending message that no longer matches the filter is skipped like a new one. The next
        batch begins after it and drops it.
        """
        assert progress.ordered is not None
        pending = progress.ordered.pending
        self._reader.skip_expired(progress)
        low = progress.queue.min_offset
        waiting = sorted(offset for offset in pending if offset >= low)
        if wanted is not EVERY_MESSAGE:
            waiting = [offset for offset in waiting if self._matches(progress, offset, wanted)]
        offsets = waiting[: budget.messages_left]
        entries = [progress.queue.entry(offset) for offset in offsets]
        del offsets[budget.take_first([entry[1] for entry in entries]) :]
        log_offsets = [entry[0] for entry in entries[: len(offsets)]]
        if len(offsets) == len(waiting) and budget.messages_left:
            new = self._reader.select(progress, budget, wanted)
            if new is not None:
                return MessageSelection(
                    [*offsets, *new.offsets], [*log_offsets, *new.log_offsets], new.next_offset
                )
        return MessageSelection(offsets, log_offsets, progress.next_offset)

    def _matches(self, progress: PopProgress, offset: int, wanted: MessageFilter) -> bool:
        return self._reader.matches(progress.queue.entry(offset), wanted)

    def _settle_expired(self, progress: PopProgress) -> None:
        """Settle the messages of live deliveries that retention removed: they must not block."""
        assert progress.ordered is not None
        low = progress.queue.min_offset
        if not any(offset < low for offset in progress.ordered.pending):
            return
        table = self._state.table
        for slot in self._state.deliveries_of(progress):
            bits = [
                1 << index
                for index in table.indexes_of(self._acks.live(slot))
                if table.offset_of(slot, index) < low
            ]
            if bits:
                self._acks.add_expired(slot, sum(bits))
                self._state.count("expired_before_revive", progress, len(bits))

    def _repeated_batch(
        self, progress: PopProgress, slots: list[int], budget: PopBudget
    ) -> DeliveryBatch | None:
        """Return the unsettled messages of the batch that a repeated attempt holds.

        The attempt gets all of them, also above its number of messages: a quota may allow it fewer
        than before. The others would be hidden, but not delivered, until their time ends.
        """
        assert progress.ordered is not None
        table = self._state.table
        slot = next((slot for slot in slots if table.ids[slot] == progress.ordered.batch_id), None)
        if slot is None:
            return None
        indexes = table.indexes_of(table.live[slot])
        budget.messages_left = max(budget.messages_left, len(indexes))
        offsets = [table.offset_of(slot, index) for index in indexes]
        entries = [progress.queue.entry(offset) for offset in offsets]
        count = budget.take_first([entry[1] for entry in entries])
        if not count:
            return None
        indexes, offsets = indexes[:count], offsets[:count]
        return DeliveryBatch(
            DeliverySlot(slot),
            LogOffset(table.ids[slot]),
            table.popped_at_ms[slot],
            self._state.handles_end_ms(slot),
            progress.topic_id,
            progress.queue.queue_id,
            indexes,
            offsets,
            [progress.ordered.pending[offset] for offset in offsets],
            [entry[0] for entry in entries[:count]],
            budget.taken_bytes,
        )

    def dead_letter_exhausted(
        self,
        slots: list[int],
        progress: PopProgress,
        group: ConsumerGroup,
        allowance: Allowance,
        now_ms: int,
    ) -> bool:
        """Dead-letter the messages of `slots` without an attempt left. Return False if some remain.

        The deliveries in `slots` have run out.
        """
        assert progress.ordered is not None
        table = self._state.table
        for slot in slots:
            failed = self._failed_offset(slot, progress)
            for index in table.indexes_of(table.live[slot]):
                offset = table.offset_of(slot, index)
                attempts = progress.ordered.pending.get(offset, 1) + (offset == failed) - 1
                if attempts < group.max_attempts:
                    continue
                if allowance.is_spent:
                    return False
                self._redelivery.copy_to_dlq(
                    slot, index, progress, Reason.ATTEMPTS_EXHAUSTED, now_ms, attempts
                )
        return True

    def _failed_offset(self, slot: int, progress: PopProgress) -> int:
        """Return the offset of the message of an ended batch that counts an attempt, or NONE.

        It is the first message that the client did not settle. If the client changed that message,
        or if it is dead-lettered, its attempt has been counted. If retention has moved into the
        batch, the message may be missing. Then no other message counts in its place.
        """
        table = self._state.table
        unsettled = table.live[slot] | table.superseded[slot]
        first = unsettled & -unsettled
        is_counted = table.flags[slot] & FLAG_SUPERSEDES or not first & table.live[slot]
        if is_counted or table.starts[slot] < progress.queue.min_offset:
            return NONE
        return table.offset_of(slot, first.bit_length() - 1)


def is_repeated(progress: PopProgress, attempt_id: str) -> bool:
    """Whether the last batch of a queue is that of an attempt."""
    return progress.ordered is not None and progress.ordered.attempt_id == attempt_id
