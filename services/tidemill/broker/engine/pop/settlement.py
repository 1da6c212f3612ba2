"""Ack, change-invisible and dead-letter: the requests of clients about a delivery.

The state decides, never the handle alone. A delivery that is settled, revived, replaced or void
does not change again.
"""

from __future__ import annotations

from typing import final

from tidemill.broker.engine.layout import pop_checkpoint
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.message import Reason
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.layout.pop_checkpoint import (
    FLAG_HOLDER,
    FLAG_ORDERED,
    FLAG_SUPERSEDES,
    FLAG_SUSPEND,
    PopCheckpoint,
)
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.pop.acks import RoundAcks
from tidemill.broker.engine.pop.deliveries import AckResult, Delivery
from tidemill.broker.engine.pop.delivery_limits import DeliveryLimits
from tidemill.broker.engine.pop.delivery_table import HANDOVER_PENDING
from tidemill.broker.engine.pop.linked_lists import NIL
from tidemill.broker.engine.pop.progress import PopProgress
from tidemill.broker.engine.pop.queue_queries import ordered_attempt
from tidemill.broker.engine.pop.redelivery import Redelivery
from tidemill.broker.engine.pop.state import PopState
from tidemill.common.errors import InvalidReceiptHandle, Repairing

# Names by number: reading the name of a member costs as much as the rest of counting it.
_NAMES = ["", *(result.name for result in AckResult)]


