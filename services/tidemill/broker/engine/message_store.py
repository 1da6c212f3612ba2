"""Messages in the log: queue and index entries for new ones, and reads by queue entry."""

from __future__ import annotations

import struct
from collections import deque
from typing import NamedTuple, final

from tidemill.broker.engine.layout import message, record
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.dead_letter import Replay
from tidemill.broker.engine.layout.message import (
    FLAG_CAUSE,
    FLAG_OUTCOME,
    FLAG_STUB,
    FLAG_TIMER,
    Cause,
    MessageEntry,
    MessagePosition,
)
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, QueueOffset, TopicId
from tidemill.broker.engine.message_filter import EVALUATION_ITEMS, MATCH, MessageFilter
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.store.block_file import BlockFile, DamagedFiles
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.store.log_times import stored_before_ms
from tidemill.broker.engine.store.message_index import MessageIndex
from tidemill.broker.engine.store.segment import CorruptStore, Record, RecordFreed
from tidemill.broker.engine.tally import Tally
from tidemill.common.errors import BrokerTimeout
from tidemill.message import salvage, stored_message

_unpack_place = message.PLACE.unpack_from
# The store time of a message and its position without the attempts, from STORED_AT_MS_POSITION on.
_unpack_stored = struct.Struct(">q16xIH2xq").unpack_from
_STORED_AT_MS_POSITION = record.STORED_AT_MS_POSITION
_PLACE_END = record.HEADER_SIZE + message.PLACE_SIZE
# Fields of a stored message: the number of keys, the hash of the tag, the hash of the first key.
_FIELDS = struct.Struct(">4xH26xq16xQ")
_TAG_HASH = struct.Struct(">q")
_KEYS_AT = stored_message.FIXED_SIZE
assert _PLACE_END - _STORED_AT_MS_POSITION == 40, "the store reads the layout it was written for"
assert stored_message.KEY_COUNT_AT == 4, "the store reads the layout it was written for"
assert stored_message.TAG_HASH_AT == 32, "the store reads the layout it was written for"


# When a proxy repeats a send, the store searches the messages of this time: twice the time that a
# send may wait at a proxy. The log end is noted in steps. After a start, the store searches this
# many bytes instead, which take longer to write.
RECENT_MS = 120_000
RECENT_STEP_MS = 10_000
RECENT_BYTES = 2 << 30
# Messages with the same id that are compared with a repeated send. Clients use unique ids.
SENT_MATCHES_MAX = 64
_SENT_UNKNOWN = (
    "the first answer was lost, and the broker cannot tell whether the message was stored: the "
    "outcome is unknown"
)
# Makes a named tuple without a call of Python code: every delivery needs one.
_tuple = tuple.__new__

# Errors from reading damaged bytes or a log offset that was never written. LookupError also means
# that retention has dropped the record.
_UNREADABLE = (CorruptStore, record.UnknownRecord, LookupError, struct.error, ValueError)


class MessageDamaged(Exception):
    """One message of the log cannot be read; all others can."""


class MessageMendPending(BlockFileDamaged):
    """One message of the log is damaged, and another replica may have it (ADR 0047).

    Callers treat it like an entry in a damaged queue file: they hold until the message is mended.
    """


class MessageRecord(NamedTuple):
    """One stored message as a delivery needs it. The blob is valid until the engine's next call."""

    stored_at_ms: int
    blob: memoryview | bytes
    origin_topic: str  # "" except for copies on a dead-letter topic


