"""The pop state: what CK, ACK and copy records, resets and deletions make of it.

Every method that changes something applies one entry of the log: live, in recovery, and in an
engine that only follows. The lists through the delivery table are part of it.

Two things pass without a record, on every engine by its own clock: a delivery that is only kept to
refuse old handles, or that a reset has voided, leaves the table at its deadline (`discard`); and
what is due is taken out of its deadline's list. So an entry may find its slot still in use. What
a deletion has made void, each engine forgets in slices of its own (`forget_some`), and the retry
topics that died with it.

While the slices of a snapshot are of different moments there is a `catch_up`: it says which of them
contains an entry already, and the lists are made at its end.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import TypeAlias, TypeVar, final

import numpy as np

from tidemill.broker.engine.layout.ack import Acks
from tidemill.broker.engine.layout.delivery_rows import DeliveryRows
from tidemill.broker.engine.layout.expiry import ExpiredRange, Expiry
from tidemill.broker.engine.layout.numbers import GroupId, LogOffset, QueueId, TopicId
from tidemill.broker.engine.layout.pop_checkpoint import (
    FLAG_HOLDER,
    FLAG_ORDERED,
    FLAG_RELEASED,
    FLAG_RENEWS,
    FLAG_SUPERSEDES,
    PopCheckpoint,
)
from tidemill.broker.engine.layout.progress_rows import ProgressRow
from tidemill.broker.engine.layout.renewal import Renewal, RenewalReason
from tidemill.broker.engine.layout.snapshot import SLOTS_A_SLICE
from tidemill.broker.engine.layout.state import StatedDeliveries, StatedProgress
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.pop.catch_up import CatchUp
from tidemill.broker.engine.pop.delivery_table import (
    FLAG_DUE,
    FLAGS_STORED,
    FREE,
    NIL,
    UNPROVEN,
    DeliveryTable,
)
from tidemill.broker.engine.pop.owner_numbers import OwnerNumbers
from tidemill.broker.engine.pop.progress import VOID, OrderedState, PopProgress, PopSubscription
from tidemill.broker.engine.tally import Tally
from tidemill.common.histogram import Histogram

# A group, a topic, a queue: each has one progress.
Key: TypeAlias = tuple[GroupId, TopicId, QueueId]
# What is counted of each group and topic that consumers name; the last three are results of acks.
COUNTED = (
    "ck",
    "ack",
    "revived",
    "dead_lettered",
    "damaged",
    "expired",
    "expired_before_revive",
    "filtered_retry",
    "again_expired",
    "again_nack",
    "lock_conflict",
    "extended",
    "given_back_ended",
    "given_back_silent",
    "given_back_unread",
    "given_back_released",
    "APPLIED",
    "ALREADY",
    "GONE",
)
# Upper bounds in milliseconds: of what consumers take, and of how long messages wait for them.
DELIVERY_BUCKETS_MS = (1, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 60_000)
DELIVERIES_A_STATE_RECORD = 1024  # 56 KiB, and their gaps
READERS_LOOK_MAX = 32_768  # queues of a topic's readers, 30 ns each, to name the groups
# From the pop on: what handles of deliveries that renew say of how long they last, since proxies
# pop for push consumers for so long.
RENEWED_HANDLE_MS = 60_000
FORGOTTEN_A_SLICE = 256  # of what was deleted, two microseconds each


@final
class PopState:
    """All deliveries and all progress of all groups."""

    def __init__(self, catalog: Catalog, tally: Tally) -> None:
        self.catalog = catalog
        self._tally = tally
        self.table = DeliveryTable()
        self.progress: dict[Key, PopProgress] = {}
        # Of each group and of each topic: what goes when one of them is deleted.
        self._of_group: dict[GroupId, dict[Key, PopProgress]] = {}
        self._of_topic: dict[TopicId, dict[Key, PopProgress]] = {}
        # Of what was deleted: it is void, and forgotten some a slice.
        self._going: deque[dict[Key, PopProgress]] = deque()
        self._numbers = OwnerNumbers(self.table)
        self.owners = self._numbers.owners  # by the number that slots of the table name
        self.subscriptions: dict[tuple[GroupId, TopicId], PopSubscription] = {}
        self.ready: set[tuple[GroupId, TopicId]] = (
            set()
        )  # (group id, topic id) with new availability
        self.ready_topics: set[TopicId] = set()  # topic ids with new messages, for all groups
        self.counts: Counter[tuple[str, int, int]] = Counter()  # (what, group id, topic id)
        # Milliseconds from a delivery to each ack of it, by group id and topic id.
        self.ack_times_ms: Histogram[tuple[GroupId, TopicId]] = Histogram(DELIVERY_BUCKETS_MS)
        self.catch_up: CatchUp | None = None

    def progress_of(self, group_id: GroupId, topic_id: TopicId, queue_id: QueueId) -> PopProgress:
        """Return the progress of a group in a queue, made when it is new."""
        key = group_id, topic_id, queue_id
        progress = self.progress.get(key)
        if progress is None:
            progress = self._new_progress(key, index=self._numbers.next())
            self._numbers.add(progress)
            self.progress[key] = progress
            self._of_group.setdefault(group_id, {})[key] = progress
            self._of_topic.setdefault(topic_id, {})[key] = progress
        return progress

    def look_at(self, key: Key) -> PopProgress:
        """Return the progress of a group in a queue; where it has none, how it would begin.

        Looking changes nothing: what was made for it belongs to nobody.
        """
        progress = self.progress.get(key)
        return self._new_progress(key, index=NIL) if progress is None else progress

    def _new_progress(self, key: Key, *, index: int) -> PopProgress:
        group_id, topic_id, queue_id = key
        topic, group = self.catalog.topics.get(topic_id), self.catalog.groups.get(group_id)
        return PopProgress(
            index=index,
            group_id=group_id,
            topic_id=topic_id,
            named_topic_id=topic.retry_of[1] if topic is not None and topic.retry_of else topic_id,
            queue=self.catalog.queue(topic_id, queue_id),
            ordered=OrderedState() if group is not None and group.is_ordered else None,
        )

    def count_again(self, slot: int, progress: PopProgress, count: int) -> None:
        """Count messages of a delivery that has run out, and that are delivered once more."""
        # Who gives a message back replaces its delivery by a shorter one.
        is_nack = self.table.flags[slot] & FLAG_SUPERSEDES
        self.count("again_nack" if is_nack else "again_expired", progress, count)

    def count(self, what: str, progress: PopProgress, count: int) -> None:
        """Count something that happened to a group's messages, for the metrics."""
        self.counts[what, progress.group_id, progress.named_topic_id] += count

    def deliveries_of(self, progress: PopProgress) -> list[int]:
        """Return the slots of a queue's live deliveries in pop order."""
        slots, slot = [], progress.head
        while slot != NIL:
            slots.append(slot)
            slot = self.table.next[slot]
        return slots

    def is_due(self, slot: int) -> bool:
        """Whether a slot holds a delivery that was taken out of its deadline's list."""
        return self.table.ids[slot] != FREE and bool(self.table.flags[slot] & FLAG_DUE)

    # ------------------------------------------------------------ CK

    def apply_checkpoint(self, ck: PopCheckpoint, log_offset: LogOffset, popped_at_ms: int) -> None:
        """Apply a CK record: a delivery, and what it replaces."""
        # At once: every pop passes here, and field by field it would cost twice as much.
        slot, group_id, topic_id, queue_id, _, flags, _, _, _, next_offset, *_ = ck
        progress = self.progress.get((group_id, topic_id, queue_id))
        if progress is None:
            progress = self.progress_of(group_id, topic_id, queue_id)
        catch_up = self.catch_up
        if catch_up is None or catch_up.is_new_to_progress(progress, log_offset):
            if not flags & FLAG_SUPERSEDES:
                progress.pop_offset = progress.position = next_offset
                if not progress.void_before:
                    progress.stated_at = log_offset
            if flags & FLAG_ORDERED:
                self._apply_ordered(progress, ck, log_offset)
        if flags & FLAG_SUPERSEDES and ck.superseded is not None:
            self._supersede(*ck.superseded, log_offset, popped_at_ms)
        if catch_up is None or catch_up.is_new_to_slot(slot, progress, log_offset):
            self._place(ck, progress, log_offset, popped_at_ms)

    def _apply_ordered(
        self, progress: PopProgress, ck: PopCheckpoint, log_offset: LogOffset
    ) -> None:
        assert ck.attempts is not None, "a CK of an ordered group has attempts"
        ordered = progress.ordered
        if ordered is None:
            # The record that states the group comes later: this replay began behind the first one.
            ordered = progress.ordered = OrderedState()
        if not ck.flags & FLAG_SUPERSEDES:
            # A new batch voids what was out and not settled; its messages stay pending.
            for slot in self.deliveries_of(progress):
                live = self.table.live[slot]
                progress.in_flight -= live.bit_count()
                if self.table.flags[slot] & FLAG_RELEASED:
                    # Its handles say that they last: until then they must be refused.
                    self.table.superseded[slot] |= live
                self._remove(slot, live, progress)
            ordered.attempt_id, ordered.batch_id = ck.attempt_id, log_offset
            # A batch is of the lowest messages that are left: what else is below its last one,
            # retention took, or it does not match the filter any more.
            offsets = ck.offsets
            for offset in [
                offset
                for offset in ordered.pending
                if offset < offsets[-1] and offset not in offsets
            ]:
                del ordered.pending[offset]
        ordered.pending.update(zip(ck.offsets, ck.attempts, strict=True))

    def _place(
        self, ck: PopCheckpoint, progress: PopProgress, delivery_id: int, popped_at_ms: int
    ) -> None:
        table = self.table
        slot, _, _, _, count, flags, _, start, visible_at_ms, _, gaps, *_, client_id, renews = ck
        if flags & FLAG_HOLDER and not renews:
            flags &= ~FLAG_RENEWS  # It stands where HOLDER does.
        if slot >= len(table.ids):
            table.grow_to(slot + 1)
        if table.ids[slot] != FREE:
            if self.catch_up is not None and not self.catch_up.may_place(slot, delivery_id):
                self.catch_up.note_displaced(slot, delivery_id, progress, list(ck.offsets))
                return
            self.discard(slot)
        table.place(
            slot,
            delivery_id,
            progress.index,
            start,
            count,
            flags,
            visible_at_ms,
            popped_at_ms,
            gaps,
            client_id,
        )
        if self.catch_up is not None:
            return
        # As the newest of its queue.
        tail = progress.tail
        table.previous[slot] = tail
        table.next[slot] = NIL
        if tail == NIL:
            progress.head = slot
        else:
            table.next[tail] = slot
        progress.tail = slot
        progress.in_flight += count
        if progress.oldest == NIL and not flags & FLAG_SUPERSEDES:
            progress.oldest = slot
        table.watch(slot)

    def apply_renewal(self, renewal: Renewal, log_offset: LogOffset, _stored_at_ms: int) -> None:
        """Apply a RENEW record: what is live of its deliveries runs out at another time."""
        visible_at_ms, why, _, entries = renewal
        table = self.table
        for slot, delivery_id in entries:
            progress = self._owner(slot, delivery_id, log_offset)
            if progress is None or not table.live[slot]:
                continue
            if why is RenewalReason.HANDED_OVER:
                table.flags[slot] |= FLAG_RENEWS
            elif why is not RenewalReason.EXTENDED:
                table.flags[slot] &= ~FLAG_RENEWS
            table.on_its_way[slot] = UNPROVEN if why is RenewalReason.NOT_HANDED_OVER else 0
            if self.catch_up is None:
                table.move(slot, visible_at_ms)
            else:
                table.visible_at_ms[slot] = visible_at_ms

    # ------------------------------------------------------------ settling

    def apply_acks(self, acks: Acks, log_offset: LogOffset, _acked_at_ms: int) -> None:
        """Apply an ACK record."""
        for slot, delivery_id, bits in acks.entries:
            self.settle(slot, delivery_id, bits, log_offset)

    def settle(self, slot: int, delivery_id: int, bits: int, log_offset: LogOffset) -> None:
        """Settle messages of a delivery: acked, expired, or copied elsewhere."""
        table = self.table
        progress = self._owner(slot, delivery_id, log_offset)
        if progress is None:
            if self.catch_up is not None:
                self.catch_up.settle_displaced(slot, delivery_id, bits, log_offset)
            return
        if progress.ordered is not None:
            # Also of bits that the slot's slice of a snapshot has lost already: the queue's may
            # be of an earlier moment.
            for index in table.indexes_of(bits):
                progress.ordered.pending.pop(table.offset_of(slot, index), None)
        bits &= table.live[slot]
        if not bits:
            return
        progress.in_flight -= bits.bit_count()
        self._remove(slot, bits, progress)

    def _supersede(
        self, slot: int, delivery_id: int, index: int, log_offset: LogOffset, now_ms: int
    ) -> None:
        """Note that another delivery has taken the place of one message of this one."""
        progress = self._owner(slot, delivery_id, log_offset)
        if progress is None:
            return
        table, bit = self.table, 1 << index
        table.superseded[slot] |= bit
        if not table.live[slot] & bit:
            return
        progress.in_flight -= 1
        is_last = table.live[slot] == bit
        if is_last and table.flags[slot] & FLAG_RENEWS and self._handles_end_ms(slot) <= now_ms:
            # Its handles have ended and are refused by that: nothing is to be remembered of them.
            table.superseded[slot] = 0
        self._remove(slot, bit, progress)

    def _handles_end_ms(self, slot: int) -> int:
        """Return until when the handles of a delivery that renews say that they last."""
        return self.table.popped_at_ms[slot] + RENEWED_HANDLE_MS

    def end_with_handles(self, slots: np.ndarray) -> None:
        """Let slots that renew and have nothing live end when their handles do, as `_remove`."""
        table = self.table
        flags = np.frombuffer(table.flags, dtype=np.uint8)
        renewed = slots[flags[slots] & FLAG_RENEWS > 0]
        ends_ms = np.frombuffer(table.popped_at_ms, dtype=np.int64)[renewed] + RENEWED_HANDLE_MS
        visible_at_ms = np.frombuffer(table.visible_at_ms, dtype=np.int64)
        visible_at_ms[renewed] = np.minimum(visible_at_ms[renewed], ends_ms)

    def _owner(self, slot: int, delivery_id: int, log_offset: LogOffset) -> PopProgress | None:
        """Return the progress of a delivery that is in the table; None where it is not, or void."""
        table = self.table
        if slot >= len(table.ids) or table.ids[slot] != delivery_id:
            return None
        progress = self.owners[table.owners[slot]]
        if delivery_id < progress.void_before:
            return None
        catch_up = self.catch_up
        if catch_up is not None and not catch_up.is_new_to_slot(slot, progress, log_offset):
            return None
        return progress

    def _remove(self, slot: int, bits: int, progress: PopProgress) -> None:
        table = self.table
        left = table.live[slot] & ~bits
        table.live[slot] = left
        if left:
            return
        if self.catch_up is not None:
            if not table.superseded[slot]:
                table.release(slot)
            elif table.flags[slot] & FLAG_RENEWS:
                ends_ms = self._handles_end_ms(slot)
                table.visible_at_ms[slot] = min(table.visible_at_ms[slot], ends_ms)
            return
        self._unlink(slot, progress)
        if not table.superseded[slot] or table.flags[slot] & FLAG_DUE:
            table.unwatch(slot)
            table.release(slot)
        elif table.flags[slot] & FLAG_RENEWS:
            # It stays as long as its handles last, which must keep being refused; its own deadline
            # may have been moved hours ahead.
            table.move(slot, min(table.visible_at_ms[slot], self._handles_end_ms(slot)))
        # Otherwise it stays until its deadline, for the same reason.

    def _unlink(self, slot: int, progress: PopProgress) -> None:
        table = self.table
        before, after = table.previous[slot], table.next[slot]
        if after == NIL:
            progress.tail = before
        else:
            table.previous[after] = before
        if before == NIL:
            progress.head = after
        else:
            table.next[before] = after
        if slot == progress.oldest:
            while after != NIL and table.flags[after] & FLAG_SUPERSEDES:
                after = table.next[after]
            progress.oldest = after

    def discard(self, slot: int) -> None:
        """Empty a slot whose delivery is void, or whose messages are all settled or replaced."""
        table = self.table
        if self.catch_up is None:
            progress = self.owners[table.owners[slot]]
            if table.live[slot] and table.ids[slot] >= progress.void_before:
                # The log has no record that settles this delivery.
                progress.in_flight -= table.live[slot].bit_count()
                self._unlink(slot, progress)
            table.unwatch(slot)
        table.release(slot)

    # ------------------------------------------------------------ retention

    def apply_expiry(self, expiry: Expiry, log_offset: LogOffset, _expired_at_ms: int) -> None:
        """Apply an EXPIRE record: groups go on behind what they never popped and cannot get."""
        for group_id, topic_id, queue_id, begin, end in expiry.ranges:
            progress = self.progress.get((group_id, topic_id, queue_id))
            if progress is None:
                progress = self.progress_of(group_id, topic_id, queue_id)
            if self.catch_up and not self.catch_up.is_new_to_progress(progress, log_offset):
                continue
            if progress.ordered is not None:
                pending = progress.ordered.pending
                for offset in [offset for offset in pending if begin <= offset < end]:
                    del pending[offset]
            if progress.position < end:
                progress.pop_offset = progress.position = end

    def find_expired(self, progress: PopProgress, end: int) -> list[ExpiredRange]:
        """Return what a group has not been given of what is before `end` and about to go.

        Of an ordered queue also what was given, was not settled, and nobody holds now. What is in
        flight is left out: it may still be acked.
        """
        low, position = progress.queue.min_offset, progress.position
        key = progress.group_id, progress.topic_id, progress.queue.queue_id
        ordered = progress.ordered
        held: set[int] = set()
        if ordered is not None and ordered.pending:
            table = self.table
            held = {
                table.offset_of(slot, index)
                for slot in self.deliveries_of(progress)
                for index in table.indexes_of(table.live[slot])
            }
        found: list[ExpiredRange] = []
        for offset in sorted(ordered.pending) if ordered is not None else ():
            if low <= offset < min(end, position) and offset not in held:
                if found and found[-1].end == offset:
                    found[-1] = found[-1]._replace(end=offset + 1)
                else:
                    found.append(ExpiredRange(*key, offset, offset + 1))
        begin = max(position, low)
        if begin < end:
            found.append(ExpiredRange(*key, begin, end))
        return found

    # ------------------------------------------------------------ resets, deletions, configuration

    def apply_reset(
        self,
        group_id: GroupId,
        offsets: Iterable[tuple[TopicId, QueueId, int]],
        log_offset: LogOffset,
    ) -> None:
        """Set positions (topic id, queue id, offset); everything delivered before is void."""
        for topic_id, queue_id, offset in offsets:
            progress = self.progress_of(group_id, topic_id, queue_id)
            if self.catch_up and not self.catch_up.is_new_to_progress(progress, log_offset):
                continue
            self._void(progress, log_offset)
            progress.pop_offset = progress.position = offset
            if progress.ordered is not None:
                progress.ordered = OrderedState()
            self.ready.add((progress.group_id, progress.named_topic_id))

    def _void(self, progress: PopProgress, log_offset: LogOffset) -> None:
        # Slots are emptied when their deadlines come: a reset costs the same at any size. Those of
        # an ordered queue, a batch at most, may be past theirs and wait for a pop.
        if progress.ordered is not None:
            for slot in self.deliveries_of(progress):
                if self.table.flags[slot] & FLAG_DUE:
                    self.table.release(slot)
        progress.void_before = log_offset
        progress.head = progress.tail = progress.oldest = NIL
        progress.in_flight = 0
        progress.stated_at = log_offset

    def forget_topic(self, topic_id: TopicId) -> None:
        """Void everything of a topic that is gone from the catalog, and of its retry topics."""
        self._going.append(self._of_topic.pop(topic_id, {}))
        self._begin_to_forget()

    def forget_group(self, group_id: GroupId) -> None:
        """Void everything of a group that is gone from the catalog."""
        self._going.append(self._of_group.pop(group_id, {}))
        self._begin_to_forget()

    def _begin_to_forget(self) -> None:
        self.forget_some()
        # The end of catching up drops and numbers all of it at once.
        while self.catch_up is not None and self._has_void:
            self.forget_some()

    @property
    def _has_void(self) -> bool:
        """Whether there is progress of what was deleted."""
        return bool(self._going or self.catalog.orphans)

    @property
    def is_forgetting(self) -> bool:
        """Whether `forget_some` has something to do."""
        return self._has_void or self._numbers.has_retired

    def forget_some(self) -> None:
        """Forget one slice of what was deleted."""
        count = 0
        while self.catalog.orphans and count < FORGOTTEN_A_SLICE:
            of_topic = self._of_topic.pop(self.catalog.forget_next(), None)
            if of_topic is not None:
                self._going.append(of_topic)
            count += 1
        while self._going and count < FORGOTTEN_A_SLICE:
            if self._going[0]:
                _, progress = self._going[0].popitem()
                self._forget(progress)
                count += 1
            else:
                self._going.popleft()
        self._tally.add(count)
        if not count and self._numbers.has_retired:
            self._numbers.sweep()

    def is_gone(self, progress: PopProgress) -> bool:
        """Whether a group or topic was deleted, whose progress is not forgotten yet."""
        catalog = self.catalog
        return progress.group_id not in catalog.groups or not catalog.is_alive(progress.topic_id)

    def is_void(self, progress: PopProgress, delivery_id: int) -> bool:
        """Whether a reset or a deletion came after a delivery of a queue was made."""
        if delivery_id < progress.void_before:
            return True
        # Not `_has_void`: every ack passes here.
        return bool(self._going or self.catalog.orphans) and self.is_gone(progress)

    def _forget(self, progress: PopProgress) -> None:
        self._void(progress, LogOffset(VOID))
        self.drop(progress)
        pair = progress.group_id, progress.topic_id
        if progress.queue.queue_id == 0:  # Once for all queues.
            self.subscriptions.pop(pair, None)
            for what in COUNTED:
                self.counts.pop((what, *pair), None)
            self.ack_times_ms.drop(pair)

    def drop(self, progress: PopProgress) -> None:
        """Take away a progress whose deliveries are void: its group or topic is gone."""
        group_id, topic_id = progress.group_id, progress.topic_id
        key = group_id, topic_id, progress.queue.queue_id
        if self.progress.get(key) is not progress:
            return  # Its group and its topic were deleted, one behind the other.
        del self.progress[key]
        _take_out(self._of_group, group_id, key)
        _take_out(self._of_topic, topic_id, key)
        if self.catch_up is None:
            self._numbers.retire(progress)

    def renumber(self) -> None:
        """Forget what was dropped while catching up: no slot in use names it."""
        self._numbers.renumber(list(self.progress.values()))

    def topic_ids_of(self, group_id: GroupId) -> set[TopicId]:
        """Return which topics a group has begun to read."""
        # By the keys, and without a loop over them: a group may have tens of thousands.
        topic_ids = set(map(itemgetter(1), self._of_group.get(group_id, ())))
        return topic_ids & self.catalog.topics.keys()

    def group_ids_of(self, topic_id: TopicId) -> set[GroupId]:
        """Return which groups have begun to read a topic, of those with a few queues each.

        Of a topic that many groups read with many queues not all: the look at it is bounded.
        """
        keys = islice(self._of_topic.get(topic_id, ()), READERS_LOOK_MAX)
        return set(map(itemgetter(0), keys)) & self.catalog.groups.keys()

    def add_retry_topic(
        self, group_id: GroupId, topic_id: TopicId, retry_topic_id: TopicId
    ) -> None:
        """Let a group's pops of a topic look at its retry topic too."""
        progress = self.progress_of(group_id, retry_topic_id, QueueId(0))
        progress.named_topic_id = topic_id
        subscription = self.subscriptions.get((group_id, topic_id))
        if subscription is not None:
            subscription.retry = progress

    # ------------------------------------------------------------ rows

    def apply_stated_progress(
        self, entry: StatedProgress, log_offset: LogOffset, _stored_at_ms: int
    ) -> None:
        """Apply a STATE record of progress."""
        self.apply_progress(entry.rows, log_offset)

    def apply_progress(self, rows: list[ProgressRow], log_offset: LogOffset) -> list[PopProgress]:
        """Take positions over that contain everything before `log_offset`; return whose."""
        taken = []
        for row in rows:
            progress = self.progress_of(row.group_id, row.topic_id, row.queue_id)
            if self.catch_up and not self.catch_up.is_new_to_progress(progress, log_offset):
                continue
            progress.pop_offset = progress.position = row.pop_offset
            progress.void_before = row.void_before
            progress.named_topic_id = row.named_topic_id
            progress.stated_at = log_offset
            if row.ordered is not None:
                progress.ordered = OrderedState(
                    dict(row.ordered.pending), row.ordered.attempt_id, row.ordered.batch_id
                )
            taken.append(progress)
        return taken

    def apply_stated_deliveries(
        self, entry: StatedDeliveries, log_offset: LogOffset, _stored_at_ms: int
    ) -> None:
        """Note where live deliveries are stated now, their times, and which were released.

        Takes over, while catching up, those that nothing else states.
        """
        deliveries = entry.deliveries
        table, rows = self.table, deliveries.rows
        is_new = np.ones(len(rows), dtype=bool)
        if self.catch_up is not None:
            client_ids, holders = ("", *deliveries.clients), deliveries.holder_numbers
            for number, row in enumerate(rows.tolist()):
                progress = self.progress_of(*row[2:5])
                is_new[number] = self.catch_up.is_new_to_slot(row[0], progress, log_offset)
                if is_new[number]:
                    self.load_row(
                        row, deliveries.gaps.get(number), client_ids[int(holders[number])]
                    )
        is_inside = rows["slot"] < len(table.ids)
        rows, is_new = rows[is_inside], is_new[is_inside]
        slots = rows["slot"].astype(np.int64)
        is_same = np.frombuffer(table.ids, dtype=np.int64)[slots] == rows["delivery_id"]
        np.frombuffer(table.stated_at, dtype=np.int64)[slots[is_same]] = log_offset
        is_released = is_same & is_new & (rows["flags"] & FLAG_RELEASED > 0)
        np.frombuffer(table.flags, dtype=np.uint8)[slots[is_released]] |= FLAG_RELEASED
        # Other ones than before only where a start has brought them back from the future.
        is_moved = (
            np.frombuffer(table.visible_at_ms, dtype=np.int64)[slots] != rows["visible_at_ms"]
        )
        changed = is_same & is_new & is_moved
        table.set_times(slots[changed], rows[changed], is_linked=self.catch_up is None)

    def brought_back(self, now_ms: int) -> Iterator[StatedDeliveries]:
        """Yield what states that deliveries that were popped in the future begin now.

        An earlier process popped them by a clock that was ahead: they stay hidden for as long as
        was asked for, counted from here.
        """
        slots = self.table.popped_ahead_of(now_ms)
        for begin in range(0, len(slots), DELIVERIES_A_STATE_RECORD):
            deliveries = self.rows_of(slots[begin : begin + DELIVERIES_A_STATE_RECORD])
            rows = deliveries.rows
            rows["visible_at_ms"] += now_ms - rows["popped_at_ms"]
            rows["popped_at_ms"] = now_ms
            yield StatedDeliveries(deliveries)

    def load_row(self, row: tuple[int, ...], gaps: tuple[int, ...] | None, client_id: str) -> None:
        """Take one row over while catching up; the latest use of a slot wins."""
        slot, delivery_id, group_id, topic_id, queue_id, count, flags, *rest = row
        start, visible_at_ms, popped_at_ms, live, superseded = rest
        assert self.catch_up is not None, "rows are taken over while the state catches up"
        table = self.table
        table.grow_to(slot + 1)
        self.catch_up.displace(slot)
        if table.ids[slot] != FREE:
            if not self.catch_up.may_place(slot, delivery_id):
                return
            table.release(slot)
        progress = self.progress_of(GroupId(group_id), TopicId(topic_id), QueueId(queue_id))
        if flags & FLAG_ORDERED and progress.ordered is None:
            progress.ordered = OrderedState()
        table.place(
            slot,
            delivery_id,
            progress.index,
            start,
            count,
            flags & FLAGS_STORED,
            visible_at_ms,
            popped_at_ms,
            gaps,
            client_id,
        )
        table.live[slot] = live
        table.superseded[slot] = superseded
        table.on_its_way[slot] = flags & UNPROVEN

    def rows_of(self, slots: np.ndarray) -> DeliveryRows:
        """Return deliveries as rows for a snapshot or a STATE record."""
        owners = np.frombuffer(self.table.owners, dtype=np.uint32)[slots]
        used, used_at = np.unique(owners, return_inverse=True)
        places = [
            (owner.group_id, owner.topic_id, owner.queue.queue_id)
            for owner in (self.owners[index] for index in used.tolist())
        ]
        of_used = np.array(places, dtype=np.uint32).reshape(-1, 3)
        return self.table.rows_of(slots, of_used[used_at])

    def slices(self) -> Iterator[tuple[int, int]]:
        """Yield the slot ranges of the table, one a section of a snapshot."""
        for begin in range(0, len(self.table.ids), SLOTS_A_SLICE):
            yield begin, begin + SLOTS_A_SLICE

    # ------------------------------------------------------------ what is known

    def consumer_offset(self, progress: PopProgress) -> int:
        """Return the offset below which all is settled or delivered; only a reset lowers it."""
        if progress.ordered is not None:
            return min(progress.ordered.pending, default=progress.position)
        if progress.oldest == NIL:
            return progress.position
        return self.table.starts[progress.oldest]

    def locks(self, slot: int, now_ms: int) -> bool:
        """Whether a live delivery of an ordered queue keeps the next pop from its messages.

        One that renews does until revive has looked at its deadline: it may be extended.
        """
        flags = self.table.flags[slot]
        if flags & FLAG_RELEASED:
            return False
        is_undecided = flags & (FLAG_RENEWS | FLAG_DUE) == FLAG_RENEWS
        return is_undecided or self.table.visible_at_ms[slot] > now_ms

    def locking_slots(self, progress: PopProgress) -> list[int]:
        """Return the slots whose deliveries lock an ordered queue, in pop order."""
        if progress.ordered is None:
            return []
        flags = self.table.flags
        return [
            slot
            for slot in self.deliveries_of(progress)
            if not flags[slot] & (FLAG_DUE | FLAG_RELEASED)
        ]

    def expired_ordered_count(self, progress: PopProgress) -> int:
        """Count the messages of an ordered queue whose delivery has run out, or was released."""
        if progress.ordered is None:
            return 0
        table = self.table
        return sum(
            table.live[slot].bit_count()
            for slot in self.deliveries_of(progress)
            if table.flags[slot] & (FLAG_DUE | FLAG_RELEASED)
        )


_Id = TypeVar("_Id", GroupId, TopicId)


def _take_out(of_each: dict[_Id, dict[Key, PopProgress]], id_: _Id, key: Key) -> None:
    known = of_each.get(id_)
    if known is not None:
        known.pop(key, None)
        if not known:
            del of_each[id_]
