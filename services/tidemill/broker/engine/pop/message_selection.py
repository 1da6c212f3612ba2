"""Choosing messages from a queue, with and without a filter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.pop.budget import PopBudget
from tidemill.broker.engine.pop.progress import PopProgress
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.store.commit_log import GAP_BYTES_MAX, READ_BYTES_MAX, WARM_BYTES
from tidemill.broker.engine.tally import Allowance, Tally
from tidemill.message import stored_message

# Queue entries that one pop compares with its filter, in all its queues: about a millisecond.
SCAN_ENTRIES_MAX = 4096
READ_AHEAD_MESSAGES = 64  # cold messages after the delivered ones that the kernel reads ahead
SCAN_ENTRIES_AT_ONCE = 512  # entries read at once; most filters need fewer
# Makes a named tuple without a call of Python code: every pop does it.
_tuple = tuple.__new__


class MessageSelection(NamedTuple):
    """Messages that a pop has chosen from a queue, and the offset at which the next one begins."""

    offsets: Sequence[int]
    log_offsets: Sequence[LogOffset]
    next_offset: int


@final
class MessageSelector:
    """The reader of the queues of a group."""

    def __init__(self, state: PopState, store: MessageStore, tally: Tally) -> None:
        self._state = state
        self._store = store
        self._tally = tally
        self._scan = Allowance(tally, items=0)  # of the current pop, if it has a filter

    def begin_scan(self) -> None:
        """Begin a pop with a filter. Its queues share one limit of scanned entries."""
        self._scan = Allowance(self._tally, items=SCAN_ENTRIES_MAX)

    def skip_expired(self, progress: PopProgress) -> None:
        """Move the position past expired messages and count them."""
        missed = progress.queue.min_offset - progress.position
        if missed > 0:
            self._state.count("expired", progress, missed)
            progress.position = progress.queue.min_offset

    def select(
        self, progress: PopProgress, budget: PopBudget, tags: frozenset[str]
    ) -> MessageSelection | None:
        """Choose the next matching messages that fit, None if the queue has no more messages.

        The caller must have called `skip_expired` in this turn.
        """
        queue, offset = progress.queue, progress.position
        if offset >= queue.max_offset:
            return None
        if not tags:
            log_offsets, sizes, _ = zip(*queue.entries(offset, budget.messages_left), strict=True)
            count = budget.take_first(sizes)
            end = offset + count
            if log_offsets[0] < self._store.log.log_end - WARM_BYTES:
                self._read_ahead(progress, offset, end)
            return _tuple(MessageSelection, (range(offset, end), log_offsets[:count], end))
        return self._select_matching(progress, offset, budget, tags)

    def _read_ahead(self, progress: PopProgress, begin: int, end: int) -> None:
        """Ask the kernel to read the messages of this delivery and the next ones at once.

        Reading cold messages one by one from the disk would block the owner.
        """
        queue = progress.queue
        read_ahead_until = progress.read_ahead_until
        if not begin <= read_ahead_until <= end + READ_AHEAD_MESSAGES:
            read_ahead_until = begin
        elif (
            read_ahead_until >= end + READ_AHEAD_MESSAGES // 2
            or read_ahead_until == queue.max_offset
        ):
            return
        entries = queue.entries(read_ahead_until, end + READ_AHEAD_MESSAGES - read_ahead_until)
        progress.read_ahead_until = read_ahead_until + len(entries)
        first = last = entries[0][0]
        for log_offset, size, _ in entries:
            if log_offset - last > GAP_BYTES_MAX or last - first > READ_BYTES_MAX:
                self._store.log.advise(first, last - first)
                first = log_offset
            last = LogOffset(log_offset + size)
        self._store.log.advise(first, last - first)

    def matches(self, log_offset: LogOffset, tag_hash: int, tags: frozenset[str]) -> bool:
        """Return whether the message of a queue entry has one of these tags."""
        hashes = map(stored_message.tag_hash, tags)
        return tag_hash in hashes and self._store.has_tag(log_offset, tags)

    def _select_matching(
        self, progress: PopProgress, offset: int, budget: PopBudget, tags: frozenset[str]
    ) -> MessageSelection:
        queue = progress.queue
        hashes = {stored_message.tag_hash(tag) for tag in tags}
        offsets: list[int] = []
        log_offsets: list[LogOffset] = []
        is_full = False
        while offset < queue.max_offset and not is_full and self._scan.items_left > 0:
            entries = queue.entries(offset, min(self._scan.items_left, SCAN_ENTRIES_AT_ONCE))
            self._tally.add(len(entries))
            for log_offset, size, tag_hash in entries:
                if tag_hash in hashes and self._store.has_tag(log_offset, tags):
                    is_full = not budget.take(size)
                    if is_full:
                        break
                    offsets.append(offset)
                    log_offsets.append(log_offset)
                elif progress.named_topic_id != progress.topic_id:
                    self._state.count("filtered_retry", progress, 1)
                offset += 1
                is_full = budget.messages_left == 0
                if is_full:
                    break
        if not offsets:
            progress.position = offset
        if offset < queue.max_offset and not is_full:
            # The next turn continues the scan: a sparse filter must not delay other clients.
            self._state.ready.add((progress.group_id, progress.named_topic_id))
        return MessageSelection(offsets, log_offsets, offset)
