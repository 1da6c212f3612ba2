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


class State(IntEnum):
    """What may still be sent on a stream."""

    OPEN = 1
    LOCAL_CLOSED = 2  # we have sent our last frame
    REMOTE_CLOSED = 3  # the peer has
    CLOSED = 4
    RESET = 5


class Change(IntEnum):
    """What happens to a stream."""

    LOCAL_END = 1
    REMOTE_END = 2
    RESET = 3


# What is not here does not happen: who ends a stream has seen that it may.
TRANSITIONS: Final[dict[Change, dict[State, State]]] = {
    Change.LOCAL_END: {State.OPEN: State.LOCAL_CLOSED, State.REMOTE_CLOSED: State.CLOSED},
    Change.REMOTE_END: {State.OPEN: State.REMOTE_CLOSED, State.LOCAL_CLOSED: State.CLOSED},
    Change.RESET: {
        State.OPEN: State.RESET,
        State.LOCAL_CLOSED: State.RESET,
        State.REMOTE_CLOSED: State.RESET,
    },
}
ON_LOCAL_END: Final = TRANSITIONS[Change.LOCAL_END]
ON_REMOTE_END: Final = TRANSITIONS[Change.REMOTE_END]
ON_RESET: Final = TRANSITIONS[Change.RESET]

# In which the peer sends nothing more, and in which we do not.
REMOTE_ENDED: Final = frozenset({State.REMOTE_CLOSED, State.CLOSED, State.RESET})
LOCAL_ENDED: Final = frozenset({State.LOCAL_CLOSED, State.CLOSED, State.RESET})
