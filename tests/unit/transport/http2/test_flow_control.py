"""Windows in both directions: queued data, the order of streams, and progress of all."""

from __future__ import annotations

import pytest

from tests.support.clients import http2_peer as peer
from tests.support.clients.http2_peer import Frame, check_accounts, greeted_client, greeted_server
from tests.support.clients.streams import stream_count
from tidemill.transport.http2 import frames
from tidemill.transport.http2.connection import Connection
from tidemill.transport.http2.events import (
    ConnectionEnded,
    RequestReceived,
    StreamReset,
    StreamWritable,
)
from tidemill.transport.http2.flow_control import CONNECTION_WINDOW_BYTES
from tidemill.transport.http2.frames import ErrorCode, Setting
from tidemill.transport.http2.limits import Limits
from tidemill.transport.http2.stream import Stream

BLOCK = peer.block(peer.RESPONSE)
TRAILERS = peer.block(peer.OK_TRAILERS)
WINDOW = Setting.INITIAL_WINDOW_SIZE


def with_windows(connection: Connection, *, stream: int, connection_more: int = 1 << 20) -> None:
    """Send a connection the windows of its peer."""
    connection.receive(peer.settings({WINDOW: stream}), 0.0)
    if connection_more:
        connection.receive(peer.window_update(0, connection_more), 0.0)
    connection.take_output()


def opened(connection: Connection, stream_id: int = 1, *, is_last: bool = True) -> Stream:
    [event] = connection.receive(peer.headers(stream_id, is_last=is_last), 0.0)
    assert isinstance(event, RequestReceived)
    return event.stream


def sent(connection: Connection) -> list[Frame]:
    check_accounts(connection)
    return peer.parse(connection.take_output())


def sizes(found: list[Frame]) -> list[tuple[int, int]]:
    return [(one.stream_id, len(one.payload)) for one in peer.of(frames.DATA, found)]


# ---------------------------------------------------------------- what we send


def test_data_is_sent_as_far_as_the_streams_window_allows() -> None:
    connection = greeted_server()
    with_windows(connection, stream=10)
    stream = opened(connection)
    connection.send_data(stream, b"0123456789abcdef")
    assert sizes(sent(connection)) == [(1, 10)]
    assert stream.queued_bytes == 6
    assert connection.receive(peer.window_update(1, 4), 0.0) == []
    assert sizes(sent(connection)) == [(1, 4)]
    assert connection.receive(peer.window_update(1, 9), 0.0) == [StreamWritable(stream)]
    assert peer.content(sent(connection), 1) == b"ef"
    assert stream.queued_bytes == 0


def test_data_is_sent_as_far_as_the_connections_window_allows() -> None:
    connection = greeted_server()
    with_windows(connection, stream=1 << 20, connection_more=0)
    stream = opened(connection)
    connection.send_data(stream, bytes(70_000))
    assert sum(size for _, size in sizes(sent(connection))) == 65_535
    connection.receive(peer.window_update(0, 70_000), 0.0)
    assert sizes(sent(connection)) == [(1, 70_000 - 65_535)]


def test_frames_are_as_long_as_the_peer_accepts() -> None:
    connection = greeted_server()
    with_windows(connection, stream=1 << 20)
    stream = opened(connection)
    connection.send_data(stream, bytes(40_000))
    assert [size for _, size in sizes(sent(connection))] == [16_384, 16_384, 7_232]
    connection.receive(peer.settings({Setting.MAX_FRAME_SIZE: 30_000}), 0.0)
    connection.take_output()
    connection.send_data(stream, bytes(40_000))
    assert [size for _, size in sizes(sent(connection))] == [30_000, 10_000]


def test_trailers_follow_the_queued_data() -> None:
    connection = greeted_server()
    with_windows(connection, stream=3)
    stream = opened(connection)
    connection.send_response(stream, BLOCK, b"content", TRAILERS)
    assert [one.kind for one in sent(connection)] == [frames.HEADERS, frames.DATA]
    connection.receive(peer.window_update(1, 4), 0.0)
    data, trailers = sent(connection)
    assert (data.payload, data.is_last) == (b"tent", False)
    assert (trailers.payload, trailers.is_last) == (TRAILERS, True)
    assert stream_count(connection) == 0


