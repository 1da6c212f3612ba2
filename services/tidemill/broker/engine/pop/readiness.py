"""The number of ready messages, for notifications. Counting changes nothing.

A count may be too high, which costs one empty pop. It is never 0 while a pop would find a message,
because then the message would wait although a consumer is polling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.message_filter import EVERY_MESSAGE, MATCH, MessageFilter
from tidemill.broker.engine.pop.message_selection import (
    EVALUATIONS_AT_ONCE,
    SCAN_ENTRIES_AT_ONCE,
    SCAN_ENTRIES_MAX,
)
from tidemill.broker.engine.tally import Allowance
from tidemill.common.errors import GroupNotFound, TopicNotFound

if TYPE_CHECKING:
    from tidemill.broker.engine.message_store import MessageStore
    from tidemill.broker.engine.metadata.catalog import Catalog
    from tidemill.broker.engine.pop.progress import PopProgress
    from tidemill.broker.engine.pop.state import PopState
    from tidemill.broker.engine.store.consume_queue import QueueEntry
    from tidemill.broker.engine.tally import Tally

# Two pops of the largest size. The next count wakes further polls.
READY_COUNT_MAX: Final = 64


class ReadyMessages(NamedTuple):
    """The number of ready messages, at most READY_COUNT_MAX."""

    ready_count: int
    # The scan reached its limit, or the group has not popped the topic yet. A pop has to decide.
    is_unsure: bool = False


NOTHING_READY: Final = ReadyMessages(0)
_UNKNOWN = ReadyMessages(1, is_unsure=True)


@final
class PopReadiness:
    """The counter of the messages that are ready for a group."""

    def __init__(
        self,
        state: PopState,
        catalog: Catalog,
        store: MessageStore,
        tally: Tally,
        *,
        is_blocked: Callable[[PopProgress, str, int], bool],
        settle_acks: Callable[[int], object],
    ) -> None:
        """Count ordered queues with `is_blocked`, after `settle_acks` has logged the acks."""
        self._state = state
        self._catalog = catalog
        self._store = store
        self._tally = tally
        self._is_blocked = is_blocked
        self._settle_acks = settle_acks

    def count(
        self, group_id: GroupId, topic_id: TopicId, *, wanted: MessageFilter, now_ms: int
    ) -> ReadyMessages:
        """Count the ready messages. Raises TopicNotFound, GroupNotFound.

        A filtered count costs as much as the scan of a pop. It skips entries that an earlier count
        has scanned.
        """
        group = self._catalog.groups.get(group_id)
        if group is None:
            raise GroupNotFound("the consumer group was deleted; create it and poll again")
        topic = self._catalog.topics.get(topic_id)
        if topic is None:
            raise TopicNotFound("the topic was deleted; query its route again")
        subscription = self._state.subscriptions.get((group_id, topic_id))
        if subscription is None or subscription.version != topic.version:
            # The group has not popped this topic yet. Its first pop decides where it begins.
            return _UNKNOWN
        if group.is_ordered:
            # Messages acked in this round must not block a queue.
            self._settle_acks(now_ms)
            sources = [
                progress
                for progress in subscription.queues
                if not self._is_blocked(progress, "", now_ms)
            ]
        else:
            sources = subscription.queues
            if subscription.retries:
                sources = [*sources, *subscription.retries]
        return _all(sources) if wanted is EVERY_MESSAGE else self._matching(sources, wanted)

    def _matching(self, sources: list[PopProgress], wanted: MessageFilter) -> ReadyMessages:
        scan = Allowance(self._tally, items=SCAN_ENTRIES_MAX)
        count = 0
        for progress in sources:
            # An ordered group gets its pending messages again if they match.
            count += _pending_count(progress)
            try:
                count += self._matching_in(progress, wanted, scan, READY_COUNT_MAX - count)
            except BlockFileDamaged:
                continue
            if count >= READY_COUNT_MAX:
                return ReadyMessages(READY_COUNT_MAX)
            if scan.is_spent:
                return ReadyMessages(count) if count else _UNKNOWN
        return ReadyMessages(count)

    def _matching_in(
        self, progress: PopProgress, wanted: MessageFilter, scan: Allowance, count_max: int
    ) -> int:
        """Count the messages of a queue that match; of tags, only the hashes are compared."""
        queue, count, hashes = progress.queue, 0, wanted.tag_hashes
        at_once = SCAN_ENTRIES_AT_ONCE if hashes is not None else EVALUATIONS_AT_ONCE
        begin = offset = _first_unscanned(progress, wanted)
        while offset < queue.max_offset and not scan.is_spent and count < count_max:
            entries = queue.entries(offset, min(scan.items_left, at_once))
            self._tally.add(len(entries))
            if wanted.language == "tag" and hashes is not None:
                found = sum(tag_hash in hashes for _, _, tag_hash in entries)
                offset += len(entries)
            else:
                found, scanned = self._count_evaluated(entries, wanted, scan)
                offset += scanned
            if not found and not count:
                progress.passed = wanted, progress.next_offset, offset
            count += found
        assert offset >= begin, "a scan moves forward"
        return count

    def _count_evaluated(
        self, entries: Sequence[QueueEntry], wanted: MessageFilter, scan: Allowance
    ) -> tuple[int, int]:
        """Return the number of matches and of scanned entries, until the scan is spent."""
        hashes, found = wanted.tag_hashes, 0
        for number, (log_offset, size, tag_hash) in enumerate(entries, start=1):
            if hashes is not None and tag_hash not in hashes:
                continue
            found += self._store.evaluate(log_offset, size, wanted, self._tally) == MATCH
            if scan.is_spent:
                return found, number
        return found, len(entries)


def _all(sources: list[PopProgress]) -> ReadyMessages:
    count = 0
    for progress in sources:
        ready = progress.ready_count
        if ready > 0:
            count += ready
        count += _pending_count(progress)
        if count >= READY_COUNT_MAX:
            return ReadyMessages(READY_COUNT_MAX)
    return ReadyMessages(count) if count else NOTHING_READY


def _pending_count(progress: PopProgress) -> int:
    return 0 if progress.ordered is None else len(progress.ordered.pending)


def _first_unscanned(progress: PopProgress, wanted: MessageFilter) -> int:
    """Return the first offset that earlier scans with this filter have not passed."""
    passed_filter, begin, end = progress.passed
    offset = progress.next_offset
    return end if passed_filter == wanted and begin <= offset <= end else offset
