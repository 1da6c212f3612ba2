"""The server's end of gRPC: calls come in as events, responses go out as bytes.

    connection = ServerConnection(Limits(), message_bytes_max=..., now_s=...)
    for event in connection.receive(data, now_s):
        CallStarted       look up `call.path`; `finish` the call if it is unknown
        MessageReceived   one message of the request, perhaps the last one
        RequestsEnded     the client sends no more; omitted if the last message was marked
        CallEnded         the client cancelled, broke the protocol or disconnected: do not respond
        CallWritable      the queued data of `send` was sent
        ConnectionEnded   the connection has ended

    connection.memory.hold(call, count)       take room for a call until it ends
    connection.memory.count_buffered(count)   set the taken output that is not written yet
    connection.memory.on_grant                called when a waiting message may arrive
    connection.consume(call, wire_bytes)      a message of a stream was read: more may arrive

    connection.respond(call, message)         a whole unary response
    connection.start(call)                    the headers now
    connection.send(call, messages)           messages of a stream
    connection.finish(call, code, text)       the end of any call

The cost of one turn of the event loop is limited. `receive` keeps calls, messages of streams and
bytes to inflate beyond the limit for the next turn, and then `has_more` is true. A few messages of
a stream wait to be read; later ones stay undecoded within the stream's window.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Final, final

from tidemill.transport.grpc import messages, status
from tidemill.transport.grpc.address_share import AddressShare
from tidemill.transport.grpc.connection_memory import (
    CALL_BYTES,
    INFLATED_COPIES,
    MESSAGE_BYTES,
    SMALL_REPLY_BYTES,
    ConnectionMemory,
    MemoryExhausted,
    is_too_slow,
    room_wait_s,
)
from tidemill.transport.grpc.foreign_requests import ForeignRequests, is_grpc
from tidemill.transport.grpc.memory import MemoryAccount
from tidemill.transport.grpc.messages import CompleteMessage, MessageAssembler
from tidemill.transport.grpc.metadata import parse_timeout
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
from tidemill.transport.grpc.status import RESPONSE_BLOCK, RpcCode, RpcError, Trailers
from tidemill.transport.http2.connection import Connection, Role
from tidemill.transport.http2.events import (
    ConnectionEnded,
    DataReceived,
    MarkReached,
    RequestReceived,
    StreamReset,
    StreamWritable,
)
from tidemill.transport.http2.events import Event as HttpEvent
from tidemill.transport.http2.frames import ErrorCode
from tidemill.transport.http2.limits import Limit, Limits
from tidemill.transport.http2.stream_states import StreamState

SMALL_MESSAGE_BYTES: Final = 2 << 10  # a message up to this size is part of CALL_BYTES
# Started in one turn of the event loop by one connection, at about 100 us each with the response.
CALLS_PER_TURN: Final = 32
# Decoded messages of a stream that are not read yet. Our clients have one or two in flight.
MESSAGES_UNREAD_MAX: Final = 16
# Decoded per turn of a stream if several streams have messages, so that they take turns.
_MESSAGES_PER_STREAM_TURN: Final = 4
# Large replies of one connection in a turn of the event loop. If there are more, its next calls
# wait as many turns. A route with a thousand queues has a hundred kilobytes and takes milliseconds.
REPLY_BYTES_PER_TURN: Final = 256 << 10
# Inflated for one connection in a turn of the event loop, plus the last message: milliseconds.
INFLATED_BYTES_PER_TURN: Final = 256 << 10
_ENCODINGS: Final = frozenset({"identity", "gzip"})
_ACCEPTED_ENCODINGS: Final = (("grpc-accept-encoding", "identity,gzip"),)


@final
class ServerConnection:
    """One client's connection. It is one class because events and responses share its calls."""

    def __init__(
        self,
        limits: Limits,
        *,
        message_bytes_max: int,
        now_s: float,
        hits: Counter[Limit] | None = None,
        account: MemoryAccount | None = None,
        address: AddressShare | None = None,
        policies: Mapping[str, RequestPolicy] | None = None,
    ) -> None:
        """Share `hits`, `account` and `address` with other connections, or use new ones.

        Paths without an entry in `policies` accept messages up to `message_bytes_max`.
        """
        assert message_bytes_max + messages.PREFIX_SIZE <= limits.large_messages_bytes, (
            "the budget for large messages holds the largest"
        )
        hits = Counter() if hits is None else hits
        self.http = Connection(Role.SERVER, limits, now_s=now_s, hits=hits)
        self._limits = limits
        self._hits = hits
        account = account or MemoryAccount(2 * limits.held_bytes_max)
        self.memory = ConnectionMemory(self.http, limits, account, address)
        self.share = self.memory.share
        self._foreign = ForeignRequests(self.http, self.memory)
        self._reply_debt_bytes = 0  # large replies beyond the limits of the turns so far
        self._policies = policies or {}
        self._default_policy = RequestPolicy(message_bytes_max)
        self._http_events: deque[HttpEvent] = deque()  # for later turns
        # Of this turn: the number of calls, and the remaining calls and bytes.
        self._turn_calls = self._call_budget = self._inflate_budget = 0
        self._calls: dict[int, ServerCall] = {}
        # Calls with an incomplete request: few, even if many polls are parked.
        self._incomplete: dict[int, ServerCall] = {}
        # Streams with undecoded messages, in the order of their turns.
        self._ready: dict[int, ServerCall] = {}

    @property
    def call_count(self) -> int:
        """The number of calls in progress."""
        return len(self._calls)

    # ------------------------------------------------------------ input

    def receive(
        self, data: bytes, now_s: float, *, frames_max: int = sys.maxsize
    ) -> list[ServerEvent]:
        """Process bytes that arrived at `now_s`, monotonic seconds; return the events of one turn.

        If `has_more` is true afterwards, call again in the next turn without bytes.
        """
        waiting = self._http_events
        if waiting:
            # Limit the events. Waiting bytes are smaller, and they are counted.
            frames_max = max(frames_max - len(waiting), 0)
        waiting += self.http.receive(data, now_s, frames_max=frames_max)
        self._turn_calls, self._inflate_budget = CALLS_PER_TURN, INFLATED_BYTES_PER_TURN
        if self._reply_debt_bytes:
            if self.has_reply_debt:
                self._turn_calls = 0
            self._reply_debt_bytes = max(self._reply_debt_bytes - REPLY_BYTES_PER_TURN, 0)
        self._call_budget = self._turn_calls
        events: list[ServerEvent] = []
        if self.http.is_closed:
            self._drop_waiting()
        while waiting and self._call_budget > 0:
            event = waiting.popleft()
            # Inlined: nearly all events are of these two types.
            if type(event) is DataReceived:
                self._on_data(event, events)
            elif type(event) is RequestReceived:
                self._on_request(event, events)
            else:
                self._translate(event, events)
            if self._ready:
                self._read_next_stream(events)
        while self._ready and self._call_budget > 0:
            self._read_next_stream(events)
        # Code that opens windows or queues output has counted that itself.
        if self.memory.counted_bytes or self.http.unparsed:
            self.memory.count_windows()
        return events

    @property
    def begun_count(self) -> int:
        """The number of calls and messages that the last `receive` started."""
        return self._turn_calls - self._call_budget

    @property
    def has_reply_debt(self) -> bool:
        """Whether the replies exceeded the limits of the turns, so that calls must wait."""
        return self._reply_debt_bytes >= REPLY_BYTES_PER_TURN

    @property
    def has_more(self) -> bool:
        """Whether received data waits for the next turn."""
        return bool(self._http_events) or bool(self._ready) or self.http.has_input

    def _read_next_stream(self, events: list[ServerEvent]) -> None:
        """Decode a few messages of the next ready stream."""
        call = self._ready.pop(next(iter(self._ready)))
        assert call.reader is not None, "a ready stream has undecoded messages"
        self._feed(call, call.reader, b"", events, messages_max=_MESSAGES_PER_STREAM_TURN)

    def _drop_waiting(self) -> None:
        """Drop waiting requests; keep the ends of calls and the read marks."""
        kept = [
            event
            for event in self._http_events
            if isinstance(event, StreamReset | ConnectionEnded | MarkReached)
        ]
        self._http_events.clear()
        self._http_events += kept

    def _translate_all(self, http_events: Sequence[HttpEvent]) -> list[ServerEvent]:
        """Translate events without requests; these do not have to wait for a turn."""
        events: list[ServerEvent] = []
        if self.http.is_closed:
            self._drop_waiting()
            http_events = [*self._http_events, *http_events]
            self._http_events.clear()
        for event in http_events:
            self._translate(event, events)
        self.memory.count_windows()
        return events

    def check(self, now_s: float) -> list[ServerEvent]:
        """End calls without progress; call it about once a second."""
        events = self._translate_all(self.http.check(now_s))
        patience_s = self._limits.stall_timeout_s
        for call in list(self._incomplete.values()):
            if call.room_requested_at_s is not None:
                if now_s - call.room_requested_at_s > room_wait_s(call):
                    self._reject_for_memory(call)
                    events.append(CallEnded(call))
                continue  # The call waits for us, so the client is not late.
            reader = call.reader
            if call.has_request_stream and (reader is None or reader.has_more):
                continue  # The client may pause between messages, and some wait to be read.
            if call.has_request_stream:
                begun_at_s = call.message_begun_at_s
            else:
                begun_at_s = call.stream.opened_at_s
            is_late = now_s - begun_at_s > self._limits.request_timeout_s
            is_slow = now_s - call.stream.moved_at_s > patience_s or is_too_slow(
                call, now_s, patience_s
            )
            if is_slow or is_late:
                self._hits[Limit.REQUEST] += 1
                self.finish(call, RpcCode.DEADLINE_EXCEEDED, "the request did not arrive in time")
                events.append(CallEnded(call))
        self._foreign.check(now_s, patience_s)
        return events

    def close(self, code: ErrorCode, reason: str) -> list[ServerEvent]:
        """End the connection and all its calls."""
        self.memory.close()
        return self._translate_all(self.http.close(code, reason))

    def _translate(self, event: HttpEvent, events: list[ServerEvent]) -> None:
        if isinstance(event, DataReceived):
            self._on_data(event, events)
        elif isinstance(event, RequestReceived):
            self._on_request(event, events)
        elif isinstance(event, StreamReset):
            self._foreign.discard(event.stream)
            call = self._calls.get(event.stream.id)
            if call is not None:
                self._end(call)
                events.append(CallEnded(call))
        elif isinstance(event, StreamWritable):
            if event.stream.id in self._calls:
                events.append(CallWritable(self._calls[event.stream.id]))
        elif isinstance(event, MarkReached | ConnectionEnded):
            events.append(event)

    def _on_request(self, event: RequestReceived, events: list[ServerEvent]) -> None:
        stream, fields, is_last = event
        if stream.state is StreamState.RESET:
            return  # Cancelled before its turn.
        self._call_budget -= 1
        method, path = fields[":method"], fields[":path"]
        content_type = fields.get("content-type", "")
        is_grpc_type = content_type == "application/grpc" or is_grpc(content_type)
        if method != "POST" or not is_grpc_type:
            self._foreign.receive(stream, method, path, is_last=is_last)
            return
        call = self._calls[stream.id] = ServerCall(stream, path, fields)
        held_bytes = CALL_BYTES + stream.header_bytes
        if not self.share.take(held_bytes):
            self._reject_for_memory(call)
            return
        call.held_bytes = held_bytes
        try:
            if "grpc-encoding" in fields and fields["grpc-encoding"] not in _ENCODINGS:
                reason = f"the encoding {fields['grpc-encoding']} is unknown; use identity or gzip"
                raise RpcError(RpcCode.UNIMPLEMENTED, reason, _ACCEPTED_ENCODINGS)
            if "grpc-timeout" in fields:
                call.timeout_s = parse_timeout(fields["grpc-timeout"])
        except RpcError as error:
            self.finish(call, error.code, error.message, error.trailers)
            return
        events.append(CallStarted(call))
        if is_last:
            call.is_complete = True
            events.append(RequestsEnded(call))
        else:
            self._incomplete[stream.id] = call

    def _on_data(self, event: DataReceived, events: list[ServerEvent]) -> None:
        stream, data, is_last = event
        call = self._calls.get(stream.id)
        if call is None:
            self._foreign.receive_data(stream, len(data), is_last=is_last)
            return
        call.processed_bytes += len(data)
        if is_last:
            call.is_complete = True
            del self._incomplete[stream.id]
        if stream.state is StreamState.RESET:
            return  # The client no longer waits; the end of the call is a later event.
        if call.reader is None:
            message = messages.whole_message(data)
            if message is not None and call.unread_count < MESSAGES_UNREAD_MAX:
                held_bytes = len(message) if len(data) > SMALL_MESSAGE_BYTES else 0
                if call.unread_count:
                    held_bytes = len(message) + MESSAGE_BYTES
                    self._call_budget -= 1
                if not held_bytes or self.memory.hold(call, held_bytes):
                    call.unread_count += 1
                    events.append(MessageReceived(call, message, len(data), is_last, held_bytes))
                    return
            policy = self._policy_of(call)
            call.reader = MessageAssembler(
                call.metadata.get("grpc-encoding", ""),
                policy.request_bytes_max,
                lambda size: self.memory.admit(call, size * INFLATED_COPIES),
                skipped_bytes_max=policy.skipped_bytes_max,
            )
            call.message_begun_at_s = self.http.heard_at_s
        self._feed(call, call.reader, data, events)

    def _feed(
        self,
        call: ServerCall,
        reader: MessageAssembler,
        data: bytes,
        events: list[ServerEvent],
        *,
        messages_max: int = MESSAGES_UNREAD_MAX,
    ) -> None:
        """Decode messages of a call, hold room for them, and append their events."""
        unread_room = MESSAGES_UNREAD_MAX - call.unread_count
        try:
            complete = self._decode(
                call, reader, data, min(messages_max, unread_room, max(self._call_budget, 0))
            )
            is_last = call.is_complete and not reader.has_more
            held = self.memory.hold_messages(call, complete, reader)
        except MemoryExhausted:
            self._reject_for_memory(call)
            events.append(CallEnded(call))
            return
        except RpcError as error:
            if error.code is RpcCode.RESOURCE_EXHAUSTED:
                self._hits[Limit.MESSAGE_BYTES] += 1
                self._reject(call, self._policy_of(call).oversize, error)
            else:
                self.finish(call, error.code, error.message)
            events.append(CallEnded(call))
            return
        # The budget has already counted the first message with its call.
        self._call_budget -= len(complete) - (call.unread_count == 0)
        call.unread_count += len(complete)
        if reader.has_more and call.unread_count < MESSAGES_UNREAD_MAX:
            self._ready[call.stream.id] = call
        last = len(complete) - 1
        for at, (message, wire_bytes, _, skipped_bytes) in enumerate(complete):
            ends = is_last and at == last
            if skipped_bytes:
                self._hits[Limit.MESSAGE_BYTES] += 1
            events.append(MessageReceived(call, message, wire_bytes, ends, held[at], skipped_bytes))
        if is_last and not complete:
            events.append(RequestsEnded(call))
        if reader.is_empty:
            call.reader = None

    def _decode(
        self, call: ServerCall, reader: MessageAssembler, data: bytes, messages_max: int
    ) -> list[CompleteMessage]:
        """Return complete messages; request room for the remaining bytes of the next one."""
        inflated_before = reader.inflated_bytes
        complete = reader.feed(data, messages_max)
        if call.is_complete and not (reader.has_more or reader.is_empty):
            raise RpcError(RpcCode.INTERNAL, "the request ends in the middle of a message")
        if reader.dropped_bytes:
            self.http.consume(call.stream, reader.dropped_bytes)
        if complete:
            self.memory.finish_message(call)
        if not (reader.is_empty or reader.has_more or reader.skip_left_bytes):
            self.memory.request_room(call, reader)
        self._inflate_budget -= reader.inflated_bytes - inflated_before
        if self._inflate_budget <= 0:
            self._call_budget = 0  # Inflating cost as much as the calls of a turn.
        return complete

    def _reject_for_memory(self, call: ServerCall) -> None:
        """Answer a call without room at once, in the form that its client expects."""
        self._hits[Limit.MEMORY] += 1
        self._reject(call, self._policy_of(call).overload, MemoryExhausted())

    def _reject(self, call: ServerCall, response: bytes, error: RpcError) -> None:
        if response:
            self.respond(call, response)
        else:
            self.finish(call, error.code, error.message)

    def _policy_of(self, call: ServerCall) -> RequestPolicy:
        return self._policies.get(call.path, self._default_policy)

    # ------------------------------------------------------------ output

    def respond(self, call: ServerCall, message: bytes) -> None:
        """Answer a unary call with OK and one message, or reject it if the message has no room."""
        if call.is_ended:
            return
        is_large = len(message) > SMALL_REPLY_BYTES
        if is_large:
            self._reply_debt_bytes += len(message)
            if not self.memory.has_room_for_reply(len(message)):
                self._reject_for_memory(call)
                return
        self._end(call)
        stream = call.stream
        has_windows = stream.large_bytes
        if call.has_started:
            self.http.send_data(stream, messages.encode(message))
            self.http.send_headers(stream, status.OK_TRAILERS, is_last=True)
        else:
            self.http.send_response(
                stream, RESPONSE_BLOCK, messages.encode(message), status.OK_TRAILERS
            )
        if is_large or has_windows or stream.queue is not None:
            self.memory.count_windows()

    def start(self, call: ServerCall) -> None:
        """Send the response headers before the first message; some clients wait for them."""
        if not call.has_started and not call.is_ended:
            call.has_started = True
            self.http.send_headers(call.stream, RESPONSE_BLOCK, is_last=False)

    def send(self, call: ServerCall, batch: Sequence[bytes]) -> int:
        """Send messages of a stream; return the bytes that now wait for the client's window."""
        if call.is_ended:
            return 0
        self.start(call)
        data = messages.encode_all(batch)
        call.queued_total_bytes += len(data)
        stream = call.stream
        self.http.send_data(stream, data)
        # As in `respond`: small data without a queue is counted when it is written.
        if stream.queue is not None or len(data) > SMALL_REPLY_BYTES:
            self.memory.count_windows()
        return stream.queued_bytes

    def finish(
        self, call: ServerCall, code: RpcCode, message: str = "", trailers: Trailers = ()
    ) -> None:
        """End a call with a status, after its queued data."""
        if call.is_ended:
            return
        self._end(call)
        if call.has_started:
            block = status.encode_trailers(code, message, trailers)
        else:
            block = status.encode_trailers_only(code, message, trailers)
        has_windows = call.stream.large_bytes
        self.http.send_headers(call.stream, block, is_last=True)
        if has_windows:
            self.memory.count_windows()

    def consume(self, call: ServerCall, wire_bytes: int) -> None:
        """Let the client send more, because a message of `wire_bytes` was read."""
        self.http.consume(call.stream, wire_bytes)
        call.unread_count -= 1
        if call.reader is not None and call.reader.has_more and not call.is_ended:
            self._ready[call.stream.id] = call

    def _end(self, call: ServerCall) -> None:
        call.is_ended = True
        del self._calls[call.stream.id]
        if call.room_requested_at_s is not None:
            self.memory.withdraw(call)
        if call.reader is not None:
            self._ready.pop(call.stream.id, None)
        if not call.is_complete:
            self._incomplete.pop(call.stream.id, None)
        self.share.release(call.held_bytes)
        call.held_bytes = 0