def test_the_end_of_a_stream_needs_no_window() -> None:
    """Its frame is empty. A peer that has read all data may never open the window again."""
    connection = greeted_client()
    with_windows(connection, stream=10)
    stream = connection.open_stream(BLOCK)
    assert stream is not None
    connection.send_data(stream, b"0123456789abcdefghij")
    connection.send_data(stream, b"", is_last=True)
    connection.take_output()
    connection.receive(peer.window_update(1, 10), 0.0)
    assert [(one.payload, one.is_last) for one in sent(connection)] == [
        (b"abcdefghij", False),
        (b"", True),
    ]


def test_the_end_of_a_stream_is_sent_even_if_its_window_is_negative() -> None:
    connection = greeted_client()
    stream = connection.open_stream(BLOCK)
    assert stream is not None
    connection.send_data(stream, b"0123456789")
    connection.receive(peer.settings({WINDOW: 5}), 0.0)
    assert stream.send_window == -5
    connection.take_output()
    connection.send_data(stream, b"", is_last=True)
    assert [one.is_last for one in sent(connection)] == [True]


@pytest.mark.parametrize("size", [0, 1, 16_384, 16_385, 60_000, 65_535, 65_536])
def test_the_last_data_ends_the_stream_whatever_its_size(size: int) -> None:
    connection = greeted_client()
    stream = connection.open_stream(BLOCK)
    assert stream is not None
    connection.send_data(stream, bytes(size), is_last=True)
    first = sent(connection)
    with_windows_open = peer.window_update(1, 10) + peer.window_update(0, 10)
    connection.receive(with_windows_open, 0.0)
    found = [*first, *sent(connection)]
    assert len(peer.content(found, 1)) == size
    assert [one.is_last for one in peer.of(frames.DATA, found)].count(True) == 1
    assert found[-1].is_last


def test_a_negative_window_must_be_filled_up_first() -> None:
    connection = greeted_server()
    stream = opened(connection)
    connection.send_data(stream, bytes(1_000))
    connection.receive(peer.settings({WINDOW: 100}), 0.0)
    assert stream.send_window == 100 - 1_000
    connection.take_output()
    connection.send_data(stream, b"more")
    connection.receive(peer.window_update(1, 900), 0.0)
    assert sizes(sent(connection)) == []
    connection.receive(peer.window_update(1, 3), 0.0)
    assert sizes(sent(connection)) == [(1, 3)]


def test_a_larger_initial_window_lets_every_stream_continue() -> None:
    connection = greeted_server()
    with_windows(connection, stream=0)
    for stream_id in (1, 3):
        connection.send_data(opened(connection, stream_id), b"content")
    connection.take_output()
    connection.receive(peer.settings({WINDOW: 5}), 0.0)
    assert sizes(sent(connection)) == [(1, 5), (3, 5)]


def test_data_of_a_larger_window_follows_its_acknowledgement() -> None:
    """Until then a peer counts with its old windows; the C core ends streams that overrun them."""
    connection = greeted_server()
    with_windows(connection, stream=0)
    connection.send_data(opened(connection), b"content")
    connection.take_output()
    connection.receive(peer.settings({WINDOW: 7}), 0.0)
    assert [frame.kind for frame in sent(connection)] == [frames.SETTINGS, frames.DATA]


def test_settings_that_open_windows_step_by_step_are_one_step() -> None:
    """A SETTINGS frame may have 2730 changes, and each let every stream send a byte."""
    connection = greeted_server()
    with_windows(connection, stream=0)
    streams = [opened(connection, stream_id) for stream_id in range(1, 200, 2)]
    for stream in streams:
        connection.send_data(stream, bytes(3_000))
    connection.take_output()
    connection.receive(peer.settings([(WINDOW, size) for size in range(1, 2_731)]), 0.0)
    found = sizes(sent(connection))
    assert found == [(stream.id, 2_730) for stream in streams]


def test_a_stream_with_a_closed_window_delays_no_other() -> None:
    connection = greeted_server()
    with_windows(connection, stream=0)
    first, second = opened(connection, 1), opened(connection, 3)
    connection.send_data(first, b"waits")
    connection.send_data(second, b"goes")
    connection.receive(peer.window_update(3, 100), 0.0)
    assert sizes(sent(connection)) == [(3, 4)]


