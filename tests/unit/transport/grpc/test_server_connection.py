"""The server's end of gRPC; the test writes the client's frames."""

from __future__ import annotations

import gzip
from collections import Counter
from random import Random

import pytest

from tests.support.clients import http2_peer as peer
from tests.support.clients.http2_peer import Frame, fields_of, grpc_message, parse
from tests.support.clients.streams import stream_count
from tidemill.transport.grpc.connection_memory import (
    CALL_BYTES,
    INFLATED_COPIES,
    MESSAGE_BYTES,
    RESERVED_BYTES,
)
from tidemill.transport.grpc.foreign_requests import FOREIGN_REQUEST_BYTES
from tidemill.transport.grpc.memory import MemoryAccount
from tidemill.transport.grpc.server_call import (
    CallEnded,
    CallStarted,
    CallWritable,
    MessageReceived,
    RequestPolicy,
    RequestsEnded,
    ServerCall,
    ServerEvent,
)
from tidemill.transport.grpc.server_connection import (
    CALLS_PER_TURN,
    MESSAGES_UNREAD_MAX,
    REPLY_BYTES_PER_TURN,
    ServerConnection,
)
from tidemill.transport.grpc.status import RpcCode
from tidemill.transport.http2 import frames, header_block
from tidemill.transport.http2.events import MarkReached
from tidemill.transport.http2.frames import ErrorCode
from tidemill.transport.http2.limits import Limit, Limits

MESSAGE_BYTES_MAX = 200_000


def served(
    limits: Limits | None = None,
    hits: Counter[Limit] | None = None,
    account: MemoryAccount | None = None,
) -> ServerConnection:
    connection = ServerConnection(
        limits or Limits(),
        message_bytes_max=MESSAGE_BYTES_MAX,
        now_s=0.0,
        hits=hits,
        account=account,
    )
    connection.receive(peer.CLIENT_GREETING, 0.0)
    connection.http.take_output()
    return connection


def called(connection: ServerConnection, raw: bytes | None = None) -> ServerCall:
    events = connection.receive(peer.headers(1) if raw is None else raw, 0.0)
    assert isinstance(events[0], CallStarted)
    return events[0].call


def output(connection: ServerConnection) -> list[Frame]:
    return parse(connection.http.take_output())


def status_of(found: list[Frame]) -> tuple[str, str]:
    fields = fields_of(peer.of(frames.HEADERS, found)[-1].payload)
    return fields["grpc-status"], fields.get("grpc-message", "")


def test_a_read_mark_behind_many_calls_is_reported() -> None:
    connection = served()
    mark = connection.http.mark_output()
    connection.http.request_marks(0.0, is_pressing=False)
    calls = b"".join([peer.headers(1 + 2 * n) for n in range(CALLS_PER_TURN + 1)])
    events = connection.receive(calls + peer.ping(b"all read", is_ack=True), 0.0)
    assert MarkReached(mark) not in events, "it waits for its turn"
    assert MarkReached(mark) in connection.close(ErrorCode.NO_ERROR, "the end")


def test_a_unary_call_is_a_message_and_its_response() -> None:
    connection = served()
    started, message = connection.receive(peer.request(1, b"question"), 0.0)
    assert isinstance(started, CallStarted)
    assert started.call.path == "/test.Service/Method"
    assert message == MessageReceived(started.call, b"question", 13, is_last=True)
    assert started.call.is_complete
    connection.respond(started.call, b"answer")
    headers, data, trailers = output(connection)
    assert fields_of(headers.payload)["content-type"] == "application/grpc"
    assert data.payload == grpc_message(b"answer")
    assert (fields_of(trailers.payload), trailers.is_last) == ({"grpc-status": "0"}, True)
    assert connection.call_count == stream_count(connection.http) == 0


