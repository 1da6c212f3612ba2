"""The look-up of messages, deliveries, timers and names that the records of events refer to.

None of these ever change: topic and group ids are never used again, and a log offset has one
record. So all reads share what was found, in caches that are emptied when they are full. An ack
mostly follows soon after its delivery, and the delivery soon after its message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout import delivery_rows, message, pop_checkpoint, record
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.delivery_rows import DeliveryRows
from tidemill.broker.engine.layout.message import (
    FLAG_CAUSE,
    FLAG_HALF,
    FLAG_KEYED,
    FLAG_REPLAY,
    FLAG_SCHEDULE,
    FLAG_TIMER,
    HalfMessage,
    TimerTarget,
)
from tidemill.broker.engine.layout.numbers import (
    GroupId,
    HalfId,
    LogOffset,
    QueueId,
    TimerId,
    TopicId,
)
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_GAPS, PopCheckpoint
from tidemill.broker.engine.layout.record import HEADER_SIZE, RecordKind
from tidemill.broker.engine.layout.timer_entry import TimerEntryDamaged
from tidemill.broker.engine.layout.transaction import TransactionState
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.store.segment import CorruptStore
from tidemill.broker.engine.tally import Tally
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.status import SCHEDULE_QUEUE
from tidemill.broker.engine.transaction.table import TransactionTable
from tidemill.message import stored_message
from tidemill.message.resource_names import RETRY_TOPIC_PREFIX, TIMER_TOPIC

MESSAGES_KEPT: Final = 16_384  # about 6 MiB
DELIVERIES_KEPT: Final = 4_096  # of up to 32 messages, most of them in the cache above

_unpack_place = message.PLACE.unpack_from
_unpack_fields = stored_message.FIXED.unpack_from
_tuple = tuple.__new__
# The errors of reading a damaged or missing record.
_UNREADABLE = (
    BlockFileDamaged,
    CorruptStore,
    TimerEntryDamaged,
    LookupError,
    record.UnknownRecord,
    struct.error,
    ValueError,
)


class KnownMessage(NamedTuple):
    """The facts about a message that later events repeat."""

    message_id: str
    attempts: int  # deliveries before this record
    origin_topic: str  # of a copy: the first topic of the message
    origin_queue_id: int
    origin_queue_offset: int
    timer_number: int


GONE: Final = KnownMessage("", -1, "", 0, 0, 0)


class KnownDelivery(NamedTuple):
    """The content of a pop checkpoint, and its messages."""

    group: str
    topic: str
    topic_id: TopicId
    queue_id: QueueId
    offsets: Sequence[int]
    messages: Sequence[KnownMessage]
    attempts: Sequence[int]  # delivery attempt of each message, 0 if unknown
    client_id: str
    visible_at_ms: int


@final
class EventLookup:
    """The look-up of the records that events refer to."""

    def __init__(
        self,
        catalog: Catalog,
        store: MessageStore,
        timers: TimerIndex,
        transactions: TransactionTable,
        tally: Tally,
    ) -> None:
        self._catalog = catalog
        self._transactions = transactions
        self._store = store
        self._timers = timers
        self._tally = tally
        self._messages: dict[tuple[int, int, int], KnownMessage] = {}
        self._deliveries: dict[int, KnownDelivery] = {}

    # ------------------------------------------------------------ names

    def topic_name(self, topic_id: TopicId) -> str:
        """Return the name of a topic, which may be deleted, "" if it is unknown."""
        return self._catalog.topic_name(topic_id)

    def group_name(self, group_id: GroupId) -> str:
        """Return the name of a group, which may be deleted, "" if it is unknown."""
        return self._catalog.group_name(group_id)

    # ------------------------------------------------------------ messages

    def keep_message(self, topic_id: int, queue_id: int, offset: int, known: KnownMessage) -> None:
        """Cache the facts about a message."""
        if len(self._messages) >= MESSAGES_KEPT:
            self._messages.clear()
        self._messages[topic_id, queue_id, offset] = known

    def message_at(self, topic_id: TopicId, queue_id: QueueId, offset: int) -> KnownMessage:
        """Return the facts about the message at an offset of a queue, or GONE."""
        known = self._messages.get((topic_id, queue_id, offset))
        if known is not None:
            return known
        queue = self._catalog.queues.get((topic_id, queue_id))
        if queue is None or not queue.min_offset <= offset < queue.max_offset:
            return GONE
        self._tally.add(1)
        try:
            head, blob = self._store.log.read(queue.entry(offset)[0])
            header = record.HEADER.unpack_from(head)
            body = memoryview(head)[HEADER_SIZE:]
            place = _unpack_place(body)
            # The queue entry may be wrong and point to another message.
            if (place[0], place[1], place[3]) != (topic_id, queue_id, offset):
                return GONE
            known = known_message(header[record.FLAGS], body, blob)
        except _UNREADABLE:
            self._store.log.damage.check_directories()
            return GONE
        self.keep_message(topic_id, queue_id, offset, known)
        return known

    # ------------------------------------------------------------ deliveries

    def delivery(
        self, delivery_id: int, rows: dict[int, DeliveryRows] | None = None
    ) -> KnownDelivery | None:
        """Return a delivery, None if its CK has expired and `rows` does not contain it."""
        known = self._deliveries.get(delivery_id)
        if known is not None:
            return known
        if rows is not None and delivery_id in rows:
            return self._of_row(rows[delivery_id])
        self._tally.add(1)
        try:
            if delivery_id < self._store.log.state_floor:
                return None
            head, _ = self._store.log.read(LogOffset(delivery_id))
            if memoryview(head)[record.KIND_POSITION] != RecordKind.CK:
                return None
            ck = pop_checkpoint.decode(memoryview(head)[HEADER_SIZE:])
        except _UNREADABLE:
            self._store.log.damage.check_directories()
            return None
        return self.keep_delivery(delivery_id, ck)

    def keep_delivery(self, delivery_id: int, ck: PopCheckpoint) -> KnownDelivery:
        """Cache and return the content of a CK record."""
        known = self._known(
            ck.group_id,
            ck.topic_id,
            ck.queue_id,
            ck.offsets,
            ck.attempts,
            ck.client_id,
            ck.visible_at_ms,
        )
        if len(self._deliveries) >= DELIVERIES_KEPT:
            self._deliveries.clear()
        self._deliveries[delivery_id] = known
        return known

    def _known(
        self,
        group_id: GroupId,
        topic_id: TopicId,
        queue_id: QueueId,
        offsets: Sequence[int],
        attempts: Sequence[int] | None,
        client_id: str,
        visible_at_ms: int,
    ) -> KnownDelivery:
        message_at = self.message_at
        messages = [message_at(topic_id, queue_id, offset) for offset in offsets]
        return KnownDelivery(
            self.group_name(group_id),
            self.topic_name(topic_id),
            topic_id,
            queue_id,
            offsets,
            messages,
            # GONE has -1 attempts, so that the attempt of an unknown message is 0.
            attempts or [known.attempts + 1 for known in messages],
            client_id,
            visible_at_ms,
        )

    def _of_row(self, found: DeliveryRows) -> KnownDelivery:
        row = found.rows[0]
        start, count = int(row["start_offset"]), int(row["count"])
        gaps = found.gaps.get(0) if row["flags"] & FLAG_GAPS else None
        offsets = [start + gap for gap in (range(count) if gaps is None else gaps)]
        number = int(found.holder_numbers[0])
        return self._known(
            GroupId(int(row["group_id"])),
            TopicId(int(row["topic_id"])),
            QueueId(int(row["queue_id"])),
            offsets,
            None,
            found.clients[number - 1].client_id if number else "",
            int(row["visible_at_ms"]),
        )

    # ------------------------------------------------------------ timers

    def timer(self, timer_id: TimerId) -> tuple[TimerTarget, KnownMessage] | None:
        """Return the target of a delayed message and the facts about it, None if it is gone."""
        log = self._store.log
        self._tally.add(1)
        try:
            log_offset = self._schedule_of(timer_id)
            if not log.min_offset <= log_offset < log.committed_offset:
                return None
            head, blob = log.read(LogOffset(log_offset))
            flags = record.HEADER.unpack_from(head)[record.FLAGS]
            if not flags & FLAG_SCHEDULE:
                return None
            body = memoryview(head)[HEADER_SIZE:]
            target = message.decode_target(body)
            known = known_message(flags, body, blob)
        except _UNREADABLE:
            self._store.log.damage.check_directories()
            return None
        return (target, known) if target.timer_id == timer_id else None

    # ------------------------------------------------------------ half messages

    def half(self, half_id: HalfId) -> tuple[HalfMessage, KnownMessage] | None:
        """Return a half message and the facts about it, None if its records are gone."""
        log = self._store.log
        self._tally.add(1)
        row = self._transactions.find(half_id)
        # A settled half message has no copy. An open one may be copied, and its first record gone.
        is_open = row is not None and row.state == TransactionState.HALF
        log_offset = row.log_offset if row is not None and is_open else LogOffset(half_id)
        if not log.min_offset <= log_offset < log.committed_offset:
            return None
        try:
            head, blob = log.read(log_offset)
            flags = record.HEADER.unpack_from(head)[record.FLAGS]
            if not flags & FLAG_HALF:
                return None
            body = memoryview(head)[HEADER_SIZE:]
            half = message.decode_half(body)
            known = known_message(flags, body, blob)
        except _UNREADABLE:
            self._store.log.damage.check_directories()
            return None
        return (half, known) if (half.half_id or log_offset) == half_id else None

    def _schedule_of(self, timer_id: TimerId) -> int:
        topic_id = self._catalog.topic_ids.get(TIMER_TOPIC)
        queue = None if topic_id is None else self._catalog.queues.get((topic_id, SCHEDULE_QUEUE))
        if queue is not None and queue.min_offset <= timer_id < queue.max_offset:
            return int(queue.entry(timer_id)[0])
        return int(self._timers.get(timer_id).log_offset)  # Its newest copy.


def known_message(flags: int, body: memoryview | bytes, blob: memoryview | bytes) -> KnownMessage:
    """Return the facts about a message from its record. Raises as decoding does.

    The record is not verified, because a delivery may have many large messages. A damaged record
    may give a wrong id; its own event reports the damage.
    """
    flags &= ~FLAG_KEYED
    _, _, attempts, _ = _unpack_place(body)
    message_id = _message_id(blob)
    if not flags:
        return _tuple(KnownMessage, (message_id, attempts, "", 0, 0, 0))
    if flags & (FLAG_CAUSE | FLAG_REPLAY):
        cause = message.source_of(body, flags)
        assert cause is not None, "the flags tell it"
        return KnownMessage(
            message_id, attempts, cause.origin, cause.root_queue_id, cause.root_offset, 0
        )
    if flags & FLAG_TIMER:
        settled = message.decode_timer_cause(body)
        return KnownMessage(message_id, attempts, settled.origin, 0, 0, settled.timer_id + 1)
    if flags & FLAG_SCHEDULE:
        timer_id = message.decode_target(body).timer_id
        return KnownMessage(message_id, attempts, "", 0, 0, timer_id + 1)
    origin = "" if flags & FLAG_HALF else message.decode_outcome(body).origin
    return KnownMessage(message_id, attempts, origin, 0, 0, 0)


def _message_id(blob: memoryview | bytes) -> str:
    _, _, _, key_count, id_at, id_size, *_ = _unpack_fields(blob)
    begin = stored_message.FIXED_SIZE + key_count * stored_message.KEY_HASH_SIZE + id_at
    return str(blob[begin : begin + id_size], "utf-8", "replace")


def first_topic(topic: str, known: KnownMessage) -> str:
    """Return the name of the first topic of a message."""
    if known.origin_topic:
        return known.origin_topic
    if topic.startswith(RETRY_TOPIC_PREFIX):
        return topic.partition("+")[2]  # The copy has expired.
    return topic


def rows_by_delivery(tail: memoryview | bytes) -> dict[int, DeliveryRows]:
    """Return the delivery rows in the tail of a record, by delivery id."""
    found = delivery_rows.decode(tail)
    return {
        int(delivery_id): delivery_rows.part_of(found, number, number + 1)
        for number, delivery_id in enumerate(np.asarray(found.rows["delivery_id"]))
    }
