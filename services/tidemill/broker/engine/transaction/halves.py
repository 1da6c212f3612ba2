"""The records of half messages: first records, copies, and the messages that end them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final
from zlib import crc32

from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.dedup import DedupKey
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.message import (
    FLAG_HALF,
    FLAG_KEYED,
    FLAG_OUTCOME,
    HalfMessage,
    HalfOutcome,
    KeyedMessage,
    MessageEntry,
    OutcomeReason,
    RecoveredHalf,
)
from tidemill.broker.engine.layout.numbers import HalfId, LogOffset, QueueId, TopicId
from tidemill.broker.engine.layout.record import HEADER, HEADER_SIZE, RecordHeader, RecordKind
from tidemill.broker.engine.layout.transaction import TransactionRow
from tidemill.broker.engine.message_store import MessageDamaged, MessageStore
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.metadata.system_topics import ensure_system_topic
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.store.segment import Record
from tidemill.broker.engine.tally import Tally
from tidemill.common.errors import Repairing
from tidemill.common.histogram import Histogram
from tidemill.message.resource_names import HALF_DEAD_LETTER_TOPIC, HALF_TOPIC

HALF_QUEUE: Final = QueueId(0)  # first records
LATENCY_BUCKETS_MS: Final = (
    *(5, 10, 50, 100, 500, 1_000, 5_000, 10_000, 30_000, 60_000),
    *(300_000, 600_000, 1_800_000, 3_600_000, 14_400_000, 86_400_000),
)
COPY_QUEUE: Final = QueueId(1)  # copies before the state floor passes


@final
class HalfMessages:
    """The half messages in the log."""

    def __init__(
        self,
        store: MessageStore,
        catalog: Catalog,
        recorder: Recorder,
        tally: Tally,
        *,
        ready: Callable[[TopicId], None],
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._recorder = recorder
        self._tally = tally
        self._ready = ready
        # From the half message to its end, in ms.
        self.latencies: Histogram[TopicId] = Histogram(LATENCY_BUCKETS_MS)

    # ------------------------------------------------------------ reading

    def read(self, row: TransactionRow) -> Record:
        """Return the newest record of a transaction. Raises Repairing."""
        found = self.find(row)
        if found is None:
            raise Repairing(
                f"the half message {row.half_id} is damaged and cannot be delivered now; try again"
                f" when the broker has mended it from a replica"
            )
        return found

    def find(self, row: TransactionRow) -> Record | None:
        """Return the newest record of a transaction; None if it is damaged or freed."""
        try:
            return self._store.record(row.log_offset)
        except (MessageDamaged, LookupError):
            return None

    def find_sent_ms(self, half_id: HalfId) -> int | None:
        """Return the time of the send of a half message; None if its first record is freed."""
        head = self._store.log.bytes_at(LogOffset(half_id), HEADER_SIZE)
        if len(head) < HEADER_SIZE:
            return None
        header = RecordHeader._make(HEADER.unpack_from(head))
        is_half = header.kind == RecordKind.MESSAGE and header.flags & FLAG_HALF
        is_right = is_half and int(header.log_offset) == half_id
        return header.stored_at_ms if is_right else None

    def observe_end(self, row: TransactionRow, now_ms: int) -> None:
        """Count the time from a half message to its end, unless its first record is freed."""
        sent_at_ms = self.find_sent_ms(row.half_id)
        if sent_at_ms is not None:
            self.latencies.observe(row.topic_id, max(now_ms - sent_at_ms, 0))

    def _content(self, row: TransactionRow) -> tuple[bytes | memoryview, int]:
        """Return the message with its CRC, or its intact properties.

        Raises BlockFileDamaged if the message may be mended.
        """
        found = self.find(row)
        if found is None:
            self._store.check_awaited(row.log_offset)
            salvaged = self._salvage(row)
            return salvaged, crc32(salvaged)
        return found.tail, found.header.tail_crc

    def _salvage(self, row: TransactionRow) -> bytes:
        """Return the intact properties of a damaged half message. Raises BlockFileDamaged."""
        topic_id = self._catalog.topic_ids[HALF_TOPIC]
        for queue_id in (HALF_QUEUE, COPY_QUEUE):
            queue = self._catalog.queue(topic_id, queue_id)
            offset = queue.offset_behind(row.log_offset)
            if offset < queue.max_offset and queue.entry(offset)[0] == row.log_offset:
                return self._store.remains_of(row.log_offset, queue.entry(offset)[1])[1]
        return self._store.remains_of(row.log_offset, 0)[1]

    # ------------------------------------------------------------ appending

    def append_first(
        self,
        cause: HalfMessage | RecoveredHalf,
        blob: bytes | memoryview,
        crc: int,
        now_ms: int,
        *,
        key: DedupKey | None = None,
    ) -> HalfId:
        """Append a first HALF record, with its dedup key."""
        flags = FLAG_HALF | FLAG_OUTCOME if isinstance(cause, RecoveredHalf) else FLAG_HALF
        queue = self._hidden_queue(HALF_QUEUE, now_ms)
        place = queue.topic_id, queue.queue_id, 0, queue.max_offset
        entry = MessageEntry(*place, flags, cause, blob, crc)
        if key is not None:
            keyed = KeyedMessage(cause, key)
            entry = MessageEntry(*place, flags | FLAG_KEYED, keyed, blob, crc)
        return HalfId(self._recorder.append(entry, now_ms))

    def append_copy(self, row: TransactionRow, found: Record, now_ms: int) -> None:
        """Append an open half message again, with its present checks."""
        half = half_of(found)._replace(
            half_id=row.half_id, checks=row.checks, next_check_ms=row.time_ms
        )
        queue = self._hidden_queue(COPY_QUEUE, now_ms)
        crc = found.header.tail_crc
        entry = MessageEntry(
            queue.topic_id, queue.queue_id, 0, queue.max_offset, FLAG_HALF, half, found.tail, crc
        )
        self._recorder.append(entry, now_ms)
        self._tally.add(1, size_bytes=len(found.tail))

    def append_committed(self, row: TransactionRow, found: Record, now_ms: int) -> None:
        """Append a committed message to its topic."""
        queue = self._catalog.queue(row.topic_id, half_of(found).queue_id)
        outcome = HalfOutcome(row.half_id, OutcomeReason.COMMITTED, row.checks, "")
        self._append(queue, outcome, found.tail, found.header.tail_crc, now_ms)

    def append_expired(self, row: TransactionRow, now_ms: int) -> None:
        """Append a half message without a decision to the dead-letter topic of half messages.

        Of a message that is damaged for good, only the intact properties remain. Raises
        BlockFileDamaged if it may be mended.
        """
        blob, crc = self._content(row)
        target = ensure_system_topic(self._catalog, self._recorder, HALF_DEAD_LETTER_TOPIC, now_ms)
        outcome = HalfOutcome(
            row.half_id, OutcomeReason.EXPIRED, row.checks, self._catalog.topic_name(row.topic_id)
        )
        self._append(self._catalog.queue(target.id, QueueId(0)), outcome, blob, crc, now_ms)
        self._tally.add(1, size_bytes=len(blob))

    def _append(
        self,
        queue: ConsumeQueue,
        outcome: HalfOutcome,
        blob: bytes | memoryview,
        crc: int,
        now_ms: int,
    ) -> None:
        entry = MessageEntry(
            queue.topic_id, queue.queue_id, 0, queue.max_offset, FLAG_OUTCOME, outcome, blob, crc
        )
        self._recorder.append(entry, now_ms)
        self._ready(queue.topic_id)

    def _hidden_queue(self, queue_id: QueueId, now_ms: int) -> ConsumeQueue:
        topic_id = self._catalog.topic_ids.get(HALF_TOPIC)
        if topic_id is None:
            topic_id = ensure_system_topic(
                self._catalog, self._recorder, HALF_TOPIC, now_ms, queues=2
            ).id
        return self._catalog.queue(topic_id, queue_id)


def half_of(found: Record) -> HalfMessage:
    """Return the part HALF of a record that the table names."""
    return message.decode_half(found.body)


def outcome_of(found: Record) -> HalfOutcome:
    """Return the part OUTCOME of the record of an expired half message."""
    return message.decode_outcome(found.body)