def test_messages_of_a_stream_arrive_one_by_one_and_then_their_end() -> None:
    connection = served()
    call = called(connection)
    raw = grpc_message(b"one") + grpc_message(b"two") + grpc_message(b"three")
    events: list[ServerEvent] = []
    for cut in (raw[:3], raw[3:9], raw[9:]):
        events += connection.receive(peer.data(1, cut), 0.0)
    events += connection.receive(peer.data(1, is_last=True), 0.0)
    assert events == [
        MessageReceived(call, b"one", 8, is_last=False, held_bytes=3),
        MessageReceived(call, b"two", 8, is_last=False, held_bytes=MESSAGE_BYTES + 3),
        MessageReceived(call, b"three", 10, is_last=False, held_bytes=MESSAGE_BYTES + 5),
        RequestsEnded(call),
    ]


def test_the_last_message_is_marked_as_the_last() -> None:
    connection = served()
    call = called(connection)
    raw = grpc_message(b"one") + grpc_message(b"two")
    assert connection.receive(peer.data(1, raw, is_last=True), 0.0) == [
        MessageReceived(call, b"one", 8, is_last=False, held_bytes=3),
        MessageReceived(call, b"two", 8, is_last=True, held_bytes=MESSAGE_BYTES + 3),
    ]


@pytest.mark.parametrize(
    "end", [peer.data(1, is_last=True), peer.headers(1, (("x", ""),), is_last=True)]
)
def test_a_call_without_a_message_ends_too(end: bytes) -> None:
    connection = served()
    call = called(connection)
    assert connection.receive(end, 0.0) == [RequestsEnded(call)]


def test_headers_that_end_the_stream_end_the_requests() -> None:
    events = served().receive(peer.headers(1, is_last=True), 0.0)
    assert [type(event) for event in events] == [CallStarted, RequestsEnded]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        pytest.param(grpc_message(b"", length=MESSAGE_BYTES_MAX + 1), "8", id="too large"),
        pytest.param(grpc_message(b"x", compressed=1), "13", id="compressed without a name"),
        pytest.param(grpc_message(b"x", compressed=7), "13", id="a strange flag"),
        pytest.param(grpc_message(b"x", length=9), "13", id="cut by the end"),
        pytest.param(b"\0", "13", id="a prefix that is cut"),
    ],
)
def test_an_invalid_message_ends_the_call(content: bytes, code: str) -> None:
    connection = served()
    call = called(connection)
    assert connection.receive(peer.data(1, content, is_last=True), 0.0) == [CallEnded(call)]
    assert status_of(output(connection))[0] == code
    assert connection.call_count == stream_count(connection.http) == 0


def test_messages_before_an_invalid_one_do_not_hide_it() -> None:
    connection = served()
    call = called(connection)
    events = connection.receive(peer.data(1, grpc_message(b"a") + b"\7\0\0\0\0"), 0.0)
    assert events == [CallEnded(call)]


def test_a_compressed_request_is_decompressed() -> None:
    connection = served()
    call = called(connection, peer.headers(1, (*peer.GRPC_REQUEST, ("grpc-encoding", "gzip"))))
    raw = peer.data(1, grpc_message(gzip.compress(b"text"), compressed=1), is_last=True)
    assert connection.receive(raw, 0.0) == [
        MessageReceived(
            call,
            b"text",
            5 + len(gzip.compress(b"text")),
            is_last=True,
            held_bytes=4 * INFLATED_COPIES,
        )
    ]


@pytest.mark.parametrize(
    ("field", "code"), [(("grpc-encoding", "snappy"), "12"), (("grpc-timeout", "soon"), "13")]
)
def test_a_request_with_invalid_headers_is_not_started(field: tuple[str, str], code: str) -> None:
    connection = served()
    raw = peer.request(1, fields=(*peer.GRPC_REQUEST, field))
    assert connection.receive(raw, 0.0) == []
    assert status_of(output(connection))[0] == code
    assert connection.call_count == stream_count(connection.http) == 0


