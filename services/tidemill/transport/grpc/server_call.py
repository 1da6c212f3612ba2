"""A call at its server, the events of its connection, and the policy for its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from tidemill.transport.http2.events import ConnectionEnded, MarkReached

if TYPE_CHECKING:
    from tidemill.transport.grpc.messages import MessageAssembler
    from tidemill.transport.http2.header_block import Fields
    from tidemill.transport.http2.stream import Stream


@final
class ServerCall:
    """One call. Only its connection changes it."""

    __slots__ = (
        "has_request_stream",
        "has_started",
        "held_bytes",
        "is_complete",
        "is_ended",
        "is_granted",
        "message_begun_at_s",
        "metadata",
        "path",
        "processed_bytes",
        "progress_at_s",
        "progress_bytes",
        "queued_total_bytes",
        "reader",
        "reading_bytes",
        "room_requested_at_s",
        "stream",
        "timeout_s",
        "unread_count",
    )

    def __init__(self, stream: Stream, path: str, metadata: Fields) -> None:
        self.stream = stream
        self.path = path
        self.metadata = metadata
        self.timeout_s: float | None = None
        self.reader: MessageAssembler | None = None
        self.is_complete = False  # the client has sent its last frame
        self.is_ended = False
        self.has_request_stream = False  # the client may pause between messages
        self.has_started = False  # the headers of the response are sent
        self.held_bytes = 0  # of the share of its connection
        self.reading_bytes = 0  # part of `held_bytes`, for an incomplete message
        self.queued_total_bytes = 0  # of all messages given to `send`
        self.processed_bytes = 0  # received content that was processed
        self.unread_count = 0  # messages in events that were not consumed yet
        # The time of its request for room beyond the window; None: no request.
        self.room_requested_at_s: float | None = None
        self.is_granted = False  # the current message has room beyond the window
        # The last progress of a granted message: its time, and the bytes received until then.
        self.progress_at_s: float | None = None
        self.progress_bytes = 0
        self.message_begun_at_s = stream.opened_at_s  # the first byte of the current message


class CallStarted(NamedTuple):
    """A client started a call."""

    call: ServerCall


class MessageReceived(NamedTuple):
    """A message of the request."""

    call: ServerCall
    message: bytes
    wire_bytes: int  # size as sent; smaller if it was compressed
    is_last: bool
    held_bytes: int = 0  # its own room, for `release` if a call has several messages
    skipped_bytes: int = 0  # size of a message that was discarded as too large; `message` is empty


class RequestPolicy(NamedTuple):
    """The limits of the requests to a path, and the responses to requests over the limits."""

    request_bytes_max: int  # of one message, inflated
    # Responses to a request that is too large, and to one without room; empty: a status instead.
    oversize: bytes = b""
    overload: bytes = b""
    # In a stream, a message over its limit and up to this size is discarded; the call continues.
    skipped_bytes_max: int = 0


class RequestsEnded(NamedTuple):
    """The client sends no more messages."""

    call: ServerCall


class CallEnded(NamedTuple):
    """The client no longer waits for the call."""

    call: ServerCall


class CallWritable(NamedTuple):
    """All queued data of a call was sent."""

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
