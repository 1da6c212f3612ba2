"""The states of a stream, and what leads from one to the next (RFC 9113 section 5.1).

             ┌── LOCAL_END ──> LOCAL_CLOSED ── REMOTE_END ──┐
      OPEN ──┤                                              ├──> CLOSED
             └── REMOTE_END ─> REMOTE_CLOSED ─ LOCAL_END ───┘

    RESET follows every state but the last, by RST_STREAM of either side or with the connection.

A stream is open when it has a state at all: nobody pushes here, and an idle stream is one that
nobody has heard of. CLOSED and RESET are the last; their streams are forgotten.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class StreamState(IntEnum):
    """What may still be sent on a stream."""

    OPEN = 1
    LOCAL_CLOSED = 2  # we have sent our last frame
    REMOTE_CLOSED = 3  # the peer has
    CLOSED = 4
    RESET = 5


class StreamChange(IntEnum):
    """What happens to a stream."""

    LOCAL_END = 1
    REMOTE_END = 2
    RESET = 3


# What is not here does not happen: who ends a stream has seen that it may.
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

# In which the peer sends nothing more, and in which we do not.
REMOTE_ENDED: Final = frozenset({StreamState.REMOTE_CLOSED, StreamState.CLOSED, StreamState.RESET})
LOCAL_ENDED: Final = frozenset({StreamState.LOCAL_CLOSED, StreamState.CLOSED, StreamState.RESET})
