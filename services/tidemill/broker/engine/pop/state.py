"""The pop state: deliveries and progress, as the log records make them.

Each `apply_` method applies one log entry: live, in recovery, and in an engine that follows. The
lists through the delivery table are part of the state.

Each engine does three things by its own clock, without a record:

- A delivery that only rejects old handles, or that is void, leaves the table at its deadline
  (`discard`).
- A due delivery leaves its deadline list. So an entry may find its slot still in use.
- The engine forgets deleted topics and groups in slices (`forgetting.py`).

While the engine catches up with a snapshot, `catch_up` knows which entries each slice of the
snapshot contains. The lists are built at its end.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol, final

from tidemill.broker.engine.layout.ack import Acks
from tidemill.broker.engine.layout.message import Cause, Reason
from tidemill.broker.engine.layout.numbers import GroupId, LogOffset, QueueId, TopicId
from tidemill.broker.engine.layout.pop_checkpoint import (
    FLAG_HOLDER,
    FLAG_ORDERED,
    FLAG_RELEASED,
    FLAG_RENEWS,
    FLAG_SUPERSEDES,
    PopCheckpoint,
    is_counted,
)
from tidemill.broker.engine.layout.renewal import Renewal, RenewalReason
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.pop.deadlines import FLAG_DUE
from tidemill.broker.engine.pop.delivery_table import FREE, RETURNED, UNPROVEN, DeliveryTable
from tidemill.broker.engine.pop.linked_lists import NIL
from tidemill.broker.engine.pop.progress import OrderedState, PopProgress, PopSubscription
from tidemill.broker.engine.pop.progress_index import ProgressIndex
from tidemill.broker.engine.tally import Tally
from tidemill.common.histogram import Histogram
from tidemill.message.client_key import ClientKey

# Makes a named tuple without a call of Python code: every delivery does it.
_tuple = tuple.__new__

# Upper bounds in milliseconds, for the time from pop to ack and for the wait before a pop.
DELIVERY_BUCKETS_MS = (1, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 60_000)
# Handles of renewed deliveries are valid for this long after the pop: the invisible duration that
# proxies ask for on behalf of push consumers.
RENEWED_HANDLE_MS = 60_000
_STILL_RENEWED = frozenset({RenewalReason.EXTENDED, RenewalReason.DISCONNECTED})
# The column `handover` after a renewal; 0 for the other reasons.
_HANDOVER_AFTER = {
    RenewalReason.CLIENT_ENDED: RETURNED,
    RenewalReason.CLIENT_SILENT: RETURNED,
    RenewalReason.NOT_HANDED_OVER: UNPROVEN,
}


class SnapshotCoverage(Protocol):
    """The entries that the slices of a snapshot contain, while an engine catches up with it."""

    def is_new_to_progress(self, progress: PopProgress, log_offset: LogOffset) -> bool:
        """Return whether the progress of a queue lacks the record at `log_offset`."""

    def is_new_to_slot(self, slot: int, progress: PopProgress, log_offset: LogOffset) -> bool:
        """Return whether a slot lacks the record at `log_offset` about a queue's delivery."""

    def may_place(self, slot: int, delivery_id: int) -> bool:
        """Return whether a delivery is a later use of a slot than the known one."""

    def displace(self, slot: int) -> None:
        """Remember a delivery of an ordered queue before a later use of its slot is loaded."""

    def note_displaced(
        self, slot: int, delivery_id: int, progress: PopProgress, offsets: list[int]
    ) -> None:
        """Remember a delivery after a later use of its slot was loaded."""

    def settle_displaced(
        self, slot: int, delivery_id: int, bits: int, log_offset: LogOffset
    ) -> None:
        """Settle messages of a remembered delivery."""

    def finish(self, *, now_ms: int) -> None:
        """End the catch-up: drop void deliveries and build the lists."""


