"""SETTINGS: ours in the first frames, and those of the peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from tidemill.transport.http2 import frames, header_block
from tidemill.transport.http2.flow_control import CONNECTION_WINDOW_BYTES
from tidemill.transport.http2.frames import ConnectionFailure, ErrorCode, Setting

if TYPE_CHECKING:
    from tidemill.transport.http2.limits import Limits


def first_frames(limits: Limits, *, is_server: bool) -> list[bytes]:
    """Return the first frames of one end of a connection."""
    settings = {
        Setting.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
        Setting.MAX_FRAME_SIZE: limits.frame_bytes,
        Setting.MAX_HEADER_LIST_SIZE: limits.header_list_bytes,
    }
    if is_server:
        settings[Setting.MAX_CONCURRENT_STREAMS] = limits.streams_max
    else:
        settings[Setting.ENABLE_PUSH] = 0
    more = CONNECTION_WINDOW_BYTES - frames.DEFAULT_WINDOW_BYTES
    return [
        b"" if is_server else frames.PREFACE,
        frames.encode_settings(settings),
        frames.encode_window_update(0, more),
    ]


@final
class PeerSettings:
    """The settings of the peer as of its last frame."""

    __slots__ = ("_is_server", "frame_bytes", "must_shrink_table", "streams_max", "window_bytes")

    def __init__(self, *, is_server: bool) -> None:
        """Start with the defaults; `is_server` is our own role."""
        self._is_server = is_server
        self.window_bytes = frames.DEFAULT_WINDOW_BYTES  # of a new stream
        self.frame_bytes = frames.DEFAULT_FRAME_BYTES
        self.streams_max = frames.STREAM_ID_MAX
        # We use no table. A peer with a smaller one waits for a table size (RFC 7541 section 4.2).
        self.must_shrink_table = False

    def apply(self, payload: bytes) -> int:
        """Apply a SETTINGS frame; return the change of every stream's window.

        The windows change once per frame. Otherwise a frame with 2730 settings could let every
        stream send 2730 times.
        """
        if len(payload) % frames.SETTING_SIZE:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "a setting must have 6 bytes")
        before = self.window_bytes
        for setting, value in frames.decode_settings(payload):
            self._apply(setting, value)
        return self.window_bytes - before

    def _apply(self, setting: int, value: int) -> None:
        if setting == Setting.INITIAL_WINDOW_SIZE:
            if value > frames.WINDOW_MAX:
                raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "a window is too large")
            self.window_bytes = value
        elif setting == Setting.MAX_FRAME_SIZE:
            if not frames.DEFAULT_FRAME_BYTES <= value <= frames.FRAME_BYTES_LIMIT:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "the frame size is out of range")
            self.frame_bytes = value
        elif setting == Setting.ENABLE_PUSH:
            if value > 1 or (value and not self._is_server):
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is out of range")
        elif setting == Setting.MAX_CONCURRENT_STREAMS:
            self.streams_max = value
        elif setting == Setting.HEADER_TABLE_SIZE:
            # The smallest value must be announced, even if a larger one follows.
            self.must_shrink_table |= value < header_block.TABLE_BYTES
