"""Pages of the deliveries in flight at all broker groups, ordered by the time of the pop.

    token: since_ms ":" broker ":" slot ":" index

Deliveries of one time are ordered by the other fields of the token. Each broker lists its
deliveries in this order. If a broker ends its list early, the page ends there too: later deliveries
of other brokers belong to the next page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

from tidemill.admin.cluster.brokers import BrokerAnswer
from tidemill.admin.http import paging
from tidemill.admin.json.schema import EXACT_MAX
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

U32_MAX: Final = 2**32 - 1
Token = Annotated[
    paging.PageCursor,
    paging.cursor_query(
        "[0-9]{1,16}:[A-Za-z0-9._-]{1,64}:[0-9]{1,10}:[0-9]{1,10}",
        "the position of its last delivery",
    ),
]


class DeliveryCursor(NamedTuple):
    """A position in the list. Its order is the order of the list."""

    since_ms: int
    broker: str
    slot: int
    message_index: int


class DeliveryPage(NamedTuple):
    """Ordered deliveries with their broker groups, and the token of the next page."""

    deliveries: list[tuple[str, pb.InFlight]]
    next_token: str | None  # None: this is the last page


def cursor_of(token: str) -> DeliveryCursor:
    """Return the position after which a page begins."""
    since_ms, broker, slot, index = token.split(":")
    return DeliveryCursor(
        min(int(since_ms), EXACT_MAX), broker, min(int(slot), U32_MAX), min(int(index), U32_MAX)
    )


def position_after(cursor: DeliveryCursor, broker: str) -> pb.DeliveryPosition:
    """Return the position in the list of one broker group for the page after `cursor`."""
    if broker == cursor.broker:
        slot, index = cursor.slot, cursor.message_index
        return pb.DeliveryPosition(since_ms=cursor.since_ms, slot=slot, index=index)
    # The deliveries of another broker at this time are all before the cursor, or all after it.
    since_ms = cursor.since_ms - (broker > cursor.broker)
    return pb.DeliveryPosition(since_ms=since_ms, slot=U32_MAX, index=U32_MAX)


def merged(answers: Sequence[BrokerAnswer[pb.GetDeliveriesReply]], page_size: int) -> DeliveryPage:
    """Return the first `page_size` deliveries of all broker groups."""
    ends = [_cursor(reply.end, broker) for broker, reply in answers if reply.HasField("end")]
    found = [
        (_cursor(delivery.place, broker), delivery)
        for broker, reply in answers
        for delivery in reply.deliveries
    ]
    page, token = paging.merged(found, ends, page_size)
    return DeliveryPage([(cursor.broker, delivery) for cursor, delivery in page], token)


def _cursor(position: pb.DeliveryPosition, broker: str) -> DeliveryCursor:
    return DeliveryCursor(position.since_ms, broker, position.slot, position.index)
