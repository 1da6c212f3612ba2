"""Pop for ordered groups: per queue in order, one live batch at a time.

A queue with a live batch is blocked until every message of it is settled or has run out. The next
batch begins with the lowest message that is not settled; nothing settled comes again; a repeated
attempt gets the batch that it already holds.
"""

from __future__ import annotations

from typing import final

import numpy as np

from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.message import Reason
from tidemill.broker.engine.layout.numbers import DeliverySlot, LogOffset
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_RELEASED, MESSAGES_MAX
from tidemill.broker.engine.layout.state import StatedDeliveries
from tidemill.broker.engine.metadata.catalog import ConsumerGroup
from tidemill.broker.engine.pop.acks import RoundAcks
from tidemill.broker.engine.pop.budget import PopBudget
from tidemill.broker.engine.pop.deliveries import DeliveryBatch, DeliveryWriter
from tidemill.broker.engine.pop.linked_lists import NIL
from tidemill.broker.engine.pop.progress import PopProgress
from tidemill.broker.engine.pop.queue_queries import is_locking, locking_slots
from tidemill.broker.engine.pop.queue_reader import MessageSelection, QueueReader
from tidemill.broker.engine.pop.redelivery import Redelivery
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.pop.stated_rows import delivery_rows_of
from tidemill.broker.engine.tally import Allowance, Tally


@final
class OrderedPop:
    """Takes the next batch of a queue for an ordered group."""

    def __init__(
        self,
        state: PopState,
        reader: QueueReader,
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
        self._allowance = Allowance(tally, items=0)  # of the pop under way, for dead letters
        self._client_id = ""  # of the pop under way

    def begin_pop(self, client_id: str, now_ms: int) -> None:
        """Begin a pop: its queues share what it may dead-letter, and what is acked blocks none."""
        self._client_id = client_id
        self._allowance = Allowance(self._tally, items=MESSAGES_MAX)
        self._acks.record(now_ms)

    def has_nothing(self, progress: PopProgress, attempt_id: str, now_ms: int) -> bool:
        """Whether a look is enough to say that `pop` would take nothing from a queue, or settle."""
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
        tags: frozenset[str],
        attempt_id: str,
        now_ms: int,
    ) -> DeliveryBatch | None:
        """Take what fits of a queue; None where it is blocked or has nothing that does."""
        ordered = progress.ordered
        assert ordered is not None, "the progress of an ordered group knows its order"
        self._settle_expired(progress)
        # The CK of this batch voids what is not settled by a record before it.
        self._acks.record(now_ms)
        is_repeat = bool(attempt_id) and attempt_id == ordered.attempt_id
        out = self._state.deliveries_of(progress)
        if any(is_locking(self._state, slot, now_ms) for slot in out):
            if is_repeat:
                ordered.holder = ordered.batch_id, self._client_id
            return self._same_batch(progress, out, budget) if is_repeat else None
        if not self.dead_letter_exhausted(out, progress, group, self._allowance, now_ms):
            # What is left of them blocks the queue until the next turn.
            self._state.ready.add((progress.group_id, progress.named_topic_id))
            return None
        taken = self._choose(progress, budget, tags)
        if not taken.offsets:
            return None
        counted = 0 if is_repeat else 1
        attempts = tuple(
            [max(ordered.pending.get(offset, 1 - counted) + counted, 1) for offset in taken.offsets]
        )
        if out and counted:
            self._state.count_redelivered(out[0], progress, sum(n > 1 for n in attempts))
        low = progress.queue.min_offset
        # Of earlier batches: the CK of this one, which begins behind them, forgets them.
        expired = sum(offset < low for offset in ordered.pending)
        if expired:
            self._state.count("expired_before_revive", progress, expired)
        passed = sum(
            low <= offset < taken.offsets[-1] and offset not in taken.offsets
            for offset in ordered.pending
        )
        if passed:
            self._state.count("filtered_retry", progress, passed)
        batch = self._deliveries.deliver(
            progress,
            taken,
            visible_at_ms,
            now_ms,
            size_bytes=budget.taken_bytes,
            attempts=attempts,
            attempt_id=attempt_id,
        )
        ordered.holder = ordered.batch_id, self._client_id
        return self._redelivery.within_limit(batch, attempts, progress, group, now_ms)

    def release(self, progress: PopProgress, now_ms: int) -> list[int]:
        """Let the next pop have what locks a queue; return the slots, empty where nothing does.

        As when their time is up: their attempts count, and their handles hold until that pop.
        """
        self._acks.record(now_ms)
        slots = locking_slots(self._state, progress)
        if slots:
            deliveries = delivery_rows_of(self._state, np.array(slots))
            deliveries.rows["flags"] |= FLAG_RELEASED
            self._recorder.append(StatedDeliveries(deliveries), now_ms)
        return slots

    def _choose(
        self, progress: PopProgress, budget: PopBudget, tags: frozenset[str]
    ) -> MessageSelection:
        """Choose what is pending, the lowest first, and behind all of it what is new.

        What is pending and does not match the filter any more is passed over like what is new
        (pop.md 8.3): the batch that begins behind it forgets it.
        """
        assert progress.ordered is not None
        pending = progress.ordered.pending
        self._reader.skip_expired(progress)
        low = progress.queue.min_offset
        waiting = sorted(offset for offset in pending if offset >= low)
        if tags:
            waiting = [offset for offset in waiting if self._matches(progress, offset, tags)]
        offsets = waiting[: budget.messages_left]
        entries = [progress.queue.entry(offset) for offset in offsets]
        del offsets[budget.take_first([entry[1] for entry in entries]) :]
        log_offsets = [entry[0] for entry in entries[: len(offsets)]]
        if len(offsets) == len(waiting) and budget.messages_left:
            new = self._reader.take(progress, budget, tags)
            if new is not None:
                return MessageSelection(
                    [*offsets, *new.offsets], [*log_offsets, *new.log_offsets], new.next_offset
                )
        return MessageSelection(offsets, log_offsets, progress.next_offset)

    def _matches(self, progress: PopProgress, offset: int, tags: frozenset[str]) -> bool:
        log_offset, _, tag_hash = progress.queue.entry(offset)
        return self._reader.matches(log_offset, tag_hash, tags)

    def _settle_expired(self, progress: PopProgress) -> None:
        """Settle what retention took out of live deliveries: it can block nobody."""
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

    def _same_batch(
        self, progress: PopProgress, out: list[int], budget: PopBudget
    ) -> DeliveryBatch | None:
        """Return what the repeated attempt already holds, as far as it is not settled."""
        assert progress.ordered is not None
        table = self._state.table
        slot = next((slot for slot in out if table.ids[slot] == progress.ordered.batch_id), None)
        if slot is None:
            return None
        indexes = table.indexes_of(table.live[slot])[: budget.messages_left]
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
            table.visible_at_ms[slot],
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
        """Dead-letter what has run out in `slots` and has no attempt left; False: not all of it."""
        assert progress.ordered is not None
        table = self._state.table
        for slot in slots:
            for index in table.indexes_of(table.live[slot]):
                deliveries = progress.ordered.pending.get(table.offset_of(slot, index), 0)
                if deliveries < group.max_attempts:
                    continue
                if allowance.is_spent:
                    return False
                self._redelivery.copy_to_dlq(
                    slot, index, progress, Reason.ATTEMPTS_EXHAUSTED, now_ms, deliveries
                )
        return True
