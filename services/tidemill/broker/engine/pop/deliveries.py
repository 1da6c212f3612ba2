"""Deliveries: what a pop hands out, and how a receipt handle names a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, final

from tidemill.broker.engine.layout import pop_checkpoint
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_GAPS, FLAG_ORDERED
from tidemill.broker.engine.layout.record import Kind
from tidemill.broker.engine.pop.progress import Progress
from tidemill.broker.engine.pop.state import PopState

# Delivery attempts of a batch whose messages are all delivered for the first time, by its size.
_FIRST_ATTEMPTS: list[tuple[int, ...]] = [(1,) * n for n in range(pop_checkpoint.MESSAGES_MAX + 1)]


class AckResult(IntEnum):
    """What an ack found (numbers of broker.proto)."""

    APPLIED = 1
    ALREADY = 2
    GONE = 3


class Delivery(NamedTuple):
    """How a receipt handle names one message of one delivery."""

    group_id: int
    topic_id: int
    slot: int
    delivery_id: int
    message_index: int
    visible_at_ms: int


class Batch(NamedTuple):
    """What one pop took from one queue; all columns of one length."""

    slot: int
    delivery_id: int
    popped_at_ms: int
    visible_at_ms: int
    queue_id: int
    indexes: Sequence[int]
    queue_offsets: Sequence[int]
    delivery_attempts: Sequence[int]
    log_offsets: Sequence[int]
    size_bytes: int  # of the records that were taken


@final
class Deliveries:
    """Makes deliveries: their CK in the log, and their row in the table."""

    def __init__(self, state: PopState) -> None:
        self._state = state
        self._log = state.log

    def deliver(
        self,
        progress: Progress,
        offsets: Sequence[int],
        log_offsets: Sequence[int],
        visible_at_ms: int,
        now_ms: int,
        *,
        size_bytes: int,
        ordered: bytes = b"",
    ) -> Batch:
        """Log the CK of a delivery and take it in."""
        start, count = offsets[0], len(offsets)
        flags = FLAG_ORDERED if ordered else 0
        gaps = None
        if offsets[-1] - start + 1 != count:
            gaps = tuple([offset - start for offset in offsets])
            flags |= FLAG_GAPS
            ordered = pop_checkpoint.GAPS[count].pack(*gaps) + ordered
        queue_id = progress.queue.queue_id
        slot = self._state.table.allocate()
        body = pop_checkpoint.BODY.pack(
            slot,
            progress.group_id,
            progress.topic_id,
            queue_id,
            count,
            flags,
            pop_checkpoint.revive_queue_of(progress.topic_id, progress.group_id, queue_id),
            start,
            visible_at_ms,
            progress.pop_offset,
        )
        delivery_id = self._log.append(Kind.CK, body + ordered, now_ms)
        self._state.count("ck", progress, 1)
        self._state.place(
            progress,
            slot,
            delivery_id,
            start=start,
            count=count,
            flags=flags,
            visible_at_ms=visible_at_ms,
            popped_at_ms=now_ms,
            gaps=gaps,
        )
        return Batch(
            slot, delivery_id, now_ms, visible_at_ms, queue_id, range(count), offsets,
            _FIRST_ATTEMPTS[count], log_offsets, size_bytes,
        )  # fmt: skip


def encode_ordered(attempts: list[int], attempt_id: str) -> bytes:
    """Encode the part of a CK that only ordered groups have."""
    encoded = attempt_id.encode()
    assert len(encoded) <= pop_checkpoint.ATTEMPT_ID_BYTES_MAX, "the engine refuses longer ones"
    return pop_checkpoint.ATTEMPTS[len(attempts)].pack(*attempts) + bytes([len(encoded)]) + encoded
