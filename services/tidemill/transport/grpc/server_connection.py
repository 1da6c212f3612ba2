"""The server's end of gRPC: calls come in as events, what answers them goes out as bytes.

    connection = ServerConnection(Limits(), message_bytes_max=..., now_s=...)
    for event in connection.receive(data, now_s):
        CallStarted       look `call.path` up, and `finish` what is not served
        MessageReceived   one message of the request, the last one perhaps
        RequestsEnded     the client sends no more; where the last message has not told it already
        CallEnded         the client cancelled, broke the protocol, or is gone: answer nothing
        CallWritable      what `send` had queued is on its way
        ConnectionEnded            the connection has ended

    connection.hold(call, count)          room for what is held for a call; `_end` gives it back
    connection.consume(call, wire_bytes)  a message of a stream has been read: more may come
    connection.count_buffered(count)      what was taken as output, and is not written yet
    connection.on_grant                   called when a message that waited may come

    connection.respond(call, message)     a whole unary response
    connection.start(call)                headers, now
    connection.send(call, messages)       messages of a stream
    connection.finish(call, code, text)   the end of any call

What a turn of the loop may cost is bounded: `receive` leaves what is too much of calls, of messages
on streams, or of bytes to inflate, for the next one, and `has_more` says so. Of the messages of a
stream a few wait to be read; the others stay the bytes that they are, within the stream's window.

Requests that are not gRPC are answered here, with HTTP's own codes and a sentence for people, when
they are complete; where there is no room to wait for that, at once.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Final, NamedTuple, final

from tidemill.transport.grpc import messages, status
from tidemill.transport.grpc.memory import AddressShare, MemoryAccount, MemoryShare
from tidemill.transport.grpc.messages import CompleteMessage, MessageAssembler
from tidemill.transport.grpc.metadata import parse_timeout
from tidemill.transport.grpc.room_queue import RoomTicket
from tidemill.transport.grpc.status import RESPONSE_BLOCK, RpcCode, RpcError, Trailers
from tidemill.transport.http2 import header_block
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
from tidemill.transport.http2.flow_control import PROGRESS_BYTES
from tidemill.transport.http2.frames import ErrorCode
from tidemill.transport.http2.header_block import Fields
from tidemill.transport.http2.limits import Limit, Limits
from tidemill.transport.http2.stream import Stream
from tidemill.transport.http2.stream_states import StreamState

# What a call takes by itself, with its stream, its task, and what the link knows of it.
CALL_BYTES: Final = 4 << 10
SMALL_MESSAGE_BYTES: Final = 2 << 10  # of these
# Of a message within the window, beyond what has come: what its pieces cost by themselves.
RESERVED_BYTES: Final = 1 << 10
# Begun in a turn of the loop by one connection, at some 100 us each with what answers them.
CALLS_A_TURN: Final = 32
# Of a stream, taken out of its bytes and not read yet. Clients of ours have one or two under way.
MESSAGES_WAITING_MAX: Final = 16
# Of these, taken at a time where several streams have more: others have their turns between.
_MESSAGES_AT_A_TIME: Final = 4
# What a message costs beside its bytes while it waits: an object, an event, a place in a queue.
MESSAGE_BYTES: Final = 128
# A reply of this much is part of what its call took; a larger one finds room or is refused, and
# output of less is not counted before it is written.
SMALL_REPLY_BYTES: Final = 4 << 10
# A large message waits for room for half of what its call has, since the other half is for sending
# it, and no longer than this. Official clients give a send three seconds.
ROOM_WAIT_S_MAX: Final = 5.0
REFUSED_BYTES: Final = 2_048  # of a request that is not gRPC, and its answer
# Of larger replies, in a turn of the loop for one connection: where there were more, its calls wait
# for as many turns. A route of a thousand queues has a hundred kilobytes, and takes milliseconds.
REPLY_BYTES_A_TURN: Final = 256 << 10
# Of a path that is not served, in the sentence that says so: it costs its client a byte to repeat.
PATH_CHARS_TOLD: Final = 256
# Inflated in a turn of the loop for one connection, and the last message: some milliseconds.
INFLATED_BYTES_A_TURN: Final = 256 << 10
# What is inflated for a call is parsed, encoded and put into a frame after that. Its bytes cost the
# client next to nothing, so it has room for all of them first; others hold one of these at a time.
INFLATED_COPIES: Final = 4
_NO_ROOM: Final = "this server holds as much for you as it can; repeat after a pause"
_ENCODINGS: Final = frozenset({"identity", "gzip"})
_ACCEPTED: Final = (("grpc-accept-encoding", "identity,gzip"),)


@final
class ServerCall:
    """One call; it belongs to its connection, others read it."""

    __slots__ = (
        "begun_at_s",
        "has_started",
        "held_bytes",
        "is_complete",
        "is_ended",
        "is_granted",
        "is_open_ended",
        "metadata",
        "paced_at_s",
        "paced_bytes",
        "path",
        "queued_total_bytes",
        "reader",
        "reading_bytes",
        "stream",
        "taken_bytes",
        "timeout_s",
        "waiting_count",
        "wants_room_since_s",
    )

    def __init__(self, stream: Stream, path: str, metadata: Fields) -> None:
        self.stream = stream
        self.path = path
        self.metadata = metadata
        self.timeout_s: float | None = None
        self.reader: MessageAssembler | None = None
        self.is_complete = False  # the client has sent all
        self.is_ended = False
        self.is_open_ended = False  # the client may take its time between messages
        self.has_started = False  # headers have gone out
        self.held_bytes = 0  # of its connection's share
        self.reading_bytes = 0  # of these, for a message that has not come as a whole
        self.queued_total_bytes = 0  # of messages given to `send`
        self.taken_bytes = 0  # of the content that has come, looked at
        self.waiting_count = 0  # messages that were handed over, and not consumed
        # Since when its message waits for room beyond the window; None: it does not.
        self.wants_room_since_s: float | None = None
        self.is_granted = False  # the message that has begun was let come beyond the window
        # When a granted message was last seen to have come further by what it has to, and how far.
        self.paced_at_s: float | None = None
        self.paced_bytes = 0
        self.begun_at_s = stream.opened_at_s  # when the message that is read began to come


class CallStarted(NamedTuple):
    """A client has begun a call."""

    call: ServerCall


class MessageReceived(NamedTuple):
    """A message of the request."""

    call: ServerCall
    message: bytes
    wire_bytes: int  # what it took to send it: less where it was compressed
    is_last: bool
    held_bytes: int = 0  # the room it has, for `release` where a call has more than one
    skipped_bytes: int = 0  # of one that is too large: it is thrown away, and `message` is empty


class RequestPolicy(NamedTuple):
    """How requests to a path are taken."""

    request_bytes_max: int  # of one message, inflated
    # What answers a call with too large a request, and one for which there is no room; where it is
    # nothing, a status does.
    oversize: bytes = b""
    overload: bytes = b""
    # Of a stream: a message over its limit is thrown away up to this size, and the call goes on.
    skipped_bytes_max: int = 0


class RequestsEnded(NamedTuple):
    """The client sends no more messages."""

    call: ServerCall


class CallEnded(NamedTuple):
    """There is nobody left to answer."""

    call: ServerCall


class CallWritable(NamedTuple):
    """Nothing is queued for this call any more."""

    call: ServerCall


ServerEvent = (
    CallStarted
    | MessageReceived
    | RequestsEnded
    | CallEnded
    | CallWritable
    | MarkReached
    | ConnectionEnded
)


@final
class ServerConnection:
    """One client's connection."""

    def __init__(
        self,
        limits: Limits,
        *,
        message_bytes_max: int,
        now_s: float,
        hits: Counter[Limit] | None = None,
        account: MemoryAccount | None = None,
        address: AddressShare | None = None,
        terms: Mapping[str, RequestPolicy] | None = None,
    ) -> None:
        """Be one of the connections that share `hits`, `account` and `address`, or one alone.

        Paths without `terms` of their own take messages of up to `message_bytes_max`.
        """
        assert message_bytes_max + messages.PREFIX_SIZE <= limits.large_messages_bytes, (
            "the budget for large messages holds the largest"
        )
        hits = Counter() if hits is None else hits
        self.http = Connection(Role.SERVER, limits, now_s=now_s, hits=hits)
        self._limits = limits
        self._hits = hits
        account = account or MemoryAccount(2 * limits.held_bytes_max)
        self.share = MemoryShare(account, limits.held_bytes_max, address)
        self.on_grant: Callable[[], None] = _nothing
        self._queue = account.queue
        self._place = RoomTicket(address)
        self._wanting: dict[int, ServerCall] = {}  # calls that wait for room, in turn
        self._http_bytes = 0  # of the share, by the windows of both sides and by what is unread
        self._buffered_bytes = 0  # output that was taken, and is not written yet
        self._owed_bytes = 0  # of large replies, beyond what the turns so far may have had
        self._terms = terms or {}
        self._other_terms = RequestPolicy(message_bytes_max)
        self._waiting: deque[HttpEvent] = deque()  # what was too much for a turn
        self._turn_calls = self._calls_left = self._inflated_left = 0  # of this turn
        self._calls: dict[int, ServerCall] = {}
        # Those whose request has not come as a whole: few, where many polls are parked.
        self._incomplete: dict[int, ServerCall] = {}
        # Streams with bytes that are to be looked at, in the order of their turns.
        self._ready: dict[int, ServerCall] = {}
        # Requests that are not gRPC, with their answers, until they are complete.
        self._refused: dict[int, tuple[Stream, bytes, bytes]] = {}

    @property
    def call_count(self) -> int:
        """How many calls are under way."""
        return len(self._calls)

    # ------------------------------------------------------------ input

    def receive(
        self, data: bytes, now_s: float, *, frames_max: int = sys.maxsize
    ) -> list[ServerEvent]:
        """Take bytes that arrived at `now_s`, monotonic seconds; return what they mean.

        Where `has_more` holds afterwards, that is a turn's worth; go on with no bytes.
        """
        waiting = self._waiting
        if waiting:
            # No more events than one turn may have: what waits as bytes is smaller, and is counted.
            frames_max = max(frames_max - len(waiting), 0)
        waiting += self.http.receive(data, now_s, frames_max=frames_max)
        self._turn_calls, self._inflated_left = CALLS_A_TURN, INFLATED_BYTES_A_TURN
        if self._owed_bytes:
            if self.is_owing:
                self._turn_calls = 0
            self._owed_bytes = max(self._owed_bytes - REPLY_BYTES_A_TURN, 0)
        self._calls_left = self._turn_calls
        events: list[ServerEvent] = []
        if self.http.is_closed:
            self._drop_waiting()
        while waiting and self._calls_left > 0:
            event = waiting.popleft()
            # What nearly every event is, written out.
            if type(event) is DataReceived:
                self._on_data(event, events)
            elif type(event) is RequestReceived:
                self._on_request(event, events)
            else:
                self._translate(event, events)
            if self._ready:
                self._take_ready(events)
        while self._ready and self._calls_left > 0:
            self._take_ready(events)
        # What opens windows, or queues output, has counted that itself.
        if self._http_bytes or self.http.unparsed:
            self._count_windows()
        return events

    @property
    def begun_count(self) -> int:
        """How many calls, and messages of streams, the last `receive` has begun."""
        return self._turn_calls - self._calls_left

    @property
    def is_owing(self) -> bool:
        """Whether its replies have been larger than its turns allow: calls wait for more turns."""
        return self._owed_bytes >= REPLY_BYTES_A_TURN

    @property
    def has_more(self) -> bool:
        """Whether something of what came waits for the next turn."""
        return bool(self._waiting) or bool(self._ready) or self.http.has_input

    def _take_ready(self, events: list[ServerEvent]) -> None:
        """Take a few messages of the stream whose turn it is."""
        call = self._ready.pop(next(iter(self._ready)))
        assert call.reader is not None, "who is ready has something to be looked at"
        self._feed(call, call.reader, b"", events, messages_max=_MESSAGES_AT_A_TIME)

    def _drop_waiting(self) -> None:
        """Leave what nobody is answered for: the ends of calls, and what the client has read."""
        kept = [
            event
            for event in self._waiting
            if isinstance(event, StreamReset | ConnectionEnded | MarkReached)
        ]
        self._waiting.clear()
        self._waiting += kept

    def _translate_all(self, http_events: Sequence[HttpEvent]) -> list[ServerEvent]:
        """Translate events that no request is among: they need not wait for what does."""
        events: list[ServerEvent] = []
        if self.http.is_closed:
            self._drop_waiting()
            http_events = [*self._waiting, *http_events]
            self._waiting.clear()
        for event in http_events:
            self._translate(event, events)
        self._count_windows()
        return events

    def check(self, now_s: float) -> list[ServerEvent]:
        """End what has stood still for too long; to be called every second or so."""
        events = self._translate_all(self.http.check(now_s))
        patience_s = self._limits.stall_timeout_s
        for call in list(self._incomplete.values()):
            if call.wants_room_since_s is not None:
                if now_s - call.wants_room_since_s > _room_wait_s(call):
                    self._refuse_for_room(call)
                    events.append(CallEnded(call))
                continue  # It waits for us, not we for it.
            reader = call.reader
            if call.is_open_ended and (reader is None or reader.has_more):
                continue  # It may take its time between messages; and some wait to be read.
            begun_at_s = call.begun_at_s if call.is_open_ended else call.stream.opened_at_s
            is_late = now_s - begun_at_s > self._limits.request_timeout_s
            is_slow = now_s - call.stream.moved_at_s > patience_s or _is_dawdling(
                call, now_s, patience_s
            )
            if is_slow or is_late:
                self._hits[Limit.REQUEST] += 1
                self.finish(call, RpcCode.DEADLINE_EXCEEDED, "the request did not come in time")
                events.append(CallEnded(call))
        for stream, _, _ in list(self._refused.values()):
            if now_s - stream.moved_at_s > patience_s:
                del self._refused[stream.id]
                self.http.reset(stream, ErrorCode.CANCEL)
        return events

    def close(self, code: ErrorCode, reason: str) -> list[ServerEvent]:
        """End the connection and all its calls."""
        # Whoever is told has the connection: they would wait for the garbage collector together.
        self.on_grant = _nothing
        return self._translate_all(self.http.close(code, reason))

    def _translate(self, event: HttpEvent, events: list[ServerEvent]) -> None:
        if isinstance(event, DataReceived):
            self._on_data(event, events)
        elif isinstance(event, RequestReceived):
            self._on_request(event, events)
        elif isinstance(event, StreamReset):
            self._refused.pop(event.stream.id, None)
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
            return  # Cancelled before its turn came.
        self._calls_left -= 1
        content_type = fields.get("content-type", "")
        is_grpc = content_type == "application/grpc" or _is_grpc(content_type)
        if fields[":method"] != "POST" or not is_grpc:
            answer = _refusal(fields[":method"], fields[":path"])
            if is_last or self.share.is_fair(0):
                self._refused[stream.id] = (stream, *answer)
                self._count_windows()
                if is_last:
                    self._answer_refused(stream)
            else:
                self._refuse(stream, *answer)
            return
        call = self._calls[stream.id] = ServerCall(stream, fields[":path"], fields)
        held_bytes = CALL_BYTES + stream.header_bytes
        if not self.share.take(held_bytes):
            self._refuse_for_room(call)
            return
        call.held_bytes = held_bytes
        try:
            if "grpc-encoding" in fields and fields["grpc-encoding"] not in _ENCODINGS:
                reason = f"the encoding {fields['grpc-encoding']} is not known"
                raise RpcError(RpcCode.UNIMPLEMENTED, reason, _ACCEPTED)
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
            if stream.id in self._refused:
                self.http.consume(stream, len(data))
                if is_last:
                    self._answer_refused(stream)
            return
        call.taken_bytes += len(data)
        if is_last:
            call.is_complete = True
            del self._incomplete[stream.id]
        if stream.state is StreamState.RESET:
            return  # Nobody waits for an answer; the end of the call comes as well.
        if call.reader is None:
            message = messages.whole_message(data)
            if message is not None and call.waiting_count < MESSAGES_WAITING_MAX:
                # A small one is part of what a call takes.
                held_bytes = len(message) if len(data) > SMALL_MESSAGE_BYTES else 0
                if call.waiting_count:
                    held_bytes = len(message) + MESSAGE_BYTES
                    self._calls_left -= 1
                if not held_bytes or self.hold(call, held_bytes):
                    call.waiting_count += 1
                    events.append(MessageReceived(call, message, len(data), is_last, held_bytes))
                    return
            call.reader = MessageAssembler(
                call.metadata.get("grpc-encoding", ""),
                self._terms_of(call).request_bytes_max,
                lambda size: self._admit(call, size * INFLATED_COPIES),
                skipped_bytes_max=self._terms_of(call).skipped_bytes_max,
            )
            call.begun_at_s = self.http.heard_at_s
        self._feed(call, call.reader, data, events)

    def _feed(
        self,
        call: ServerCall,
        reader: MessageAssembler,
        data: bytes,
        events: list[ServerEvent],
        *,
        messages_max: int = MESSAGES_WAITING_MAX,
    ) -> None:
        may_wait = MESSAGES_WAITING_MAX - call.waiting_count
        inflated_before = reader.inflated_bytes
        try:
            complete = reader.feed(data, min(messages_max, may_wait, max(self._calls_left, 0)))
            is_last = call.is_complete and not reader.has_more
            if is_last and not reader.is_empty:
                raise RpcError(RpcCode.INTERNAL, "the request ends in the middle of a message")
            if reader.dropped_bytes:
                self.http.consume(call.stream, reader.dropped_bytes)
            if complete:
                self._forget_room(call)
            if not (reader.is_empty or reader.has_more or reader.skip_left_bytes):
                self._make_room(call, reader)
            self._inflated_left -= reader.inflated_bytes - inflated_before
            if self._inflated_left <= 0:
                self._calls_left = 0  # It is as much work as a turn's calls.
            held = self._hold_messages(call, complete, reader)
        except _NoRoom:
            self._refuse_for_room(call)
            events.append(CallEnded(call))
            return
        except RpcError as error:
            if error.code is RpcCode.RESOURCE_EXHAUSTED:
                self._hits[Limit.MESSAGE_BYTES] += 1
                self._refuse_call(call, self._terms_of(call).oversize, error)
            else:
                self.finish(call, error.code, error.message)
            events.append(CallEnded(call))
            return
        # The first of a call is what the call was counted for.
        self._calls_left -= len(complete) - (call.waiting_count == 0)
        call.waiting_count += len(complete)
        if reader.has_more and call.waiting_count < MESSAGES_WAITING_MAX:
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

    def _make_room(self, call: ServerCall, reader: MessageAssembler) -> None:
        """Let the rest of a message come: what is beyond its window when there is room for it."""
        stream, beyond_bytes = call.stream, self._beyond_bytes(call)
        if call.wants_room_since_s is not None:
            if not beyond_bytes:  # What was read of those before it has opened the window.
                self._leave_queue(call)
            return
        if call.is_granted:
            # Never again, whatever was sent since then: what was granted comes. Where the window is
            # short nevertheless, padding has taken of it.
            if beyond_bytes:
                self.http.return_window(stream)
            return
        if not beyond_bytes:
            # What was granted may come, however many others want room by now.
            if not stream.large_bytes and not self.share.is_fair(reader.missing_bytes):
                raise _NoRoom(RpcCode.RESOURCE_EXHAUSTED, _NO_ROOM)
            return
        if not self._queue.is_contended(self._place) and self._may_grant(call):
            self._grant(call)
        elif self._queue.join(self._place, self, self._waiting_bytes):
            call.wants_room_since_s = self.http.heard_at_s
            self._wanting[stream.id] = call
        else:
            raise _NoRoom(RpcCode.RESOURCE_EXHAUSTED, _NO_ROOM)

    @property
    def _waiting_bytes(self) -> int:
        """What a call holds while its message waits: as much of it as the window lets come."""
        return CALL_BYTES + self._limits.stream_window_bytes

    def _beyond_bytes(self, call: ServerCall) -> int:
        """How much of its message the window of a call does not let come."""
        return max(self._to_come_bytes(call) - call.stream.receive_window, 0)

    def _to_come_bytes(self, call: ServerCall) -> int:
        """How much of its message the client has not sent yet.

        All frames of a read have been taken off the window before the first of them is looked at:
        what is in the others has come, though its reader misses it.
        """
        if call.reader is None:
            return 0
        return call.reader.missing_bytes - (call.stream.content_bytes - call.taken_bytes)

    def _may_grant(self, call: ServerCall) -> bool:
        beyond_bytes = self._beyond_bytes(call)
        kept_bytes = self._queue.kept_for(self._place)
        return self.http.has_budget(beyond_bytes) and self.share.leaves_room(
            beyond_bytes, kept_bytes
        )

    def _grant(self, call: ServerCall) -> None:
        call.is_granted, call.paced_at_s = True, None
        self.http.request_room(call.stream, self._to_come_bytes(call))
        self._count_windows()

    def grant_next(self) -> bool:
        """Let the message come that has waited longest here, where there is room for it."""
        call = next(iter(self._wanting.values()))
        if not self._may_grant(call):
            return False
        self._leave_queue(call)
        self._grant(call)
        self.on_grant()
        return True

    @property
    def is_short_of_room(self) -> bool:
        """Whether it is what is free that keeps its next message away, not what it holds itself."""
        call = next(iter(self._wanting.values()))
        kept_bytes = self._queue.kept_for(self._place)
        return self.share.is_short_of_room(self._beyond_bytes(call), kept_bytes)

    def _forget_room(self, call: ServerCall) -> None:
        """Let the next message of a call ask for itself: the one before has come as a whole."""
        call.is_granted = False
        call.begun_at_s = self.http.heard_at_s
        if call.wants_room_since_s is not None:
            self._leave_queue(call)

    def _leave_queue(self, call: ServerCall) -> None:
        call.wants_room_since_s = None
        del self._wanting[call.stream.id]
        self._queue.leave(self._place, self._waiting_bytes)

    def _hold_messages(
        self, call: ServerCall, complete: Sequence[CompleteMessage], reader: MessageAssembler
    ) -> list[int]:
        """Hold room for the messages that are there, and for what has come of the next one.

        Return how much each has; those that were inflated had it before. What a message within the
        window says of its length is not held: five bytes that claim sixty thousand cost nothing.

        What was granted beyond the window is counted with the connection. Of a message that is
        larger than the window all of that is held, since others are granted what is free.
        """
        stream = call.stream
        beyond_bytes = stream.large_bytes
        if call.wants_room_since_s is not None:
            beyond_bytes += self._beyond_bytes(call)
        reading_bytes = max(reader.bound_bytes - beyond_bytes, 0)
        if not beyond_bytes:
            reading_bytes = min(reading_bytes, reader.held_bytes + RESERVED_BYTES)
        held: list[int] = []
        plain_bytes = 0
        for message, _, is_inflated, _ in complete:
            own_bytes = MESSAGE_BYTES if held or call.waiting_count else 0
            plain_bytes += own_bytes
            if is_inflated:
                held.append(own_bytes + len(message) * INFLATED_COPIES)
                continue
            held_bytes = max(len(message) - beyond_bytes, 0)
            beyond_bytes = max(beyond_bytes - len(message), 0)
            plain_bytes += held_bytes
            held.append(own_bytes + held_bytes)
        more = reading_bytes + plain_bytes - call.reading_bytes
        call.reading_bytes = reading_bytes
        if more > 0 and stream.large_bytes:
            # With what was granted, the window's worth before it was: else it would have come, and
            # have taken room from others, for nothing.
            call.held_bytes += more
            self.share.add(more)
        elif more > 0:
            self._admit(call, more)
        else:
            self.release(call, -more)
        return held

    def _admit(self, call: ServerCall, count: int) -> None:
        if not self.hold(call, count):
            raise _NoRoom(RpcCode.RESOURCE_EXHAUSTED, _NO_ROOM)

    def _refuse_for_room(self, call: ServerCall) -> None:
        """Answer a call for which there is no room as its client expects it, at once."""
        self._hits[Limit.MEMORY] += 1
        error = _NoRoom(RpcCode.RESOURCE_EXHAUSTED, _NO_ROOM)
        self._refuse_call(call, self._terms_of(call).overload, error)

    def _refuse_call(self, call: ServerCall, answer: bytes, error: RpcError) -> None:
        if answer:
            self.respond(call, answer)
        else:
            self.finish(call, error.code, error.message)

    def _terms_of(self, call: ServerCall) -> RequestPolicy:
        return self._terms.get(call.path, self._other_terms)

    def _answer_refused(self, stream: Stream) -> None:
        _, block, body = self._refused.pop(stream.id)
        self.http.send_headers(stream, block, is_last=False)
        self.http.send_data(stream, body, is_last=True)
        self._count_windows()

    def _refuse(self, stream: Stream, block: bytes, body: bytes) -> None:
        """Answer at once what is not gRPC; with a sentence, where there is a window for it."""
        has_window = self.http.has_window(stream, len(body))
        self.http.send_headers(stream, block, is_last=not has_window)
        if has_window:
            self.http.send_data(stream, body, is_last=True)

    # ------------------------------------------------------------ output

    def respond(self, call: ServerCall, message: bytes) -> None:
        """Answer a unary call with OK and its one message, or refuse one that finds no room."""
        if call.is_ended:
            return
        is_large = len(message) > SMALL_REPLY_BYTES
        if is_large:
            self._owed_bytes += len(message)
            if not self._has_room_for_reply(len(message)):
                self._refuse_for_room(call)
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
            self._count_windows()

    def _has_room_for_reply(self, count: int) -> bool:
        unwritten_bytes = self.http.output_bytes + self._buffered_bytes
        return unwritten_bytes <= self._limits.unread_bytes_max and self.share.is_fair(count)

    def start(self, call: ServerCall) -> None:
        """Send the response's headers before there is a message; some clients wait for them."""
        if not call.has_started and not call.is_ended:
            call.has_started = True
            self.http.send_headers(call.stream, RESPONSE_BLOCK, is_last=False)

    def send(self, call: ServerCall, batch: Sequence[bytes]) -> int:
        """Send messages of a stream; return how many bytes wait for the client's window now."""
        if call.is_ended:
            return 0
        self.start(call)
        data = messages.encode_all(batch)
        call.queued_total_bytes += len(data)
        stream = call.stream
        self.http.send_data(stream, data)
        # As in `respond`: what is small and goes out at once is counted with what is written.
        if stream.queue is not None or len(data) > SMALL_REPLY_BYTES:
            self._count_windows()
        return stream.queued_bytes

    def finish(
        self, call: ServerCall, code: RpcCode, message: str = "", trailers: Trailers = ()
    ) -> None:
        """End a call with a status; after what is queued for it."""
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
            self._count_windows()

    def consume(self, call: ServerCall, wire_bytes: int) -> None:
        """Let the client send more on a stream: a message that took this much has been read."""
        self.http.consume(call.stream, wire_bytes)
        call.waiting_count -= 1
        if call.reader is not None and call.reader.has_more and not call.is_ended:
            self._ready[call.stream.id] = call

    def _end(self, call: ServerCall) -> None:
        call.is_ended = True
        del self._calls[call.stream.id]
        if call.wants_room_since_s is not None:
            self._leave_queue(call)
        if call.reader is not None:
            self._ready.pop(call.stream.id, None)
        if not call.is_complete:
            self._incomplete.pop(call.stream.id, None)
        self.share.give_back(call.held_bytes)
        call.held_bytes = 0

    # ------------------------------------------------------------ memory

    def hold(self, call: ServerCall, count: int) -> bool:
        """Take room for `count` bytes, until the call ends; False where there is none."""
        if call.is_ended or not self.share.take(count):
            return False
        call.held_bytes += count
        return True

    def release(self, call: ServerCall, count: int) -> None:
        """Give room back before the call ends."""
        if not call.is_ended:
            count = min(count, call.held_bytes - CALL_BYTES - call.stream.header_bytes)
            call.held_bytes -= count
            self.share.give_back(count)

    def count_buffered(self, count: int) -> bool:
        """Count output that was taken, as far as it is not written; False: no more has room."""
        self._buffered_bytes = count
        self._count_windows()
        return self.share.is_fair(0)

    def _count_windows(self) -> None:
        """Count what the windows of both sides let be held, whether there is room or not.

        What is to be read and to be written is held as well, also where all windows are open.
        """
        http_bytes = self.http.held_bytes(output_bytes_min=SMALL_REPLY_BYTES) + self._buffered_bytes
        http_bytes += REFUSED_BYTES * len(self._refused)
        if http_bytes != self._http_bytes:
            self.share.count_granted(http_bytes)
            self._http_bytes = http_bytes


