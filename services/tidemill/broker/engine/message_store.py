"""Messages in the log: appending them, and reading what a queue entry points to."""

from __future__ import annotations

import struct
from typing import NamedTuple, final

from tidemill.broker.engine.layout import message, record
from tidemill.broker.engine.layout.message import FLAG_CAUSE, FLAG_TIMER, Cause, Message, Place
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.store.block_file import DamagedFiles
from tidemill.broker.engine.store.commit_log import CommitLog, Record
from tidemill.broker.engine.store.message_index import MessageIndex
from tidemill.message import stored_message

_STORED_AT = struct.Struct(">q")
# Of a stored message: the number of its keys, its tag's hash, and the first key's hash.
_FIELDS = struct.Struct(">4xH26xq16xQ")
_TAG_HASH = struct.Struct(">q")
_KEYS_AT = stored_message.FIXED_SIZE
assert stored_message.KEY_COUNT_AT == 4, "the store reads the layout it was written for"
assert stored_message.TAG_HASH_AT == 32, "the store reads the layout it was written for"


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
        self.damaged_files: DamagedFiles = {}  # among the queue and index files
        # Queue and index files state everything before: entries are derived from there on.
        self.derived_offset = 0
        # Records before this offset were written by an earlier process and not walked over by the
        # recovery of this one: their checksums are verified when they are read.
        self.verified_from = 0

    def apply_message(self, entry: Message, log_offset: LogOffset, size: int) -> None:
        """Derive the queue and index entries of a MESSAGE record of `size` bytes."""
        if log_offset < self.derived_offset:
            return
        # At once: every message passes here, and field by field it would cost twice as much.
        topic_id, queue_id, _, queue_offset, _, _, blob, _ = entry
        queue = self._catalog.queues.get((topic_id, queue_id))
        if queue is None:
            # The record that states its topic comes later: this replay began behind the first one.
            queue = self._catalog.queue(topic_id, queue_id)
        if queue_offset > queue.max_offset:
            # What was before is gone by retention, and this is the first that is left.
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
        """Return a message's record. Raises CorruptStore when it is damaged."""
        if log_offset < self.verified_from:
            self.log.verify(log_offset)
        return self.log.record_at(log_offset)

    def message(self, log_offset: LogOffset) -> MessageRecord:
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

    def stored_at_ms(self, log_offset: LogOffset) -> int:
        """Return when the record at `log_offset` was stored."""
        head, _ = self.log.read(log_offset)
        return int(_STORED_AT.unpack_from(head, record.STORED_AT_MS_POSITION)[0])

    def place(self, log_offset: LogOffset) -> Place:
        """Return where the message at `log_offset` stands."""
        head, _ = self.log.read(log_offset)
        return Place._make(message.PLACE.unpack_from(head, record.HEADER_SIZE))

    def tag(self, log_offset: LogOffset) -> str:
        """Return the exact tag of the message at `log_offset`."""
        return stored_message.tag_of(self.log.read(log_offset)[1])


def cause_of(found: Record) -> Cause | None:
    """Return the cause in a message record, None for an original."""
    if not found.header.flags & FLAG_CAUSE:
        return None
    return message.decode_cause(found.body)
