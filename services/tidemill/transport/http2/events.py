"""What a connection tells after it has received bytes."""

from __future__ import annotations

from typing import NamedTuple

from tidemill.transport.http2.frames import ErrorCode
from tidemill.transport.http2.header_block import Fields
from tidemill.transport.http2.limits import Limit
from tidemill.transport.http2.stream import Stream


class RequestReceived(NamedTuple):
    """A client has opened a stream."""

    stream: Stream
    fields: Fields  # first :method, :scheme, :path and mostly :authority
    is_last: bool


class ResponseReceived(NamedTuple):
    """A server has sent headers or trailers."""

    stream: Stream
    fields: Fields
    is_last: bool


class DataReceived(NamedTuple):
    """Part of a stream's content; without data only where `is_last`."""

    stream: Stream
    data: bytes
    is_last: bool


class StreamReset(NamedTuple):
    """A stream has ended before its time: by the peer, a fault of the peer's, or a limit."""

    stream: Stream
    code: int


class StreamWritable(NamedTuple):
    """What was queued for a stream has been sent."""

    stream: Stream


class GoAwayReceived(NamedTuple):
    """The peer takes no new streams on this connection."""

    code: int
    reason: str


class MarkReached(NamedTuple):
    """The peer has read our output up to a mark, and to all marks before it."""

    mark: int


class ConnectionEnded(NamedTuple):
    """The connection has ended; its last words are in the output."""

    code: ErrorCode
    reason: str
    limit: Limit | None


Event = (
    RequestReceived
    | ResponseReceived
    | DataReceived
    | StreamReset
    | StreamWritable
    | GoAwayReceived
    | MarkReached
    | ConnectionEnded
)
