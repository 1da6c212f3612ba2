"""Choosing messages from a queue, with and without a filter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.message_filter import EVERY_MESSAGE, MATCH, NO_MATCH, MessageFilter
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.pop.budget import PopBudget
from tidemill.broker.engine.pop.progress import PopProgress
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.store.commit_log import GAP_BYTES_MAX, READ_BYTES_MAX, WARM_BYTES
from tidemill.broker.engine.store.consume_queue import QueueEntry
from tidemill.broker.engine.tally import Allowance, Tally

# Queue entries that one pop compares with its filter, in all its queues: about a millisecond.
SCAN_ENTRIES_MAX = 4096
READ_AHEAD_MESSAGES = 64  # cold messages after the delivered ones that the kernel reads ahead
FIRST_ENTRIES_AT_ONCE = 4  # entries read first, if a pop wants fewer messages
SCAN_ENTRIES_AT_ONCE = 512  # entries read at once; most filters need fewer
EVALUATIONS_AT_ONCE = 16  # entries read at once if each message has to be read
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
        self, progress: PopProgress, budget: PopBudget, wanted: MessageFilter
    ) -> MessageSelection | None:
        """Choose the next matching messages that fit, None if the queue has no more messages.

        The caller must have called `skip_expired` in this turn.
        """
        queue, offset = progress.queue, progress.position
        if offset >= queue.max_offset:
            return None
        if wanted is EVERY_MESSAGE:
            log_offsets, sizes, _ = zip(*queue.entries(offset, budget.messages_left), strict=True)
            count = budget.take_first(sizes)
            end = offset + count
            self.read_ahead(progress, log_offsets[0], offset, end)
            return _tuple(MessageSelection, (range(offset, end), log_offsets[:count], end))
        return self._select_matching(progress, offset, budget, wanted, self._scan)

    def select_at(
        self, progress: PopProgress, offset: int, count: int, wanted: MessageFilter, *, shares: int
    ) -> MessageSelection:
        """Choose up to `count` matching messages from `offset`, for a pop of several levels.

        It scans at most the part 1 / shares of the entries that the pop may still scan. Queues that
        do not match then leave a part of the scan to other levels.
        """
        scan = Allowance(self._tally, items=max(self._scan.items_left // shares, 1))
        budget = PopBudget(count, taken_bytes=0, is_untouched=True)
        return self._select_matching(progress, offset, budget, wanted, scan)

    @property
    def is_scan_spent(self) -> bool:
        """Whether the pop may scan no further entries."""
        return self._scan.is_spent or self._scan.items_left < EVALUATIONS_AT_ONCE

    def read_ahead(
        self, progress: PopProgress, first_log_offset: LogOffset, begin: int, end: int
    ) -> None:
        """Ask the kernel to read the messages of a delivery and the next ones, if they are cold.

        Reading cold messages one by one from the disk would block the owner.
        """
        if first_log_offset >= self._store.log.log_end - WARM_BYTES:
            return
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
        self._advise(entries)

    def _advise(self, entries: Sequence[QueueEntry]) -> None:
        first = last = entries[0][0]
        for log_offset, size, _ in entries:
            if log_offset - last > GAP_BYTES_MAX or last - first > READ_BYTES_MAX:
                self._store.log.advise(first, last - first)
                first = log_offset
            last = LogOffset(log_offset + size)
        self._store.log.advise(first, last - first)

    def matches(self, entry: QueueEntry, wanted: MessageFilter) -> bool:
        """Return whether the message of a queue entry matches a filter."""
        log_offset, size, tag_hash = entry
        hashes = wanted.tag_hashes
        if hashes is not None and tag_hash not in hashes:
            return False
        return self._store.evaluate(log_offset, size, wanted, self._tally) == MATCH

    def _select_matching(
        self,
        progress: PopProgress,
        offset: int,
        budget: PopBudget,
        wanted: MessageFilter,
        scan: Allowance,
    ) -> MessageSelection:
        queue, hashes = progress.queue, wanted.tag_hashes
        is_retry = progress.named_topic_id != progress.topic_id
        at_once_max = SCAN_ENTRIES_AT_ONCE if hashes is not None else EVALUATIONS_AT_ONCE
        at_once = min(max(budget.messages_left, FIRST_ENTRIES_AT_ONCE), at_once_max)
        begin, unknown = offset, 0
        offsets: list[int] = []
        log_offsets: list[LogOffset] = []
        is_full = False
        while offset < queue.max_offset and not is_full and not scan.is_spent:
            entries = queue.entries(offset, min(scan.items_left, at_once))
            at_once = min(2 * at_once, at_once_max)
            self._tally.add(len(entries))
            if hashes is None and entries[0][0] < self._store.log.log_end - WARM_BYTES:
                self._advise(entries)
            for log_offset, size, tag_hash in entries:
                result = NO_MATCH
                is_read = hashes is None or tag_hash in hashes
                if is_read:
                    result = self._store.evaluate(log_offset, size, wanted, self._tally)
                if result == MATCH:
                    is_full = not budget.take(size)
                    if is_full:
                        break
                    offsets.append(offset)
                    log_offsets.append(log_offset)
                else:
                    unknown += result
                    if is_retry:
                        self._state.count("filtered_retry", progress, 1)
                offset += 1
                is_full = budget.messages_left == 0
                if is_full or (is_read and scan.is_spent):
                    break
        self._count_scan(progress, wanted, offset - begin, len(offsets), unknown)
        if not offsets:
            progress.position = offset
        if offset < queue.max_offset and not is_full:
            # The next turn continues the scan: a sparse filter must not delay other clients.
            self._state.ready.add((progress.group_id, progress.named_topic_id))
        return MessageSelection(offsets, log_offsets, offset)

    def _count_scan(
        self, progress: PopProgress, wanted: MessageFilter, scanned: int, matched: int, unknown: int
    ) -> None:
        language = wanted.language
        for name, count in (
            (f"scanned_{language}", scanned),
            (f"matched_{language}", matched),
            ("filter_unknown", unknown),
        ):
            if count:
                self._state.count(name, progress, count)
