"""Reading a queue from an offset on, beside consumers: nothing here changes anything (ADR 0046).

Only what is committed is read, so it may be read between rounds, and leave at once. A pull under
way is called again and again, and meanwhile messages come, are committed, and are retired.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.broker.engine.layout import message, record
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.message import (
    FLAG_CAUSE,
    FLAG_TIMER,
    Cause,
    Reason,
    TimerCause,
    TimerReason,
)
from tidemill.broker.engine.message_store import MessageAwaited, MessageDamaged, MessageStore
from tidemill.broker.engine.store.commit_log import GAP_BYTES_MAX, READ_BYTES_MAX, WARM_BYTES
from tidemill.broker.engine.tally import Allowance, Tally
from tidemill.common.errors import Repairing
from tidemill.message import stored_message

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.numbers import LogOffset
    from tidemill.broker.engine.store.consume_queue import ConsumeQueue

MESSAGES_A_STEP: Final = 64  # under half a millisecond, with what is copied of them
ENTRIES_A_STEP: Final = 512  # compared with a filter
SCAN_ENTRIES_MAX: Final = 16_384  # of one pull with a filter: its reader goes on where that ends
ENDLESS: Final = 1 << 62  # an offset that no queue reaches
ASKED_AHEAD: Final = 512  # entries behind those that are read, of what the kernel may not have
_AWAITED: Final = (
    "a message is damaged here, and another replica is asked for it; try again in a moment"
)
# Behind it stands the cause of a message that has one.
_PLACE_END: Final = record.HEADER_SIZE + message.PLACE_SIZE
_STORED_AT: Final = struct.Struct(">q")
_ATTEMPTS: Final = struct.Struct(">6xH")


class PulledMessage(NamedTuple):
    """One message as it is stored."""

    queue_offset: int
    log_offset: LogOffset
    stored_at_ms: int
    attempts: int  # deliveries that came before
    cause: Cause | TimerCause | None  # what it is a copy of, or which timer it was
    blob: bytes


@final
class QueuePull:
    """One pull: call `step` until it returns False, and `take` what was found.

    It ends with `max_messages`, with the message beyond `max_bytes`, with what is committed, or
    with as many entries as one pull may compare.
    """

    def __init__(
        self,
        store: MessageStore,
        tally: Tally,
        queue: ConsumeQueue,
        from_offset: int,
        *,
        tags: frozenset[str],
        max_messages: int,
        max_bytes: int,
        until_offset: int = ENDLESS,
        with_bodies: bool = True,
    ) -> None:
        self._store = store
        self._tally = tally
        self._queue = queue
        self._from_offset = from_offset
        self._tags = tags
        self._hashes = frozenset(map(stored_message.tag_hash, tags))
        self._until_offset = until_offset
        self._with_bodies = with_bodies
        self._messages_left = max_messages
        self._bytes_left = max_bytes
        self._scan_left = SCAN_ENTRIES_MAX
        self._found: list[PulledMessage] = []
        self._has_found = False  # ever
        self._asked_to = from_offset
        self.is_at_end = False  # of what was committed
        # Where who reads on begins: behind what was found, passed over, or is damaged.
        self.next_offset = from_offset

    @property
    def min_offset(self) -> int:
        """Where the queue begins now."""
        return int(self._queue.min_offset)

    def end_offset(self) -> int:
        """Return behind which offset nothing is committed. Raises Repairing."""
        return committed_end(self._store, self._queue)

    def take(self) -> list[PulledMessage]:
        """Return and forget what was found since the last call, in its order."""
        found, self._found = self._found, []
        return found

    def step(self) -> bool:
        """Do one slice; True while there is more to do. Raises Repairing."""
        queue = self._queue
        if self.next_offset >= self._until_offset:
            return False
        if not queue.min_offset <= self.next_offset < queue.max_offset:
            # Behind its end, or before its begin: retention has been here.
            self.is_at_end = self.next_offset >= queue.max_offset
            return False
        allowance = Allowance(self._tally, items=ENTRIES_A_STEP)
        count = ENTRIES_A_STEP if self._hashes else min(MESSAGES_A_STEP, self._messages_left)
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
                self.is_at_end = True
                return False
            if self._hashes:
                if self._scan_left <= 0:
                    return False
                self._scan_left -= 1
            self._tally.add(1)
            if not self._hashes or self._is_wanted(log_offset, tag_hash):
                if size > self._bytes_left and self._has_found:
                    return False
                if copied and (copied >= MESSAGES_A_STEP or allowance.is_spent):
                    return True
                try:
                    self._look_at(log_offset)
                except MessageAwaited as error:
                    # What is before it is handed out; whoever asks for it comes again.
                    if self.next_offset > self._from_offset:
                        return False
                    raise Repairing(_AWAITED) from error
                copied += 1
                self._bytes_left -= size
                self._messages_left -= 1
            self.next_offset += 1
            if not self._messages_left:
                return False
        return True

    def _is_wanted(self, log_offset: LogOffset, tag_hash: int) -> bool:
        return tag_hash in self._hashes and self._store.has_tag(log_offset, self._tags)

    def _look_at(self, log_offset: LogOffset) -> None:
        """Copy a message; one that is damaged is passed over.

        Raises MessageAwaited where another replica may have it.
        """
        queue, offset = self._queue, self.next_offset
        try:
            head, blob = self._store.verified(log_offset, queue.topic_id, queue.queue_id, offset)
            cause = _cause_in(head) if len(head) > _PLACE_END else None
        except (MessageDamaged, LookupError, struct.error, ValueError):
            self._store.check_awaited(log_offset)
            return
        if not self._with_bodies:
            blob = blob[: stored_message.decode(blob).body_wire_at]
        self._tally.add(0, size_bytes=len(blob))
        (stored_at_ms,) = _STORED_AT.unpack_from(head, record.STORED_AT_MS_POSITION)
        (attempts,) = _ATTEMPTS.unpack_from(head, record.HEADER_SIZE)
        self._has_found = True
        self._found.append(
            PulledMessage(offset, log_offset, stored_at_ms, attempts, cause, bytes(blob))
        )

    def _ask_ahead(self) -> None:
        """Let the kernel read what comes next, where it may have let go of it."""
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


def committed_end(store: MessageStore, queue: ConsumeQueue) -> int:
    """Return behind which offset of a queue nothing is committed. Raises Repairing."""
    committed, end = store.log.committed_offset, int(queue.max_offset)
    try:
        if end == queue.min_offset or queue.entry(end - 1)[0] < committed:
            return end
        return int(queue.offset_behind(committed))
    except BlockFileDamaged as error:
        raise Repairing from error


def _cause_in(head: memoryview | bytes) -> Cause | TimerCause | None:
    flags = record.HEADER.unpack_from(head)[record.FLAGS]
    body = head[record.HEADER_SIZE :]
    if flags & FLAG_CAUSE:
        return message.decode_cause(body)
    return message.decode_timer_cause(body) if flags & FLAG_TIMER else None


def reason_of(cause: Cause | TimerCause) -> str:
    """Return why there is a copy, or what became of a timer, in a word."""
    if isinstance(cause, TimerCause):
        return TimerReason(cause.reason).name.lower()
    return Reason(cause.reason).name.lower()
