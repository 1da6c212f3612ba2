"""The phases of a replica that follows a master, and the changes between them.

      ┌─────────────── DISCONNECT, from each phase but DIVERGED ───────────────┐
      v                                                                        │
    DISCONNECTED ── DIAL ──> DIALLING ── CONNECT ──> GREETING ── JOIN ──> FOLLOWING
      ^                                                 │                      │
      └────── RELEASE ────── DIVERGED <──── DIVERGE ────┴──────────────────────┘

A result of an earlier dial may arrive late, so CONNECT is possible in every phase.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final


class ReplicaPhase(Enum):
    """How far a replica is with its master."""

    DISCONNECTED = auto()  # until the next dial
    DIALLING = auto()
    GREETING = auto()  # it has sent Hello
    FOLLOWING = auto()
    DIVERGED = auto()  # an operator must decide, unless the group no longer needs this log


class PhaseChange(Enum):
    """An event that may change the phase."""

    DIAL = auto()  # the pause after the last stream is over
    CONNECT = auto()  # a dial has opened a stream
    JOIN = auto()  # the log is a prefix of the master's
    DIVERGE = auto()  # it is not, and this replica may not cut it
    DISCONNECT = auto()  # the stream has ended, or a dial has failed
    RELEASE = auto()  # the group no longer needs this log, so the replica may copy the master's


# A pair that is missing here does not change the phase.
TRANSITIONS: Final[dict[PhaseChange, dict[ReplicaPhase, ReplicaPhase]]] = {
    PhaseChange.DIAL: {ReplicaPhase.DISCONNECTED: ReplicaPhase.DIALLING},
    PhaseChange.CONNECT: dict.fromkeys(ReplicaPhase, ReplicaPhase.GREETING),
    PhaseChange.JOIN: {
        ReplicaPhase.GREETING: ReplicaPhase.FOLLOWING,
        ReplicaPhase.FOLLOWING: ReplicaPhase.FOLLOWING,
    },
    PhaseChange.DIVERGE: {
        ReplicaPhase.GREETING: ReplicaPhase.DIVERGED,
        ReplicaPhase.FOLLOWING: ReplicaPhase.DIVERGED,
    },
    PhaseChange.DISCONNECT: {
        ReplicaPhase.DISCONNECTED: ReplicaPhase.DISCONNECTED,
        ReplicaPhase.DIALLING: ReplicaPhase.DISCONNECTED,
        ReplicaPhase.GREETING: ReplicaPhase.DISCONNECTED,
        ReplicaPhase.FOLLOWING: ReplicaPhase.DISCONNECTED,
    },
    PhaseChange.RELEASE: {ReplicaPhase.DIVERGED: ReplicaPhase.DISCONNECTED},
}
