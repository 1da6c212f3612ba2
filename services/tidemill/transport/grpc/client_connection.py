"""The client's end of gRPC: calls go out as bytes, responses come in as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, final

from tidemill.transport.grpc import messages, status
from tidemill.transport.grpc.messages import MessageAssembler
from tidemill.transport.grpc.status import RpcCode, RpcError, Trailers
from tidemill.transport.http2 import header_block
from tidemill.transport.http2.connection import Connection, Role
from tidemill.transport.http2.events import (
    ConnectionEnded,
    DataReceived,
    GoAwayReceived,
    MarkReached,
    ResponseReceived,
    StreamReset,
    StreamWritable,
)
from tidemill.transport.http2.events import Event as HttpEvent
from tidemill.transport.http2.frames import ErrorCode
from tidemill.transport.http2.header_block import Fields
from tidemill.transport.http2.limits import Limits
from tidemill.transport.http2.stream import Stream

# Fields of the trailers that make up the status. The other fields are metadata.
_STATUS_FIELDS: Final = frozenset({":status", "content-type", "grpc-status", "grpc-message"})


@final
class ClientCall:
    """One call. Only its connection changes it."""

    __slots__ = ("encoding", "is_ended", "reader", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.encoding = ""
        self.reader: MessageAssembler | None = None
        self.is_ended = False


class ResponseMessage(NamedTuple):
    """A message of the response."""

    call: ClientCall
    message: bytes
    wire_bytes: int  # size as sent; smaller if it was compressed


class ResponseEnded(NamedTuple):
    """The call has ended with this status."""

    call: ClientCall
    code: RpcCode
    message: str
    trailers: Trailers = ()  # metadata beside the status of a failed call


class RequestWritable(NamedTuple):
    """All queued data of the call was sent."""

    call: ClientCall


ClientEvent = ResponseMessage | ResponseEnded | RequestWritable | GoAwayReceived | ConnectionEnded


@final
class ClientConnection:
    """A connection to one server."""

    def __init__(
        self, authority: str, limits: Limits, *, message_bytes_max: int, now_s: float
    ) -> None:
        assert message_bytes_max + messages.PREFIX_SIZE <= limits.large_messages_bytes, (
            "the budget for large messages holds the largest"
        )
        self.http = Connection(Role.CLIENT, limits, now_s=now_s)
        self._authority = authority
        self._message_bytes_max = message_bytes_max
        self._calls: dict[int, ClientCall] = {}

    # ------------------------------------------------------------ output

    def open(self, path: str, metadata: Sequence[tuple[str, str]] = ()) -> ClientCall:
        """Begin a call; raise RpcError(UNAVAILABLE) if the server accepts no more."""
        block = header_block.encode(
            (
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", self._authority),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("user-agent", "tidemill"),
                *metadata,
            )
        )
        stream = self.http.open_stream(block)
        if stream is None:
            raise RpcError(RpcCode.UNAVAILABLE, "the server accepts no more calls")
        call = self._calls[stream.id] = ClientCall(stream)
        return call

    def send(self, call: ClientCall, message: bytes, *, is_last: bool = False) -> int:
        """Send a message; return the bytes that now wait for the server's window."""
        if call.is_ended:
            return 0
        self.http.send_data(call.stream, messages.encode(message), is_last=is_last)
        return call.stream.queued_bytes

    def cancel(self, call: ClientCall) -> None:
        """End a call; no more events follow."""
        if not call.is_ended:
            self._end(call)
            self.http.reset(call.stream, ErrorCode.CANCEL)

    def consume(self, call: ClientCall, wire_bytes: int) -> None:
        """Let the server send more, because a message of `wire_bytes` was read."""
        self.http.consume(call.stream, wire_bytes)

    # ------------------------------------------------------------ input

    def receive(self, data: bytes, now_s: float) -> list[ClientEvent]:
        """Process bytes that arrived at `now_s`, monotonic seconds; return the events."""
        return self._translate(self.http.receive(data, now_s))

    def check(self, now_s: float) -> list[ClientEvent]:
        """End calls without progress; call it about once a second."""
        return self._translate(self.http.check(now_s))

    def close(self, code: ErrorCode, reason: str) -> list[ClientEvent]:
        """End the connection and all its calls."""
        return self._translate(self.http.close(code, reason))

    def _translate(self, http_events: list[HttpEvent]) -> list[ClientEvent]:
        events: list[ClientEvent] = []
        failure = next((event for event in http_events if isinstance(event, ConnectionEnded)), None)
        for event in http_events:
            if isinstance(event, (GoAwayReceived, ConnectionEnded)):
                events.append(event)
                continue
            if isinstance(event, MarkReached):
                continue  # A client does not request read marks.
            call = self._calls.get(event.stream.id)
            if call is None:
                continue
            if isinstance(event, DataReceived):
                self._on_data(call, event, events)
            elif isinstance(event, ResponseReceived):
                self._on_fields(call, event, events)
            elif isinstance(event, StreamReset):
                self._end(call)
                if failure is not None:
                    events.append(ResponseEnded(call, RpcCode.UNAVAILABLE, failure.reason))
                else:
                    code = status.code_of_reset(event.code)
                    reason = f"the stream was reset with code {event.code}"
                    events.append(ResponseEnded(call, code, reason))
            elif isinstance(event, StreamWritable):
                events.append(RequestWritable(call))
        return events

    def _on_fields(
        self, call: ClientCall, event: ResponseReceived, events: list[ClientEvent]
    ) -> None:
        fields = event.fields
        if fields.get(":status", "200") != "200":
            self._fail(call, RpcCode.UNAVAILABLE, f"HTTP status {fields[':status']}", events)
        elif event.is_last:
            self._end(call)
            # The server does not read the unsent requests. Without a reset the stream would stay
            # open.
            self.http.reset(call.stream, ErrorCode.CANCEL)
            events.append(_response_ended(call, fields))
        else:
            call.encoding = fields.get("grpc-encoding", "")

    def _on_data(self, call: ClientCall, event: DataReceived, events: list[ClientEvent]) -> None:
        if call.reader is None:
            message = messages.whole_message(event.data)
            if message is not None:
                events.append(ResponseMessage(call, message, len(event.data)))
            elif event.data:
                call.reader = MessageAssembler(call.encoding, self._message_bytes_max)
        if call.reader is not None:
            try:
                complete = call.reader.feed(event.data)
            except RpcError as error:
                self._fail(call, error.code, error.message, events)
                return
            events += [
                ResponseMessage(call, message, wire_bytes) for message, wire_bytes, _, _ in complete
            ]
            if call.reader.is_empty:
                call.reader = None
            else:
                self.http.request_room(call.stream, call.reader.missing_bytes)
        if event.is_last:
            self._fail(call, RpcCode.INTERNAL, "the response has no status", events)

    def _fail(
        self, call: ClientCall, code: RpcCode, message: str, events: list[ClientEvent]
    ) -> None:
        self._end(call)
        self.http.reset(call.stream, ErrorCode.CANCEL)
        events.append(ResponseEnded(call, code, message))

    def _end(self, call: ClientCall) -> None:
        call.is_ended = True
        del self._calls[call.stream.id]


def _response_ended(call: ClientCall, trailers: Fields) -> ResponseEnded:
    if "grpc-status" not in trailers:
        return ResponseEnded(call, RpcCode.UNKNOWN, "the response has no status")
    message = status.decode_message(trailers.get("grpc-message", ""))
    code = status.code_of(trailers["grpc-status"])
    if code is RpcCode.OK:
        return ResponseEnded(call, code, message)
    more = tuple(each for each in trailers.items() if each[0] not in _STATUS_FIELDS)
    return ResponseEnded(call, code, message, more)
