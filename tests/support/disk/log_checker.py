"""An offline checker of a whole log: it folds the records and reports broken guarantees.

It is independent of the engine: it shares only the record layouts, keeps one entry per message, and
trusts no slot, list or snapshot. It needs the log from its first byte, so it checks only stores
without retired segments.

It checks these guarantees, by their numbers:

    2   a message below a consumer offset is settled, in flight, pending, or reset
    12  a settled message is not delivered again, neither itself nor as a copy
    13  a message has at most one live delivery, and a consumer group takes it once; only the holder
        of a live delivery renews it
    14  one retry copy per delivery and message
    15  one dead letter per consumer group, message and number of replays
    16  change-invisible replaces exactly one live delivery of the same message
    21  positions only advance, except at a reset
    26  a delivery has a unique identity and a free slot
    30  one live batch per ordered queue; the next one begins after its ack or expiry
    31  first deliveries of an ordered queue are in order; redelivery begins at the lowest unsettled
        message
    DL  a dead letter is settled at most once: replayed, with the next number, or discarded

`timer_log_fold` checks the timer records.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.disk.timer_log_fold import TimerFold
from tests.support.worlds.engine_world import World
from tidemill.broker.engine.layout import (
    ack,
    dead_letter,
    delivery_rows,
    expiry,
    floor,
    message,
    pack,
    pop_checkpoint,
    record,
    renewal,
    trim,
)
from tidemill.broker.engine.layout.config import decode_item
from tidemill.broker.engine.layout.dead_letter import Replay
from tidemill.broker.engine.layout.expiry import Expiry
from tidemill.broker.engine.layout.message import Cause
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.pop_checkpoint import (
    FLAG_ORDERED,
    FLAG_RELEASED,
    FLAG_SUPERSEDES,
    PopCheckpoint,
)
from tidemill.broker.engine.layout.record import HEADER, HEADER_SIZE, RecordHeader, RecordKind
from tidemill.broker.engine.layout.renewal import Renewal, RenewalReason
from tidemill.broker.engine.layout.state import StateKind
from tidemill.broker.engine.layout.trim import Trim, TrimReason
from tidemill.broker.engine.pop.queue_queries import consumer_offset
from tidemill.broker.engine.store.disk import Disk

Queue = tuple[int, int, int]  # group id, topic id, queue id


class BrokenPromise(AssertionError):
    """A violation of a guarantee in the log. The message begins with the guarantee's number."""


@dataclass
class OneDelivery:
    """One CK record with the state of its messages."""

    id: int
    slot: int
    queue: Queue
    offsets: list[int]
    visible_at_ms: int
    is_ordered: bool
    live: set[int] = field(default_factory=set)  # offsets
    is_released: bool = False  # by an operator
    client_id: str = ""
    popped_at_ms: int = 0
    renews: bool = False
    is_unproven: bool = False  # the engine doubted its handover after a start


@dataclass
class OneQueue:
    """The state of a consumer group in a queue, according to the log."""

    pop_offset: int = 0
    settled: set[int] = field(default_factory=set)
    live: dict[int, OneDelivery] = field(default_factory=dict)  # offset -> delivery
    first_delivered: int = -1
    batch: set[int] = field(default_factory=set)  # ids of the deliveries of the current batch
    begins_at: int = 0  # first offset after the last reset or the start of the group
    is_ordered: bool = False
    void_before: int = 0


