"""Read marks: one ping at a time asks the peer what it has read, with a minimum period."""

from __future__ import annotations

from tests.support.clients import http2_peer as peer
from tests.support.clients.http2_peer import greeted_server
from tidemill.transport.http2 import frames
from tidemill.transport.http2.connection import Connection
from tidemill.transport.http2.events import MarkReached
from tidemill.transport.http2.read_marks import PERIOD_S


def pings(connection: Connection) -> list[bytes]:
    return [
        one.payload
        for one in peer.of(frames.PING, peer.parse(connection.take_output()))
        if not one.flags & frames.ACK
    ]


def test_a_ping_asks_for_all_marks_before_it() -> None:
    connection = greeted_server()
    marks = connection.mark_output(), connection.mark_output()
    assert connection.request_marks(0.0) is None
    [payload] = pings(connection)
    later = connection.mark_output()
    assert connection.request_marks(10.0) is None, "one ping at a time"
    assert pings(connection) == []
    events = connection.receive(peer.ping(payload, is_ack=True), 10.0)
    assert events == [MarkReached(marks[1])]
    assert connection.request_marks(10.0) is None
    assert pings(connection) == [payload]
    events = connection.receive(peer.ping(payload, is_ack=True), 10.0)
    assert events == [MarkReached(later)]
    assert connection.request_marks(20.0) is None
    assert pings(connection) == [], "there is no mark to ask for"


def test_a_peer_gets_only_a_few_pings_per_second() -> None:
    connection = greeted_server()
    connection.mark_output()
    connection.request_marks(5.0)
    [payload] = pings(connection)
    connection.receive(peer.ping(payload, is_ack=True), 5.0)
    connection.mark_output()
    assert connection.request_marks(5.0) == PERIOD_S
    assert pings(connection) == []
    assert connection.request_marks(5.0 + PERIOD_S) is None
    assert pings(connection) == [payload]


def test_other_pongs_confirm_nothing() -> None:
    connection = greeted_server()
    connection.mark_output()
    connection.request_marks(0.0)
    assert connection.receive(peer.ping(b"any ping", is_ack=True), 0.0) == []
    # Nor does an unrequested one, because its marks were confirmed before.
    fresh = greeted_server()
    fresh.mark_output()
    assert fresh.receive(peer.ping(b"all read", is_ack=True), 0.0) == [MarkReached(0)]


def test_a_pressing_mark_is_requested_at_once_with_one_ping_in_flight() -> None:
    connection = greeted_server()
    connection.mark_output()
    connection.request_marks(5.0)
    [payload] = pings(connection)
    connection.mark_output()
    assert connection.request_marks(5.0, is_pressing=True) is None
    assert pings(connection) == []
    connection.receive(peer.ping(payload, is_ack=True), 5.0)
    assert connection.request_marks(5.0, is_pressing=True) is None
    assert pings(connection) == [payload]
