"""The events of CK, ACK and RENEW records: one event per message of a delivery."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, final

from tidemill.broker.engine.events.event import Event, EventKind
from tidemill.broker.engine.events.event_filter import EventFilter
from tidemill.broker.engine.events.lookup import GONE, EventLookup, KnownDelivery, rows_by_delivery
from tidemill.broker.engine.layout import ack, pop_checkpoint, renewal
from tidemill.broker.engine.layout.delivery_rows import DeliveryRows
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_SUSPEND, PopCheckpoint
from tidemill.broker.engine.layout.record import RecordHeader
from tidemill.broker.engine.layout.renewal import RenewalReason
from tidemill.broker.engine.store.segment import Record

_tuple = tuple.__new__
_DELIVERED, _ACKED = EventKind.DELIVERED, EventKind.ACKED
# By the flag of an ACK record.
_SETTLED_AS: Final = {
    0: (EventKind.ACKED, ""),
    ack.FLAG_EXPIRED: (EventKind.EXPIRED, "in_flight"),
    ack.FLAG_KEPT: (EventKind.DEAD_LETTERED, "kept"),
}
_GIVEN_BACK: Final = frozenset({RenewalReason.CLIENT_ENDED, RenewalReason.CLIENT_SILENT})
_REASONS: Final = {
    RenewalReason.CLIENT_ENDED: "client_ended",
    RenewalReason.CLIENT_SILENT: "client_silent",
    RenewalReason.NOT_HANDED_OVER: "not_handed_over",
    RenewalReason.DISCONNECTED: "client_disconnected",
}


@final
class DeliveryEvents:
    """The events of deliveries, acks and renewals."""

    def __init__(self, lookup: EventLookup, event_filter: EventFilter) -> None:
        self._lookup = lookup
        self._filter = event_filter

    def of_checkpoint(self, record: Record) -> Iterable[Event]:
        """Return the events of a pop, or the event of a changed invisible duration."""
        if not self._filter.wants(_DELIVERED, EventKind.NACKED, EventKind.RENEWED):
            return ()
        header = record.header
        ck = pop_checkpoint.decode(record.body)
        if ck.superseded is not None:
            return self._of_change(header, ck, ck.superseded)
        return self._delivered(header, self._lookup.keep_delivery(header.log_offset, ck))

    def _delivered(self, header: RecordHeader, known: KnownDelivery) -> Iterator[Event]:
        position, at_ms = header.log_offset, header.stored_at_ms
        group, topic, topic_id, queue_id, offsets, messages, attempts, client_id, until = known
        is_all = self._filter.is_all
        for index, offset in enumerate(offsets):
            one = messages[index]
            if is_all or self._filter.matches(_DELIVERED, topic, one):
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
                        0,
                    ),
                )

    def _of_change(
        self, header: RecordHeader, ck: PopCheckpoint, replaced: tuple[int, int, int]
    ) -> Iterator[Event]:
        """Yield the event of a delivery that replaces another one."""
        _, old_id, old_index = replaced
        known = self._lookup.keep_delivery(header.log_offset, ck)
        is_given_back = header.flags & pop_checkpoint.GIVEN_BACK
        kind = EventKind.NACKED if is_given_back else EventKind.RENEWED
        # The new delivery has the attempt of the message.
        yield from self._events(
            header,
            kind,
            known,
            [(0, 0)],
            delivery_id=old_id,
            delivery_index=old_index,
            due_at_ms=ck.visible_at_ms,
            reason="unread" if ck.flags & FLAG_SUSPEND else "",
        )

    def _events(
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
        """Yield events of a delivery's messages, by (index of the event, index of the message)."""
        position, at_ms = header.log_offset, header.stored_at_ms
        is_all = self._filter.is_all
        if known is None:
            # Retention has removed the CK of the delivery.
            for index, of_message in numbered:
                if is_all or self._filter.matches(kind, "", GONE):
                    yield Event(
                        position,
                        index,
                        kind,
                        at_ms,
                        due_at_ms=due_at_ms,
                        reason=reason,
                        delivery_id=delivery_id,
                        delivery_index=of_message,
                    )
            return
        group, topic, topic_id, queue_id, offsets, messages, attempts, client_id, *_ = known
        for index, of_message in numbered:
            one = messages[of_message]
            if is_all or self._filter.matches(kind, topic, one):
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
                        0,
                    ),
                )

    def of_acks(self, record: Record) -> Iterable[Event | None]:
        """Return the events of acked messages, or of messages that were settled without an ack."""
        header = record.header
        kind, reason = _SETTLED_AS[header.flags]
        if not self._filter.wants(kind):
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
            for event in self._events(
                header, kind, known, numbered, delivery_id=delivery_id, reason=reason
            ):
                is_range = kind is EventKind.EXPIRED and known is not None
                yield event._replace(end_offset=event.queue_offset + 1) if is_range else event
            yield None

    def of_renewal(self, record: Record) -> Iterable[Event | None]:
        """Return the events of extended deliveries, or of deliveries that were given back."""
        if not self._filter.wants(EventKind.RENEWED, EventKind.NACKED):
            return ()
        renewed = renewal.decode(record.body)
        live = renewal.decode_live(record.tail, len(renewed.entries))
        row_bytes = record.tail[renewal.LIVE_SIZE * len(renewed.entries) :]
        rows = rows_by_delivery(bytes(row_bytes)) if len(row_bytes) else None
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
            return  # It changes no deadline.
        kind = EventKind.NACKED if why in _GIVEN_BACK else EventKind.RENEWED
        reason = _REASONS.get(why, "")
        begin = 0
        for number, (_, delivery_id) in enumerate(renewed.entries):
            known = self._lookup.delivery(delivery_id, rows)
            indexes = _indexes_of(live[number])
            numbered = enumerate(indexes, begin)
            begin += len(indexes)
            yield from self._events(
                header,
                kind,
                known,
                numbered,
                delivery_id=delivery_id,
                due_at_ms=renewed.visible_at_ms,
                reason=reason,
            )
            yield None


_INDEXES: Final[dict[int, tuple[int, ...]]] = {}
_INDEXES_MAX: Final = 4_096


def _indexes_of(bits: int) -> Sequence[int]:
    """Return the positions of the set bits."""
    found = _INDEXES.get(bits)
    if found is None:
        found = tuple([index for index in range(bits.bit_length()) if bits >> index & 1])
        if len(_INDEXES) < _INDEXES_MAX:
            _INDEXES[bits] = found
    return found