class LogChecker:
    """The fold of one log."""

    def __init__(self) -> None:
        self.deliveries: dict[int, OneDelivery] = {}
        self.queues: dict[Queue, OneQueue] = defaultdict(OneQueue)
        self.slots: dict[int, OneDelivery] = {}
        self.ends: dict[tuple[int, int], int] = {}
        self.lows: dict[tuple[int, int], int] = {}  # messages before them are purged
        self.floor = 0  # the state floor
        self.copies: set[tuple[int, int]] = set()
        self.dead: set[tuple[int, ...]] = set()
        # The number of replays of each open dead letter, by (topic id, offset).
        self.open_letters: dict[tuple[int, int], int] = {}
        self.epochs: dict[tuple[int, int], int] = {}  # (group id, topic id) -> last reset
        self.kinds: dict[int, int] = defaultdict(int)
        self.timers = TimerFold()

    def fold(self, header: RecordHeader, body: bytes, tail: bytes) -> None:
        """Fold one record. Raises BrokenPromise."""
        self.kinds[header.kind] += 1
        at, now_ms = header.log_offset, header.stored_at_ms
        self.timers.fold(header, body, tail)
        if header.kind == RecordKind.MESSAGE:
            self._message(header, body, now_ms)
        elif header.kind == RecordKind.CK:
            self._delivery(pop_checkpoint.decode(body), at, now_ms)
        elif header.kind == RecordKind.ACK:
            for slot, delivery_id, bits in ack.ENTRY.iter_unpack(body):
                self._settle(slot, delivery_id, bits, "12: an ack")
        elif header.kind == RecordKind.RENEW:
            self._renewal(renewal.decode(body), now_ms)
        elif header.kind == RecordKind.DEAD_LETTER:
            discarded = dead_letter.decode(body)
            for begin, end in discarded.ranges:
                for offset in range(begin, end):
                    self._settle_letter(discarded.topic_id, offset)
        elif header.kind == RecordKind.EXPIRE:
            self._expiry(expiry.decode(body))
        elif header.kind == RecordKind.TRIM:
            self._trim(trim.decode(body))
        elif header.kind == RecordKind.FLOOR:
            state_floor = floor.decode(body).floor
            _check(self.floor < state_floor < at, 2, f"the state floor moves to {state_floor}")
            self.floor = state_floor
        elif header.kind == RecordKind.CONFIG:
            self._config(decode_item(body), at)
        elif header.kind == RecordKind.STATE:
            self._state(body[0], tail)

    # ------------------------------------------------------------ records

    def _message(self, header: RecordHeader, body: bytes, now_ms: int) -> None:
        place = message.MessagePosition._make(message.PLACE.unpack_from(body))
        end = self.ends.get((place.topic_id, place.queue_id), 0)
        _check(place.queue_offset == end, 21, f"message at {place.queue_offset}, not at {end}")
        self.ends[place.topic_id, place.queue_id] = end + 1
        cause = message.source_of(body, header.flags)
        if isinstance(cause, Replay):
            before = self._settle_letter(cause.dead_topic_id, cause.dead_offset)
            _check(cause.replays == before + 1, "DL", f"replay {cause.replays} after {before}")
            _check(place.attempts == 0, "DL", f"a replay with {place.attempts} attempts")
        if not isinstance(cause, Cause):
            return
        copy = cause.delivery_id, cause.message_index
        _check(copy not in self.copies, 14, f"a second copy of {copy}")
        self.copies.add(copy)
        if cause.reason != message.Reason.INVISIBLE_DURATION_ENDED:
            epoch = self.epochs.get((cause.group_id, cause.root_topic_id), 0)
            root = cause.root_topic_id, cause.root_queue_id, cause.root_offset
            dead = cause.group_id, *root, epoch, cause.replays
            _check(dead not in self.dead, 15, f"a second dead letter of {dead}")
            self.dead.add(dead)
            self.open_letters[place.topic_id, place.queue_offset] = cause.replays
        else:
            owner = self.deliveries.get(cause.delivery_id)
            is_due = owner is None or owner.visible_at_ms <= now_ms
            _check(is_due, 13, f"{copy} revived before its deadline")
        self._settle(cause.slot, cause.delivery_id, 1 << cause.message_index, "14: a copy")

    def _settle_letter(self, topic_id: int, offset: int) -> int:
        """Settle an open dead letter, and return its number of replays."""
        replays = self.open_letters.pop((topic_id, offset), None)
        if replays is None:
            raise BrokenPromise(f"DL: dead letter {offset} of topic {topic_id} is not open")
        return replays

    def _delivery(self, ck: PopCheckpoint, at: int, now_ms: int) -> None:
        key = ck.group_id, ck.topic_id, ck.queue_id
        queue = self.queues[key]
        offsets = list(ck.offsets)
        _check(at not in self.deliveries, 26, f"two deliveries are {at}")
        low = self.lows.get(key[1:], 0)
        is_new = not ck.flags & FLAG_SUPERSEDES
        _check(not is_new or offsets[0] >= low, 2, f"{offsets} are purged: {key[1:]} is at {low}")
        _check(offsets == sorted(set(offsets)) and 0 < len(offsets) <= 32, 28, f"offsets {offsets}")
        _check(
            offsets[-1] < self.ends.get(key[1:], 0), 4, f"{offsets} delivered before they were sent"
        )
        is_ordered = bool(ck.flags & FLAG_ORDERED)
        one = OneDelivery(at, ck.slot, key, offsets, ck.visible_at_ms, is_ordered, set(offsets))
        one.client_id, one.renews, one.popped_at_ms = ck.client_id, ck.renews, now_ms
        queue.is_ordered |= is_ordered
        if ck.flags & FLAG_SUPERSEDES:
            self._replace(ck, one, queue)
        else:
            self._pop(ck, one, queue, now_ms)
        used = self.slots.get(ck.slot)
        is_free = used is None or not used.live or used.id < self.queues[used.queue].void_before
        _check(is_free, 26, f"slot {ck.slot} is given out though {used} uses it")
        for offset in offsets:
            _check(offset not in queue.live, 13, f"{offset} is out twice in {key}")
            _check(offset not in queue.settled, 12, f"{offset} of {key} comes back")
            queue.live[offset] = one
        self.deliveries[at] = self.slots[ck.slot] = one

    def _replace(self, ck: PopCheckpoint, one: OneDelivery, queue: OneQueue) -> None:
        assert ck.superseded is not None
        _, delivery_id, index = ck.superseded
        old = self.deliveries.get(delivery_id)
        _check(old is not None, 16, f"{one.id} replaces a delivery that never was")
        assert old is not None
        offset = old.offsets[index]
        _check(one.offsets == [offset] and old.queue == one.queue, 16, "another message")
        _check(queue.live.get(offset) is old, 16, f"{one.id} replaces what is not live")
        old.live.discard(offset)
        del queue.live[offset]
        queue.batch.add(one.id)

    def _pop(self, ck: PopCheckpoint, one: OneDelivery, queue: OneQueue, now_ms: int) -> None:
        _check(ck.next_offset >= queue.pop_offset, 21, f"pop offset back to {ck.next_offset}")
        if not one.is_ordered:
            _check(one.offsets[0] >= queue.pop_offset, 13, f"{one.offsets} were taken already")
            queue.pop_offset = ck.next_offset
            return
        for offset, out in list(queue.live.items()):
            is_over = out.is_released or out.visible_at_ms <= now_ms
            _check(is_over, 30, f"a batch is out until {out.visible_at_ms}")
            out.live.discard(offset)
            del queue.live[offset]
        again = [offset for offset in one.offsets if offset <= queue.first_delivered]
        left = [
            offset
            for offset in range(queue.begins_at, queue.first_delivered + 1)
            if offset not in queue.settled and offset >= self.lows.get((one.queue[1:]), 0)
        ]
        # A filter leaves holes, but these scenarios do not filter ordered queues.
        _check(again == left[: len(again)], 31, f"redelivered {again} of {left}")
        _check(len(again) == len(one.offsets) or again == left, 31, f"{left} were left behind")
        queue.first_delivered = max(queue.first_delivered, one.offsets[-1])
        queue.pop_offset, queue.batch = ck.next_offset, {one.id}

    def _settle(self, slot: int, delivery_id: int, bits: int, what: str) -> None:
        one = self.deliveries.get(delivery_id)
        if one is None:
            raise BrokenPromise(f"{what} names delivery {delivery_id}, which never was")
        queue = self.queues[one.queue]
        if delivery_id < queue.void_before:
            return
        if one.slot != slot:
            raise BrokenPromise(f"{what} names slot {slot}, not {one.slot}")
        for index in range(32):
            if not bits >> index & 1:
                continue
            offset = one.offsets[index]
            if queue.live.get(offset) is not one:
                raise BrokenPromise(f"{what} settles {offset} of {one.queue}, which is not live")
            one.live.discard(offset)
            del queue.live[offset]
            queue.settled.add(offset)

    def _renewal(self, found: Renewal, now_ms: int) -> None:
        for slot, delivery_id in found.entries:
            one = self.deliveries.get(delivery_id)
            if one is None or not one.live or one.slot != slot:
                raise BrokenPromise(f"13: {delivery_id} is renewed, and is not live")
            is_void = delivery_id < self.queues[one.queue].void_before
            _check(not is_void, 13, f"{delivery_id} is renewed, and is void")
            is_told = found.why is RenewalReason.HANDED_OVER
            has_ended = found.why in (RenewalReason.CLIENT_ENDED, RenewalReason.CLIENT_SILENT)
            may_move = one.renews or is_told or (one.is_unproven and has_ended)
            _check(may_move, 13, f"{delivery_id} does not renew")
            one.is_unproven = found.why is RenewalReason.NOT_HANDED_OVER
            _check(
                one.client_id == found.client_id, 13, f"{delivery_id} is not {found.client_id}'s"
            )
            _check(found.visible_at_ms >= now_ms, 13, f"{delivery_id} ended in the past")
            one.visible_at_ms, one.renews = (
                found.visible_at_ms,
                is_told or found.why is RenewalReason.EXTENDED,
            )

    def _expiry(self, found: Expiry) -> None:
        for group_id, topic_id, queue_id, begin, end in found.ranges:
            queue = self.queues[group_id, topic_id, queue_id]
            offsets = set(range(begin, end))
            _check(bool(offsets), 2, "an empty range expires")
            _check(not offsets & queue.live.keys(), 13, f"{begin} to {end} expires, and is out")
            _check(not offsets & queue.settled, 12, f"{begin} to {end} expires, and was settled")
            queue.settled |= offsets
            queue.pop_offset = max(queue.pop_offset, end)

    def _trim(self, found: Trim) -> None:
        for one in found.queues:
            place = one.topic_id, one.queue_id
            least = self.lows.get(place, 0) + (one.reason is not TrimReason.STATED)
            _check(one.low >= least, 2, f"the low of {place} falls to {one.low}")
            _check(one.low <= self.ends.get(place, 0), 2, f"{one.low} is behind {place}")
            self.lows[place] = one.low

    def _config(self, config: dict[str, Any], at: int) -> None:
        self.timers.fold_config(config)
        if config["op"] == "reset":
            for topic_id, queue_id, offset in config["offsets"]:
                self.epochs[config["group_id"], topic_id] = at
                old = self.queues[config["group_id"], topic_id, queue_id]
                self.queues[config["group_id"], topic_id, queue_id] = OneQueue(
                    pop_offset=offset,
                    begins_at=offset,
                    first_delivered=offset - 1,
                    is_ordered=old.is_ordered,
                    void_before=at,
                )
        elif config["op"] in ("deleteTopic", "deleteGroup"):
            place = 1 if config["op"] == "deleteTopic" else 0
            for key in [key for key in self.queues if key[place] == config["id"]]:
                self.queues[key] = OneQueue(void_before=1 << 62)

    def _state(self, what: int, tail: bytes) -> None:
        if what == StateKind.DELIVERIES:
            rows = delivery_rows.decode(tail).rows
            for row in rows[rows["flags"] & FLAG_RELEASED > 0]:
                self.deliveries[int(row["delivery_id"])].is_released = True
        # Of the other statements, only a group's start at the latest message is new information.
        if what != 3:
            return
        for fields in json.loads(tail):
            queue = self.queues[fields["group"], fields["topic"], fields["queue"]]
            if queue.pop_offset == 0 and not queue.live and not queue.settled:
                queue.pop_offset = queue.begins_at = fields["pop"]
                queue.first_delivered = fields["pop"] - 1

    # ------------------------------------------------------------ verdicts about a store

    def check_positions(self, engine_offsets: dict[Queue, tuple[int, int]]) -> None:
        """Compare the engine's (consumer offset, pop offset) of each queue with the fold."""
        for key, (consumed, pop_offset) in engine_offsets.items():
            queue = self.queues[key]
            _check(consumed <= pop_offset, 3, f"{key}: {consumed} > {pop_offset}")
            _check(pop_offset >= queue.pop_offset, 3, f"{key}: pop offset {pop_offset}")
            for offset in range(queue.begins_at, min(consumed, queue.pop_offset)):
                known = offset in queue.settled or offset in queue.live
                _check(known, 2, f"{offset} of {key} is below {consumed}, and nowhere")


