"""Pages of the deliveries of several broker groups contain each delivery once, in order."""

from __future__ import annotations

import pytest

from tidemill.admin.cluster.brokers import BrokerAnswer
from tidemill.admin.messages.delivery_pages import DeliveryCursor, cursor_of, merged, position_after
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

OF = {
    "a": [(1, 5, 0), (1, 5, 1), (3, 1, 0), (3, 2, 31)],
    "b": [(1, 4, 0), (2, 0, 0), (3, 1, 0)],
    "c": [(3, 0, 0)],
}


def asked(broker: str, behind: pb.DeliveryPosition | None, count: int) -> pb.GetDeliveriesReply:
    """Answer as a broker that lists at most `count` deliveries."""
    start = (behind.since_ms, behind.slot, behind.index) if behind is not None else (-1, 0, 0)
    left = [place for place in OF[broker] if place > start]
    reply = pb.GetDeliveriesReply()
    for since_ms, slot, index in left[:count]:
        place = pb.DeliveryPosition(since_ms=since_ms, slot=slot, index=index)
        reply.deliveries.append(pb.InFlight(topic=broker, place=place))
        if len(left) > count:
            reply.end.CopyFrom(place)
    return reply


@pytest.mark.parametrize("page_size", [1, 2, 3, 100])
@pytest.mark.parametrize("looked_at", [1, 2, 100])
def test_pages_contain_each_message_once_in_order(page_size: int, looked_at: int) -> None:
    found: list[tuple[int, str, int, int]] = []
    token: str | None = ""
    while token is not None:
        cursor = cursor_of(token) if token else None
        count = min(page_size, looked_at)
        answers = [
            BrokerAnswer(
                name, asked(name, None if cursor is None else position_after(cursor, name), count)
            )
            for name in OF
        ]
        page, token = merged(answers, page_size)
        assert len(page) <= page_size
        found += [
            (one.place.since_ms, broker, one.place.slot, one.place.index) for broker, one in page
        ]
    assert found == sorted(
        (since_ms, name, slot, index)
        for name, places in OF.items()
        for since_ms, slot, index in places
    )


def test_a_token_contains_its_cursor() -> None:
    assert cursor_of("7:broker-0:8:9") == DeliveryCursor(7, "broker-0", 8, 9)
