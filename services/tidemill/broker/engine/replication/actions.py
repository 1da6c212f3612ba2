"""Actions that the machines of this package request from the shell or from a simulation.

The caller carries them out in order. Changes to the log are not actions: the machines make them
directly.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from tidemill.broker.engine.replication.messages import ToMaster, ToReplica
from tidemill.common.replica_group import Proposal, ReplicaId, ReplicaRun, ReplicationView

Stream = int  # number of a stream; the caller assigns it and never reuses it


class StreamDial(NamedTuple):
    """An order to open a stream to the master.

    The caller reports `handle_connected`, or `handle_closed` if it cannot connect.
    """

    master: ReplicaRun
    address: str


class StreamSend(NamedTuple):
    """A message for a stream."""

    stream: Stream
    message: ToReplica | ToMaster


class StreamClose(NamedTuple):
    """An order to close a stream. The caller reports no event of this stream afterwards."""

    stream: Stream
    why: str


class SetProposal(NamedTuple):
    """A proposal of the sync state set for the controllers."""

    proposal: Proposal


class MastershipRelease(NamedTuple):
    """A request to the controllers to elect `target` in place of this master."""

    epoch: int
    version: int
    master: ReplicaRun
    target: ReplicaId
    paused_ms: int = 0  # how long this master rejected sends


class Promotion(NamedTuple):
    """This replica became the master of an epoch.

    It accepts sends. Their effects wait for `confirm`.
    """

    view: ReplicationView


class StepDown(NamedTuple):
    """This replica has stepped down. The outcome of unconfirmed work is unknown.

    The caller closes the engine, opens it again (ADR 0040) and makes a new `Replication`.
    """

    why: str


class DivergenceAlarm(NamedTuple):
    """An alarm: this replica's log differs from its master's, and no process may cut it."""

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
