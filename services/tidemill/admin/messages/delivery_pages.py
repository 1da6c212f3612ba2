"""Pages of what all broker groups have in flight, in one order: by time of the pop, then as below.

    token: since_ms ":" broker ":" slot ":" index

Each broker lists its own by time, slot and index. One whose look ended early knows no more than up
to a place: what others have behind that place waits for the next page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from tidemill.admin.cluster.brokers import BrokerAnswer
from tidemill.admin.http import paging
from tidemill.admin.http.paging import decode_token
from tidemill.admin.json.schema import EXACT_MAX
from tidemill.common.errors import BadRequest
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

PLACE_CHARS_MAX: Final = 64 + 96  # of three numbers, and of the name of a broker group
U32_MAX: Final = 2**32 - 1


class DeliveryCursor(NamedTuple):
    """A place in the list, as places are ordered."""

    since_ms: int
    broker: str
    slot: int
    message_index: int


class DeliveryPage(NamedTuple):
    """Deliveries in their order, each with its broker group; None: there are no more."""

    deliveries: list[tuple[str, pb.InFlight]]
    next_token: str | None


def place_of(token: str) -> DeliveryCursor:
    """Return the place behind which a page begins; raise BadRequest."""
    parts = decode_token(token).split(":")
    # isdecimal() takes other scripts' digits too, and int() reads those as well.
    numbers = parts[:1] + parts[2:]
    if len(parts) != 4 or len(token) > PLACE_CHARS_MAX or not all(map(str.isdecimal, numbers)):
        raise BadRequest("pageToken is not one that this API gave out")
    since_ms, slot, index = map(int, numbers)
    return DeliveryCursor(
        min(since_ms, EXACT_MAX), parts[1], min(slot, U32_MAX), min(index, U32_MAX)
    )


def after(place: DeliveryCursor, broker: str) -> pb.DeliveryPosition:
    """Return behind which place one broker group is asked for the page behind `place`."""
    if broker == place.broker:
        slot, index = place.slot, place.message_index
        return pb.DeliveryPosition(since_ms=place.since_ms, slot=slot, index=index)
    # Its deliveries of this time come all before the place, or all behind it.
    since_ms = place.since_ms - (broker > place.broker)
    return pb.DeliveryPosition(since_ms=since_ms, slot=U32_MAX, index=U32_MAX)


def merged(answers: Sequence[BrokerAnswer[pb.GetDeliveriesReply]], page_size: int) -> DeliveryPage:
    """Return the first `page_size` of all."""
    ends = [_place(reply.end, broker) for broker, reply in answers if reply.HasField("end")]
    found = [
        (_place(delivery.place, broker), delivery)
        for broker, reply in answers
        for delivery in reply.deliveries
    ]
    page, token = paging.merged(found, ends, page_size)
    return DeliveryPage([(place.broker, delivery) for place, delivery in page], token)


def _place(place: pb.DeliveryPosition, broker: str) -> DeliveryCursor:
    return DeliveryCursor(place.since_ms, broker, place.slot, place.index)
