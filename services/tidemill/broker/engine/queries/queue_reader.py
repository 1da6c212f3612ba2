"""Reading stored messages beside consumers: a queue in order, or the messages with an id or a key.

Only committed messages are read, so a caller may read between rounds and answer at once (ADR 0046).
A read is done in slices. Between them messages arrive, are committed, and expire.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

from tidemill.broker.engine.layout import message, record
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.dead_letter import Replay
from tidemill.broker.engine.layout.message import (
    FLAG_CAUSE,
    FLAG_HALF,
    FLAG_OUTCOME,
    FLAG_REPLAY,
    FLAG_SCHEDULE,
    FLAG_TIMER,
    Cause,
    HalfOutcome,
    OutcomeReason,
    Reason,
    TimerCause,
    TimerReason,
    TimerTarget,
)
from tidemill.broker.engine.message_filter import EVERY_MESSAGE, MATCH, MessageFilter
from tidemill.broker.engine.message_store import MessageDamaged, MessageMendPending, MessageStore
from tidemill.broker.engine.store.commit_log import GAP_BYTES_MAX, READ_BYTES_MAX, WARM_BYTES
from tidemill.broker.engine.tally import Allowance, Tally
from tidemill.common.errors import Repairing
from tidemill.message import stored_message
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, QueueOffset, TopicId
    from tidemill.broker.engine.metadata.catalog import Catalog, Topic
    from tidemill.broker.engine.store.consume_queue import ConsumeQueue

MESSAGES_A_STEP: Final = 64  # copied in under half a millisecond
ENTRIES_A_STEP: Final = 512  # compared with a filter
SCAN_ENTRIES_MAX: Final = 16_384  # of one read with a filter; the next read continues there
CANDIDATES_A_STEP: Final = 64  # records that a search reads
FOUND_BYTES_MAX: Final = 16 << 20  # of one search, which ends with the message beyond it
ENDLESS: Final = 1 << 62  # an offset that no queue reaches
ASKED_AHEAD: Final = 512  # entries whose messages the kernel is asked to read ahead
_AWAITED: Final = "a message is damaged here and requested from another replica; retry in a moment"
_POSITION_END: Final = record.HEADER_SIZE + message.PLACE_SIZE  # a cause may follow
_STORED_AT: Final = struct.Struct(">q")
_UNREADABLE: Final = (MessageDamaged, LookupError, struct.error, ValueError)

# Why a message stands where it stands: the copied delivery, the replayed dead letter, the past
# timer, the time it waits for, or the transaction without a decision. None: it was sent to its
# queue, or committed.
MessageCause: TypeAlias = Cause | Replay | TimerCause | TimerTarget | HalfOutcome


class QueueMessage(NamedTuple):
    """One stored message."""

    topic_id: TopicId
    queue_id: QueueId
    queue_offset: QueueOffset
    log_offset: LogOffset
    stored_at_ms: int
    attempts: int  # deliveries before this copy
    cause: MessageCause | None
    blob: bytes


class FoundMessage(NamedTuple):
    """A stored message, or a copy of it, with the names of its topic and group."""

    queue_id: QueueId
    queue_offset: QueueOffset
    stored_at_ms: int
    log_offset: LogOffset
    # Of the next delivery of this copy. Of a dead letter: of the last one before; 0 if none.
    delivery_attempt: int
    blob: bytes
    stored_topic: str
    group: str
    origin_topic: str
    reason: str


@final
class QueueReader:
    """One read of a queue in order: call `step` until it returns False, and `take` the messages.

    It ends at `max_messages`, before the message beyond `max_bytes`, at the last committed message,
    or at the limit of entries that one read compares. The first message is read whatever its size.
    """

    def __init__(
        self,
        store: MessageStore,
        tally: Tally,
        queue: ConsumeQueue,
        from_offset: int,
        *,
        wanted: MessageFilter = EVERY_MESSAGE,
        max_messages: int,
        max_bytes: int,
        until_offset: int = ENDLESS,
        with_bodies: bool = True,
    ) -> None:
        self._store = store
        self._tally = tally
        self._queue = queue
        self._from_offset = from_offset
        self._wanted = None if wanted is EVERY_MESSAGE else wanted
        self._until_offset = until_offset
        self._with_bodies = with_bodies
        self._messages_left = max_messages
        self._bytes_left = max_bytes
        self._scan_left = SCAN_ENTRIES_MAX
        self._found: list[QueueMessage] = []
        self._has_found = False  # since the begin
        self._asked_to = from_offset
        self.is_at_end = False  # all committed messages are read
        # The begin of the next read: behind the messages that were found, filtered or damaged.
        self.next_offset = from_offset

    @property
    def min_offset(self) -> int:
        """The begin of the queue now."""
        return int(self._queue.min_offset)

    def end_offset(self) -> int:
        """Return the end of the committed messages now. Raises Repairing."""
        return committed_end(self._store, self._queue)

    def take(self) -> list[QueueMessage]:
        """Return and forget the messages found since the last call, in order."""
        found, self._found = self._found, []
        return found

    def step(self) -> bool:
        """Do one slice; return whether there is more to do. Raises Repairing."""
        queue = self._queue
        if self.next_offset >= self._until_offset:
            return False
        if not queue.min_offset <= self.next_offset < queue.max_offset:
            # At the end, or before the begin if messages have expired.
            self.is_at_end = self.next_offset >= queue.max_offset
            return False
        allowance = Allowance(self._tally, items=ENTRIES_A_STEP)
        count = ENTRIES_A_STEP if self._wanted else min(MESSAGES_A_STEP, self._messages_left)
        count = min(count, self._until_offset - self.next_offset)
        try:
            entries = queue.entries(self.next_offset, count)
            if entries[0][0] < self._store.log.log_end - WARM_BYTES:
                self._ask_ahead()
        except BlockFileDamaged as error:
            raise Repairing from error
        committed = self._store.log.committed_offset
        copied = 0
        for log_offset, size, tag_hash in entries:
            if log_offset >= committed:
                try:
                    queue.check_entry(self.next_offset)
                except BlockFileDamaged as error:
                    return self._end_before(error)
                self.is_at_end = True
                return False
            if self._wanted:
                if self._scan_left <= 0:
                    return False
                self._scan_left -= 1
            self._tally.add(1)
            if self._wanted is None or self._matches(self._wanted, log_offset, size, tag_hash):
                if size > self._bytes_left and self._has_found:
                    return False
                if copied and (copied >= MESSAGES_A_STEP or allowance.is_spent):
                    return True
                try:
                    self._read(log_offset)
                except BlockFileDamaged as error:
                    return self._end_before(error)
                copied += 1
                self._bytes_left -= size
                self._messages_left -= 1
            self.next_offset += 1
            if not self._messages_left:
                return False
            if self._wanted is not None and allowance.is_spent:
                return True
        return True

    def _matches(
        self, wanted: MessageFilter, log_offset: LogOffset, size: int, tag_hash: int
    ) -> bool:
        hashes = wanted.tag_hashes
        if hashes is not None and tag_hash not in hashes:
            return False
        return self._store.evaluate(log_offset, size, wanted, self._tally) == MATCH

    def _read(self, log_offset: LogOffset) -> None:
        """Copy a message, or skip it if it is damaged.

        Raises BlockFileDamaged if its queue entry is wrong, and MessageMendPending if another
        replica may have the message.
        """
        queue, offset = self._queue, self.next_offset
        try:
            head, blob = self._store.verified(log_offset, queue.topic_id, queue.queue_id, offset)
            if not self._with_bodies:
                blob = blob[: stored_message.decode(blob).body_wire_at]
            found = _decoded(log_offset, head, blob)
        except _UNREADABLE:
            queue.check_entry(offset)
            self._store.check_awaited(log_offset)
            return
        self._tally.add(0, size_bytes=len(blob))
        self._has_found = True
        self._found.append(found)

    def _end_before(self, error: BlockFileDamaged) -> bool:
        """End the read before the next message, with which the next read then begins.

        Raises Repairing if it is the first one.
        """
        if self.next_offset > self._from_offset:
            return False
        if isinstance(error, MessageMendPending):
            raise Repairing(_AWAITED) from error
        raise Repairing from error

    def _ask_ahead(self) -> None:
        """Let the kernel read the next messages, which may have left its cache."""
        begin = max(self._asked_to, self.next_offset)
        if begin - self.next_offset > ASKED_AHEAD // 2 or begin >= self._queue.max_offset:
            return
        entries = self._queue.entries(begin, ASKED_AHEAD)
        self._asked_to = begin + len(entries)
        log = self._store.log
        first = last = entries[0][0]
        for log_offset, size, _ in entries:
            if log_offset - last > GAP_BYTES_MAX or last - first > READ_BYTES_MAX:
                log.advise(first, last - first)
                first = log_offset
            last = type(first)(log_offset + size)
        log.advise(first, last - first)


@final
class MessageSearch:
    """One search by id or key: call `step` until it returns False, and `take` the messages.

    It finds the newest `max_messages` of a topic, copies included, in up to `FOUND_BYTES_MAX`.
    """

    def __init__(
        self,
        catalog: Catalog,
        store: MessageStore,
        tally: Tally,
        topic: Topic,
        *,
        message_id: str,
        key: str,
        max_messages: int,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._tally = tally
        self._topic = topic
        self._message_id = message_id
        self._key = key
        self._messages_left = max_messages
        self._bytes_left = FOUND_BYTES_MAX
        kind, text = ("id", message_id) if message_id else ("key", key)
        self._slices = store.index.find(stored_message.key_hash(kind, text))
        self._candidates: deque[LogOffset] = deque()
        self._found: list[FoundMessage] = []

    def take(self) -> list[FoundMessage]:
        """Return and forget the messages found since the last call, the newest first."""
        found, self._found = self._found, []
        return found

    def step(self) -> bool:
        """Do one slice; return whether there is more to do. Raises Repairing."""
        if not self._candidates:
            matches = next(self._slices, None)
            if matches is None:
                return False
            self._candidates.extend(matches)
        allowance = Allowance(self._tally, items=CANDIDATES_A_STEP)
        while self._candidates and not allowance.is_spent:
            self._read(self._candidates.popleft())
            if not self._messages_left or self._bytes_left <= 0:
                return False
        return True

    def _read(self, log_offset: LogOffset) -> None:
        self._tally.add(1)
        log = self._store.log
        if not log.min_offset <= log_offset < log.committed_offset:
            return
        try:
            place = self._store.place(log_offset)
            queue = self._catalog.queues.get((place.topic_id, place.queue_id))
            if queue is None or place.queue_offset < queue.min_offset:
                return  # Its topic was deleted, or it is dead: purged, and still in the log.
            head, blob = self._store.verified(
                log_offset, place.topic_id, place.queue_id, place.queue_offset
            )
            found = describe(self._catalog, _decoded(log_offset, head, blob))
        except _UNREADABLE:
            log.damage.check_directories()
            return
        if found is None:
            return
        self._tally.add(0, size_bytes=len(found.blob))
        if self._topic.name in (found.stored_topic, found.origin_topic) and self._has_key(found):
            self._found.append(found)
            self._messages_left -= 1
            self._bytes_left -= len(found.blob)

    def _has_key(self, found: FoundMessage) -> bool:
        if self._message_id:
            return stored_message.message_id_of(found.blob) == self._message_id
        return stored_message.has_key(found.blob, self._key)


def describe(catalog: Catalog, stored: QueueMessage) -> FoundMessage | None:
    """Return a message with the names of its topic and group; None if its topic was deleted."""
    topic = catalog.topics.get(stored.topic_id)
    if topic is None:
        return None
    cause = stored.cause
    group = catalog.groups.get(cause.group_id) if isinstance(cause, (Cause, Replay)) else None
    return FoundMessage(
        stored.queue_id,
        stored.queue_offset,
        stored.stored_at_ms,
        stored.log_offset,
        stored.attempts + (not topic.name.startswith(DEAD_LETTER_TOPIC_PREFIX)),
        stored.blob,
        topic.name,
        group.name if group else "",
        cause.origin if cause else "",
        reason_of(cause) if cause else "",
    )


def reason_of(cause: MessageCause) -> str:
    """Return in a word why a message stands where it stands."""
    if isinstance(cause, TimerTarget):
        return "scheduled"
    if isinstance(cause, TimerCause):
        return TimerReason(cause.reason).name.lower()
    if isinstance(cause, HalfOutcome):
        return "transaction_expired"
    if isinstance(cause, Replay):
        return "replayed"
    return Reason(cause.reason).name.lower()


def committed_end(store: MessageStore, queue: ConsumeQueue) -> int:
    """Return the end of the committed messages of a queue. Raises Repairing."""
    committed, end = store.log.committed_offset, int(queue.max_offset)
    try:
        if end == queue.min_offset or queue.entry(end - 1)[0] < committed:
            return end
        return int(queue.offset_behind(committed))
    except BlockFileDamaged as error:
        raise Repairing from error


def _decoded(
    log_offset: LogOffset, head: memoryview | bytes, blob: memoryview | bytes
) -> QueueMessage:
    """Decode the head of a record. Raises struct.error and ValueError."""
    topic_id, queue_id, attempts, queue_offset = message.PLACE.unpack_from(head, record.HEADER_SIZE)
    (stored_at_ms,) = _STORED_AT.unpack_from(head, record.STORED_AT_MS_POSITION)
    cause = _cause_in(head) if len(head) > _POSITION_END else None
    return QueueMessage(
        topic_id, queue_id, queue_offset, log_offset, stored_at_ms, attempts, cause, bytes(blob)
    )


def _cause_in(head: memoryview | bytes) -> MessageCause | None:
    flags = record.HEADER.unpack_from(head)[record.FLAGS]
    body = head[record.HEADER_SIZE :]
    if flags & FLAG_CAUSE:
        return message.decode_cause(body)
    if flags & FLAG_TIMER:
        return message.decode_timer_cause(body)
    if flags & FLAG_REPLAY:
        return message.decode_replay(body)
    if flags & FLAG_SCHEDULE:
        return message.decode_target(body)
    if flags & FLAG_OUTCOME and not flags & FLAG_HALF:
        outcome = message.decode_outcome(body)
        return outcome if outcome.reason == OutcomeReason.EXPIRED else None
    return None