def _room_wait_s(call: ServerCall) -> float:
    """Return for how long a call's message may wait for room."""
    return min(ROOM_WAIT_S_MAX, call.timeout_s / 2) if call.timeout_s else ROOM_WAIT_S_MAX


def _is_dawdling(call: ServerCall, now_s: float, patience_s: float) -> bool:
    """Whether a message that has room for all of it comes too slowly to keep that from others."""
    if not call.is_granted:
        return False
    content_bytes = call.stream.content_bytes
    if call.paced_at_s is None or content_bytes - call.paced_bytes >= PROGRESS_BYTES:
        call.paced_at_s, call.paced_bytes = now_s, content_bytes
    return now_s - call.paced_at_s > patience_s


def _nothing() -> None:
    """Do nothing: nobody has to be told."""


class _NoRoom(RpcError):
    """There is no room for a message."""


def _is_grpc(content_type: str) -> bool:
    """Whether a request is gRPC, in more words; `application/grpc-web` is something else."""
    return content_type.startswith(("application/grpc+", "application/grpc;"))


def _refusal(method: str, path: str) -> tuple[bytes, bytes]:
    """Answer what is HTTP/2 and not gRPC, so that people with a browser see what this is."""
    code = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    allow: tuple[tuple[str, str], ...] = ()
    if method != "POST":
        code, allow = HTTPStatus.METHOD_NOT_ALLOWED, (("allow", "POST"),)
    text = f"{code.phrase}: this port speaks gRPC (POST, application/grpc), not {method} {path}"
    fields = ((":status", str(int(code))), ("content-type", "text/plain"), *allow)
    return header_block.encode(fields), text[:500].encode("ascii", "replace") + b"\n"
