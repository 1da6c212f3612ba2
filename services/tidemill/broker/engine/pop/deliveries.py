"""Deliveries: the batches that pops return, and their parts that receipt handles name."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, final

from tidemill.broker.engine.layout import pop_checkpoint
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.numbers import DeliverySlot, GroupId, LogOffset, QueueId, TopicId
from tidemill.broker.engine.layout.pop_checkpoint import (
    FLAG_GAPS,
    FLAG_HOLDER,
    FLAG_ORDERED,
    PopCheckpoint,
)
from tidemill.broker.engine.pop.message_selection import MessageSelection
from tidemill.broker.engine.pop.progress import PopProgress
from tidemill.broker.engine.pop.state import PopState
from tidemill.message.client_key import NO_OWNER, UNKNOWN_CLIENT

# Delivery attempts of a batch of first deliveries, by the size of the batch.
_FIRST_ATTEMPTS: list[tuple[int, ...]] = [(1,) * n for n in range(pop_checkpoint.MESSAGES_MAX + 1)]

# Makes a named tuple without a call of Python code: every pop does it.
_tuple = tuple.__new__


class AckResult(IntEnum):
    """The result of an ack (numbers of broker.proto)."""

    APPLIED = 1
    ALREADY = 2
    GONE = 3


class Delivery(NamedTuple):
    """One message of one delivery, as a receipt handle names it."""

    group_id: GroupId
    topic_id: TopicId
    slot: DeliverySlot
    delivery_id: LogOffset
    message_index: int
    visible_at_ms: int
    owner: int = NO_OWNER  # of the client that names it


class DeliveryBatch(NamedTuple):
    """The messages that one pop took from one queue. All columns have the same length."""

    slot: DeliverySlot
    delivery_id: LogOffset
    popped_at_ms: int
    visible_at_ms: int
    topic_id: TopicId  # topic of the queue, maybe a retry topic
    queue_id: QueueId
    indexes: Sequence[int]
    queue_offsets: Sequence[int]
    delivery_attempts: Sequence[int]
    log_offsets: Sequence[LogOffset]
    size_bytes: int  # of the records


@final
class DeliveryWriter:
    """The writer of deliveries: each is one CK."""

    def __init__(self, state: PopState, recorder: Recorder) -> None:
        self._state = state
        self._recorder = recorder
        # The client of the current pop, and whether its deliveries are renewed.
        self.client = UNKNOWN_CLIENT
        self.renews = False

    def deliver(
        self,
        progress: PopProgress,
        selection: MessageSelection,
        visible_at_ms: int,
        now_ms: int,
        *,
        size_bytes: int,
        attempts: tuple[int, ...] | None = None,
        attempt_id: str = "",
    ) -> DeliveryBatch:
        """Hide messages of a queue from its group. Only an ordered group has `attempts`."""
        offsets = selection.offsets
        start, count = offsets[0], len(offsets)
        flags = FLAG_ORDERED if attempts is not None else 0
        gaps = None
        if offsets[-1] - start + 1 != count:
            gaps = tuple([offset - start for offset in offsets])
            flags |= FLAG_GAPS
        client_id, owner = self.client
        if client_id:
            flags |= FLAG_HOLDER
        queue_id = progress.queue.queue_id
        slot = self._state.table.allocate()
        delivery_id = self._recorder.append(
            _tuple(
                PopCheckpoint,
                (
                    slot,
                    progress.group_id,
                    progress.topic_id,
                    queue_id,
                    count,
                    flags,
                    pop_checkpoint.revive_queue_of(progress.topic_id, progress.group_id, queue_id),
                    start,
                    visible_at_ms,
                    selection.next_offset,
                    gaps,
                    None,
                    attempts,
                    attempt_id,
                    client_id,
                    self.renews,
                    owner,
                ),
            ),
            now_ms,
        )
        self._state.counts["ck", progress.group_id, progress.named_topic_id] += 1
        return _tuple(
            DeliveryBatch,
            (
                slot,
                delivery_id,
                now_ms,
                visible_at_ms,
                progress.topic_id,
                queue_id,
                range(count),
                offsets,
                attempts or _FIRST_ATTEMPTS[count],
                selection.log_offsets,
                size_bytes,
            ),
        )