def test_a_timeout_is_in_seconds() -> None:
    raw = peer.headers(1, (*peer.GRPC_REQUEST, ("grpc-timeout", "250m")))
    assert called(served(), raw).timeout_s == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("field", "status"), [((":method", "GET"), "405"), (("content-type", "text/html"), "415")]
)
def test_a_request_that_is_not_grpc_is_answered_for_people_when_complete(
    field: tuple[str, str], status: str
) -> None:
    connection = served()
    fields = tuple(
        (name, field[1] if name == field[0] else value) for name, value in peer.GRPC_REQUEST
    )
    assert connection.receive(peer.headers(1, fields), 0.0) == []
    assert output(connection) == []
    assert connection.share.bytes >= FOREIGN_REQUEST_BYTES, "it may take its time, and is counted"
    assert connection.receive(peer.data(1, b"form", is_last=True), 0.0) == []
    headers, body = output(connection)
    assert fields_of(headers.payload)[":status"] == status
    assert b"gRPC" in body.payload
    assert body.is_last
    assert stream_count(connection.http) == 0


def test_a_request_that_is_not_grpc_is_answered_at_once_without_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = served()
    monkeypatch.setattr(type(connection.share), "is_fair", lambda _share, _count: False)
    fields = ((":method", "GET"), *peer.GRPC_REQUEST[1:])
    assert connection.receive(peer.headers(1, fields), 0.0) == []
    headers, body, reset = output(connection)
    assert fields_of(headers.payload)[":status"] == "405"
    assert body.is_last
    assert (reset.kind, reset.number) == (frames.RST_STREAM, ErrorCode.NO_ERROR)
    assert stream_count(connection.http) == 0


def test_a_request_that_is_not_grpc_and_makes_no_progress_is_reset() -> None:
    connection = served()
    connection.receive(peer.headers(1, ((":method", "GET"), *peer.GRPC_REQUEST[1:])), 0.0)
    assert connection.check(61.0) == []
    assert peer.of(frames.RST_STREAM, output(connection))
    assert stream_count(connection.http) == 0


def test_a_cancelled_call_is_not_answered() -> None:
    connection = served()
    call = called(connection)
    assert connection.receive(peer.rst_stream(1), 0.0) == [CallEnded(call)]
    connection.respond(call, b"answer")
    connection.start(call)
    assert connection.send(call, [b"answer"]) == 0
    connection.finish(call, RpcCode.OK)
    assert not connection.http.has_output


def test_a_stream_of_responses_is_headers_messages_and_a_status() -> None:
    connection = served()
    call = called(connection)
    connection.start(call)
    connection.start(call)
    assert connection.send(call, [b"one", b"two"]) == 0
    connection.finish(call, RpcCode.ABORTED, "enough")
    connection.finish(call, RpcCode.OK)
    found = output(connection)
    assert [one.kind for one in found] == [
        frames.HEADERS,
        frames.DATA,
        frames.HEADERS,
        frames.RST_STREAM,
    ]
    assert found[1].payload == grpc_message(b"one") + grpc_message(b"two")
    assert status_of(found) == ("10", "enough")


def test_a_slow_reader_delays_messages_and_their_end_is_reported() -> None:
    connection = served()
    connection.receive(peer.settings({frames.Setting.INITIAL_WINDOW_SIZE: 10}), 0.0)
    call = called(connection)
    assert connection.send(call, [b"0123456789"]) == 5
    assert call.queued_total_bytes == 15
    assert connection.receive(peer.window_update(1, 5), 0.0) == [CallWritable(call)]


