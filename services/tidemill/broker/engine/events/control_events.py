"""The events of TIMER, TRANSACTION, DEAD_LETTER, CONFIG and EXPIRE records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from tidemill.broker.engine.events.event import Event, EventKind
from tidemill.broker.engine.events.event_filter import EventFilter
from tidemill.broker.engine.events.lookup import GONE, EventLookup
from tidemill.broker.engine.layout import config, dead_letter, expiry, timer_control, transaction
from tidemill.broker.engine.layout.timer_control import TimerOperation
from tidemill.broker.engine.layout.transaction import CheckWritten, TransactionActor
from tidemill.broker.engine.metadata.settled_letters import DEAD_LETTER_QUEUE
from tidemill.broker.engine.store.segment import Record


@final
class ControlEvents:
    """The events of timers, discarded dead letters, resets, deletions and retention."""

    def __init__(self, lookup: EventLookup, event_filter: EventFilter) -> None:
        self._lookup = lookup
        self._filter = event_filter

    def of_timer(self, record: Record) -> Iterator[Event]:
        """Yield the event of a cancelled or rescheduled timer."""
        control = timer_control.decode(record.body)
        is_cancel = control.operation == TimerOperation.CANCEL
        kind = EventKind.RECALLED if is_cancel else EventKind.SCHEDULED
        found = self._lookup.timer(control.timer_id) if self._filter.wants(kind) else None
        header = record.header
        event = Event(
            header.log_offset,
            0,
            kind,
            header.stored_at_ms,
            queue_offset=control.timer_id,
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
        if self._filter.matches(kind, event.topic, known):
            yield event

    def of_transaction(self, record: Record) -> Iterator[Event]:
        """Yield the event of a check that was written, or of a rollback."""
        entry = transaction.decode(record.body)
        is_check = isinstance(entry, CheckWritten)
        kind = EventKind.CHECKED if is_check else EventKind.ROLLED_BACK
        found = self._lookup.half(entry.half_id) if self._filter.wants(kind) else None
        header = record.header
        event = Event(header.log_offset, 0, kind, header.stored_at_ms, half_id=entry.half_id)
        if isinstance(entry, CheckWritten):
            event = event._replace(attempt=entry.checks)
        else:
            event = event._replace(reason=TransactionActor(entry.actor).name.lower())
        known = GONE
        if found is not None:
            half, known = found
            event = event._replace(
                topic=self._lookup.topic_name(half.topic_id),
                topic_id=half.topic_id,
                queue_id=half.queue_id,
                message_id=known.message_id,
            )
        if self._filter.matches(kind, event.topic, known):
            yield event

    def of_discard(self, record: Record) -> Iterator[Event]:
        """Yield the events of discarded dead letters."""
        header = record.header
        entry = dead_letter.decode(record.body)
        topic = self._lookup.topic_name(entry.topic_id)
        group = self._lookup.group_name(entry.group_id)
        is_wanted = self._filter.wants(EventKind.DISCARDED)
        offsets = [offset for begin, end in entry.ranges for offset in range(begin, end)]
        for index, offset in enumerate(offsets if is_wanted else ()):
            known = self._lookup.message_at(entry.topic_id, DEAD_LETTER_QUEUE, offset)
            if self._filter.matches(EventKind.DISCARDED, topic, known):
                yield Event(
                    header.log_offset,
                    index,
                    EventKind.DISCARDED,
                    header.stored_at_ms,
                    topic,
                    DEAD_LETTER_QUEUE,
                    offset,
                    entry.topic_id,
                    known.message_id,
                    group,
                    origin_topic=known.origin_topic,
                    origin_queue_id=known.origin_queue_id,
                    origin_queue_offset=known.origin_queue_offset,
                )

    def of_config(self, record: Record) -> Iterator[Event]:
        """Yield the events of a reset, or of a deleted group or broker group."""
        header = record.header
        item = config.decode_item(record.body)
        if item["op"] == "deleteBrokerGroup":
            # For every topic filter.
            if self._filter.wants(EventKind.BROKER_GROUP_REMOVED) and not self._filter.message_id:
                yield Event(
                    header.log_offset,
                    0,
                    EventKind.BROKER_GROUP_REMOVED,
                    header.stored_at_ms,
                    reason=item["name"],
                )
            return
        if not self._filter.wants(EventKind.RESET):
            return
        if item["op"] == "deleteGroup":
            # For every topic filter, but not for a message id.
            if not self._filter.message_id:
                yield Event(
                    header.log_offset,
                    0,
                    EventKind.RESET,
                    header.stored_at_ms,
                    consumer_group=self._lookup.group_name(item["id"]),
                    reason="group_deleted",
                )
            return
        if item["op"] != "reset":
            return
        group = self._lookup.group_name(item["group_id"])
        for index, (topic_id, queue_id, offset) in enumerate(item["offsets"]):
            topic = self._lookup.topic_name(topic_id)
            if self._filter.matches(EventKind.RESET, topic, GONE):
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

    def of_expiry(self, record: Record) -> Iterator[Event]:
        """Yield the events of messages that expired before a pop: one per range."""
        header = record.header
        for index, one in enumerate(expiry.decode(record.body).ranges):
            topic = self._lookup.topic_name(one.topic_id)
            if self._filter.matches(EventKind.EXPIRED, topic, GONE):
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
