"""The interfaces between the parts of this room and to the controllers, as protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tidemill.broker.controller_link.port import ControlledReplica
    from tidemill.broker.engine.replication.actions import MastershipRelease
    from tidemill.broker.engine.replication.messages import Ack, Hello, ToReplica
    from tidemill.broker.server.replicas.frames import LogFloor
    from tidemill.common.replica_group import Proposal, ReplicaRun, ReplicationView


class LocalReplica(Protocol):
    """This replica: its name, its role and the newest view that it knows."""

    @property
    def me(self) -> ReplicaRun:
        """The name of this run of the replica."""

    @property
    def is_master(self) -> bool:
        """Whether this replica is the master, as far as it knows."""

    @property
    def view(self) -> ReplicationView | None:
        """The newest view; None before the first one."""


class StreamReceiver(Protocol):
    """The receiver of stream events; it handles each one at once."""

    def handle_hello(self, number: int, message: Hello) -> None:
        """Begin to serve a following replica."""

    def handle_ack(self, number: int, message: Ack) -> None:
        """Note how far a replica has the log."""

    def handle_message(self, number: int, message: ToReplica | LogFloor) -> None:
        """Process a message of the master."""

    def handle_connected(self, number: int) -> None:
        """Begin to follow: the stream to the master is open."""

    def handle_closed(self, number: int | None) -> None:
        """Note the end of a stream; None if the dialled master did not answer."""


class ControllerPort(Protocol):
    """The way to the controllers. While they are down, the replica repeats its requests."""

    def attach(self, replicas: ControlledReplica) -> None:
        """Report decisions to `replicas` from now on, the newest one at once.

        Called again after the store was opened again; only the last receiver counts.
        """

    def propose(self, proposal: Proposal) -> None:
        """Propose a sync state set."""

    def release(self, release: MastershipRelease) -> None:
        """Ask for another master."""
