"""The pop state: the fold of CK, ACK, reset and copy records.

Live path and replay share what is here. Live, the lists that run through the delivery table are
kept up with every change; a replay leaves them alone and rebuilds them once at its end, because the
slices of a snapshot are of different moments: `covered` of a slice says which records it already
contains.

Settling happens in memory at once, in the log by one ACK record a round (`flush_acks`); a slot that
became empty is given out again only behind that record, so that replay meets the two in this order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, final

import numpy as np

from tidemill.broker.engine.layout import ack
from tidemill.broker.engine.layout.pop_checkpoint import (
    FLAG_GAPS,
    FLAG_ORDERED,
    FLAG_SUPERSEDES,
    PopCheckpoint,
)
from tidemill.broker.engine.layout.record import Kind
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.pop.delivery_table import (
    FLAG_DUE,
    FLAGS_STORED,
    FREE,
    NIL,
    DeliveryTable,
)
from tidemill.broker.engine.pop.progress import VOID, OrderedState, Progress, Subscription
from tidemill.broker.engine.store.commit_log import CommitLog

SLOTS_A_SLICE = 2048  # of the delivery table in one section of a snapshot


@final
class PopState:
    """All deliveries and all progress of all groups."""

    def __init__(self, log: CommitLog, catalog: Catalog) -> None:
        self.log = log
        self.catalog = catalog
        self.table = DeliveryTable()
        self.progress: dict[tuple[int, int, int], Progress] = {}
        self.owners: list[Progress] = []
        self.subscriptions: dict[tuple[int, int], Subscription] = {}
        self.ready: set[tuple[int, int]] = set()  # (group id, topic id) with new availability
        self.ready_topics: set[int] = set()  # topic ids with new messages, for all groups
        self.counts: Counter[tuple[str, int, int]] = Counter()  # (what, group id, topic id)
        self._acked: dict[int, int] = {}  # slot -> bits settled by acks of this round
        self._settled: list[int] = []
        self._slot_covered: dict[int, int] = {}
        # While replaying: (slot, delivery id) of deliveries of ordered queues whose slot is used
        # again in a later section of the snapshot, with what their settlement must still reach.
        self._displaced: dict[tuple[int, int], tuple[Progress, list[int]]] = {}

    def progress_of(self, group_id: int, topic_id: int, queue_id: int) -> Progress:
        """Return the progress of a group in a queue, made when it is new."""
        key = group_id, topic_id, queue_id
        progress = self.progress.get(key)
        if progress is None:
            topic = self.catalog.topics.get(topic_id)
            named = topic.retry_of[1] if topic is not None and topic.retry_of else topic_id
            group = self.catalog.groups.get(group_id)
            progress = Progress(
                index=len(self.owners),
                group_id=group_id,
                topic_id=topic_id,
                named_topic_id=named,
                queue=self.catalog.queue(topic_id, queue_id),
                ordered=OrderedState() if group is not None and group.is_ordered else None,
            )
            self.owners.append(progress)
            self.progress[key] = progress
        return progress

    def count(self, what: str, progress: Progress, count: int) -> None:
        """Count something that happened to a group's messages, for the metrics."""
        self.counts[what, progress.group_id, progress.named_topic_id] += count

    # ------------------------------------------------------------ live path

    def place(
        self,
        progress: Progress,
        slot: int,
        delivery_id: int,
        *,
        start: int,
        count: int,
        flags: int,
        visible_at_ms: int,
        popped_at_ms: int,
        gaps: tuple[int, ...] | None = None,
    ) -> None:
        """Take a new delivery in."""
        table = self.table
        table.place(
            slot, delivery_id, progress.index, start, count, flags, visible_at_ms, popped_at_ms,
            gaps,
        )  # fmt: skip
        tail = progress.tail
        table.previous[slot] = tail
        table.next[slot] = NIL
        if tail == NIL:
            progress.head = slot
        else:
            table.next[tail] = slot
        progress.tail = slot
        progress.in_flight += count
        if not flags & FLAG_SUPERSEDES:
            if progress.oldest == NIL:
                progress.oldest = slot
            if not progress.void_before:
                progress.stated_at = delivery_id
        table.watch(slot)

    def settle(self, slot: int, bits: int, progress: Progress) -> None:
        """Settle live messages of a delivery, by whatever came."""
        table = self.table
        progress.in_flight -= bits.bit_count()
        if progress.ordered is not None:
            for index in table.indexes_of(bits):
                progress.ordered.pending.pop(table.offset_of(slot, index), None)
        self._remove(slot, bits, progress)

    def supersede(self, slot: int, index: int, progress: Progress) -> None:
        """Note that another delivery has taken the place of this one's message."""
        self.table.superseded[slot] |= 1 << index
        progress.in_flight -= 1
        self._remove(slot, 1 << index, progress)

    def _remove(self, slot: int, bits: int, progress: Progress) -> None:
        table = self.table
        left = table.live[slot] & ~bits
        table.live[slot] = left
        if left:
            return
        self._unlink(slot, progress)
        if not table.superseded[slot] or table.flags[slot] & FLAG_DUE:
            table.unwatch(slot)
            self._settled.append(slot)
        # Otherwise it stays until its deadline: its old handles must keep being refused.

    def _unlink(self, slot: int, progress: Progress) -> None:
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

    def consumer_offset(self, progress: Progress) -> int:
        """Return the offset below which all is settled or delivered; only a reset lowers it."""
        if progress.ordered is not None:
            return min(progress.ordered.pending, default=progress.pop_offset)
        if progress.oldest == NIL:
            return progress.pop_offset
        return self.table.starts[progress.oldest]

    def expired_ordered_count(self, progress: Progress) -> int:
        """Count the messages of an ordered queue whose delivery has run out."""
        if progress.ordered is None:
            return 0
        table, slot, count = self.table, progress.head, 0
        while slot != NIL:
            if table.flags[slot] & FLAG_DUE:
                count += table.live[slot].bit_count()
            slot = table.next[slot]
        return count

    def discard(self, slot: int) -> None:
        """Empty a slot that is in no list: void, or only kept to refuse old handles."""
        self._settled.append(slot)

    def ack(self, slot: int, bit: int) -> None:
        """Note an ack for the round's ACK record."""
        self._acked[slot] = self._acked.get(slot, 0) | bit

    def flush_acks(self, now_ms: int) -> None:
        """Put the round's acks into the log, and give the emptied slots out again."""
        if self._acked:
            ids, pack = self.table.ids, ack.ENTRY.pack
            for slot in self._acked:
                owner = self.owners[self.table.owners[slot]]
                self.counts["ack", owner.group_id, owner.named_topic_id] += 1
            entries = [pack(slot, ids[slot], bits) for slot, bits in self._acked.items()]
            for begin in range(0, len(entries), ack.ENTRIES_MAX):
                body = b"".join(entries[begin : begin + ack.ENTRIES_MAX])
                self.log.append(Kind.ACK, body, now_ms)
            self._acked.clear()
        if self._settled:
            for slot in self._settled:
                self.table.release(slot)
            self._settled.clear()

    @property
    def has_unflushed_acks(self) -> bool:
        """Whether memory is ahead of the pending records."""
        return bool(self._acked)

    @property
    def has_unflushed(self) -> bool:
        """Whether `flush_acks` has anything to do."""
        return bool(self._acked or self._settled)

    # ------------------------------------------------------------ reset, deletion

    def apply_reset(self, config: dict[str, Any], log_offset: int) -> None:
        """Fold a reset in: positions are set, and everything delivered before is void."""
        for topic_id, queue_id, offset in config["offsets"]:
            progress = self.progress_of(config["group_id"], topic_id, queue_id)
            if log_offset < progress.covered:
                continue
            self._void(progress, log_offset)
            progress.pop_offset = offset
            if progress.ordered is not None:
                progress.ordered = OrderedState()
            self.ready.add((progress.group_id, progress.named_topic_id))

    def _void(self, progress: Progress, log_offset: int) -> None:
        # Slots are emptied when their deadlines come: a reset costs the same at any size. Those of
        # an ordered queue, a batch at most, may be past theirs and wait for a pop.
        slot = progress.head if progress.ordered is not None else NIL
        while slot != NIL:
            if self.table.flags[slot] & FLAG_DUE:
                self.discard(slot)
            slot = self.table.next[slot]
        progress.void_before = log_offset
        progress.head = progress.tail = progress.oldest = NIL
        progress.in_flight = 0
        progress.stated_at = log_offset

    def forget(self, *, group_id: int | None = None, topic_id: int | None = None) -> None:
        """Void everything of a group or topic that is gone."""
        for key, progress in list(self.progress.items()):
            if progress.group_id == group_id or topic_id in (
                progress.topic_id,
                progress.named_topic_id,
            ):
                self._void(progress, VOID)
                del self.progress[key]
        for pair in list(self.subscriptions):
            if pair[0] == group_id or pair[1] == topic_id:
                del self.subscriptions[pair]

    # ------------------------------------------------------------ replay

    def replay_ck(self, ck: PopCheckpoint, log_offset: int, popped_at_ms: int) -> None:
        """Fold a CK record in."""
        progress = self.progress_of(ck.group_id, ck.topic_id, ck.queue_id)
        if ck.flags & FLAG_ORDERED and progress.ordered is None:
            progress.ordered = OrderedState()
        if log_offset >= progress.covered:
            if not ck.flags & FLAG_SUPERSEDES:
                progress.pop_offset = ck.next_offset
                if not progress.void_before:
                    progress.stated_at = log_offset
            if progress.ordered is not None and ck.attempts is not None:
                progress.ordered.pending.update(zip(ck.offsets, ck.attempts, strict=True))
                if not ck.flags & FLAG_SUPERSEDES:
                    progress.ordered.attempt_id = ck.attempt_id
                    progress.ordered.batch_id = log_offset
        if ck.superseded is not None:
            slot, delivery_id, index = ck.superseded
            self.replay_settle(slot, delivery_id, 1 << index, log_offset, is_superseded=True)
        if log_offset < self._covered(ck.slot, progress):
            return
        if self._is_later(ck.slot, log_offset):
            self.table.place(
                ck.slot, log_offset, progress.index, ck.start_offset, ck.num,
                ck.flags & FLAGS_STORED, ck.visible_at_ms, popped_at_ms, ck.gaps,
            )  # fmt: skip
        elif progress.ordered is not None:
            self._displaced[ck.slot, log_offset] = progress, list(ck.offsets)

    def replay_acks(self, body: memoryview, log_offset: int) -> None:
        """Fold an ACK record in."""
        for slot, delivery_id, bits in ack.ENTRY.iter_unpack(body):
            self.replay_settle(slot, delivery_id, bits, log_offset)

    def replay_settle(
        self,
        slot: int,
        delivery_id: int,
        bits: int,
        log_offset: int,
        *,
        is_superseded: bool = False,
    ) -> None:
        """Fold the settling of some messages of a delivery in."""
        table = self.table
        if slot >= len(table.ids) or table.ids[slot] != delivery_id:
            if not is_superseded:
                self._settle_displaced(slot, delivery_id, bits, log_offset)
            return
        progress = self.owners[table.owners[slot]]
        if log_offset < self._covered(slot, progress):
            return
        table.live[slot] &= ~bits & 0xFFFFFFFF
        if is_superseded:
            table.superseded[slot] |= bits
        elif progress.ordered is not None:
            for index in table.indexes_of(bits):
                progress.ordered.pending.pop(table.offset_of(slot, index), None)
        if not table.live[slot] and not table.superseded[slot]:
            self._replay_release(slot)

    def _displace(self, slot: int) -> None:
        """Remember a delivery of an ordered queue before a later use of its slot is loaded."""
        table = self.table
        if slot < len(table.ids) and table.ids[slot] != FREE and table.flags[slot] & FLAG_ORDERED:
            progress = self.owners[table.owners[slot]]
            offsets = [table.offset_of(slot, index) for index in range(table.counts[slot])]
            self._displaced[slot, table.ids[slot]] = progress, offsets

    def _settle_displaced(self, slot: int, delivery_id: int, bits: int, log_offset: int) -> None:
        progress, offsets = self._displaced.get((slot, delivery_id), (None, []))
        if progress is None or log_offset < progress.covered:
            return
        assert progress.ordered is not None, "only deliveries of ordered queues are remembered"
        for index in self.table.indexes_of(bits):
            progress.ordered.pending.pop(offsets[index], None)

    def _replay_release(self, slot: int) -> None:
        self.table.ids[slot] = FREE
        self.table.gaps.pop(slot, None)

    def _covered(self, slot: int, progress: Progress) -> int:
        # The deliveries of an ordered queue are in the same slice as its progress.
        if progress.ordered is not None:
            return progress.covered
        return self._slot_covered.get(slot // SLOTS_A_SLICE, 0)

    def _is_later(self, slot: int, delivery_id: int) -> bool:
        while slot >= len(self.table.ids):
            self.table.grow()
        if self.table.ids[slot] >= delivery_id:
            return False
        self.table.gaps.pop(slot, None)
        return True

    def end_replay(self, *, now_ms: int) -> None:
        """Drop what is void, and rebuild the lists and counts."""
        table = self.table
        for (group_id, _), retry_id in self.catalog.retry_topic_ids.items():
            self.progress_of(group_id, retry_id, 0)
        for key, progress in list(self.progress.items()):
            is_known = (
                progress.group_id in self.catalog.groups
                and progress.topic_id in self.catalog.topics
            )
            if not is_known:
                progress.void_before = VOID
                del self.progress[key]
            group = self.catalog.groups.get(progress.group_id)
            if group is not None and group.is_ordered and progress.ordered is None:
                # A reset was met before the record that states the group again.
                progress.ordered = OrderedState()
            topic = self.catalog.topics.get(progress.topic_id)
            if topic is not None and topic.retry_of:
                progress.named_topic_id = topic.retry_of[1]
        floors = [owner.void_before for owner in self.owners]
        self._release_before(floors, keeps_superseded=False)
        floors = [owner.ordered.batch_id if owner.ordered else 0 for owner in self.owners]
        self._release_before(floors, keeps_superseded=True)
        for chain in table.relink(now_ms=now_ms):
            self._link(chain)
        self._displaced.clear()

    def _release_before(self, floors: list[int], *, keeps_superseded: bool) -> None:
        """Empty the slots whose identity is below the floor of their owner."""
        table = self.table
        slots = table.in_use(0, len(table.ids))
        if not len(slots):
            return
        owners = np.frombuffer(table.owners, dtype=np.uint32)[slots]
        ids = np.frombuffer(table.ids, dtype=np.int64)[slots]
        for slot in slots[ids < np.array(floors, dtype=np.int64)[owners]].tolist():
            if keeps_superseded and table.superseded[slot]:
                table.live[slot] = 0
            else:
                self._replay_release(slot)

    def _link(self, chain: np.ndarray) -> None:
        table = self.table
        progress = self.owners[table.owners[int(chain[0])]]
        live = np.frombuffer(table.live, dtype=np.uint32)[chain]
        chain = chain[live != 0]
        if not len(chain):
            return
        table.link_chain(chain)
        progress.head, progress.tail = int(chain[0]), int(chain[-1])
        progress.in_flight = int(np.bitwise_count(live).sum())
        flags = np.frombuffer(table.flags, dtype=np.uint8)[chain]
        popped = chain[(flags & FLAG_SUPERSEDES) == 0]
        progress.oldest = int(popped[0]) if len(popped) else NIL

    # ------------------------------------------------------------ snapshots and STATE

    def places(self) -> np.ndarray:
        """Return (group, topic, queue) of each owner, for delivery rows."""
        rows = [(owner.group_id, owner.topic_id, owner.queue.queue_id) for owner in self.owners]
        return np.array(rows or [(0, 0, 0)], dtype=np.uint32)

    def encode_progress(self, progresses: list[Progress]) -> bytes:
        """Encode the positions of some queues."""
        return json.dumps([_progress_fields(progress) for progress in progresses]).encode()

    def encode_deliveries(self, begin: int, end: int) -> bytes:
        """Encode the deliveries in a range of slots, live ones of ordered queues left out."""
        slots = self.table.in_use(begin, end)
        flags = np.frombuffer(self.table.flags, dtype=np.uint8)[slots]
        live = np.frombuffer(self.table.live, dtype=np.uint32)[slots]
        return self.table.encode_rows(
            slots[((flags & FLAG_ORDERED) == 0) | (live == 0)], self.places()
        )

    def encode_ordered(self, progress: Progress) -> bytes:
        """Encode the positions and deliveries of an ordered queue, as of one moment."""
        slots = []
        slot = progress.head
        while slot != NIL:
            slots.append(slot)
            slot = self.table.next[slot]
        fields = self.encode_progress([progress])
        rows = self.table.encode_rows(np.array(slots, dtype=np.int64), self.places())
        return len(fields).to_bytes(4, "big") + fields + rows

    def load_progress(self, data: memoryview, covered: int) -> list[Progress]:
        """Take positions over that contain everything before log offset `covered`."""
        loaded = []
        for fields in json.loads(bytes(data)):
            progress = self.progress_of(fields["group"], fields["topic"], fields["queue"])
            if covered < progress.covered:
                continue
            progress.pop_offset = fields["pop"]
            progress.void_before = fields["voidBefore"]
            progress.named_topic_id = fields["namedTopic"]
            progress.stated_at = fields["statedAt"]
            progress.covered = covered
            ordered = fields["ordered"]
            if ordered is not None:
                pending = {int(offset): count for offset, count in ordered["pending"]}
                progress.ordered = OrderedState(pending, ordered["attemptId"], ordered["batchId"])
            loaded.append(progress)
        return loaded

    def load_deliveries(self, data: memoryview) -> None:
        """Take deliveries of a snapshot over; the latest use of a slot wins."""
        rows, gaps = self.table.decode_rows(data)
        if not len(rows):
            return
        for slot in self.table.ordered_among(rows["slot"]):
            self._displace(slot)
        plain = (rows["flags"] & (FLAG_GAPS | FLAG_ORDERED)) == 0
        keys = np.stack([rows["group_id"], rows["topic_id"], rows["queue_id"]], axis=1)
        places, places_at = np.unique(keys[plain], axis=0, return_inverse=True)
        owners = [self.progress_of(*place).index for place in places.tolist()]
        self.table.load(rows[plain], np.array(owners, dtype=np.uint32)[places_at.ravel()])
        for number in np.flatnonzero(~plain).tolist():
            self._load_row(rows[number].item(), gaps[number])

    def _load_row(self, row: tuple[int, ...], gap: tuple[int, ...] | None) -> None:
        slot, delivery_id, group_id, topic_id, queue_id, count, flags, *rest = row
        start, visible_at_ms, popped_at_ms, live, superseded = rest
        self._displace(slot)
        if not self._is_later(slot, delivery_id):
            return
        progress = self.progress_of(group_id, topic_id, queue_id)
        if flags & FLAG_ORDERED and progress.ordered is None:
            progress.ordered = OrderedState()
        self.table.place(
            slot, delivery_id, progress.index, start, count, flags, visible_at_ms, popped_at_ms, gap
        )  # fmt: skip
        self.table.live[slot] = live
        self.table.superseded[slot] = superseded

    def replay_deliveries(self, data: memoryview, log_offset: int) -> None:
        """Fold the rows of a STATE record in."""
        rows, gaps = self.table.decode_rows(data)
        for row, gap in zip(rows.tolist(), gaps, strict=True):
            slot, delivery_id, group_id, topic_id, queue_id = row[:5]
            progress = self.progress_of(group_id, topic_id, queue_id)
            if log_offset >= self._covered(slot, progress):
                self._load_row(row, gap)
            if slot < len(self.table.ids) and self.table.ids[slot] == delivery_id:
                self.table.stated_at[slot] = log_offset

    def load_ordered(self, data: memoryview, covered: int) -> None:
        """Take an ordered queue over."""
        size = int.from_bytes(data[:4], "big")
        if self.load_progress(data[4 : 4 + size], covered):
            self.load_deliveries(data[4 + size :])

    def set_slots_covered(self, number: int, covered: int) -> None:
        """Note that slice `number` of the table contains everything before `covered`."""
        self._slot_covered[number] = covered

    def slices(self) -> Iterator[tuple[int, int]]:
        """Yield the slot ranges of the table."""
        for begin in range(0, len(self.table.ids), SLOTS_A_SLICE):
            yield begin, begin + SLOTS_A_SLICE


def _progress_fields(progress: Progress) -> dict[str, Any]:
    ordered = progress.ordered
    return {
        "group": progress.group_id,
        "topic": progress.topic_id,
        "queue": progress.queue.queue_id,
        "namedTopic": progress.named_topic_id,
        "pop": progress.pop_offset,
        "voidBefore": progress.void_before,
        "statedAt": progress.stated_at,
        "ordered": ordered
        and {
            "pending": list(ordered.pending.items()),
            "attemptId": ordered.attempt_id,
            "batchId": ordered.batch_id,
        },
    }