def test_streams_take_turns_when_the_connections_window_opens() -> None:
    connection = greeted_server()
    with_windows(connection, stream=1 << 20, connection_more=0)
    streams = [opened(connection, stream_id) for stream_id in (1, 3, 5)]
    for stream in streams:
        connection.send_data(stream, bytes(65_535))
    connection.take_output()
    connection.receive(peer.window_update(0, 4 * 16_384), 0.0)
    assert [stream_id for stream_id, _ in sizes(sent(connection))] == [3, 5, 3, 5]


def test_streams_take_turns_when_the_connections_window_opens_slowly() -> None:
    connection = greeted_server()
    with_windows(connection, stream=1 << 20, connection_more=0)
    for stream_id in (1, 3, 5):
        connection.send_data(opened(connection, stream_id), bytes(65_535 + 100))
    connection.take_output()
    served = set()
    for _ in range(3):
        connection.receive(peer.window_update(0, 10), 0.0)
        served |= {stream_id for stream_id, _ in sizes(sent(connection))}
    assert served == {1, 3, 5}


def test_a_streams_window_that_grows_too_large_ends_only_the_stream() -> None:
    for increment, code in ((frames.WINDOW_MAX, 3), (0, 1)):
        connection = greeted_server()
        stream = opened(connection)
        assert connection.receive(peer.window_update(1, increment), 0.0) == [
            StreamReset(stream, code)
        ]


def test_an_initial_window_that_makes_a_window_too_large_ends_the_connection() -> None:
    connection = greeted_server()
    opened(connection)
    connection.receive(peer.window_update(1, 100), 0.0)
    events = connection.receive(peer.settings({WINDOW: frames.WINDOW_MAX}), 0.0)
    assert isinstance(events[-1], ConnectionEnded)
    assert events[-1].code is ErrorCode.FLOW_CONTROL_ERROR


def test_a_reset_drops_queued_data_and_keeps_its_count() -> None:
    connection = greeted_server()
    with_windows(connection, stream=4)
    stream = opened(connection)
    connection.send_data(stream, b"0123456789")
    connection.receive(peer.rst_stream(1), 0.0)
    assert stream.queued_bytes == 6
    assert connection.queued_bytes == 0
    check_accounts(connection)


# ---------------------------------------------------------------- what we let the peer send


def window_updates(connection: Connection) -> list[tuple[int, int]]:
    found = peer.of(frames.WINDOW_UPDATE, sent(connection))
    return [(one.stream_id, one.number) for one in found]


def test_a_stream_that_overruns_its_window_is_reset() -> None:
    connection = greeted_server(Limits(stream_window_bytes=100))
    stream = opened(connection, is_last=False)
    connection.receive(peer.data(1, bytes(100)), 0.0)
    assert connection.receive(peer.data(1, b"x"), 0.0) == [
        StreamReset(stream, ErrorCode.FLOW_CONTROL_ERROR)
    ]


def test_padding_counts_for_the_window() -> None:
    connection = greeted_server(Limits(stream_window_bytes=100))
    opened(connection, is_last=False)
    [event] = connection.receive(peer.data(1, b"x", padding=99), 0.0)
    assert isinstance(event, StreamReset)


