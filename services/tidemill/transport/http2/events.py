"""The events that a connection returns for received bytes."""

from __future__ import annotations

from typing import NamedTuple

from tidemill.transport.http2.frames import ErrorCode
from tidemill.transport.http2.header_block import Fields
from tidemill.transport.http2.limits import Limit
from tidemill.transport.http2.stream import Stream


class RequestReceived(NamedTuple):
    """A client opened a stream."""

    stream: Stream
    fields: Fields  # first :method, :scheme, :path and usually :authority
    is_last: bool


class ResponseReceived(NamedTuple):
    """A server sent headers or trailers."""

    stream: Stream
    fields: Fields
    is_last: bool


class DataReceived(NamedTuple):
    """A part of a stream's content; empty only if `is_last`."""

    stream: Stream
    data: bytes
    is_last: bool


class StreamReset(NamedTuple):
    """A stream ended early: because of the peer, an error of the peer, or a limit."""

    stream: Stream
    code: int


class StreamWritable(NamedTuple):
    """All queued data of a stream was sent."""

    stream: Stream


class GoAwayReceived(NamedTuple):
    """The peer accepts no new streams on this connection."""

    code: int
    reason: str


class MarkReached(NamedTuple):
    """The peer has read our output up to a mark, including earlier marks."""

    mark: int


class ConnectionEnded(NamedTuple):
    """The connection has ended; the output contains the last frames."""

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
