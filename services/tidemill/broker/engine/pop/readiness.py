"""Whether a pop would find something: the look of a notification, which changes nothing.

It may say yes where a pop finds nothing, since that costs one pop; never no where one would find
something, since then a message would wait for nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.pop.queue_reader import SCAN_ENTRIES_AT_ONCE, SCAN_ENTRIES_MAX
from tidemill.broker.engine.tally import Allowance
from tidemill.common.errors import GroupNotFound, TopicNotFound
from tidemill.message import stored_message

if TYPE_CHECKING:
    from tidemill.broker.engine.metadata.catalog import Catalog
    from tidemill.broker.engine.pop.progress import PopProgress
    from tidemill.broker.engine.pop.state import PopState
    from tidemill.broker.engine.tally import Tally

# Two pops of the largest: more polls than that are woken by the next look.
READY_COUNT_MAX: Final = 64


class ReadyMessages(NamedTuple):
    """How many messages are ready, at most READY_COUNT_MAX."""

    ready_count: int
    # The look ended before it found anything: a pop has to look on, or to make what it looks at.
    is_unsure: bool = False


NOTHING_READY: Final = ReadyMessages(0)
_UNKNOWN = ReadyMessages(1, is_unsure=True)


@final
class PopReadiness:
    """Looks at what is ready for a group."""

    def __init__(
        self,
        state: PopState,
        catalog: Catalog,
        tally: Tally,
        *,
        is_blocked: Callable[[PopProgress, str, int], bool],
        settle_acks: Callable[[int], object],
    ) -> None:
        """Take `is_blocked` as the pop of ordered groups knows it, of what `settle_acks` leaves."""
        self._state = state
        self._catalog = catalog
        self._tally = tally
        self._is_blocked = is_blocked
        self._settle_acks = settle_acks

    def look(
        self, group_id: GroupId, topic_id: TopicId, *, tags: frozenset[str], now_ms: int
    ) -> ReadyMessages:
        """Count what is ready. Raises TopicNotFound, GroupNotFound.

        With a filter it costs what the look of a pop costs, and not again for what it has seen.
        """
        group = self._catalog.groups.get(group_id)
        if group is None:
            raise GroupNotFound("the consumer group was deleted; create it and poll again")
        topic = self._catalog.topics.get(topic_id)
        if topic is None:
            raise TopicNotFound("the topic was deleted; query its route again")
        subscription = self._state.subscriptions.get((group_id, topic_id))
        if subscription is None or subscription.version != topic.version:
            # The group has not popped here yet: its first pop says where it begins.
            return _UNKNOWN
        if group.is_ordered:
            # What was acked in this round blocks no queue, as for a pop.
            self._settle_acks(now_ms)
            sources = [
                progress
                for progress in subscription.queues
                if not self._is_blocked(progress, "", now_ms)
            ]
        else:
            sources = subscription.queues
            retry = subscription.retry
            if retry is not None:
                sources = [*sources, retry]
        return self._matching(sources, tags) if tags else _all(sources)

    def _matching(self, sources: list[PopProgress], tags: frozenset[str]) -> ReadyMessages:
        scan = Allowance(self._tally, items=SCAN_ENTRIES_MAX)
        hashes = {stored_message.tag_hash(tag) for tag in tags}
        count = 0
        for progress in sources:
            # What an ordered group has pending comes again, as far as it matches.
            count += _pending_count(progress)
            try:
                count += self._matching_in(progress, tags, hashes, scan, READY_COUNT_MAX - count)
            except BlockFileDamaged:
                continue
            if count >= READY_COUNT_MAX:
                return ReadyMessages(READY_COUNT_MAX)
            if scan.items_left <= 0:
                return ReadyMessages(count) if count else _UNKNOWN
        return ReadyMessages(count)

    def _matching_in(
        self,
        progress: PopProgress,
        tags: frozenset[str],
        hashes: set[int],
        scan: Allowance,
        count_max: int,
    ) -> int:
        """Count the entries of a queue that have one of the tags, by their hashes."""
        queue, count = progress.queue, 0
        begin = offset = _behind_passed(progress, tags)
        while offset < queue.max_offset and scan.items_left > 0 and count < count_max:
            entries = queue.entries(offset, min(scan.items_left, SCAN_ENTRIES_AT_ONCE))
            self._tally.add(len(entries))
            found = sum(tag_hash in hashes for _, _, tag_hash in entries)
            offset += len(entries)
            if not found and not count:
                progress.passed = tags, progress.next_offset, offset
            count += found
        assert offset >= begin, "a look goes forward"
        return count


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


def _behind_passed(progress: PopProgress, tags: frozenset[str]) -> int:
    """Return where to look on: an earlier look has found none of these tags before."""
    passed_tags, begin, end = progress.passed
    offset = progress.next_offset
    return end if passed_tags == tags and begin <= offset <= end else offset
