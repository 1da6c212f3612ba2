"""One stream of a connection: who may still send, and how much."""

from __future__ import annotations

from collections import deque
from typing import final


@final
class Stream:
    """State of a stream; it belongs to its connection, others only read.

    A stream is open for each direction until that side has sent its last frame, and is forgotten
    when both have, or one has reset it.
    """

    __slots__ = (
        "content_left",
        "id",
        "is_local_closed",
        "is_remote_closed",
        "is_reset",
        "large_bytes",
        "moved_at_s",
        "opened_at_s",
        "owed_bytes",
        "queue",
        "queued_bytes",
        "receive_window",
        "send_window",
        "trailers",
        "wanted_bytes",
    )

    def __init__(
        self, stream_id: int, *, send_window: int, receive_window: int, now_s: float
    ) -> None:
        self.id = stream_id
        self.send_window = send_window  # negative when the peer has lowered it
        self.receive_window = receive_window
        self.is_local_closed = False
        self.is_remote_closed = False
        self.is_reset = False  # by either side, or with its connection
        self.queue: deque[memoryview] | None = None  # what waits for a window
        self.queued_bytes = 0
        self.trailers: bytes | None = None  # to be sent after the queue
        self.owed_bytes = 0  # read by the application, and not granted to the peer again yet
        self.large_bytes = 0  # granted out of the connection's budget
        self.wanted_bytes = 0  # what it waits for to be granted out of the budget
        self.content_left = -1  # of content-length; -1 where the peer has not told
        self.opened_at_s = now_s
        self.moved_at_s = now_s  # when something was last received, or sent out of the queue
