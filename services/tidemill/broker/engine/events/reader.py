"""Reading events: a range of the committed log, record by record, in slices.

Which record makes which events is the table `_MAKERS`; `Reader.events_of` is a function of one
record and of what it names. Invariant: the number of events that a record makes, and their order,
follow from the record alone, so that an event's index is the same for whoever asks for what.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, final
from zlib import crc32

from tidemill.broker.engine.events.counts import event_count
from tidemill.broker.engine.events.event import Event, EventKind, EventQuery
from tidemill.broker.engine.events.lookup import (
    GONE,
    EventLookup,
    KnownDelivery,
    KnownMessage,
    first_topic,
    known_message,
    rows_by_delivery,
)
from tidemill.broker.engine.layout import (
    ack,
    config,
    expiry,
    message,
    pop_checkpoint,
    renewal,
    timer_control,
)
from tidemill.broker.engine.layout.delivery_rows import DeliveryRows
from tidemill.broker.engine.layout.message import (
    FLAG_CAUSE,
    FLAG_REMAINS,
    FLAG_SCHEDULE,
    FLAG_TIMER,
    Reason,
    TimerReason,
)
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_SUSPEND, PopCheckpoint
from tidemill.broker.engine.layout.record import RecordHeader, RecordKind
from tidemill.broker.engine.layout.renewal import RenewalReason
from tidemill.broker.engine.layout.timer_control import TimerOperation
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.segment import Hole, Record
from tidemill.broker.engine.tally import Allowance, Tally
from tidemill.broker.engine.timer.status import SCHEDULE_QUEUE
from tidemill.common.errors import LogChanged
from tidemill.message import stored_message

RECORDS_A_STEP: Final = 128  # with their events, and what these look up: about a millisecond
_tuple = tuple.__new__
_unpack_place = message.PLACE.unpack_from
_unpack_fields = stored_message.FIXED.unpack_from
_FIXED_SIZE, _HASH_SIZE = stored_message.FIXED_SIZE, stored_message.KEY_HASH_SIZE
_STORED, _DELIVERED, _ACKED = EventKind.STORED, EventKind.DELIVERED, EventKind.ACKED
# What a record whose head is intact may still raise: the walk does not verify its tail.
_UNREADABLE = (struct.error, ValueError, IndexError, KeyError, TypeError, OverflowError)
_GIVEN_BACK: Final = {
    RenewalReason.CLIENT_ENDED: "client_ended",
    RenewalReason.CLIENT_SILENT: "client_silent",
}


@final
class EventRead:
    """One read under way: call `step` until it returns False, and `take` what was found."""

    def __init__(
        self,
        log: CommitLog,
        catalog: Catalog,
        lookup: EventLookup,
        tally: Tally,
        query: EventQuery,
        *,
        from_position: int,
        from_index: int,
        until_position: int,
        log_bytes_max: int,
        events_max: int,
    ) -> None:
        """`until_position` 0: to where the log is committed up to now."""
        self._log = log
        self._events_left = events_max
        self._tally = tally
        self._maker = _Maker(catalog, lookup, query)
        committed = int(log.committed_offset)
        # Everything before it was read, and of its record what is before the index.
        self.next_index = from_index
        self.next_position = min(max(from_position, int(log.min_offset)), committed)
        # Where what was asked for is gone: where that begins. Nobody asks for what was before 0.
        self.gone_from = from_position if 0 < from_position < log.min_offset else 0
        self._end = min(committed, until_position) if until_position else committed
        self._committed = committed
        self._end = min(self._end, self.next_position + log_bytes_max)
        if self.next_position != from_position:
            self.next_index = 0
        self.damaged_bytes = 0  # in which no record can be read
        self._found: list[Event] = []
        # Of a record that makes more events than a slice: those that are left, and its end.
        self._rest: Iterator[Event | None] | None = None
        self._record_end = 0

    def take(self) -> list[Event]:
        """Return and forget what was found since the last call, in the order of the log."""
        found, self._found = self._found, []
        return found

    def bounds(self) -> tuple[int, int]:
        """Return the first position that is there, and the one where what is committed ends."""
        return int(self._log.min_offset), int(self._log.committed_offset)

    def step(self) -> bool:
        """Do one slice; True while there is more to do."""
        allowance = Allowance(self._tally, items=RECORDS_A_STEP)
        if self._rest is None and self.next_position < self._log.min_offset:
            # Retention took what was there at the step before.
            self.gone_from = self.gone_from or self.next_position
            self._pass_to(int(self._log.min_offset))
        if self._rest is not None:
            self._go_on(allowance)
        while self._has_more and self._rest is None and not allowance.is_spent:
            self._walk(allowance)
        return self._has_more

    @property
    def _has_more(self) -> bool:
        return self._events_left > 0 and self.next_position < self._end

    def _pass_to(self, position: int) -> None:
        self.next_position, self.next_index = position, 0

    def _go_on(self, allowance: Allowance) -> bool:
        """Take what is left of a record's events; False: not all of it yet."""
        assert self._rest is not None, "there is a rest"
        tally, found, wanted_from = self._tally, self._found, self.next_index
        try:
            for event in self._rest:
                tally.add(1)
                if event is not None and event.number >= wanted_from:
                    found.append(event)
                    self.next_index = event.number + 1
                    self._events_left -= 1
                if allowance.is_spent or not self._events_left:
                    return False
        except _UNREADABLE:
            # Of it nobody can say more.
            self.damaged_bytes += self._record_end - self.next_position
        self._rest = None
        self._pass_to(self._record_end)
        return True

    def _walk(self, allowance: Allowance) -> None:
        """Read records of one segment. No record is kept over a slice, only what it says."""
        log, tally = self._log, self._tally
        position = LogOffset(self.next_position)
        segment = log.segment_of(position)
        # Not to the end of this read, which may be inside a record.
        stop = min(self._committed, segment.end)
        is_warm = log.reader.is_warm(position)
        of_message, events_of = self._maker.of_message, self._maker.events_of
        records = log.reader.walk_past_damage(
            segment, position - segment.start, stop - segment.start
        )
        for record in records:
            if record.log_offset >= self._end:
                self._pass_to(record.log_offset)
                return
            if isinstance(record, Hole):
                tally.add(1)
                # Told once, where it begins: no read begins inside a record (`Places`).
                self.damaged_bytes += record.end - record.log_offset
                self._pass_to(record.end)
                continue
            header = record.header
            # What is cold comes from the disk as a whole, and of messages all is looked at.
            is_whole = not is_warm or header.kind == RecordKind.MESSAGE
            tally.add(1, size_bytes=header.size if is_whole else header.head_size)
            if self.next_index:
                self._check_index(record)
            if header.kind == RecordKind.MESSAGE:
                try:
                    event = None if self.next_index else of_message(record)
                except _UNREADABLE:
                    event = None
                    self.damaged_bytes += header.size
                if event is not None:
                    self._found.append(event)
                    self._events_left -= 1
                self._pass_to(header.log_offset + header.size)
            else:
                self._record_end = header.log_offset + header.size
                try:
                    self._rest = events_of(record)
                except _UNREADABLE:
                    self.damaged_bytes += header.size
                    self._pass_to(self._record_end)
                    continue
                if not self._go_on(allowance):
                    return
            if allowance.is_spent or not self._events_left:
                return
        self._pass_to(stop)  # Behind the pad at its end.

    def _check_index(self, record: Record) -> None:
        """Refuse an index that no answer has told: events would be passed over unseen."""
        try:
            count = event_count(record)
        except _UNREADABLE:
            return  # Damaged: it is passed over.
        if self.next_index > count:
            raise LogChanged(
                f"the record at position {record.header.log_offset} makes {count} events, and none"
                f" before index {self.next_index} can have been told: read from index 0 on"
            )


