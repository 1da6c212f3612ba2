"""What the machines of this package want done by who carries them: the shell, or a simulation.

Actions are done in their order. What concerns the log itself is no action: it was done in place.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from tidemill.broker.engine.replication.messages import ToMaster, ToReplica
from tidemill.common.replica_group import Proposal, ReplicaId, ReplicaRun, ReplicationView

Stream = int  # a stream's number, which who carries it gives; never used twice


class Dial(NamedTuple):
    """Open a stream to the master; tell `dialled`, or `closed` when it cannot be done."""

    master: ReplicaRun
    address: str


class Send(NamedTuple):
    """Send on a stream."""

    stream: Stream
    message: ToReplica | ToMaster


class Close(NamedTuple):
    """End a stream; nothing is heard of it again."""

    stream: Stream
    why: str


class Propose(NamedTuple):
    """Tell the controllers what the sync state set should be."""

    proposal: Proposal


class Release(NamedTuple):
    """Ask the controllers to elect `target` in place of this master."""

    epoch: int
    version: int
    master: ReplicaRun
    target: ReplicaId
    paused_ms: int = 0  # for how long no sends were taken


class Promoted(NamedTuple):
    """This replica is the master of an epoch: sends are taken; effects wait for `confirm`."""

    view: ReplicationView


class StepDown(NamedTuple):
    """This replica is master no more. Whatever waits for a confirmation has an unknown outcome.

    The engine is closed and opened again (ADR 0040), and a new `Replication` made.
    """

    why: str


class Diverging(NamedTuple):
    """This replica's log is not its master's, and nobody may cut it: an alarm."""

    why: str


Action: TypeAlias = Dial | Send | Close | Propose | Release | Promoted | StepDown | Diverging
