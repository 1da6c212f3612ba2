"""What an event takes from other records than its own: messages, deliveries, timers, names.

None of this ever changes: an incarnation's number is never given out again, and a log offset has
one record. So what was found is kept for all readers, in tables that are emptied when they are
full: an ack follows its delivery, and that its message, mostly by little.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout import delivery_rows, message, pop_checkpoint, record
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.delivery_rows import DeliveryRows
from tidemill.broker.engine.layout.message import FLAG_CAUSE, FLAG_SCHEDULE, FLAG_TIMER, TimerTarget
from tidemill.broker.engine.layout.numbers import GroupId, LogOffset, QueueId, TimerId, TopicId
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_GAPS, PopCheckpoint
from tidemill.broker.engine.layout.record import HEADER_SIZE, RecordKind
from tidemill.broker.engine.layout.timer_entry import TimerEntryDamaged
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.store.segment import CorruptStore
from tidemill.broker.engine.tally import Tally
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.broker.engine.timer.status import SCHEDULE_QUEUE, TIMER_TOPIC
from tidemill.message import stored_message
from tidemill.message.resource_names import RETRY_TOPIC_PREFIX

MESSAGES_KEPT: Final = 16_384  # about 6 MiB
DELIVERIES_KEPT: Final = 4_096  # of up to 32 messages, most of which are kept above anyway

_unpack_place = message.PLACE.unpack_from
_unpack_fields = stored_message.FIXED.unpack_from
_tuple = tuple.__new__
# What reading a record that is not what it was may raise.
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
    """What its record says of a message, as later events repeat it."""

    message_id: str
    attempts: int  # deliveries before this record
    origin_topic: str  # of a copy: where the message stood first
    origin_queue_id: int
    origin_queue_offset: int
    timer_number: int


GONE: Final = KnownMessage("", -1, "", 0, 0, 0)


class KnownDelivery(NamedTuple):
    """What a pop checkpoint says, and the messages that it names."""

    group: str
    topic: str
    topic_id: TopicId
    queue_id: QueueId
    offsets: Sequence[int]
    messages: Sequence[KnownMessage]
    attempts: Sequence[int]  # which delivery of each message it is; 0 where nobody knows
    client_id: str
    visible_at_ms: int


@final
class EventLookup:
    """Finds what records name."""

    def __init__(
        self, catalog: Catalog, store: MessageStore, timers: TimerIndex, tally: Tally
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._timers = timers
        self._tally = tally
        self._messages: dict[tuple[int, int, int], KnownMessage] = {}
        self._deliveries: dict[int, KnownDelivery] = {}

    # ------------------------------------------------------------ names

    def topic_name(self, topic_id: TopicId) -> str:
        """Return what a topic is called, or was; "" where nobody knows any more."""
        return self._catalog.topic_name(topic_id)

    def group_name(self, group_id: GroupId) -> str:
        """Return what a group is called, or was; "" where nobody knows any more."""
        return self._catalog.group_name(group_id)

    # ------------------------------------------------------------ messages

    def keep_message(self, topic_id: int, queue_id: int, offset: int, known: KnownMessage) -> None:
        """Keep what the record of a message says."""
        if len(self._messages) >= MESSAGES_KEPT:
            self._messages.clear()
        self._messages[topic_id, queue_id, offset] = known

    def message_at(self, topic_id: TopicId, queue_id: QueueId, offset: int) -> KnownMessage:
        """Return what is known of the message at an offset of a queue, or GONE."""
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
            # The entry may be wrong; then another message stands there.
            if (place[0], place[1], place[3]) != (topic_id, queue_id, offset):
                return GONE
            known = known_message(header[record.FLAGS], body, blob)
        except _UNREADABLE:
            return GONE
        self.keep_message(topic_id, queue_id, offset, known)
        return known

    # ------------------------------------------------------------ deliveries

    def delivery(
        self, delivery_id: int, rows: dict[int, DeliveryRows] | None = None
    ) -> KnownDelivery | None:
        """Return a delivery; None where its CK is gone, and no row among `rows` says the same."""
        known = self._deliveries.get(delivery_id)
        if known is not None:
            return known
        if rows is not None and delivery_id in rows:
            return self._of_row(rows[delivery_id])
        self._tally.add(1)
        try:
            if delivery_id < self._store.log.min_offset:
                return None
            head, _ = self._store.log.read(LogOffset(delivery_id))
            if memoryview(head)[record.KIND_POSITION] != RecordKind.CK:
                return None
            ck = pop_checkpoint.decode(memoryview(head)[HEADER_SIZE:])
        except _UNREADABLE:
            return None
        return self.keep_delivery(delivery_id, ck)

    def keep_delivery(self, delivery_id: int, ck: PopCheckpoint) -> KnownDelivery:
        """Return, and keep, what a CK record says."""
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
            # Of what is gone -1 deliveries came before: it is nobody knows which.
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
            found.clients[number - 1] if number else "",
            int(row["visible_at_ms"]),
        )

    # ------------------------------------------------------------ timers

    def timer(self, timer_id: TimerId) -> tuple[TimerTarget, KnownMessage] | None:
        """Return where a delayed message goes, and what is known of it; None: it is gone."""
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
            return None
        return (target, known) if target.timer_id == timer_id else None

    def _schedule_of(self, timer_id: TimerId) -> int:
        topic_id = self._catalog.topic_ids.get(TIMER_TOPIC)
        queue = None if topic_id is None else self._catalog.queues.get((topic_id, SCHEDULE_QUEUE))
        if queue is not None and queue.min_offset <= timer_id < queue.max_offset:
            return int(queue.entry(timer_id)[0])
        return int(self._timers.get(timer_id).log_offset)  # Of its newest copy.


def known_message(flags: int, body: memoryview | bytes, blob: memoryview | bytes) -> KnownMessage:
    """Return what a message record says that later events repeat. Raises as decoding does.

    Not verified, since a delivery may be of many large messages: of one that is damaged the id is
    what it is now. Its own record is told as damaged.
    """
    _, _, attempts, _ = _unpack_place(body)
    message_id = _message_id(blob)
    if not flags:
        return _tuple(KnownMessage, (message_id, attempts, "", 0, 0, 0))
    if flags & FLAG_CAUSE:
        cause = message.decode_cause(body)
        return KnownMessage(
            message_id, attempts, cause.origin, cause.root_queue_id, cause.root_offset, 0
        )
    if flags & FLAG_TIMER:
        settled = message.decode_timer_cause(body)
        return KnownMessage(message_id, attempts, settled.origin, 0, 0, settled.timer_id + 1)
    timer_id = message.decode_target(body).timer_id
    return KnownMessage(message_id, attempts, "", 0, 0, timer_id + 1)


def _message_id(blob: memoryview | bytes) -> str:
    _, _, _, key_count, id_at, id_size, *_ = _unpack_fields(blob)
    begin = stored_message.FIXED_SIZE + key_count * stored_message.KEY_HASH_SIZE + id_at
    return str(blob[begin : begin + id_size], "utf-8", "replace")


def first_topic(topic: str, known: KnownMessage) -> str:
    """Return the name of the topic that a message came to first."""
    if known.origin_topic:
        return known.origin_topic
    if topic.startswith(RETRY_TOPIC_PREFIX):
        return topic.partition("+")[2]  # A copy that is gone itself.
    return topic


def rows_by_delivery(tail: memoryview | bytes) -> dict[int, DeliveryRows]:
    """Return the rows in the tail of a record by the ids of their deliveries."""
    found = delivery_rows.decode(tail)
    return {
        int(delivery_id): delivery_rows.part_of(found, number, number + 1)
        for number, delivery_id in enumerate(np.asarray(found.rows["delivery_id"]))
    }