@final
class _Maker:
    """Makes the events of records."""

    def __init__(self, catalog: Catalog, lookup: EventLookup, query: EventQuery) -> None:
        self._catalog = catalog
        self._lookup = lookup
        self._topics = query.topics
        self._kinds = query.kinds
        self._message_id = query.message_id
        self._makers: Final[dict[int, Callable[[Record], Iterable[Event | None]]]] = {
            RecordKind.CK: self._of_checkpoint,
            RecordKind.ACK: self._of_acks,
            RecordKind.RENEW: self._of_renewal,
            RecordKind.TIMER: self._of_timer,
            RecordKind.CONFIG: self._of_config,
            RecordKind.EXPIRE: self._of_expiry,
        }

    def events_of(self, record: Record) -> Iterator[Event | None]:
        """Return the wanted events of a record that is no message.

        Between them is None, where a slice may end though nothing was wanted.
        """
        maker = self._makers.get(record.header.kind)
        if maker is None:
            return iter(())
        return iter(maker(record))

    def _wants(self, *kinds: EventKind) -> bool:
        return not self._kinds or any(kind in self._kinds for kind in kinds)

    def _is_wanted(self, kind: int, topic: str, known: KnownMessage) -> bool:
        if self._kinds and kind not in self._kinds:
            return False
        if self._message_id and known.message_id != self._message_id:
            return False
        return not self._topics or first_topic(topic, known) in self._topics

    # ------------------------------------------------------------ messages

    def of_message(self, record: Record) -> Event | None:
        """Return the event of a MESSAGE record, if it is wanted. Raises ValueError if damaged.

        Which topic and what kind it is of is in the head, which the walk has verified; the id is
        not, so a message that is wanted is looked at as a whole.
        """
        header, body, blob = record
        topic_id, queue_id, attempts, queue_offset = _unpack_place(body)
        if self._message_id:
            _check(header, blob)
        fields = _unpack_fields(blob)
        flags = header.flags
        if not flags:
            at = _FIXED_SIZE + fields[3] * _HASH_SIZE + fields[4]
            message_id = str(blob[at : at + fields[5]], "utf-8", "replace")
            known = _tuple(KnownMessage, (message_id, attempts, "", 0, 0, 0))
        else:
            known = known_message(flags, body, blob)
        lookup = self._lookup
        if not flags & FLAG_SCHEDULE:
            lookup.keep_message(topic_id, queue_id, queue_offset, known)
        topic = lookup.topic_name(topic_id)
        if not flags:
            is_all = not (self._kinds or self._topics or self._message_id)
            if not (is_all or self._is_wanted(_STORED, topic, known)):
                return None
            _check(header, blob)
            return _tuple(
                Event,
                (
                    header.log_offset,
                    0,
                    _STORED,
                    header.stored_at_ms,
                    topic,
                    queue_id,
                    queue_offset,
                    topic_id,
                    known.message_id,
                    "",
                    0,
                    0,
                    "",
                    "",
                    "",
                    0,
                    0,
                    0,
                    0,
                    fields[12],
                    header.tail_crc,
                    0,
                    0,
                ),
            )
        event = Event(
            header.log_offset,
            0,
            EventKind.STORED,
            header.stored_at_ms,
            topic,
            queue_id,
            queue_offset,
            topic_id,
            known.message_id,
            body_size=fields[12],
            body_crc32=header.tail_crc,
            timer_number=known.timer_number,
        )
        if flags & FLAG_CAUSE:
            event = self._of_copy(event, body, attempts)
        elif flags & FLAG_TIMER:
            event = self._of_outcome(event, body)
        else:
            event = self._of_schedule(event, body, queue_id, flags)
        if not self._is_wanted(event.kind, event.topic, known):
            return None
        _check(header, blob)
        return event

    def _of_copy(self, event: Event, body: memoryview, attempts: int) -> Event:
        cause = message.decode_cause(body)
        is_revived = cause.reason == Reason.INVISIBLE_DURATION_ENDED
        return event._replace(
            kind=EventKind.REVIVED if is_revived else EventKind.DEAD_LETTERED,
            consumer_group=self._lookup.group_name(cause.group_id),
            attempt=attempts,
            reason="" if is_revived else Reason(cause.reason).name.lower(),
            origin_topic=cause.origin,
            origin_queue_id=cause.root_queue_id,
            origin_queue_offset=cause.root_offset,
            delivery_id=cause.delivery_id,
            delivery_index=cause.message_index,
        )

    def _of_outcome(self, event: Event, body: memoryview) -> Event:
        settled = message.decode_timer_cause(body)
        is_fired = settled.reason == TimerReason.DELIVERED
        return event._replace(
            kind=EventKind.FIRED if is_fired else EventKind.DEAD_LETTERED,
            due_at_ms=settled.due_at_ms,
            reason="" if is_fired else TimerReason(settled.reason).name.lower(),
            origin_topic=settled.origin,
        )

    def _of_schedule(self, event: Event, body: memoryview, queue_id: int, flags: int) -> Event:
        target = message.decode_target(body)
        is_new = queue_id == SCHEDULE_QUEUE
        return event._replace(
            kind=EventKind.SCHEDULED if is_new else EventKind.MOVED,
            topic=target.origin,
            topic_id=target.topic_id,
            queue_id=target.queue_id,
            queue_offset=target.timer_id,
            due_at_ms=target.due_at_ms,
            reason="damaged" if flags & FLAG_REMAINS else "",
        )

    # ------------------------------------------------------------ deliveries

    def _of_checkpoint(self, record: Record) -> Iterable[Event]:
        if not self._wants(_DELIVERED, EventKind.NACKED, EventKind.RENEWED):
            return ()
        header = record.header
        ck = pop_checkpoint.decode(record.body)
        if ck.superseded is not None:
            return self._of_change(header, ck, ck.superseded)
        return self._delivered(header, self._lookup.keep_delivery(header.log_offset, ck))

    def _delivered(self, header: RecordHeader, known: KnownDelivery) -> Iterator[Event]:
        position, at_ms = header.log_offset, header.stored_at_ms
        group, topic, topic_id, queue_id, offsets, messages, attempts, client_id, until = known
        is_all = not (self._kinds or self._topics or self._message_id)
        for index, offset in enumerate(offsets):
            one = messages[index]
            if is_all or self._is_wanted(_DELIVERED, topic, one):
                yield _tuple(
                    Event,
                    (
                        position,
                        index,
                        _DELIVERED,
                        at_ms,
                        topic,
                        queue_id,
                        offset,
                        topic_id,
                        one[0],
                        group,
                        attempts[index],
                        until,
                        client_id,
                        "",
                        one[2],
                        one[3],
                        one[4],
                        0,
                        one[5],
                        0,
                        0,
                        position,
                        index,
                    ),
                )

    def _of_change(
        self, header: RecordHeader, ck: PopCheckpoint, replaced: tuple[int, int, int]
    ) -> Iterator[Event]:
        """Make the event of a delivery that replaces another one."""
        _, old_id, old_index = replaced
        known = self._lookup.keep_delivery(header.log_offset, ck)
        is_given_back = header.flags & pop_checkpoint.GIVEN_BACK
        kind = EventKind.NACKED if is_given_back else EventKind.RENEWED
        # It goes on as this delivery, which has its attempt.
        yield from self._told(
            header,
            kind,
            known,
            [(0, 0)],
            delivery_id=old_id,
            delivery_index=old_index,
            due_at_ms=ck.visible_at_ms,
            reason="unread" if ck.flags & FLAG_SUSPEND else "",
        )

    def _told(
        self,
        header: RecordHeader,
        kind: EventKind,
        known: KnownDelivery | None,
        numbered: Iterable[tuple[int, int]],
        *,
        delivery_id: int,
        delivery_index: int | None = None,
        due_at_ms: int = 0,
        reason: str = "",
    ) -> Iterator[Event]:
        """Yield events of messages of a delivery: (index of the event, of the message)."""
        position, at_ms = header.log_offset, header.stored_at_ms
        is_all = not (self._kinds or self._topics or self._message_id)
        if known is None:
            # The record that says of what it was is gone.
            for index, of_message in numbered:
                if is_all or self._is_wanted(kind, "", GONE):
                    yield Event(
                        position,
                        index,
                        kind,
                        at_ms,
                        "",
                        0,
                        0,
                        0,
                        due_at_ms=due_at_ms,
                        reason=reason,
                        delivery_id=delivery_id,
                        delivery_index=of_message,
                    )
            return
        group, topic, topic_id, queue_id, offsets, messages, attempts, client_id, *_ = known
        for index, of_message in numbered:
            one = messages[of_message]
            if is_all or self._is_wanted(kind, topic, one):
                yield _tuple(
                    Event,
                    (
                        position,
                        index,
                        kind,
                        at_ms,
                        topic,
                        queue_id,
                        offsets[of_message],
                        topic_id,
                        one[0],
                        group,
                        attempts[of_message],
                        due_at_ms,
                        client_id,
                        reason,
                        one[2],
                        one[3],
                        one[4],
                        0,
                        one[5],
                        0,
                        0,
                        delivery_id,
                        of_message if delivery_index is None else delivery_index,
                    ),
                )

    def _of_acks(self, record: Record) -> Iterable[Event | None]:
        header = record.header
        is_expired = header.flags & ack.FLAG_EXPIRED
        kind, reason = (EventKind.EXPIRED, "in_flight") if is_expired else (_ACKED, "")
        if not self._wants(kind):
            return ()
        rows = rows_by_delivery(bytes(record.tail)) if len(record.tail) else None
        entries = ack.decode(record.body).entries
        return self._settled(header, kind, reason, entries, rows)

    def _settled(
        self,
        header: RecordHeader,
        kind: EventKind,
        reason: str,
        entries: Sequence[tuple[int, int, int]],
        rows: dict[int, DeliveryRows] | None,
    ) -> Iterator[Event | None]:
        begin = 0
        for _, delivery_id, bits in entries:
            indexes = _indexes_of(bits)
            numbered = enumerate(indexes, begin)
            begin += len(indexes)
            known = self._lookup.delivery(delivery_id, rows)
            for event in self._told(
                header, kind, known, numbered, delivery_id=delivery_id, reason=reason
            ):
                is_range = kind is EventKind.EXPIRED and known is not None
                yield event._replace(end_offset=event.queue_offset + 1) if is_range else event
            yield None

    def _of_renewal(self, record: Record) -> Iterable[Event | None]:
        if not self._wants(EventKind.RENEWED, EventKind.NACKED):
            return ()
        renewed = renewal.decode(record.body)
        live = renewal.decode_live(record.tail, len(renewed.entries))
        left = record.tail[renewal.LIVE_SIZE * len(renewed.entries) :]
        rows = rows_by_delivery(bytes(left)) if len(left) else None
        return self._renewed(record.header, renewed, live, rows)

    def _renewed(
        self,
        header: RecordHeader,
        renewed: renewal.Renewal,
        live: Sequence[int],
        rows: dict[int, DeliveryRows] | None,
    ) -> Iterator[Event | None]:
        why = renewed.why
        if why is RenewalReason.HANDED_OVER:
            return  # Nobody's time has changed.
        kind = EventKind.NACKED if why in _GIVEN_BACK else EventKind.RENEWED
        reason = _GIVEN_BACK.get(why, "" if why is RenewalReason.EXTENDED else "not_handed_over")
        begin = 0
        for number, (_, delivery_id) in enumerate(renewed.entries):
            known = self._lookup.delivery(delivery_id, rows)
            indexes = _indexes_of(live[number])
            numbered = enumerate(indexes, begin)
            begin += len(indexes)
            yield from self._told(
                header,
                kind,
                known,
                numbered,
                delivery_id=delivery_id,
                due_at_ms=renewed.visible_at_ms,
                reason=reason,
            )
            yield None

    # ------------------------------------------------------------ timers, resets, retention

    def _of_timer(self, record: Record) -> Iterator[Event]:
        control = timer_control.decode(record.body)
        is_cancel = control.operation == TimerOperation.CANCEL
        kind = EventKind.RECALLED if is_cancel else EventKind.SCHEDULED
        found = self._lookup.timer(control.timer_id) if self._wants(kind) else None
        header = record.header
        event = Event(
            header.log_offset,
            0,
            kind,
            header.stored_at_ms,
            "",
            0,
            control.timer_id,
            0,
            due_at_ms=control.due_at_ms if is_cancel else control.new_due_at_ms,
            reason="" if is_cancel else "rescheduled",
            timer_number=control.timer_id + 1,
        )
        known = GONE
        if found is not None:
            target, known = found
            event = event._replace(
                topic=target.origin,
                topic_id=target.topic_id,
                queue_id=target.queue_id,
                message_id=known.message_id,
            )
        if self._is_wanted(kind, event.topic, known):
            yield event

    def _of_config(self, record: Record) -> Iterator[Event]:
        header = record.header
        item = config.decode_item(record.body)
        if item["op"] == "deleteBrokerGroup":
            # Of all topics, too.
            if self._wants(EventKind.BROKER_GROUP_REMOVED) and not self._message_id:
                yield Event(
                    header.log_offset,
                    0,
                    EventKind.BROKER_GROUP_REMOVED,
                    header.stored_at_ms,
                    "",
                    0,
                    0,
                    0,
                    reason=item["name"],
                )
            return
        if not self._wants(EventKind.RESET):
            return
        if item["op"] == "deleteGroup":
            # Of all topics, whichever are asked for, and of no message.
            if not self._message_id:
                yield Event(
                    header.log_offset,
                    0,
                    EventKind.RESET,
                    header.stored_at_ms,
                    "",
                    0,
                    0,
                    0,
                    consumer_group=self._lookup.group_name(item["id"]),
                    reason="group_deleted",
                )
            return
        if item["op"] != "reset":
            return
        group = self._lookup.group_name(item["group_id"])
        for index, (topic_id, queue_id, offset) in enumerate(item["offsets"]):
            topic = self._lookup.topic_name(topic_id)
            if self._is_wanted(EventKind.RESET, topic, GONE):
                yield Event(
                    header.log_offset,
                    index,
                    EventKind.RESET,
                    header.stored_at_ms,
                    topic,
                    queue_id,
                    offset,
                    topic_id,
                    consumer_group=group,
                )

    def _of_expiry(self, record: Record) -> Iterator[Event]:
        header = record.header
        for index, one in enumerate(expiry.decode(record.body).ranges):
            topic = self._lookup.topic_name(one.topic_id)
            if self._is_wanted(EventKind.EXPIRED, topic, GONE):
                yield Event(
                    header.log_offset,
                    index,
                    EventKind.EXPIRED,
                    header.stored_at_ms,
                    topic,
                    one.queue_id,
                    one.begin,
                    one.topic_id,
                    consumer_group=self._lookup.group_name(one.group_id),
                    reason="retention",
                    end_offset=one.end,
                )


def _check(header: RecordHeader, blob: memoryview | bytes) -> None:
    if crc32(blob) != header.tail_crc:
        raise ValueError("the message is damaged")


_INDEXES: Final[dict[int, tuple[int, ...]]] = {}
_INDEXES_MAX: Final = 4_096


def _indexes_of(bits: int) -> Sequence[int]:
    """Return the positions of the bits that are set."""
    found = _INDEXES.get(bits)
    if found is None:
        found = tuple([index for index in range(bits.bit_length()) if bits >> index & 1])
        if len(_INDEXES) < _INDEXES_MAX:
            _INDEXES[bits] = found
    return found
