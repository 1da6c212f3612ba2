"""Arbitrary bytes for one end of a connection, with an application that uses the events.

No exception is allowed. After each piece, the accounts must be exact and the memory limited.
Property tests and the fuzzer share this module, so a finding of the fuzzer is replayed as a test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from enum import Enum
from random import Random

from tests.support.clients import http2_peer as peer
from tests.support.clients.streams import half_close, stream_count
from tidemill.transport.grpc.client_connection import (
    ClientCall,
    ClientConnection,
    ResponseEnded,
    ResponseMessage,
)
from tidemill.transport.grpc.server_call import (
    CallEnded,
    CallStarted,
    MessageReceived,
    RequestsEnded,
    ServerCall,
)
from tidemill.transport.grpc.server_connection import ServerConnection
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2 import frames
from tidemill.transport.http2.connection import Connection, Role
from tidemill.transport.http2.events import (
    ConnectionEnded,
    DataReceived,
    RequestReceived,
    StreamReset,
)
from tidemill.transport.http2.frames import ErrorCode, Setting
from tidemill.transport.http2.limits import Limits
from tidemill.transport.http2.preface import HTTP1_RESPONSE
from tidemill.transport.http2.stream import Stream
from tidemill.transport.http2.stream_states import LOCAL_ENDED, StreamState

BLOCK, TRAILERS = peer.block(peer.RESPONSE), peer.block(peer.OK_TRAILERS)
REQUEST_BLOCK = peer.block(peer.GRPC_REQUEST)
MESSAGE_BYTES_MAX = 3_000
ANSWER = bytes(700)
PIECE_S = 0.5  # so that allowances refill and timeouts pass after many pieces
# Small, so that a few frames reach every limit.
LIMITS = Limits(
    streams_max=6,
    stream_window_bytes=1_000,
    large_messages_bytes=5_000,
    header_block_bytes=20_000,
    header_list_bytes=8_000,
    continuations_max=4,
    unread_bytes_max=8_000,
    resets_burst=12,
    resets_per_s=1,
    settings_burst=12,
    pings_burst=12,
    pings_per_s=1,
    empty_data_burst=12,
    empty_data_per_s=1,
    control_burst=40,
    control_per_s=4,
    stall_timeout_s=20.0,
    idle_timeout_s=30.0,
    keepalive_period_s=10.0,
    keepalive_timeout_s=10.0,
)


class End(Enum):
    """The end of a connection that receives the bytes."""

    HTTP_SERVER = 0
    HTTP_CLIENT = 1
    GRPC_SERVER = 2
    GRPC_CLIENT = 3


def run_trial(end: End, pieces: Iterable[bytes]) -> Connection:
    """Feed `pieces` to an open end; return its connection."""
    return _TRIALS[end](pieces)


def _checked(connection: Connection) -> None:
    peer.check_accounts(connection)
    output = connection.take_output().removeprefix(frames.PREFACE)
    if output == HTTP1_RESPONSE:
        assert connection.is_closed, "only a client of HTTP/1.1 gets a response in it"
        return
    found, rest = peer.parse_some(output)
    assert not rest, "the output consists of whole frames"
    if connection.is_closed:
        goaways = [one.kind == frames.GOAWAY for one in found]
        assert True not in goaways[:-1] or goaways[-1], "GOAWAY is the last frame"


def _http_server(pieces: Iterable[bytes]) -> Connection:
    connection = Connection(Role.SERVER, LIMITS, now_s=0.0)
    has_ended: dict[int, bool] = {}
    now_s = 0.0
    for piece in pieces:
        now_s += PIECE_S
        events = [*connection.receive(piece, now_s), *connection.check(now_s)]
        for event in events:
            if isinstance(event, ConnectionEnded):
                assert event is events[-1], "no event follows the end"
            elif isinstance(event, RequestReceived):
                assert event.stream.id not in has_ended, "a stream starts once"
                has_ended[event.stream.id] = False
                _on_request(connection, event.stream)
            elif isinstance(event, StreamReset):
                assert event.stream.state is StreamState.RESET
                has_ended[event.stream.id] = True
            elif isinstance(event, DataReceived):
                assert has_ended[event.stream.id] is False, "no data after the end"
                connection.consume(event.stream, len(event.data))
                if event.is_last:
                    has_ended[event.stream.id] = True
                    _answer(connection, event.stream)
        _checked(connection)
    if _is_fit(connection):
        _check_that_it_serves(connection, now_s)
    return connection


def _on_request(connection: Connection, stream: Stream) -> None:
    turn = stream.id // 2 % 5
    if turn == 0:
        _answer(connection, stream)
    elif turn == 1 and stream.state is not StreamState.RESET:
        connection.reset(stream, ErrorCode.CANCEL)
    elif turn == 2:
        connection.request_room(stream, MESSAGE_BYTES_MAX)
    elif turn == 3 and stream.state is not StreamState.RESET:
        connection.send_headers(stream, BLOCK, is_last=False)
        connection.send_data(stream, ANSWER)


def _answer(connection: Connection, stream: Stream) -> None:
    if stream.state not in LOCAL_ENDED and stream.trailers is None:
        connection.send_response(stream, BLOCK, ANSWER, TRAILERS)


def _is_fit(connection: Connection) -> bool:
    """Return whether the peer may still send requests."""
    return not (
        connection.is_closed
        or connection.unparsed
        or connection._headers.partial
        or connection._needs_settings
        or connection.is_draining
        or stream_count(connection) == LIMITS.streams_max
        or connection._streams.last_id > frames.STREAM_ID_MAX - 2
    )


def _check_that_it_serves(connection: Connection, now_s: float) -> None:
    """A well-behaved stream completes after all earlier input."""
    stream_id = (connection._streams.last_id + 1) | 1
    opened = peer.headers(stream_id) + peer.data(stream_id, b"good", is_last=True)
    if connection._outgoing.window < 2_000:
        opened += peer.window_update(0, 2_000 - connection._outgoing.window)
    now_s += 1_000.0  # The allowances are full again.
    events = connection.receive(opened, now_s)
    assert not connection.is_closed
    [stream] = [one.stream for one in events if isinstance(one, RequestReceived)]
    assert DataReceived(stream, b"good", is_last=True) in events
    connection.send_response(stream, BLOCK, b"answer", TRAILERS)
    if (
        stream.send_window < 6
        and stream.state is not StreamState.RESET
        and stream.queue is not None
    ):
        connection.receive(peer.window_update(stream_id, 6 - stream.send_window), now_s)
    found = peer.parse(connection.take_output())
    assert peer.content(found, stream_id) == b"answer"
    [end] = [one for one in peer.of(frames.HEADERS, found) if one.stream_id == stream_id][1:]
    assert end.is_last


def _http_client(pieces: Iterable[bytes]) -> Connection:
    connection = Connection(Role.CLIENT, LIMITS, now_s=0.0)
    streams = [connection.open_stream(REQUEST_BLOCK) for _ in range(5)]
    now_s, has_ended = 0.0, set()
    for index, stream in enumerate(streams):
        assert stream is not None
        connection.send_data(stream, bytes(index * 20_000), is_last=index % 2 == 0)
    for piece in pieces:
        now_s += PIECE_S
        for event in (*connection.receive(piece, now_s), *connection.check(now_s)):
            if isinstance(event, StreamReset):
                assert event.stream.id not in has_ended, "a stream ends once"
                has_ended.add(event.stream.id)
            elif isinstance(event, DataReceived):
                assert event.stream.id not in has_ended
                connection.consume(event.stream, len(event.data))
                if event.stream.id == 3:
                    connection.request_room(event.stream, MESSAGE_BYTES_MAX)
        _checked(connection)
    return connection


def _grpc_server(pieces: Iterable[bytes]) -> Connection:
    connection = ServerConnection(LIMITS, message_bytes_max=MESSAGE_BYTES_MAX, now_s=0.0)
    calls: dict[int, ServerCall] = {}
    now_s = 0.0
    for piece in pieces:
        now_s += PIECE_S
        for event in (*connection.receive(piece, now_s), *connection.check(now_s)):
            if isinstance(event, CallStarted):
                assert event.call.stream.id not in calls
                calls[event.call.stream.id] = event.call
                event.call.has_request_stream = event.call.stream.id % 4 == 1
            elif isinstance(event, CallEnded):
                # A call that was rejected within the same bytes may have no event.
                assert event.call.is_ended
                calls.pop(event.call.stream.id, None)
            elif isinstance(event, (MessageReceived, RequestsEnded)):
                if isinstance(event, MessageReceived):
                    assert len(event.message) <= MESSAGE_BYTES_MAX
                    connection.consume(event.call, event.wire_bytes)
                if isinstance(event, RequestsEnded) or event.is_last:
                    _end_call(connection, event.call)
        _checked(connection.http)
        assert connection.call_count <= LIMITS.streams_max
    connection.close(ErrorCode.NO_ERROR, "done")
    assert connection.call_count == 0
    return connection.http


def _end_call(connection: ServerConnection, call: ServerCall) -> None:
    if call.stream.id // 2 % 2:
        connection.respond(call, ANSWER)
    else:
        connection.send(call, [ANSWER, b""])
        connection.finish(call, RpcCode.ABORTED, "enough")


def _grpc_client(pieces: Iterable[bytes]) -> Connection:
    connection = ClientConnection("a", LIMITS, message_bytes_max=MESSAGE_BYTES_MAX, now_s=0.0)
    calls: list[ClientCall] = []
    ended: set[int] = set()
    now_s = 0.0
    for index in range(5):
        call = connection.open("/a/B")
        calls.append(call)
        connection.send(call, bytes(index * 20_000))
        if index % 2:
            half_close(connection, call)
    for piece in pieces:
        now_s += PIECE_S
        for event in (*connection.receive(piece, now_s), *connection.check(now_s)):
            if isinstance(event, ResponseMessage):
                assert event.call.stream.id not in ended
                assert len(event.message) <= MESSAGE_BYTES_MAX
                connection.consume(event.call, event.wire_bytes)
            elif isinstance(event, ResponseEnded):
                assert event.call.stream.id not in ended, "a call ends once"
                ended.add(event.call.stream.id)
        _checked(connection.http)
        if now_s == 5 * PIECE_S:
            with contextlib.suppress(RpcError):  # The server may accept no more calls.
                calls.append(connection.open("/a/C"))
    for event in connection.close(ErrorCode.NO_ERROR, "done"):
        if isinstance(event, ResponseEnded):
            assert event.call.stream.id not in ended
            ended.add(event.call.stream.id)
    assert ended == {call.stream.id for call in calls}, "every call ends"
    return connection.http


_TRIALS = {
    End.HTTP_SERVER: _http_server,
    End.HTTP_CLIENT: _http_client,
    End.GRPC_SERVER: _grpc_server,
    End.GRPC_CLIENT: _grpc_client,
}


# ---------------------------------------------------------------- frames, good and slightly bad


def random_frames(end: End, random: Random, count: int) -> Iterator[bytes]:
    """Yield first frames, and then mostly valid frames."""
    is_server = end in (End.HTTP_SERVER, End.GRPC_SERVER)
    yield frames.PREFACE + peer.settings() if is_server else peer.settings()
    next_id = 1
    for _ in range(count):
        if is_server and random.random() < 0.25:
            stream_id, next_id = next_id, next_id + 2
            one = _some_headers(random, stream_id, is_server=True)
        else:
            stream_id = random.choice((1, 3, 5, 7, 9, max(1, next_id - 2), random.randint(0, 20)))
            one = _some_frame(random, stream_id, is_server=is_server)
        if random.random() < 0.03:
            one = _damaged(one, random)
        yield one


def _some_headers(random: Random, stream_id: int, *, is_server: bool) -> bytes:
    fields = peer.GRPC_REQUEST if is_server else peer.RESPONSE
    more = random.choice(
        (
            (),
            (),
            (),
            (("grpc-timeout", "1S"),),
            (("grpc-encoding", "gzip"),),
            (("x", "v" * 3_000),),
            (("content-length", str(random.randint(0, 20))),),
            (("Upper", ""),),
        )
    )
    if not is_server and random.random() < 0.4:
        fields = (("grpc-status", str(random.randint(0, 20))), ("grpc-message", "%41%"))
    if random.random() < 0.15:
        cut = peer.headers(stream_id, (*fields, *more), is_complete=False)
        return cut + peer.continuation(stream_id, b"", is_complete=random.random() < 0.9)
    return peer.headers(
        stream_id,
        (*fields, *more),
        is_last=random.random() < 0.3,
        padding=random.choice((None, None, 5)),
        priority=random.choice((b"", b"", bytes(5))),
    )


def _some_frame(random: Random, stream_id: int, *, is_server: bool) -> bytes:
    kind = random.randrange(12)
    if kind <= 4:
        size = random.choice((0, 1, 5, 100, 900))
        content = random.choice(
            (
                peer.grpc_message(bytes(size)),
                bytes(size),
                peer.grpc_message(b"", length=size * 4),
                peer.grpc_message(bytes(size), compressed=1),
                peer.grpc_message(bytes(size))[:3],
            )
        )
        padding = random.choice((None, None, None, 10))
        return peer.data(stream_id, content, is_last=random.random() < 0.3, padding=padding)
    if kind == 5:
        return _some_headers(random, stream_id, is_server=is_server)
    if kind == 6:
        size = random.choice((0, 1, 100, 5_000, 65_535, frames.WINDOW_MAX))
        return peer.settings(
            [
                (random.choice((Setting.INITIAL_WINDOW_SIZE, Setting.MAX_FRAME_SIZE, 9)), 16_384),
                (Setting.INITIAL_WINDOW_SIZE, size),
                (Setting.HEADER_TABLE_SIZE, size),
                (Setting.MAX_CONCURRENT_STREAMS, size),
            ]
        )
    if kind <= 8:
        increment = random.choice((1, 100, 5_000, 65_535, 1 << 20, frames.WINDOW_MAX, 0))
        return peer.window_update(random.choice((0, stream_id)), increment)
    if kind == 9:
        return peer.rst_stream(stream_id, random.randint(0, 15))
    return random.choice(
        (
            peer.ping(),
            peer.ping(b"draining", is_ack=True),
            peer.ping(b"tidemill", is_ack=True),
            peer.priority(stream_id, 1),
            peer.frame(0x42, b"?"),
            peer.SETTINGS_ACK,
            peer.goaway(random.choice((0, 3, 99))),
            peer.frame(frames.PUSH_PROMISE, bytes(9)),
        )
    )


def _damaged(one: bytes, random: Random) -> bytes:
    raw = bytearray(one)
    raw[random.randrange(len(raw))] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
    return bytes(raw) if random.random() < 0.7 else bytes(raw[: random.randrange(len(raw))])