@final
class MessageStore:
    """The log, its queues and its index, seen as messages."""

    def __init__(self, log: CommitLog, catalog: Catalog, index: MessageIndex) -> None:
        self.log = log
        self.index = index
        self._catalog = catalog
        self.queue_files: list[BlockFile] = []  # oldest first
        self.damaged_files: DamagedFiles = {}  # damaged queue and index files
        # The queue and index files contain all entries before this log offset.
        self.derived_offset = 0
        # (monotonic ms, log end at that time); recent messages begin at the first log end.
        self._recent: deque[tuple[int, LogOffset]] = deque()
        # An earlier process wrote the records before this offset, and this recovery did not scan
        # them. Each read verifies their checksums.
        self.verified_from = 0
        self.damaged_count = 0  # reads that met damage in the log

    def apply_message(self, entry: MessageEntry, log_offset: LogOffset, size: int) -> None:
        """Derive the queue and index entries of a MESSAGE record of `size` bytes."""
        if log_offset < self.derived_offset:
            return
        # Every message passes here. One unpacking costs half as much as reads by field.
        topic_id, queue_id, _, queue_offset, _, _, blob, _ = entry
        queue = self._catalog.queues.get((topic_id, queue_id))
        if queue is None:
            # The replay began after the record of the topic. The log restates the topic later.
            queue = self._catalog.queue(topic_id, queue_id)
        if queue_offset > queue.max_offset:
            # Retention has dropped the earlier messages: this is the first remaining one.
            queue.restart_at(queue_offset, log_offset)
        if len(blob) < _FIELDS.size:
            key_count, (tag_hash,) = 0, _TAG_HASH.unpack_from(blob, stored_message.TAG_HASH_AT)
        else:
            key_count, tag_hash, key_hash = _FIELDS.unpack_from(blob)
        if queue_offset == queue.max_offset:
            queue.append(log_offset, size, tag_hash)
        index = self.index
        if key_count == 1:
            index.hashes.append(key_hash)
            index.offsets.append(log_offset)
        elif key_count:
            index.add(blob[_KEYS_AT : _KEYS_AT + 8 * key_count], log_offset)

    # ------------------------------------------------------------ reading

    def record(self, log_offset: LogOffset) -> Record:
        """Return the verified record of a message, for a copy.

        Raises MessageDamaged, and LookupError if retention has freed the message.
        """
        try:
            # Verify records of this process too: they may have been on the disk for days.
            if log_offset < self.log.committed_offset:
                found = self.log.verify(log_offset)
            else:
                found = self.log.record_at(log_offset)
        except _UNREADABLE as error:
            raise self._reason(log_offset, error) from error
        if record.is_stub(found.header):
            raise LookupError(log_offset)
        return found

    def message(
        self, log_offset: LogOffset, topic_id: TopicId, queue_id: QueueId, queue_offset: int
    ) -> MessageRecord:
        """Return the message of a queue as a delivery needs it.

        Raises MessageDamaged, and LookupError if retention or a deletion has removed the message.

        The queue entry may be wrong if its block was damaged after the check, or was rebuilt from a
        damaged log. Then it points to another message.
        """
        try:
            # The same as `verified`, without a call: every delivery passes here.
            if log_offset < self.verified_from:
                self.log.verify(log_offset)
            head, blob = self.log.read(log_offset)
            stored_at_ms, topic, queue, offset = _unpack_stored(head, _STORED_AT_MS_POSITION)
            if offset != queue_offset or queue != queue_id or topic != topic_id:
                raise ValueError(f"it is not message {queue_offset} of the queue that names it")
            origin = ""
            if len(head) > _PLACE_END:
                flags = record.HEADER.unpack_from(head)[record.FLAGS]
                if flags & FLAG_STUB:
                    raise ValueError("its content was freed")
                if flags & FLAG_CAUSE:
                    cause = message.decode_cause(head[record.HEADER_SIZE :])
                    if cause.reason != message.Reason.INVISIBLE_DURATION_ENDED:
                        origin = cause.origin
                elif flags & FLAG_TIMER:
                    origin = message.decode_timer_cause(head[record.HEADER_SIZE :]).origin
                elif flags & FLAG_OUTCOME:
                    origin = message.decode_outcome(head[record.HEADER_SIZE :]).origin
            return _tuple(MessageRecord, (stored_at_ms, blob, origin))
        except _UNREADABLE as error:
            if self._is_removed(topic_id, queue_id, queue_offset):
                raise LookupError(log_offset) from error
            raise self._damage(log_offset, error) from error

    def verified(
        self, log_offset: LogOffset, topic_id: TopicId, queue_id: QueueId, queue_offset: int
    ) -> tuple[memoryview | bytes, memoryview | bytes]:
        """Return head and blob of the message of a queue. Raises as `message`."""
        try:
            if log_offset < self.verified_from:
                self.log.verify(log_offset)
            head, blob = self.log.read(log_offset)
            _, topic, queue, offset = _unpack_stored(head, _STORED_AT_MS_POSITION)
            if offset != queue_offset or queue != queue_id or topic != topic_id:
                raise ValueError(f"it is not message {queue_offset} of the queue that names it")
            if len(head) > _PLACE_END and _has_flag(head, FLAG_STUB):
                raise ValueError("its content was freed")
        except _UNREADABLE as error:
            if self._is_removed(topic_id, queue_id, queue_offset):
                raise LookupError(log_offset) from error
            raise self._damage(log_offset, error) from error
        return head, blob

    def note_time(self, monotonic_ms: int) -> None:
        """Note the log end. Monotonic time decides which messages are recent."""
        recent = self._recent
        if not recent:
            recent.append((monotonic_ms, self._recent_at_start()))
        elif monotonic_ms - recent[-1][0] >= RECENT_STEP_MS:
            recent.append((monotonic_ms, self.log.log_end))
        while len(recent) > 1 and recent[1][0] <= monotonic_ms - RECENT_MS:
            recent.popleft()

    @property
    def recent_begin(self) -> LogOffset:
        """The log offset from which on a repeated send may find its message."""
        return self._recent[0][1] if self._recent else self._recent_at_start()

    def _recent_at_start(self) -> LogOffset:
        """Return a log offset before which no message is recent, after a start.

        Bytes decide, because the store times may be from a wrong clock.
        """
        return LogOffset(max(self.log.log_end - RECENT_BYTES, self.log.min_offset))

    def find_sent(self, topic_id: TopicId, queue_id: QueueId, blob: bytes) -> QueueOffset | None:
        """Return the queue offset of a message that a repeated send has stored before, or None.

        Searches the recent messages by id and compares all bytes, of a stub those that it has.
        Raises BrokerTimeout if the result is unknown: a candidate is damaged or in a gap, there are
        too many candidates, or retention has dropped recent messages.
        """
        begin = self.recent_begin
        # The first offset may be an estimate from the start, with messages of any age behind it.
        noted = self._recent[1][1] if len(self._recent) > 1 else begin
        hash_ = int.from_bytes(blob[_KEYS_AT : _KEYS_AT + stored_message.KEY_HASH_SIZE], "big")
        try:
            matches = self.index.find_since(hash_, begin, count_max=SENT_MATCHES_MAX + 1)
        except BlockFileDamaged as error:
            raise BrokerTimeout(_SENT_UNKNOWN) from error
        is_known = len(matches) <= SENT_MATCHES_MAX
        is_known &= noted >= self.log.min_offset
        for log_offset in matches:
            try:
                head, stored = self.log.read(log_offset)
                if head[record.KIND_POSITION] != record.RecordKind.MESSAGE:
                    raise RecordFreed(log_offset)  # A gap begins here.
                _, *place, queue_offset = _unpack_stored(head, _STORED_AT_MS_POSITION)
                is_stub = _has_flag(head, FLAG_STUB)
                sent = stored_message.without_content(blob) if is_stub else blob
            except _UNREADABLE:
                is_known = False
                continue
            if place == [topic_id, queue_id] and stored == sent:
                return QueueOffset(queue_offset)
        if not is_known:
            raise BrokerTimeout(_SENT_UNKNOWN)
        return None

    def _is_removed(self, topic_id: TopicId, queue_id: QueueId, queue_offset: int) -> bool:
        """Whether a queue has lost a message to retention or a deletion.

        The log offset in its entry cannot answer that: a wrong one may be before the log.
        """
        queue = self._catalog.queues.get((topic_id, queue_id))
        return queue is None or queue_offset < queue.min_offset

    def _reason(self, log_offset: LogOffset, error: Exception) -> Exception:
        """Return the error for a reader of the log; count and report damage."""
        is_gone = isinstance(error, LookupError) and log_offset < self.log.min_offset
        if is_gone or isinstance(error, RecordFreed):
            return LookupError(log_offset)
        return self._damage(log_offset, error)

    def _damage(self, log_offset: LogOffset, error: Exception) -> MessageDamaged:
        """Count damage, and ask other replicas for the message if it can be in the log."""
        self.damaged_count += 1
        if self.log.min_offset <= log_offset < self.log.log_end:
            self.log.damage.request(log_offset)
        return MessageDamaged(f"the message at log offset {log_offset} is damaged: {error}")

    def check_awaited(self, log_offset: LogOffset) -> None:
        """Request a damaged message of other replicas.

        Raises MessageMendPending if they may have it.
        """
        is_in_log = self.log.min_offset <= log_offset < self.log.log_end
        if is_in_log and self.log.damage.request(log_offset):
            raise MessageMendPending(
                f"the other replicas are asked for the message at {log_offset}"
            )

    def stored_at(self, queue: ConsumeQueue, queue_offset: int) -> tuple[LogOffset, int]:
        """Return the log offset of a message, and when it was stored in ms.

        The time of a damaged message is an upper bound. Raises BlockFileDamaged.
        """
        log_offset = queue.entry(queue_offset)[0]
        try:
            head, _ = self.log.read(log_offset)
            stored_at_ms, *place = _unpack_stored(head, _STORED_AT_MS_POSITION)
            if place == [queue.topic_id, queue.queue_id, queue_offset]:
                return log_offset, stored_at_ms
        except _UNREADABLE as error:
            if self.log.damage.awaits_directory(log_offset):
                raise MessageMendPending(str(error)) from error
        queue.check_entry(queue_offset)
        return log_offset, stored_before_ms(self.log, log_offset)

    def place(self, log_offset: LogOffset) -> MessagePosition:
        """Return the position of the message at `log_offset`, unverified. Raises as `record`."""
        try:
            head, _ = self.log.read(log_offset)
            return MessagePosition._make(message.PLACE.unpack_from(head, record.HEADER_SIZE))
        except _UNREADABLE as error:
            raise self._reason(log_offset, error) from error

    def evaluate(
        self, log_offset: LogOffset, size_bytes: int, wanted: MessageFilter, tally: Tally
    ) -> int:
        """Return the result of a filter for a message; the caller has matched the hash of its tag.

        `tally` counts the evaluation, and the bytes of the message if they are verified. A damaged
        message counts as a match: the reader then meets the damage and does not skip it.
        """
        try:
            if wanted.tag_hashes is None:
                blob: bytes | memoryview = self.record(log_offset).tail
                tally.add(wanted.cost_items(blob), size_bytes=size_bytes)
                return wanted.evaluate(blob)
            blob = self.log.read(log_offset)[1]
            tally.add(wanted.cost_items(blob))
            result = wanted.evaluate(blob)
            if result != MATCH:
                tally.add(0, size_bytes=size_bytes)
                self.record(log_offset)
        except (MessageDamaged, *_UNREADABLE):
            tally.add(EVALUATION_ITEMS)
            return MATCH
        return result

    def remains_of(
        self, log_offset: LogOffset, size: int, place: MessagePosition | None = None
    ) -> tuple[Cause | Replay | None, bytes]:
        """Salvage a damaged message: return its cause, and a stored message without body.

        `size` is the size in its queue entry, because the size in the record may be damaged. If the
        record is of another `place`, nothing is salvaged.
        """
        view = self.log.bytes_at(log_offset, size)
        header = record.find_head(view, 0, log_offset=log_offset)
        if header is not None:
            body = view[record.HEADER_SIZE : header.head_size]
            if place is not None and not _is_at(place, header.kind, body):
                return None, salvage.encode(salvage.SalvagedProperties())
            cause = cause_of(Record(header, body, view[:0]))
            return cause, salvage.encode(salvage.properties_of(view[header.head_size :]))
        # The begin of the stored message: from the damaged head, or the begin for an original.
        begins = [record.HEADER_SIZE + message.PLACE_SIZE]
        if len(view) >= record.HEADER_SIZE:
            begins.insert(0, record.HEADER.unpack_from(view)[record.HEAD_SIZE])
        found = [salvage.properties_of(view[begin:]) for begin in begins]
        known = next((one for one in found if one.message_id), salvage.SalvagedProperties())
        return None, salvage.encode(known)


def _has_flag(head: memoryview | bytes, flag: int) -> bool:
    return bool(record.HEADER.unpack_from(head)[record.FLAGS] & flag)


def _is_at(place: MessagePosition, kind: int, body: memoryview) -> bool:
    """Whether a record is of the message at a position, with any number of attempts."""
    if kind != record.RecordKind.MESSAGE or len(body) < message.PLACE_SIZE:
        return False
    return MessagePosition._make(_unpack_place(body))._replace(attempts=place.attempts) == place


def cause_of(found: Record) -> Cause | Replay | None:
    """Return the cause in a message record, or its replay; None for an original."""
    return message.source_of(found.body, found.header.flags)
