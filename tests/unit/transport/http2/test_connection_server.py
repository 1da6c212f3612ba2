"""A server's end of a connection: the events of a client's frames, and the ends of streams."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.clients import http2_peer as peer
from tests.support.clients.http2_peer import greeted_server
from tests.support.clients.streams import stream_count
from tidemill.transport.http2 import frames
from tidemill.transport.http2.connection import Connection, Role
from tidemill.transport.http2.events import (
    ConnectionEnded,
    DataReceived,
    Event,
    GoAwayReceived,
    RequestReceived,
    StreamReset,
)
from tidemill.transport.http2.flow_control import CONNECTION_WINDOW_BYTES
from tidemill.transport.http2.frames import ErrorCode, Setting
from tidemill.transport.http2.limits import Limits
from tidemill.transport.http2.stream import Stream
from tidemill.transport.http2.stream_states import StreamState

BLOCK = peer.block(peer.RESPONSE)
TRAILERS = peer.block(peer.OK_TRAILERS)


def opened(connection: Connection, stream_id: int = 1, *, is_last: bool = False) -> Stream:
    [event] = connection.receive(peer.headers(stream_id, is_last=is_last), 0.0)
    assert isinstance(event, RequestReceived)
    return event.stream


def failure(connection: Connection, raw: bytes) -> ErrorCode:
    """Return how `raw` ends the connection; GOAWAY must be the last frame."""
    events = connection.receive(raw, 0.0)
    assert isinstance(events[-1], ConnectionEnded), events
    last = peer.parse(connection.take_output())[-1]
    assert last.kind == frames.GOAWAY
    assert int.from_bytes(last.payload[4:8], "big") == events[-1].code
    assert connection.is_closed
    assert connection.receive(peer.ping(), 0.0) == []
    assert not connection.has_output
    return events[-1].code


def resets(connection: Connection) -> list[tuple[int, int]]:
    found = peer.parse(connection.take_output())
    return [(one.stream_id, one.number) for one in peer.of(frames.RST_STREAM, found)]


# ---------------------------------------------------------------- preface and settings


def test_a_server_sends_its_settings_when_the_preface_is_complete() -> None:
    connection = Connection(Role.SERVER, Limits(), now_s=0.0)
    for byte in frames.PREFACE[:-1]:
        assert connection.receive(bytes((byte,)), 0.0) == []
        assert not connection.has_output
    assert connection.receive(frames.PREFACE[-1:], 0.0) == []
    ours, window = peer.parse(connection.take_output())
    assert ours.kind == frames.SETTINGS
    announced = dict(frames.decode_settings(ours.payload))
    assert announced[Setting.MAX_CONCURRENT_STREAMS] == 1_024
    assert announced[Setting.INITIAL_WINDOW_SIZE] == 65_535
    assert (window.stream_id, window.number) == (0, CONNECTION_WINDOW_BYTES - 65_535)
    connection.receive(peer.settings(), 0.0)
    assert peer.parse(connection.take_output()) == peer.parse(peer.SETTINGS_ACK)


@pytest.mark.parametrize("first", [peer.ping(), peer.headers(1), peer.window_update(0, 1)])
def test_settings_must_be_the_first_frame(first: bytes) -> None:
    connection = Connection(Role.SERVER, Limits(), now_s=0.0)
    assert failure(connection, frames.PREFACE + first) is ErrorCode.PROTOCOL_ERROR


def test_an_invalid_preface_ends_the_connection() -> None:
    connection = Connection(Role.SERVER, Limits(), now_s=0.0)
    assert failure(connection, b"PRI * HTTP/2.0\r\n\r\nXX") is ErrorCode.PROTOCOL_ERROR


def test_a_client_of_http_1_gets_a_response_in_http_1() -> None:
    connection = Connection(Role.SERVER, Limits(), now_s=0.0)
    [event] = connection.receive(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", 0.0)
    assert isinstance(event, ConnectionEnded)
    answer = connection.take_output()
    assert answer.startswith(b"HTTP/1.1 505 ")
    assert b"gRPC" in answer


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({Setting.INITIAL_WINDOW_SIZE: 1 << 31}, ErrorCode.FLOW_CONTROL_ERROR),
        ({Setting.MAX_FRAME_SIZE: 16_383}, ErrorCode.PROTOCOL_ERROR),
        ({Setting.MAX_FRAME_SIZE: 1 << 24}, ErrorCode.PROTOCOL_ERROR),
        ({Setting.ENABLE_PUSH: 2}, ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_settings_out_of_range_end_the_connection(values: dict[int, int], code: ErrorCode) -> None:
    assert failure(greeted_server(), peer.settings(values)) is code


def test_unknown_and_valid_settings_are_acknowledged() -> None:
    connection = greeted_server()
    values = {0xFFFF: 1, Setting.ENABLE_PUSH: 1, Setting.MAX_HEADER_LIST_SIZE: 0}
    assert connection.receive(peer.settings(values), 0.0) == []
    assert connection.take_output() == peer.SETTINGS_ACK


def test_a_client_with_a_smaller_header_table_gets_a_table_size_of_0() -> None:
    """RFC 7541 section 4.2: the next block begins with the table size; some clients require it."""
    connection = greeted_server()
    first, second = opened(connection), opened(connection, 3)
    connection.receive(peer.settings({Setting.HEADER_TABLE_SIZE: 0}), 0.0)
    connection.send_response(first, BLOCK, b"data", TRAILERS)
    connection.send_response(second, BLOCK, b"data", TRAILERS)
    blocks = [one.payload for one in peer.of(frames.HEADERS, peer.parse(connection.take_output()))]
    assert blocks == [b"\x20" + BLOCK, TRAILERS, BLOCK, TRAILERS]


# ---------------------------------------------------------------- HEADERS


def test_a_request_opens_a_stream() -> None:
    connection = greeted_server()
    [event] = connection.receive(peer.headers(1, is_last=True), 0.0)
    assert isinstance(event, RequestReceived)
    assert event.fields[":path"] == "/test.Service/Method"
    assert event.fields["content-type"] == "application/grpc"
    assert event.is_last
    assert stream_count(connection) == 1


def test_padding_and_priority_are_ignored() -> None:
    connection = greeted_server()
    [event] = connection.receive(peer.headers(1, padding=7, priority=b"\0\0\0\0\x10"), 0.0)
    assert isinstance(event, RequestReceived)
    assert event.fields[":method"] == "POST"
    assert connection.receive(peer.priority(3, depends_on=1), 0.0) == []


@pytest.mark.parametrize("cuts", [(0,), (1, 2, 3), (10, 10), (5, 40, 41)])
def test_a_block_may_be_continued_anywhere(cuts: tuple[int, ...]) -> None:
    block = peer.block(peer.GRPC_REQUEST)
    parts = [block[a:b] for a, b in zip((0, *cuts), (*cuts, len(block)), strict=True)]
    raw = peer.frame(frames.HEADERS, parts[0], stream_id=1, flags=frames.END_STREAM)
    for index, part in enumerate(parts[1:], 2):
        raw += peer.continuation(1, part, is_complete=index == len(parts))
    [event] = greeted_server().receive(raw, 0.0)
    assert isinstance(event, RequestReceived)
    assert event.is_last


@pytest.mark.parametrize(
    "between",
    [peer.ping(), peer.data(1), peer.frame(0x77), peer.continuation(3, b"", is_complete=True)],
)
def test_no_frame_may_interrupt_the_frames_of_a_block(between: bytes) -> None:
    raw = peer.headers(1, is_complete=False) + between
    assert failure(greeted_server(), raw) is ErrorCode.PROTOCOL_ERROR


PROTOCOL, SIZE = ErrorCode.PROTOCOL_ERROR, ErrorCode.FRAME_SIZE_ERROR
FLOW, COMPRESSION = ErrorCode.FLOW_CONTROL_ERROR, ErrorCode.COMPRESSION_ERROR
ENDINGS = {
    "an even stream": (peer.headers(2), PROTOCOL),
    "the connection": (peer.headers(0), PROTOCOL),
    "CONTINUATION": (peer.continuation(1, b"", is_complete=True), PROTOCOL),
    "padding": (peer.frame(frames.HEADERS, b"\x05abc", stream_id=1, flags=12), PROTOCOL),
    "no padding": (peer.frame(frames.HEADERS, b"", stream_id=1, flags=12), PROTOCOL),
    "priority": (peer.frame(frames.HEADERS, b"abc", stream_id=1, flags=0x24), SIZE),
    "DATA on an idle stream": (peer.data(1), PROTOCOL),
    "DATA of the connection": (peer.data(0), PROTOCOL),
    "RST_STREAM of an idle stream": (peer.rst_stream(1), PROTOCOL),
    "RST_STREAM of the connection": (peer.rst_stream(0), PROTOCOL),
    "a window of an idle stream": (peer.window_update(1, 1), PROTOCOL),
    "a window that grows by nothing": (peer.window_update(0, 0), PROTOCOL),
    "a window too large": (peer.window_update(0, frames.WINDOW_MAX), FLOW),
    "WINDOW_UPDATE's size": (peer.frame(frames.WINDOW_UPDATE, b"abc"), SIZE),
    "RST_STREAM's size": (peer.frame(frames.RST_STREAM, b"abc", stream_id=1), SIZE),
    "SETTINGS' size": (peer.frame(frames.SETTINGS, b"abc"), SIZE),
    "an ack with content": (peer.frame(frames.SETTINGS, b"abcdef", flags=1), SIZE),
    "SETTINGS of a stream": (peer.frame(frames.SETTINGS, stream_id=1), PROTOCOL),
    "PING's size": (peer.frame(frames.PING, b"1234567"), SIZE),
    "PING of a stream": (peer.frame(frames.PING, b"12345678", stream_id=1), PROTOCOL),
    "GOAWAY's size": (peer.frame(frames.GOAWAY, b"1234"), SIZE),
    "GOAWAY of a stream": (peer.frame(frames.GOAWAY, b"12345678", stream_id=1), PROTOCOL),
    "PRIORITY of the connection": (peer.frame(frames.PRIORITY, b"12345"), PROTOCOL),
    "PUSH_PROMISE": (peer.frame(frames.PUSH_PROMISE, b"1234", stream_id=1), PROTOCOL),
    "a frame that is too long": (peer.frame(0x55, bytes(16_385)), SIZE),
    "a broken block": (peer.frame(frames.HEADERS, b"\x80", stream_id=1, flags=4), COMPRESSION),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_frame_that_ends_the_connection(name: str) -> None:
    raw, code = ENDINGS[name]
    assert failure(greeted_server(), raw) is code


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(peer.GRPC_REQUEST[1:], id="no method"),
        pytest.param((*peer.GRPC_REQUEST, ("Upper", "")), id="upper case"),
        pytest.param((*peer.GRPC_REQUEST, ("content-length", "-1")), id="content-length"),
    ],
)
def test_a_malformed_request_ends_only_its_stream(fields: peer.Fields) -> None:
    connection = greeted_server()
    assert connection.receive(peer.headers(1, fields), 0.0) == []
    assert resets(connection) == [(1, ErrorCode.PROTOCOL_ERROR)]
    # Frames in flight are ignored, and other streams are served.
    assert connection.receive(peer.data(1, b"late", is_last=True), 0.0) == []
    assert opened(connection, 3).id == 3


def test_a_stream_that_depends_on_itself_is_reset() -> None:
    connection = greeted_server()
    events = connection.receive(peer.headers(1, priority=b"\0\0\0\x01\x10"), 0.0)
    assert isinstance(events[-1], StreamReset)
    assert resets(connection) == [(1, ErrorCode.PROTOCOL_ERROR)]
    assert stream_count(connection) == 0


def test_a_stream_that_we_reset_stays_reset_when_its_block_continues() -> None:
    """Its priority caused the reset before its block was complete, and the next frame opened it."""
    connection = greeted_server()
    first = peer.headers(1, (), priority=b"\0\0\0\x01\x10", is_complete=False)
    rest = peer.continuation(1, peer.block(peer.GRPC_REQUEST), is_complete=True)
    events = connection.receive(first + rest, 0.0)
    assert len(resets(connection)) + stream_count(connection) == 1
    assert len(events) == stream_count(connection)


def test_a_client_opens_streams_in_the_order_of_their_ids() -> None:
    connection = greeted_server()
    opened(connection, 5)
    assert failure(connection, peer.headers(3)) is ErrorCode.STREAM_CLOSED


def test_headers_after_the_end_of_a_stream_reset_it() -> None:
    connection = greeted_server()
    opened(connection, is_last=True)
    [event] = connection.receive(peer.headers(1, is_last=True), 0.0)
    assert isinstance(event, StreamReset)
    assert resets(connection) == [(1, ErrorCode.STREAM_CLOSED)]


def test_trailers_of_a_request_end_it_and_other_headers_do_not() -> None:
    connection = greeted_server()
    stream = opened(connection)
    [event] = connection.receive(peer.headers(1, (("x-sum", "1"),), is_last=True), 0.0)
    assert event == DataReceived(stream, b"", is_last=True)
    opened(connection, 3)
    [reset] = connection.receive(peer.headers(3, (("x-sum", "1"),)), 0.0)
    assert isinstance(reset, StreamReset)


def test_streams_over_the_limit_are_refused_and_may_be_opened_later() -> None:
    connection = greeted_server(Limits(streams_max=2))
    first = opened(connection, 1, is_last=True)
    opened(connection, 3)
    assert connection.receive(peer.headers(5, is_last=True), 0.0) == []
    assert resets(connection) == [(5, ErrorCode.REFUSED_STREAM)]
    connection.send_response(first, BLOCK, b"", TRAILERS)
    assert opened(connection, 7).id == 7


def test_a_refused_request_still_counts_for_the_header_table() -> None:
    connection = greeted_server(Limits(streams_max=1))
    opened(connection)
    remembered = b"\x40\x04x-me\x02ok"  # becomes entry 62
    raw = peer.block(peer.GRPC_REQUEST) + remembered
    connection.receive(peer.frame(frames.HEADERS, raw, stream_id=3, flags=4), 0.0)
    connection.receive(peer.rst_stream(1), 0.0)
    again = peer.block(peer.GRPC_REQUEST) + b"\xbe"
    [event] = connection.receive(peer.frame(frames.HEADERS, again, stream_id=5, flags=4), 0.0)
    assert isinstance(event, RequestReceived)
    assert event.fields["x-me"] == "ok"


# ---------------------------------------------------------------- DATA


def test_data_arrives_as_sent_without_its_padding() -> None:
    connection = greeted_server()
    stream = opened(connection)
    raw = peer.data(1, b"one") + peer.data(1, b"two", padding=9) + peer.data(1, is_last=True)
    assert connection.receive(raw, 0.0) == [
        DataReceived(stream, b"one", is_last=False),
        DataReceived(stream, b"two", is_last=False),
        DataReceived(stream, b"", is_last=True),
    ]


def test_padding_longer_than_its_frame_ends_the_connection() -> None:
    connection = greeted_server()
    opened(connection)
    raw = peer.frame(frames.DATA, b"\x04abc", stream_id=1, flags=frames.PADDED)
    assert failure(connection, raw) is ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    ("announced", "sent", "is_good"), [(3, b"abc", True), (2, b"abc", False), (4, b"abc", False)]
)
def test_content_must_have_the_announced_length(announced: int, sent: bytes, is_good: bool) -> None:
    connection = greeted_server()
    fields = (*peer.GRPC_REQUEST, ("content-length", str(announced)))
    connection.receive(peer.headers(1, fields), 0.0)
    connection.receive(peer.data(1, sent, is_last=True), 0.0)
    assert resets(connection) == ([] if is_good else [(1, ErrorCode.PROTOCOL_ERROR)])


def test_data_on_a_stream_that_both_sides_ended_ends_the_connection() -> None:
    connection = greeted_server()
    stream = opened(connection, is_last=True)
    connection.send_response(stream, BLOCK, b"", TRAILERS)
    connection.take_output()
    assert failure(connection, peer.data(1, b"x")) is ErrorCode.STREAM_CLOSED


def test_frames_in_flight_for_a_stream_that_we_reset_are_ignored() -> None:
    connection = greeted_server()
    stream = opened(connection)
    connection.reset(stream, ErrorCode.CANCEL)
    late = peer.data(1, b"x") + peer.window_update(1, 1) + peer.headers(1, (("a", ""),))
    assert connection.receive(late + peer.data(1, b"y", is_last=True), 0.0) == []
    assert connection.receive(peer.rst_stream(1), 0.0) == []
    assert not connection.is_closed


def test_no_frame_may_follow_the_last_one_of_a_stream_that_we_reset() -> None:
    connection = greeted_server()
    connection.reset(opened(connection), ErrorCode.CANCEL)
    raw = peer.data(1, is_last=True) + peer.data(1, b"more")
    assert failure(connection, raw) is ErrorCode.STREAM_CLOSED


def test_a_response_before_the_end_of_the_request_resets_the_stream() -> None:
    connection = greeted_server()
    stream = opened(connection)
    connection.send_headers(stream, TRAILERS, is_last=True)
    assert resets(connection) == [(1, ErrorCode.NO_ERROR)]
    assert stream.state is StreamState.RESET


def test_after_a_reset_nothing_more_is_sent_on_the_stream() -> None:
    connection = greeted_server()
    stream = opened(connection)
    [event] = connection.receive(peer.rst_stream(1, ErrorCode.CANCEL), 0.0)
    assert event == StreamReset(stream, ErrorCode.CANCEL)
    connection.send_headers(stream, BLOCK, is_last=False)
    connection.send_data(stream, b"data")
    connection.send_response(stream, BLOCK, b"data", TRAILERS)
    connection.reset(stream, ErrorCode.CANCEL)
    assert not connection.has_output


# ---------------------------------------------------------------- PING, GOAWAY, unknown frames


def test_a_ping_is_answered_and_unknown_frames_are_not() -> None:
    connection = greeted_server()
    raw = peer.frame(0x77, b"abc", flags=0xFF, stream_id=9) + peer.ping(b"abcdefgh")
    assert connection.receive(raw, 0.0) == []
    assert connection.take_output() == peer.ping(b"abcdefgh", is_ack=True)


def test_a_drain_has_two_steps_so_that_no_request_in_flight_is_refused() -> None:
    connection = greeted_server()
    opened(connection)
    connection.start_drain()
    announced, ping = peer.parse(connection.take_output())
    assert (announced.kind, announced.payload[:4]) == (frames.GOAWAY, b"\x7f\xff\xff\xff")
    assert ping.kind == frames.PING
    # Still served, because the client had not read the first GOAWAY.
    assert opened(connection, 3).id == 3
    connection.receive(peer.ping(ping.payload, is_ack=True), 0.0)
    [final] = peer.parse(connection.take_output())
    assert (final.kind, int.from_bytes(final.payload[:4], "big")) == (frames.GOAWAY, 3)
    assert connection.receive(peer.headers(5), 0.0) == []
    assert resets(connection) == [(5, ErrorCode.REFUSED_STREAM)]
    assert stream_count(connection) == 2


def test_an_answer_to_a_drain_that_was_not_started_is_ignored() -> None:
    connection = greeted_server()
    assert connection.receive(peer.ping(b"draining", is_ack=True), 0.0) == []
    assert not connection.has_output
    assert opened(connection).id == 1


def test_a_drain_before_the_preface_waits_for_our_settings() -> None:
    connection = Connection(Role.SERVER, Limits(), now_s=0.0)
    connection.start_drain()
    assert not connection.has_output
    connection.receive(peer.CLIENT_GREETING, 0.0)
    kinds = [one.kind for one in peer.parse(connection.take_output())]
    assert kinds[0] == frames.SETTINGS
    assert frames.GOAWAY in kinds


def test_a_client_that_sends_goaway_is_served_to_the_end() -> None:
    connection = greeted_server()
    stream = opened(connection)
    [event] = connection.receive(peer.goaway(0, 0, b"bye \xff"), 0.0)
    assert event == GoAwayReceived(0, "bye \N{REPLACEMENT CHARACTER}")
    [data] = connection.receive(peer.data(1, b"x", is_last=True), 0.0)
    assert data == DataReceived(stream, b"x", is_last=True)


def test_a_failure_resets_every_stream_and_sends_goaway_last() -> None:
    """Even if the end of one stream lets another one, which waits for room, send more."""
    limits = Limits(large_messages_bytes=100_000)
    connection = greeted_server(limits)
    first, second = opened(connection, 1), opened(connection, 3)
    connection.request_room(first, 160_000)
    connection.request_room(second, 160_000)
    events = connection.receive(peer.frame(frames.PING, b"short"), 0.0)
    assert [type(event) for event in events] == [StreamReset, StreamReset, ConnectionEnded]
    assert peer.parse(connection.take_output())[-1].kind == frames.GOAWAY
    assert stream_count(connection) == 0
    assert first.state is StreamState.RESET
    assert second.state is StreamState.RESET


# ---------------------------------------------------------------- cut anywhere


def test_the_events_do_not_depend_on_the_cuts() -> None:
    raw = (
        peer.CLIENT_GREETING
        + peer.headers(1, is_complete=False)
        + peer.continuation(1, b"", is_complete=True)
        + peer.data(1, b"a" * 300, padding=3)
        + peer.ping()
        + peer.request(3, b"hello" * 50)
        + peer.data(1, b"", is_last=True)
        + peer.rst_stream(1)
        + peer.goaway(0)
        + peer.frame(frames.PING, b"bad")
    )

    def run(cuts: list[bytes]) -> tuple[list[str], bytes]:
        connection = Connection(Role.SERVER, Limits(), now_s=0.0)
        events: list[Event] = []
        for piece in cuts:
            events += connection.receive(piece, 0.0)
            peer.check_accounts(connection)
        return [described(event) for event in events], connection.take_output()

    def described(event: Event) -> str:
        return " ".join(
            str(part.id) if isinstance(part, Stream) else repr(part)
            for part in (type(event).__name__, *event)
        )

    whole = run([raw])
    assert whole[0][-1].startswith("'ConnectionEnded'")
    for seed in range(30):
        assert run(list(peer.pieces(raw, Random(seed)))) == whole