def test_a_request_without_progress_is_ended_and_a_stream_may_pause() -> None:
    hits: Counter[Limit] = Counter()
    connection = served(hits=hits)
    slow, cut, stream = (
        called(connection, peer.headers(n) + content)
        for n, content in ((1, peer.data(1, b"\0")), (3, peer.data(3, b"\0")), (5, b""))
    )
    # Between messages, and not inside one.
    stream.has_request_stream = cut.has_request_stream = True
    assert connection.check(60.0) == []
    assert connection.check(61.0) == [CallEnded(slow), CallEnded(cut)]
    assert hits == {Limit.REQUEST: 2}
    assert status_of(output(connection))[0] == "4"
    assert connection.call_count == 1


def test_a_request_that_arrives_byte_by_byte_is_ended_in_the_end() -> None:
    connection = served()
    call = called(connection, peer.headers(1) + peer.data(1, grpc_message(b"", length=1_000)))
    for now_s in range(0, 301, 50):
        connection.receive(peer.data(1, b"x"), float(now_s))
        assert connection.check(float(now_s)) == []
    connection.receive(peer.data(1, b"x"), 301.0)
    assert connection.check(301.0) == [CallEnded(call)]


def test_connections_share_the_memory() -> None:
    call_bytes = CALL_BYTES + header_block.list_bytes(
        [(name, value, False) for name, value in peer.GRPC_REQUEST]
    )
    account = MemoryAccount(2 * (call_bytes + 1_000))
    first, second = served(account=account), served(account=account)
    half = peer.headers(1) + peer.data(1, grpc_message(b"x" * 600, length=800))
    slow = called(first, half)
    assert account.bytes == call_bytes + 805, (
        "the remaining bytes are fewer than the reserved bytes"
    )
    larger = peer.headers(1) + peer.data(1, grpc_message(b"x" * 600, length=2_000))
    [started, ended] = second.receive(larger, 0.0)
    assert isinstance(started, CallStarted)
    assert ended == CallEnded(started.call)
    assert status_of(output(second))[0] == "8"
    first.receive(peer.data(1, b"x" * 200, is_last=True), 0.0)
    assert account.bytes == call_bytes + 800, "the handler holds it"
    first.respond(slow, b"")
    assert account.bytes == 0
    third = served(account=account)
    called(third, half)
    third.close(ErrorCode.NO_ERROR, "gone")
    assert account.bytes == 0


def test_an_inflated_message_needs_room_first() -> None:
    account = MemoryAccount(1_600_000)
    connection = served(account=account)
    packed = gzip.compress(bytes(150_000))
    fields = (*peer.GRPC_REQUEST, ("grpc-encoding", "gzip"))
    raw = peer.data(1, grpc_message(packed, compressed=1))
    call = called(connection, peer.headers(1, fields))
    [received] = connection.receive(raw, 0.0)
    assert received == MessageReceived(
        call, bytes(150_000), 5 + len(packed), is_last=False, held_bytes=150_000 * INFLATED_COPIES
    )
    held = account.bytes
    assert 150_000 * INFLATED_COPIES < held < 170_000 * INFLATED_COPIES
    second = called(connection, peer.headers(3, fields))
    assert connection.receive(peer.data(3, grpc_message(packed, compressed=1)), 0.0) == [
        CallEnded(second)
    ]
    assert status_of(output(connection))[0] == "8"
    assert account.bytes == held


def test_an_announced_length_takes_no_room() -> None:
    account = MemoryAccount(1 << 20)
    connection = served(account=account)
    call = called(connection)
    before = account.bytes
    assert connection.receive(peer.data(1, grpc_message(b"", length=60_000)), 0.0) == []
    assert account.bytes == before + 5 + RESERVED_BYTES
    connection.receive(peer.data(1, bytes(10_000)), 0.0)
    assert account.bytes == before + 10_005 + RESERVED_BYTES, "received bytes do"
    for _ in range(5):
        events = connection.receive(peer.data(1, bytes(10_000)), 0.0)
    assert [type(one) for one in events] == [MessageReceived]
    assert account.bytes == before + 60_000
    connection.respond(call, b"")
    assert account.bytes == 0


