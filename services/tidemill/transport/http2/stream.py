"""One stream of a connection: its state, its windows, and the data that waits for them."""

from __future__ import annotations

from collections import deque
from typing import Final, final

from tidemill.transport.http2.frames import ErrorCode, StreamFailure
from tidemill.transport.http2.stream_states import StreamState

RESETS_REMEMBERED: Final = 4_096  # more than the reset allowance and all streams of a peer


@final
class Stream:
    """One stream. Only its connection changes it."""

    __slots__ = (
        "content_bytes",
        "content_left",
        "header_bytes",
        "id",
        "large_bytes",
        "moved_at_s",
        "opened_at_s",
        "queue",
        "queued_bytes",
        "receive_window",
        "requested_bytes",
        "send_window",
        "state",
        "trailers",
        "unmoved_bytes",
        "unreturned_bytes",
    )

    def __init__(
        self, stream_id: int, *, send_window: int, receive_window: int, now_s: float
    ) -> None:
        self.id = stream_id
        self.send_window = send_window  # negative after the peer has reduced it
        self.receive_window = receive_window
        self.state = StreamState.OPEN
        self.queue: deque[memoryview] | None = None  # data that waits for a window
        self.queued_bytes = 0
        self.unmoved_bytes = 0  # sent from the queue since the last progress
        self.trailers: bytes | None = None  # to send after the queue
        self.unreturned_bytes = 0  # read by the application, not granted to the peer again yet
        self.large_bytes = 0  # granted by the connection's budget
        self.requested_bytes = 0  # requested from the budget
        self.content_bytes = 0  # received, without padding
        self.content_left = -1  # of content-length; -1 if unknown
        self.header_bytes = 0  # of the list with which the peer opened it
        self.opened_at_s = now_s
        self.moved_at_s = now_s  # the last time of received data or of progress in sending

    def count_content(self, count: int, *, is_last: bool) -> None:
        """Subtract received content; raise StreamFailure if it differs from content-length."""
        self.content_left -= count
        if self.content_left < 0 or (is_last and self.content_left):
            raise StreamFailure(
                self.id, ErrorCode.PROTOCOL_ERROR, "the content differs from content-length"
            )


@final
class RecentResets:
    """Streams that we reset recently; the peer may have sent frames before it knew."""

    def __init__(self) -> None:
        self._ids: dict[int, None] = {}

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._ids

    def add(self, stream_id: int) -> None:
        """Add a stream; if there are too many, remove the oldest."""
        if len(self._ids) >= RESETS_REMEMBERED:
            del self._ids[next(iter(self._ids))]
        self._ids[stream_id] = None

    def discard(self, stream_id: int) -> None:
        """Remove a stream after its last frame."""
        del self._ids[stream_id]