def _check(holds: bool, number: int | str, what: str) -> None:
    if not holds:
        raise BrokenPromise(f"{number}: {what}")


def check_log(disk: Disk) -> LogChecker:
    """Fold the log on `disk` from its first byte; return the checker. Raises BrokenPromise."""
    checker = LogChecker()
    for header, body, tail in records_of(disk):
        checker.fold(header, body, tail)
    return checker


def unpacked(data: memoryview) -> memoryview:
    """Return a pack as the segment that it was, with zeros for the content of dead messages."""
    header = pack.find_header(data[: pack.TRAILER_SIZE])
    assert header is not None, "the header of a pack"
    segment = bytearray(header.end - header.start)
    at, offset = pack.HEADER_SIZE, header.start
    while at < header.records_end:
        found = record.find_head(data, at, log_offset=LogOffset(offset), room=header.end - offset)
        assert found is not None, "the records of a pack follow each other"
        size = record.stored_size(data, at, found)
        segment[offset - header.start : offset - header.start + size] = data[at : at + size]
        at, offset = at + size, offset + found.size
    assert offset == header.record_end, "the header has the end of the records"
    room = header.end - offset
    if room >= record.PAD.size:
        record.PAD.pack_into(segment, len(segment) - room, record.PAD_MAGIC, room)
    return memoryview(segment)