def test_the_connections_window_is_opened_at_once_even_for_ended_streams() -> None:
    connection = greeted_server(Limits(stream_window_bytes=CONNECTION_WINDOW_BYTES))
    stream = opened(connection, is_last=False)
    connection.reset(stream, ErrorCode.CANCEL)
    connection.take_output()
    for _ in range(3 * CONNECTION_WINDOW_BYTES // 16_384):
        assert connection.receive(peer.data(1, bytes(16_384)), 0.0) == []
    found = window_updates(connection)
    assert {stream_id for stream_id, _ in found} == {0}
    assert sum(more for _, more in found) >= 2 * CONNECTION_WINDOW_BYTES


def test_a_streams_window_is_opened_when_half_of_it_has_been_read() -> None:
    connection = greeted_server(Limits(stream_window_bytes=100))
    stream = opened(connection, is_last=False)
    connection.receive(peer.data(1, bytes(80)), 0.0)
    connection.consume(stream, 49)
    assert window_updates(connection) == []
    connection.consume(stream, 1)
    assert window_updates(connection) == [(1, 50)]
    connection.receive(peer.data(1, bytes(70)), 0.0)
    assert stream.receive_window == 0


def test_padding_is_returned_with_the_read_data() -> None:
    connection = greeted_server(Limits(stream_window_bytes=100))
    stream = opened(connection, is_last=False)
    connection.receive(peer.data(1, b"x" * 10, padding=59), 0.0)
    connection.consume(stream, 10)
    assert window_updates(connection) == [(1, 70)]


# ---------------------------------------------------------------- room for large messages


LIMITS = Limits(stream_window_bytes=100, large_messages_bytes=1_000)


def test_a_large_message_gets_a_grant_beyond_the_window() -> None:
    connection = greeted_server(LIMITS)
    stream = opened(connection, is_last=False)
    connection.request_room(stream, 100)
    assert window_updates(connection) == []
    connection.request_room(stream, 600)
    assert window_updates(connection) == [(1, 500)]
    connection.request_room(stream, 600)
    assert window_updates(connection) == []


def test_read_data_returns_to_the_budget_before_the_window() -> None:
    connection = greeted_server(LIMITS)
    stream = opened(connection, is_last=False)
    connection.request_room(stream, 600)
    connection.receive(peer.data(1, bytes(600)), 0.0)
    connection.take_output()
    connection.consume(stream, 500)
    assert window_updates(connection) == []
    assert connection._incoming.budget_left == 1_000
    connection.consume(stream, 100)
    assert window_updates(connection) == [(1, 100)]
    assert stream.receive_window == 100


def test_streams_wait_for_room_in_order() -> None:
    connection = greeted_server(LIMITS)
    first, second, third = (opened(connection, n, is_last=False) for n in (1, 3, 5))
    connection.request_room(first, 1_000)
    connection.request_room(second, 700)
    connection.request_room(third, 150)  # It would fit, but it waits for the second one.
    assert window_updates(connection) == [(1, 900)]
    connection.receive(peer.rst_stream(1), 0.0)
    assert window_updates(connection) == [(3, 600), (5, 50)]
    connection.reset(second, ErrorCode.CANCEL)
    connection.reset(third, ErrorCode.CANCEL)
    assert connection._incoming.budget_left == 1_000


def test_a_stream_that_waits_for_room_has_one_request_for_all_its_frames() -> None:
    """Each frame that arrived meanwhile once made a new request, and all of them were granted."""
    connection = greeted_server(LIMITS)
    first, second = opened(connection, 1, is_last=False), opened(connection, 3, is_last=False)
    connection.request_room(first, 1_000)
    for received in range(50):
        connection.request_room(second, 400 - received)
        connection.receive(peer.data(3, b"x"), 0.0)
    check_accounts(connection)
    connection.take_output()
    connection.receive(peer.rst_stream(1), 0.0)
    assert window_updates(connection) == [(3, 300)]
    assert second.large_bytes == 300


def test_a_stream_that_ends_while_it_waits_for_room_is_removed() -> None:
    connection = greeted_server(LIMITS)
    first, second, third, fourth = (opened(connection, n, is_last=False) for n in (1, 3, 5, 7))
    connection.request_room(first, 600)
    connection.request_room(second, 900)
    connection.request_room(third, 900)
    connection.request_room(fourth, 500)
    assert window_updates(connection) == [(1, 500)]
    connection.receive(peer.data(3, b"x", is_last=True), 0.0)
    assert window_updates(connection) == []
    connection.reset(third, ErrorCode.CANCEL)
    assert window_updates(connection) == [(7, 400)]


def test_a_stream_that_the_peer_has_ended_gets_no_grant() -> None:
    connection = greeted_server(LIMITS)
    stream = opened(connection, is_last=True)
    connection.request_room(stream, 500)
    connection.consume(stream, 500)
    assert window_updates(connection) == []


def test_a_whole_response_also_waits_for_the_connections_window() -> None:
    connection = greeted_server()
    with_windows(connection, stream=1 << 20, connection_more=0)
    first, second = opened(connection, 1), opened(connection, 3)
    connection.send_response(first, BLOCK, bytes(65_535 - 1_000), TRAILERS)
    connection.take_output()
    connection.send_response(second, BLOCK, bytes(1_001), TRAILERS)
    assert sizes(sent(connection)) == [(3, 1_000)]
    connection.receive(peer.window_update(0, 1), 0.0)
    data, trailers = sent(connection)
    assert (len(data.payload), trailers.is_last) == (1, True)
