"""The allowances of a peer, the limits of a turn, and timeouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from tests.support.clients import http2_peer as peer
from tests.support.clients.http2_peer import greeted_server
from tests.support.clients.streams import stream_count
from tidemill.transport.http2 import frames
from tidemill.transport.http2.allowances import RateBucket
from tidemill.transport.http2.connection import Connection, Role
from tidemill.transport.http2.events import ConnectionEnded, Event, RequestReceived, StreamReset
from tidemill.transport.http2.flow_control import PROGRESS_BYTES
from tidemill.transport.http2.frames import ErrorCode
from tidemill.transport.http2.limits import Limit, Limits


def test_an_allowance_is_a_burst_and_a_rate() -> None:
    allowance = RateBucket(burst=3, per_s=2, now_s=0.0)
    assert [allowance.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert [allowance.take(1.0) for _ in range(3)] == [True, True, False]
    assert [allowance.take(100.0) for _ in range(4)] == [True, True, True, False]
    allowance.earn(100)
    assert [allowance.take(100.0) for _ in range(4)] == [True, True, True, False]


SMALL = Limits(
    resets_burst=20,
    resets_per_s=1,
    settings_burst=20,
    settings_per_s=1,
    pings_burst=20,
    pings_per_s=1,
    empty_data_burst=20,
    empty_data_per_s=1,
    control_burst=20,
    control_per_s=1,
)
# Each attack as the bytes of its turn n; 19 turns are accepted after a first request.
FLOODS: dict[str, tuple[Limit, Callable[[int], bytes]]] = {
    "rapid reset": (Limit.RESETS, lambda n: peer.headers(2 * n + 3) + peer.rst_stream(2 * n + 3)),
    "resets of removed streams": (Limit.RESETS, lambda n: peer.rst_stream(1)),
    "malformed requests": (Limit.RESETS, lambda n: peer.headers(2 * n + 3, (("a", "b"),))),
    "settings": (Limit.SETTINGS, lambda n: peer.settings()),
    "pings": (Limit.PINGS, lambda n: peer.ping()),
    "empty data": (Limit.EMPTY_DATA, lambda n: peer.data(1)),
    "nothing but padding": (Limit.EMPTY_DATA, lambda n: peer.data(1, padding=200)),
    "priorities": (Limit.CONTROL, lambda n: peer.priority(1, depends_on=3)),
    "windows": (Limit.CONTROL, lambda n: peer.window_update(0, 1)),
    "windows of a stream": (Limit.CONTROL, lambda n: peer.window_update(1, 1)),
    "unknown frames": (Limit.CONTROL, lambda n: peer.frame(0x77)),
    "goaways": (Limit.CONTROL, lambda n: peer.goaway(0)),
    "answers to no ping": (Limit.CONTROL, lambda n: peer.ping(is_ack=True)),
    "answers to no settings": (Limit.CONTROL, lambda n: peer.SETTINGS_ACK),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_ends_its_connection_and_a_trickle_does_not(name: str) -> None:
    limit, turn = FLOODS[name]
    hits: Counter[Limit] = Counter()

    def greeted() -> Connection:
        connection = Connection(Role.SERVER, SMALL, now_s=0.0, hits=hits)
        connection.receive(peer.CLIENT_GREETING + peer.headers(1), 0.0)
        return connection

    def turns(connection: Connection, times: Iterable[float]) -> list[Event]:
        return [one for n, now in enumerate(times) for one in connection.receive(turn(n), now)]

    calm = greeted()
    assert not [one for one in turns(calm, range(100)) if isinstance(one, ConnectionEnded)]
    assert not hits
    events = turns(greeted(), [0.0] * 25)
    [failed] = [one for one in events if isinstance(one, ConnectionEnded)]
    assert (failed.code, failed.limit) == (ErrorCode.ENHANCE_YOUR_CALM, limit)
    assert hits == {limit: 1}


LATE: dict[str, bytes] = {"empty data": peer.data(1), "headers": peer.headers(1, (("a", "b"),))}


@pytest.mark.parametrize("name", LATE)
def test_frames_for_a_stream_that_we_reset_count_for_the_limits(name: str) -> None:
    connection = greeted_server(SMALL)
    connection.receive(peer.headers(1, (("a", "b"),)), 0.0)
    events = connection.receive(LATE[name] * 25, 0.0)
    assert isinstance(events[-1], ConnectionEnded)
    assert events[-1].limit is Limit.CONTROL


def test_completed_work_earns_pings_and_window_updates() -> None:
    connection = greeted_server(SMALL)
    for n in range(200):
        stream_id = 2 * n + 1
        connection.receive(peer.request(stream_id) + peer.ping() + peer.window_update(0, 9), 0.0)
        stream = connection._streams.by_id[stream_id]
        connection.send_response(stream, b"", b"answer", b"")
    assert not connection.is_closed


def test_data_of_streams_earns_pings_and_window_updates() -> None:
    connection = greeted_server(SMALL)
    connection.receive(peer.headers(1), 0.0)
    for _ in range(200):
        connection.send_data(connection._streams.by_id[1], b"message")
        connection.receive(peer.ping() + peer.window_update(0, 7), 0.0)
    assert not connection.is_closed


def test_a_peer_that_reads_much_at_once_may_answer_it_later() -> None:
    """A Node.js client updates two windows for each piece that it reads, at any later time."""
    connection = greeted_server(SMALL)
    window = peer.settings({frames.Setting.INITIAL_WINDOW_SIZE: 1 << 30})
    connection.receive(window + peer.window_update(0, 1 << 30) + peer.headers(1), 0.0)
    connection.send_data(connection._streams.by_id[1], bytes(4 << 20))
    for _ in range((4 << 20) // 4_096):
        connection.receive(peer.window_update(0, 4_096) + peer.window_update(1, 4_096), 0.0)
    assert not connection.is_closed


def test_a_turn_reads_a_limited_number_of_frames() -> None:
    connection = greeted_server()
    raw = b"".join(peer.ping(bytes((n,)) * 8) for n in range(10))
    turns = []
    for more in (raw, b"", peer.ping()):
        connection.receive(more, 0.0, frames_max=4)
        turns.append((len(peer.parse(connection.take_output())), connection.has_input))
    assert turns == [(4, True), (4, True), (3, False)]


def test_a_block_in_too_many_frames_ends_the_connection() -> None:
    limit = Limits().continuations_max
    raw = peer.headers(1, is_complete=False) + peer.continuation(1, b"", is_complete=False) * limit
    events = greeted_server().receive(raw, 0.0)
    assert isinstance(events[-1], ConnectionEnded)
    assert events[-1].limit is Limit.CONTINUATIONS


def in_frames(stream_id: int, block: bytes) -> bytes:
    pieces = [block[at : at + 16_384] for at in range(0, len(block), 16_384)]
    return peer.frame(frames.HEADERS, pieces[0], stream_id=stream_id) + b"".join(
        peer.continuation(stream_id, piece, is_complete=piece is pieces[-1]) for piece in pieces[1:]
    )


# 40 KB uncompressed, and 40 KB from 4: one field in the table and its index many times.
LONG_LISTS = {
    "block": peer.block((*peer.GRPC_REQUEST, *((f"x-{n}", "v" * 1_000) for n in range(40)))),
    "list": peer.block(peer.GRPC_REQUEST) + b"\x40\x01a\x7f\xa1\x1e" + b"v" * 4_000 + b"\xbe" * 9,
}


@pytest.mark.parametrize("name", LONG_LISTS)
def test_a_header_list_that_is_too_long_ends_only_its_stream(name: str) -> None:
    hits: Counter[Limit] = Counter()
    connection = Connection(Role.SERVER, Limits(), now_s=0.0, hits=hits)
    connection.receive(peer.CLIENT_GREETING + peer.headers(1), 0.0)
    connection.take_output()
    long = LONG_LISTS[name]
    raw = (
        in_frames(3, long)
        if len(long) > 16_384
        else (peer.frame(frames.HEADERS, long, stream_id=3, flags=frames.END_HEADERS))
    )
    assert connection.receive(raw, 0.0) == []
    assert connection.take_output() == peer.rst_stream(3, ErrorCode.ENHANCE_YOUR_CALM)
    assert hits == {Limit.HEADER_BYTES: 1}
    # The frames after it were in flight, the table still matches the peer's, and others are served.
    connection.receive(peer.data(3, b"late", is_last=True), 0.0)
    [event] = connection.receive(peer.headers(5, is_last=True), 0.0)
    assert isinstance(event, RequestReceived)
    assert stream_count(connection) == 2


def test_a_header_bomb_ends_the_connection() -> None:
    full = bytes(16_384)
    raw = peer.frame(frames.HEADERS, full, stream_id=1)
    raw += peer.continuation(1, full, is_complete=False) * 16
    events = greeted_server().receive(raw, 0.0)
    assert isinstance(events[-1], ConnectionEnded)
    assert events[-1].limit is Limit.HEADER_BYTES


def test_small_windows_that_stay_closed_end_only_their_stream() -> None:
    connection = greeted_server(Limits(stall_timeout_s=60.0))
    connection.receive(peer.settings({frames.Setting.INITIAL_WINDOW_SIZE: 1}), 0.0)
    connection.receive(peer.headers(1, is_last=True) + peer.headers(3, is_last=True), 0.0)
    first, second = connection._streams.by_id[1], connection._streams.by_id[3]
    connection.send_data(first, bytes(PROGRESS_BYTES))
    connection.send_data(second, bytes(3 * PROGRESS_BYTES))
    connection.receive(peer.window_update(0, 3 * PROGRESS_BYTES), 0.0)
    for now in (30.0, 59.0):
        # A byte now and then is no progress, and all queued data must be held for it.
        connection.receive(peer.window_update(1, 1), now)
        connection.receive(peer.window_update(3, PROGRESS_BYTES), now)
        assert connection.check(now) == []
    connection.take_output()
    assert connection.check(61.0) == [StreamReset(first, ErrorCode.CANCEL)]
    assert connection.take_output() == peer.rst_stream(1)
    assert stream_count(connection) == 1


# ---------------------------------------------------------------- as time passes


def ended(connection: Connection, now_s: float) -> Limit | None:
    for event in connection.check(now_s):
        if isinstance(event, ConnectionEnded):
            return event.limit
    return None


def test_a_handshake_must_be_complete_in_time() -> None:
    for begun in (b"", frames.PREFACE[:5], frames.PREFACE):
        connection = Connection(Role.SERVER, Limits(handshake_timeout_s=10.0), now_s=100.0)
        connection.receive(begun, 109.0)
        assert ended(connection, 110.0) is None
        assert ended(connection, 110.1) is Limit.HANDSHAKE


@pytest.mark.parametrize("begun", [peer.ping()[:-1], peer.headers(1, is_complete=False)])
def test_an_incomplete_frame_or_block_must_continue(begun: bytes) -> None:
    connection = greeted_server()
    connection.receive(begun, 0.0)
    assert ended(connection, 60.0) is None
    assert ended(connection, 61.0) is Limit.REQUEST


def test_a_connection_without_streams_is_closed_after_a_while() -> None:
    connection = greeted_server()
    connection.receive(peer.headers(1, is_last=True), 0.0)
    connection.receive(peer.rst_stream(1), 50.0)
    connection.receive(peer.ping(), 169.0)
    assert ended(connection, 170.0) is None
    # The client is asked to leave first, because a call may be in flight.
    assert ended(connection, 171.0) is None
    assert frames.GOAWAY in [frame.kind for frame in peer.parse(connection.take_output())]
    assert ended(connection, 172.0) is Limit.IDLE


def test_a_silent_peer_gets_a_ping() -> None:
    connection = greeted_server()
    connection.receive(peer.headers(1, is_last=True), 0.0)
    assert ended(connection, 61.0) is None
    [ping] = peer.parse(connection.take_output())
    assert ping.kind == frames.PING
    connection.receive(peer.ping(ping.payload, is_ack=True), 62.0)
    assert ended(connection, 121.0) is None
    assert ended(connection, 123.0) is None
    assert peer.parse(connection.take_output())[0].kind == frames.PING
    assert ended(connection, 143.0) is None
    assert ended(connection, 143.1) is Limit.KEEPALIVE


def test_unread_responses_beyond_a_limit_end_the_connection() -> None:
    connection = greeted_server(Limits(unread_bytes_max=1_000))
    connection.receive(peer.settings({frames.Setting.INITIAL_WINDOW_SIZE: 0}), 0.0)
    connection.receive(peer.headers(1, is_last=True), 0.0)
    connection.send_data(connection._streams.by_id[1], bytes(1_000))
    assert ended(connection, 1.0) is None
    connection.send_data(connection._streams.by_id[1], b"x")
    assert ended(connection, 1.0) is Limit.UNREAD
