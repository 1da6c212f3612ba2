"""Pop for ordered groups: per queue in order, one live batch at a time.

A queue with a live batch is blocked until every message of it is settled or has run out. The next
batch begins with the lowest message that is not settled; nothing settled comes again; a repeated
attempt gets the batch that it already holds.
"""

from __future__ import annotations

from typing import final

from tidemill.broker.engine.layout.message import Reason
from tidemill.broker.engine.metadata.catalog import Group
from tidemill.broker.engine.pop.copies import Copies
from tidemill.broker.engine.pop.deliveries import Batch, Deliveries, encode_ordered
from tidemill.broker.engine.pop.delivery_table import NIL
from tidemill.broker.engine.pop.progress import Progress
from tidemill.broker.engine.pop.room import Room
from tidemill.broker.engine.pop.scan import Scan
from tidemill.broker.engine.pop.state import PopState


@final
class OrderedPop:
    """Takes the next batch of a queue for an ordered group."""

    def __init__(self, state: PopState, scan: Scan, deliveries: Deliveries, copies: Copies) -> None:
        self._state = state
        self._scan = scan
        self._deliveries = deliveries
        self._copies = copies

    def pop(
        self,
        progress: Progress,
        group: Group,
        room: Room,
        visible_at_ms: int,
        tags: frozenset[str],
        attempt_id: str,
        now_ms: int,
    ) -> Batch | None:
        """Take what fits of a queue; None where it is blocked or has nothing that does."""
        ordered = progress.ordered
        assert ordered is not None, "the progress of an ordered group knows its order"
        table = self._state.table
        self._drop_expired(progress)
        is_repeat = bool(attempt_id) and attempt_id == ordered.attempt_id
        live = self._live_slots(progress)
        if any(table.visible_at_ms[slot] > now_ms for slot in live):
            return self._same_batch(progress, live, room) if is_repeat else None
        if self._state.has_unflushed_acks:
            # A replay meets these acks before the CK that voids what was not acked.
            self._state.flush_acks(now_ms)
        self.dead_letter_exhausted(live, progress, group, now_ms)
        self._scan.skip_expired(progress)
        offsets = sorted(ordered.pending)[: room.messages_left]
        entries = [progress.queue.entry(offset) for offset in offsets]
        del offsets[room.take_first([entry[1] for entry in entries]) :]
        log_offsets = [entry[0] for entry in entries[: len(offsets)]]
        if len(offsets) == len(ordered.pending) and room.messages_left:
            taken = self._scan.take(progress, progress.pop_offset, room, tags)
            if taken is not None:
                offsets += taken.offsets
                log_offsets += taken.log_offsets
                progress.pop_offset = taken.next_offset
        if not offsets:
            return None
        counted = 0 if is_repeat else 1
        attempts = [ordered.pending.get(offset, 1 - counted) + counted for offset in offsets]
        attempts = [max(attempt, 1) for attempt in attempts]
        for slot in self._live_slots(progress):
            self._void(slot, progress)
        batch = self._deliveries.deliver(
            progress,
            offsets,
            log_offsets,
            visible_at_ms,
            now_ms,
            size_bytes=room.taken_bytes,
            ordered=encode_ordered(attempts, attempt_id),
        )
        ordered.pending.update(zip(offsets, attempts, strict=True))
        ordered.attempt_id = attempt_id
        ordered.batch_id = batch.delivery_id
        return self._copies.within_limit(batch, attempts, progress, group, now_ms)

    def _drop_expired(self, progress: Progress) -> None:
        """Settle what retention took from an ordered queue: it can block nobody."""
        assert progress.ordered is not None
        table, pending, low = self._state.table, progress.ordered.pending, progress.queue.min_offset
        gone = [offset for offset in pending if offset < low]
        if not gone:
            return
        for slot in self._live_slots(progress):
            for index in table.indexes_of(table.live[slot]):
                if table.offset_of(slot, index) < low:
                    self._state.settle(slot, 1 << index, progress)
        for offset in gone:
            pending.pop(offset, None)
        self._state.count("expired_before_revive", progress, len(gone))

    def _live_slots(self, progress: Progress) -> list[int]:
        slots, slot = [], progress.head
        while slot != NIL:
            slots.append(slot)
            slot = self._state.table.next[slot]
        return slots

    def _void(self, slot: int, progress: Progress) -> None:
        """Give up an expired delivery of an ordered queue: its messages are pending again."""
        assert progress.ordered is not None
        pending = dict(progress.ordered.pending)
        self._state.settle(slot, self._state.table.live[slot], progress)
        progress.ordered.pending = pending

    def _same_batch(self, progress: Progress, live: list[int], room: Room) -> Batch | None:
        """Return what the repeated attempt already holds, as far as it is not settled."""
        assert progress.ordered is not None
        table = self._state.table
        slot = next((slot for slot in live if table.ids[slot] == progress.ordered.batch_id), None)
        if slot is None:
            return None
        indexes = table.indexes_of(table.live[slot])[: room.messages_left]
        offsets = [table.offset_of(slot, index) for index in indexes]
        entries = [progress.queue.entry(offset) for offset in offsets]
        count = room.take_first([entry[1] for entry in entries])
        if not count:
            return None
        indexes, offsets = indexes[:count], offsets[:count]
        return Batch(
            slot,
            table.ids[slot],
            table.popped_at_ms[slot],
            table.visible_at_ms[slot],
            progress.queue.queue_id,
            indexes,
            offsets,
            [progress.ordered.pending[offset] for offset in offsets],
            [entry[0] for entry in entries[:count]],
            room.taken_bytes,
        )

    def dead_letter_exhausted(
        self, slots: list[int], progress: Progress, group: Group, now_ms: int
    ) -> None:
        """Dead-letter what has run out in `slots` and has no attempt left."""
        assert progress.ordered is not None
        table = self._state.table
        for slot in slots:
            for index in table.indexes_of(table.live[slot]):
                deliveries = progress.ordered.pending.get(table.offset_of(slot, index), 0)
                if deliveries >= group.max_attempts:
                    self._copies.copy_to_dlq(
                        slot, index, progress, Reason.ATTEMPTS_EXHAUSTED, now_ms, deliveries
                    )
