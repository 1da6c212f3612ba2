"""Pop, ack, change-invisible, dead-letter and revive: the decisions.

Each decision reads the state, appends one record that says what happened, and changes the state in
the way in which a replay of that record changes it. Nothing is decided twice: what a pop hides is
in its CK, what an ack settles in its ACK, and a copy on a retry or dead-letter topic names the
delivery that it settles, so the copy and the settlement cannot be separated by a crash.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, final

from tidemill.broker.engine.layout import message, pop_checkpoint
from tidemill.broker.engine.layout.message import Cause, Place, Reason
from tidemill.broker.engine.layout.pop_checkpoint import (
    FLAG_GAPS,
    FLAG_ORDERED,
    FLAG_SUPERSEDES,
    FLAG_SUSPEND,
)
from tidemill.broker.engine.layout.record import Kind
from tidemill.broker.engine.metadata.catalog import (
    Catalog,
    Group,
    Topic,
)
from tidemill.broker.engine.pop.delivery_table import (
    NIL,
)
from tidemill.broker.engine.pop.messages import MessageStore
from tidemill.broker.engine.pop.progress import Progress, Subscription
from tidemill.broker.engine.pop.state import PopState
from tidemill.common import stored_message
from tidemill.common.errors import GroupNotFound, InvalidReceiptHandle, Overloaded, TopicNotFound
from tidemill.common.resource_names import DEAD_LETTER_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

SCAN_ENTRIES_MAX = 4096  # queue entries one pop looks at for its filter: about a millisecond
RETRY_SHARE = 5  # every fifth pop looks at the retry topic first, as in the reference (20 %)
RETRY_WAIT_MAX_MS = 1_000  # a retry message that has waited this long goes first in any case
CHANGES_RESERVE_PART = 0.125  # of deliveries_max: changes go on for a while where pops are refused
REVIVE_MESSAGES_A_TURN = 64  # about a millisecond of copying
DUE_SLOTS_A_TURN = 1024
# Fairness and a bound: copies a group may cost in one window; 50,000 a second.
REVIVE_WINDOW_MS = 100
REVIVE_MESSAGES_A_WINDOW = 5_000
_ONES: list[tuple[int, ...]] = [(1,) * n for n in range(pop_checkpoint.MESSAGES_MAX + 1)]


class AckResult(IntEnum):
    """What an ack found (numbers of broker.proto)."""

    APPLIED = 1
    ALREADY = 2
    GONE = 3


class Delivery(NamedTuple):
    """How a receipt handle names one message of one delivery."""

    group_id: int
    topic_id: int
    slot: int
    delivery_id: int
    message_index: int
    visible_at_ms: int


class Batch(NamedTuple):
    """What one pop took from one queue; all columns of one length."""

    slot: int
    delivery_id: int
    popped_at_ms: int
    visible_at_ms: int
    queue_id: int
    indexes: Sequence[int]
    queue_offsets: Sequence[int]
    delivery_attempts: Sequence[int]
    log_offsets: Sequence[int]


class _Taken(NamedTuple):
    """Messages that a pop has chosen from a queue."""

    offsets: Sequence[int]
    log_offsets: Sequence[int]
    next_offset: int


@final
class Consumption:
    """All that consumer groups do."""

    def __init__(
        self, state: PopState, store: MessageStore, catalog: Catalog, *, deliveries_max: int
    ) -> None:
        self._state = state
        self._store = store
        self._log = store.log
        self._catalog = catalog
        self._deliveries_max = deliveries_max
        # Per group, what is due and not yet revived: (slot, delivery id, revive queue).
        self._due: dict[int, deque[tuple[int, int, int]]] = {}
        self._due_counts = [0] * pop_checkpoint.REVIVE_QUEUES
        self._window_at_ms = 0
        self._window_used: dict[int, int] = {}

    # ------------------------------------------------------------ pop

    def pop(
        self,
        group_id: int,
        topic_id: int,
        *,
        max_messages: int,
        invisible_duration_ms: int,
        tags: frozenset[str],
        attempt_id: str,
        now_ms: int,
    ) -> list[Batch]:
        """Take up to `max_messages` for a group and hide them from it.

        An empty list is a normal answer. Raises TopicNotFound, GroupNotFound, Overloaded.
        """
        subscription = self._subscription(group_id, topic_id, now_ms)
        table = self._state.table
        if table.used_count + len(subscription.queues) >= self._deliveries_max:
            raise Overloaded(
                f"{self._deliveries_max} deliveries are in flight, the broker's limit "
                f"(deliveries_max); ack messages, or poll again later"
            )
        group = self._catalog.groups[group_id]
        subscription.turn += 1
        visible_at_ms = now_ms + invisible_duration_ms
        want = max_messages
        batches: list[Batch] = []
        if group.is_ordered:
            sources = _rotated(subscription.queues, subscription.turn)
        else:
            sources = self._sources(subscription, now_ms)
        for progress in sources:
            if group.is_ordered:
                batch = self._pop_ordered(
                    progress, group, want, visible_at_ms, tags, attempt_id, now_ms
                )
            else:
                batch = self._pop_any(progress, group, want, visible_at_ms, tags, now_ms)
            if batch is not None:
                batches.append(batch)
                want -= len(batch.indexes)
                if want <= 0:
                    break
        return batches

    def _sources(self, subscription: Subscription, now_ms: int) -> list[Progress]:
        """Return the queues with something ready, in the order in which to look at them."""
        ready = [
            progress
            for progress in _rotated(subscription.queues, subscription.turn)
            if progress.pop_offset < progress.queue.max_offset
        ]
        retry = subscription.retry
        if retry is not None and retry.pop_offset < retry.queue.max_offset:
            is_first = subscription.turn % RETRY_SHARE == 0 or (
                bool(ready) and self._waits_since(retry, now_ms) < now_ms - RETRY_WAIT_MAX_MS
            )
            ready.insert(0 if is_first else len(ready), retry)
        return ready

    def _waits_since(self, progress: Progress, now_ms: int) -> int:
        offset = max(progress.pop_offset, progress.queue.min_offset)
        if offset == progress.queue.max_offset:
            return now_ms  # Retention took all of it.
        return self._store.stored_at_ms(progress.queue.entry(offset)[0])

    def _subscription(self, group_id: int, topic_id: int, now_ms: int) -> Subscription:
        topic = self._catalog.topics.get(topic_id)
        if topic is None:
            raise TopicNotFound("the topic was deleted; query its route again")
        subscription = self._state.subscriptions.get((group_id, topic_id))
        if subscription is not None and subscription.version == topic.version:
            return subscription
        group = self._catalog.groups.get(group_id)
        if group is None:
            raise GroupNotFound("the consumer group was deleted; create it and poll again")
        return self._subscribe(group, topic, now_ms)

    def _subscribe(self, group: Group, topic: Topic, now_ms: int) -> Subscription:
        is_new = (group.id, topic.id, 0) not in self._state.progress
        queues = [
            self._state.progress_of(group.id, topic.id, number) for number in range(topic.queues)
        ]
        if is_new and group.start_from_latest:
            # In the log, since a restart must not move the start past what arrived meanwhile.
            for progress in queues:
                progress.pop_offset = progress.queue.max_offset
            self._store.append_state(
                self._store.PROGRESS, self._state.encode_progress(queues), now_ms
            )
        retry_id = self._catalog.retry_topic_ids.get((group.id, topic.id))
        retry = None if retry_id is None else self._state.progress_of(group.id, retry_id, 0)
        subscription = Subscription(
            group_id=group.id, topic_id=topic.id, version=topic.version, queues=queues, retry=retry
        )
        self._state.subscriptions[group.id, topic.id] = subscription
        return subscription

    def _pop_any(
        self,
        progress: Progress,
        group: Group,
        want: int,
        visible_at_ms: int,
        tags: frozenset[str],
        now_ms: int,
    ) -> Batch | None:
        self._skip_expired(progress)
        taken = self._take(progress, progress.pop_offset, want, tags)
        if taken is None:
            return None
        offsets, log_offsets, next_offset = taken
        progress.pop_offset = next_offset
        if not offsets:
            return None
        batch = self._deliver(progress, offsets, log_offsets, visible_at_ms, now_ms)
        if progress.named_topic_id == progress.topic_id:
            return batch
        attempts = [self._store.place(offset).attempts + 1 for offset in log_offsets]
        return self._within_limit(batch, attempts, progress, group, now_ms)

    def _skip_expired(self, progress: Progress) -> None:
        missed = progress.queue.min_offset - progress.pop_offset
        if missed > 0:
            self._count("expired", progress, missed)
            progress.pop_offset = progress.queue.min_offset

    def _take(
        self, progress: Progress, offset: int, want: int, tags: frozenset[str]
    ) -> _Taken | None:
        """Choose up to `want` matching messages from `offset` on; None: there are none at all."""
        queue = progress.queue
        if offset >= queue.max_offset:
            return None
        if not tags:
            entries = queue.entries(offset, want)
            end = offset + len(entries)
            return _Taken(range(offset, end), [entry[0] for entry in entries], end)
        hashes = {stored_message.tag_hash(tag) for tag in tags}
        offsets: list[int] = []
        log_offsets: list[int] = []
        scan_end = min(queue.max_offset, offset + SCAN_ENTRIES_MAX)
        while offset < scan_end and len(offsets) < want:
            for log_offset, _, tag_hash in queue.entries(offset, min(scan_end - offset, 512)):
                if tag_hash in hashes and self._store.tag(log_offset) in tags:
                    offsets.append(offset)
                    log_offsets.append(log_offset)
                elif progress.named_topic_id != progress.topic_id:
                    self._count("filtered_retry", progress, 1)
                offset += 1
                if len(offsets) == want:
                    break
        if offset < queue.max_offset and len(offsets) < want:
            # The rest is looked at in the next turn: others must not wait for a sparse filter.
            self._state.ready.add((progress.group_id, progress.named_topic_id))
        return _Taken(offsets, log_offsets, offset)

    def _deliver(
        self,
        progress: Progress,
        offsets: Sequence[int],
        log_offsets: Sequence[int],
        visible_at_ms: int,
        now_ms: int,
        *,
        ordered: bytes = b"",
    ) -> Batch:
        """Log the CK of a delivery and take it in."""
        start, count = offsets[0], len(offsets)
        flags = FLAG_ORDERED if ordered else 0
        gaps = None
        if offsets[-1] - start + 1 != count:
            gaps = tuple([offset - start for offset in offsets])
            flags |= FLAG_GAPS
            ordered = pop_checkpoint.GAPS[count].pack(*gaps) + ordered
        queue_id = progress.queue.queue_id
        slot = self._state.table.allocate()
        body = pop_checkpoint.BODY.pack(
            slot,
            progress.group_id,
            progress.topic_id,
            queue_id,
            count,
            flags,
            pop_checkpoint.revive_queue_of(progress.topic_id, progress.group_id, queue_id),
            start,
            visible_at_ms,
            progress.pop_offset,
        )
        delivery_id = self._log.append(Kind.CK, body + ordered, now_ms)
        self._count("ck", progress, 1)
        self._state.place(
            progress,
            slot,
            delivery_id,
            start=start,
            count=count,
            flags=flags,
            visible_at_ms=visible_at_ms,
            popped_at_ms=now_ms,
            gaps=gaps,
        )
        return Batch(
            slot, delivery_id, now_ms, visible_at_ms, queue_id, range(count), offsets,
            _ONES[count], log_offsets,
        )  # fmt: skip

    def _within_limit(
        self,
        batch: Batch,
        attempts: list[int],
        progress: Progress,
        group: Group,
        now_ms: int,
    ) -> Batch | None:
        """Fill in the attempts, and dead-letter the messages that have none left.

        The limit is checked when an invisible duration ends; it may have been lowered since.
        """
        if max(attempts) <= group.max_attempts:
            return batch._replace(delivery_attempts=attempts)
        kept = []
        for index, attempt in enumerate(attempts):
            if attempt <= group.max_attempts:
                kept.append(index)
            else:
                self._copy_to_dlq(
                    batch.slot, index, progress, Reason.ATTEMPTS_EXHAUSTED, now_ms, attempt - 1
                )
        if not kept:
            # What follows was not looked at.
            self._state.ready.add((progress.group_id, progress.named_topic_id))
            return None
        return batch._replace(
            indexes=kept,
            queue_offsets=[batch.queue_offsets[index] for index in kept],
            delivery_attempts=[attempts[index] for index in kept],
            log_offsets=[batch.log_offsets[index] for index in kept],
        )

    # ------------------------------------------------------------ ordered pop

    def _pop_ordered(
        self,
        progress: Progress,
        group: Group,
        want: int,
        visible_at_ms: int,
        tags: frozenset[str],
        attempt_id: str,
        now_ms: int,
    ) -> Batch | None:
        ordered = progress.ordered
        assert ordered is not None, "the progress of an ordered group knows its order"
        table = self._state.table
        self._drop_expired(progress)
        is_repeat = bool(attempt_id) and attempt_id == ordered.attempt_id
        live = self._live_slots(progress)
        if any(table.visible_at_ms[slot] > now_ms for slot in live):
            return self._same_batch(progress, live, want) if is_repeat else None
        if self._state.has_unflushed_acks:
            # A replay meets these acks before the CK that voids what was not acked.
            self._state.flush_acks(now_ms)
        self._dead_letter_exhausted(live, progress, group, now_ms)
        self._skip_expired(progress)
        offsets = sorted(ordered.pending)[:want]
        log_offsets = [progress.queue.entry(offset)[0] for offset in offsets]
        if len(offsets) < want:
            taken = self._take(progress, progress.pop_offset, want - len(offsets), tags)
            if taken is not None:
                offsets += taken.offsets
                log_offsets += taken.log_offsets
                progress.pop_offset = taken.next_offset
        if not offsets:
            return None
        counted = 0 if is_repeat else 1
        attempts = [ordered.pending.get(offset, 1 - counted) + counted for offset in offsets]
        attempts = [max(attempt, 1) for attempt in attempts]
        for slot in self._live_slots(progress):
            self._void(slot, progress)
        batch = self._deliver(
            progress,
            offsets,
            log_offsets,
            visible_at_ms,
            now_ms,
            ordered=_encode_ordered(attempts, attempt_id),
        )
        ordered.pending.update(zip(offsets, attempts, strict=True))
        ordered.attempt_id = attempt_id
        ordered.batch_id = batch.delivery_id
        return self._within_limit(batch, attempts, progress, group, now_ms)

    def _drop_expired(self, progress: Progress) -> None:
        """Settle what retention took from an ordered queue: it can block nobody."""
        assert progress.ordered is not None
        table, pending, low = self._state.table, progress.ordered.pending, progress.queue.min_offset
        gone = [offset for offset in pending if offset < low]
        if not gone:
            return
        for slot in self._live_slots(progress):
            for index in table.indexes_of(table.live[slot]):
                if table.offset_of(slot, index) < low:
                    self._state.settle(slot, 1 << index, progress)
        for offset in gone:
            pending.pop(offset, None)
        self._count("expired_before_revive", progress, len(gone))

    def _live_slots(self, progress: Progress) -> list[int]:
        slots, slot = [], progress.head
        while slot != NIL:
            slots.append(slot)
            slot = self._state.table.next[slot]
        return slots

    def _void(self, slot: int, progress: Progress) -> None:
        """Give up an expired delivery of an ordered queue: its messages are pending again."""
        assert progress.ordered is not None
        pending = dict(progress.ordered.pending)
        self._state.settle(slot, self._state.table.live[slot], progress)
        progress.ordered.pending = pending

    def _same_batch(self, progress: Progress, live: list[int], want: int) -> Batch | None:
        """Return what the repeated attempt already holds, as far as it is not settled."""
        assert progress.ordered is not None
        table = self._state.table
        slot = next((slot for slot in live if table.ids[slot] == progress.ordered.batch_id), None)
        if slot is None:
            return None
        indexes = table.indexes_of(table.live[slot])[:want]
        offsets = [table.offset_of(slot, index) for index in indexes]
        return Batch(
            slot,
            table.ids[slot],
            table.popped_at_ms[slot],
            table.visible_at_ms[slot],
            progress.queue.queue_id,
            indexes,
            offsets,
            [progress.ordered.pending[offset] for offset in offsets],
            [progress.queue.entry(offset)[0] for offset in offsets],
        )

    def _dead_letter_exhausted(
        self, slots: list[int], progress: Progress, group: Group, now_ms: int
    ) -> None:
        assert progress.ordered is not None
        table = self._state.table
        for slot in slots:
            for index in table.indexes_of(table.live[slot]):
                deliveries = progress.ordered.pending.get(table.offset_of(slot, index), 0)
                if deliveries >= group.max_attempts:
                    self._copy_to_dlq(
                        slot, index, progress, Reason.ATTEMPTS_EXHAUSTED, now_ms, deliveries
                    )

    # ------------------------------------------------------------ ack, change, dead-letter

    def ack(self, delivery: Delivery, now_ms: int) -> AckResult:
        """Settle one message of a delivery."""
        table = self._state.table
        slot = delivery.slot
        if slot >= len(table.ids) or table.ids[slot] != delivery.delivery_id:
            result = self._answer_for_missing(delivery, now_ms)
        else:
            progress = self._state.owners[table.owners[slot]]
            bit = 1 << delivery.message_index
            if not self._is_of(progress, delivery) or delivery.message_index >= table.counts[slot]:
                result = AckResult.GONE
            elif table.live[slot] & bit:
                self._state.ack(slot, bit)
                self._state.settle(slot, bit, progress)
                if progress.ordered is not None and progress.head == NIL:
                    self._state.ready.add((progress.group_id, progress.named_topic_id))
                result = AckResult.APPLIED
            else:
                # After the deadline it may as well have been revived or dead-lettered.
                is_gone = table.superseded[slot] & bit or table.visible_at_ms[slot] <= now_ms
                result = AckResult.GONE if is_gone else AckResult.ALREADY
        self._state.counts[result.name, delivery.group_id, delivery.topic_id] += 1
        return result

    @staticmethod
    def _is_of(progress: Progress, delivery: Delivery) -> bool:
        return (
            progress.group_id == delivery.group_id
            and progress.named_topic_id == delivery.topic_id
            and delivery.delivery_id >= progress.void_before
        )

    def _answer_for_missing(self, delivery: Delivery, now_ms: int) -> AckResult:
        """Say what became of a delivery that is not in the table.

        It leaves the table when it is settled by acks, or at its deadline; a replaced one stays
        until then. So before the deadline it can only have been acked.
        """
        if (
            delivery.visible_at_ms <= now_ms
            or delivery.delivery_id >= self._log.log_end
            or delivery.group_id not in self._catalog.groups
            or delivery.topic_id not in self._catalog.topics
        ):
            return AckResult.GONE
        # A reset voids all queues at once, so the first one speaks for all.
        progress = self._state.progress.get((delivery.group_id, delivery.topic_id, 0))
        is_void = progress is not None and delivery.delivery_id < progress.void_before
        return AckResult.GONE if is_void else AckResult.ALREADY

    def _find_live(self, delivery: Delivery) -> Progress:
        """Return the progress of a delivery whose message is live. Raises InvalidReceiptHandle."""
        table = self._state.table
        slot = delivery.slot
        if slot < len(table.ids) and table.ids[slot] == delivery.delivery_id:
            progress = self._state.owners[table.owners[slot]]
            if self._is_of(progress, delivery) and table.live[slot] >> delivery.message_index & 1:
                return progress
        raise InvalidReceiptHandle(
            "the receipt handle names no live delivery: the message was acked, was redelivered "
            "after its invisible duration, or its handle was replaced; use the newest handle"
        )

    def change_invisible(
        self, delivery: Delivery, *, invisible_duration_ms: int, suspend: bool, now_ms: int
    ) -> Delivery:
        """Replace a delivery by one of its message alone, with a deadline of its own.

        0 makes the message available at once. Raises InvalidReceiptHandle.
        """
        progress = self._find_live(delivery)
        state, table = self._state, self._state.table
        if table.used_count >= self._deliveries_max * (1 + CHANGES_RESERVE_PART):
            raise Overloaded(
                "the broker's table of deliveries is full of replaced ones, which it keeps until "
                "their deadlines; change invisible durations less often, or to shorter ones"
            )
        old_slot, old_index = delivery.slot, delivery.message_index
        offset = table.offset_of(old_slot, old_index)
        flags = FLAG_SUPERSEDES | (FLAG_SUSPEND if suspend else 0)
        extra = pop_checkpoint.SUPERSEDED.pack(old_slot, delivery.delivery_id, old_index)
        if progress.ordered is not None:
            flags |= FLAG_ORDERED
            was_suspended = bool(table.flags[old_slot] & FLAG_SUSPEND)
            counted = progress.ordered.pending.get(offset, 1) + was_suspended - suspend
            extra += _encode_ordered([counted], "")
            progress.ordered.pending[offset] = counted
        visible_at_ms = now_ms + invisible_duration_ms
        queue_id = progress.queue.queue_id
        slot = table.allocate()
        body = pop_checkpoint.BODY.pack(
            slot,
            progress.group_id,
            progress.topic_id,
            queue_id,
            1,
            flags,
            pop_checkpoint.revive_queue_of(progress.topic_id, progress.group_id, queue_id),
            offset,
            visible_at_ms,
            progress.pop_offset,
        )
        delivery_id = self._log.append(Kind.CK, body + extra, now_ms)
        self._count("ck", progress, 1)
        state.place(
            progress,
            slot,
            delivery_id,
            start=offset,
            count=1,
            flags=flags,
            visible_at_ms=visible_at_ms,
            popped_at_ms=now_ms,
        )
        state.supersede(old_slot, old_index, progress)
        return delivery._replace(
            slot=slot, delivery_id=delivery_id, message_index=0, visible_at_ms=visible_at_ms
        )

    def dead_letter(self, delivery: Delivery, *, now_ms: int) -> None:
        """Move a delivered message to the group's dead-letter topic, as its client asks."""
        progress = self._find_live(delivery)
        offset = self._state.table.offset_of(delivery.slot, delivery.message_index)
        if progress.ordered is not None:
            attempts = progress.ordered.pending.get(offset, 1)
        else:
            attempts = self._attempts_of(progress, offset)
        self._copy_to_dlq(
            delivery.slot,
            delivery.message_index,
            progress,
            Reason.FORWARDED_BY_CLIENT,
            now_ms,
            attempts,
        )
        if progress.ordered is not None and progress.head == NIL:
            self._state.ready.add((progress.group_id, progress.named_topic_id))

    # ------------------------------------------------------------ revive

    def next_due_ms(self) -> int | None:
        """Return when `run_due` has something to do next, None: never."""
        deadline = self._state.table.next_deadline_ms()
        if not self._due:
            return deadline
        open_groups = [
            group_id
            for group_id in self._due
            if self._window_used.get(group_id, 0) < REVIVE_MESSAGES_A_WINDOW
        ]
        again = 0 if open_groups else self._window_at_ms + REVIVE_WINDOW_MS
        return again if deadline is None else min(again, deadline)

    def revive_lag(self, now_ms: int) -> list[tuple[int, int]]:
        """Return of each revive queue how many deliveries are due, and how late the oldest is.

        Looks at one delivery a group: the oldest of each, whatever its queue.
        """
        late_ms = [0] * pop_checkpoint.REVIVE_QUEUES
        for due in self._due.values():
            slot, _, number = due[0]
            late = now_ms - self._state.table.visible_at_ms[slot]
            late_ms[number] = max(late_ms[number], late)
        return list(zip(self._due_counts, late_ms, strict=True))

    def run_due(self, now_ms: int) -> bool:
        """Revive one slice of what is due; True: more is."""
        if now_ms - self._window_at_ms >= REVIVE_WINDOW_MS:
            self._window_at_ms = now_ms
            self._window_used.clear()
        state, table = self._state, self._state.table
        for slot in table.take_due(now_ms, DUE_SLOTS_A_TURN):
            progress = state.owners[table.owners[slot]]
            if not table.live[slot] or table.ids[slot] < progress.void_before:
                state.discard(slot)
            elif progress.ordered is not None:
                self._expire_ordered(slot, progress, now_ms)
            else:
                due = self._due.setdefault(progress.group_id, deque())
                number = pop_checkpoint.revive_queue_of(
                    progress.topic_id, progress.group_id, progress.queue.queue_id
                )
                due.append((slot, table.ids[slot], number))
                self._due_counts[number] += 1
        left = REVIVE_MESSAGES_A_TURN
        while left > 0 and self._due:
            before = left
            for group_id in list(self._due):
                if self._window_used.get(group_id, 0) < REVIVE_MESSAGES_A_WINDOW:
                    left -= self._revive_next(group_id, now_ms)
            if left == before:
                break
        following = self.next_due_ms()
        return following is not None and following <= now_ms

    def _revive_next(self, group_id: int, now_ms: int) -> int:
        """Revive the next due delivery of a group; return what it cost, in messages."""
        due = self._due[group_id]
        slot, delivery_id, number = due.popleft()
        self._due_counts[number] -= 1
        if not due:
            del self._due[group_id]
        table = self._state.table
        if table.ids[slot] != delivery_id or not table.live[slot]:
            return 1
        progress = self._state.owners[table.owners[slot]]
        if delivery_id < progress.void_before:
            self._state.discard(slot)
            return 1
        indexes = table.indexes_of(table.live[slot])
        for index in indexes:
            self._revive(slot, index, progress, now_ms)
        self._window_used[group_id] = self._window_used.get(group_id, 0) + len(indexes)
        return len(indexes)

    def _expire_ordered(self, slot: int, progress: Progress, now_ms: int) -> None:
        group = self._catalog.groups[progress.group_id]
        self._dead_letter_exhausted([slot], progress, group, now_ms)
        self._state.ready.add((progress.group_id, progress.named_topic_id))

    def _attempts_of(self, progress: Progress, offset: int) -> int:
        """Count the deliveries of a message of a group that is not ordered, this one included."""
        is_gone = offset < progress.queue.min_offset
        if is_gone or progress.topic_id == progress.named_topic_id:
            return 1
        return self._store.place(progress.queue.entry(offset)[0]).attempts + 1

    def _revive(self, slot: int, index: int, progress: Progress, now_ms: int) -> None:
        """Make a message available again: a copy on the retry topic, or the dead-letter one."""
        table = self._state.table
        offset = table.offset_of(slot, index)
        if offset < progress.queue.min_offset:
            # Retention took the original: final, and counted.
            self._count("expired_before_revive", progress, 1)
            self._state.settle(slot, 1 << index, progress)
            return
        attempts = self._attempts_of(progress, offset)
        if table.flags[slot] & FLAG_SUSPEND:
            attempts -= 1
        group = self._catalog.groups[progress.group_id]
        if attempts >= group.max_attempts:
            self._copy_to_dlq(slot, index, progress, Reason.ATTEMPTS_EXHAUSTED, now_ms, attempts)
            return
        retry = self._retry_topic(group, progress.named_topic_id, now_ms)
        self._copy(slot, index, progress, retry, Reason.INVISIBLE_DURATION_ENDED, now_ms, attempts)
        self._count("revived", progress, 1)
        self._state.ready.add((progress.group_id, progress.named_topic_id))

    def _copy_to_dlq(
        self, slot: int, index: int, progress: Progress, reason: Reason, now_ms: int, attempts: int
    ) -> None:
        if self._state.table.offset_of(slot, index) < progress.queue.min_offset:
            self._count("expired_before_revive", progress, 1)
            self._state.settle(slot, 1 << index, progress)
            return
        group = self._catalog.groups[progress.group_id]
        target = self._store.ensure_system_topic(
            DEAD_LETTER_TOPIC_PREFIX + group.name, None, now_ms
        )
        self._copy(slot, index, progress, target, reason, now_ms, attempts)
        self._state.ready_topics.add(target.id)
        self._count("dead_lettered", progress, 1)

    def _retry_topic(self, group: Group, topic_id: int, now_ms: int) -> Topic:
        retry_of = group.id, topic_id
        known = self._catalog.retry_topic_ids.get(retry_of)
        if known is not None:
            return self._catalog.topics[known]
        name = f"{RETRY_TOPIC_PREFIX}{group.name}+{self._catalog.topics[topic_id].name}"
        topic = self._store.ensure_system_topic(name, retry_of, now_ms)
        progress = self._state.progress_of(group.id, topic.id, 0)
        subscription = self._state.subscriptions.get(retry_of)
        if subscription is not None:
            subscription.retry = progress
        return topic

    def _copy(
        self,
        slot: int,
        index: int,
        progress: Progress,
        target: Topic,
        reason: Reason,
        now_ms: int,
        attempts: int,
    ) -> None:
        """Append the copy that settles one message of a delivery."""
        table = self._state.table
        offset = table.offset_of(slot, index)
        original = self._store.record(progress.queue.entry(offset)[0])
        place = Place._make(message.PLACE.unpack_from(original.body))
        if original.header.flags & message.FLAG_CAUSE:
            root = message.decode_cause(original.body)
            origin = root.origin
            root_place = root.root_topic_id, root.root_queue_id, root.root_offset
            first_popped_at_ms = root.first_popped_at_ms
        else:
            origin = self._catalog.topics[progress.named_topic_id].name
            root_place = place.topic_id, place.queue_id, place.queue_offset
            first_popped_at_ms = table.popped_at_ms[slot]
        cause = Cause(
            progress.group_id,
            slot,
            table.ids[slot],
            index,
            reason,
            first_popped_at_ms,
            *root_place,
            origin,
        )
        self._store.append_message(
            target.id,
            0,
            original.tail,
            original.header.tail_crc,
            now_ms,
            attempts=attempts,
            cause=message.encode_cause(cause),
        )
        self._state.settle(slot, 1 << index, progress)

    def _count(self, what: str, progress: Progress, count: int) -> None:
        self._state.counts[what, progress.group_id, progress.named_topic_id] += count


def _rotated(queues: list[Progress], turn: int) -> list[Progress]:
    first = turn % len(queues)
    return queues[first:] + queues[:first]


def _encode_ordered(attempts: list[int], attempt_id: str) -> bytes:
    encoded = attempt_id.encode()
    assert len(encoded) <= pop_checkpoint.ATTEMPT_ID_BYTES_MAX, "the engine refuses longer ones"
    return pop_checkpoint.ATTEMPTS[len(attempts)].pack(*attempts) + bytes([len(encoded)]) + encoded