def test_an_arriving_message_without_room_is_rejected() -> None:
    account = MemoryAccount(1 << 20)
    first, second = served(account=account), served(account=account)
    slow = called(first, peer.headers(1) + peer.data(1, grpc_message(bytes(5_000), length=60_000)))
    other = called(second)
    assert second.memory.hold(other, account.bytes_max - account.bytes - CALL_BYTES - 20_000)
    assert first.receive(peer.data(1, bytes(16_000)), 0.0) == [CallEnded(slow)]
    assert status_of(output(first))[0] == "8"
    assert first.share.bytes == 0


@pytest.mark.parametrize("has_request_stream", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
def test_inflating_has_one_price_and_all_of_it_is_returned(
    has_request_stream: bool, is_split: bool
) -> None:
    """Independent of the cuts, and of the time at which the kind of the call is known."""
    connection = served()
    packed = gzip.compress(bytes(50_000))
    headers = peer.headers(1, (*peer.GRPC_REQUEST, ("grpc-encoding", "gzip")))
    content = grpc_message(packed, compressed=1) + grpc_message(bytes(9_000))
    content += grpc_message(b"small")
    call = called(connection, headers)
    call.has_request_stream = has_request_stream
    before = connection.share.bytes
    cuts = (content[:3], content[3:40], content[40:]) if is_split else (content,)
    received: list[MessageReceived] = []
    for cut in cuts:
        found = connection.receive(peer.data(1, cut), 0.0)
        received += [event for event in found if isinstance(event, MessageReceived)]
    assert [one.held_bytes for one in received] == [
        50_000 * INFLATED_COPIES,
        9_000 + MESSAGE_BYTES,
        5 + MESSAGE_BYTES,
    ]
    assert connection.share.bytes == before + sum(one.held_bytes for one in received)
    for one in received:
        connection.memory.release(call, one.held_bytes)
    assert connection.share.bytes == before


def test_a_rejection_without_room_is_the_response_of_the_policy() -> None:
    policies = {"/test.Service/Method": RequestPolicy(1_000, b"too large", b"no room")}
    hits: Counter[Limit] = Counter()
    connection = ServerConnection(
        Limits(),
        message_bytes_max=MESSAGE_BYTES_MAX,
        now_s=0.0,
        policies=policies,
        hits=hits,
        account=MemoryAccount(CALL_BYTES),
    )
    connection.receive(peer.CLIENT_GREETING + peer.SETTINGS_ACK, 0.0)
    output(connection)
    # At the headers, before the body is read.
    assert connection.receive(peer.headers(1) + peer.data(1, grpc_message(b"body")), 0.0) == []
    assert peer.content(answer := output(connection), 1) == grpc_message(b"no room")
    assert status_of(answer)[0] == "0"
    assert hits == {Limit.MEMORY: 1}
    connection.share._account.bytes_max = 1 << 20
    call = called(connection, peer.headers(3))
    larger = peer.data(3, grpc_message(b"", length=1_001))
    assert connection.receive(larger, 0.0) == [CallEnded(call)]
    assert peer.content(output(connection), 3) == grpc_message(b"too large")
    assert connection.share.bytes == 0


def test_a_turn_starts_a_limited_number_of_calls() -> None:
    connection = served()
    raw = b"".join(peer.request(2 * n + 1) for n in range(CALLS_PER_TURN + 10))
    begun = [one for one in connection.receive(raw, 0.0) if isinstance(one, CallStarted)]
    assert len(begun) == CALLS_PER_TURN
    assert connection.has_more
    # Cancelled before its turn, so it never starts.
    cancelled = 2 * (CALLS_PER_TURN + 9) + 1
    rest = connection.receive(peer.rst_stream(cancelled), 0.0)
    assert len([one for one in rest if isinstance(one, CallStarted)]) == 9
    assert not connection.has_more


def test_few_small_messages_are_decoded_before_they_are_read() -> None:
    connection = served()
    call = called(connection)
    raw = grpc_message(b"") * 3_000
    before = connection.share.bytes
    events = connection.receive(peer.data(1, raw, is_last=True), 0.0)
    assert events == [
        MessageReceived(call, b"", 5, is_last=False, held_bytes=MESSAGE_BYTES * (at > 0))
        for at in range(MESSAGES_UNREAD_MAX)
    ]
    held_bytes = connection.share.bytes - before
    assert held_bytes <= len(raw) + RESERVED_BYTES + MESSAGES_UNREAD_MAX * MESSAGE_BYTES
    assert not connection.has_more, "nothing is left to do until a message is read"
    seen = len(events)
    while seen < 3_000:
        for event in events:
            assert isinstance(event, MessageReceived)
            connection.memory.release(call, event.held_bytes)
            connection.consume(call, event.wire_bytes)
        events = connection.receive(b"", 0.0)
        seen += len(events)
    assert isinstance(events[-1], MessageReceived)
    assert (seen, events[-1].is_last, connection.has_more) == (3_000, True, False)


def test_a_stream_that_ends_while_messages_wait_is_not_decoded_further() -> None:
    connection = served()
    call = called(connection)
    call.has_request_stream = True
    connection.receive(peer.data(1, grpc_message(b"") * 100), 0.0)
    assert connection.check(Limits().stall_timeout_s + 1) == [], "it waits for the server"
    connection.consume(call, 5)
    connection.finish(call, RpcCode.OK)
    assert not connection.has_more
    assert connection.share.bytes == 0


def test_messages_of_streams_count_for_a_turn_as_calls_do() -> None:
    connection = served()
    streams = range(1, 17, 2)
    for stream_id in streams:
        called(connection, peer.headers(stream_id))
    few = grpc_message(b"") * (MESSAGES_UNREAD_MAX - 1)
    events = connection.receive(b"".join(peer.data(one, few) for one in streams), 0.0)
    # The first message of a stream belongs to the counted call.
    assert len(events) <= CALLS_PER_TURN + len(streams)
    turns = 1
    while connection.has_more:
        more = connection.receive(b"", 0.0)
        assert 0 < len(more) <= CALLS_PER_TURN + len(streams)
        events += more
        turns += 1
    assert turns >= 3
    received = Counter(event.call for event in events if isinstance(event, MessageReceived))
    assert set(received.values()) == {MESSAGES_UNREAD_MAX - 1}


def test_a_reply_is_counted_until_it_is_written() -> None:
    connection = served()
    connection.receive(peer.window_update(0, 1 << 30), 0.0)
    connection.http.take_output()
    # Within the windows, so it does not wait for the protocol.
    call = called(connection, peer.request(1, b""))
    connection.respond(call, bytes(60_000))
    assert connection.share.bytes == 60_005
    connection.http.take_output()
    connection.memory.count_buffered(40_000)
    assert connection.share.bytes == 40_000
    connection.memory.count_buffered(0)
    assert connection.share.bytes == 0


def test_a_large_reply_without_room_is_rejected_and_a_small_one_is_not() -> None:
    hits: Counter[Limit] = Counter()
    connection = served(hits=hits, account=MemoryAccount(150_000))
    connection.receive(peer.window_update(0, 1 << 30), 0.0)
    calls = [called(connection, peer.request(n, b"")) for n in (1, 3, 5)]
    connection.respond(calls[0], bytes(60_000))
    connection.http.take_output()
    connection.memory.count_buffered(60_000)
    connection.respond(calls[1], bytes(60_000))
    assert status_of(output(connection))[0] == "8"
    assert hits == {Limit.MEMORY: 1}
    connection.respond(calls[2], bytes(4_000))
    assert status_of(output(connection))[0] == "0"
    assert connection.share.bytes == 60_000


def test_after_large_replies_no_call_starts_for_as_many_turns() -> None:
    connection = served()
    connection.receive(peer.window_update(0, 1 << 30), 0.0)
    call = called(connection, peer.request(1, b""))
    connection.respond(call, bytes(3 * REPLY_BYTES_PER_TURN))
    assert connection.has_reply_debt
    begun = [len(connection.receive(peer.request(3, b""), 0.0))]
    while not begun[-1]:
        assert connection.has_more
        assert connection.begun_count == 0
        begun.append(len(connection.receive(b"", 0.0)))
    assert begun == [0, 0, 0, 2]


def test_data_that_waits_for_a_turn_ends_with_its_connection() -> None:
    connection = served()
    raw = b"".join(peer.request(2 * n + 1) for n in range(CALLS_PER_TURN + 10))
    connection.receive(raw, 0.0)
    ends = connection.close(ErrorCode.CANCEL, "gone")
    assert len([one for one in ends if isinstance(one, CallEnded)]) == CALLS_PER_TURN
    assert not connection.has_more
    assert connection.share.bytes == 0


def test_data_that_waits_for_a_turn_is_counted_and_stays_bytes() -> None:
    connection = served()
    some = b"".join(peer.request(n, b"") for n in range(1, 801, 2))
    events = connection.receive(some, 0.0, frames_max=128)
    assert sum(isinstance(one, CallStarted) for one in events) == CALLS_PER_TURN
    while connection.has_more:
        # At most as many events as frames of a turn; other data stays as received.
        calls_bytes = sum(call.held_bytes for call in connection._calls.values())
        assert connection.share.bytes == len(connection.http.unparsed) + calls_bytes
        assert len(connection._http_events) <= 128
        events = connection.receive(b"", 0.0, frames_max=128)
    assert connection.call_count == 400
    assert connection.http.held_bytes(output_bytes_min=0) == 0


@pytest.mark.parametrize("frame_bytes", [1_000, 16_384])
@pytest.mark.parametrize("size", [65_530, 65_531, 131_072, MESSAGE_BYTES_MAX])
def test_a_large_message_arrives_through_granted_windows(size: int, frame_bytes: int) -> None:
    """The client sends as the windows allow, and has one left for the end of its request.

    The end needs none, but hyper (Rust) waits for one.
    """
    connection = served()
    call = called(connection)
    content, window, at = grpc_message(bytes(size)), 65_535, 0
    events: list[ServerEvent] = []
    while at < len(content):
        step = min(frame_bytes, window, len(content) - at)
        assert step > 0, "the message waits for a window that is not opened"
        events += connection.receive(peer.data(1, content[at : at + step]), 0.0)
        at, window = at + step, window - step
        updates = peer.of(frames.WINDOW_UPDATE, output(connection))
        window += sum(one.number for one in updates if one.stream_id == 1)
    assert window > 0
    events += connection.receive(peer.data(1, is_last=True), 0.0)
    received, ended = events
    assert received[:4] == (call, bytes(size), size + 5, False)
    assert ended == RequestsEnded(call)
    connection.respond(call, b"")
    peer.check_accounts(connection.http)
    assert connection.http._incoming.budget_left == Limits().large_messages_bytes


def test_the_calls_do_not_depend_on_the_cuts() -> None:
    raw = peer.CLIENT_GREETING + b"".join(
        peer.request(2 * n + 1, bytes(n * 97), frame_bytes=50 + n) for n in range(20)
    )
    for seed in range(10):
        connection = ServerConnection(Limits(), message_bytes_max=MESSAGE_BYTES_MAX, now_s=0.0)
        received: dict[int, bytes] = {}
        for piece in peer.pieces(raw, Random(seed), 300):
            for event in connection.receive(piece, 0.0):
                if isinstance(event, MessageReceived):
                    assert event.is_last
                    received[event.call.stream.id] = event.message
            peer.check_accounts(connection.http)
        assert received == {2 * n + 1: bytes(n * 97) for n in range(20)}
