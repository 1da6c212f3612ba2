"""Messages in the log: appending them, and reading what a queue entry points to."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, final
from zlib import crc32

from tidemill.broker.engine.layout import message, record
from tidemill.broker.engine.layout.message import FLAG_CAUSE, FLAG_TIMER, Cause, Place
from tidemill.broker.engine.layout.record import Kind
from tidemill.broker.engine.metadata.catalog import (
    Catalog,
    Topic,
    TopicType,
    encode_config,
    topic_item,
)
from tidemill.broker.engine.store.commit_log import CommitLog, Record
from tidemill.broker.engine.store.message_index import MessageIndex
from tidemill.message import stored_message

_STORED_AT = struct.Struct(">q")
_TAG_HASH = struct.Struct(">q")
_KEY_COUNT = struct.Struct(">H")
_KEY_HASH = struct.Struct(">Q")
_KEYS_AT = stored_message.FIXED_SIZE


class MessageRecord(NamedTuple):
    """One stored message as a delivery needs it. The blob is valid until the engine's next call."""

    stored_at_ms: int
    blob: memoryview | bytes
    origin_topic: str  # "" except for copies on a dead-letter topic


@final
class MessageStore:
    """The log, its queues and its index, seen as messages."""

    # First byte of a STATE record's body.
    CONFIG = 1
    QUEUES = 2
    PROGRESS = 3
    DELIVERIES = 4

    def __init__(self, log: CommitLog, catalog: Catalog, index: MessageIndex) -> None:
        self.log = log
        self.index = index
        self._catalog = catalog
        # Records before this offset were written by an earlier process and not walked over by the
        # recovery of this one: their checksums are verified when they are read.
        self.verified_from = 0
        self.last_log_offset = 0  # of the message appended last

    def append_message(
        self,
        topic_id: int,
        queue_id: int,
        blob: bytes | memoryview,
        crc: int,
        now_ms: int,
        *,
        attempts: int = 0,
        flags: int = 0,
        cause: bytes = b"",
    ) -> int:
        """Append a message to a queue and return its queue offset.

        `cause` is what stands behind the place, and `flags` say what that is.
        """
        queue = self._catalog.queues[topic_id, queue_id]
        queue_offset = queue.max_offset
        body = message.PLACE.pack(topic_id, queue_id, attempts, queue_offset) + cause
        self.last_log_offset = log_offset = self.log.append(
            Kind.MESSAGE, body, now_ms, flags=flags, tail=blob, tail_crc=crc
        )
        size = record.HEADER_SIZE + len(body) + len(blob)
        queue.append(log_offset, size, _TAG_HASH.unpack_from(blob, stored_message.TAG_HASH_AT)[0])
        self._add_keys(blob, log_offset)
        return queue_offset

    def _add_keys(self, blob: bytes | memoryview, log_offset: int) -> None:
        (count,) = _KEY_COUNT.unpack_from(blob, stored_message.KEY_COUNT_AT)
        if count == 1:
            self.index.hashes.append(_KEY_HASH.unpack_from(blob, _KEYS_AT)[0])
            self.index.offsets.append(log_offset)
        elif count:
            self.index.add(blob[_KEYS_AT : _KEYS_AT + 8 * count], log_offset)

    def replay_message(self, found: Record, place: Place, *, derived_offset: int) -> None:
        """Derive the queue and index entries of a message from its record."""
        if found.log_offset < derived_offset:
            return
        queue = self._catalog.queue(place.topic_id, place.queue_id)
        if place.queue_offset > queue.max_offset:
            # What was before is gone by retention, and this is the first that is left.
            queue.restart_at(place.queue_offset, found.log_offset)
        if place.queue_offset == queue.max_offset:
            tag_hash = _TAG_HASH.unpack_from(found.tail, stored_message.TAG_HASH_AT)[0]
            queue.append(found.log_offset, found.header.size, tag_hash)
        self._add_keys(found.tail, found.log_offset)

    def append_state(self, what: int, data: bytes, now_ms: int) -> int:
        """Append a STATE record: what would be lost with an old segment is stated again."""
        return self.log.append(Kind.STATE, bytes([what]), now_ms, tail=data, tail_crc=crc32(data))

    def append_config(self, config: dict[str, Any], now_ms: int) -> int:
        """Append a CONFIG record and fold it in."""
        log_offset = self.log.append(Kind.CONFIG, encode_config(config), now_ms)
        self._catalog.apply(config, log_offset)
        return log_offset

    def append_reset(self, config: dict[str, Any], now_ms: int) -> int:
        """Append the record of an offset reset; the pop state folds it in."""
        return self.log.append(Kind.CONFIG, encode_config(config), now_ms)

    def ensure_system_topic(
        self, name: str, retry_of: tuple[int, int] | None, now_ms: int, *, queues: int = 1
    ) -> Topic:
        """Return a topic of the broker's own, made when it is new."""
        topic = self._catalog.find_topic(name)
        if topic is None:
            topic = Topic(
                id=self._catalog.next_id,
                version=1,
                name=name,
                type=TopicType.NORMAL,
                queues=queues,
                retry_of=retry_of,
                is_system=True,
            )
            self.append_config(topic_item(topic), now_ms)
        return topic

    # ------------------------------------------------------------ reading

    def record(self, log_offset: int) -> Record:
        """Return a message's record. Raises CorruptStore when it is damaged."""
        if log_offset < self.verified_from:
            self.log.verify(log_offset)
        return self.log.record_at(log_offset)

    def message(self, log_offset: int) -> MessageRecord:
        """Return a message as a delivery needs it. Raises as `record`."""
        if log_offset < self.verified_from:
            self.log.verify(log_offset)
        head, blob = self.log.read(log_offset)
        origin = ""
        if len(head) > record.HEADER_SIZE + message.PLACE_SIZE:
            flags = record.HEADER.unpack_from(head)[record.FLAGS]
            if flags & FLAG_CAUSE:
                cause = message.decode_cause(head[record.HEADER_SIZE :])
                if cause.reason != message.Reason.INVISIBLE_DURATION_ENDED:
                    origin = cause.origin
            elif flags & FLAG_TIMER:
                origin = message.decode_timer_cause(head[record.HEADER_SIZE :]).origin
        return MessageRecord(
            _STORED_AT.unpack_from(head, record.STORED_AT_MS_POSITION)[0], blob, origin
        )

    def stored_at_ms(self, log_offset: int) -> int:
        """Return when the record at `log_offset` was stored."""
        head, _ = self.log.read(log_offset)
        return int(_STORED_AT.unpack_from(head, record.STORED_AT_MS_POSITION)[0])

    def place(self, log_offset: int) -> Place:
        """Return where the message at `log_offset` stands."""
        head, _ = self.log.read(log_offset)
        return Place._make(message.PLACE.unpack_from(head, record.HEADER_SIZE))

    def tag(self, log_offset: int) -> str:
        """Return the exact tag of the message at `log_offset`."""
        return stored_message.tag_of(self.log.read(log_offset)[1])


def cause_of(found: Record) -> Cause | None:
    """Return the cause in a message record, None for an original."""
    if not found.header.flags & FLAG_CAUSE:
        return None
    return message.decode_cause(found.body)
