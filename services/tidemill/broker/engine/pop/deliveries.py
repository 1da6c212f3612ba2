"""Deliveries: what a pop hands out, and how a receipt handle names a part of it."""

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
from tidemill.broker.engine.pop.progress import PopProgress
from tidemill.broker.engine.pop.queue_reader import MessageSelection
from tidemill.broker.engine.pop.state import PopState

# Delivery attempts of a batch whose messages are all delivered for the first time, by its size.
_FIRST_ATTEMPTS: list[tuple[int, ...]] = [(1,) * n for n in range(pop_checkpoint.MESSAGES_MAX + 1)]

# Makes a named tuple of a tuple without a call of Python code, for what every pop makes.
_tuple = tuple.__new__


class AckResult(IntEnum):
    """What an ack found (numbers of broker.proto)."""

    APPLIED = 1
    ALREADY = 2
    GONE = 3


class Delivery(NamedTuple):
    """How a receipt handle names one message of one delivery."""

    group_id: GroupId
    topic_id: TopicId
    slot: DeliverySlot
    delivery_id: LogOffset
    message_index: int
    visible_at_ms: int


class DeliveryBatch(NamedTuple):
    """What one pop took from one queue; all columns of one length."""

    slot: DeliverySlot
    delivery_id: LogOffset
    popped_at_ms: int
    visible_at_ms: int
    topic_id: TopicId  # in whose queue they stand: that may be a retry topic
    queue_id: QueueId
    indexes: Sequence[int]
    queue_offsets: Sequence[int]
    delivery_attempts: Sequence[int]
    log_offsets: Sequence[LogOffset]
    size_bytes: int  # of the records that were taken


@final
class DeliveryWriter:
    """Makes deliveries: each is one CK."""

    def __init__(self, state: PopState, recorder: Recorder) -> None:
        self._state = state
        self._recorder = recorder
        # Of the pop under way: who gets what it takes, and whether that renews.
        self.client_id = ""
        self.renews = False

    def deliver(
        self,
        progress: PopProgress,
        taken: MessageSelection,
        visible_at_ms: int,
        now_ms: int,
        *,
        size_bytes: int,
        attempts: tuple[int, ...] | None = None,
        attempt_id: str = "",
    ) -> DeliveryBatch:
        """Hide messages of a queue from its group; `attempts` are for an ordered one."""
        offsets = taken.offsets
        start, count = offsets[0], len(offsets)
        flags = FLAG_ORDERED if attempts is not None else 0
        gaps = None
        if offsets[-1] - start + 1 != count:
            gaps = tuple([offset - start for offset in offsets])
            flags |= FLAG_GAPS
        client_id = self.client_id
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
                    taken.next_offset,
                    gaps,
                    None,
                    attempts,
                    attempt_id,
                    client_id,
                    self.renews,
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
                taken.log_offsets,
                size_bytes,
            ),
        )
