"""What a peer may do. Each limit has a name, under which its overstepping is counted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Limit(StrEnum):
    """The defences, as metrics and logs call them."""

    CONTINUATIONS = "continuations"
    HEADER_BYTES = "header_bytes"
    STREAMS = "streams"
    RESETS = "resets"
    SETTINGS = "settings"
    PINGS = "pings"
    EMPTY_DATA = "empty_data"
    CONTROL = "control"
    UNREAD = "unread"
    STALLED = "stalled"
    HANDSHAKE = "handshake"
    REQUEST = "request"
    IDLE = "idle"
    KEEPALIVE = "keepalive"
    AGE = "age"
    CONNECTIONS = "connections"
    CONNECTIONS_PER_ADDRESS = "connections_per_address"
    MESSAGE_BYTES = "message_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one connection; the defaults are for clients that nobody knows."""

    # Long polls hold a stream each, and a client of many consumers has one connection.
    streams_max: int = 1_024
    # Enough for nearly all requests; with `streams_max` it bounds what a connection makes us hold.
    stream_window_bytes: int = 65_535
    # Messages that need more than the window; at least one of the largest must fit.
    large_messages_bytes: int = 136 << 20
    frame_bytes: int = 16_384  # the least that the protocol allows: more would only delay others
    # Clients send 15 fields in 1 KiB; a token or a trace context may be long.
    header_block_bytes: int = 32_768
    header_list_bytes: int = 32_768  # uncompressed, 32 bytes a field added (RFC 9113 6.5.2)
    continuations_max: int = 8  # frames of one block; a block of 32 KiB needs two
    # A server's responses, queued behind windows that the client does not open.
    unread_bytes_max: int = 64 << 20
    # A client that stops may cancel all its long polls at once, and start again. Responses that
    # were sent earn resets back: clients cancel much when a broker is slow.
    resets_burst: int = 2_048
    resets_per_s: int = 100
    settings_burst: int = 32  # a client sends two or three in its life
    settings_per_s: int = 1
    # Clients estimate the bandwidth with a ping a round trip, while they get data.
    pings_burst: int = 256
    pings_per_s: int = 10
    empty_data_burst: int = 256
    empty_data_per_s: int = 10
    # WINDOW_UPDATE, PRIORITY, GOAWAY, acknowledgements, late frames, and what is not known.
    control_burst: int = 4_096
    control_per_s: int = 100
    # A preface and SETTINGS come with the connection; this is for slow networks.
    handshake_timeout_s: float = 10.0
    # From the first frame of a request to its last: 130 MiB at 4 Mbit/s.
    request_timeout_s: float = 300.0
    # Without any progress: a header block, a request that is not complete, a window not opened.
    stall_timeout_s: float = 60.0
    idle_timeout_s: float = 120.0  # without a stream
    # Give or take a tenth; then a client is told to leave. 0: never.
    age_max_s: float = 0.0
    age_grace_s: float = 60.0  # for its calls to end; the longest long poll, and twice that
    keepalive_period_s: float = 60.0  # nothing heard that long: ask
    keepalive_timeout_s: float = 20.0  # for the answer
