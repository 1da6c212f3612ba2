"""The number of events of a record, without a filter. It bounds the index of a read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tidemill.broker.engine.layout import ack, config, dead_letter, expiry, pop_checkpoint, renewal
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.layout.renewal import RenewalReason
from tidemill.broker.engine.store.segment import Record


def event_count(record: Record) -> int:
    """Return the number of events of a record. Raises as its decoder does if it is damaged."""
    count = _COUNTS.get(record.header.kind)
    return 0 if count is None else count(record)


def _of_checkpoint(record: Record) -> int:
    ck = pop_checkpoint.decode(record.body)
    return len(ck.offsets) if ck.superseded is None else 1


def _of_renewal(record: Record) -> int:
    renewed = renewal.decode(record.body)
    if renewed.why is RenewalReason.HANDED_OVER:
        return 0
    return sum(map(int.bit_count, renewal.decode_live(record.tail, len(renewed.entries))))


def _of_config(record: Record) -> int:
    item = config.decode_item(record.body)
    if item["op"] == "deleteGroup":
        return 1
    return len(item["offsets"]) if item["op"] == "reset" else 0


_COUNTS: Final[dict[int, Callable[[Record], int]]] = {
    RecordKind.MESSAGE: lambda _: 1,
    RecordKind.TIMER: lambda _: 1,
    RecordKind.TRANSACTION: lambda _: 1,
    RecordKind.DEAD_LETTER: lambda record: sum(
        end - begin for begin, end in dead_letter.decode(record.body).ranges
    ),
    RecordKind.CK: _of_checkpoint,
    RecordKind.ACK: lambda record: sum(
        bits.bit_count() for *_, bits in ack.decode(record.body).entries
    ),
    RecordKind.RENEW: _of_renewal,
    RecordKind.CONFIG: _of_config,
    RecordKind.EXPIRE: lambda record: len(expiry.decode(record.body).ranges),
}
