"""The pop of a topic of type PRIORITY for a group that is not ordered (ADR 0086).

The queue id of a message is its level. A pop first counts, slot by slot, how many messages each
queue gives. Then each of these queues makes one delivery.

- A strict slot takes the next message of the highest level with a ready message.
- A fair slot takes the oldest message of all lower levels. With factor 0 it takes the oldest one of
  all levels.

A strict slot that passes a ready message of a lower level adds 100 - factor to the credit of the
subscription. A fair slot costs the factor. The first slot of a pop of several messages is strict
unless the credit is at least twice the factor, which happens if each answer is cut to one message
by its size. So with a factor of 50 or more, such a pop has the highest level.

A proxy at several broker groups gives a pop its own factor: 100 for strict slots, 0 for the oldest
messages below a level. Such a pop neither uses nor changes the credit (ADR 0089).

With a filter, a pop first looks for one message of each queue. The queues below the first one take
turns, so that an expensive filter hides none of them.

Of two messages, the one with the lower log offset is older: it was stored first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, final

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.message_filter import EVERY_MESSAGE, MessageFilter
from tidemill.broker.engine.metadata.priority import FACTOR_MAX
from tidemill.broker.engine.pop.budget import PopBudget
from tidemill.broker.engine.pop.message_selection import MessageSelection, MessageSelector
from tidemill.broker.engine.pop.retry_turns import is_retry_first

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.numbers import GroupId, TopicId
    from tidemill.broker.engine.message_store import MessageStore
    from tidemill.broker.engine.metadata.catalog import ConsumerGroup
    from tidemill.broker.engine.pop.deliveries import DeliveryBatch
    from tidemill.broker.engine.pop.progress import PopProgress, PopSubscription
    from tidemill.broker.engine.pop.state import PopState
    from tidemill.broker.engine.store.consume_queue import QueueEntry

# Entries that are read first. Most lower levels give one message to a pop.
FIRST_ENTRIES: Final = 2

# The progress, the group, the chosen messages and their bytes, the end of the invisible duration,
# and the time. It returns None if all of them went to the dead-letter topic.
Deliver: TypeAlias = Callable[
    ["PopProgress", "ConsumerGroup", MessageSelection, int, int, int], "DeliveryBatch | None"
]


def capped_credit(credit: int, factor: int) -> int:
    """Return the credit of a subscription for a factor that may have been lowered."""
    return min(credit, 2 * factor + FACTOR_MAX)


def count_delivered(
    state: PopState, subscription: PopSubscription, level: int, count: int, fair_count: int
) -> None:
    """Count deliveries of a level, and those of them in fair slots."""
    pair = subscription.group_id, subscription.topic_id
    counts = state.delivered_by_level.setdefault(pair, {})
    for is_fair, delivered in ((False, count - fair_count), (True, fair_count)):
        if delivered:
            counts[level, is_fair] = counts.get((level, is_fair), 0) + delivered


@final
class LevelQueue:
    """A queue during one pop: its next messages, and how many of them the pop takes."""

    __slots__ = (
        "entries",
        "fair_count",
        "is_ended",
        "level",
        "next_offset",
        "offsets",
        "progress",
        "rank",
        "size_bytes",
        "taken",
    )

    def __init__(self, progress: PopProgress, *, rank: int) -> None:
        """`rank` orders the queues of one level."""
        self.progress = progress
        self.level: int = progress.queue.queue_id
        self.rank = rank
        self.entries: list[QueueEntry] = []  # of the messages at `offsets`
        self.offsets: list[int] = []
        self.next_offset = progress.position  # where the next entries are read
        self.taken = 0  # of the entries, the first ones
        self.fair_count = 0  # of the taken ones, in fair slots
        self.size_bytes = 0  # of the taken ones
        self.is_ended = False  # no further messages for this pop

    def take(self, size_bytes: int, *, is_fair: bool) -> None:
        """Count the next message as taken."""
        self.taken += 1
        self.fair_count += is_fair
        self.size_bytes += size_bytes

    def selection(self) -> MessageSelection:
        """Return the taken messages, and the first offset of the next pop."""
        taken, entries = self.taken, self.entries
        is_all = taken == len(entries)
        return MessageSelection(
            self.offsets[:taken],
            [entry[0] for entry in entries[:taken]],
            self.next_offset if is_all else self.offsets[taken - 1] + 1,
        )


@final
class LevelPop:
    """The pop of topics of type PRIORITY."""

    def __init__(
        self,
        state: PopState,
        store: MessageStore,
        reader: MessageSelector,
        stalled: set[tuple[GroupId, TopicId]],
        *,
        deliver: Deliver,
    ) -> None:
        """Add a (group, topic) with a damaged queue file to `stalled`."""
        self._state = state
        self._store = store
        self._reader = reader
        self._stalled = stalled
        self._deliver = deliver

    def pop(
        self,
        subscription: PopSubscription,
        group: ConsumerGroup,
        *,
        max_messages: int,
        room: int,
        visible_at_ms: int,
        wanted: MessageFilter,
        now_ms: int,
        level_min: int = 0,
        own_factor: int | None = None,
        level_below: int = 0,
    ) -> list[DeliveryBatch]:
        """Take up to `max_messages` and POP_BYTES_MAX, from up to `room` queues.

        Take nothing if no level from `level_min` on has a ready message, and nothing from
        `level_below` on, unless it is 0.

        The result is in the order of the levels, the highest first.
        """
        queues = self._queues(subscription, now_ms)
        if level_below:
            queues = [queue for queue in queues if queue.level < level_below]
        if level_min and not self._reaches(queues, level_min, wanted):
            return []
        factor = group.priority_factor
        subscription.credit = credit = capped_credit(subscription.credit, factor)
        if own_factor is not None:
            factor = own_factor
        self._choose(subscription, queues, factor, max_messages, room, wanted)
        if own_factor is not None:
            subscription.credit = credit
        batches = []
        for queue in queues:
            progress = queue.progress
            if not queue.taken:
                if queue.offsets:
                    # No message before the first match matches the filter.
                    progress.position = queue.offsets[0]
                continue
            selection = queue.selection()
            if wanted is EVERY_MESSAGE:
                self._read_ahead(progress, selection)
            batch = self._deliver(
                progress, group, selection, queue.size_bytes, visible_at_ms, now_ms
            )
            if batch is not None:
                count = len(batch.indexes)
                fair_count = min(queue.fair_count, count)
                count_delivered(self._state, subscription, queue.level, count, fair_count)
                batches.append(batch)
        return batches

    def _read_ahead(self, progress: PopProgress, selection: MessageSelection) -> None:
        first, end = selection.log_offsets[0], selection.next_offset
        try:
            self._reader.read_ahead(progress, first, selection.offsets[0], end)
        except BlockFileDamaged:
            # The entries after the chosen ones are damaged. The chosen ones are known.
            self._note_damaged(progress)

    def _note_damaged(self, progress: PopProgress) -> None:
        self._stalled.add((progress.group_id, progress.named_topic_id))

    def _queues(self, subscription: PopSubscription, now_ms: int) -> list[LevelQueue]:
        """Return the queues with messages: the highest level first.

        In a level the retry queue comes first or last, by the rules of other topics.
        """
        queues = [
            LevelQueue(progress, rank=1)
            for progress in subscription.queues
            if progress.position < progress.queue.max_offset
        ]
        for retry in subscription.retries:
            if retry.position < retry.queue.max_offset:
                is_first = is_retry_first(self._store, subscription.turn, retry, now_ms)
                queues.append(LevelQueue(retry, rank=0 if is_first else 2))
        queues.sort(key=lambda queue: (-queue.level, queue.rank))
        for queue in queues:
            if queue.progress.position < queue.progress.queue.min_offset:
                self._reader.skip_expired(queue.progress)
                queue.next_offset = queue.progress.position
        return queues

    def _choose(
        self,
        subscription: PopSubscription,
        queues: Sequence[LevelQueue],
        factor: int,
        max_messages: int,
        room: int,
        wanted: MessageFilter,
    ) -> None:
        """Fill the slots of a pop: count the messages that each queue gives."""
        budget = PopBudget(max_messages, taken_bytes=0, is_untouched=True)
        if wanted is not EVERY_MESSAGE:
            self._look(subscription.turn, queues, factor, max_messages, wanted)
        used, top, low = 0, 0, 0
        while budget.messages_left:
            left = budget.messages_left
            while top < len(queues) and self._head(queues[top], wanted, left) is None:
                top += 1
            if top == len(queues):
                return
            highest, low = queues[top], max(low, top + 1)
            while factor < FACTOR_MAX and low < len(queues):
                is_lower = queues[low].level < highest.level
                if is_lower and self._head(queues[low], wanted, left) is not None:
                    break
                low += 1
            if factor == FACTOR_MAX or low == len(queues):
                # All further slots are strict. The credit must not make the first slot of the next
                # pop of several messages fair: only answers that are cut by their size may do that.
                subscription.credit = min(subscription.credit, max(2 * factor - 1, 0))
                if used + (not highest.taken) > room:
                    return
                used += not highest.taken
                if not self._take_many(highest, budget, wanted):
                    return
                continue
            is_first_of_several = left == max_messages > 1
            cost = 2 * factor if is_first_of_several else factor
            is_fair = subscription.credit >= cost
            chosen = highest
            if is_fair:
                chosen = self._oldest(queues[low if factor else top :], wanted, left)
            size_bytes = chosen.entries[chosen.taken][1]
            if used + (not chosen.taken) > room or not budget.take(size_bytes):
                return
            used += not chosen.taken
            chosen.take(size_bytes, is_fair=is_fair)
            subscription.credit += -factor if is_fair else FACTOR_MAX - factor

    def _reaches(self, queues: Sequence[LevelQueue], level_min: int, wanted: MessageFilter) -> bool:
        """Whether a message of this level or a higher one is ready."""
        high = (queue for queue in queues if queue.level >= level_min)
        return any(self._head(queue, wanted, 1) is not None for queue in high)

    def _look(
        self,
        turn: int,
        queues: Sequence[LevelQueue],
        factor: int,
        max_messages: int,
        wanted: MessageFilter,
    ) -> None:
        """Look for matching messages: many of the first queue, and one of each other queue."""
        if not queues:
            return
        first, *rest = queues
        self._fetch(first, wanted, max_messages)
        if first.entries and factor == FACTOR_MAX:
            return  # No slot is fair. The others are scanned if the first has no more messages.
        begin = turn % max(len(rest), 1)
        for index, queue in enumerate((*rest[begin:], *rest[:begin])):
            # The last part of the scan is for the slots.
            self._fetch(queue, wanted, 1, shares=len(rest) - index + 1)

    def _take_many(self, queue: LevelQueue, budget: PopBudget, wanted: MessageFilter) -> bool:
        """Take the next messages of a queue in strict slots. Return False if one does not fit.

        The queue has a message. It is the usual case, and much faster than slot by slot.
        """
        if len(queue.entries) - queue.taken < budget.messages_left:
            self._fetch(queue, wanted, budget.messages_left)
        end = queue.taken + budget.messages_left
        sizes = [entry[1] for entry in queue.entries[queue.taken : end]]
        before = budget.taken_bytes
        count = budget.take_first(sizes)
        queue.taken += count
        queue.size_bytes += budget.taken_bytes - before
        return count == len(sizes)

    def _oldest(
        self, queues: Sequence[LevelQueue], wanted: MessageFilter, count: int
    ) -> LevelQueue:
        """Return the queue with the oldest next message. One of the queues has a message."""
        found: LevelQueue | None = None
        oldest = 0
        for queue in queues:
            head = self._head(queue, wanted, count)
            if head is not None and (found is None or head[0] < oldest):
                found, oldest = queue, head[0]
        assert found is not None, "the first queue has a message"
        return found

    def _head(self, queue: LevelQueue, wanted: MessageFilter, count: int) -> QueueEntry | None:
        """Return the entry of the next message of a queue; None if it has none for this pop.

        `count` is the number of messages that the pop may still take.
        """
        if queue.taken == len(queue.entries):
            self._fetch(queue, wanted, count)
        return None if queue.taken == len(queue.entries) else queue.entries[queue.taken]

    def _fetch(
        self, queue: LevelQueue, wanted: MessageFilter, count: int, *, shares: int = 2
    ) -> None:
        """Add entries of a queue, unless it has no more for this pop.

        A filter scans at most the part 1 / shares of the entries that the pop may still scan.
        """
        if queue.is_ended:
            return
        try:
            if wanted is EVERY_MESSAGE:
                self._read(queue, count)
            else:
                self._scan(queue, wanted, count, shares)
        except BlockFileDamaged:
            queue.is_ended = True
            self._note_damaged(queue.progress)

    def _read(self, queue: LevelQueue, count: int) -> None:
        offset = queue.next_offset
        if offset >= queue.progress.queue.max_offset:
            queue.is_ended = True
            return
        wanted = count if queue.entries else min(count, FIRST_ENTRIES)
        entries = queue.progress.queue.entries(offset, wanted)
        queue.entries += entries
        queue.next_offset = offset + len(entries)
        queue.offsets += range(offset, queue.next_offset)

    def _scan(self, queue: LevelQueue, wanted: MessageFilter, count: int, shares: int) -> None:
        progress = queue.progress
        if queue.next_offset >= progress.queue.max_offset:
            queue.is_ended = True
            return
        if self._reader.is_scan_spent:
            # The next turn continues with this level.
            queue.is_ended = True
            self._state.ready.add((progress.group_id, progress.named_topic_id))
            return
        found = self._reader.select_at(progress, queue.next_offset, count, wanted, shares=shares)
        queue.next_offset = found.next_offset
        queue.offsets += found.offsets
        queue.entries += [progress.queue.entry(offset) for offset in found.offsets]
        # The scan of this level is over for this pop, or the queue has no further match.
        queue.is_ended = not found.offsets
