"""Reading events: a range of the committed log, record by record, in slices.

Invariant: the number and the order of a record's events depend on the record alone. So the index of
an event is the same for every query.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Final, final

from tidemill.broker.engine.events.control_events import ControlEvents
from tidemill.broker.engine.events.counts import event_count
from tidemill.broker.engine.events.delivery_events import DeliveryEvents
from tidemill.broker.engine.events.event import Event, EventKind, EventQuery
from tidemill.broker.engine.events.event_filter import EventFilter
from tidemill.broker.engine.events.lookup import EventLookup
from tidemill.broker.engine.events.message_events import MessageEvents
from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.layout.renewal import RenewalReason
from tidemill.broker.engine.store.commit_log import CommitLog
from tidemill.broker.engine.store.segment import Hole, Record
from tidemill.broker.engine.tally import Allowance, Tally
from tidemill.common.errors import LogChanged
from tidemill.message import stored_message

RECORDS_A_STEP: Final = 128  # with their events and look-ups, about a millisecond
_tuple = tuple.__new__
_unpack_place = message.PLACE.unpack_from
_unpack_fields = stored_message.FIXED.unpack_from
_FIXED_SIZE, _HASH_SIZE = stored_message.FIXED_SIZE, stored_message.KEY_HASH_SIZE
_STORED, _DELIVERED, _ACKED = EventKind.STORED, EventKind.DELIVERED, EventKind.ACKED
# Errors of decoding a record with an intact head: the walk does not verify the tail.
_UNREADABLE = (struct.error, ValueError, IndexError, KeyError, TypeError, OverflowError)
_GIVEN_BACK: Final = {
    RenewalReason.CLIENT_ENDED: "client_ended",
    RenewalReason.CLIENT_SILENT: "client_silent",
}


@final
class EventRead:
    """A read in progress: call `step` until it returns False, and `take` to get the events."""

    def __init__(
        self,
        log: CommitLog,
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
        """Read up to `until_position`, or to the committed offset if it is 0."""
        self._log = log
        self._events_left = events_max
        self._tally = tally
        event_filter = EventFilter(query)
        self._messages = MessageEvents(lookup, event_filter)
        deliveries = DeliveryEvents(lookup, event_filter)
        controls = ControlEvents(lookup, event_filter)
        self._makers: Final[dict[int, Callable[[Record], Iterable[Event | None]]]] = {
            RecordKind.CK: deliveries.of_checkpoint,
            RecordKind.ACK: deliveries.of_acks,
            RecordKind.RENEW: deliveries.of_renewal,
            RecordKind.TIMER: controls.of_timer,
            RecordKind.TRANSACTION: controls.of_transaction,
            RecordKind.DEAD_LETTER: controls.of_discard,
            RecordKind.CONFIG: controls.of_config,
            RecordKind.EXPIRE: controls.of_expiry,
        }
        committed = int(log.committed_offset)
        # The read continues at this record, with the event of this index.
        self.next_index = from_index
        self.next_position = min(max(from_position, log.state_floor), committed)
        # The begin of the requested range, if retention has removed a part of it; else 0.
        self.gone_from = from_position if 0 < from_position < log.state_floor else 0
        self._end = min(committed, until_position) if until_position else committed
        self._committed = committed
        self._end = min(self._end, self.next_position + log_bytes_max)
        if self.next_position != from_position:
            self.next_index = 0
        self.damaged_bytes = 0  # bytes without a readable record
        self._found: list[Event] = []
        # The current record's remaining events, and its end: it may have more than a slice.
        self._remaining: Iterator[Event | None] | None = None
        self._record_end = 0

    def take(self) -> list[Event]:
        """Return and clear the events since the last call, in log order."""
        found, self._found = self._found, []
        return found

    def bounds(self) -> tuple[int, int]:
        """Return the first position of the log, and the committed offset."""
        return self._log.state_floor, int(self._log.committed_offset)

    def step(self) -> bool:
        """Do one slice. Return True while more remains."""
        allowance = Allowance(self._tally, items=RECORDS_A_STEP)
        if self._remaining is not None:
            self._take_remaining(allowance)
        if self._remaining is None and self.next_position < self._log.state_floor:
            # Retention removed the next records after the previous step.
            self.gone_from = self.gone_from or self.next_position
            self._move_to(self._log.state_floor)
        while self._has_more and self._remaining is None and not allowance.is_spent:
            self._walk(allowance)
        return self._has_more

    @property
    def _has_more(self) -> bool:
        return self._events_left > 0 and self.next_position < self._end

    def _events_of(self, record: Record) -> Iterator[Event | None]:
        """Return the matching events of a record that is not a message.

        A None between them marks a place where a slice may end.
        """
        maker = self._makers.get(record.header.kind)
        return iter(()) if maker is None else iter(maker(record))

    def _move_to(self, position: int) -> None:
        self.next_position, self.next_index = position, 0

    def _take_remaining(self, allowance: Allowance) -> bool:
        """Take the remaining events of a record. Return False if the slice ends before."""
        assert self._remaining is not None, "a record has remaining events"
        tally, found, from_index = self._tally, self._found, self.next_index
        try:
            for event in self._remaining:
                tally.add(1)
                if event is not None and event.number >= from_index:
                    found.append(event)
                    self.next_index = event.number + 1
                    self._events_left -= 1
                if allowance.is_spent or not self._events_left:
                    return False
        except _UNREADABLE:
            # The record is damaged: skip its other events.
            self.damaged_bytes += self._record_end - self.next_position
        self._remaining = None
        self._move_to(self._record_end)
        return True

    def _walk(self, allowance: Allowance) -> None:
        """Read records of one segment. No record is kept after a slice, only its decoded entry."""
        log, tally = self._log, self._tally
        position = LogOffset(self.next_position)
        segment = log.segment_of(position)
        # Beyond the end of this read, which may be inside a record.
        stop = min(self._committed, segment.end)
        is_warm = log.reader.is_warm(position)
        of_message = self._messages.of_message
        records = log.reader.walk_past_damage(segment, position, stop)
        for record in records:
            if record.log_offset >= self._end:
                self._move_to(record.log_offset)
                return
            if isinstance(record, Hole):
                log.damage.check_directories()
                tally.add(1)
                # Counted once, at its begin: no read begins inside a record (`RecordStarts`).
                self.damaged_bytes += record.end - record.log_offset
                self._move_to(record.end)
                continue
            header = record.header
            # A cold record is read from the disk as a whole, and so is each message.
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
                self._move_to(header.log_offset + header.size)
            else:
                self._record_end = header.log_offset + header.size
                try:
                    self._remaining = self._events_of(record)
                except _UNREADABLE:
                    self.damaged_bytes += header.size
                    self._move_to(self._record_end)
                    continue
                if not self._take_remaining(allowance):
                    return
            if allowance.is_spent or not self._events_left:
                return
        self._move_to(stop)  # After the padding of the segment.

    def _check_index(self, record: Record) -> None:
        """Reject an index that no reply can have contained: the read would skip events."""
        try:
            count = event_count(record)
        except _UNREADABLE:
            return  # A damaged record is skipped.
        if self.next_index > count:
            raise LogChanged(
                f"the record at position {record.header.log_offset} has {count} events, so index "
                f"{self.next_index} is invalid: the log has changed; read from index 0 on"
            )
