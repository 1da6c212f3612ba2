"""A client's end of a connection."""

from __future__ import annotations

import pytest

from tests.support.clients import http2_peer as peer
from tests.support.clients.http2_peer import greeted_client
from tests.support.clients.streams import stream_count
from tidemill.transport.http2 import frames
from tidemill.transport.http2.connection import Connection, Role
from tidemill.transport.http2.events import (
    ConnectionEnded,
    DataReceived,
    GoAwayReceived,
    ResponseReceived,
    StreamReset,
)
from tidemill.transport.http2.frames import ErrorCode, Setting
from tidemill.transport.http2.limits import Limits
from tidemill.transport.http2.stream import Stream
from tidemill.transport.http2.stream_states import StreamState

BLOCK = peer.block(peer.GRPC_REQUEST)


def opened(connection: Connection) -> Stream:
    stream = connection.open_stream(BLOCK)
    assert stream is not None
    return stream


def test_a_client_begins_with_its_preface_and_disables_push() -> None:
    connection = Connection(Role.CLIENT, Limits(), now_s=0.0)
    output = connection.take_output()
    assert output.startswith(frames.PREFACE)
    announced = dict(frames.decode_settings(peer.parse(output)[0].payload))
    assert announced[Setting.ENABLE_PUSH] == 0
    assert Setting.MAX_CONCURRENT_STREAMS not in announced


def test_streams_have_odd_ids_in_order() -> None:
    connection = greeted_client()
    assert [opened(connection).id for _ in range(3)] == [1, 3, 5]
    assert [one.stream_id for one in peer.parse(connection.take_output())] == [1, 3, 5]


def test_a_response_is_headers_data_and_trailers() -> None:
    connection = greeted_client()
    stream = opened(connection)
    connection.send_data(stream, b"", is_last=True)
    raw = (
        peer.headers(1, peer.RESPONSE)
        + peer.data(1, b"content")
        + peer.headers(1, peer.OK_TRAILERS, is_last=True)
    )
    assert connection.receive(raw, 0.0) == [
        ResponseReceived(stream, dict(peer.RESPONSE), is_last=False),
        DataReceived(stream, b"content", is_last=False),
        ResponseReceived(stream, dict(peer.OK_TRAILERS), is_last=True),
    ]
    assert stream_count(connection) == 0


def test_a_client_opens_no_more_streams_than_the_server_accepts() -> None:
    connection = greeted_client()
    connection.receive(peer.settings({Setting.MAX_CONCURRENT_STREAMS: 1}), 0.0)
    stream = opened(connection)
    assert connection.open_stream(BLOCK) is None
    connection.reset(stream, ErrorCode.CANCEL)
    assert opened(connection).id == 3


def test_a_connection_without_unused_ids_opens_no_more_streams() -> None:
    connection = greeted_client()
    connection._streams._next_id = frames.STREAM_ID_MAX
    assert opened(connection).id == frames.STREAM_ID_MAX
    assert connection.is_draining
    assert connection.open_stream(BLOCK) is None


def test_streams_that_a_draining_server_has_not_seen_are_refused() -> None:
    connection = greeted_client()
    first, second = opened(connection), opened(connection)
    events = connection.receive(peer.goaway(1, 0, b"stop"), 0.0)
    assert events == [StreamReset(second, ErrorCode.REFUSED_STREAM), GoAwayReceived(0, "stop")]
    assert first.state is not StreamState.RESET
    assert connection.open_stream(BLOCK) is None


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(peer.headers(1, peer.RESPONSE), id="HEADERS of a stream not opened"),
        pytest.param(peer.headers(2, peer.RESPONSE), id="HEADERS of a server's stream"),
        pytest.param(peer.frame(frames.PUSH_PROMISE, b"\0\0\0\x02", stream_id=1), id="a push"),
        pytest.param(peer.settings({Setting.ENABLE_PUSH: 1}), id="the permission to push"),
    ],
)
def test_a_server_that_breaks_the_protocol_ends_the_connection(raw: bytes) -> None:
    events = greeted_client().receive(raw, 0.0)
    assert isinstance(events[-1], ConnectionEnded)
    assert events[-1].code is ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    "fields", [(("Upper", ""),), ((":path", "/"),), (*peer.RESPONSE, (":status", "200"))]
)
def test_a_malformed_response_ends_only_its_stream(fields: peer.Fields) -> None:
    connection = greeted_client()
    stream = opened(connection)
    connection.take_output()
    assert connection.receive(peer.headers(1, fields), 0.0) == [
        StreamReset(stream, ErrorCode.PROTOCOL_ERROR)
    ]
    assert connection.take_output() == peer.rst_stream(1, ErrorCode.PROTOCOL_ERROR)


def test_late_frames_for_a_stream_that_we_reset_are_ignored() -> None:
    connection = greeted_client()
    stream = opened(connection)
    connection.reset(stream, ErrorCode.CANCEL)
    raw = (
        peer.headers(1, peer.RESPONSE)
        + peer.data(1, b"late")
        + peer.headers(1, peer.OK_TRAILERS, is_last=True)
    )
    assert connection.receive(raw, 0.0) == []
