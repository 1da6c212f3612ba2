"""The states of a stream and their transitions (RFC 9113 section 5.1).

             ┌── LOCAL_END ──> LOCAL_CLOSED ── REMOTE_END ──┐
      OPEN ──┤                                              ├──> CLOSED
             └── REMOTE_END ─> REMOTE_CLOSED ─ LOCAL_END ───┘

    RESET follows every state except CLOSED, after RST_STREAM or the end of the connection.

A stream starts as OPEN, because there is no push. CLOSED and RESET are final; their streams are
removed.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class StreamState(IntEnum):
    """The state of a stream."""

    OPEN = 1
    LOCAL_CLOSED = 2  # we sent our last frame
    REMOTE_CLOSED = 3  # the peer sent its last frame
    CLOSED = 4
    RESET = 5


class StreamChange(IntEnum):
    """A change of a stream's state."""

    LOCAL_END = 1
    REMOTE_END = 2
    RESET = 3


# Other changes do not happen. The code that ends a stream checks its state first.
TRANSITIONS: Final[dict[StreamChange, dict[StreamState, StreamState]]] = {
    StreamChange.LOCAL_END: {
        StreamState.OPEN: StreamState.LOCAL_CLOSED,
        StreamState.REMOTE_CLOSED: StreamState.CLOSED,
    },
    StreamChange.REMOTE_END: {
        StreamState.OPEN: StreamState.REMOTE_CLOSED,
        StreamState.LOCAL_CLOSED: StreamState.CLOSED,
    },
    StreamChange.RESET: {
        StreamState.OPEN: StreamState.RESET,
        StreamState.LOCAL_CLOSED: StreamState.RESET,
        StreamState.REMOTE_CLOSED: StreamState.RESET,
    },
}
ON_LOCAL_END: Final = TRANSITIONS[StreamChange.LOCAL_END]
ON_REMOTE_END: Final = TRANSITIONS[StreamChange.REMOTE_END]
ON_RESET: Final = TRANSITIONS[StreamChange.RESET]

# States after the last frame of the peer, and states after ours.
REMOTE_ENDED: Final = frozenset({StreamState.REMOTE_CLOSED, StreamState.CLOSED, StreamState.RESET})
LOCAL_ENDED: Final = frozenset({StreamState.LOCAL_CLOSED, StreamState.CLOSED, StreamState.RESET})
