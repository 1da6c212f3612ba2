"""The limits of a peer. Each limit has a name for its counter."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Limit(StrEnum):
    """The names of the limits in metrics and logs."""

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
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one connection; the defaults are for unknown clients."""

    # A long poll uses a stream, and a client with many consumers has one connection.
    streams_max: int = 1_024
    # Enough for nearly all requests. With `streams_max` it bounds the memory of a connection.
    stream_window_bytes: int = 65_535
    # For messages larger than the window. At least one of the largest must fit.
    large_messages_bytes: int = 17 << 20
    # For all other data of the calls of a connection: small and inflated requests, queued data,
    # replies. It fits one of the largest replies and many small ones.
    held_bytes_max: int = 24 << 20
    frame_bytes: int = 16_384  # the minimum of the protocol; larger frames delay other streams
    # Clients send 15 fields in 1 KiB. A token or a trace context may be long. More ends the stream.
    header_block_bytes: int = 32_768
    header_list_bytes: int = 32_768  # uncompressed, plus 32 bytes per field (RFC 9113 6.5.2)
    # Every block must be decoded, because the next ones depend on it. More than this ends the
    # connection.
    header_block_bomb_bytes: int = 256 << 10
    header_list_bomb_bytes: int = 1 << 20
    continuations_max: int = 32  # frames of one block; 256 KiB need sixteen
    # Responses of a server that wait for windows that the client does not open.
    unread_bytes_max: int = 24 << 20
    # A client that stops may cancel all its long polls at once and start again. Sent responses earn
    # resets, because clients cancel often while a broker is slow.
    resets_burst: int = 2_048
    resets_per_s: int = 100
    settings_burst: int = 32  # a client sends two or three in total
    settings_per_s: int = 1
    # Clients estimate the bandwidth with one ping per round trip while they receive data.
    pings_burst: int = 256
    pings_per_s: int = 10
    empty_data_burst: int = 256
    empty_data_per_s: int = 10
    # WINDOW_UPDATE, PRIORITY, GOAWAY, acknowledgements, late frames and unknown frames.
    control_burst: int = 4_096
    control_per_s: int = 100
    # Preface and SETTINGS arrive with the connection; this allows for slow networks.
    handshake_timeout_s: float = 10.0
    # From the first frame of a request to its last: 130 MiB at 4 Mbit/s.
    request_timeout_s: float = 300.0
    # Without progress: a header block, an incomplete request, or a closed window.
    stall_timeout_s: float = 60.0
    idle_timeout_s: float = 120.0  # without streams
    # Varied by a tenth. After it, the client is asked to leave. 0: no limit.
    age_max_s: float = 0.0
    age_grace_s: float = 60.0  # for its calls to end; twice the longest long poll
    keepalive_period_s: float = 60.0  # of silence before a ping
    keepalive_timeout_s: float = 20.0  # for the answer to the ping
