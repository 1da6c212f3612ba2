"""The first heartbeat of a replica that is attached when the view is known already."""

from __future__ import annotations

import socket

from tests.unit.broker.test_supervisor_port import ME, Replica
from tidemill.broker.controller_link.frames import FrameReader
from tidemill.broker.controller_link.port import ReplicaStatus, SupervisorPort
from tidemill.common.replica_group import ReplicationView
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.transport.replica_wire import to_view


class Learner(Replica):
    """A replica that begins another life in the same process."""

    version = 0

    def learn(self, view: ReplicationView) -> None:
        self.version = view.version

    def status(self) -> ReplicaStatus:
        return super().status()._replace(version_seen=self.version)


def test_the_first_heartbeat_includes_the_view_that_the_replica_learns_when_attached() -> None:
    view = ReplicationView(
        epoch=3, version=7, master=ME, sss=frozenset({ME}), eligible=frozenset(), min_in_sync=1
    )
    ours, theirs = socket.socketpair()
    with ours:
        port = SupervisorPort(theirs.detach())
        port._receive(wire.SessionDown(view=to_view(view)))
        port.attach(Learner())
        sent = [wire.SessionUp.FromString(one) for one in FrameReader().receive(ours.recv(4096))]
        port._socket.close()
    assert [one.WhichOneof("message") for one in sent] == ["register", "heartbeat"]
    assert sent[1].heartbeat.version_seen == view.version
