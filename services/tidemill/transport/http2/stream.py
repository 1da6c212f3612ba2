"""One stream of a connection: its state, its windows, and what waits for them."""

from __future__ import annotations

from collections import deque
from typing import Final, final

from tidemill.transport.http2.frames import ErrorCode, StreamFailure
from tidemill.transport.http2.stream_states import StreamState

RESETS_REMEMBERED: Final = 4_096  # more than a peer's allowance of resets and all its streams


@final
class Stream:
    """One stream; it belongs to its connection, others only read."""

    __slots__ = (
        "content_bytes",
        "content_left",
        "header_bytes",
        "id",
        "large_bytes",
        "moved_at_s",
        "opened_at_s",
        "owed_bytes",
        "queue",
        "queued_bytes",
        "receive_window",
        "send_window",
        "state",
        "trailers",
        "unmoved_bytes",
        "wanted_bytes",
    )

    def __init__(
        self, stream_id: int, *, send_window: int, receive_window: int, now_s: float
    ) -> None:
        self.id = stream_id
        self.send_window = send_window  # negative when the peer has lowered it
        self.receive_window = receive_window
        self.state = StreamState.OPEN
        self.queue: deque[memoryview] | None = None  # what waits for a window
        self.queued_bytes = 0
        self.unmoved_bytes = 0  # sent out of the queue since it last counted as moving
        self.trailers: bytes | None = None  # to be sent after the queue
        self.owed_bytes = 0  # read by the application, and not granted to the peer again yet
        self.large_bytes = 0  # granted out of the connection's budget
        self.wanted_bytes = 0  # what it waits for to be granted out of the budget
        self.content_bytes = 0  # received so far, without padding
        self.content_left = -1  # of content-length; -1 where the peer has not told
        self.header_bytes = 0  # of the list that opened it, as a peer opened it
        self.opened_at_s = now_s
        self.moved_at_s = now_s  # when something was last received, or sent out of the queue

    def count_content(self, count: int, *, is_last: bool) -> None:
        """Count content against what was announced; raise StreamFailure where they differ."""
        self.content_left -= count
        if self.content_left < 0 or (is_last and self.content_left):
            raise StreamFailure(
                self.id, ErrorCode.PROTOCOL_ERROR, "the content is not as long as announced"
            )


@final
class RecentResets:
    """Streams that we have reset, for a while: the peer may have sent more before it knew."""

    def __init__(self) -> None:
        self._ids: dict[int, None] = {}

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._ids

    def add(self, stream_id: int) -> None:
        """Remember a stream, and forget the oldest where there are many."""
        if len(self._ids) >= RESETS_REMEMBERED:
            del self._ids[next(iter(self._ids))]
        self._ids[stream_id] = None

    def discard(self, stream_id: int) -> None:
        """Forget a stream whose last frame has come."""
        del self._ids[stream_id]