@final
class PopState:
    """All deliveries and all progress of all groups.

    It is one class, because most entries change the deliveries and the progress together.
    """

    def __init__(self, catalog: Catalog, tally: Tally) -> None:
        self.catalog = catalog
        self.tally = tally
        self.table = DeliveryTable()
        self.index = ProgressIndex(catalog, self.table)
        # Parts of the index that hot paths read directly.
        self.progress = self.index.by_key
        self.owners = self.index.numbers.owners  # by the number that slots of the table name
        self._deleted = self.index.deleted
        self.subscriptions: dict[tuple[GroupId, TopicId], PopSubscription] = {}
        self.ready: set[tuple[GroupId, TopicId]] = set()  # pairs with newly available messages
        self.ready_topics: set[TopicId] = set()  # topics with new messages for all groups
        self.counts: Counter[tuple[str, int, int]] = Counter()  # (name, group id, topic id)
        # Milliseconds from a delivery to each of its acks, by group id and topic id.
        self.ack_times_ms: Histogram[tuple[GroupId, TopicId]] = Histogram(DELIVERY_BUCKETS_MS)
        # Messages that pops of PRIORITY topics took, by (level, whether the slot was fair).
        self.delivered_by_level: dict[tuple[GroupId, TopicId], dict[tuple[int, bool], int]] = {}
        self.catch_up: SnapshotCoverage | None = None
        self.kept_count = 0  # slots without live messages, which only reject old handles

    def mark_topic_ready(self, topic_id: TopicId) -> None:
        """Let the next round wake the polls of a topic: it has new messages."""
        self.ready_topics.add(topic_id)

    def progress_of(self, group_id: GroupId, topic_id: TopicId, queue_id: QueueId) -> PopProgress:
        """Return the progress of a group in a queue. Add it if it is missing."""
        return self.index.find_or_add(group_id, topic_id, queue_id)

    def count_redelivered(self, slot: int, progress: PopProgress, count: int) -> None:
        """Count messages of a delivery that ran out and that are delivered again."""
        # A nack replaces a delivery by one with a shorter duration.
        is_nack = self.table.flags[slot] & FLAG_SUPERSEDES
        self.count("again_nack" if is_nack else "again_expired", progress, count)

    def count(self, name: str, progress: PopProgress, count: int) -> None:
        """Add to a counter of a group and topic, for the metrics."""
        self.counts[name, progress.group_id, progress.named_topic_id] += count

    @property
    def live_count(self) -> int:
        """The number of deliveries with unsettled messages."""
        return self.table.used_count - self.kept_count

    def deliveries_of(self, progress: PopProgress) -> list[int]:
        """Return the slots of a queue's live deliveries in pop order."""
        slots, slot = [], progress.head
        while slot != NIL:
            slots.append(slot)
            slot = self.table.next[slot]
        return slots

    def is_due(self, slot: int) -> bool:
        """Return whether a slot holds a delivery that left its deadline list because it was due."""
        return self.table.ids[slot] != FREE and bool(self.table.flags[slot] & FLAG_DUE)

    # ------------------------------------------------------------ CK

    def apply_checkpoint(self, ck: PopCheckpoint, log_offset: LogOffset, popped_at_ms: int) -> None:
        """Apply a CK record: add a delivery, and replace another one if the CK names it."""
        # Unpacked at once, because every pop runs this: reading by field name costs twice as much.
        slot, group_id, topic_id, queue_id, _, flags, _, _, _, next_offset, *_ = ck
        progress = self.progress.get((group_id, topic_id, queue_id))
        if progress is None:
            progress = self.progress_of(group_id, topic_id, queue_id)
        catch_up = self.catch_up
        if catch_up is None or catch_up.is_new_to_progress(progress, log_offset):
            if not flags & FLAG_SUPERSEDES:
                progress.pop_offset = progress.position = next_offset
            is_whole = not progress.void_before and not flags & FLAG_SUPERSEDES
            if flags & FLAG_ORDERED:
                self._apply_ordered(progress, ck, log_offset, popped_at_ms)
                # Messages of earlier batches may still be pending behind this one.
                pending = progress.ordered.pending if progress.ordered is not None else ()
                is_whole = is_whole and len(pending) == len(ck.offsets)
            if is_whole:
                progress.stated_at = log_offset
        if flags & FLAG_SUPERSEDES and ck.superseded is not None:
            self._supersede(*ck.superseded, log_offset, popped_at_ms)
        if catch_up is None or catch_up.is_new_to_slot(slot, progress, log_offset):
            self._place(ck, progress, log_offset, popped_at_ms)

    def _apply_ordered(
        self, progress: PopProgress, ck: PopCheckpoint, log_offset: LogOffset, popped_at_ms: int
    ) -> None:
        assert ck.attempts is not None, "a CK of an ordered group has attempts"
        ordered = progress.ordered
        if ordered is None:
            # This replay began after the record that created the group. A later record states it.
            ordered = progress.ordered = OrderedState()
        if not ck.flags & FLAG_SUPERSEDES:
            # A new batch voids all older deliveries. Their unsettled messages stay pending.
            for slot in self.deliveries_of(progress):
                live = self.table.live[slot]
                progress.in_flight -= live.bit_count()
                if self.table.flags[slot] & FLAG_RELEASED or self._is_returned_early(
                    slot, popped_at_ms
                ):
                    # Its handles have not ended. The table must reject them until they do.
                    self.table.superseded[slot] |= live
                self._remove(slot, live, progress)
            ordered.attempt_id, ordered.batch_id = ck.attempt_id, log_offset
            # A batch takes the lowest pending messages. A pending message below its last one that
            # is not in the batch has expired, or no longer matches the filter.
            offsets = ck.offsets
            for offset in [
                offset
                for offset in ordered.pending
                if offset < offsets[-1] and offset not in offsets
            ]:
                del ordered.pending[offset]
        counted = is_counted(ck.flags)
        ordered.pending.update(
            zip(ck.offsets, [attempt + counted for attempt in ck.attempts], strict=True)
        )

    def _place(
        self, ck: PopCheckpoint, progress: PopProgress, delivery_id: int, popped_at_ms: int
    ) -> None:
        table = self.table
        (
            slot,
            _,
            _,
            _,
            count,
            flags,
            _,
            start,
            visible_at_ms,
            _,
            gaps,
            *_,
            client_id,
            renews,
            owner,
        ) = ck
        if flags & FLAG_HOLDER and not renews:
            flags &= ~FLAG_RENEWS  # FLAG_HOLDER and FLAG_RENEWS are the same bit.
        if slot >= len(table.ids):
            table.grow_to(slot + 1)
        if table.ids[slot] != FREE:
            if self.catch_up is not None and not self.catch_up.may_place(slot, delivery_id):
                self.catch_up.note_displaced(slot, delivery_id, progress, list(ck.offsets))
                return
            self.discard(slot)
        table.place(
            slot,
            delivery_id,
            progress.index,
            start,
            count,
            flags,
            visible_at_ms,
            popped_at_ms,
            gaps,
            _tuple(ClientKey, (client_id, owner)),
        )
        if self.catch_up is not None:
            return
        # Link it as the newest delivery of its queue.
        tail = progress.tail
        table.previous[slot] = tail
        table.next[slot] = NIL
        if tail == NIL:
            progress.head = slot
        else:
            table.next[tail] = slot
        progress.tail = slot
        progress.slots.live += 1
        progress.in_flight += count
        if progress.oldest == NIL and not flags & FLAG_SUPERSEDES:
            progress.oldest = slot
        table.deadlines.add(slot)

    def apply_renewal(self, renewal: Renewal, log_offset: LogOffset, _stored_at_ms: int) -> None:
        """Apply a RENEW record: change the deadline of deliveries with live messages."""
        visible_at_ms, why, _, entries = renewal
        table = self.table
        for slot, delivery_id in entries:
            progress = self._owner(slot, delivery_id, log_offset)
            if progress is None or not table.live[slot]:
                continue
            if why is RenewalReason.HANDED_OVER:
                table.flags[slot] |= FLAG_RENEWS
            elif why not in _STILL_RENEWED:
                table.flags[slot] &= ~FLAG_RENEWS
            table.handover[slot] = _HANDOVER_AFTER.get(why, 0)
            if self.catch_up is None:
                table.set_deadline(slot, visible_at_ms)
            else:
                table.visible_at_ms[slot] = visible_at_ms

    # ------------------------------------------------------------ settling

    def apply_acks(self, acks: Acks, log_offset: LogOffset, _acked_at_ms: int) -> None:
        """Apply an ACK record."""
        for slot, delivery_id, bits in acks.entries:
            self.settle(slot, delivery_id, bits, log_offset)

    def settle(self, slot: int, delivery_id: int, bits: int, log_offset: LogOffset) -> None:
        """Settle messages of a delivery that were acked, expired or copied."""
        table = self.table
        progress = self._owner(slot, delivery_id, log_offset)
        if progress is None:
            if self.catch_up is not None:
                self.catch_up.settle_displaced(slot, delivery_id, bits, log_offset)
            return
        if progress.ordered is not None:
            # Also for bits that are not live: the snapshot slice of the slot may be newer than the
            # slice of the queue.
            for index in table.indexes_of(bits):
                progress.ordered.pending.pop(table.offset_of(slot, index), None)
        bits &= table.live[slot]
        if not bits:
            return
        progress.in_flight -= bits.bit_count()
        self._remove(slot, bits, progress)

    def settle_copied(self, cause: Cause, log_offset: LogOffset, copied_at_ms: int) -> None:
        """Settle a message of a delivery that was copied to the retry or dead-letter topic.

        Acks under a handle that has not ended must be rejected, unless their client asked for the
        copy. An ordered delivery keeps which message failed: the messages behind it did not.
        """
        slot, bit, table = cause.slot, 1 << cause.message_index, self.table
        is_known = slot < len(table.ids) and table.ids[slot] == cause.delivery_id
        if is_known and cause.reason != Reason.FORWARDED_BY_CLIENT:
            live = table.live[slot]
            is_failed = cause.reason == Reason.ATTEMPTS_EXHAUSTED and live != bit
            is_failed = is_failed and bool(table.flags[slot] & FLAG_ORDERED)
            if is_failed or self._is_returned_early(slot, copied_at_ms):
                table.superseded[slot] |= bit & live
        self.settle(slot, cause.delivery_id, bit, log_offset)

    def _is_returned_early(self, slot: int, now_ms: int) -> bool:
        """Return whether a delivery was given back and its handles have not ended."""
        is_returned = self.table.handover[slot] & RETURNED
        return bool(is_returned) and self.handles_end_ms(slot) > now_ms

    def _supersede(
        self, slot: int, delivery_id: int, index: int, log_offset: LogOffset, now_ms: int
    ) -> None:
        """Record that another delivery has replaced one message of this one."""
        progress = self._owner(slot, delivery_id, log_offset)
        if progress is None:
            return
        table, bit = self.table, 1 << index
        table.superseded[slot] |= bit
        if not table.live[slot] & bit:
            return
        progress.in_flight -= 1
        is_last = table.live[slot] == bit
        is_renewed = table.flags[slot] & FLAG_RENEWS or table.handover[slot] & RETURNED
        if is_last and is_renewed and self.handles_end_ms(slot) <= now_ms:
            # Its handles have ended and are rejected for that reason alone.
            table.superseded[slot] = 0
        self._remove(slot, bit, progress)

    def handles_end_ms(self, slot: int) -> int:
        """Return when the handles of a delivery end, also those of a repeated attempt.

        Until then, the table must reject the handles of messages that were redelivered. Renewals
        may have moved the deadline hours ahead, and a return may have moved it back.
        """
        table = self.table
        renewed_end_ms = table.popped_at_ms[slot] + RENEWED_HANDLE_MS
        if table.handover[slot] & RETURNED:
            return renewed_end_ms
        if table.flags[slot] & FLAG_RENEWS or table.handover[slot] & UNPROVEN:
            return min(table.visible_at_ms[slot], renewed_end_ms)
        return table.visible_at_ms[slot]

    def _owner(self, slot: int, delivery_id: int, log_offset: LogOffset) -> PopProgress | None:
        """Return the progress of a delivery, None if the delivery is missing or void."""
        table = self.table
        if slot >= len(table.ids) or table.ids[slot] != delivery_id:
            return None
        progress = self.owners[table.owners[slot]]
        if delivery_id < progress.void_before:
            return None
        catch_up = self.catch_up
        if catch_up is not None and not catch_up.is_new_to_slot(slot, progress, log_offset):
            return None
        return progress

    def _remove(self, slot: int, bits: int, progress: PopProgress) -> None:
        table = self.table
        live = table.live[slot] & ~bits
        table.live[slot] = live
        if live:
            return
        if self.catch_up is not None:
            if table.superseded[slot]:
                table.visible_at_ms[slot] = self.handles_end_ms(slot)
            else:
                table.release(slot)
            return
        self._unlink(slot, progress)
        slots = progress.slots
        slots.live -= 1
        visible_at_ms = table.visible_at_ms[slot]
        until_ms = self.handles_end_ms(slot) if table.superseded[slot] else visible_at_ms
        is_due = table.flags[slot] & FLAG_DUE
        if not table.superseded[slot] or (is_due and until_ms <= visible_at_ms):
            table.deadlines.remove(slot)
            table.release(slot)
            return
        slots.kept += 1
        self.kept_count += 1
        if until_ms != visible_at_ms:
            table.set_deadline(slot, until_ms)

    def _unlink(self, slot: int, progress: PopProgress) -> None:
        table = self.table
        before, after = table.previous[slot], table.next[slot]
        if after == NIL:
            progress.tail = before
        else:
            table.previous[after] = before
        if before == NIL:
            progress.head = after
        else:
            table.next[before] = after
        if slot == progress.oldest:
            while after != NIL and table.flags[after] & FLAG_SUPERSEDES:
                after = table.next[after]
            progress.oldest = after

    def discard(self, slot: int) -> None:
        """Empty a slot whose delivery is void or has no live messages."""
        table = self.table
        if self.catch_up is None:
            progress = self.owners[table.owners[slot]]
            if not table.live[slot]:
                progress.slots.kept -= 1
                self.kept_count -= 1
            else:
                progress.slots.live -= 1
                if table.ids[slot] >= progress.void_before:
                    # A record uses the slot again although the delivery was not settled.
                    progress.in_flight -= table.live[slot].bit_count()
                    self._unlink(slot, progress)
            table.deadlines.remove(slot)
        table.release(slot)

    # ------------------------------------------------------------ deletions, configuration

    def is_deleted(self, progress: PopProgress) -> bool:
        """Return whether the group or topic of a progress was deleted."""
        catalog = self.catalog
        return progress.group_id not in catalog.groups or not catalog.is_alive(progress.topic_id)

    def is_void(self, progress: PopProgress, delivery_id: int) -> bool:
        """Return whether a reset or a deletion came after a delivery of a queue."""
        if delivery_id < progress.void_before:
            return True
        # `forgetting.has_deleted` without the call: every ack runs this.
        return bool(self._deleted or self.catalog.orphans) and self.is_deleted(progress)

    def add_retry_topic(
        self, group_id: GroupId, topic_id: TopicId, retry_topic_id: TopicId
    ) -> None:
        """Make a group's pops of a topic read its retry topic too."""
        topic = self.catalog.topics.get(retry_topic_id)
        retries = [
            self.progress_of(group_id, retry_topic_id, QueueId(number))
            for number in range(1 if topic is None else topic.queues)
        ]
        for progress in retries:
            progress.named_topic_id = topic_id
        subscription = self.subscriptions.get((group_id, topic_id))
        if subscription is not None:
            subscription.retries = retries
