"""What the machines of this package want done by who carries them: the shell, or a simulation.

Actions are done in their order. What concerns the log itself is no action: it was done in place.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from tidemill.broker.engine.replication.messages import ToMaster, ToReplica
from tidemill.common.replica_group import Proposal, ReplicaId, ReplicaRun, ReplicationView

Stream = int  # a stream's number, which who carries it gives; never used twice


class StreamDial(NamedTuple):
    """Open a stream to the master; tell `dialled`, or `closed` when it cannot be done."""

    master: ReplicaRun
    address: str


class StreamSend(NamedTuple):
    """Send on a stream."""

    stream: Stream
    message: ToReplica | ToMaster


class StreamClose(NamedTuple):
    """End a stream; nothing is heard of it again."""

    stream: Stream
    why: str


class SetProposal(NamedTuple):
    """Tell the controllers what the sync state set should be."""

    proposal: Proposal


class MastershipRelease(NamedTuple):
    """Ask the controllers to elect `target` in place of this master."""

    epoch: int
    version: int
    master: ReplicaRun
    target: ReplicaId
    paused_ms: int = 0  # for how long no sends were taken


class Promotion(NamedTuple):
    """This replica is the master of an epoch: sends are taken; effects wait for `confirm`."""

    view: ReplicationView


class StepDown(NamedTuple):
    """This replica is master no more. Whatever waits for a confirmation has an unknown outcome.

    The engine is closed and opened again (ADR 0040), and a new `Replication` made.
    """

    why: str


class DivergenceAlarm(NamedTuple):
    """This replica's log is not its master's, and nobody may cut it: an alarm."""

    why: str


Action: TypeAlias = (
    StreamDial
    | StreamSend
    | StreamClose
    | SetProposal
    | MastershipRelease
    | Promotion
    | StepDown
    | DivergenceAlarm
)
