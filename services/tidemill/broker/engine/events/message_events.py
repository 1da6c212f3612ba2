"""The events of MESSAGE records: one event per record."""

from __future__ import annotations

from typing import Any, final
from zlib import crc32

from tidemill.broker.engine.events.event import Event, EventKind
from tidemill.broker.engine.events.event_filter import EventFilter
from tidemill.broker.engine.events.lookup import EventLookup, KnownMessage, known_message
from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.message import (
    FLAG_CAUSE,
    FLAG_HALF,
    FLAG_KEYED,
    FLAG_OUTCOME,
    FLAG_REMAINS,
    FLAG_REPLAY,
    FLAG_SCHEDULE,
    FLAG_STUB,
    FLAG_TIMER,
    OutcomeReason,
    Reason,
    TimerReason,
)
from tidemill.broker.engine.layout.record import RecordHeader
from tidemill.broker.engine.store.segment import Record
from tidemill.broker.engine.timer.status import REPLACED_QUEUE, SCHEDULE_QUEUE
from tidemill.broker.engine.transaction.halves import HALF_QUEUE
from tidemill.message import stored_message

_tuple = tuple.__new__
_unpack_place = message.PLACE.unpack_from
_unpack_fields = stored_message.FIXED.unpack_from
_FIXED_SIZE, _HASH_SIZE = stored_message.FIXED_SIZE, stored_message.KEY_HASH_SIZE
_STORED = EventKind.STORED
# The fields of an event between `message_id` and `body_size`.
_NO_DELIVERY = ("", 0, 0, "", "", "", 0, 0, 0, 0)


@final
class MessageEvents:
    """The events of messages, their copies, and delivered timers."""

    def __init__(self, lookup: EventLookup, event_filter: EventFilter) -> None:
        self._lookup = lookup
        self._filter = event_filter

    def of_message(self, record: Record) -> Event | None:
        """Return the event of a MESSAGE record if it matches. Raises ValueError if it is damaged.

        The walk has verified the head, with topic and kind. The id is in the tail, so a matching
        message is verified as a whole.
        """
        header, body, blob = record
        topic_id, queue_id, attempts, queue_offset = _unpack_place(body)
        if self._filter.message_id:
            _check(header, blob)
        fields = _unpack_fields(blob)
        flags = header.flags & ~(FLAG_STUB | FLAG_KEYED)
        is_whole = not header.flags & FLAG_STUB
        if not flags:
            at = _FIXED_SIZE + fields[3] * _HASH_SIZE + fields[4]
            message_id = str(blob[at : at + fields[5]], "utf-8", "replace")
            known = _tuple(KnownMessage, (message_id, attempts, "", 0, 0, 0))
        else:
            known = known_message(flags, body, blob)
        lookup = self._lookup
        if not flags & (FLAG_SCHEDULE | FLAG_HALF):
            lookup.keep_message(topic_id, queue_id, queue_offset, known)
        topic = lookup.topic_name(topic_id)
        if not flags:
            is_all = self._filter.is_all
            if not (is_all or self._filter.matches(_STORED, topic, known)):
                return None
            _check(header, blob)
            head = header.log_offset, 0, _STORED, header.stored_at_ms, topic, queue_id, queue_offset
            size_and_crc = fields[12], header.tail_crc if is_whole else 0, 0, 0, 0
            return _tuple(Event, (*head, topic_id, known.message_id, *_NO_DELIVERY, *size_and_crc))
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
            body_crc32=header.tail_crc if is_whole else 0,
            timer_number=known.timer_number,
        )
        if flags == FLAG_REPLAY:
            event = self._of_replay(event, body)
        elif flags & FLAG_CAUSE:
            event = self._of_copy(event, body, attempts)
        elif flags & FLAG_TIMER:
            event = self._of_outcome(event, body)
        elif flags & FLAG_HALF:
            event = self._of_half(event, body, queue_id, flags)
        elif flags & FLAG_SCHEDULE:
            event = self._of_schedule(event, body, queue_id, flags)
        else:
            event = self._of_end(event, body)
        if not self._filter.matches(event.kind, event.topic, known):
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

    def _of_replay(self, event: Event, body: memoryview) -> Event:
        replay = message.decode_replay(body)
        return event._replace(
            kind=EventKind.REPLAYED,
            consumer_group=self._lookup.group_name(replay.group_id),
            origin_topic=replay.origin,
            origin_queue_id=replay.root_queue_id,
            origin_queue_offset=replay.root_offset,
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
        is_replaced = queue_id == REPLACED_QUEUE
        is_new = is_replaced or queue_id == SCHEDULE_QUEUE
        return event._replace(
            kind=EventKind.SCHEDULED if is_new else EventKind.MOVED,
            topic=target.origin,
            topic_id=target.topic_id,
            queue_id=target.queue_id,
            queue_offset=target.timer_id,
            due_at_ms=target.due_at_ms,
            reason="damaged" if flags & FLAG_REMAINS else "replaced" if is_replaced else "",
        )._replace(**_committed(body) if flags & FLAG_OUTCOME else {})

    def _of_half(self, event: Event, body: memoryview, queue_id: int, flags: int) -> Event:
        half = message.decode_half(body)
        return event._replace(
            kind=EventKind.HALF if queue_id == HALF_QUEUE else EventKind.MOVED,
            topic=self._lookup.topic_name(half.topic_id),
            topic_id=half.topic_id,
            queue_id=half.queue_id,
            queue_offset=0,
            client_id=half.client_id,
            reason="recovered" if flags & FLAG_OUTCOME else "",
            half_id=half.half_id or event.position,
        )

    def _of_end(self, event: Event, body: memoryview) -> Event:
        outcome = message.decode_outcome(body)
        if outcome.reason == OutcomeReason.COMMITTED:
            return event._replace(reason="committed", half_id=outcome.half_id)
        return event._replace(
            kind=EventKind.DEAD_LETTERED,
            reason="transaction_expired",
            origin_topic=outcome.origin,
            half_id=outcome.half_id,
        )


def _committed(body: memoryview) -> dict[str, Any]:
    """Return the fields of a half message that its commit has scheduled."""
    half_id = message.decode_committed_timer(body).outcome.half_id
    return {"reason": "committed", "half_id": half_id}


def _check(header: RecordHeader, blob: memoryview | bytes) -> None:
    if crc32(blob) != header.tail_crc:
        raise ValueError("the checksum of the message is wrong")
