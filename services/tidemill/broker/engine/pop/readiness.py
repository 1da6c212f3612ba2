"""The number of ready messages, for notifications. Counting changes nothing.

A count may be too high, which costs one empty pop. It is never 0 while a pop would find a message,
because then the message would wait although a consumer is polling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import GroupId, QueueOffset, TopicId
from tidemill.broker.engine.message_filter import EVERY_MESSAGE, MATCH, MessageFilter
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.pop.message_selection import (
    EVALUATIONS_AT_ONCE,
    SCAN_ENTRIES_AT_ONCE,
    SCAN_ENTRIES_MAX,
)
from tidemill.broker.engine.pop.ready_levels import any_level, find_levels
from tidemill.broker.engine.tally import Allowance
from tidemill.common.errors import GroupNotFound, TopicNotFound

if TYPE_CHECKING:
    from tidemill.broker.engine.message_store import MessageStore
    from tidemill.broker.engine.metadata.catalog import Catalog
    from tidemill.broker.engine.pop.progress import PopProgress, PopSubscription
    from tidemill.broker.engine.pop.ready_levels import ReadyLevels
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
    levels: ReadyLevels | None = None  # of a PRIORITY topic, if they are known


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
        self,
        group_id: GroupId,
        topic_id: TopicId,
        *,
        wanted: MessageFilter,
        now_ms: int,
        level_min: int = 0,
    ) -> ReadyMessages:
        """Count the ready messages. Raises TopicNotFound, GroupNotFound.

        Of a PRIORITY topic, only messages of `level_min` or higher count. A filtered count costs as
        much as the scan of a pop. It skips entries that an earlier count has scanned.
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
            if level_min >= topic.queues:
                return NOTHING_READY  # The caller knows that any level may be ready.
            if topic.type is TopicType.PRIORITY:
                return _UNKNOWN._replace(levels=any_level(topic.queues))
            return _UNKNOWN
        if group.is_paused(now_ms):
            return NOTHING_READY
        if group.is_ordered:
            # Messages acked in this round must not block a queue.
            self._settle_acks(now_ms)
            sources = [
                progress
                for progress in _all_queues(subscription)
                if not self._is_blocked(progress, "", now_ms)
            ]
        else:
            sources = _all_queues(subscription)
        if topic.type is TopicType.PRIORITY:
            return self._by_level(sources, wanted, level_min)
        return _all(sources) if wanted is EVERY_MESSAGE else self._matching(sources, wanted)

    def count_remaining(self, group_id: GroupId, topic_id: TopicId) -> ReadyMessages | None:
        """Count the ready messages of a PRIORITY topic for a group that is not ordered.

        Return None for another topic or group. Nothing is recorded.
        """
        group, topic = self._catalog.groups.get(group_id), self._catalog.topics.get(topic_id)
        subscription = self._state.subscriptions.get((group_id, topic_id))
        if group is None or topic is None or subscription is None:
            return None
        if group.is_ordered or topic.type is not TopicType.PRIORITY:
            return None
        return self._by_level(_all_queues(subscription), EVERY_MESSAGE, 0)

    def _by_level(
        self, sources: Sequence[PopProgress], wanted: MessageFilter, level_min: int
    ) -> ReadyMessages:
        """Count the messages of some levels, the highest level first."""
        counted = [one for one in sources if one.queue.queue_id >= level_min]
        counted.sort(key=lambda progress: -progress.queue.queue_id)
        if wanted is EVERY_MESSAGE:
            ready, known = _all(counted), sources
        else:
            ready, known = self._matching(counted, wanted), counted
        if level_min and ready.is_unsure:
            # Lower messages are ready, so a pop comes soon. It scans the highest level first.
            return NOTHING_READY
        if not ready.ready_count:
            return ready
        heads = [(one.queue, _first_ready(one, wanted)) for one in known]
        return ready._replace(levels=find_levels(self._store, heads))

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


def _all_queues(subscription: PopSubscription) -> list[PopProgress]:
    if subscription.retries:
        return [*subscription.queues, *subscription.retries]
    return subscription.queues


def _first_ready(progress: PopProgress, wanted: MessageFilter) -> QueueOffset:
    """Return the offset of the first message that is ready, or may match the filter."""
    if progress.ordered is not None and progress.ordered.pending:
        return QueueOffset(max(min(progress.ordered.pending), progress.queue.min_offset))
    if wanted is EVERY_MESSAGE:
        return QueueOffset(progress.next_offset)
    return QueueOffset(_first_unscanned(progress, wanted))


def _pending_count(progress: PopProgress) -> int:
    return 0 if progress.ordered is None else len(progress.ordered.pending)


def _first_unscanned(progress: PopProgress, wanted: MessageFilter) -> int:
    """Return the first offset that earlier scans with this filter have not passed."""
    passed_filter, begin, end = progress.passed
    offset = progress.next_offset
    return end if passed_filter == wanted and begin <= offset <= end else offset
