"""The client's end of gRPC; the test writes the server's frames."""

from __future__ import annotations

import gzip

import pytest

from tests.support.clients import http2_peer as peer
from tests.support.clients.http2_peer import fields_of, grpc_message, parse
from tests.support.clients.streams import half_close, stream_count
from tidemill.transport.grpc.client_connection import (
    ClientCall,
    ClientConnection,
    RequestWritable,
    ResponseEnded,
    ResponseMessage,
)
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2 import frames
from tidemill.transport.http2.events import ConnectionEnded, GoAwayReceived
from tidemill.transport.http2.frames import ErrorCode, Setting
from tidemill.transport.http2.limits import Limits

RESPONSE = peer.headers(1, peer.RESPONSE)
OK = peer.headers(1, peer.OK_TRAILERS, is_last=True)


def greeted() -> ClientConnection:
    connection = ClientConnection("host:1", Limits(), message_bytes_max=200_000, now_s=0.0)
    connection.receive(peer.settings() + peer.SETTINGS_ACK, 0.0)
    connection.http.take_output()
    return connection


def called(connection: ClientConnection, message: bytes = b"question") -> ClientCall:
    call = connection.open("/test.Service/Method", (("x-name", "value"),))
    connection.send(call, message)
    half_close(connection, call)
    return call


def test_a_call_is_headers_a_message_and_the_end() -> None:
    connection = greeted()
    called(connection)
    headers, data, end = parse(connection.http.take_output())
    fields = fields_of(headers.payload)
    assert (fields[":path"], fields[":authority"], fields["te"], fields["x-name"]) == (
        "/test.Service/Method",
        "host:1",
        "trailers",
        "value",
    )
    assert data.payload == grpc_message(b"question")
    assert (end.payload, end.is_last) == (b"", True)


def test_a_response_is_messages_and_a_status() -> None:
    connection = greeted()
    call = called(connection)
    raw = RESPONSE + peer.data(1, grpc_message(b"a") + grpc_message(b"b")) + OK
    assert connection.receive(raw, 0.0) == [
        ResponseMessage(call, b"a", 6),
        ResponseMessage(call, b"b", 6),
        ResponseEnded(call, RpcCode.OK, ""),
    ]
    assert call.is_ended
    assert stream_count(connection.http) == 0


def test_a_response_may_be_only_a_status() -> None:
    connection = greeted()
    call = called(connection)
    fields = (*peer.RESPONSE, ("grpc-status", "5"), ("grpc-message", "no %C3%A9"))
    assert connection.receive(peer.headers(1, fields, is_last=True), 0.0) == [
        ResponseEnded(call, RpcCode.NOT_FOUND, "no é")
    ]