@final
class Settlement:
    """The handler of acks, changed invisible durations and dead letters."""

    def __init__(
        self,
        state: PopState,
        catalog: Catalog,
        recorder: Recorder,
        acks: RoundAcks,
        redelivery: Redelivery,
        limits: DeliveryLimits,
    ) -> None:
        self._state = state
        self._catalog = catalog
        self._recorder = recorder
        self._acks = acks
        self._redelivery = redelivery
        self._limits = limits

    def ack(self, delivery: Delivery, *, log_end: int, now_ms: int) -> AckResult:
        """Settle one message of a delivery. All deliveries must be below `log_end`."""
        state = self._state
        table = state.table
        group_id, topic_id, slot, delivery_id, index, _, owner = delivery
        if slot >= len(table.ids) or table.ids[slot] != delivery_id:
            result = self._result_for_missing(delivery, log_end=log_end, now_ms=now_ms)
        else:
            progress = state.owners[table.owners[slot]]
            bit = 1 << index
            # `_is_of` without the call: every ack runs this.
            if (
                progress.group_id != group_id
                or progress.named_topic_id != topic_id
                or index >= table.counts[slot]
                or state.is_void(progress, delivery_id)
                or (owner and not table.is_owned(slot, owner))
            ):
                result = AckResult.GONE
            elif self._acks.add_live(slot, bit, now_ms):
                table.handover[slot] &= ~HANDOVER_PENDING  # The client has the whole batch.
                result = AckResult.APPLIED
            else:
                result = self._result_for_settled(delivery, now_ms=now_ms)
        if result is not AckResult.GONE or group_id in self._catalog.groups:
            state.counts[_NAMES[result], group_id, topic_id] += 1
        return result

    def _result_for_settled(self, delivery: Delivery, *, now_ms: int) -> AckResult:
        """Return the result of an ack of a settled message of a delivery in the table.

        After the deadline, a revive or a dead letter may have settled it instead. If the clock was
        set back, the deadline may have passed before.
        """
        table, slot = self._state.table, delivery.slot
        is_gone = (
            table.superseded[slot] >> delivery.message_index & 1
            or table.visible_at_ms[slot] <= now_ms
            or delivery.delivery_id < self._catalog.brought_back_before
        )
        return AckResult.GONE if is_gone else AckResult.ALREADY

    def is_settled(self, delivery: Delivery, *, log_end: int, now_ms: int) -> bool:
        """Return whether a request of a client has settled a message, as an ack would find."""
        table, slot = self._state.table, delivery.slot
        if slot >= len(table.ids) or table.ids[slot] != delivery.delivery_id:
            result = self._result_for_missing(delivery, log_end=log_end, now_ms=now_ms)
            return result is AckResult.ALREADY
        if not self._is_of(self._state.owners[table.owners[slot]], delivery):
            return False
        is_live = self._acks.live(slot) >> delivery.message_index & 1
        result = self._result_for_settled(delivery, now_ms=now_ms)
        return not is_live and result is AckResult.ALREADY

    def _is_of(self, progress: PopProgress, delivery: Delivery) -> bool:
        return (
            progress.group_id == delivery.group_id
            and progress.named_topic_id == delivery.topic_id
            and not self._state.is_void(progress, delivery.delivery_id)
            and self._state.table.is_owned(delivery.slot, delivery.owner)
        )

    def _result_for_missing(self, delivery: Delivery, *, log_end: int, now_ms: int) -> AckResult:
        """Return the result of an ack of a delivery that is not in the table.

        A delivery leaves the table when acks have settled it, or at its deadline. A replaced one
        stays until its deadline. So a delivery that is missing before its deadline was acked,
        unless the clock was set back since, or the table has dropped replaced deliveries of the
        group.
        """
        if (
            delivery.visible_at_ms <= now_ms
            or delivery.delivery_id < self._catalog.brought_back_before
            or delivery.delivery_id >= log_end
            or self._catalog.ended_handles.have_ended(delivery.group_id, delivery.delivery_id)
            or delivery.group_id not in self._catalog.groups
            or delivery.topic_id not in self._catalog.topics
        ):
            return AckResult.GONE
        # A reset voids all queues at once, so queue 0 is enough.
        progress = self._state.progress.get((delivery.group_id, delivery.topic_id, QueueId(0)))
        is_void = progress is not None and delivery.delivery_id < progress.void_before
        return AckResult.GONE if is_void else AckResult.ALREADY

    def _find_live(self, delivery: Delivery) -> PopProgress:
        """Return the progress of a delivery whose message is live. Raises InvalidReceiptHandle."""
        table = self._state.table
        slot = delivery.slot
        if slot < len(table.ids) and table.ids[slot] == delivery.delivery_id:
            progress = self._state.owners[table.owners[slot]]
            live = self._acks.live(slot)
            if self._is_of(progress, delivery) and live >> delivery.message_index & 1:
                return progress
        raise InvalidReceiptHandle(
            "the receipt handle names no live delivery: the message was acked, was redelivered "
            "after its invisible duration, or its handle was replaced; use the newest handle"
        )

    def change_invisible(
        self,
        delivery: Delivery,
        *,
        invisible_duration_ms: int,
        suspend: bool,
        now_ms: int,
        by_operator: bool = False,
    ) -> Delivery:
        """Replace one message's delivery by a new delivery with its own deadline.

        A duration of 0 makes the message available at once. Raises InvalidReceiptHandle,
        Overloaded.
        """
        progress = self._find_live(delivery)
        table = self._state.table
        old_slot, old_index = delivery.slot, delivery.message_index
        is_last = self._acks.live(old_slot) == 1 << old_index
        self._limits.check_change(progress.slots, is_last=is_last, by_operator=by_operator)
        offset = table.offset_of(old_slot, old_index)
        flags = FLAG_SUPERSEDES | (FLAG_SUSPEND if suspend else 0)
        # The same client holds it. The client has chosen the time, so it is not renewed.
        client_id, owner = table.client_of(old_slot)
        if client_id:
            flags |= FLAG_HOLDER
        attempts = None
        if progress.ordered is not None:
            flags |= FLAG_ORDERED
            attempts = (ordered_attempt(self._state, progress, old_slot, offset),)
        visible_at_ms = now_ms + invisible_duration_ms
        queue_id = progress.queue.queue_id
        slot = table.allocate()
        delivery_id = self._recorder.append(
            PopCheckpoint(
                slot,
                progress.group_id,
                progress.topic_id,
                queue_id,
                1,
                flags,
                pop_checkpoint.revive_queue_of(progress.topic_id, progress.group_id, queue_id),
                offset,
                visible_at_ms,
                progress.position,
                None,
                (old_slot, delivery.delivery_id, old_index),
                attempts,
                "",
                client_id,
                owner=owner,
            ),
            now_ms,
        )
        self._state.count("ck", progress, 1)
        return delivery._replace(
            slot=slot, delivery_id=delivery_id, message_index=0, visible_at_ms=visible_at_ms
        )

    def dead_letter(self, delivery: Delivery, *, now_ms: int) -> None:
        """Move a delivered message to the group's dead-letter topic on its client's request."""
        progress = self._find_live(delivery)
        self._state.table.handover[delivery.slot] &= ~HANDOVER_PENDING
        try:
            self._forward(delivery, progress, now_ms)
        except BlockFileDamaged as error:
            raise Repairing from error

    def _forward(self, delivery: Delivery, progress: PopProgress, now_ms: int) -> None:
        offset = self._state.table.offset_of(delivery.slot, delivery.message_index)
        if progress.ordered is not None:
            attempts = ordered_attempt(self._state, progress, delivery.slot, offset)
        else:
            attempts = self._redelivery.attempts_of(progress, offset)
        self._redelivery.copy_to_dlq(
            delivery.slot,
            delivery.message_index,
            progress,
            Reason.FORWARDED_BY_CLIENT,
            now_ms,
            attempts,
        )
        if progress.ordered is not None and progress.head == NIL:
            self._state.ready.add((progress.group_id, progress.named_topic_id))