def records_of(disk: Disk, log_offset: int = 0) -> Iterator[tuple[RecordHeader, bytes, bytes]]:
    """Yield the intact records on `disk` from `log_offset` on: header, body and tail."""
    expected = -1
    for name in disk.names("log"):
        stem = name.removeprefix("log/").removesuffix(".log").removesuffix(".pack")
        if not stem.isdigit():
            continue
        start = int(stem)
        file = disk.open(name)
        data = file.view()
        file.close()
        if name.endswith(".pack"):
            data = unpacked(data)
        if start + len(data) <= log_offset:
            continue
        assert start == expected or (expected < 0 and start <= log_offset), "a hole in the log"
        expected = start + len(data)
        at = max(log_offset - start, 0)
        while at + HEADER_SIZE <= len(data):
            if record.PAD.unpack_from(data, at) == (record.PAD_MAGIC, len(data) - at):
                break
            if record.find_damage(data, at, log_offset=LogOffset(start + at)):
                return
            header = RecordHeader._make(HEADER.unpack_from(data, at))
            head_end, end = at + header.head_size, at + header.size
            yield header, bytes(data[at + HEADER_SIZE : head_end]), bytes(data[head_end:end])
            at = end


def judge(world: World) -> LogChecker:
    """Check the log of a world without pending rounds, and its engine's positions."""
    checker = check_log(world.disk)
    state = world.engine.state
    checker.check_positions(
        {
            key: (consumer_offset(state, progress), progress.pop_offset)
            for key, progress in state.progress.items()
        }
    )
    return checker