FAILURES = {
    "HTTP's status": (peer.headers(1, ((":status", "503"),)), RpcCode.UNAVAILABLE),
    "no status": (RESPONSE + peer.headers(1, (("a", ""),), is_last=True), RpcCode.UNKNOWN),
    "an end without trailers": (RESPONSE + peer.data(1, is_last=True), RpcCode.INTERNAL),
    "compressed": (RESPONSE + peer.data(1, b"\1\0\0\0\0"), RpcCode.INTERNAL),
    "too large": (RESPONSE + peer.data(1, b"\0\1\0\0\0"), RpcCode.RESOURCE_EXHAUSTED),
    "refused": (peer.rst_stream(1, ErrorCode.REFUSED_STREAM), RpcCode.UNAVAILABLE),
    "cancelled": (peer.rst_stream(1, ErrorCode.CANCEL), RpcCode.CANCELLED),
    "malformed": (peer.headers(1, (("Upper", ""),)), RpcCode.INTERNAL),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failing_response_ends_the_call_once(name: str) -> None:
    raw, code = FAILURES[name]
    connection = greeted()
    call = called(connection)
    [event] = connection.receive(raw, 0.0)
    assert isinstance(event, ResponseEnded)
    assert (event.call, event.code) == (call, code)
    assert stream_count(connection.http) == 0
    assert connection.receive(peer.ping(), 0.0) == []


def test_a_compressed_response_is_decompressed() -> None:
    connection = greeted()
    call = called(connection)
    raw = peer.headers(1, (*peer.RESPONSE, ("grpc-encoding", "gzip")))
    raw += peer.data(1, grpc_message(gzip.compress(b"text"), compressed=1))
    assert connection.receive(raw, 0.0) == [
        ResponseMessage(call, b"text", 5 + len(gzip.compress(b"text")))
    ]


def test_a_call_that_the_server_ends_first_leaves_nothing_behind() -> None:
    """A server need not reset the remaining request. The stream stayed open for ever."""
    connection = greeted()
    call = connection.open("/test.Service/Method")
    connection.send(call, b"one of many")
    [ended] = connection.receive(RESPONSE + OK, 0.0)
    assert ended == ResponseEnded(call, RpcCode.OK, "")
    assert stream_count(connection.http) == 0
    connection.send(call, b"more")
    half_close(connection, call)
    assert parse(connection.http.take_output())[-1].kind == frames.RST_STREAM


def test_a_unary_call_ends_its_request_and_leaves_nothing_behind() -> None:
    connection = greeted()
    call = connection.open("/test.Service/Method")
    connection.send(call, b"the only one", is_last=True)
    assert parse(connection.http.take_output())[-1].is_last
    events = connection.receive(RESPONSE + peer.data(1, grpc_message(b"a")) + OK, 0.0)
    assert events[-1] == ResponseEnded(call, RpcCode.OK, "")
    assert stream_count(connection.http) == 0


def test_metadata_beside_the_status_of_a_failed_call_is_returned() -> None:
    connection = greeted()
    call = called(connection)
    trailers = (("grpc-status", "9"), ("grpc-message", "no"), ("tidemill-error", "Conflict"))
    [ended] = connection.receive(RESPONSE + peer.headers(1, trailers, is_last=True), 0.0)
    assert ended == ResponseEnded(
        call, RpcCode.FAILED_PRECONDITION, "no", (("tidemill-error", "Conflict"),)
    )


def test_a_cancelled_call_has_no_more_events() -> None:
    connection = greeted()
    call = called(connection)
    connection.cancel(call)
    connection.cancel(call)
    assert connection.receive(RESPONSE + peer.data(1, grpc_message(b"a")) + OK, 0.0) == []
    assert stream_count(connection.http) == 0


def test_no_call_begins_on_a_draining_connection() -> None:
    connection = greeted()
    call = called(connection)
    assert connection.receive(peer.goaway(1), 0.0) == [GoAwayReceived(0, "")]
    with pytest.raises(RpcError) as refused:
        connection.open("/test.Service/Method")
    assert refused.value.code is RpcCode.UNAVAILABLE
    assert connection.receive(RESPONSE + OK, 0.0) == [ResponseEnded(call, RpcCode.OK, "")]


def test_a_failing_connection_ends_its_calls_and_reports_it() -> None:
    connection = greeted()
    call = called(connection)
    ended, failed = connection.close(ErrorCode.NO_ERROR, "lost")
    assert isinstance(ended, ResponseEnded)
    assert ended.call is call
    assert isinstance(failed, ConnectionEnded)
    assert connection.close(ErrorCode.NO_ERROR, "lost") == []


def test_a_request_that_waits_for_the_window_is_reported_when_sent() -> None:
    connection = greeted()
    connection.receive(peer.settings({Setting.INITIAL_WINDOW_SIZE: 10}), 0.0)
    call = connection.open("/test.Service/Method")
    assert connection.send(call, b"0123456789") == 5
    assert connection.receive(peer.window_update(1, 5), 0.0) == [RequestWritable(call)]


@pytest.mark.parametrize("frame_bytes", [1_000, 16_384])
def test_a_large_response_arrives_through_granted_windows(frame_bytes: int) -> None:
    connection = greeted()
    call = called(connection)
    connection.receive(RESPONSE, 0.0)
    content, window, at = grpc_message(bytes(200_000)), 65_535, 0
    while at < len(content):
        step = min(frame_bytes, window, len(content) - at)
        assert step > 0, "the message waits for a window that is not opened"
        events = connection.receive(peer.data(1, content[at : at + step]), 0.0)
        at, window = at + step, window - step
        updates = peer.of(frames.WINDOW_UPDATE, parse(connection.http.take_output()))
        window += sum(one.number for one in updates if one.stream_id == 1)
    assert events == [ResponseMessage(call, bytes(200_000), 200_005)]
    connection.consume(call, 200_005)
    peer.check_accounts(connection.http)
